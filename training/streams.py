"""The streams of dual-stream training, laid out from tokens: pure functions, tensors in, tensors out.

The `S` tokens of a batch's `D` documents are concatenated. A *stream* is a table of rows in physical order, one
tensor `(rows,)` for each column: `owner` (the document, 0…D−1) and what the model takes.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

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


def ranges(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`0…size−1` for each size, concatenated: the index of the size that each entry belongs to, and the entry."""
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    return owner, torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]


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
    owner, position = ranges(documents.sizes + documents.fills)
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
    sizes = [torch.bincount(stream["owner"], minlength=len(sequences)) for stream in (memory, prediction)]
    start, length = places_of(sizes[0] + sizes[1], sequences)
    behind = (start + sizes[0])[prediction["owner"]] + ranges(sizes[1])[1]
    place = torch.cat([start[memory["owner"]] + memory["position_ids"], behind])
    number = torch.arange(len(sequences)) - first_documents(sequences)
    batch = {}
    for name, padding in (PADDING | {"input_ids": pad_token_id}).items():
        if name == "document_ids":
            values = torch.cat([number[stream["owner"]] for stream in (memory, prediction)])
        else:
            values = torch.cat([memory[name], prediction[name]])
        column = torch.full((int(sequences[-1] + 1) * length,), padding, dtype=values.dtype)
        column[place] = values
        batch[name] = column.view(-1, length)
    return batch


def first_documents(sequences: torch.Tensor) -> torch.Tensor:
    """The first document of the sequence that each document lies in, `(D,)`; `sequences` as in [`places_of`]."""
    counts = torch.bincount(sequences)
    return (counts.cumsum(0) - counts)[sequences]


def places_of(sizes: torch.Tensor, sequences: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where each document begins in a flattened batch, `(D,)`, and how long its sequences are; `sizes` are the rows
    of each document, `(D,)` int64."""
    ends = sizes.cumsum(0)
    starts = ends - sizes - (ends - sizes)[first_documents(sequences)]
    length = int((starts + sizes).max())
    return sequences * length + starts, length
