"""Settings of parallel decoding: one frozen, validated dataclass, read from a `GenerationConfig`."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

STRATEGIES = ("ar", "wedlm", "block")
VERIFICATIONS = ("none", "exact")
ENTROPIES = ("entropy_threshold", "distance_penalty")  # settings in nats

# W, where the call leaves it out: as the authors' engine has it, and the most that a planned step may have.
WINDOW, LARGEST_WINDOW = 16, 32


class OptionError(ValueError):
    """A value of an option of `generate` that is not allowed; `option` is its name."""

    def __init__(self, message: str, option: str | None = None):
        super().__init__(message)
        self.option = option


def check_mask_token_id(
    mask_token_id: int | None, vocab_size: int, eos_token_id: Any, pad_token_id: int | None
) -> None:
    """Raises `ValueError` for a mask id that is no row of the vocabulary, or that is the end or the padding token."""
    if mask_token_id is None:
        return
    if not isinstance(mask_token_id, int) or isinstance(mask_token_id, bool):
        raise ValueError(f"`mask_token_id` must be an integer, got {mask_token_id!r}.")
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(f"`mask_token_id` must lie in the vocabulary (0 to {vocab_size - 1}), got {mask_token_id}.")
    if eos_token_id is not None and mask_token_id in torch.as_tensor(eos_token_id).flatten().tolist():
        raise ValueError(f"`mask_token_id` must differ from the end token, got {mask_token_id} for both.")
    if mask_token_id == pad_token_id:
        raise ValueError(f"`mask_token_id` must differ from the padding token, got {mask_token_id} for both.")


@dataclass(frozen=True)
class WeDLMGenerationSettings:
    """How to decode. Every field is a `generate` keyword, a `GenerationConfig` attribute and a key of
    generation_config.json.

    Attributes:
        strategy: `"ar"`: plain transformers; `"wedlm"`: streaming parallel decoding (paper §5, Algorithm 1);
            `"block"`: the block-wise baseline, whose window is refilled only when all of it is filled (paper Fig. 4c).
        window_size: W, slots predicted at a time. Default: 16 without verification; with it, each step checks the
            drafts and has the masks that give most tokens per time (see [`Planner`]), down to plain AR steps. A number
            fixes both. A static cache has 16 if none is given.
        entropy_threshold: τ, nats; unverified, masks whose adjusted entropy H + λ·d lies below it are filled (engine:
            0.4).
        distance_penalty: λ, nats per position from the leftmost mask (engine: 0.02).
        verification: `"none"`: the paper's decoder. `"exact"`: the output of AR decoding, drafts checked by the AR
            head.
        slot_cost: where steps are planned: what one more row adds to the time of a forward of one row, as a share of
            it. Default: measured while decoding.
        mask_token_id: M; default: the model config's.
        output_trace: record every step (see [`TraceStep`]).

    Raises:
        ValueError: for a value out of range, naming the field, the value and what is allowed.
    """

    strategy: str = "ar"
    window_size: int | None = None
    entropy_threshold: float = 0.4
    distance_penalty: float = 0.02
    verification: str = "none"
    slot_cost: float | None = None
    mask_token_id: int | None = None
    output_trace: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", STRATEGIES), ("verification", VERIFICATIONS)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise OptionError(f"`{name}` must be one of {choices}, got {getattr(self, name)!r}.", name)
        size = self.window_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            message = f"`window_size` must be an integer of at least 1, got {self.window_size!r}."
            raise OptionError(message, "window_size")
        for name in ENTROPIES:
            if not _is_cost(value := getattr(self, name)):
                raise OptionError(f"`{name}` must be a number of at least 0, got {value!r}.", name)
        if self.slot_cost is not None and not (_is_cost(self.slot_cost) and self.slot_cost < math.inf):
            message = f"`slot_cost` must be a finite number of at least 0, got {self.slot_cost!r}."
            raise OptionError(message, "slot_cost")
        if math.isinf(self.distance_penalty):
            raise OptionError("`distance_penalty` must be finite, got inf.", "distance_penalty")
        if not isinstance(self.output_trace, bool):
            raise OptionError(f"`output_trace` must be True or False, got {self.output_trace!r}.", "output_trace")
        if self.verification != "none" and self.strategy == "block":
            raise OptionError(
                f"`verification={self.verification!r}` goes with `strategy='wedlm'`, got `strategy='block'`: "
                "pass `verification='none'` too.",
                "verification",
            )

    def is_planned(self, is_static: bool) -> bool:
        """Whether each step is planned; `is_static`: the cache is."""
        return self.verification != "none" and self.window_size is None and not is_static

    def width(self, is_static: bool) -> int:
        """W; the largest one where steps are planned."""
        return self.window_size or (LARGEST_WINDOW if self.is_planned(is_static) else WINDOW)

    def unread(self, is_static: bool = False) -> frozenset[str]:
        """The settings that this way of decoding does not read."""
        if self.strategy == "ar":
            return frozenset(SETTING_NAMES) - {"strategy", "mask_token_id"}
        if self.verification == "none":
            return frozenset({"slot_cost"})
        return frozenset({*ENTROPIES, *["slot_cost"] * (not self.is_planned(is_static))})

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, model_config: Any, needs_mask_token: bool = True
    ) -> "WeDLMGenerationSettings":
        """Reads the fields that `generation_config` has; checks the mask token against the model if there is one."""
        given: dict[str, Any] = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("mask_token_id", getattr(model_config, "mask_token_id", None))
        settings = cls(**given)
        if settings.verification == "none":
            settings = replace(settings, window_size=settings.width(False))
        if settings.strategy != "ar":
            if settings.mask_token_id is None and needs_mask_token:
                raise ValueError(
                    f"`strategy={settings.strategy!r}` needs a mask token, but neither the model config nor the "
                    "generation config has a `mask_token_id`. Load a mask adapter (or enable it), convert the "
                    "checkpoint (`wedlm convert`), or pass `mask_token_id=`."
                )
            check_mask_token_id(
                settings.mask_token_id,
                model_config.get_text_config(decoder=True).vocab_size,
                generation_config.eos_token_id,
                generation_config.pad_token_id,
            )
        return settings


def is_left_out(value: Any) -> bool:
    """Whether a setting is passed as one may pass what one does not want."""
    return value is None or value is False or value == "none"


def _is_cost(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and (isinstance(value, float) or value < 2**63)  # no larger integer is sure to be a float


SETTING_NAMES = tuple(field.name for field in fields(WeDLMGenerationSettings))
# W, τ and λ: they are chosen for one kind of verification.
WINDOW_SETTINGS = ("window_size", *ENTROPIES)
