"""The streams of dual-stream training: laid out from tokens, some of which become masks, and reordered. Pure
functions: tensors in, tensors out, noise is passed in.

The `S` tokens of a batch's `D` documents are concatenated. A *stream* is a table of rows in physical order, one
tensor `(rows,)` for each column: `owner` (the document, 0…D−1) and what the model takes. A *block grid* `(K, B)` holds
`K` blocks of `B` cells, in logical order; cells without a token are False everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

IGNORE_INDEX = -100
Stream = dict[str, torch.Tensor]
RatioSampler = Literal["count", "stratified"]

# Value of each column in the rows that pad a sequence.
PADDING = {
    "position_ids": 0, "stream_ids": -1, "block_ids": -1, "document_ids": -1, "targets": IGNORE_INDEX,
    "loss_weights": 0.0,
}  # fmt: skip

# Columns of a block's noise: its ratio, its place among the strata, its layout; then one for each of its cells.
_RATIO, _STRATUM, _LAYOUT, _CELLS = range(4)


class Tokens(NamedTuple):
    """Tokens of a batch, concatenated."""

    input_ids: torch.Tensor  # (S,) int64
    lengths: torch.Tensor  # (D,) int64, tokens of each document
    sequences: torch.Tensor  # (D,) int64, ascending; the sequence of the batch that each document lies in


class Layout(NamedTuple):
    """Settings of [`lay_out`], see DataCollatorForDualStreamMasking, and the ids of two tokens."""

    block_size: int
    num_eos: int
    ar_weight: float
    ratio_sampler: RatioSampler
    suffix_probability: float
    num_copies: int
    eos: Any
    mask: Any


SETTINGS = Layout._fields[:-2]


class Documents(NamedTuple):
    """What a batch trains, one document per response; every tensor `(D,)` int64."""

    starts: torch.Tensor  # index of the first token among all tokens
    sizes: torch.Tensor  # tokens, without the fill
    supervised_from: torch.Tensor  # position of the first token that this document may supervise
    fills: torch.Tensor  # end tokens to append
    sequences: torch.Tensor  # of the batch, as above


def lay_out(
    tokens: Tokens,
    supervised: torch.Tensor,
    noise: Callable[[torch.Tensor], int],
    layout: Layout,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """The columns of a batch, each `(B, T)`, and `labels`, the clean supervised tokens, `(B, L)` int64. Of the tokens,
    those are learnt that are `supervised`, `(S,)` bool; the noise is a 64-bit key of the tokens of a document."""
    documents = split_responses(tokens, supervised, layout.eos, layout.num_eos)
    memory = memory_stream(tokens, supervised, documents, layout)
    spans = zip(documents.starts.tolist(), documents.sizes.tolist(), strict=True)
    keys = [noise(tokens.input_ids[start : start + size]) for start, size in spans]
    prediction = prediction_stream(memory, keys, layout)
    batch = side_by_side(memory, prediction, documents.sequences, pad_token_id)
    labels = memory["input_ids"].masked_fill(~memory["supervised"], IGNORE_INDEX)
    return batch | {"labels": by_sequence(labels, documents.sequences[memory["owner"]], IGNORE_INDEX)}


def split_responses(tokens: Tokens, supervised: torch.Tensor, eos_token_id: Any, num_eos: int) -> Documents:
    """Each conversation as one document per response: all turns up to its end, itself alone supervised. A response is
    a run of supervised tokens that ends in the end token; `num_eos` − 1 more of these follow it. Supervised tokens
    behind the last end token are an answer that was cut off: a document too, but no end tokens follow. A conversation
    without responses stays one document."""
    input_ids, lengths = tokens.input_ids, tokens.lengths
    ends = lengths.cumsum(0)
    supervised = supervised.clone()
    supervised[ends - lengths] = False  # nothing predicts a document's first token
    run_goes_on = supervised.roll(-1)
    run_goes_on[ends - 1] = False
    is_end = supervised & ~run_goes_on & (input_ids == eos_token_id)

    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    last_end = torch.full_like(ends, -1).scatter_reduce_(0, owner[is_end], is_end.nonzero().flatten(), reduce="amax")
    is_cut = torch.zeros_like(last_end, dtype=torch.bool)
    is_cut[owner[supervised & (torch.arange(len(owner)) > last_end[owner])]] = True
    closes = is_end.clone()
    closes[ends[is_cut | (last_end < 0)] - 1] = True

    stops = closes.nonzero().flatten() + 1
    owner = owner[stops - 1]
    starts = (ends - lengths)[owner]
    since = torch.maximum(starts + 1, F.pad(stops[:-1], (1, 0)))
    fills = is_end[stops - 1] * (num_eos - 1)
    return Documents(starts, stops - starts, since - starts, fills, tokens.sequences[owner])


def memory_stream(tokens: Tokens, supervised: torch.Tensor, documents: Documents, layout: Layout) -> Stream:
    """The clean tokens in order. A row's target is its next token, where that is supervised and not a filled-in end.
    The column `supervised` says which rows hold a supervised token, filled-in end tokens among them."""
    sizes = documents.sizes + documents.fills
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    position = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    is_fill = position >= documents.sizes[owner]
    source = (documents.starts[owner] + position).clamp(max=len(tokens.input_ids) - 1)
    input_ids = tokens.input_ids[source].masked_fill(is_fill, layout.eos)
    supervised = is_fill | (supervised[source] & (position >= documents.supervised_from[owner]))
    targets = torch.full_like(input_ids, IGNORE_INDEX)
    if layout.ar_weight > 0:
        learnt = (supervised & ~is_fill).nonzero().flatten()
        targets[learnt - 1] = input_ids[learnt]  # a document never learns its first token: both lie in one document
    return {
        "owner": owner,
        "input_ids": input_ids,
        "position_ids": position,
        "stream_ids": torch.zeros_like(input_ids),
        "block_ids": position // layout.block_size,
        "targets": targets,
        "loss_weights": (targets != IGNORE_INDEX) * (layout.ar_weight / (1 + layout.ar_weight)),
        "supervised": supervised,
    }


def prediction_stream(memory: Stream, keys: Sequence[int], layout: Layout) -> Stream:
    """The blocks that carry a loss, masked and reordered, copy after copy; a masked row's target is its token. Each
    document has a key for its noise."""
    rows, owner = blocks_with_loss(memory, layout.block_size)
    block = torch.arange(len(rows)).repeat(layout.num_copies)
    copy = torch.arange(layout.num_copies).repeat_interleave(len(rows))
    order = owner[block].argsort(stable=True)
    block, copy, owner = block[order], copy[order], owner[block[order]]
    counts = torch.bincount(owner, minlength=len(keys)).tolist()
    grid = rows[block]
    present = grid >= 0
    supervised = memory["supervised"][grid] & present
    noise = draw_noise(keys, counts, layout.block_size)
    masked, inverse_ratios = mask_blocks(
        supervised, noise, layout.ratio_sampler, layout.suffix_probability, owner * layout.num_copies + copy
    )
    weights = masked * (inverse_ratios / ((1 + layout.ar_weight) * layout.num_copies))[:, None]
    order = reorder_blocks(masked, present)
    is_row = present.gather(1, order)
    row, is_mask, weight = (cells.gather(1, order)[is_row] for cells in (grid, masked, weights))
    input_ids = memory["input_ids"][row]
    return {
        "owner": memory["owner"][row],
        "input_ids": input_ids.masked_fill(is_mask, layout.mask),
        "position_ids": memory["position_ids"][row],
        "stream_ids": (copy + 1).repeat_interleave(present.sum(-1)),
        "block_ids": memory["block_ids"][row],
        "targets": input_ids.masked_fill(~is_mask, IGNORE_INDEX),
        "loss_weights": weight,
    }


def blocks_with_loss(memory: Stream, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that hold a supervised token; others have no loss, and nothing looks at them. Returns the memory row
    in each of their cells, `(K, block_size)` int64, -1 for none; and their documents, `(K,)` int64, ascending."""
    cell = memory["position_ids"] % block_size
    begins = cell == 0
    block = begins.cumsum(0) - 1
    rows = torch.full((int(begins.sum()), block_size), -1)
    rows[block, cell] = torch.arange(len(cell))
    kept = torch.zeros(len(rows), dtype=torch.bool)
    kept[block[memory["supervised"]]] = True
    return rows[kept], memory["owner"][begins][kept]


def draw_noise(keys: Sequence[int], block_counts: Sequence[int], block_size: int) -> torch.Tensor:
    """The noise of [`mask_blocks`] for several documents, each a function of its own 64-bit key alone: `(K, B + 3)`
    float32, uniform in [0, 1); K is the sum of `block_counts`, the documents' numbers of blocks."""
    noise = torch.empty(sum(block_counts), _CELLS + block_size)
    generator = torch.Generator()
    for key, rows in zip(keys, noise.split(list(block_counts)), strict=True):
        torch.rand(rows.shape, generator=generator.manual_seed(key), out=rows)
    return noise


def sample_masked_counts(
    supervised_counts: torch.Tensor, noise: torch.Tensor, ratio_sampler: RatioSampler, document_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws how many of the n_k supervised tokens of each block, `(K,)` int64, are masked: m_k, `(K,)` int64, zero
    where n_k is zero; and the weight 1/γ_k of each of them, `(K,)` float32. The noise, `(K, ≥ 2)` float32, is uniform
    in [0, 1).

    `"count"`: m_k ~ Uniform{1…n_k}, γ_k = m_k / n_k, an unbiased bound on −log p. `"stratified"`: the same law for
    each block, spread evenly over the blocks of a document, `(K,)` int64, ascending (less noise in the loss).
    """
    uniform = noise[:, _RATIO]
    if ratio_sampler == "stratified":
        uniform = uniform.clone()
        drawn = (supervised_counts > 0).nonzero().flatten()
        shuffled = drawn[noise[drawn, _STRATUM].argsort()]
        shuffled = shuffled[document_ids[shuffled].argsort(stable=True)]
        sizes = document_ids[shuffled].unique_consecutive(return_counts=True)[1]
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        strata = torch.arange(len(shuffled)) - first
        uniform[shuffled] = (strata + uniform[shuffled]) / sizes.repeat_interleave(sizes)
    masked_counts = (uniform * supervised_counts).long().clamp(max=supervised_counts - 1) + 1
    masked_counts[supervised_counts == 0] = 0
    return masked_counts, supervised_counts / masked_counts.clamp(min=1)


def mask_blocks(
    supervised: torch.Tensor,
    noise: torch.Tensor,
    ratio_sampler: RatioSampler = "count",
    suffix_probability: float = 0.0,
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the masked tokens of every block among the supervised ones, `(K, B)` bool (paper §4.2), by the noise of
    [`draw_noise`] and the law of [`sample_masked_counts`]: `(K, B)` bool, and 1/γ of each block, `(K,)` float32.

    Of a share of the blocks, `suffix_probability`, the *last* m_k supervised tokens are masked, which is what decoding
    meets right after a commit; the others get m_k tokens uniformly without replacement (the paper's layout). All
    blocks are one document's if `document_ids` are left out.
    """
    if document_ids is None:
        document_ids = torch.zeros(len(supervised), dtype=torch.int64)
    masked_counts, inverse_ratios = sample_masked_counts(supervised.sum(-1), noise, ratio_sampler, document_ids)
    priority = noise[:, _CELLS:]
    if suffix_probability > 0:
        from_the_end = torch.arange(supervised.shape[1], 0, -1, dtype=priority.dtype).expand_as(priority)
        priority = torch.where(noise[:, _LAYOUT, None] < suffix_probability, from_the_end, priority)
    rank = priority.masked_fill(~supervised, float("inf")).argsort(-1).argsort(-1)
    return rank < masked_counts[:, None], inverse_ratios.float()


def reorder_blocks(masked: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Topological reordering within each block: observed tokens first, then masks, both in logical order (paper §4.1).
    `(K, B)` int64: the cell that lies at each row of its block; cells that hold no token (`present`) come last."""
    return (masked.long() + 2 * ~present).argsort(dim=-1, stable=True)


def side_by_side(
    memory: Stream, prediction: Stream, sequences: torch.Tensor, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """The model's columns, each `(B, T)`: both streams of each document, one behind the other, and the documents one
    after the other in each sequence. In a stream, rows of one document stand together, and documents ascend."""
    rows = {name: torch.cat([memory[name], prediction[name]]) for name in prediction}
    owner = rows.pop("owner")
    rows["document_ids"] = owner - torch.searchsorted(sequences, sequences)[owner]  # their number in the sequence
    order = owner.argsort(stable=True)
    padding = PADDING | {"input_ids": pad_token_id}
    return {name: by_sequence(rows[name][order], sequences[owner[order]], padding[name]) for name in padding}


def by_sequence(rows: torch.Tensor, sequences: torch.Tensor, padding: float) -> torch.Tensor:
    """`(B, T)` of `(rows,)`, with the sequence of the batch that each lies in, ascending."""
    return pad_sequence(rows.split(torch.bincount(sequences).tolist()), batch_first=True, padding_value=padding)
