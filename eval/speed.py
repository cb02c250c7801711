"""How much faster than AR a decoder is, and whether the times can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .measure import Decoding

RESAMPLES = 1000
RANGE = (0.05, 0.95)
"""Quantiles of the resamples between which a speed lies."""
MOST_TURNS = 5
"""Turns after which decoding goes on no longer to find a ratio."""


@dataclass(frozen=True)
class Speed:
    """A ratio of times.

    A forward of several rows takes at least as long as AR's forward of one. So a speed above `limit` shows a machine
    that was busy with something else during AR's turn.

    Attributes:
        ratio: AR's time to the decoder's own.
        low, high: 90 % of the resamples lie between them; both are `ratio` where there was one turn.
        limit: tokens per forward.
        turns: how often each of both was timed.
    """

    ratio: float
    low: float
    high: float
    limit: float
    turns: int = 1

    @classmethod
    def of(cls, ar: Sequence[Sequence[float]], own: Sequence[Sequence[float]], limit: float) -> Speed:
        """The speed on one or more prompts.

        Args:
            ar: AR's seconds for each prompt and turn, its turns right before or after those of the decoder.
            own: the decoder's seconds for as many tokens, likewise.
            limit: the decoder's tokens per forward.
        """
        # Prompts are resampled where there are several of them, else the turns.
        several = len(own) > 1
        units = np.array([[np.median(turns) for turns in some] if several else some[0] for some in (ar, own)])
        total = np.sum if several else np.median
        drawn = np.random.default_rng(0).integers(units.shape[1], size=(RESAMPLES, units.shape[1]))
        low, high = np.quantile(np.divide(*total(units[:, drawn], axis=2)), RANGE)
        ratio = float(np.divide(*total(units, axis=1)))
        return cls(ratio, float(low), float(high), limit, min(map(len, own)))

    @property
    def is_known(self) -> bool:
        """Whether no further turn is needed: the ratio is possible, or as narrow as it is odd."""
        return self.ratio <= self.limit or (self.turns >= 3 and self.high <= 1.1 * self.low)

    def __str__(self) -> str:
        return speed_text(self.ratio, self.low, self.high, self.limit)


def speed_of(ar: Sequence[Decoding], own: Sequence[Decoding]) -> Speed:
    """The speed of a decoder from its answers and AR's to the same prompts. Answers may differ: AR's seconds count for
    as many tokens as the decoder has."""
    scales = [len(mine.tokens) / len(its.tokens) for mine, its in zip(own, ar, strict=True)]
    scaled = [
        [scale * seconds for seconds in its.turns or [its.seconds]] for scale, its in zip(scales, ar, strict=True)
    ]
    limit = sum(len(one.tokens) for one in own) / sum(one.forwards for one in own)
    return Speed.of(scaled, [list(one.turns) or [one.seconds] for one in own], limit)


def in_turn(turns: Sequence[Decoding]) -> Decoding:
    """The first of several equal answers, with the times of all turns."""
    times = [one.seconds for one in turns]
    return replace(turns[0], seconds=median(times), turns=times)


def speed_text(ratio: float, low: float, high: float, limit: float) -> str:
    """A speed, with its range or a reservation if it is above its limit (see [`Speed`])."""
    if not ratio > limit + 0.005:
        return f"{ratio:.2f}×"
    return f"{ratio:.2f}× ({low:.2f}–{high:.2f})" if low < high else f"{ratio:.2f}× (busy machine)"
