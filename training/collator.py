"""Examples in, dual-stream batches out: all that `WeDLMForCausalLM.forward` needs under any `Trainer`."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ..generation.settings_wedlm import check_mask_token_id
from .masking import RatioSampler, mask_blocks, reorder_blocks

IGNORE_INDEX = -100
# Value of each column in the slots that pad a row.
PADDING = {"position_ids": 0, "stream_ids": -1, "block_ids": -1, "document_ids": -1, "targets": IGNORE_INDEX}


@dataclass
class DataCollatorForDualStreamMasking:
    """Turns tokenised examples into dual-stream batches (paper §4, Eq. 10).

    An example has `input_ids` and says what is supervised by `labels` (-100 = not; elsewhere `input_ids` again, not
    shifted), `assistant_masks` or `completion_mask` (1 = supervised), or by none of them (everything, as in
    pre-training). The first token of a document is never supervised: nothing predicts it. A packed example also has
    `seq_lengths`, the lengths of its documents (TRL's packing writes this column), or `document_ids`, one per token.
    Documents never see each other, and positions restart at 0 in each.

    `Trainer` drops every column that the model's `forward` does not name, before the collator sees it. Of the columns
    above, `input_ids`, `labels` and `document_ids` stay; the others need `remove_unused_columns=False`.

    A *response* is a run of supervised tokens that ends in the end token. A conversation of several responses becomes
    one document per response: the turns up to its end, itself alone supervised. So each response gets its `num_eos`
    end tokens, yet no later turn has "learnable padding" in its context, and no masked token sees the turn that
    follows: decoding never meets either. N and the AR loss are those of the whole conversation; the price is that the
    memory stream of a context runs once for each response to it. Unsupervised tokens after the last response (a
    template's newline) carry no loss and are left out.

    Args:
        tokenizer: gives the padding, end and mask tokens.
        block_size: B, tokens per prediction block (paper §6.1: 32).
        num_eos: copies of the end token at the end of a response (1 real, the others "learnable padding" that only the
            mask loss sees), so that masks past the end of an answer learn to say so. A truncated answer gets none: it
            is never taught to stop.
        ar_weight: a, weight of the auxiliary next-token loss; the sum of both is divided by 1 + a.
        ratio_sampler: see [`sample_masked_counts`].
        suffix_probability: see [`mask_blocks`]; 0 is the paper's layout.
        num_copies: independent prediction copies that share one memory stream (paper: 1).
        seed: the noise is a function of (seed, epoch, tokens of the document), of nothing else: it is the same for any
            batch size, order, packing, number of workers or processes, and after a resume. The epoch is 0 unless
            [`DynamicMaskingCallback`] or `set_epoch` says otherwise.

    Raises:
        ValueError: for settings out of range, and for a tokenizer without a needed token.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int = 32
    num_eos: int = 8
    ar_weight: float = 1.0
    ratio_sampler: RatioSampler = "count"
    suffix_probability: float = 0.0
    num_copies: int = 1
    seed: int = 0
    _epoch: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # In shared memory: persistent data workers see a new epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        for name, least in (("block_size", 1), ("num_eos", 1), ("num_copies", 1), ("ar_weight", 0)):
            value = getattr(self, name)
            if value < least or (name != "ar_weight" and not isinstance(value, int)):
                kind = "a number" if name == "ar_weight" else "an integer"
                raise ValueError(f"`{name}` must be {kind} of at least {least}, got {value}.")
        if not 0 <= self.suffix_probability <= 1:
            raise ValueError(f"`suffix_probability` must lie in [0, 1], got {self.suffix_probability}.")
        if self.ratio_sampler not in get_args(RatioSampler):
            raise ValueError(f"`ratio_sampler` must be one of {get_args(RatioSampler)}, got {self.ratio_sampler!r}.")
        for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self.tokenizer, name) is None:
                raise ValueError(f"The tokenizer has no `{name}`, which dual-stream masking needs.")
        check_mask_token_id(
            self.tokenizer.mask_token_id,
            len(self.tokenizer),
            self.tokenizer.eos_token_id,
            self.tokenizer.pad_token_id,
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the noise depends on, in this process and in the data workers that it started."""
        if epoch < 0:
            raise ValueError(f"`epoch` must be at least 0, got {epoch}.")
        self._epoch.fill_(epoch)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch of `B` rows, each of `T` physical slots: the memory stream, then the prediction copies.

        Returns:
            `input_ids`, `position_ids`, `stream_ids` (-1 padding, 0 memory, c ≥ 1 prediction copy c), `block_ids`,
            `document_ids`, `targets` (-100 where no loss), all `(B, T)` int64; `loss_weights` `(B, T)` float32; and
            `labels` `(B, L)` int64, the clean supervised tokens, which `Trainer` counts to normalise the loss.

        Raises:
            ValueError: for an example without `input_ids`, or with columns that do not fit them.
        """
        rows = [self._row(example) for example in examples]
        padding = PADDING | {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORE_INDEX, "loss_weights": 0.0}
        return {
            column: torch.nn.utils.rnn.pad_sequence(
                [row[column] for row in rows], batch_first=True, padding_value=padding[column]
            )
            for column in rows[0]
        }

    def _row(self, example: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """One example as a row of the batch: the dual streams of its documents, one document after the other."""
        if "input_ids" not in example:
            raise ValueError(f"An example needs `input_ids`, got the columns {sorted(example)}.")
        input_ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)
        if input_ids.ndim != 1:
            raise ValueError(f"`input_ids` must be one sequence of tokens, got the shape {tuple(input_ids.shape)}.")
        supervised = self._supervised(example, input_ids)
        lengths = self._document_lengths(example, input_ids)
        documents = [
            self._dual_stream(tokens, marks)
            for packed in zip(input_ids.split(lengths), supervised.split(lengths), strict=True)
            for tokens, marks in self._responses(*packed)
        ]
        row = {column: torch.cat([document[column] for document in documents]) for column in documents[0]}
        sizes = torch.tensor([len(document["input_ids"]) for document in documents])
        row["document_ids"] = torch.arange(len(documents)).repeat_interleave(sizes)
        return row

    def _supervised(self, example: Mapping[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens of the example are supervised, `(L,)` bool."""
        supervised = torch.ones_like(input_ids, dtype=torch.bool)
        for column in ("labels", "assistant_masks", "completion_mask"):
            if example.get(column) is not None:
                marks = torch.as_tensor(example[column])
                if marks.shape != input_ids.shape:
                    raise ValueError(
                        f"`{column}` must be as long as `input_ids`, got {len(marks)} and {len(input_ids)} entries."
                    )
                supervised &= marks != (IGNORE_INDEX if column == "labels" else 0)
                if column == "labels" and not torch.equal(marks[supervised], input_ids[supervised]):
                    raise ValueError("`labels` must repeat `input_ids`, unshifted, wherever they are not -100.")
        return supervised

    def _document_lengths(self, example: Mapping[str, Any], input_ids: torch.Tensor) -> list[int]:
        """Lengths of the documents that an example packs."""
        if example.get("seq_lengths") is not None:
            lengths = [int(length) for length in example["seq_lengths"]]
        elif example.get("document_ids") is not None:
            lengths = torch.as_tensor(example["document_ids"]).unique_consecutive(return_counts=True)[1].tolist()
        else:
            lengths = [len(input_ids)]
        if sum(lengths) != len(input_ids) or min(lengths, default=0) < 1:
            raise ValueError(
                "`input_ids` must hold at least one token, and `seq_lengths` (or the runs of `document_ids`) must be "
                f"positive and add up to their number; got {len(input_ids)} tokens and lengths {lengths}."
            )
        return lengths

    def _responses(
        self, input_ids: torch.Tensor, supervised: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A conversation as one document per response: all turns up to its end, itself alone supervised."""
        supervised = supervised.clone()
        supervised[0] = False  # nothing predicts it
        run_goes_on = F.pad(supervised[1:], (0, 1))
        is_end = supervised & ~run_goes_on & (input_ids == self.tokenizer.eos_token_id)
        ends = (is_end.nonzero().flatten() + 1).tolist()
        if not ends or supervised[ends[-1] :].any():
            ends.append(len(input_ids))  # what follows the last end token is an answer that was cut off
        for start, end in zip([0, *ends], ends, strict=False):
            yield input_ids[:end], supervised[:end] & (torch.arange(end) >= start)

    def _dual_stream(self, input_ids: torch.Tensor, supervised: torch.Tensor) -> dict[str, torch.Tensor]:
        """One document as its memory stream and its prediction copies; every column `(T,)`, `labels` `(L,)`."""
        generator = torch.Generator().manual_seed(self._noise_key(input_ids))
        fill_size = self.num_eos - 1 if supervised[-1] and input_ids[-1] == self.tokenizer.eos_token_id else 0
        fill = input_ids.new_full((fill_size,), self.tokenizer.eos_token_id)
        supervised = torch.cat([supervised, torch.ones_like(fill, dtype=torch.bool)])
        memory = self._memory(input_ids, fill, supervised)
        input_ids = memory["input_ids"]

        positions = torch.arange(len(input_ids))
        block_ids = positions // self.block_size
        # A block without supervised tokens has no loss, and nothing else looks at it.
        has_loss = torch.zeros_like(supervised)
        has_loss[block_ids[supervised]] = True
        streams = [memory]
        for copy in range(1, self.num_copies + 1):
            masked, weights = mask_blocks(
                supervised, self.block_size, generator, self.ratio_sampler, self.suffix_probability
            )
            order = reorder_blocks(masked, self.block_size)
            order = order[has_loss[block_ids[order]]]
            streams.append(self._prediction(copy, input_ids, masked, weights, order))
        document = {column: torch.cat([stream[column] for stream in streams]) for column in memory}
        document["block_ids"] = document["position_ids"] // self.block_size
        document["labels"] = input_ids.masked_fill(~supervised, IGNORE_INDEX)
        return document

    def _memory(
        self, input_ids: torch.Tensor, fill: torch.Tensor, supervised: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The clean tokens in order; a slot's target is its next token, where that is supervised and no padding."""
        targets = input_ids.masked_fill(~supervised[: len(input_ids)], IGNORE_INDEX).roll(-1)
        targets[-1] = IGNORE_INDEX
        targets = torch.cat([targets, torch.full_like(fill, IGNORE_INDEX)])
        if self.ar_weight == 0:
            targets.fill_(IGNORE_INDEX)
        return {
            "input_ids": torch.cat([input_ids, fill]),
            "position_ids": torch.arange(len(targets)),
            "stream_ids": torch.zeros_like(targets),
            "targets": targets,
            "loss_weights": (targets != IGNORE_INDEX) * (self.ar_weight / (1 + self.ar_weight)),
        }

    def _prediction(
        self, copy: int, input_ids: torch.Tensor, masked: torch.Tensor, weights: torch.Tensor, order: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The blocks that carry a loss, reordered; a masked slot's target is its own token."""
        return {
            "input_ids": input_ids.masked_fill(masked, self.tokenizer.mask_token_id)[order],
            "position_ids": order,
            "stream_ids": torch.full_like(order, copy),
            "targets": input_ids.masked_fill(~masked, IGNORE_INDEX)[order],
            "loss_weights": weights[order] / ((1 + self.ar_weight) * self.num_copies),
        }

    def _noise_key(self, input_ids: torch.Tensor) -> int:
        epoch = int(self._epoch).to_bytes(8, "little")
        digest = hashlib.blake2b(digest_size=8, salt=epoch, key=str(self.seed).encode())
        digest.update(input_ids.numpy().tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)
