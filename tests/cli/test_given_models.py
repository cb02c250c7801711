"""What commands say to the models and adapters that people give them: each is served, or refused in one sentence."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_attach import SMALL
from tiny import EOS, PAD, VOCAB_SIZE, randomize, tiny_model, tiny_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from wedlm_hf import add_mask_adapter, cli

STOCK = (
    "a model of type 'llama', not a WeDLM checkpoint: pass its mask adapter (`--adapter`, in Python "
    "`load_mask_adapter`), train one (`wedlm adapt MODEL OUT`), or make a WeDLM checkpoint of it (`wedlm convert "
    "MODEL OUT`) and train that."
)


def llama(hidden_size: int = 32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD, "eos_token_id": EOS}
    return randomize(LlamaForCausalLM(LlamaConfig(**sizes | heads)), seed)


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory):
    """A stock model and a WeDLM one, with a LoRA and mask adapters of them and of others."""
    place = tmp_path_factory.mktemp("given")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, model in {"stock": llama(), "wedlm": tiny_model()}.items():
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
        for name, base in {"mask": llama(), "other": llama(seed=1), "wide": llama(64)}.items():
            base.config.name_or_path = "stock"
            for parameter in add_mask_adapter(base, SMALL).parameters():
                nn.init.normal_(parameter, std=0.2)
            base.save_mask_adapter(name)
        for name, base in {"lora": tiny_model(), "stock-lora": llama()}.items():
            base.name_or_path = "stock" if "stock" in name else "wedlm"
            config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            get_peft_model(base, config).save_pretrained(name)
        shutil.copytree("mask", "moved")
        config = Path("moved", "adapter_config.json")
        config.write_text(config.read_text().replace('"stock"', '"gone.gguf"'))
        Path("empty").mkdir()
        Path("notes.txt").write_text("These are notes.\n")
        shutil.copy("notes.txt", "model.gguf")
        Path("data.jsonl").write_text('{"prompt": "1, 2, 3", "answer": "4"}\n')
        yield


def command(*words: str) -> str:
    """Runs it; what it says of an error."""
    result = CliRunner().invoke(cli.app, words, input="")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stderr.count("Error: ")) in ((0, 0), (2, 1)), result.stderr
    return result.stderr.partition("Error: ")[2].strip()


def generated(model: str, *adapter: str) -> str:
    options = ["--adapter", *adapter] if adapter else []
    return command("generate", "1, 2", "--model", model, *options, "--max-new-tokens", "3", "--raw", "--no-compare")


@pytest.mark.parametrize("given", [("wedlm",), ("lora",), ("mask",), ("wedlm", "lora"), ("stock", "mask")])
def test_models_adapters_and_both_are_served(given):
    assert generated(*given) == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("none.gguf",), "There is no GGUF file 'none.gguf'."),
        (("empty",), "There is no checkpoint in 'empty': it has no config.json."),
        (("notes.txt",), "The checkpoint must be a folder or a Hub id, got the file 'notes.txt'."),
        (("stock",), f"'stock' is {STOCK}"),
        (("model.gguf",), "'model.gguf' is a GGUF file, not a WeDLM checkpoint: pass its mask adapter (`--adapter`, "),
        (("stock-lora",), f"'stock' is {STOCK}"),
        (("moved",), "The base of the adapter 'moved': There is no GGUF file 'gone.gguf'; `--model BASE --adapter mo"),
        (("stock", "stock-lora"), f"'stock' is {STOCK}"),
        (("stock", "stock"), "There is no adapter in 'stock': it has no adapter_config.json."),
        (("stock", "./none"), "There is no adapter folder './none'."),
        (("stock", "notes.txt"), "The adapter must be a folder or a Hub id, got the file 'notes.txt'."),
        (("stock", "other"), "The mask adapter was trained for another model of this shape: the weights differ."),
        (("stock", "wide"), "The mask adapter belongs to another base than this model (hidden_size: 64, not 32"),
        (("wedlm", "mask"), "The mask adapter belongs to another base than this model (head_dim: 8, not 16)."),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(given, message):
    assert message in generated(*given)


@pytest.mark.parametrize(
    "words",
    [
        ["report", "stock", "--file", "data.jsonl"],
        ["merge", "stock", "stock-lora", "out"],
        ["push", "stock", "you/it", "--dry-run", "--license", "mit"],
    ],
    ids=" ".join,
)
def test_every_command_says_what_helps_with_a_stock_model(words):
    assert command(*words) == f"'stock' is {STOCK}"


@pytest.mark.parametrize(
    "words", [["convert", "lora", "out"], ["adapt", "mask", "out", "--tokens", "9"]], ids=" ".join
)
def test_an_adapter_is_not_taken_for_a_model(words):
    assert command(*words) == f"There is no checkpoint in {words[1]!r}: it holds an adapter, not a model."


def test_a_stock_model_with_its_adapter_can_be_watched():
    words = ["trace", "1, 2", "--model", "stock", "--adapter", "mask", "--max-new-tokens", "6", "--raw"]
    assert command(*words, "--repeats", "1", "--output", "page.html") == ""
    assert '"kinds"' in Path("page.html").read_text()
