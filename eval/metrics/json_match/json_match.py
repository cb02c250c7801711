"""Whether a reply holds the JSON value of the answer, as a metric of the library `evaluate`."""

import datasets
import evaluate

from .values import same_json

_DESCRIPTION = """The share of predictions that hold the JSON value of their references.

Words or a code fence may stand around the JSON value of a prediction: its first object or array counts. The order of
keys, white space and the way a number is written (1, 1.0, 1e0) make no difference. The order of an array does, and so
does true beside 1 or "1"."""

_INPUTS = """
Args:
    predictions: list of texts.
    references: list of texts, each a JSON value.
Returns:
    json_match: share of equal values, 0 to 1.
"""


class JsonMatch(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        right = [same_json(*pair) for pair in zip(predictions, references, strict=True)]
        return {"json_match": sum(right) / len(right)}
