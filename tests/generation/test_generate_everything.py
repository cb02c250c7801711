"""Walks the table of docs/reference.md: each option of `generate` is honoured, refused or without effect.

*Honoured* means: for `strategy="ar"`, what the stock model of transformers does; for verified decoding, what AR
decoding does; for unverified decoding, what a check says that fails if the option is ignored. What processors do is
checked for all of them: the scores of each token are those of AR decoding's processors, on the token's own prefix.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_branches import FIXED, adapted
from test_generation import Recorder, no_forward
from tiny import MASK, PAD, START, stock_twin, tiny_model, tiny_tokenizer
from transformers import CompileConfig, GenerationConfig, GenerationMixin
from transformers.generation import LogitsProcessor, StoppingCriteria, WatermarkingConfig

from wedlm_hf.generation import WeDLMGenerateOutput, WindowCache
from wedlm_hf.generation.versions import CACHE, cache_of

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
TABLE = re.search("<!-- options -->(.*)<!-- /options -->", PAGE, re.DOTALL)[1].strip().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
OPTIONS = {option: row[1:4] for row in ROWS[2:] for option in re.findall("`([^`]+)`", row[0])}

LIMIT = 8
PROMPTS = torch.tensor([[PAD, PAD, 20, 40, 9], [31, 77, 5, 6, 7]])
INPUTS = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}
WIDTH = PROMPTS.shape[1]
DRAFTS = {"strategy": "wedlm", "entropy_threshold": 2.0}
EXACT = {"strategy": "wedlm", "verification": "exact"}
# The second ones of a kind are tried on a model with a mask adapter.
STRATEGIES = {
    "unverified": [DRAFTS, DRAFTS | {"strategy": "block"}],
    "verified": [EXACT | {"slot_cost": 0.04}, EXACT | FIXED],
}


@pytest.fixture(scope="module")
def twin(model):
    return stock_twin(model, "sdpa")


@pytest.fixture(scope="module")
def with_masks():
    return adapted(seed=2)  # none of whose answers ends early


@pytest.fixture
def run(request, model, with_masks):
    """A strategy by its kind and its place."""
    kind, place = request.param
    return Run([model, with_masks][place], STRATEGIES[kind][place])


class Run:
    """`generate` with a strategy: `run(option=value)` returns the sequences, `run.free` those without options."""

    def __init__(self, model: Any, strategy: dict[str, Any]):
        self.model, self.strategy = model, strategy

    def __call__(self, **options: Any) -> Any:
        inputs = {} if {"input_ids", "inputs", "inputs_embeds", "bos_token_id"} & options.keys() else INPUTS
        torch.manual_seed(0)
        return self.model.generate(**({"max_new_tokens": LIMIT} | self.strategy | inputs | options))

    @property
    def free(self) -> torch.Tensor:
        return free_answer(self.model, tuple(self.strategy.items()))


@cache
def free_answer(model: Any, strategy: Any) -> torch.Tensor:
    return Run(model, dict(strategy))()


@dataclass
class Case:
    """How an option is tried: with which arguments, and what shows that it is honoured.

    `check` takes a [`Run`]; options that process logits have none, and neither has what is refused or has no effect.
    """

    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Run], None] | None = None
    like_ar: bool = True  # verified output is AR's with the same arguments


class NoTwice(LogitsProcessor):
    """Forbids what the sequence holds already: wrong at once if it sees anything but the true prefix."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, -torch.inf)


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def lengths_are_exact(run: Run) -> None:
    longest = run(max_new_tokens=33, eos_token_id=None)
    assert longest.shape[1] == WIDTH + 33
    for limit in (1, 7, 16):
        tokens = run(max_new_tokens=limit, eos_token_id=None)
        assert tokens.shape[1] == WIDTH + limit
        if "verification" in run.strategy:
            assert tokens.tolist() == longest[:, : WIDTH + limit].tolist()


def ends_after_the_first_step(run: Run) -> None:
    assert run(max_time=1e-9).shape[1] == WIDTH + 1


def stops_as_if_tokens_came_one_by_one(run: Run) -> None:
    prompt, free = PROMPTS[1:], run(input_ids=PROMPTS[1:])[0].tolist()
    for length in (WIDTH + 1, WIDTH + 4, WIDTH + LIMIT - 1):
        criterion = StopAt(length)
        assert run(input_ids=prompt, stopping_criteria=[criterion])[0].tolist() == free[:length]
        assert criterion.seen == [free[: end + 1] for end in range(WIDTH, length)]
    in_turn = [lambda ids, scores, **_: ids.shape[1] >= WIDTH + 2 + torch.arange(len(ids))]
    output = run(input_ids=prompt.repeat(3, 1), stopping_criteria=in_turn, return_dict_in_generate=True)
    assert output.stats.new_tokens.tolist() == [2, 3, 4]
    assert (output.stats.accepted <= output.stats.new_tokens).all()


def same_as(expected: dict[str, Any], **options: Any) -> Callable[[Run], None]:
    """The option gives what other arguments give, new tokens alone."""

    def check(run: Run) -> None:
        assert run(**options)[:, -LIMIT:].tolist() == run(**expected)[:, -LIMIT:].tolist()

    return check


def ends_where_a_row_says_it(run: Run) -> None:
    end = int(run.free[0, WIDTH + 3])
    padded = run(eos_token_id=end, pad_token_id=9)[:, WIDTH:].tolist()
    assert end in padded[0]
    for row, tokens in zip(run.free[:, WIDTH:].tolist(), padded, strict=True):
        # Without verification, which masks are filled depends on the end tokens, and so does the text before them.
        row = row if "verification" in run.strategy else tokens
        expected = row[: row.index(end) + 1] if end in row else row
        assert tokens == (expected + [9] * LIMIT)[: len(tokens)] and len(tokens) >= len(expected)


def stops_at_a_string(run: Run) -> None:
    tokenizer, limit = tiny_tokenizer(), 12
    free = run(max_new_tokens=limit)[:, WIDTH:].tolist()
    stop = next(text for token in free[1][5:] if (text := tokenizer.decode(token)).isascii() and text.strip())
    stopped = run(max_new_tokens=limit, stop_strings=stop, tokenizer=tokenizer)[:, WIDTH:].tolist()
    for tokens, found in zip(free, stopped, strict=True):
        count = next((n for n in range(1, limit + 1) if stop in tokenizer.decode(tokens[:n])), limit)
        assert found == (tokens[:count] + [PAD] * limit)[: len(found)] and len(found) >= count
    assert count < limit


HEALER = tiny_tokenizer()
HEALER.bos_token = HEALER.convert_ids_to_tokens(START)


def heals(run: Run) -> None:
    prompt = HEALER("Count from 1 to 9: 1, 2, 3, 4", return_tensors="pt").input_ids
    expected = run(input_ids=run.model.heal_tokens(prompt.clone(), HEALER))
    assert run(input_ids=prompt, token_healing=True, tokenizer=HEALER).tolist() == expected.tolist()


def draws_by_the_seed(run: Run) -> None:
    sampled = {"do_sample": True, "temperature": 3.0}
    assert run(**sampled).tolist() == run(**sampled).tolist() != run.free.tolist()
    draws = run(**sampled, num_return_sequences=3).tolist()
    assert len(draws) == len({tuple(row) for row in draws}) == 6


def rows_do_not_see_padding(run: Run) -> None:
    for row, mask in enumerate(INPUTS["attention_mask"].bool()):
        assert run(input_ids=PROMPTS[row][mask][None])[0, -LIMIT:].tolist() == run.free[row, WIDTH:].tolist()


def embeddings_stand_for_tokens(run: Run) -> None:
    embeds = run.model.get_input_embeddings()(PROMPTS)
    given = run(inputs_embeds=embeds, attention_mask=INPUTS["attention_mask"])
    assert given.tolist() == run.free[:, WIDTH:].tolist()
    assert run(inputs_embeds=embeds, **INPUTS).tolist() == run.free.tolist()


def goes_on_from_a_cache(run: Run) -> None:
    for how in ({}, {"cache_implementation": "static"}):
        first = run(**how, return_dict_in_generate=True)
        kept = cache_of(first)
        assert sum(kept.lengths) > (PROMPTS != PAD).sum() and (kept.extent.capacity is not None) == bool(how)
        turn = torch.cat([first.sequences, torch.tensor([[50, 51], [52, 53]])], dim=1)
        inputs = {"input_ids": turn, "attention_mask": (turn != PAD).long()}
        second = run(**inputs, **{CACHE: kept}, return_dict_in_generate=True)
        assert second.sequences.tolist() == run(**inputs).tolist() and cache_of(second) is kept


def has_room_for(run: Run) -> None:
    output = run(cache_implementation="static", max_cache_len=200, return_dict_in_generate=True)
    assert cache_of(output).layers[0]._keys.shape[2] >= 200
    assert output.sequences.tolist() == run.free.tolist()


def compiles(is_disabled: bool) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        config, asked = CompileConfig(backend="eager"), []
        config._compile_all_devices = True
        run.model.get_compiled_call = lambda wanted: asked.append(wanted) or run.model.__call__
        try:
            output = run(cache_implementation="static", compile_config=config, disable_compile=is_disabled)
        finally:
            del run.model.get_compiled_call
        assert asked == ([] if is_disabled else [config]) and output.tolist() == run.free.tolist()

    return check


def returns_everything(run: Run) -> None:
    output = run(return_dict_in_generate=True)
    assert isinstance(output, WeDLMGenerateOutput) and isinstance(cache_of(output), WindowCache)
    assert output.sequences.tolist() == run.free.tolist()


def keeps(name: str) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        output = run(return_dict_in_generate=True, **{f"output_{name}": True})
        values = torch.stack(getattr(output, name), 1)
        values[..., MASK] = -torch.inf
        assert values.argmax(-1).tolist() == output.sequences[:, WIDTH:].tolist()

    return check


def streams_final_tokens_in_order_and_drafts_between(run: Run) -> None:
    recorder, alone = Recorder(), Recorder()
    output = run(streamer=recorder, eos_token_id=int(run.free[0, WIDTH + 3]))  # one row ends before the other
    assert recorder.puts[0].tolist() == PROMPTS.tolist() and recorder.ended
    assert torch.stack(recorder.puts[1:], dim=1).tolist() == output[:, WIDTH:].tolist()
    sequences = run(input_ids=PROMPTS[1:], streamer=alone)
    assert alone.puts[0].tolist() == PROMPTS[1:].tolist() and alone.ended and all(map(len, alone.puts))
    assert torch.cat(alone.puts[1:]).tolist() == sequences[0, WIDTH:].tolist()
    assert any(MASK in draft for draft in alone.drafts)


def keeps_step_with_other_processes(run: Run) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert run(synced_gpus=True).tolist() == run.free.tolist()
    finally:
        torch.distributed.destroy_process_group()


SAMPLED = {"do_sample": True, "temperature": 2.0}
WARPERS = {
    "temperature": 2.0, "top_k": 5, "top_p": 0.5, "top_h": 0.5, "min_p": 0.2, "typical_p": 0.5, "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
}  # fmt: skip
RENAMED = {"inputs": PROMPTS, "attention_mask": INPUTS["attention_mask"]}
ASSISTANT = tiny_model(seed=1)
ASSISTANT.generation_config.update(**STRATEGIES["verified"][0])  # which it does not decode by
COMMON_ENDS = {"eos_token_id": [40, 9, 20, 5]}

# Options that are tried by one value alone.
VALUES = {
    "early_stopping": True, "num_beams": 2, "length_penalty": 2.0, "num_beam_groups": 2, "diversity_penalty": 0.5,
    "constraints": [1], "force_words_ids": [[5]], "dola_layers": "low", "low_memory": True, "use_mtp": True,
    "custom_generate": lambda model, input_ids, **kwargs: input_ids, "renormalize_logits": True,
    "suppress_tokens": list(range(100, 300)), "begin_suppress_tokens": list(range(100, 320)),
    "forced_eos_token_id": 9, "repetition_penalty": 1.8, "encoder_repetition_penalty": 1.8,
    "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1, "logits_processor": [NoTwice()],
    "bad_words_ids": [[75], [75, 169], *([token] for token in range(150, 290))], "guidance_scale": 2.0,
    "sequence_bias": [[[45], 9.0], [[46], 5.0]], "watermarking_config": WatermarkingConfig(bias=6.0),
    "prefix_allowed_tokens_fn": lambda row, ids: [40 + row, 60 + len(ids) % 7, 90], "remove_invalid_values": True,
    "negative_prompt_ids": PROMPTS, "negative_prompt_attention_mask": INPUTS["attention_mask"],
    "position_ids": torch.tensor([[0, 0, 0, 2, 4], [0, 1, 2, 4, 8]]), "decoder_start_token_id": 9, "use_cache": False,
    "cache_config": {"nbits": 4}, "prefill_chunk_size": 2, "continuous_batching_config": {},
    "output_attentions": True, "output_hidden_states": True, "assistant_tokenizer": tiny_tokenizer(),
    "is_assistant": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1, "assistant_ensemble_weight": 0.5, "assistant_lookbehind": 3,
    "target_lookbehind": 3, "max_matching_ngram_size": 3, "speculation_type": "dflash",
}  # fmt: skip

CASES = {name: Case({name: value}) for name, value in VALUES.items()}
CASES |= {name: Case(SAMPLED | {name: value}) for name, value in WARPERS.items()}
CASES |= {
    "max_new_tokens": Case({"max_new_tokens": 7}, lengths_are_exact),
    "max_length": Case(
        {"max_length": 11, "max_new_tokens": None},
        same_as({"max_new_tokens": 6}, max_length=WIDTH + 6, max_new_tokens=None)),
    "min_new_tokens": Case({"min_new_tokens": 6} | COMMON_ENDS),
    "min_length": Case({"min_length": 11} | COMMON_ENDS),
    "max_time": Case({"max_time": 1e-9}, ends_after_the_first_step),
    "stop_strings": Case({}, stops_at_a_string),
    "stopping_criteria": Case({"stopping_criteria": [StopAt(9)]}, stops_as_if_tokens_came_one_by_one),
    "eos_token_id": Case({"eos_token_id": [40, 77]}, ends_where_a_row_says_it),
    "pad_token_id": Case({"pad_token_id": 9, "eos_token_id": [40, 77]}, ends_where_a_row_says_it),
    "bos_token_id": Case({"bos_token_id": 7}, same_as({"input_ids": torch.tensor([[7]])}, bos_token_id=7)),
    "do_sample": Case({"do_sample": True}, draws_by_the_seed, like_ar=False),
    "penalty_alpha": Case({"penalty_alpha": 0.5, "top_k": 4}),
    "forced_bos_token_id": Case({"forced_bos_token_id": 9, "input_ids": torch.tensor([[7], [8]])}),
    "exponential_decay_length_penalty": Case({"exponential_decay_length_penalty": (4, 1.5)} | COMMON_ENDS),
    "token_healing": Case({"token_healing": True, "tokenizer": HEALER}, heals, like_ar=False),
    "inputs": Case(RENAMED, same_as({}, **RENAMED)),
    "attention_mask": Case(INPUTS, rows_do_not_see_padding),
    "inputs_embeds": Case({}, embeddings_stand_for_tokens),
    "tokenizer": Case({}, stops_at_a_string),
    "generation_config": Case(
        {"generation_config": GenerationConfig(max_new_tokens=7), "max_new_tokens": None},
        same_as({"generation_config": GenerationConfig(suppress_tokens=[62])}, suppress_tokens=[62]), like_ar=False),
    "cache": Case({}, goes_on_from_a_cache),
    'cache_implementation="static"': Case(
        {"cache_implementation": "static"}, same_as({}, cache_implementation="static")),
    'cache_implementation="dynamic"': Case(
        {"cache_implementation": "dynamic"}, same_as({}, cache_implementation="dynamic")),
    'cache_implementation="offloaded"': Case({"cache_implementation": "offloaded"}),
    "max_cache_len": Case({"cache_implementation": "static", "max_cache_len": 200}, has_room_for),
    "compile_config": Case(
        {"cache_implementation": "static", "compile_config": CompileConfig()}, compiles(is_disabled=False)),
    "disable_compile": Case({"disable_compile": True}, compiles(is_disabled=True)),
    "return_dict_in_generate": Case({}, returns_everything),
    "num_return_sequences": Case(SAMPLED | {"num_return_sequences": 3}, draws_by_the_seed, like_ar=False),
    "output_scores": Case({"output_scores": True}, keeps("scores")),
    "output_logits": Case({"output_logits": True}, keeps("logits")),
    "streamer": Case({}, streams_final_tokens_in_order_and_drafts_between),
    "assistant_model": Case({"assistant_model": ASSISTANT, "input_ids": PROMPTS[1:]}),
    "prompt_lookup_num_tokens": Case({"prompt_lookup_num_tokens": 3, "input_ids": PROMPTS[1:]}),
    "assistant_early_exit": Case({"assistant_early_exit": 1, "input_ids": PROMPTS[1:]}),
    "synced_gpus": Case({}, keeps_step_with_other_processes),
}  # fmt: skip


def outcome(run: Run, options: dict[str, Any]) -> Any:
    """Tokens, or the kind of error."""
    try:
        output = run(**options)
    except Exception as error:
        return type(error)
    return getattr(output, "sequences", output).tolist()


def test_the_table_names_every_option_of_generate_and_every_row_is_tried():
    assert OPTIONS.keys() == CASES.keys()
    named = {re.match(r"\w+", option)[0] for option in OPTIONS}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    keywords = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs"}
    assert not (fields | keywords) - named
    assert {status for row in OPTIONS.values() for status in row} == {"honoured", "refused", "no effect"}


@pytest.mark.parametrize("option", CASES)
def test_with_ar_decoding_an_option_does_what_the_stock_model_does(model, twin, option):
    options = CASES[option].options
    result = outcome(Run(model, {}), options)
    assert result == outcome(Run(twin, {}), options)
    assert OPTIONS[option][0] != "refused" or result is ValueError
    assert OPTIONS[option][0] != "no effect" or result == Run(model, {}).free.tolist()


# The options that have a check, one for each: others that share it are tried on one model.
FIRST_OF_CHECKS = {CASES[name].check: name for name in reversed(CASES) if CASES[name].check}.values()


def of_status(status: str) -> list[Any]:
    return [
        pytest.param(option, (kind, place), id=f"{option}-{kind}-{place}")
        for option, (_, *statuses) in OPTIONS.items()
        for kind, found in zip(STRATEGIES, statuses, strict=True)
        for place in range(2 if option in FIRST_OF_CHECKS and status == "honoured" else 1)
        if found == status
    ]


# Every refusal says what is wrong, and where there is another way, which.
REFUSALS = (
    "is not supported with `strategy=|decodes greedily or by sampling, but the other options ask for|"
    "needs the tokens before each position|requires `trust_remote_code=True`|brings a loop of its own|"
    "counts positions from each row's first token|has no use for the inputs|An assistant decodes as AR"
)


@pytest.mark.parametrize(("option", "run"), of_status("refused"), indirect=["run"])
def test_an_option_is_refused_before_any_forward(option, run):
    with no_forward(run.model), pytest.raises(ValueError, match=REFUSALS):
        run(**CASES[option].options)


@pytest.mark.parametrize(("option", "run"), of_status("no effect"), indirect=["run"])
def test_an_option_has_no_effect(option, run):
    assert run(**CASES[option].options).tolist() == run.free.tolist()


@pytest.mark.parametrize(("option", "run"), of_status("honoured"), indirect=["run"])
def test_an_option_is_honoured(option, run):
    case = CASES[option]
    if case.check is None:
        scores_are_those_of_the_processors(run, case.options)
    else:
        case.check(run)
    if "verification" in run.strategy and case.like_ar and case.options and not case.options.get("do_sample"):
        suppressed = [*case.options.get("suppress_tokens", []), MASK]
        ar = Run(run.model, {})(**case.options | {"suppress_tokens": suppressed})
        assert run(**case.options).tolist() == ar.tolist()


def scores_are_those_of_the_processors(run: Run, options: dict[str, Any]) -> None:
    """What tokens are chosen from is what AR decoding's own processors make of the raw logits, and not the same."""
    width = options.get("input_ids", PROMPTS).shape[1]
    output = run(**options, return_dict_in_generate=True, output_scores=True, output_logits=True)
    processors = Run(run.model, {})(**options, custom_generate=lambda model, ids, **kwargs: kwargs["logits_processor"])
    has_effect = False
    for offset, raw in enumerate(output.logits):
        rows = output.stats.new_tokens > offset
        raw[:, MASK] = -torch.inf
        expected = processors(output.sequences[:, : width + offset], raw.clone())[rows]
        torch.testing.assert_close(output.scores[offset][rows], expected)
        tokens = output.sequences[rows, width + offset]
        if not options.get("do_sample"):
            assert tokens.tolist() == expected.argmax(-1).tolist()
        assert (expected.gather(1, tokens[:, None]) > -torch.inf).all()
        has_effect = has_effect or not torch.equal(expected, raw[rows])
    assert has_effect
