"""Walks the keywords of `generate`, and the numbers of `train` and `adapt`: commands honour each, or refuse it by name
before any weights."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig
from trl import ModelConfig
from typer.testing import CliRunner

from wedlm_hf import cli
from wedlm_hf.adapters import adapt
from wedlm_hf.adapters.adapt_config import AdaptConfig
from wedlm_hf.cli import settings as trying
from wedlm_hf.cli.options import LoadingOptions
from wedlm_hf.cli.settings import REFUSED, checked, parse_settings
from wedlm_hf.generation.settings import SETTING_NAMES
from wedlm_hf.serving import server
from wedlm_hf.training import train
from wedlm_hf.training.sft_config import WeDLMSFTConfig
from wedlm_hf.training.train import DataConfig

LIMIT = 8
CHAT = [{"role": "user", "content": "1, 2"}]
OWN_OPTION = {"strategy", "temperature", "verification", "max_new_tokens"}
OWN_OPTION |= {"window_size", "entropy_threshold", "distance_penalty"}
SAMPLED = ("do_sample=true",)
PLAN = ("slot_cost=0.04",)  # by no clock: draws depend on the plan
LOOKUP = ("prompt_lookup_num_tokens=3",)

# What is set, beside what else; of AR decoding alone where it says so.
HONOURED: dict[str, tuple[str, tuple[str, ...]]] = {
    "stop_strings": ("STOP", ()), "max_time": ("1e-9", ()), "min_new_tokens": ("6", ()), "min_length": ("9", ()),
    "do_sample": ("true", ()), "top_k": ("5", SAMPLED),
    "top_p": ("0.5", SAMPLED), "top_h": ("0.5", SAMPLED), "min_p": ("0.2", SAMPLED), "typical_p": ("0.5", SAMPLED),
    "epsilon_cutoff": ("0.05", SAMPLED), "eta_cutoff": ("0.05", SAMPLED), "renormalize_logits": ("true", ()),
    "repetition_penalty": ("1.8", ()), "encoder_repetition_penalty": ("1.8", ()), "no_repeat_ngram_size": ("1", ()),
    "encoder_no_repeat_ngram_size": ("1", ()), "bad_words_ids": ("[[75], [75, 169]]", ()),
    "sequence_bias": ("[[[45], 9.0]]", ()), "suppress_tokens": ("[100, 101]", ()),
    "begin_suppress_tokens": ("[100]", ()), "forced_bos_token_id": ("9", ()), "forced_eos_token_id": ("9", ()),
    "exponential_decay_length_penalty": ("[4, 1.5]", ()), "watermarking_config": ('{"bias": 6.0}', ()),
    "eos_token_id": ("[2, 77]", ()), "pad_token_id": ("9", ()),
    "bos_token_id": ("7", ()), "cache_implementation": ("static", ()),
    "max_cache_len": ("200", ("cache_implementation=static",)), "compile_config": ('{"backend": "eager"}', ()),
    "disable_compile": ("true", ()),
    "slot_cost": ("0.1", ()),
    "mask_token_id": ("3", ()),
}  # fmt: skip
AR_ALONE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_lookup_num_tokens": ("3", ()), "max_matching_ngram_size": ("3", LOOKUP),
    "assistant_early_exit": ("1", ()),
    "guidance_scale": ("2.0", ()), "prefill_chunk_size": ("2", ()), "remove_invalid_values": ("true", ()),
    "use_cache": ("false", ()),
}  # fmt: skip
EXACT, AR = ("--strategy", "wedlm", "--verification", "exact"), ("--strategy", "ar")


def test_every_keyword_of_generate_is_tried():
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | {*SETTING_NAMES}
    assert names == OWN_OPTION | HONOURED.keys() | AR_ALONE.keys() | REFUSED.keys()


@pytest.fixture(scope="module")
def loaded():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    return tiny_model(), tokenizer


@pytest.fixture
def command(loaded, monkeypatch, tmp_path):
    """Runs a command with `--set …`; returns its exit code, its answer and its error."""
    model = loaded[0]
    loads: list[str] = []
    monkeypatch.setattr(LoadingOptions, "load", lambda *args: loads.append("") or loaded)
    # Settings are tried on as many tokens as the model has: with those of the largest models, each takes longer.
    monkeypatch.setattr(trying, "_VOCABULARY", model.config.vocab_size)
    stored = model.generation_config.to_dict()
    answered: list[str] = []

    def serve(app: Any, *args: Any) -> None:
        body = {"model": "m", "messages": CHAT, "max_tokens": LIMIT, "seed": 0}
        response = TestClient(app).post("/v1/chat/completions", json=body).json()
        answered.append(response["choices"][0]["message"]["content"] if "choices" in response else str(response))
        app.state.desk.calls.wait()  # a call that ends later gives the generators back while the next one draws

    monkeypatch.setattr(server, "run", serve)

    def run(name: str, decoding: tuple[str, ...], settings: tuple[str, ...]) -> tuple[int, str, str]:
        length = ["--max-new-tokens", str(LIMIT)]
        own = {"generate": ["1, 2", "--json", "--no-compare", *length], "serve": ["m", "--port", "0"]}
        own["trace"] = ["1, 2", "--json", "--repeats", "1", "--trace", str(tmp_path / "page.html"), *length]
        own["report"] = ["--file", "-", "--output", str(tmp_path / "report"), *length]
        own["report"] += ["--decoders", "wedlm+exact"]  # which honours them all
        sets = [word for setting in settings for word in ("--set", setting)]
        loads.clear(), answered.clear()
        try:
            word = "generate" if name == "trace" else name
            result = CliRunner().invoke(cli.app, [word, *own[name], *decoding, *sets], input="1, 2\n")
        finally:
            model.generation_config = GenerationConfig(**stored)
        text = (*answered, result.stdout)[0]
        assert loads or result.exit_code, result.stdout
        return result.exit_code, text, result.stderr if not loads else f"after loading: {result.stderr}"

    return run


def test_true_and_one_ask_for_something_where_no_number_of_answers_is_meant(command):
    for setting in ("token_healing=true", "max_length=1", "num_beams=true", "return_dict_in_generate=null"):
        code, _, error = command("generate", EXACT, (setting,))
        assert code == 2 and "has no place in a command" in error
    assert command("generate", EXACT, ("num_beams=1", "output_scores=false", "length_penalty=1.0"))[0] == 0


@pytest.mark.parametrize("word", ["generate", "trace", "serve"])
def test_what_no_command_honours_is_refused_by_name_before_any_weights(command, word):
    for name in sorted(REFUSED)[:: 1 if word == "generate" else 9]:
        code, _, error = command(word, EXACT, (f"{name}=2",))
        assert (code, error.startswith(f"Error: `--set {name}=…` has no place in a command: ")) == (2, True), error


@pytest.mark.parametrize(
    "setting",
    [
        *(f"{name}=-1" for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size", "max_time", "top_k")),
        *(f"{name}={value}" for name in ("epsilon_cutoff", "eta_cutoff") for value in (-0.5, 1, 1.5)),
    ],
)
def test_numbers_that_transformers_would_pass_over_in_silence_are_refused(command, setting):
    for word in ("generate", "serve"):
        code, _, error = command(word, EXACT, (setting,))
        assert code == 2 and setting.partition("=")[0] in error, error


@pytest.mark.parametrize("decoding", [AR, EXACT])
@pytest.mark.parametrize(
    "setting", ["top_p=0", "suppress_tokens=[]", "begin_suppress_tokens=[]", "eos_token_id=-1", "eos_token_id=[]"]
)
def test_values_at_the_edge_of_what_transformers_takes_are_honoured(command, loaded, setting, decoding):
    given = (setting, *(SAMPLED if setting == "top_p=0" else ()))
    for word in ("generate", "serve"):
        code, output, error = command(word, decoding, given)
        assert code == 0, (word, output, error)
        if word == "generate" and setting.startswith("eos"):  # nothing ends an answer but its length
            (answer,) = json.loads(output)["answers"]
            assert [len(each["tokens"]) for each in answer.values() if "tokens" in each] == [LIMIT]


def test_tokens_of_the_largest_vocabularies_are_taken():
    given = [
        "bad_words_ids=[[262143]]",
        "eos_token_id=[262000, 7]",
        "forced_eos_token_id=262001",
        "pad_token_id=262002",
    ]
    given += ["mask_token_id=262003", "suppress_tokens=[262004]", "sequence_bias=[[[262005], -1.5]]"]
    state, settings = torch.get_rng_state(), parse_settings(given)
    assert checked({"strategy": "wedlm", **settings}) == {"strategy": "wedlm", **settings}
    assert torch.equal(torch.get_rng_state(), state)


BAD = (
    "abc",
    "-1",
    "0",
    "1",
    "0.5",
    "1.5",
    "-0.5",
    "[]",
    "[1]",
    "[-1]",
    '["a"]',
    "{}",
    '{"a": 1}',
    "true",
    "NaN",
    "1e999",
    '""',
)


@settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_value_of_another_kind_or_out_of_range_is_refused_before_any_weights_or_honoured(command, data):
    word = data.draw(st.sampled_from(["generate", "serve", "report"]))
    name = data.draw(st.sampled_from(sorted(HONOURED | AR_ALONE)))
    value, others = data.draw(st.sampled_from(BAD)), (HONOURED | AR_ALONE)[name][1]
    decoding = () if word == "report" else data.draw(st.sampled_from([AR, EXACT]))
    given = f"{name}={value}", *others
    code, _, error = command(word, decoding, given)
    is_named = error.startswith("Error: ") and any(each.partition("=")[0] in error for each in given)
    assert code == 0 or (code == 2 and is_named), (word, name, value, error)


NUMBERS = {
    "adapt": [each.name for each in fields(AdaptConfig) if re.search("int|float", str(each.type))],
    "train": [
        each.name
        for config in (DataConfig, WeDLMSFTConfig, ModelConfig)
        for each in fields(config)
        if re.search("int|float", str(each.type))
    ],
}
# Whatever they are, they are passed on, or there is one process.
PASSED_ON = {"max_steps", "ddp_bucket_cap_mb", "ddp_timeout", "local_rank", "save_total_limit"}


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_number_of_another_kind_or_out_of_range_is_refused_by_name_before_anything_is_loaded(monkeypatch, data):
    def load(*args, **how):
        raise ValueError("It is loaded.")

    monkeypatch.setattr(train, "check_source", load)
    monkeypatch.setattr(adapt._Run, "check", load)
    word = data.draw(st.sampled_from(sorted(NUMBERS)))
    name, value = data.draw(st.sampled_from(NUMBERS[word])), data.draw(st.sampled_from((*BAD, "2e9999", "-7", "nan")))
    given = {"adapt": ["adapt", "base", "out", "--tokens", "9"], "train": "train --dataset x --output_dir out".split()}
    given["train"] += "--model_name_or_path m --use_cpu true --bf16 false --use_peft true --report_to none".split()
    own = f"--{name.replace('_', '-')}" if word == "adapt" else f"--{name}"
    result = CliRunner().invoke(cli.app, [*given[word], f"{own}={value}"])
    assert result.exit_code == 2, (name, value, result.output, result.exception)
    if "It is loaded." not in result.stderr:
        assert name in result.stderr.replace("-", "_"), (name, value, result.stderr)
        return
    number = json.loads(value) if value not in ("nan", "2e9999") else None  # no number that is not finite
    assert isinstance(number, int | float) and not isinstance(number, bool), (name, value)
    assert number >= 0 or name in PASSED_ON, (name, value)


def keywords_of(given: tuple[str, ...]) -> dict[str, Any]:
    keywords = {}
    for name, _, text in (pair.partition("=") for pair in given):
        try:
            keywords[name] = json.loads(text)
        except ValueError:
            keywords[name] = text
    for name, kind in (("compile_config", CompileConfig), ("watermarking_config", WatermarkingConfig)):
        keywords |= {name: kind(**keywords[name])} if name in keywords else {}
    return keywords


@pytest.mark.parametrize("strategy", ["ar", "exact"])
@pytest.mark.parametrize("name", sorted(HONOURED | AR_ALONE))
def test_a_command_honours_a_keyword_as_python_does_or_refuses_it_by_name(command, loaded, name, strategy):
    model, tokenizer = loaded
    value, others = (HONOURED | AR_ALONE)[name]
    decoding, own = (AR, {"strategy": "ar"}) if strategy == "ar" else (EXACT, {"strategy": "wedlm"})
    own |= {"verification": "exact"} if strategy == "exact" else {}
    commands = ["generate", "serve"]
    is_refused = name in ({*SETTING_NAMES} - {"mask_token_id"} if strategy == "ar" else AR_ALONE)
    if name in ("top_p", "stop_strings", "slot_cost", "use_cache"):  # others reach all commands in the same way
        commands += ["trace"] if strategy == "exact" else []
    elif name in HONOURED:  # by each command and with each strategy, but not in all four ways
        commands = [commands[(sorted(HONOURED).index(name) + (strategy == "ar")) % 2]]
    others += PLAN if strategy == "exact" and name not in ("slot_cost", *AR_ALONE) else ()
    if is_refused:
        for word in commands:
            code, _, error = command(word, decoding, (f"{name}={value}", *others))
            assert code == 2 and error.startswith("Error: `") and (name in error or "prompt_lookup" in error), error
        return
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    width = prompt["input_ids"].shape[1]
    keywords = {**prompt, **own, "max_new_tokens": LIMIT, "tokenizer": tokenizer}
    if name == "stop_strings":
        free = tokenizer.decode(model.generate(**keywords, min_new_tokens=LIMIT)[0, width:])
        value = next(letter for letter in free if letter != "\ufffd")
    given = (f"{name}={value}", *others)
    torch.manual_seed(0)
    tokens = model.generate(**keywords, **keywords_of(given))[0, width:].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    for word in commands:
        code, output, error = command(word, decoding, given)
        assert code == 0, (word, output, error)
        if word == "generate":
            assert json.loads(output)["answers"][0][own["strategy"]]["tokens"] == tokens
        elif word == "trace":
            assert json.loads(output)["decoders"]["wedlm"]["new_tokens"] == len(tokens)
        else:
            expected = text.partition(value)[0] if name == "stop_strings" else text
            assert output.rstrip("\ufffd") == expected.rstrip("\ufffd")  # of half a character at the end
