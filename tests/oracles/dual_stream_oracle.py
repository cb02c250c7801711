"""Dual-stream training by its definition alone, one slot and one forward at a time: slow and obvious."""

from dataclasses import dataclass

import torch
from tiny import EOS, MASK, PAD

IGNORE = -100


@dataclass(frozen=True)
class Slot:
    """One physical slot of the training input."""

    token: int
    position: int
    stream: int
    block: int
    document: int
    target: int = IGNORE
    weight: float = 0.0


@dataclass(frozen=True)
class Document:
    """One clean sequence, which of its tokens are supervised, and the masked positions of each prediction copy.

    The last `fill` tokens are end tokens that only the mask loss supervises.
    """

    tokens: list[int]
    supervised: list[bool]
    masked: list[set[int]]
    fill: int = 0


def responses(tokens: list[int], supervised: list[bool], num_eos: int) -> list[Document]:
    """What a conversation is trained as: each run of supervised tokens that ends in the end token closes a document
    that starts at the conversation's beginning and supervises what the documents before it did not."""
    supervised = [False, *supervised[1:]]  # nothing predicts the first token
    documents, done = [], 0
    for last, token in enumerate(tokens):
        run_ends = last + 1 == len(tokens) or not supervised[last + 1]
        if token == EOS and supervised[last] and run_ends:
            marks = [mark and done <= i for i, mark in enumerate(supervised[: last + 1])]
            fill = num_eos - 1
            documents.append(Document(tokens[: last + 1] + [EOS] * fill, marks + [True] * fill, [], fill))
            done = last + 1
    if not documents or any(supervised[done:]):
        documents.append(Document(tokens, [mark and done <= i for i, mark in enumerate(supervised)], []))
    return documents


def slots_of(document: Document, block_size: int, ar_weight: float, document_id: int = 0) -> list[Slot]:
    """The memory stream, then each prediction copy block by block: observed tokens first, then masked ones."""
    tokens, supervised = document.tokens, document.supervised
    real = len(tokens) - document.fill
    copies = len(document.masked)
    blocks: dict[int, list[int]] = {}
    for position in range(len(tokens)):
        blocks.setdefault(position // block_size, []).append(position)
    totals = {number: sum(supervised[position] for position in block) for number, block in blocks.items()}

    def ratio(number: int, copy: int) -> float:
        return len(document.masked[copy].intersection(blocks[number])) / totals[number]

    slots = []
    for position, token in enumerate(tokens):
        following = position + 1
        has_loss = ar_weight > 0 and following < real and supervised[following]
        target, weight = (tokens[following], ar_weight / (1 + ar_weight)) if has_loss else (IGNORE, 0.0)
        slots.append(Slot(token, position, 0, position // block_size, document_id, target, weight))
    for copy, masked in enumerate(document.masked):
        for number, block in blocks.items():
            if totals[number] == 0:
                continue
            observed = [position for position in block if position not in masked]
            hidden = [position for position in block if position in masked]
            for position in observed:
                slots.append(Slot(tokens[position], position, copy + 1, number, document_id))
            for position in hidden:
                weight = 1 / ((1 + ar_weight) * ratio(number, copy) * copies)
                slots.append(Slot(MASK, position, copy + 1, number, document_id, tokens[position], weight))
    return slots


def may_look(slots: list[Slot], query: int, key: int) -> bool:
    """Who sees whom, rule by rule; every slot sees itself, padding nothing else."""
    q, k = slots[query], slots[key]
    if query == key:
        return True
    if q.stream == -1 or k.stream == -1 or q.document != k.document:
        return False
    if q.stream == 0 and k.stream == 0:
        return key <= query
    if q.stream == 0:
        return False
    if k.stream == 0:
        return k.block < q.block
    return q.block == k.block and q.stream == k.stream and key <= query


def padded(slots: list[Slot], length: int) -> list[Slot]:
    return slots + [Slot(PAD, 0, -1, -1, -1)] * (length - len(slots))


def dense_mask(rows: list[list[Slot]]) -> torch.Tensor:
    """`(B, T, T)` bool."""
    size = range(len(rows[0]))
    return torch.tensor([[[may_look(row, query, key) for key in size] for query in size] for row in rows])


def batch_of(rows: list[list[Slot]]) -> dict[str, torch.Tensor]:
    """The columns of the model's forward, without `labels`."""
    length = max(len(row) for row in rows)
    rows = [padded(row, length) for row in rows]
    columns = {
        "input_ids": "token", "position_ids": "position", "stream_ids": "stream", "block_ids": "block",
        "document_ids": "document", "targets": "target", "loss_weights": "weight",
    }  # fmt: skip
    values = {name: [[getattr(slot, field) for slot in row] for row in rows] for name, field in columns.items()}
    return {name: torch.tensor(table) for name, table in values.items()}


def last_nll(model, tokens: list[int], positions: list[int], target: int) -> torch.Tensor:
    """−log p(target) of a plain causal forward, at its last slot."""
    ids, position_ids = torch.tensor([tokens]), torch.tensor([positions])
    logits = model(input_ids=ids, position_ids=position_ids, attention_mask=torch.ones_like(ids)).logits
    return -logits[0, -1].log_softmax(-1)[target]


def document_losses(model, document: Document, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ of L_mask (averaged over copies) and of L_AR, not yet divided by N: one plain forward for each target."""
    tokens, supervised = document.tokens, document.supervised
    zero = torch.zeros((), dtype=model.dtype)
    mask_loss, ar_loss = zero, zero
    for masked in document.masked:
        for start in range(0, len(tokens), block_size):
            block = range(start, min(start + block_size, len(tokens)))
            hidden = sorted(masked.intersection(block))
            order = [position for position in block if position not in masked] + hidden
            for j in hidden:
                seen = [*range(start), *order[: order.index(j) + 1]]
                inputs = [MASK if position >= start and position in masked else tokens[position] for position in seen]
                gamma = len(hidden) / sum(supervised[position] for position in block)
                mask_loss = mask_loss + last_nll(model, inputs, seen, tokens[j]) / gamma / len(document.masked)
    for t in range(1, len(tokens) - document.fill):
        if supervised[t]:
            ar_loss = ar_loss + last_nll(model, tokens[:t], list(range(t)), tokens[t])
    return mask_loss, ar_loss
