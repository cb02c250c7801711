"""Options of an engine and of one request: read and checked in one place.

This module does not import vLLM.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ...adapters.adapter_files import BASE_FIELDS, PEFT_TYPE, compare_bases, identity_of
from ...checkpoints.find import ADAPTER_FILE, find_checkpoint, find_file, read_adapter_config
from ...generation.settings import check_mask_token_id

NEEDS_VLLM = "WeDLM's plug-in for vLLM needs vLLM, on a machine with a GPU: pip install '.[vllm]' in the clone."
ARCHITECTURE = "WeDLMForCausalLM"
PROPOSER = "wedlm_hf.serving.vllm.Proposer"
# vLLM verifies at most so many speculative tokens of a request at once.
MOST_SPECULATIVE_TOKENS = 128
PREFIX = "wedlm_"
STRATEGIES = ("ar", "wedlm")


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine: `speculative_config`, and `additional_config={"wedlm": {…}}`."""

    is_drafting: bool = False  # verified parallel decoding (`speculative_config`)
    mask_adapter: str | None = None  # folder or Hub id
    any_base: bool = False  # take the mask adapter also where the weights are not those that it was trained for
    always_draft: bool = False  # every step has drafts or masks, whatever they gain: for tests of equality

    @classmethod
    def of(cls, vllm_config: Any) -> "EngineOptions":
        """Reads them. Raises `ValueError` for unknown or ill-typed ones."""
        spec, additional = vllm_config.speculative_config, vllm_config.additional_config
        own = additional.get("wedlm", {}) if isinstance(additional, Mapping) else {}
        names = [name for name in cls.__dataclass_fields__ if name != "is_drafting"]
        if not isinstance(own, Mapping) or not set(own) <= set(names):
            raise ValueError(f"`additional_config['wedlm']` may hold {', '.join(map(repr, names))}, got {own!r}.")
        flags = [own.get("any_base", False), own.get("always_draft", False)]
        if not isinstance(own.get("mask_adapter"), str | None) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                "Of `additional_config['wedlm']`, 'mask_adapter' is the name of a folder or Hub id, 'any_base' and "
                f"'always_draft' are true or false; got {own!r}."
            )
        return cls(spec is not None and spec.model == PROPOSER, **own)

    def check(self, vllm_config: Any) -> None:
        """Raises `ValueError` for what cannot be honoured, `OSError` for an adapter that is not there."""
        config, spec = vllm_config.model_config.hf_config, vllm_config.speculative_config
        if self.mask_adapter is not None:
            if not self.is_drafting:
                off = "A mask adapter drafts tokens for verified decoding, which is off"
                raise ValueError(
                    f"{off}: pass `speculative_config` too, or leave it out. AR decoding does not use it."
                )
            if vllm_config.lora_config is not None:
                why = "A mask adapter cannot be served together with vLLM's LoRA"
                raise ValueError(f"{why}: merge the LoRA into the checkpoint.")
            self._check_adapter(self.mask_adapter, vllm_config.model_config)
        if self.always_draft and not self.is_drafting:
            raise ValueError("'always_draft' goes with `speculative_config`, which switches verified decoding on.")
        if not self.is_drafting:
            return
        if config.mask_token_id is None:
            raise ValueError(
                f"Parallel decoding needs a mask token, but the config of {vllm_config.model_config.model!r} has no "
                "`mask_token_id`. Convert the checkpoint (`wedlm convert`), or serve it with AR decoding."
            )
        check_mask_token_id(config.mask_token_id, config.vocab_size, config.eos_token_id, config.pad_token_id)
        tokens = spec.num_speculative_tokens
        if tokens is None or not 2 <= tokens <= MOST_SPECULATIVE_TOKENS:
            named = "`num_speculative_tokens`, the most drafts and masks of a request's step,"
            raise ValueError(f"{named} must lie between 2 and {MOST_SPECULATIVE_TOKENS}, got {tokens}.")
        if (method := spec.rejection_sample_method) != "standard":  # another accepts tokens that AR would not give
            raise ValueError(f"`rejection_sample_method` of verified decoding must be 'standard', got {method!r}.")

    def _check_adapter(self, name: str, model_config: Any) -> None:
        find_checkpoint(name, file=ADAPTER_FILE)
        adapter = read_adapter_config(name)
        if (kind := adapter.get("peft_type")) != PEFT_TYPE:
            raise ValueError(f"{name!r} is no mask adapter: its `peft_type` is {kind!r}.")
        base = adapter.get("base")
        own = base_of_checkpoint(model_config.model, model_config.hf_config, getattr(model_config, "revision", None))
        try:
            compare_bases(own, base if isinstance(base, dict) else {}, any_base=self.any_base)
        except ValueError as error:
            hint = " On vLLM that is 'any_base': true." if "any_base" in str(error) else ""
            raise ValueError(f"'mask_adapter' {name!r}: {error}{hint}") from None


def base_of_checkpoint(name: str, config: Any, revision: str | None = None) -> dict[str, Any]:
    """What [`base_of`] says of a model, from the files of its checkpoint, a folder or Hub id."""
    own = {field: getattr(config, field, None) for field in BASE_FIELDS}
    options: dict[str, Any] = {"revision": revision, "is_needed": False}
    names = "model.norm.weight", "model.embed_tokens.weight"
    index = find_file(name, "model.safetensors.index.json", **options)
    files = json.loads(Path(index).read_text())["weight_map"] if index else dict.fromkeys(names, "model.safetensors")
    weights = []
    for key in names:
        path = find_file(name, files[key], **options) if key in files else None
        if path is None:
            return own  # weights of another kind: vLLM loads them, and sizes are compared alone
        with safe_open(path, "pt") as stored:
            weights.append(stored.get_slice(key)[:64] if key == names[1] else stored.get_tensor(key))
    return own | identity_of(*weights)


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request, in `SamplingParams.extra_args` or `vllm_xargs` of an HTTP request; `wedlm_` stands before
    each name."""

    strategy: str = "wedlm"  # "ar" switches parallel decoding off for this request
    window_size: int | None = None  # the most masks of a step; default: as many as the engine allows

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> "RequestOptions":
        """Reads them. Raises `ValueError` for an unknown one, and for a value that is not allowed."""
        own = {key: value for key, value in (extra_args or {}).items() if str(key).startswith(PREFIX)}
        names = {PREFIX + name: name for name in cls.__dataclass_fields__}
        if unknown := sorted(set(own) - set(names)):
            raise ValueError(f"Unknown WeDLM option {unknown[0]!r}: a request may have {', '.join(names)}.")
        options = cls(**{names[key]: value for key, value in own.items()})
        if options.strategy not in STRATEGIES:
            raise ValueError(f"`wedlm_strategy` must be one of {', '.join(STRATEGIES)}, got {options.strategy!r}.")
        size = options.window_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"`wedlm_window_size` must be a whole number of at least 1, got {size!r}.")
        return options
