"""When a reply is right: rules of our own, which are metrics of the library `evaluate` too, and any other metric."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .final_number.last_number import same_number
from .json_match.values import same_json

RULES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda reply, answer: reply.strip() == answer.strip(),
    "number": same_number,
    "json": same_json,
}
"""By name: `exact`, the same text, white space around it aside; `number`, the last number is that of the answer;
`json`, the same JSON value, whatever text is around it."""

TOPS = (1.0, 100.0)  # what metrics give a reply that could not be better
_SAMPLE = 'As everybody knows who has read the book, it is {"answer": 42}'  # has what a metric may look for


@cache
def judge(metric: str) -> Callable[[str, Sequence[str]], float]:
    """A function of a reply and its accepted answers, of which the best one counts: 0 to 1. The metric is one of the
    [`RULES`], or a name or path that `evaluate.load` takes; one that gives up to 100 is scaled.

    Raises `ValueError` for a metric that cannot be loaded, and for one that cannot compare a text with a text.
    """
    if metric in RULES:
        rule = RULES[metric]
        return lambda reply, answers: float(any(rule(reply, answer) for answer in answers))
    loaded = _load(metric)
    top = _value(loaded, metric, _SAMPLE, _SAMPLE)
    scale = next((scale for scale in TOPS if math.isclose(top, scale, rel_tol=1e-6)), None)
    if scale is None:
        wanted = "quality needs one that gives 1 or 100"
        raise ValueError(f"`metric={metric!r}` gives {top:g} to a reply that is the answer itself: {wanted}.")
    return lambda reply, answers: max(_value(loaded, metric, reply, answer) for answer in answers) / scale


def _load(metric: str) -> Any:
    try:
        import evaluate
    except ImportError:
        raise ValueError(f"The metric {metric!r} needs evaluate: pip install '.[eval]' in the clone.") from None
    try:
        return evaluate.load(metric, keep_in_memory=True)
    except Exception as error:  # of the Hub, of what the metric imports, of a file that is no metric
        known = f"{', '.join(RULES)}, a folder, or a name on the Hub"
        raise ValueError(f"There is no metric {metric!r} ({known}): {_first_line(error)}") from error


def _value(loaded: Any, metric: str, reply: str, answer: str) -> float:
    """The number that the metric is named for, or else its first one."""
    try:
        found = loaded.compute(predictions=[reply], references=[answer]) or {}
    except Exception as error:  # a metric runs whatever code it has
        raise ValueError(f"The metric {metric!r} compares no text with a text: {_first_line(error)}") from error
    numbers = {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
    if not numbers:
        raise ValueError(f"The metric {metric!r} gives no number, got {found!r}.")
    return numbers.get(loaded.name, next(iter(numbers.values())))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
