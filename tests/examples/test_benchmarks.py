"""The scripts in `benchmarks/`: what they measure, on tiny models and with an engine that stands for vLLM's."""

import json

import fixed_windows
import pytest
import random_weights
import step_time
import torch
import training_methods
import vllm_baseline
from tiny import EOS, MASK, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.eval.decoders import DECODERS
from wedlm_hf.eval.prompts import Prompt

PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120]]


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    model.generation_config.suppress_tokens = [MASK]
    return model


@pytest.fixture(scope="module")
def random_model():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return random_weights.random_model({**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8})


def test_random_weights_are_measured_by_batch_size_and_decoder(random_model):
    table = random_weights.by_batch_size(random_model, [1, 2], 4, repeats=1)
    assert list(table.index) == [(size, name) for size in (1, 2) for name in DECODERS]
    assert (table["own cost"] > 0).all() and (table["tokens/s"] > 0).all()
    assert table.loc[(2, "ar"), "tokens per forward"] == 1


def test_steps_of_long_answers_are_measured(random_model):
    table = random_weights.by_length(random_model, (8, 40), repeats=1)
    assert sorted(table.index) == sorted((name, n) for n in (8, 40) for name in ("ar", "wedlm", "wedlm+exact"))
    assert (table["ms a step"] > table["in the forward"]).all()
    assert table.loc[("ar", 40), "slots"] == 1


# --- vLLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "stock"), [("qwen3", Qwen3ForCausalLM), ("qwen2.5", Qwen2ForCausalLM)])
def test_an_exported_checkpoint_is_a_stock_one_with_the_same_logits(tmp_path, style, stock):
    model = tiny_model(style)
    vllm_baseline.export_stock(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is stock
    assert loaded.generation_config.eos_token_id == EOS
    ids = torch.tensor(PROMPTS[:1])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert not list(tmp_path.glob("*.py"))


FAKE_VLLM = """
import json, os, pathlib, sys
from types import SimpleNamespace
__version__ = "0.0"
print("a line that is no answer")
class LLM:
    def __init__(self, **keywords):
        config = json.loads((pathlib.Path(keywords["model"]) / "config.json").read_text())
        if config["model_type"] != "qwen3" or keywords["max_model_len"] == 13:
            raise RuntimeError("no such model")
        assert keywords["dtype"] == "float32" and not keywords["enable_prefix_caching"]
    def generate(self, prompts, sampling, use_tqdm):
        answers = [prompt["prompt_token_ids"][::-1][:sampling.max_tokens] for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]
SamplingParams = SimpleNamespace
"""


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A module `vllm` for the worker, whose engine answers with the prompt backwards."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_vllm_takes_turns_in_a_process_of_its_own(model, fake_vllm):
    with vllm_baseline.VllmDecoder(model, tiny_tokenizer(), max_new_tokens=2, longest=64) as vllm:
        assert vllm.version == "0.0"
        assert [decoding.tokens for decoding in vllm(PROMPTS[:2])] == [[77, 31], [13, 12]]
        table = vllm_baseline.compare(
            model, tiny_tokenizer(), PROMPTS, vllm, max_new_tokens=2, batch_size=3, repeats=1
        )
    assert list(table.index) == [*DECODERS, "vllm ar"]
    assert table.loc["ar", "speed against AR"] == 1 and (table > 0).all().all()
    assert vllm._process.returncode is not None


@pytest.mark.parametrize("way", ["acceptance", "by-confidence", "second", "gated-head"])
def test_ways_to_train_a_mask_adapter_are_measured_alike(tmp_path, way, capsys):
    tiny_model().save_pretrained(tmp_path / "base")
    answers = [{"prompt_ids": prompt, "response_ids": [*prompt[::-1], *prompt], "greedy": True} for prompt in PROMPTS]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    where = str(tmp_path / "base"), tmp_path / "answers.jsonl", tmp_path / "out"
    training_methods.train(way, *where, mask_rows=200, also=tmp_path / "answers.jsonl")
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["mask_rows"] >= 200 and len(found["tokens_per_forward"]) == 4
    assert all(rate >= 1 for rate in found["tokens_per_forward"])
    assert f"| {way} | " in capsys.readouterr().out


def test_the_parts_of_a_step_add_up(model, tmp_path, capsys):
    adapted = tiny_model()
    add_mask_adapter(adapted, MaskAdapterSettings(rank=2, head_width=4))
    adapted.save_pretrained(tmp_path / "base")
    adapted.save_mask_adapter(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count to ten"}\n' * 2)
    step_time.main(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "prompts.jsonl", "float32", 2, 2, 8)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    times = {name.strip(): float(time) for _, name, time, _, _ in lines}
    assert len(times) == 8
    assert all(time >= 0 for time in times.values())
    assert times["updates of the mask adapter"] + times["norms"] + times["matrices of the base and its head"] > 0


def test_fixed_windows_are_compared_with_the_default(model):
    prompts = [fixed_windows.encode_prompt(model, tiny_tokenizer(), Prompt.of("count", tokens=ids)) for ids in PROMPTS]
    table = fixed_windows.compare(model, tiny_tokenizer(), prompts, [1, 4], 2, 6)
    assert list(table.index) == ["ar", "wedlm+exact", "window 1", "window 4"]
    assert table.loc["ar", "tokens per forward"] == table.loc["ar", "speed against AR"] == 1
    assert (table["tokens/s"] > 0).all()
