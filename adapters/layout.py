"""Layout of mask-adapter training (docs/algorithm.md#mask-adapters): answers, random cuts, and masks after each cut.

The base's own last row predicts the token right behind a cut, so the masks begin one position further on.

`B` answers of a batch, `L` tokens of the longest, `C` cuts of the one with the most, `K` masks after a cut.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..training.streams import IGNORE_INDEX

AnswerTokens = Mapping[str, Any]
"""`prompt_ids` and `response_ids`, lists of tokens; more about it in [`answers.Answer`]."""


class AnswerBatches(Dataset):
    """Batches of answers of similar length, as a map-style dataset: an item is a whole batch of bounded size.

    Which answers share a batch is a function of the answers and the seed alone.

    Args:
        answers: those of at least two tokens behind a prompt count.
        batch_slots: about how many masks a batch holds.
        cut_stride: response tokens for each cut.
        num_masks: K.
        seed: of the batches.

    Raises:
        ValueError: for answers none of which count.
    """

    def __init__(self, answers: Sequence[AnswerTokens], batch_slots: int, cut_stride: int, num_masks: int, seed: int):
        self.answers = [answer for answer in answers if answer["prompt_ids"] and len(answer["response_ids"]) > 1]
        if not self.answers:
            raise ValueError(f"None of the {len(answers)} answers has at least two tokens behind a prompt.")
        lengths = torch.tensor([len(answer["response_ids"]) for answer in self.answers])
        jitter = torch.rand(len(lengths), generator=torch.Generator().manual_seed(seed)) * 16
        self.batches: list[list[int]] = [[]]
        for index in (lengths + jitter).argsort(stable=True).tolist():
            # Rows are padded to the longest, which comes last.
            cuts = count_cuts(self.answers[index], cut_stride)
            if self.batches[-1] and (len(self.batches[-1]) + 1) * cuts * num_masks > batch_slots:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[AnswerTokens]:
        return [self.answers[member] for member in self.batches[index]]

    def digest(self) -> str:
        """Of all batches: two of these are the same where their digests are."""
        digest = hashlib.blake2b(digest_size=16)
        for batch in self.batches:
            tokens = [[self.answers[member][part] for part in ("prompt_ids", "response_ids")] for member in batch]
            digest.update(json.dumps(tokens).encode())
        return digest.hexdigest()


def count_cuts(answer: AnswerTokens, cut_stride: int) -> int:
    """How many cuts an answer gets: one for every `cut_stride` tokens that a mask can predict."""
    return -(-(len(answer["response_ids"]) - 1) // cut_stride)


@dataclass
class DataCollatorForMaskRuns:
    """Random cuts, and the tokens that the masks after them must predict.

    The response is divided into stretches of `cut_stride` tokens, and each gets one cut, drawn uniformly. Where a cut
    falls is a function of (seed, epoch, tokens of the answer) alone: batches, workers and processes change nothing.

    Args:
        pad_token_id: fills the rows.
        num_masks: K.
        cut_stride: response tokens for each cut.
        seed: of the cuts.
        is_shared: all answers of an epoch have their cuts at the same positions. A model that keeps a state reads a
            batch in pieces from cut to cut, and then there are no more than the longest answer has.
    """

    pad_token_id: int
    num_masks: int
    cut_stride: int
    seed: int = 0
    is_shared: bool = False

    def __post_init__(self) -> None:
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # data workers see it change

    def set_epoch(self, epoch: int) -> None:
        """Draws other cuts from now on."""
        self._epoch.fill_(epoch)

    def __call__(self, batches: Sequence[Sequence[AnswerTokens]]) -> dict[str, torch.Tensor]:
        """Lays out answers.

        Returns:
            `input_ids` `(B, L)`, right-padded; `cuts` `(B, C)`: position of the last token that the masks of a run
            see, -1 for none; `labels` `(B, C, K)`: the token at each mask's position, from the second behind the cut
            on, -100 behind the answer's end;
            `noise_key`, a scalar for further noise of this batch.
        """
        answers = [answer for batch in batches for answer in batch]
        tokens = [torch.tensor([*answer["prompt_ids"], *answer["response_ids"]]) for answer in answers]
        keys = [self._key(row) for row in tokens]
        drawn = [
            self._cuts(len(answer["prompt_ids"]), len(row), key)
            for answer, row, key in zip(answers, tokens, keys, strict=True)
        ]
        cuts = pad_sequence(drawn, batch_first=True, padding_value=-1)
        positions = cuts[..., None] + 2 + torch.arange(self.num_masks)
        padded = pad_sequence(tokens, batch_first=True, padding_value=IGNORE_INDEX)
        padded = nn.functional.pad(padded, (0, self.num_masks + 1), value=IGNORE_INDEX)
        labels = padded.gather(1, positions.flatten(1)).view_as(positions)
        return {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=self.pad_token_id),
            "cuts": cuts,
            "labels": labels.masked_fill(cuts[..., None] < 0, IGNORE_INDEX),
            "noise_key": torch.tensor(sum(keys) % 2**62),
        }

    def _cuts(self, prompt_length: int, length: int, key: int) -> torch.Tensor:
        """One cut in each stretch of the response; the last token of the prompt is the first place for one. A short
        response between shared cuts gets one of its own."""
        first, end, stride = prompt_length - 1, length - 2, self.cut_stride
        generator = torch.Generator().manual_seed(self._key(torch.zeros(0)) if self.is_shared else key)
        if self.is_shared:  # stretches of positions, whole ones: those of a longer answer begin with the same cuts
            drawn = torch.randint(stride, (-(-end // stride),), generator=generator)
            cuts = torch.arange(len(drawn)) * stride + drawn
            cuts = cuts[(cuts >= first) & (cuts < end)]
            return cuts if len(cuts) else torch.arange(first, end)[key % max(end - first, 1) :][:1]
        starts = torch.arange(first, end, stride)
        sizes = (end - starts).clamp(max=stride)
        return starts + (torch.rand(len(starts), generator=generator) * sizes).long()

    def _key(self, tokens: torch.Tensor) -> int:
        """A key of (seed, epoch, tokens)."""
        epoch, seed = int(self._epoch).to_bytes(8, "little"), str(self.seed).encode()
        content: Any = tokens.numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7, salt=epoch, key=seed).digest(), "little")
