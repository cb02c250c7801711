"""`--set NAME=VALUE`: keywords of `generate` on the command line; those that commands cannot honour are refused."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_BEAMS = "answers stream, and beams have none to stream"
_MOVED = "transformers has moved it to the Hub"
_SHOWN = "no command shows it"
_NOTHING = "nothing reads it here"

# Keywords of `generate` that commands cannot honour, and why. The values that ask for nothing pass.
REFUSED = {
    "max_length": "`--max-new-tokens` says how long answers become",
    "num_return_sequences": "a prompt gets one answer",
    "num_beams": _BEAMS,
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "num_beam_groups": _BEAMS,
    "diversity_penalty": _BEAMS,
    "constraints": _MOVED,
    "force_words_ids": _MOVED,
    "penalty_alpha": _MOVED,
    "dola_layers": _MOVED,
    "low_memory": _MOVED,
    "use_mtp": "the models have no heads for it",
    "token_healing": "it would change the prompt, and answers begin behind it",
    "is_assistant": "transformers sets it on the assistant of another model",
    "assistant_ensemble_weight": "it is for an assistant, and commands take none",
    "return_dict_in_generate": _SHOWN,
    "output_scores": _SHOWN,
    "output_logits": _SHOWN,
    "output_attentions": _SHOWN,
    "output_hidden_states": _SHOWN,
    "output_trace": "`wedlm generate --trace` shows every step",
    "cache_config": _NOTHING,
    "continuous_batching_config": _NOTHING,
    "decoder_start_token_id": _NOTHING,
    "transformers_version": _NOTHING,
}
_OWN = "return_dict_in_generate"  # which commands set themselves
# Numbers that ask for nothing.
_NEUTRAL = {
    "num_return_sequences": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
}


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_some_tokens(value: Any) -> bool:
    return bool(value) and _are_tokens(value)


def _are_ends(value: Any) -> bool:
    """Token ids; -1, or none, for answers that end at their longest."""
    return all(_is_whole(token, -1) for token in (value if isinstance(value, list) else [value]))


def _are_biases(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and _are_some_tokens(pair[0]) and _is_number(pair[1])
        for pair in value
    )


# What a keyword's value may be, beside null: transformers finds out once the model is loaded, or takes whatever it is.
_Kind = tuple[str, Callable[[Any], bool]]
_COUNT: _Kind = "an integer of at least 1", lambda value: _is_whole(value, 1)
_COUNT_OR_NONE: _Kind = "an integer of at least 0", _is_whole
_NUMBER: _Kind = "a number", _is_number
_NUMBER_OR_NONE: _Kind = "a number of at least 0", lambda value: _is_number(value) and value >= 0
_FACTOR: _Kind = "a number above 0", lambda value: _is_number(value) and value > 0
_SHARE: _Kind = "a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1
_SHARE_ABOVE: _Kind = "a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1
_SHARE_BELOW: _Kind = "a number of at least 0, below 1", lambda value: _is_number(value) and 0 <= value < 1
_SWITCH: _Kind = "true or false", lambda value: isinstance(value, bool)
_TOKENS: _Kind = "a JSON list of token ids", _are_tokens
_ENDS: _Kind = "a token id or a JSON list of them", lambda value: _is_whole(value) or _are_some_tokens(value)
_ENDS_OR_NONE: _Kind = "a token id, -1 or a JSON list of them", _are_ends
_OBJECT: _Kind = "a JSON object", lambda value: isinstance(value, dict)
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("top_k", "min_new_tokens", "min_length", "no_repeat_ngram_size", "pad_token_id", "bos_token_id",
                     "encoder_no_repeat_ngram_size", "forced_bos_token_id", "mask_token_id"), _COUNT_OR_NONE),
    **dict.fromkeys(("max_cache_len", "prefill_chunk_size", "prompt_lookup_num_tokens", "max_matching_ngram_size",
                     "num_assistant_tokens", "assistant_lookbehind", "target_lookbehind", "assistant_early_exit"),
                    _COUNT),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _FACTOR),
    **dict.fromkeys(("top_p", "min_p", "assistant_confidence_threshold"), _SHARE),
    **dict.fromkeys(("top_h", "typical_p"), _SHARE_ABOVE),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _SHARE_BELOW),
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values", "use_cache", "disable_compile"),
                    _SWITCH),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _TOKENS),
    "eos_token_id": _ENDS_OR_NONE,
    "forced_eos_token_id": _ENDS,
    "guidance_scale": _NUMBER,
    "max_time": _NUMBER_OR_NONE,
    **dict.fromkeys(("compile_config", "watermarking_config"), _OBJECT),
    "bad_words_ids": ("a JSON list of lists of token ids",
                      lambda value: isinstance(value, list) and bool(value) and all(map(_are_some_tokens, value))),
    "sequence_bias": ("a JSON list of pairs, a list of token ids and a number", lambda v: bool(v) and _are_biases(v)),
    "exponential_decay_length_penalty": ("a JSON list of a number of tokens and a factor", lambda value: (
        isinstance(value, list) and len(value) == 2 and _is_whole(value[0]) and _is_number(value[1]))),
    "num_assistant_tokens_schedule": ("constant, heuristic or heuristic_transient",
                                      lambda value: value in ("constant", "heuristic", "heuristic_transient")),
    "speculation_type": ("a text", lambda value: isinstance(value, str)),
}  # fmt: skip

# Read by drafts from the text alone.
_OF_LOOKUP = (
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "speculation_type",
)  # fmt: skip


def parse_settings(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text. Raises `ValueError` for another
    form, for a name that is no setting of `generate`, for what commands cannot honour, and for a value of another kind
    or out of range."""
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
        return json.loads(text.lower() if text in ("True", "False") else "null" if text == "None" else text)
    except json.JSONDecodeError:
        return text


def _stops(text: str) -> list[str]:
    """One text, as it is, or a JSON list of texts. Raises `ValueError` for an empty one."""
    value = _value(text)
    stops = value if isinstance(value, list) else [value if isinstance(value, str) else text]
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
        wanted, is_right = _KINDS.get(name, ("", None))
        if value is not None and is_right is not None and not is_right(value):
            raise ValueError(f"`--set {name}=…` must be {wanted}, got {value!r}.")


def check_settings(settings: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """The settings as `generate` takes them. Raises `ValueError` for those that this strategy does not honour, and for
    values that transformers refuses."""
    from ..generation.mixin import REFUSED_OPTIONS

    drafts = {"prompt_lookup_num_tokens": (None,), "assistant_early_exit": (None,)}  # with a loop of their own
    for name, harmless in (drafts | REFUSED_OPTIONS).items():
        if strategy != "ar" and settings.get(name) not in harmless:
            raise ValueError(f"`--set {name}=…` goes with `--strategy ar` alone, got {settings[name]!r}.")
    unread = [name for name in _OF_LOOKUP if settings.get(name) is not None]
    if unread and settings.get("prompt_lookup_num_tokens") is None:
        raise ValueError(f"`--set {unread[0]}=…` needs `--set prompt_lookup_num_tokens=…`, too.")
    from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

    from ..generation.settings import SETTING_NAMES, WeDLMGenerationSettings

    found = dict(settings)
    ours = {name: value for name, value in found.items() if name in SETTING_NAMES and value is not None}
    WeDLMGenerationSettings(**{"strategy": strategy} | ours)
    for name, made in (("compile_config", CompileConfig), ("watermarking_config", WatermarkingConfig)):
        if found.get(name) is not None:
            try:
                found[name] = made(**found[name])
            except TypeError as error:
                raise ValueError(f"`--set {name}=…` takes a JSON object: {error}.") from None
    theirs = {name: value for name, value in found.items() if name not in SETTING_NAMES}
    try:  # whether the checkpoint itself samples is known once it is loaded
        GenerationConfig(**{"do_sample": True} | theirs).validate(strict=True)
    except TypeError as error:
        raise ValueError(f"`--set`: a value is of another kind than transformers takes, {error}: {theirs}.") from None
    except ValueError as error:
        raise ValueError(f"`--set`: {' '.join(str(error).split())}") from None
    return found
