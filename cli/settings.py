"""Keywords of `generate` on the command line, `--set NAME=VALUE` among them. What is wrong is said before any weights
are read."""

import json
from collections.abc import Mapping
from typing import Any

# Keywords of `generate` that commands cannot honour, and why. The values that ask for nothing pass.
_REASONS = {
    "answers stream, and beams have none to stream": (
        "num_beams", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty",
    ),
    "transformers has moved it to the Hub": (
        "constraints", "force_words_ids", "penalty_alpha", "dola_layers", "low_memory",
    ),
    "it is about an assistant, and commands take none": (
        "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "speculation_type", "target_lookbehind",
    ),
    "no command shows it": (
        "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    ),
    "nothing reads it here": (
        "cache_config", "continuous_batching_config", "decoder_start_token_id", "transformers_version",
    ),
    "`--max-new-tokens` says how long answers become": ("max_length",),
    "a prompt gets one answer": ("num_return_sequences",),
    "the models have no heads for it": ("use_mtp",),
    "it would change the prompt, and answers begin behind it": ("token_healing",),
    "transformers sets it on the assistant of another model": ("is_assistant",),
    "`wedlm generate --trace` shows every step": ("output_trace",),
}  # fmt: skip
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}
_OWN = "return_dict_in_generate"  # which commands set themselves
# Numbers that ask for nothing.
_NEUTRAL = {
    "num_return_sequences": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
}

# Settings whose values transformers takes whatever they are: for true, for 1, or for none.
_SWITCHES = ("disable_compile", "do_sample", "remove_invalid_values", "renormalize_logits", "use_cache")
_SHARES, _CUTOFFS = ("top_p", "typical_p"), ("epsilon_cutoff", "eta_cutoff")
_BELOW_ZERO = ("eos_token_id", "guidance_scale")  # may be: an end that no token is, and guidance away
_VOCABULARY = 2**19  # tokens; no model has so many


def parse_settings(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text. Raises `ValueError` for another
    form, for a name that is no setting of `generate`, for what commands cannot honour, and for a value that
    transformers would take for another."""
    settings: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"`--set` takes NAME=VALUE, got {pair!r}.")
        if name in settings:
            raise ValueError(f"`--set {name}=…` was given twice.")
        settings[name] = _stops(value) if name == "stop_strings" else _value(value)
    if settings:
        _check_each(settings)
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text), parse_constant=str)
    except json.JSONDecodeError:
        return text


def _stops(text: str) -> list[str]:
    """One text, as it is, or a JSON list of texts. Raises `ValueError` for an empty one."""
    value = _value(text)
    stops = _listed(value) if isinstance(value, list | str) else [text]
    if not stops or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"`--set stop_strings=…` takes a text or a JSON list of texts, none empty, got {text!r}.")
    return stops


def _check_each(settings: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    from ..generation.settings import SETTING_NAMES

    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | {*SETTING_NAMES}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"`--set {name}=…`: `generate` has no setting of this name.")
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name] and value is not True
        asks_nothing = name != _OWN and (value is None or value is False or is_neutral)
        if name in REFUSED and not asks_nothing:
            raise ValueError(f"`--set {name}=…` has no place in a command: {REFUSED[name]}.")
        if value is not None and (wanted := _wanted(name, value)):
            raise ValueError(f"`--set {name}=…` must be {wanted}, got {value!r}.")


def _wanted(name: str, value: Any) -> str | None:
    """What a setting must be, where transformers would take this value for another."""
    if name in _SWITCHES and not isinstance(value, bool):
        return "true or false"
    if name.endswith("_token_id") and any(type(token) is not int for token in _listed(value)):
        return "a token id or a JSON list of them"
    if not isinstance(value, int | float):
        return None
    if value < 0 and name not in _BELOW_ZERO:
        return "at least 0"
    if name in _SHARES and value > 1:
        return "at most 1"
    if name in _CUTOFFS and value >= 1:
        return "below 1"
    return None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a command as `generate` takes them. Raises `ValueError` for what `generate` would refuse, or stumble
    over, with a model of any size: before the weights of one are read."""
    from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

    from ..generation.settings import SETTING_NAMES

    found = dict(keywords)
    asked = [f"{name}={value!r}" for name, value in keywords.items() if name != "strategy"]
    if not asked:
        return found
    if found.get("max_matching_ngram_size") is not None and found.get("prompt_lookup_num_tokens") is None:
        raise ValueError("`--set max_matching_ngram_size=…` needs `--set prompt_lookup_num_tokens=…`, too.")
    try:
        for name, made in (("compile_config", CompileConfig), ("watermarking_config", WatermarkingConfig)):
            if found.get(name) is not None:
                found[name] = made(**found[name])
        theirs = {name: value for name, value in found.items() if name not in SETTING_NAMES}
        # Whether the checkpoint itself samples is known once it is loaded.
        GenerationConfig(**{"do_sample": True} | theirs).validate(strict=True)
        _try(found)
    except Exception as error:  # transformers has no class for what its settings run into
        said = " ".join(str(error).split())
        if not any(each.partition("=")[0] in said for each in asked):
            said = f"`{'`, `'.join(asked)}`: {said}"
        raise ValueError(said) from None
    return found


def _try(keywords: Mapping[str, Any]) -> None:
    """Has a model of one layer decode as asked: most values are checked where they are used, and nowhere else."""
    import logging
    import warnings

    import torch

    from ..modeling_wedlm import WeDLMConfig, WeDLMForCausalLM

    ones = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes: dict[str, Any] = dict.fromkeys(ones, 1) | {"hidden_size": 2, "head_dim": 2, "vocab_size": _VOCABULARY}
    ids: dict[str, Any] = dict.fromkeys(("eos_token_id", "pad_token_id"), _VOCABULARY - 1)
    config = WeDLMConfig(**sizes, **ids, mask_token_id=_VOCABULARY - 2)
    how = {"strategy": "wedlm", "do_sample": True, **keywords, "max_new_tokens": 2, "stop_strings": None}
    if isinstance(width := how.get("window_size"), int):
        how["window_size"] = min(width, 2)  # a static cache has room for all of it
    if how["strategy"] == "wedlm":  # what a checkpoint stores is not known
        how["verification"] = how.get("verification") or "exact"
    own = logging.getLogger("wedlm_hf")
    level = own.level
    own.setLevel(logging.ERROR)  # the command's own call warns
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so short an answer
            WeDLMForCausalLM(config).eval().generate(torch.zeros(1, 4, dtype=torch.int64), **how)
    finally:
        own.setLevel(level)
