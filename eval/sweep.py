"""The settings that `wedlm report` compares, which of them it picks, and how a checkpoint stores them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..generation.settings_wedlm import WeDLMGenerationSettings
from .files import write_text
from .measure import Options

AR, BLOCK, STREAMING, TYPICAL, VERIFIED = "AR", "block", "wedlm", "wedlm, typical", "wedlm, verified"
DECODERS: dict[str, Options] = {
    AR: {"strategy": "ar"},
    BLOCK: {"strategy": "block", "verification": "none"},
    STREAMING: {"strategy": "wedlm", "verification": "none"},
    TYPICAL: {"strategy": "wedlm", "verification": "typical"},
    VERIFIED: {"strategy": "wedlm", "verification": "exact"},
}
ON_COMMAND_LINES = {"ar": AR, "block": BLOCK, "wedlm": STREAMING, "wedlm+typical": TYPICAL, "wedlm+exact": VERIFIED}
FIELDS = ("window_size", "entropy_threshold", "distance_penalty")


@dataclass(frozen=True)
class Setting:
    """One combination of settings of unverified streaming decoding; the fields are keywords of `generate`."""

    window_size: int
    entropy_threshold: float
    distance_penalty: float

    def __str__(self) -> str:
        return f"W={self.window_size} τ={self.entropy_threshold:g} λ={self.distance_penalty:g}"

    @property
    def options(self) -> Options:
        """The keywords, with the strategy."""
        return {"strategy": "wedlm", "verification": "none"} | asdict(self)


@dataclass(frozen=True)
class Grid:
    """What a sweep tries: all combinations, AR first.

    Attributes:
        windows: W, slots.
        thresholds: τ, nats.
        penalties: λ, nats per position; block-wise decoding is tried with the middle one.
        draft_thresholds: τ of the drafts of typical and verified decoding, which have no λ, nats.
        decoders: among [`DECODERS`]; AR is always there.

    Raises:
        ValueError: for a value that is no setting.
    """

    windows: Sequence[int] = (6, 16)
    thresholds: Sequence[float] = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    penalties: Sequence[float] = (0.0, 0.02, 0.1)
    draft_thresholds: Sequence[float] = (0.4, 0.8)
    decoders: Sequence[str] = tuple(DECODERS)

    def __post_init__(self) -> None:
        for options in self.candidates().values():
            WeDLMGenerationSettings(**options)

    @property
    def block_penalty(self) -> float:
        """λ of block-wise decoding."""
        return sorted(self.penalties)[len(self.penalties) // 2]

    def candidates(self) -> dict[str, dict[str, Any]]:
        """Keywords of `generate` by name. They override whatever of them a checkpoint stores."""
        values: dict[str, tuple[Sequence[float], Sequence[float | None]]] = {
            BLOCK: (self.thresholds, [self.block_penalty]),
            STREAMING: (self.thresholds, self.penalties),
            TYPICAL: (self.draft_thresholds, [None]),
            VERIFIED: (self.draft_thresholds, [None]),
        }
        named: dict[str, dict[str, Any]] = {AR: dict(DECODERS[AR])}
        for decoder, (thresholds, penalties) in values.items():
            if decoder in self.decoders:
                for window, threshold, penalty in itertools.product(self.windows, thresholds, penalties):
                    name, options = configured(decoder, window, threshold, penalty)
                    named[name] = options
        return named


def decoders_named(names: Sequence[str]) -> list[str]:
    """Of [`DECODERS`], by the names that command lines have for them.

    Raises:
        ValueError: for an unknown one.
    """
    if unknown := [name for name in names if name not in ON_COMMAND_LINES]:
        raise ValueError(f"Unknown decoder {unknown[0]!r}: choose among {', '.join(ON_COMMAND_LINES)}.")
    return [ON_COMMAND_LINES[name] for name in names]


def configured(
    decoder: str, window: int, threshold: float, penalty: float | None, budget: float | None = None
) -> tuple[str, dict[str, Any]]:
    """Name and keywords of `generate` of a decoder other than AR, with everything that a checkpoint may store."""
    name = f"{decoder} W={window} τ={threshold:g}"
    options = {**DECODERS[decoder], "window_size": window, "entropy_threshold": threshold}
    options |= {"entropy_budget": budget, "adaptive_window": None}
    if penalty is not None:
        name, options["distance_penalty"] = f"{name} λ={penalty:g}", penalty
    return (name if budget is None else f"{name} budget={budget:g}"), options


def largest_loss(row: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Points of quality lost to the reference on the task where most are lost; below 0 if all tasks gain.

    Args:
        row: has `tasks`, which have `quality` by task, 0 to 1.
        reference: the same, of AR.
    """
    return max(100 * (reference["tasks"][task]["quality"] - row["tasks"][task]["quality"]) for task in row["tasks"])


def choose(
    rows: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], max_loss: float
) -> Mapping[str, Any] | None:
    """The row with the most tokens per forward among those of unverified streaming decoding that lose at most
    `max_loss` points of quality on every task (see [`largest_loss`])."""
    good = [row for row in rows if row["decoder"] == STREAMING and round(largest_loss(row, reference), 9) <= max_loss]
    return max(good, key=lambda row: row["tokens_per_forward"], default=None)


def write_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Store settings in a checkpoint's generation_config.json, whole or not at all, and remove those that are None;
    which strategy is used stays the caller's choice."""
    path = checkpoint / "generation_config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored.pop("_from_model_config", None)  # with this flag, loading would drop our fields
    stored = {name: value for name, value in (stored | dict(settings)).items() if settings.get(name, 0) is not None}
    write_text(path, json.dumps(stored, indent=2, sort_keys=True) + "\n")
