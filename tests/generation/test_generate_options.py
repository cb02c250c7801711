"""Everything else that users expect of `generate`: honoured exactly, or refused with one clear error."""

import json
import pickle
import threading
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from peft import PromptTuningConfig, get_peft_model
from test_generation import Recorder, generate, monotonous, no_forward
from tiny import EOS, MASK, PAD, VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer, pipeline
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, SynthIDTextWatermarkingConfig

from wedlm_hf.generation import WeDLMGenerationSettings, WindowCache
from wedlm_hf.generation.versions import CACHE, cache_of
from wedlm_hf.modeling_wedlm import WeDLMForCausalLM

PROMPT = torch.tensor([[20, 40, 9, 31, 77]])
FAST = {"strategy": "wedlm", "entropy_threshold": 2.0, "max_new_tokens": 20}
EXACT = {"strategy": "wedlm", "max_new_tokens": 20, "verification": "exact", "slot_cost": 0.04}


def storing(options):
    """A model whose generation config holds these settings."""
    model = tiny_model()
    vars(model.generation_config).update(options)
    return model


def prompts(*rows):
    ids = torch.tensor(rows, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "diffusion"}, "`strategy` must be one of 'ar', 'wedlm', 'block', got 'diffusion'"),
        ({"verification": "maybe"}, "`verification` must be one of 'none', 'exact', got 'maybe'"),
        ({"window_size": 0}, "`window_size` must be an integer of at least 1, got 0"),
        ({"window_size": 2.5}, "`window_size` must be an integer of at least 1, got 2.5"),
        ({"window_size": True}, "`window_size` must be an integer of at least 1, got True"),
        ({"entropy_threshold": -0.1}, "`entropy_threshold` must be a number of at least 0, got -0.1"),
        ({"entropy_threshold": float("nan")}, "`entropy_threshold` must be a number of at least 0, got nan"),
        ({"entropy_threshold": "0.4"}, "`entropy_threshold` must be a number of at least 0, got '0.4'"),
        ({"distance_penalty": -1}, "`distance_penalty` must be a number of at least 0, got -1"),
        ({"output_trace": 1}, "`output_trace` must be True or False, got 1"),
        ({"slot_cost": 0.1}, "`slot_cost=0.1` goes with `verification='exact'`"),
        ({"slot_cost": "low"}, "`slot_cost` must be a finite number of at least 0, got 'low'"),
        ({"slot_cost": {1: 2.0, 4: 3.0}}, "`slot_cost` must be a finite number of at least 0, got {1: 2.0, 4: 3.0}"),
        ({"slot_cost": float("inf")}, "`slot_cost` must be a finite number of at least 0"),
        ({"labels": PROMPT}, r"has no use for the inputs \['labels'\]"),
        ({"strategy": "block", "verification": "exact"}, "`verification='exact'` goes with `strategy='wedlm'`"),
        ({"mask_token_id": VOCAB_SIZE}, "`mask_token_id` must lie in the vocabulary \\(0 to 319\\), got 320"),
        ({"mask_token_id": 3.0}, "`mask_token_id` must be an integer, got 3.0"),
        ({"mask_token_id": EOS}, "`mask_token_id` must differ from the end token, got 2"),
        ({"mask_token_id": PAD}, "`mask_token_id` must differ from the padding token, got 0"),
        ({"strategy": "ar"}, "has no meaning with `strategy='ar'`: pass `strategy='wedlm'` too"),
        ({"strategy": "ar", "entropy_threshold": None, "output_trace": True}, "has no meaning with `strategy='ar'`"),
        ({"cache_implementation": "offloaded_static"}, "`cache_implementation='offloaded_static'` is not supported"),
        ({"cache_implementation": "quantized"}, "`cache_implementation='quantized'` is not supported"),
        ({"cache_implementation": "paged"}, "`cache_implementation='paged'` is not supported"),
        ({"windw_size": 4}, "The following `model_kwargs` are not used by the model: \\['windw_size'\\]"),
        ({CACHE: DynamicCache()}, "Parallel decoding needs a `WindowCache`.* got DynamicCache"),
        (prompts([5, 6, 7], [5, 6, 0]), "left-padded, but row 1 has padding after a token"),
        (prompts([]), "The prompt of row 0 is empty"),
        (prompts([5, 6, 7], [0, 0, 0]), "The prompt of row 1 is empty"),
        (prompts([5, 6, 7]) | {"attention_mask": torch.tensor([[0, 1]])}, "must have the shape of `input_ids`, got "),
    ],
)
def test_settings_and_prompts_that_mean_nothing_are_refused_before_any_forward(model, options, message):
    with no_forward(model), pytest.raises(ValueError, match=message):
        model.generate(**{"input_ids": PROMPT} | FAST | options)


def checkpointing():
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny_model(mask_token_id=None), "needs a mask token, but neither the model config nor the gener"),
        (checkpointing, "Gradient checkpointing in training mode leaves no cache"),
        (lambda: get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
         "`prepare_inputs_for_generation` was replaced"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_decode_in_parallel_is_told_why(make, message):
    with pytest.raises(ValueError, match=message):
        make().generate(input_ids=PROMPT, **FAST)


def test_a_prompt_beyond_the_context_is_taken_with_a_warning_as_ar_takes_it(caplog):
    model, prompt = tiny_model(max_position_embeddings=64), torch.arange(70, 150)[None]
    expected = model.generate(prompt, max_new_tokens=6)
    assert torch.equal(model.generate(prompt, **EXACT | {"max_new_tokens": 6}), expected)
    (said,) = [record.message for record in caplog.records if record.name.startswith("wedlm_hf")]
    assert said.startswith("The prompt of row 0 has 80 tokens, but the model's context is 64 (`max_position_embeddi")


def test_settings_travel_with_the_checkpoint_and_calls_override_them_and_bad_ones_are_refused(model, tmp_path):
    stored = {"strategy": "wedlm", "entropy_threshold": 2.0, "window_size": 5}
    storing(stored).save_pretrained(tmp_path)
    assert stored.items() <= json.loads((tmp_path / "generation_config.json").read_text()).items()
    reloaded = WeDLMForCausalLM.from_pretrained(tmp_path)
    expected, ar = model.generate(PROMPT, **FAST, window_size=5), model.generate(PROMPT, max_new_tokens=20)
    assert reloaded.generate(PROMPT, max_new_tokens=20).tolist() == expected.tolist()
    assert reloaded.generate(PROMPT, max_new_tokens=20, strategy="ar").tolist() == ar.tolist()
    settings = WeDLMGenerationSettings.from_generation_config(reloaded.generation_config, reloaded.config)
    assert settings == WeDLMGenerationSettings("wedlm", 5, 2.0, mask_token_id=MASK)
    config = GenerationConfig(**stored, max_new_tokens=20)
    assert model.generate(PROMPT.int(), generation_config=config).tolist() == expected.tolist()
    for name, value, message in (
        ("window_size", 0, "an integer of at least 1, got 0"),
        ("temperature", 0.5, "temper"),
    ):
        with pytest.raises(ValueError, match=message):
            storing({name: value}).save_pretrained(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_verified_decoding_names_each_setting_that_it_does_not_read(model, caplog):
    expected = model.generate(PROMPT, **EXACT)
    assert not caplog.records
    timed = {"slot_cost": 0.1, "window_size": 16}
    for unread in ({"entropy_threshold": 0.0}, {"distance_penalty": 0.1}, timed):
        caplog.clear()
        assert model.generate(PROMPT, **EXACT | unread).tolist() == expected.tolist()
        name, value = next(iter(unread.items()))
        assert [r.message.partition(": ")[0] for r in caplog.records] == [f"`{name}={value}` is not read by this call"]


@pytest.mark.parametrize("options", [{}, EXACT])
def test_a_callers_own_length_and_end_criteria_replace_the_generation_configs(model, options):
    options = options | {"max_new_tokens": 20, "suppress_tokens": [MASK]}
    free = model.generate(PROMPT, **(options | {"max_new_tokens": 30}))
    for criterion, length in (
        (MaxLengthCriteria(max_length=8), 8),
        (MaxLengthCriteria(max_length=30), 30),
        (MaxLengthCriteria(max_length=2), 6),
        (EosTokenCriteria(eos_token_id=int(free[0, 9])), free[0, 5:].tolist().index(free[0, 9]) + 6),
    ):
        stopped = model.generate(PROMPT, **options, stopping_criteria=[criterion])
        assert stopped.tolist() == free[:, :length].tolist()


def test_a_criterion_that_answers_for_the_whole_batch_is_refused_beside_other_rows(model):
    criteria = [lambda ids, scores, **_: ids.shape[1] >= 7]
    assert model.generate(PROMPT, **FAST, stopping_criteria=criteria).shape == (1, 7)
    with pytest.raises(ValueError, match="function answers for all rows together"):
        model.generate(PROMPT.repeat(2, 1), **FAST, stopping_criteria=criteria)


@pytest.mark.parametrize("options", [{}, {"verification": "exact"}])
def test_a_stored_strategy_reaches_a_server_that_sends_a_generation_config_of_its_own(model, options):
    """As `transformers chat` and `serve` do: as JSON, with a streamer and the tokenizer."""
    served, recorder = storing(FAST | options), Recorder()
    sent = GenerationConfig(**json.loads(GenerationConfig(max_new_tokens=12).to_json_string()))
    output = served.generate(PROMPT, generation_config=sent, streamer=recorder, tokenizer=tiny_tokenizer())
    assert output.tolist() == model.generate(PROMPT, **(FAST | options | {"max_new_tokens": 12})).tolist()
    assert recorder.drafts


def test_no_empty_drafts_are_streamed(model):
    recorder = Recorder()
    model.generate(PROMPT, **(EXACT | {"slot_cost": 10.0}), streamer=recorder)
    assert recorder.ended and not recorder.drafts


def test_weights_that_are_offloaded_decode_alike(model, tmp_path):
    offloaded = disk_offload(tiny_model(), tmp_path, execution_device=torch.device("cpu"))
    for options in (FAST, EXACT):
        assert offloaded.generate(PROMPT, **options).tolist() == model.generate(PROMPT, **options).tolist()


def test_text_streams_and_pipelines_give_the_same_text(model, tokenizer):
    text, expected = (tokenizer.decode(ids[0]) for ids in (PROMPT, model.generate(PROMPT, **FAST)[:, 5:]))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=model.generate, args=(PROMPT,), kwargs=FAST | {"streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()
    assert tokenizer(text)["input_ids"] == PROMPT[0].tolist()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert generator(text, return_full_text=False, do_sample=False, **FAST)[0]["generated_text"] == expected


def test_logits_that_become_no_numbers_name_step_and_row():
    """A token of row 1 has a broken embedding: the forward after the one that chose it is the first to read it."""
    model, rows, options = tiny_model(), torch.tensor([[20, 40, 9], [31, 77, 5]]), EXACT | {"slot_cost": 1e9}
    free = model.generate(rows, **options)[:, 3:].tolist()
    index = next(i for i in range(2, 19) if free[1][i] not in free[0] + free[1][:i])
    model.get_input_embeddings().weight.data[free[1][index]] = float("nan")
    message = f"in forward {index + 2}, sequence 1: the model's logits are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        model.generate(rows, **options)


@pytest.mark.parametrize("options", [FAST, EXACT])
@pytest.mark.parametrize("do_sample", [False, True])
def test_where_nothing_can_be_chosen_there_is_an_error(options, do_sample):
    model, options = tiny_model(), options | {"do_sample": do_sample}
    message = "in forward 1, sequence 0: the model's logits are NaN or infinite .*, or the logits processors leave no"
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, **options, suppress_tokens=list(range(VOCAB_SIZE)))
    model.lm_head.weight.data[5, 3] = float("nan")
    with pytest.raises(ValueError, match=message):
        model.generate(PROMPT, **options)


def test_a_forward_that_gives_nan_does_not_spoil_a_static_cache():
    model = tiny_model()
    first = model.generate(PROMPT, **EXACT, cache_implementation="static", return_dict_in_generate=True)
    turn, weights = torch.cat([first.sequences, torch.tensor([[50, 51]])], dim=1), model.model.embed_tokens.weight.data
    cold, kept = model.generate(turn, **EXACT), weights[51].clone()
    weights[51] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        model.generate(turn, **EXACT, **{CACHE: cache_of(first)})
    weights[51] = kept
    assert model.generate(turn, **EXACT, **{CACHE: cache_of(first)}).tolist() == cold.tolist()


def test_synthid_watermarks_one_sequence_and_refuses_several(model):
    """Its processor keeps the last tokens' scores of all rows, and is asked once for each position."""
    plain = {"max_new_tokens": 20, "suppress_tokens": [MASK]}
    options = plain | {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)}
    ar = model.generate(PROMPT, **options)
    assert ar.tolist() != model.generate(PROMPT, **plain).tolist()
    assert model.generate(PROMPT, **(EXACT | options)).tolist() == ar.tolist()
    with pytest.raises(ValueError, match="SynthID watermarking keeps one state for the whole batch"):
        model.generate(PROMPT.expand(2, -1), **(EXACT | options))


OTHER = torch.arange(20, 42)[None]  # longer than what any cache holds


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": OTHER}, "The cache does not belong to the prompt: row 0"),
        ({"input_ids": PROMPT[:, :3]}, "The cache does not belong to the prompt: row 0"),
        ({"input_ids": OTHER, "strategy": "ar", "entropy_threshold": None}, "The cache does not belong to the prompt"),
        ({"input_ids": PROMPT.expand(2, -1)}, "The cache holds 1 rows, but the prompt has 2"),
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, "Nothing tells whether a cache belongs to `inputs_embeds`"),
    ],
)
def test_a_cache_of_another_prompt_is_refused(model, call, message):
    cache = cache_of(model.generate(PROMPT, **FAST, return_dict_in_generate=True))
    with pytest.raises(ValueError, match=message):
        model.generate(**FAST | call, **{CACHE: cache})


def test_a_window_cache_takes_no_forwards_of_others_and_is_not_cropped_by_a_positive_number(model):
    for call in (lambda **own: model.generate(PROMPT, num_beams=2, **own), lambda **own: model(PROMPT, **own)):
        with pytest.raises(ValueError, match="A `WindowCache` takes the steps of `generate"):
            call(**{CACHE: WindowCache()}, use_cache=True)
    with pytest.raises(ValueError, match="`crop` takes the negative number"):
        WindowCache().crop(1)


def test_a_cache_of_another_model_is_refused_and_kept(model):
    cache, other = WindowCache(), tiny_model(seed=1)
    ids = model.generate(PROMPT, **FAST, **{CACHE: cache})
    with pytest.raises(ValueError, match="Another model filled the cache"):
        other.generate(ids, **FAST, **{CACHE: cache})
    for kept in (pickle.loads(pickle.dumps(cache)), cache):
        assert torch.equal(model.generate(ids, **FAST, **{CACHE: kept}), model.generate(ids, **FAST))
    cache.reset()
    assert torch.equal(other.generate(ids, **FAST, **{CACHE: cache}), other.generate(ids, **FAST))


@pytest.mark.parametrize("options", [FAST, EXACT])
def test_what_a_call_returns_can_be_written_to_and_trained_on_though_forwards_run_in_inference_mode(model, options):
    modes: list[bool] = []
    forward = model.lm_head.forward
    model.lm_head.forward = lambda rows: modes.append(rows.is_inference()) or forward(rows)
    outputs: dict[str, Any] = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
    output = model.generate(PROMPT, **options, **outputs)
    assert modes and all(modes)
    layers = [buffer for layer in cache_of(output).layers for buffer in (layer._keys, layer._values)]
    found = [output.sequences, output.log_probs, cache_of(output).token_ids, *output.scores, *output.logits, *layers]
    assert not any(tensor.is_inference() for tensor in found if tensor is not None)


def test_what_a_users_hook_notes_can_be_trained_on(model):
    noted: list[torch.Tensor] = []
    with model.lm_head.register_forward_hook(lambda _, args, __: noted.append(args[0])):
        model.generate(PROMPT, **FAST)
    probe = torch.nn.Linear(noted[0].shape[-1], 1)
    probe(noted[0]).sum().backward()
    assert probe.weight.grad is not None


@pytest.mark.parametrize("options", [FAST, EXACT])
def test_ar_goes_on_from_the_cache_of_parallel_decoding_and_leaves_it_as_it_was(model, options):
    first = model.generate(
        **prompts([PAD, PAD, 20, 40, 9], [31, 77, 5, 6, 7]), **options, return_dict_in_generate=True
    )
    inputs = prompts(*([*row, 50, 51] for row in first.sequences.tolist())) | {"max_new_tokens": 7}
    lengths, widths = list(cache_of(first).lengths), []
    with model.model.embed_tokens.register_forward_hook(lambda _, args, output: widths.append(output.shape[1])):
        found = model.generate(**inputs, **{CACHE: cache_of(first)})
    assert found.tolist() == model.generate(**inputs).tolist()
    assert widths[0] < inputs["input_ids"].shape[1] and widths[1:] == [1] * 6
    assert cache_of(first).lengths == lengths
    assert model.generate(PROMPT, max_new_tokens=3, **{CACHE: WindowCache()}).shape == (1, PROMPT.shape[1] + 3)


@pytest.mark.parametrize("options", [FAST, FAST | {"strategy": "block"}, EXACT])
def test_limit_and_window_may_be_larger_than_memory(model, options):
    def answer(**more):
        return model.generate(PROMPT, **options | more).tolist()

    expected = answer(window_size=20)
    assert answer(window_size=10**12) == expected
    end = expected[0][14]
    assert answer(max_new_tokens=10**10, eos_token_id=end) == answer(max_new_tokens=200, eos_token_id=end)


def test_scores_are_kept_in_float32_whatever_the_default_dtype(model):
    (expected, rows), (output, others) = (sampled_in(model, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert rows == others and output.log_probs.dtype == torch.float32
    torch.testing.assert_close(output.log_probs, expected.log_probs)


def sampled_in(model, dtype):
    torch.set_default_dtype(dtype)
    try:
        return generate(model, PROMPT.tolist(), 0, **EXACT, do_sample=True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stored", [{}, {"verification": "exact"}])
@pytest.mark.parametrize("given", [{}, {"window_size": 3}])
def test_a_stored_window_counts_for_the_verification_that_is_stored(stored, given):
    """Where drafts are always right, the widest forward tells how far a planned window may grow."""
    model = monotonous(storing(stored | {"strategy": "wedlm", "window_size": 2, "entropy_threshold": 0.5}))
    options = {"verification": "exact", "max_new_tokens": 90, "slot_cost": 0.0, "output_trace": True}
    output = model.generate(PROMPT, **options, **given, return_dict_in_generate=True)
    masks = max(int(step.is_mask.sum()) for step in output.trace)
    fixed = given.get("window_size", 2 if stored else None)
    assert masks == fixed if fixed else 31 <= masks <= 300  # a skipped one behind each row, too
