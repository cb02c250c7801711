"""Options of an engine and of one request: read and checked in one place.

This module does not import vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...generation.settings_wedlm import check_mask_token_id
from ...modeling_wedlm.loading import ADAPTER_FILE, find_checkpoint
from ...modeling_wedlm.mask_adapter_wedlm import PEFT_TYPE, read_adapter_config

ARCHITECTURE = "WeDLMForCausalLM"
PROPOSER = "wedlm_hf.serving.vllm.Proposer"
# vLLM verifies at most so many speculative tokens of a request at once.
MOST_SPECULATIVE_TOKENS = 128
PREFIX = "wedlm_"
STRATEGIES = ("ar", "wedlm")


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        is_drafting: verified parallel decoding (`speculative_config`); otherwise AR decoding.
        mask_adapter: folder or Hub id of a mask adapter (`additional_config={"wedlm": {"mask_adapter": …}}`).
        any_base: take the mask adapter also where the weights are not those that it was trained for.
    """

    is_drafting: bool = False
    mask_adapter: str | None = None
    any_base: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> "EngineOptions":
        """Reads them. Raises `ValueError` for unknown or ill-typed ones."""
        spec, additional = vllm_config.speculative_config, vllm_config.additional_config
        own = additional.get("wedlm", {}) if isinstance(additional, Mapping) else {}
        if not isinstance(own, Mapping) or not set(own) <= {"mask_adapter", "any_base"}:
            raise ValueError(
                "`additional_config['wedlm']` may hold 'mask_adapter' (a folder or Hub id) and 'any_base' (true or "
                f"false), got {own!r}."
            )
        adapter, any_base = own.get("mask_adapter"), own.get("any_base", False)
        if not isinstance(adapter, str | None) or not isinstance(any_base, bool):
            raise ValueError(
                "Of `additional_config['wedlm']`, 'mask_adapter' is the name of a folder or Hub id and 'any_base' is "
                f"true or false; got {own!r}."
            )
        return cls(spec is not None and spec.model == PROPOSER, adapter, any_base)

    def check(self, vllm_config: Any) -> None:
        """Raises `ValueError` for what cannot be honoured, `OSError` for an adapter that is not there."""
        config, spec = vllm_config.model_config.hf_config, vllm_config.speculative_config
        if self.mask_adapter is not None:
            if not self.is_drafting:
                raise ValueError(
                    "A mask adapter drafts tokens for verified decoding, which is off: pass `speculative_config` too, "
                    "or leave the mask adapter out. AR decoding does not use it."
                )
            if vllm_config.lora_config is not None:
                raise ValueError(
                    "A mask adapter cannot be served together with vLLM's LoRA: merge the LoRA into the checkpoint."
                )
            find_checkpoint(self.mask_adapter, file=ADAPTER_FILE)
            kind = read_adapter_config(self.mask_adapter).get("peft_type")
            if kind != PEFT_TYPE:
                raise ValueError(f"{self.mask_adapter!r} is no mask adapter: its `peft_type` is {kind!r}.")
        if not self.is_drafting:
            return
        if config.mask_token_id is None:
            raise ValueError(
                f"Verified decoding needs a mask token, but the config of {vllm_config.model_config.model!r} has no "
                "`mask_token_id`. Convert the checkpoint (`wedlm convert`), or serve it without `speculative_config`."
            )
        check_mask_token_id(config.mask_token_id, config.vocab_size, config.eos_token_id, config.pad_token_id)
        tokens = spec.num_speculative_tokens
        if tokens is None or not 2 <= tokens <= MOST_SPECULATIVE_TOKENS:
            raise ValueError(
                f"`num_speculative_tokens`, the most drafts and masks of a request's step, must lie between 2 and "
                f"{MOST_SPECULATIVE_TOKENS}, got {tokens}."
            )
        if spec.rejection_sample_method == "synthetic":
            raise ValueError("Verified decoding of WeDLM cannot accept drafts at synthetic rates.")


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request, in `SamplingParams.extra_args` or `vllm_xargs` of an HTTP request.

    Attributes:
        strategy: `wedlm_strategy`: `"ar"` switches parallel decoding off for this request.
        window_size: `wedlm_window_size`: the most masks of a step, at least 1; default: as many as the engine allows.
    """

    strategy: str = "wedlm"
    window_size: int | None = None

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
