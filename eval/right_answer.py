"""Whether replies to the built-in tasks are right, as a metric of the `evaluate` library; needs no network.

evaluate.load("PATH/right_answer.py").compute(predictions=[reply], references=[sample_as_json])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module

import datasets
import evaluate

# By name: `evaluate.load` runs a copy of this file, which has no siblings.
_tasks = import_module("wedlm_hf.eval.tasks")


class RightAnswer(evaluate.Metric):
    """Share of the replies that `is_correct` of the tasks accepts; a reference is a `Sample` as JSON."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of right replies to the tasks of wedlm_hf.eval.tasks.",
            citation="",
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        right = [
            _tasks.is_correct(_tasks.Sample(**json.loads(reference)), prediction)
            for reference, prediction in zip(references, predictions, strict=True)
        ]
        return {"right": sum(right) / max(1, len(right))}
