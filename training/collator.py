"""Examples in, dual-stream batches out: all that `WeDLMForCausalLM.forward` needs under any `Trainer`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ..generation.settings_wedlm import check_mask_token_id
from .masking import RatioSampler, draw_noise, mask_blocks, reorder_blocks

BlockAlignment = Literal["absolute", "response", "random"]
LossWeighting = Literal["ratio", "uniform"]

IGNORE_INDEX = -100
# Value of each column in the slots that pad a row.
PADDING = {
    "position_ids": 0,
    "stream_ids": -1,
    "block_ids": -1,
    "document_ids": -1,
    "targets": IGNORE_INDEX,
    "loss_weights": 0.0,
}


class _Documents(NamedTuple):
    """What a batch trains, one document per response; every tensor `(D,)` int64."""

    starts: torch.Tensor  # first token in the line of all tokens
    sizes: torch.Tensor  # tokens, without the fill
    supervised_from: torch.Tensor  # position from which on it is this document that supervises
    fills: torch.Tensor  # end tokens to append
    rows: torch.Tensor  # row of the batch
    keys: list[int]  # of the noise


class _Slots(NamedTuple):
    """Physical slots of one kind of stream, all documents' in one line; every tensor `(S,)`."""

    owner: torch.Tensor  # document
    columns: dict[str, torch.Tensor]


def _ranges(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`0…size−1` for each size, in one line: whose range each entry is of, and the entry."""
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    return owner, torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]


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
        block_alignment: where blocks begin: `"absolute"`, at multiples of B (the paper's); `"response"`, B by B from
            the first supervised token, where decoding opens its first window; `"random"`, at an offset that is part
            of the noise.
        loss_weighting: `"ratio"`, a masked token weighs 1/γ (Eq. 10) and N counts supervised tokens; `"uniform"`
            multiplies each block's losses by its γ: all masked tokens weigh the same, and N counts them.
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
    block_alignment: BlockAlignment = "absolute"
    loss_weighting: LossWeighting = "ratio"
    seed: int = 0
    _epoch: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # In shared memory: persistent data workers see a new epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        for name, least in (("block_size", 1), ("num_eos", 1), ("num_copies", 1), ("ar_weight", 0)):
            value = getattr(self, name)
            if value < least or (name != "ar_weight" and not isinstance(value, int)):
                number = "a number" if name == "ar_weight" else "an integer"
                raise ValueError(f"`{name}` must be {number} of at least {least}, got {value}.")
        if not 0 <= self.suffix_probability <= 1:
            raise ValueError(f"`suffix_probability` must lie in [0, 1], got {self.suffix_probability}.")
        for name, kind in (
            ("ratio_sampler", RatioSampler),
            ("block_alignment", BlockAlignment),
            ("loss_weighting", LossWeighting),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"`{name}` must be one of {get_args(kind)}, got {getattr(self, name)!r}.")
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
            `labels`, whose entries `Trainer` counts to normalise the loss: `(B, L)` int64, the clean supervised
            tokens; with `loss_weighting="uniform"` `(B, T)`, the targets of the masked slots.

        Raises:
            ValueError: for an example without `input_ids`, or with columns that do not fit them.
        """
        input_ids, supervised, lengths, rows = self._packed(examples)
        documents = self._responses(input_ids, supervised, lengths, rows)
        memory, supervised, shifts = self._memory(input_ids, supervised, documents)
        prediction = self._prediction(memory, supervised, shifts, documents)
        return self._batch(memory, prediction, supervised, documents)

    def _packed(
        self, examples: Sequence[Mapping[str, Any]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens of the batch in one line and which are supervised, `(S,)`; each document's length and row."""
        tokens, marks = [], []
        lengths: list[int] = []
        rows: list[int] = []
        for row, example in enumerate(examples):
            if "input_ids" not in example:
                raise ValueError(f"An example needs `input_ids`, got the columns {sorted(example)}.")
            input_ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)
            if input_ids.ndim != 1:
                raise ValueError(
                    f"`input_ids` must be one sequence of tokens, got the shape {tuple(input_ids.shape)}."
                )
            tokens.append(input_ids)
            marks.append(self._supervised(example, input_ids))
            lengths += self._document_lengths(example, input_ids)
            rows += [row] * (len(lengths) - len(rows))
        return torch.cat(tokens), torch.cat(marks), torch.tensor(lengths), torch.tensor(rows)

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
        self, input_ids: torch.Tensor, supervised: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor
    ) -> _Documents:
        """Each conversation as one document per response: all turns up to its end, itself alone supervised."""
        ends = lengths.cumsum(0)
        supervised[ends - lengths] = False  # nothing predicts a document's first token
        run_goes_on = supervised.roll(-1)
        run_goes_on[ends - 1] = False
        is_end = supervised & ~run_goes_on & (input_ids == self.tokenizer.eos_token_id)
        # What follows the last end token of a conversation is an answer that was cut off.
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        last_end = torch.full_like(ends, -1).scatter_reduce_(
            0, owner[is_end], is_end.nonzero().flatten(), reduce="amax"
        )
        is_cut = torch.zeros_like(last_end, dtype=torch.bool)
        is_cut[owner[supervised & (torch.arange(len(owner)) > last_end[owner])]] = True
        closes = is_end.clone()
        closes[ends[is_cut | (last_end < 0)] - 1] = True

        stops = closes.nonzero().flatten() + 1
        owner = owner[stops - 1]
        starts = (ends - lengths)[owner]
        since = torch.maximum(starts, F.pad(stops[:-1], (1, 0)))
        fills = is_end[stops - 1] * (self.num_eos - 1)
        return _Documents(
            starts=starts,
            sizes=stops - starts,
            supervised_from=since - starts,
            fills=fills,
            rows=rows[owner],
            keys=self._noise_keys(input_ids, starts.tolist(), stops.tolist()),
        )

    def _memory(
        self, input_ids: torch.Tensor, supervised: torch.Tensor, documents: _Documents
    ) -> tuple[_Slots, torch.Tensor, torch.Tensor]:
        """The clean tokens in order; a slot's target is its next token, where that is supervised and no padding.

        Also returns which slots hold a supervised token, `(S,)` bool, and how many cells of each document's first
        block lie before the document, `(D,)`.
        """
        owner, position = _ranges(documents.sizes + documents.fills)
        is_fill = position >= documents.sizes[owner]
        source = (documents.starts[owner] + position).clamp(max=len(input_ids) - 1)
        tokens = input_ids[source].masked_fill(is_fill, self.tokenizer.eos_token_id)
        supervised = is_fill | (supervised[source] & (position >= documents.supervised_from[owner]))
        targets = torch.full_like(tokens, IGNORE_INDEX)
        if self.ar_weight > 0:
            learnt = (supervised & ~is_fill).nonzero().flatten()
            targets[learnt - 1] = tokens[learnt]  # the slot before is the same document's: it never learns its first

        shifts = torch.zeros_like(documents.sizes)
        if self.block_alignment == "random":
            shifts = torch.tensor([key % self.block_size for key in documents.keys])
        elif self.block_alignment == "response":
            shifts.scatter_reduce_(0, owner[supervised], position[supervised], reduce="amin", include_self=False)
            shifts = -shifts % self.block_size
        columns = {
            "input_ids": tokens,
            "position_ids": position,
            "stream_ids": torch.zeros_like(tokens),
            "block_ids": (position + shifts[owner]) // self.block_size,
            "targets": targets,
            "loss_weights": (targets != IGNORE_INDEX) * (self.ar_weight / (1 + self.ar_weight)),
        }
        return _Slots(owner, columns), supervised, shifts

    def _prediction(
        self, memory: _Slots, supervised: torch.Tensor, shifts: torch.Tensor, documents: _Documents
    ) -> _Slots:
        """The blocks that carry a loss, masked and reordered, copy after copy; a masked slot's target is its token.

        With `loss_weighting="uniform"`, also sets the memory's loss weights.
        """
        clean = memory.columns
        slots, block_counts = self._block_grid(memory, supervised, shifts)
        owner, number = _ranges(block_counts * self.num_copies)
        copy = number // block_counts[owner]
        block = (block_counts.cumsum(0) - block_counts)[owner] + number % block_counts[owner]
        slots = slots[block]
        present = slots >= 0
        can_mask = supervised[slots] & present
        noise = draw_noise(documents.keys, (block_counts * self.num_copies).tolist(), self.block_size)
        masked, inverse_ratios = mask_blocks(
            can_mask, noise, self.ratio_sampler, self.suffix_probability, owner * self.num_copies + copy
        )
        weights = masked * (inverse_ratios / ((1 + self.ar_weight) * self.num_copies))[:, None]
        if self.loss_weighting == "uniform":
            weights = masked / (1 + self.ar_weight)
            ratios = torch.zeros(int(block_counts.sum())).index_add_(0, block, masked.sum(-1) / can_mask.sum(-1))
            ratio_of_slot = torch.zeros(len(supervised))
            ratio_of_slot[slots[present]] = ratios[block].repeat_interleave(present.sum(-1))
            clean["loss_weights"] = clean["loss_weights"] * ratio_of_slot.roll(-1)  # that of the target's block

        order = reorder_blocks(masked, present)
        filled = present.gather(1, order)
        slot, is_mask, weight = (grid.gather(1, order)[filled] for grid in (slots, masked, weights))
        columns = {name: clean[name][slot] for name in ("input_ids", "position_ids", "block_ids")}
        columns["targets"] = columns["input_ids"].masked_fill(~is_mask, IGNORE_INDEX)
        columns["input_ids"] = columns["input_ids"].masked_fill(is_mask, self.tokenizer.mask_token_id)
        columns["stream_ids"] = (copy + 1).repeat_interleave(present.sum(-1))
        columns["loss_weights"] = weight
        return _Slots(memory.owner[slot], columns)

    def _block_grid(
        self, memory: _Slots, supervised: torch.Tensor, shifts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory slot in each cell of the blocks that carry a loss, `(K, B)`, -1 for none; blocks per document."""
        block_ids = memory.columns["block_ids"]
        counts = torch.zeros_like(shifts).scatter_reduce_(0, memory.owner, block_ids + 1, reduce="amax")
        first = (counts.cumsum(0) - counts)[memory.owner] * self.block_size
        cells = torch.full((int(counts.sum()) * self.block_size,), -1)
        cells[first + shifts[memory.owner] + memory.columns["position_ids"]] = torch.arange(len(first))
        slots = cells.view(-1, self.block_size)
        # A block without supervised tokens has no loss, and nothing else looks at it.
        kept = (supervised[slots] & (slots >= 0)).any(-1)
        owner = torch.arange(len(counts)).repeat_interleave(counts)
        return slots[kept], torch.bincount(owner[kept], minlength=len(counts))

    def _batch(
        self, memory: _Slots, prediction: _Slots, supervised: torch.Tensor, documents: _Documents
    ) -> dict[str, torch.Tensor]:
        """Both streams of each document side by side, its documents one after the other in each row."""
        rows, shape = documents.rows, int(documents.rows[-1]) + 1
        sizes = [torch.bincount(part.owner, minlength=len(rows)) for part in (memory, prediction)]
        documents_before = torch.bincount(rows).cumsum(0) - torch.bincount(rows)

        def columns_of(sizes: torch.Tensor) -> tuple[torch.Tensor, int]:
            """Where each document begins in its row, and how long the longest row is."""
            ends = sizes.cumsum(0)
            starts = ends - sizes
            starts -= starts[documents_before][rows]
            return starts, int((starts + sizes).max())

        start, length = columns_of(sizes[0] + sizes[1])
        places = [
            (rows * length + start)[memory.owner] + memory.columns["position_ids"],
            (rows * length + start + sizes[0])[prediction.owner] + _ranges(sizes[1])[1],
        ]
        memory.columns["document_ids"], prediction.columns["document_ids"] = (
            (torch.arange(len(rows)) - documents_before[rows])[part.owner] for part in (memory, prediction)
        )
        place = torch.cat(places)
        batch = {}
        for name, padding in (PADDING | {"input_ids": self.tokenizer.pad_token_id}).items():
            values = torch.cat([memory.columns[name], prediction.columns[name]])
            batch[name] = torch.full((shape * length,), padding, dtype=values.dtype)
            batch[name][place] = values
        if self.loss_weighting == "uniform":
            batch["labels"] = batch["targets"].masked_fill(batch["stream_ids"] == 0, IGNORE_INDEX)
        else:
            start, label_length = columns_of(sizes[0])
            batch["labels"] = torch.full((shape * label_length,), IGNORE_INDEX)
            place = (rows * label_length + start)[memory.owner] + memory.columns["position_ids"]
            batch["labels"][place] = memory.columns["input_ids"].masked_fill(~supervised, IGNORE_INDEX)
        return {name: values.view(shape, -1) for name, values in batch.items()}

    def _noise_keys(self, input_ids: torch.Tensor, starts: list[int], stops: list[int]) -> list[int]:
        """A 64-bit key of (seed, epoch, tokens) for each document."""
        epoch, seed = int(self._epoch).to_bytes(8, "little"), str(self.seed).encode()
        tokens: Any = input_ids.numpy().view("u1")
        keys = []
        for start, stop in zip(starts, stops, strict=True):
            digest = hashlib.blake2b(tokens[8 * start : 8 * stop], digest_size=8, salt=epoch, key=seed)
            keys.append(int.from_bytes(digest.digest(), "little", signed=True))
        return keys
