"""The scripts in `benchmarks/` run, on tiny models, and their tables hold what cannot be otherwise."""

import json

import fixed_windows
import pytest
import random_weights
import step_time
import torch
import training_methods
import vllm_baseline
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from wedlm_hf import add_mask_adapter
from wedlm_hf.adapters.mask_adapter import MaskAdapterSettings
from wedlm_hf.eval.decoders import DECODERS
from wedlm_hf.eval.prompts import Prompt

PROMPTS = [[20, 40, 9, 31, 77], [11, 12, 13], [50, 60, 70, 80, 90, 100, 110, 120]]


def test_random_weights_are_measured_by_decoder_batch_size_and_length():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = random_weights.random_model(sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8})
    table = random_weights.by_batch_size(model, [1, 2], 4, repeats=1)
    assert list(table.index) == [(size, name) for size in (1, 2) for name in DECODERS]
    assert (table["tokens/s"] > 0).all() and table.loc[(2, "ar"), "tokens per forward"] == 1
    table = random_weights.by_length(model, (8, 40), repeats=1)
    assert (table["ms a step"] > table["in the forward"]).all() and table.loc[("ar", 40), "slots"] == 1


def test_fixed_windows_are_compared_with_the_default(model, tokenizer):
    prompts = [fixed_windows.encode_prompt(model, tokenizer, Prompt.of("count", tokens=ids)) for ids in PROMPTS]
    table = fixed_windows.compare(model, tokenizer, prompts, [1, 4], 2, 6)
    assert list(table.index) == ["ar", "wedlm+exact", "window 1", "window 4"]
    assert table.loc["ar", "tokens per forward"] == table.loc["ar", "speed against AR"] == 1


def test_an_exported_checkpoint_is_a_stock_one_with_the_same_logits(tmp_path, model):
    vllm_baseline.export_stock(model, tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor(PROMPTS[:1])
    assert type(loaded) is Qwen3ForCausalLM and not list(tmp_path.glob("*.py"))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_ways_to_train_a_mask_adapter_and_the_parts_of_its_step_are_measured(tmp_path, capsys):
    base, answers = tiny_model(), tmp_path / "answers.jsonl"
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lines = [{"prompt_ids": prompt, "response_ids": [*prompt[::-1], *prompt], "greedy": True} for prompt in PROMPTS]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    training_methods.train(
        "gated-head", str(tmp_path / "base"), answers, tmp_path / "out", mask_rows=200, also=answers
    )
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["mask_rows"] >= 200 and all(rate >= 1 for rate in found["tokens_per_forward"])

    add_mask_adapter(base, MaskAdapterSettings(rank=2, head_width=4))
    base.save_mask_adapter(tmp_path / "adapter")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "count to ten"}\n' * 2)
    capsys.readouterr()
    step_time.main(
        str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "prompts.jsonl", "float32", [2], 2, 16
    )
    header, _, *rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [name.strip() for name in header[1:]] == ["1 row", "9 rows, 6 of them masks"]
    times = {name.strip(): [float(each) for each in found] for name, *found in rows}
    columns = list(zip(*times.values(), strict=True))
    assert len(times) == 9 and all(sum(parts) == pytest.approx(whole, abs=0.6) for *parts, whole in columns)
    assert times["updates of masks"][1] > 0
