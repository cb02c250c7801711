"""Which checkpoints start on vLLM, mask adapters, and what is refused at start-up."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import vllm
from vllm.v1.sample import rejection_sampler

from wedlm_hf import WeDLMConfig, WeDLMForCausalLM
from wedlm_hf.serving.vllm.options import PROPOSER
from wedlm_hf.serving.vllm.plugin import register
from wedlm_hf.serving.vllm.runner import expand_batch_to_tokens

SMOLLM2_ADAPTER = Path(__file__).parents[3] / "examples" / "smollm2"
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10000.0, "max_position_embeddings": 256, "eos_token_id": 2,
    "pad_token_id": 0, "bos_token_id": 1, "mask_token_id": 3,
}  # fmt: skip
STYLES = {
    "qwen3": {},
    "qwen2.5": {"qk_norm": False, "attention_bias": True, "tie_word_embeddings": True},
    "llama": {"qk_norm": False, "rope_theta": None, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }},
    "published": {"vocab_size": 151936, "mask_token_id": None, "eos_token_id": 151645, "pad_token_id": None},
}  # fmt: skip
LOSSY = {"model": PROPOSER, "num_speculative_tokens": 8, "rejection_sample_method": "fly"}


@pytest.mark.parametrize("style", STYLES)
def test_checkpoints_of_every_style_decode_as_in_transformers(tmp_path, start, complete, style):
    torch.manual_seed(0)
    config = WeDLMConfig(**{key: value for key, value in (SIZES | STYLES[style]).items() if value is not None})
    model = WeDLMForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    model.save_pretrained(tmp_path)
    if style == "published":  # as these state it
        stored = json.loads((tmp_path / "config.json").read_text())
        rope = stored.pop("rope_parameters")
        stored |= {"mask_token_id": None, "rope_theta": rope["rope_theta"], "rope_scaling": None}
        (tmp_path / "config.json").write_text(json.dumps(stored))
    prompts = torch.randint(4, 300, (3, 20)).tolist()
    engine = start(tmp_path, tokens=6, skip_tokenizer_init=True, max_model_len=128, num_gpu_blocks_override=64)
    outputs = complete(engine, prompts, max_tokens=24, detokenize=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        mask = [config.mask_token_id]
        expected = model.generate(ids, attention_mask=ids >= 0, max_new_tokens=24, suppress_tokens=mask)
        assert list(output.token_ids) == expected[0, 20:].tolist()


def test_a_mask_adapter_drafts_as_in_transformers_and_leaves_the_answers_as_they_are(
    ar, start, prompts, complete, random_adapter, metrics
):
    folder, model = random_adapter
    own = {"mask_adapter": str(folder), "always_draft": True}
    engine = start(tokens=12, additional_config={"wedlm": own}, num_gpu_blocks_override=256)
    adapter = engine.llm_engine.model_executor.driver_worker.model_runner.model.adapter
    seen, draft = [], adapter.draft

    def spy(owner, hidden, logits, before):
        seen.append((hidden.clone(), logits.clone(), before.clone(), *draft(owner, hidden, logits, before)))
        return seen[-1][3:]

    adapter.draft = spy
    prompt = prompts[0]
    output = complete(engine, [prompt], max_tokens=32)[0]
    hidden, logits, before, drafts, _ = seen[0]
    slots, first = hidden.shape[1], output.token_ids[0]
    ids = torch.tensor([[*prompt, first, *[3] * slots]])
    positions = torch.tensor([[*range(len(prompt) + 1), *range(len(prompt) + 2, len(prompt) + 2 + slots)]])
    with model.predicting(slots) as caught:
        expected = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=True)
    assert torch.allclose(hidden, caught.hidden, atol=1e-3)
    keep = torch.arange(logits.shape[-1]) != 3
    assert torch.allclose(logits[..., keep], expected.logits[:, -slots:][..., keep], atol=1e-3)
    assert before.tolist() == [list(output.token_ids[:2])]
    scores = model.lm_head(model.draft_hidden(caught.hidden[:, 0], before))
    assert drafts[0, 0] == scores[:, keep].argmax() + (scores[:, keep].argmax() >= 3)
    adapter.draft = draft
    expected_tokens = [list(each.token_ids) for each in complete(ar, prompts[:12])]
    assert [list(each.token_ids) for each in complete(engine, prompts[:12])] == expected_tokens


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (1, {}, "`num_speculative_tokens`.*between 2 and 128, got 1"),
        (129, {}, "`num_speculative_tokens`.*between 2 and 128, got 129"),
        (8, {"additional_config": {"wedlm": {"adapter": "x"}}}, "may hold 'mask_adapter'.*got {'adapter': 'x'}"),
        (0, {"additional_config": {"wedlm": {"mask_adapter": str(SMOLLM2_ADAPTER)}}}, "decoding, which is off"),
        (8, {"additional_config": {"wedlm": {"mask_adapter": str(SMOLLM2_ADAPTER)}}}, "belongs to another base"),
        (8, {"additional_config": {"wedlm": {"mask_adapter": "no/folder"}}}, "no/folder"),
        (8, {"scheduler_cls": "my.Scheduler"}, "scheduler of its own"),
        (0, {"speculative_config": LOSSY}, "`rejection_sample_method`.*must be 'standard', got 'fly'"),
    ],
)
def test_options_that_cannot_be_honoured_are_named_at_start_up(start, tokens, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        start(tokens=tokens, **options)


def test_the_runner_is_the_one_that_vllm_takes_by_itself(verified, start, monkeypatch):
    assert not verified.llm_engine.vllm_config.use_v2_model_runner
    monkeypatch.setitem(vars(vllm.envs), "VLLM_USE_V2_MODEL_RUNNER", True)  # it has read the environment
    with pytest.raises(ValueError, match="Model Runner V2 does not yet support: speculative method 'custom_class'"):
        start(tokens=8)


def test_a_checkpoint_without_a_mask_token_is_refused_for_drafting_alone(tmp_path, start, nano, prompts, complete):
    shutil.copytree(nano, tmp_path / "nano", ignore=shutil.ignore_patterns("results"))
    config = json.loads((nano / "config.json").read_text())
    (tmp_path / "nano" / "config.json").write_text(json.dumps(config | {"mask_token_id": None}))
    with pytest.raises(ValueError, match="needs a mask token"):
        start(tmp_path / "nano", tokens=8)
    engine = start(tmp_path / "nano", num_gpu_blocks_override=64)
    assert complete(engine, prompts[:1], max_tokens=4)[0].token_ids


def test_the_proposer_is_for_wedlm_checkpoints(tmp_path, start):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {key: value for key, value in SIZES.items() if key != "mask_token_id"}
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match="for WeDLM checkpoints"):
        start(tmp_path, tokens=8, skip_tokenizer_init=True, max_model_len=128, num_gpu_blocks_override=64)


def test_another_version_of_vllm_is_named_at_start_up(monkeypatch, start):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(ValueError, match=r"up to, not including, 0\.34; installed is vLLM 0\.34\.0"):
        start()
    register()  # other models are served as ever


def test_drafts_on_a_cpu_have_the_temperature_of_their_request(verified):  # which replaces the function
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    for expand in (rejection_sampler.expand_batch_to_tokens, expand_batch_to_tokens):
        values = expand(torch.tensor([0.5, 0.0, 2.0]), counts, 5, 0, 1)
        assert values.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
        assert expand(torch.tensor([0, 4, 0]), counts, 5, 0, 9).tolist() == [9, 9, 9, 9, 9]
