"""Settings of parallel decoding: one frozen, validated dataclass, read from a `GenerationConfig`."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

STRATEGIES = ("ar", "wedlm", "block")
VERIFICATIONS = ("none", "exact")
ENTROPIES = ("entropy_threshold", "distance_penalty", "draft_threshold")  # settings in nats

# W of adaptive windows: their output does not depend on it.
LARGEST_WINDOW = 32


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
        window_size: W, slots predicted at a time (the authors' engine: 16); where the window adapts, the largest
            (default there: 32).
        entropy_threshold: τ, nats; unverified, masks whose adjusted entropy H + λ·d lies below it are filled (engine:
            0.4).
        distance_penalty: λ, nats per position from the leftmost mask (engine: 0.02).
        draft_threshold: nats; under verification, masks with H below it become drafts, where no mask adapter drafts.
        verification: `"none"`: the paper's decoder. `"exact"`: the output of AR decoding, drafts checked by the AR
            head.
        adaptive_window: under verification, each step checks the drafts and has the masks that give most tokens per
            time (see [`Planner`]), down to plain AR steps. Default: with `verification="exact"`, whose output does not
            depend on it. A static cache keeps the window's size, whatever this says.
        slot_cost: for `adaptive_window`: what one more row adds to the time of a forward of one row, or times of
            forwards by their number of rows, such as `{1: 18, 6: 23, 12: 35}`. Default: measured while decoding.
        mask_token_id: M; default: the model config's.
        output_trace: record every step (see [`TraceStep`]).

    Raises:
        ValueError: for a value out of range, naming the field, the value and what is allowed.
    """

    strategy: str = "ar"
    window_size: int = 16
    entropy_threshold: float = 0.4
    distance_penalty: float = 0.02
    draft_threshold: float = 2.0
    verification: str = "none"
    adaptive_window: bool | None = None
    slot_cost: float | dict[int, float] | None = None
    mask_token_id: int | None = None
    output_trace: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", STRATEGIES), ("verification", VERIFICATIONS)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise OptionError(f"`{name}` must be one of {choices}, got {getattr(self, name)!r}.", name)
        if not isinstance(self.window_size, int) or isinstance(self.window_size, bool) or self.window_size < 1:
            message = f"`window_size` must be an integer of at least 1, got {self.window_size!r}."
            raise OptionError(message, "window_size")
        for name in ENTROPIES:
            if not _is_cost(value := getattr(self, name)):
                raise OptionError(f"`{name}` must be a number of at least 0, got {value!r}.", name)
        _check_slot_cost(self.slot_cost)
        if math.isinf(self.distance_penalty):
            raise OptionError("`distance_penalty` must be finite, got inf.", "distance_penalty")
        for name in ("output_trace", "adaptive_window"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "adaptive_window"):
                raise OptionError(f"`{name}` must be True or False, got {value!r}.", name)
        if self.verification != "none" and self.strategy == "block":
            raise OptionError(
                f"`verification={self.verification!r}` goes with `strategy='wedlm'`, got `strategy='block'`: "
                "pass `verification='none'` too.",
                "verification",
            )

    @property
    def is_adaptive(self) -> bool:
        """Whether each step is planned."""
        return self.verification != "none" and self.adaptive_window is not False

    def unread(self, has_mask_adapter: bool, is_static: bool = False) -> frozenset[str]:
        """The settings that this way of decoding does not read."""
        if self.strategy == "ar":
            return frozenset(SETTING_NAMES) - {"strategy", "mask_token_id"}
        if self.verification == "none":
            return frozenset({"adaptive_window", "draft_threshold", "slot_cost"})
        also = ["slot_cost"] * (is_static or not self.is_adaptive) + ["draft_threshold"] * has_mask_adapter
        also += ["adaptive_window"] * is_static
        return frozenset({"distance_penalty", "entropy_threshold", *also})

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, model_config: Any, needs_mask_token: bool = True
    ) -> "WeDLMGenerationSettings":
        """Reads the fields that `generation_config` has; checks the mask token against the model if there is one."""
        given: dict[str, Any] = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        given.setdefault("mask_token_id", getattr(model_config, "mask_token_id", None))
        settings = cls(**given)
        if settings.is_adaptive and getattr(generation_config, "cache_implementation", None) != "static":
            settings = replace(settings, window_size=given.get("window_size", LARGEST_WINDOW))
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


def _check_slot_cost(cost: Any) -> None:
    if cost is None or (_is_cost(cost) and cost < math.inf):
        return
    if not isinstance(cost, dict):
        message = f"`slot_cost` must be a finite number of at least 0, or times by numbers of rows, got {cost!r}."
        raise OptionError(message, "slot_cost")
    rows = [int(count) for count in cost if str(count).isdecimal()]  # JSON makes strings of numbers
    if (
        len(rows) < max(2, len(cost))
        or min(rows) < 1
        or not all(_is_cost(time) and 0 < time < math.inf for time in cost.values())
    ):
        message = f"`slot_cost` must have a finite time above 0 for each of two or more numbers of rows, got {cost!r}."
        raise OptionError(message, "slot_cost")


SETTING_NAMES = tuple(field.name for field in fields(WeDLMGenerationSettings))
# Those that are chosen for one kind of verification.
WINDOW_SETTINGS = frozenset({"window_size", *ENTROPIES})
