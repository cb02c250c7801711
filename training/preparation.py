"""Datasets made ready for training: examples are read, shortened and counted, so that none is lost in silence."""

import logging
from collections import Counter
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .examples import DataReport, Outcome, first_example, fit_example, is_chat, kind_of, read_example
from .sft_config import WeDLMSFTConfig

logger = get_logger(__name__)


class Preparation:
    """Reads, fits and counts the examples of a run's datasets, map or iterable.

    Attributes:
        reports: of the datasets whose examples are all counted; those of a stream are counted as it is read.
    """

    def __init__(self, args: WeDLMSFTConfig):
        self.args = args
        self.reports: dict[str, DataReport] = {}
        self._counts: dict[str, torch.Tensor] = {}  # examples by outcome

    def check_first(self, dataset: Any, name: str) -> dict[str, Any]:
        """The keywords of [`read_example`] for a dataset. Raises `ValueError` if its first example cannot be read."""
        example, text_field = first_example(dataset, name), self.args.dataset_text_field
        if self.args.assistant_only_loss is None:
            self.args.assistant_only_loss = is_chat(example, text_field)
        reading: dict[str, Any] = {
            "name": name,
            "kind": kind_of(example, text_field),
            "text_field": text_field,
            "needs_assistant": self.args.assistant_only_loss,
        }
        read_example(example, 0, **reading)
        return reading

    def read(self, dataset: Any, name: str) -> Any:
        """Checks each example, leaves it the columns of its kind, and drops conversations without a turn to learn.

        Raises:
            ValueError: for an example that cannot be read, and where nothing is left.
        """
        reading, columns = self.check_first(dataset, name), list(first_example(dataset, name))
        with PartialState().main_process_first():
            how = self._how(dataset, f"Reading {name} dataset")
            dataset = dataset.map(read_example, with_indices=True, fn_kwargs=reading, remove_columns=columns, **how)
            return self._drop(dataset, name, is_last=False)

    def read_evaluation(self, datasets: Any) -> Any:
        """[`read`] for what to evaluate on: nothing, a dataset, or several by name."""
        if isinstance(datasets, dict):
            return {name: self.read(dataset, name) for name, dataset in datasets.items()}
        return datasets if datasets is None else self.read(datasets, "eval")

    def fit(self, dataset: Any, name: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Any:
        """Shortens tokenised examples to `max_length`, drops what cannot be learnt, counts, and reports.

        With `packing_strategy="bfd_split"`, nothing is shortened: packing splits what is too long.

        Raises:
            ValueError: where nothing is left, or no response ends in the end token.
        """
        splits = self.args.packing and self.args.packing_strategy == "bfd_split"
        limits = {"max_length": None if splits else self.args.max_length, "vocab_size": vocab_size}
        with PartialState().main_process_first():
            how = self._how(dataset, f"Fitting {name} dataset")
            dataset = dataset.map(fit_example, fn_kwargs={"tokenizer": tokenizer, **limits}, **how)
            return self._drop(dataset, name, is_last=True)

    def report_streams(self) -> None:
        """Reports what has been read of the datasets that were not counted before."""
        for name in list(self._counts):
            self._report(name)

    def _how(self, dataset: Any, title: str) -> dict[str, Any]:
        return {"desc": title, "num_proc": self.args.dataset_num_proc} if isinstance(dataset, Dataset) else {}

    def _drop(self, dataset: Any, name: str, *, is_last: bool) -> Any:
        """Leaves out what cannot be trained on, and counts it; the last time, counts and reports what is left, too."""
        if name not in self._counts:  # in shared memory: data workers read the streams
            self._counts[name] = torch.zeros(len(Outcome), dtype=torch.int64).share_memory_()
        counts = self._counts[name]
        if not isinstance(dataset, Dataset):
            return dataset.filter(_count_and_keep, fn_kwargs={"counts": counts, "count_kept": is_last})
        outcomes = torch.tensor(dataset["outcome"], dtype=torch.int64)
        is_kept = torch.tensor([outcome.is_kept for outcome in Outcome])[outcomes]
        counts += torch.bincount(outcomes if is_last else outcomes[~is_kept], minlength=len(counts))
        dataset = dataset.filter(lambda outcome: Outcome(outcome).is_kept, input_columns="outcome")
        if is_last or not len(dataset):
            self._report(name)
        return dataset

    def _report(self, name: str) -> None:
        report = self.reports[name] = DataReport(name, Counter(dict(enumerate(self._counts.pop(name).tolist()))))
        if not report.kept:
            raise ValueError(f"There is nothing to train on. {str(report).capitalize()}.")
        is_whole = report.outcomes.total() == report.outcomes[Outcome.WHOLE]
        logger.log(logging.INFO if is_whole else logging.WARNING, str(report))


def _count_and_keep(example: Any, counts: torch.Tensor, count_kept: bool) -> bool:
    outcome = Outcome(example["outcome"])
    if count_kept or not outcome.is_kept:
        counts[outcome] += 1
    return outcome.is_kept


def check_stops(dataset: Dataset, name: str, eos_token: Any) -> None:
    """Raises `ValueError` where no whole response of a fitted dataset ends in the end token."""
    stops = [row_stops for row_stops, outcome in zip(dataset["stops"], dataset["outcome"], strict=True) if not outcome]
    if stops and not any(stops):
        raise ValueError(
            f"No response of the {name} dataset ends in the end token {eos_token!r}: the model would never learn to "
            "stop. Pass the token that ends them as `eos_token` (for ChatML: '<|im_end|>')."
        )
