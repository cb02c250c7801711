"""What `wedlm report` makes of its measurements: rows of numbers with standard errors, the front, the area, and checks
of the paper's trends.

Errors come from a bootstrap over prompts: each resample draws as many prompts as there are, with replacement, the same
ones for every decoder, so that differences of decoders are of the same prompts. What the machine does between two
repeats is not in them, but for what reaches the medians.

`N` prompts, `T` of them timed, `R` resamples; index 0 of R + 1 values is that of the prompts as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch

from .report_measure import Measured
from .sweep import AR, BLOCK, DECODERS, FIELDS, STREAMING, largest_loss

RESAMPLES = 1000
LEAST_PROMPTS = 6  # for a standard error
AREA_LOSS = 0.05
SEVERAL = 2.0
METRICS = ("quality", "agreement", "tokens_per_forward", "prefix_cacheability", "tokens_per_second", "speed")


class Sample:
    """Metrics of the decoders of a part, on its prompts and on resamples of them."""

    def __init__(self, measured: Measured, resamples: int = RESAMPLES):
        self.measured = measured
        generator = torch.Generator().manual_seed(0)
        self._weights = _weights(len(measured.tasks), resamples, generator)
        self._timed_weights = _weights(len(measured.timed), resamples, generator)
        self._known: dict[str, dict[str, torch.Tensor]] = {}

    def metrics(self, decoder: str) -> dict[str, torch.Tensor]:
        """`(R + 1,)` of each of the [`METRICS`]."""
        if decoder not in self._known:
            measured = self.measured
            self._known[decoder] = _metrics(
                self._weights @ measured.counts[decoder],
                self._weights.sum(1),
                self._timed_weights @ measured.times[decoder],
                self._timed_weights @ measured.times[AR],
            )
        return self._known[decoder]

    def error(self, values: torch.Tensor, *, is_timed: bool = False) -> float:
        """Standard error of what was computed on `(R + 1,)` resamples; NaN for fewer than [`LEAST_PROMPTS`]."""
        measured = self.measured
        count = len(measured.timed) if is_timed else len(measured.tasks)
        if count < LEAST_PROMPTS:
            return float("nan")
        return float(values[1:].std() * (count / (count - 1)) ** 0.5)

    def row(self, decoder: str) -> dict[str, Any]:
        """Metrics, their standard errors (`…_error`), and metrics by task, as JSON takes them."""
        values = self.metrics(decoder)
        row: dict[str, Any] = {"prompts": len(self.measured.tasks), "timed": len(self.measured.timed)}
        for name in METRICS:
            error = self.error(values[name], is_timed=_is_timed(name))
            row |= {name: rounded(float(values[name][0])), f"{name}_error": rounded(error)}
        return row | {"tasks": self._tasks(decoder)}

    def _tasks(self, decoder: str) -> dict[str, dict[str, Any]]:
        measured, rows = self.measured, {}
        for task in dict.fromkeys(measured.tasks):
            mine = torch.tensor([other == task for other in measured.tasks], dtype=torch.float64)[None]
            timed = mine[:, list(measured.timed)]
            times = (timed @ measured.times[name] for name in (decoder, AR))
            values = _metrics(mine @ measured.counts[decoder], mine.sum(1), *times)
            rows[task] = {"prompts": int(mine.sum()), "timed": int(timed.sum())} | {
                name: rounded(float(values[name][0])) for name in METRICS
            }
        return rows


def sweep_rows(sample: Sample, candidates: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each setting (see [`Sample.row`]), with `name`, `decoder`, its settings, `largest_loss` (points, on
    the task that loses most) and `on_front`: no other one is as good in quality and in speed, and better in one."""
    rows = []
    for name, options in candidates.items():
        kept = {key: options.get(key) for key in FIELDS}
        rows.append({"name": name, "decoder": _decoder_of(options), **kept, **sample.row(name)})
    for row in rows:
        row["largest_loss"] = round(largest_loss(row, rows[0]), 4)
        row["on_front"] = not any(_beats(other, row) for other in rows)
    return rows


def areas(sample: Sample, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Area under the accuracy–parallelism curve of each decoder of a sweep.

    A decoder's points are (t, q) of its settings: tokens per forward and quality. Those that lose more than
    [`AREA_LOSS`] of quality to AR are left out, and AR's own (1, q_AR) is always among them, for every decoder can
    fall back to it. The curve at x is the best quality to be had with at least x tokens per forward, max{q : t ≥ x},
    and 0 beyond the fastest point. The area is its integral over x ≥ 0, divided by q_AR: 1 is AR decoding, and a
    decoder that loses nothing has as much as it has tokens per forward.

    Returns:
        for each decoder `area`, `error`, and `curve`, the corners (x, quality) that it is made of; the area is `None`
        where AR has no right answer.
    """
    found = []
    reference = sample.metrics(AR)["quality"]
    for decoder in dict.fromkeys(row["decoder"] for row in rows):
        names = [row["name"] for row in rows if row["decoder"] == decoder]
        values = [sample.metrics(name) for name in names if name != AR]
        points = [
            torch.stack([value["tokens_per_forward"] for value in values] + [torch.ones_like(reference)]).T.tolist(),
            torch.stack([value["quality"] for value in values] + [reference]).T.tolist(),
        ]
        curves = [
            staircase(zip(speeds, qualities, strict=True), least=best - AREA_LOSS)
            for speeds, qualities, best in zip(*points, reference.tolist(), strict=True)
        ]
        sizes = torch.tensor([area_under(curve) for curve in curves], dtype=torch.float64) / reference
        found.append(
            {
                "decoder": decoder,
                "area": rounded(float(sizes[0])),
                "error": rounded(sample.error(sizes)),
                "curve": [[rounded(x), rounded(y)] for x, y in curves[0]],
            }
        )
    return found


def staircase(points: Any, least: float = 0.0) -> list[tuple[float, float]]:
    """Corners (x, y) of max{y : t ≥ x} over points (t, y) with y of `least` at least, x ascending, y descending."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points, reverse=True):
        if y >= least - 1e-12 and (not corners or y > corners[-1][1]):
            corners.append((x, y))
    return corners[::-1]


def area_under(corners: Sequence[tuple[float, float]]) -> float:
    """Integral over x ≥ 0 of the function with these corners (see [`staircase`])."""
    begins = [0.0, *(x for x, _ in corners)]
    return sum((x - begin) * y for begin, (x, y) in zip(begins, corners, strict=False))


# --- the paper's trends -------------------------------------------------------------------------------------------

HOLDS, LARGELY, MIXED, OPEN, FAILS, MISSING = (
    "holds",
    "holds on average",
    "mixed",
    "not decided",
    "does not hold",
    "not measured",
)


@dataclass(frozen=True)
class Check:
    """One claim against this run.

    Attributes:
        claim: in words.
        measure: what was compared.
        verdict: one of [`HOLDS`] and its neighbours.
        evidence: the numbers, in words.
        comparisons: `label`, `difference` (positive: for the claim), `error`, `sign`: 1 for it, −1 against it, 0 for
            what the noise hides, `None` for no difference at all.
    """

    claim: str
    measure: str
    verdict: str
    evidence: str
    comparisons: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class _Measure:
    """A metric, and how two values of it are compared."""

    words: str
    metric: str
    difference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    unit: str


_QUALITY = _Measure("quality", "quality", lambda a, b: 100 * (a - b), "points")
_FORWARDS = _Measure("tokens per forward", "tokens_per_forward", lambda a, b: 100 * (a / b).log(), "%")
_CLOCK = _Measure("tokens/s", "tokens_per_second", lambda a, b: 100 * (a / b).log(), "%")
_CACHE = _Measure("prefix cacheability", "prefix_cacheability", lambda a, b: a - b, "")


def compare(sample: Sample, claim: str, measure: _Measure, pairs: Sequence[tuple[str, str, str]]) -> Check:
    """Whether in every pair the first decoder has more than the second.

    *holds*: significantly so in every pair. *holds on average*: the mean difference is significantly so, no pair is
    significantly against it. *mixed*: the mean is, but a pair is against it. *does not hold*: the mean is
    significantly against it, or there is no difference at all. *not decided*: anything else. Significant is two-sided
    at 95 %, for single pairs over all of them together (Bonferroni).

    Args:
        sample: has the decoders.
        claim: in words.
        measure: to compare by.
        pairs: label and two decoders each.
    """
    if not pairs:
        return Check(claim, measure.words, MISSING, "The sweep has no two settings that show it.")
    is_timed = _is_timed(measure.metric)
    differences = [
        measure.difference(*(sample.metrics(name)[measure.metric] for name in names)) for _, *names in pairs
    ]
    count = len(sample.measured.timed) if is_timed else len(sample.measured.tasks)
    critical, usual = (student_quantile(1 - 0.025 / n, count - 1) for n in (len(pairs), 1))
    comparisons, signs = [], []
    for (label, *_), values in zip(pairs, differences, strict=True):
        difference, error = float(values[0]), sample.error(values, is_timed=is_timed)
        sign = _sign(difference, error, critical, count, len(pairs))
        signs.append(sign)
        comparisons.append({"label": label, "difference": rounded(difference), "error": rounded(error), "sign": sign})
    together = torch.stack(differences).mean(0)
    mean, error = float(together[0]), sample.error(together, is_timed=is_timed)
    overall = _sign(mean, error, usual, count, 1)
    if error != error:  # NaN
        verdict = OPEN
    elif overall == 1:
        verdict = MIXED if -1 in signs else HOLDS if set(signs) == {1} else LARGELY
    else:
        verdict = OPEN if overall == 0 else FAILS
    number = f"{mean:+.{3 if not measure.unit else 1}f}"
    unit = f" {measure.unit}" if measure.unit else ""
    parts = [f"{number}{unit} on average"]
    if error == error:
        parts[0] += f" (± {usual * error:.{3 if not measure.unit else 1}f})"
    if len(pairs) > 1:
        counts = [f"{signs.count(sign)} {word}" for sign, word in _SIGNS.items() if signs.count(sign)]
        parts.append(f"of {len(pairs)} comparisons {', '.join(counts)}")
    if error != error:
        parts.append(f"fewer than {LEAST_PROMPTS} prompts")
    return Check(claim, measure.words, verdict, "; ".join(parts), comparisons)


_SIGNS = {1: "clearly for it", -1: "clearly against it", 0: "within the noise", None: "with no difference at all"}


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t above 1/2: a bootstrap of few prompts knows its own error badly.

    By the expansion in 1/freedom of Fisher and Cornish; infinite without any freedom.
    """
    if freedom < 1:
        return float("inf")
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _sign(difference: float, error: float, critical: float, count: int, comparisons: int) -> int | None:
    if difference == 0 and error == 0:
        return None
    if not abs(difference) > critical * error:
        return 0
    if error == 0 and 2.0 ** (1 - count) >= 0.05 / comparisons:  # all prompts alike: no more than a test of signs
        return 0
    return 1 if difference > 0 else -1


def trends(sample: Sample, rows: Sequence[Mapping[str, Any]], texts: Sequence[EntropyEffect]) -> list[Check]:
    """Checks of what the paper reports: effects of τ and λ (Fig. 4a–b), streaming against block-wise (Fig. 4c), speed
    by entropy of the text (§6.6).

    Args:
        sample: of the sweep.
        rows: of the sweep.
        texts: of the headline prompts, by decoder.
    """
    named = {(row["decoder"], *(row[field] for field in FIELDS)): row["name"] for row in rows}
    steps, against_block, penalised = [], [], []
    for (decoder, window, tau, penalty), name in named.items():
        if decoder != STREAMING:
            continue
        label = f"W={window} λ={penalty:g} τ={tau:g}"
        higher = [key for key in named if key[:2] == (decoder, window) and key[3] == penalty and key[2] > tau]
        if higher:
            following = min(higher, key=lambda key: key[2])
            steps.append((f"{label} → {following[2]:g}", name, named[following]))
        if (block := named.get((BLOCK, window, tau, penalty))) is not None:
            against_block.append((label, name, block))
        if penalty > 0 and (free := named.get((STREAMING, window, tau, 0))) is not None:
            penalised.append((f"W={window} τ={tau:g} λ=0 → {penalty:g}", name, free))
    slower = [(label, high, low) for label, low, high in steps]
    cacheability = compare(sample, "λ > 0 raises prefix cacheability", _CACHE, penalised)
    if penalised:  # At the same τ, λ also takes fills away, and masks that wait are processed again.
        also = compare(sample, "", _FORWARDS, penalised)
        cacheability = replace(cacheability, evidence=f"{cacheability.evidence}; tokens per forward {also.evidence}")
    return [
        compare(sample, "Lower τ is more accurate", _QUALITY, steps),
        compare(sample, "Lower τ is slower", _FORWARDS, slower),
        compare(sample, "Lower τ is slower", _CLOCK, slower),
        compare(sample, "Streaming is faster than block-wise at every τ", _FORWARDS, against_block),
        compare(sample, "Streaming is faster than block-wise at every τ", _CLOCK, against_block),
        cacheability,
        *(check for text in texts for check in text.checks()),
    ]


class EntropyEffect:
    """How the speed of one decoder depends on the entropy of the text: that of the AR head, mean over AR's answer.

    The third of the prompts with the least entropy is set against the third with the most.
    """

    def __init__(self, sample: Sample, name: str, decoder: str):
        measured = sample.measured
        self.sample, self.name, self.decoder = sample, name, decoder
        self.entropies = measured.entropies
        counts, times = measured.counts[decoder], measured.times[decoder]
        self.tokens_per_forward = counts[:, 2] / counts[:, 3]
        self.speeds = (times[:, 0] / times[:, 1]) / (measured.times[AR][:, 0] / measured.times[AR][:, 1])

    def checks(self) -> list[Check]:
        """One by tokens per forward over all prompts, one by speed against AR over those that were timed."""
        measured = self.sample.measured
        counts = measured.counts[self.decoder]
        timed = self.entropies[list(measured.timed)]
        ones = torch.ones(len(timed), dtype=torch.float64)
        return [
            self._check(f"tokens per forward, {self.name}", self.entropies, counts[:, 2], counts[:, 3], ""),
            self._check(f"speed against AR, {self.name}", timed, self.speeds, ones, "×"),
        ]

    def _check(
        self, words: str, entropies: torch.Tensor, above: torch.Tensor, below: torch.Tensor, unit: str
    ) -> Check:
        """Compares Σ above / Σ below of the thirds."""
        claim = f"Low-entropy text decodes several times (≥ {SEVERAL:g}×) faster than high-entropy text"
        third = len(entropies) // 3
        if third < LEAST_PROMPTS or float(entropies.min()) == float(entropies.max()):
            needed = f"It takes {3 * LEAST_PROMPTS} prompts of different entropy"
            return Check(claim, words, MISSING, f"{needed}, there are {len(entropies.unique())}.")
        order = entropies.argsort(stable=True)
        generator = torch.Generator().manual_seed(0)
        speeds = []
        for part in (order[:third], order[-third:]):
            weights = _weights(third, RESAMPLES, generator)
            speeds.append((weights @ above[part]) / (weights @ below[part]))
        ratio = speeds[0] / speeds[1]
        low, high = ratio[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        verdict = HOLDS if low >= SEVERAL else FAILS if high < SEVERAL else OPEN
        correlation = spearman(entropies, above / below)
        means = [float(entropies[part].mean()) for part in (order[:third], order[-third:])]
        return Check(
            claim,
            words,
            verdict,
            f"{float(speeds[0][0]):.2f}{unit} in the third with the least entropy ({means[0]:.2g} nats), "
            f"{float(speeds[1][0]):.2f}{unit} in the third with the most ({means[1]:.2g} nats): "
            f"{float(ratio[0]):.2f} times as fast (95 %: {low:.2f} to {high:.2f}); rank correlation "
            f"{correlation:+.2f} over {len(entropies)} prompts",
        )

    def to_dict(self) -> dict[str, Any]:
        """Prompts and tasks, as JSON takes them."""
        measured = self.sample.measured
        speeds = dict(zip(measured.timed, self.speeds.tolist(), strict=True))
        lengths = measured.counts[AR][:, 2]
        tasks = {}
        for task, row in self.sample.row(self.decoder)["tasks"].items():
            mine = torch.tensor([other == task for other in measured.tasks])
            tasks[task] = {
                "entropy": rounded(float(self.entropies[mine].mean())),
                "answer_tokens": rounded(float(lengths[mine].mean())),
                "tokens_per_forward": row["tokens_per_forward"],
                "speed": row["speed"],
            }
        return {
            "decoder": self.name,
            "tasks": tasks,
            "prompts": [
                {
                    "task": task,
                    "entropy": rounded(float(self.entropies[index])),
                    "tokens_per_forward": rounded(float(self.tokens_per_forward[index])),
                    "speed": rounded(speeds.get(index)),
                }
                for index, task in enumerate(measured.tasks)
            ],
        }


def spearman(first: torch.Tensor, second: torch.Tensor) -> float:
    """Rank correlation of two `(N,)`; ties share their mean rank. NaN where one of them is constant."""
    return float(torch.corrcoef(torch.stack([_ranks(first), _ranks(second)]))[0, 1])


def _ranks(values: torch.Tensor) -> torch.Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[places]


def rounded(value: float | None) -> float | None:
    """To six digits; `None` for what is not a number."""
    return None if value is None or value != value or abs(value) == float("inf") else float(f"{value:.6g}")


def _weights(count: int, resamples: int, generator: torch.Generator) -> torch.Tensor:
    """How often each of `count` prompts occurs: `(R + 1, count)` float64, the first row once each."""
    drawn = torch.randint(count, (resamples, count), generator=generator)
    weights = torch.zeros(resamples, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    return torch.cat([torch.ones(1, count, dtype=torch.float64), weights])


def _metrics(
    counts: torch.Tensor, prompts: torch.Tensor, times: torch.Tensor, reference: torch.Tensor
) -> dict[str, torch.Tensor]:
    """From sums over prompts: `counts` `(R, 5)`, `prompts` `(R,)`, `times` and AR's `reference` `(R, 2)`."""
    quality, agreeing, tokens, forwards, instances = counts.T
    seconds_per_token, of_ar = (each[:, 1] / each[:, 0] for each in (times, reference))
    return {
        "quality": quality / prompts,
        "agreement": agreeing / prompts,
        "tokens_per_forward": tokens / forwards,
        "prefix_cacheability": (tokens / instances.clamp(min=1)).clamp(max=1),
        "tokens_per_second": 1 / seconds_per_token,
        "speed": of_ar / seconds_per_token,
    }


def _is_timed(metric: str) -> bool:
    return metric in ("tokens_per_second", "speed")


def _beats(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    pairs = [(other[name], row[name]) for name in ("quality", "speed")]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _decoder_of(options: Mapping[str, Any]) -> str:
    keys = ("strategy", "verification")
    return next(name for name, own in DECODERS.items() if all(own.get(key) == options.get(key) for key in keys))
