"""Whether the last number of a reply is that of the answer, as a metric of the library `evaluate`."""

import datasets
import evaluate

from .last_number import same_number

_DESCRIPTION = """The share of predictions whose last number is the last number of their references.

The way a number is written makes no difference: 1200, 1,200, 1200.0 and 1.2e3 are equal, and so are $5 and 5 apples. A
minus sign counts where nothing stands right before it: 7-3 ends in 3."""

_INPUTS = """
Args:
    predictions: list of texts.
    references: list of texts.
Returns:
    final_number: share of equal numbers, 0 to 1.
"""


class FinalNumber(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        right = [same_number(*pair) for pair in zip(predictions, references, strict=True)]
        return {"final_number": sum(right) / len(right)}
