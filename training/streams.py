"""The streams of dual-stream training, laid out from tokens: pure functions, tensors in, tensors out.

The `S` tokens of a batch's `D` documents are concatenated. A *stream* is a table of rows in physical order, one
tensor `(rows,)` for each column: `owner` (the document, 0…D−1) and what the model takes.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

IGNORE_INDEX = -100
Stream = dict[str, torch.Tensor]

# Value of each column in the rows that pad a sequence.
PADDING = {
    "position_ids": 0, "stream_ids": -1, "block_ids": -1, "document_ids": -1, "targets": IGNORE_INDEX,
    "loss_weights": 0.0,
}  # fmt: skip


class Tokens(NamedTuple):
    """Tokens of a batch, concatenated."""

    input_ids: torch.Tensor  # (S,) int64
    supervised: torch.Tensor  # (S,) bool
    lengths: torch.Tensor  # (D,) int64, tokens of each document
    sequences: torch.Tensor  # (D,) int64, ascending; the sequence of the batch that each document lies in


class Documents(NamedTuple):
    """What a batch trains, one document per response; every tensor `(D,)` int64."""

    starts: torch.Tensor  # index of the first token among all tokens
    sizes: torch.Tensor  # tokens, without the fill
    supervised_from: torch.Tensor  # position of the first token that this document may supervise
    fills: torch.Tensor  # end tokens to append
    sequences: torch.Tensor  # of the batch, as above


def split_responses(tokens: Tokens, eos_token_id: Any, num_eos: int) -> Documents:
    """Each conversation as one document per response: all turns up to its end, itself alone supervised. A response is
    a run of supervised tokens that ends in the end token; `num_eos` − 1 more of these follow it. Supervised tokens
    behind the last end token are an answer that was cut off: a document too, but no end tokens follow. A conversation
    without responses stays one document."""
    input_ids, lengths = tokens.input_ids, tokens.lengths
    ends = lengths.cumsum(0)
    supervised = tokens.supervised.clone()
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


def memory_stream(
    tokens: Tokens, documents: Documents, eos_token_id: Any, block_size: int, ar_weight: float
) -> Stream:
    """The clean tokens in order. A row's target is its next token, where that is supervised and not a filled-in end.
    The column `supervised` says which rows hold a supervised token, filled-in end tokens among them."""
    sizes = documents.sizes + documents.fills
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    position = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    is_fill = position >= documents.sizes[owner]
    source = (documents.starts[owner] + position).clamp(max=len(tokens.input_ids) - 1)
    input_ids = tokens.input_ids[source].masked_fill(is_fill, eos_token_id)
    supervised = is_fill | (tokens.supervised[source] & (position >= documents.supervised_from[owner]))
    targets = torch.full_like(input_ids, IGNORE_INDEX)
    if ar_weight > 0:
        learnt = (supervised & ~is_fill).nonzero().flatten()
        targets[learnt - 1] = input_ids[learnt]  # a document never learns its first token: both lie in one document
    return {
        "owner": owner,
        "input_ids": input_ids,
        "position_ids": position,
        "stream_ids": torch.zeros_like(input_ids),
        "block_ids": position // block_size,
        "targets": targets,
        "loss_weights": (targets != IGNORE_INDEX) * (ar_weight / (1 + ar_weight)),
        "supervised": supervised,
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
