"""`--set NAME=VALUE`: keywords of `generate` on the command line; those that commands cannot honour are refused."""

import json
from collections.abc import Mapping
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

# Read by drafts from the text alone.
_OF_LOOKUP = (
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "speculation_type",
)  # fmt: skip


def parse_settings(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs as keywords of `generate`; a value is JSON, or else text. Raises `ValueError` for another
    form, for a name that is no setting of `generate`, and for what commands cannot honour."""
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
        _check_names(settings)
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


def _check_names(settings: Mapping[str, Any]) -> None:
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

    from ..generation.settings import SETTING_NAMES

    found = dict(settings)
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
