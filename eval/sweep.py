"""Settings that are tried, the one rule that picks among them, and how a checkpoint stores what was picked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..generation.settings import WeDLMGenerationSettings
from .decoders import AR, BLOCK, COMPARED, DECODERS, EXACT, LOOKUP, TYPICAL, WEDLM
from .files import write_text

FIELDS = ("window_size", "entropy_threshold", "distance_penalty")


def candidates(
    windows: Sequence[int],
    thresholds: Sequence[float],
    penalties: Sequence[float],
    draft_thresholds: Sequence[float] = (),
    decoders: Sequence[str] = tuple(DECODERS),
) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, for all combinations, AR first. They override whatever of them a checkpoint
    stores.

    Args:
        windows: W, slots.
        thresholds: τ, nats.
        penalties: λ, nats per position; block-wise decoding is tried with the middle one.
        draft_thresholds: τ of the drafts of verified decoding, which have no λ, nats.
        decoders: among those [`COMPARED`]; AR is always there.

    Raises:
        ValueError: for an unknown decoder, and for a value that is no setting.
    """
    if unknown := [name for name in decoders if name not in COMPARED]:
        raise ValueError(f"Unknown decoder {unknown[0]!r}: choose among {', '.join(COMPARED)}.")
    middle = sorted(penalties)[len(penalties) // 2]
    values: dict[str, tuple[Sequence[float], Sequence[float | None]]] = {
        BLOCK: (thresholds, [middle]),
        WEDLM: (thresholds, penalties),
        TYPICAL: (draft_thresholds, [None]),
        EXACT: (draft_thresholds, [None]),
    }
    named = {name: dict(COMPARED[name]) for name in COMPARED if name == AR or (name == LOOKUP and name in decoders)}
    for decoder in values:
        for setting in itertools.product(windows, *values[decoder]) if decoder in decoders else ():
            options = configured(decoder, *setting)
            WeDLMGenerationSettings(**options)  # refuses what is out of range
            named[setting_name(decoder, options)] = options
    return named


def configured(decoder: str, window: int, threshold: float, penalty: float | None = None) -> dict[str, Any]:
    """Keywords of `generate` of a decoder other than AR."""
    settings = dict(zip(FIELDS, (window, threshold, penalty), strict=True))
    return {**DECODERS[decoder], **{name: value for name, value in settings.items() if value is not None}}


def setting_name(decoder: str, options: Mapping[str, Any]) -> str:
    """Such as `wedlm W=6 τ=0.4 λ=0.02`."""
    symbols = zip(("W", "τ", "λ"), FIELDS, strict=True)
    return " ".join([decoder, *(f"{symbol}={options[name]:g}" for symbol, name in symbols if name in options)])


def settings_table(named: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Columns `kind` (of those [`COMPARED`]) and the [`FIELDS`]; indexed by name."""
    table = pd.DataFrame.from_dict(named, orient="index").reindex(columns=["kind", *FIELDS]).rename_axis("decoder")
    return table.assign(kind=table.index.str.split().str[0])


def beaten(points: pd.DataFrame) -> pd.Series:
    """For each row, whether another is as good in every column and better in one."""
    values = points.to_numpy()
    dominates = (values[None] >= values[:, None]).all(-1) & (values[None] > values[:, None]).any(-1)
    return pd.Series(dominates.any(1), index=points.index)


def pick(summary: pd.DataFrame, max_loss: float, by: str) -> list[Any]:
    """The one rule by which settings are chosen: names of those whose `loss` is at most `max_loss`, the greatest `by`
    (another column of the summary) first."""
    good = summary[summary["loss"] <= max_loss + 1e-9]  # but for rounding
    return list(good.sort_values(by, ascending=False, kind="stable").index)


def write_settings(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Store settings in a checkpoint's generation_config.json, whole or not at all; which strategy is used stays the
    caller's choice."""
    path = checkpoint / "generation_config.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored.pop("_from_model_config", None)  # with this flag, loading would drop our fields
    write_text(path, json.dumps(stored | dict(settings), indent=2, sort_keys=True) + "\n")
