"""Dual-stream training: who sees whom, and the loss (paper §4, Eq. 10).

`B` rows of the batch, `T` physical slots of a row (memory and prediction streams, packed documents), `V` vocabulary,
`D` hidden size, `N` slots that carry a loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..generation.versions import CACHE, cache_of

CHUNK_LOGITS = 2**26  # that the head holds at a time: 256 MB in float32

# What lays out a batch; the last may be missing.
COLUMNS = ("input_ids", "position_ids", "stream_ids", "block_ids", "document_ids")

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dual_stream_mask_function(
    stream_ids: torch.Tensor,
    block_ids: torch.Tensor,
    document_ids: torch.Tensor,
    memory_ends: torch.Tensor | None = None,
) -> MaskFunction:
    """Visibility of dual-stream training, as a mask function of transformers' attention interfaces.

    One document, block size 2, four tokens. `m0…m3` is the memory stream, `p0…p3` the prediction stream (reordered
    within its blocks); a row is a query, a column a key:

                 m0 m1 m2 m3  p0 p1 p2 p3
            m0    ■  ·  ·  ·   ·  ·  ·  ·      memory: causal
            m1    ■  ■  ·  ·   ·  ·  ·  ·
            m2    ■  ■  ■  ·   ·  ·  ·  ·
            m3    ■  ■  ■  ■   ·  ·  ·  ·
            p0    ·  ·  ·  ·   ■  ·  ·  ·      block 0: no memory lies before it
            p1    ·  ·  ·  ·   ■  ■  ·  ·
            p2    ■  ■  ·  ·   ·  ·  ■  ·      block 1: memory of block 0, then its own slots, causally
            p3    ■  ■  ·  ·   ·  ·  ■  ■

    Args:
        stream_ids: `(B, T)` int64; -1 padding, 0 memory, c ≥ 1 prediction copy c.
        block_ids: `(B, T)` int64; the logical block of each slot.
        document_ids: `(B, T)` int64; the packed document of each slot.
        memory_ends: `(B, T)` int64; a prediction slot sees the memory before this physical slot, too: of
            [`leave_out_repeats`].

    Returns:
        `f(batch, head, query, key) -> bool`, broadcasting over index tensors. Every slot sees itself, so that no row
        of the mask is empty (padding included).
    """

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        query_stream, key_stream = stream_ids[batch, query], stream_ids[batch, key]
        query_block, key_block = block_ids[batch, query], block_ids[batch, key]
        before = key <= query
        earlier = key_block < query_block
        if memory_ends is not None:
            earlier = earlier | (key < memory_ends[batch, query])
        to_memory = (key_stream == 0) & torch.where(query_stream == 0, before, earlier)
        within_block = (query_stream > 0) & (query_stream == key_stream) & (query_block == key_block) & before
        same_document = (document_ids[batch, query] == document_ids[batch, key]) & (query_stream >= 0)
        return (same_document & (to_memory | within_block)) | (query == key)

    return visible


def dual_stream_mask(
    model: Any,
    inputs_embeds: torch.Tensor,
    stream_ids: torch.Tensor,
    block_ids: Any,
    document_ids: Any,
    memory_ends: torch.Tensor | None = None,
) -> Any:
    """The mask of a [`WeDLMModel`] in the form that its attention takes, see [`dual_stream_mask_function`]."""
    if block_ids is None:
        raise ValueError("`stream_ids` needs `block_ids` beside it, got None.")
    if stream_ids.shape != inputs_embeds.shape[:2]:
        raise ValueError(
            f"`stream_ids` must have the shape of the input, {tuple(inputs_embeds.shape[:2])}, got "
            f"{tuple(stream_ids.shape)}. Context parallelism, which cuts the input into pieces and drops the mask "
            "that says who sees whom, cannot train a dual stream: use data, sharded (FSDP2) or tensor parallelism."
        )
    if document_ids is None:
        document_ids = torch.zeros_like(stream_ids)
    implementation, masks = model.config._attn_implementation, AttentionMaskInterface()
    if implementation not in masks or "flash" in implementation:
        raise ValueError(
            "Dual-stream training needs an attention implementation that takes an arbitrary mask "
            f"('sdpa', 'eager' or 'flex_attention'), got {implementation!r}."
        )
    size, length = stream_ids.shape
    return masks[implementation](
        batch_size=size, q_length=length, kv_length=length, q_offset=0, kv_offset=0,
        mask_function=dual_stream_mask_function(stream_ids, block_ids, document_ids, memory_ends),
        attention_mask=None, allow_is_causal_skip=False,
        config=model.config, dtype=inputs_embeds.dtype, device=inputs_embeds.device,
    )  # fmt: skip


class Compact(NamedTuple):
    """A batch without some of its slots."""

    inputs: dict[str, Any]
    places: torch.Tensor  # (B, T) int64: where each slot that is left stands now

    @classmethod
    def whole(cls, inputs: dict[str, Any], targets: torch.Tensor) -> "Compact":
        """Of which nothing is left out."""
        return cls(inputs, torch.arange(targets.shape[1], device=targets.device).expand_as(targets))


def leave_out_repeats(inputs: dict[str, Any], targets: torch.Tensor) -> Compact:
    """Leaves out the slots of prediction streams that repeat the memory.

    The observed tokens before a block's first mask see what the memory's slots of the same tokens see, and so have
    the same states: masks see those instead. With suffix masks, that is every observed token of a block. Nothing is
    left out of a layout that no collator makes, nor where the model has other inputs beside the layout.

    Args:
        inputs: of the model.
        targets: `(B, T)` int64, -100 where a slot carries no loss.
    """
    whole = Compact.whole(inputs, targets)
    everything = whole.places
    given = {name for name, value in inputs.items() if value is not None and value is not False}  # PEFT passes all
    if not set(COLUMNS[:-1]) <= given <= set(COLUMNS):
        return whole
    ids, positions, streams, blocks = (inputs[name] for name in COLUMNS[:-1])
    if not ids.shape == positions.shape == streams.shape == blocks.shape == targets.shape:
        return whole
    documents = torch.zeros_like(streams) if inputs.get("document_ids") is None else inputs["document_ids"]

    def first_of_run(*columns: torch.Tensor) -> torch.Tensor:
        begins = torch.ones_like(streams, dtype=torch.bool)
        begins[:, 1:] = torch.stack([column.diff(dim=1) != 0 for column in columns]).any(0)
        return everything.where(begins, 0).cummax(1).values

    def at(column: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return column.gather(1, places)

    # Documents, their streams and the blocks of a stream ascend, and padding comes last: each has one run of slots.
    is_used = streams >= 0
    falls = ~is_used[:, :-1]
    is_tied = torch.ones_like(falls)
    for column in (documents, streams, blocks):
        falls |= is_tied & (column.diff(dim=1) < 0)
        is_tied &= column.diff(dim=1) == 0
    is_ordered = ~(falls & is_used[:, 1:]).any(1, keepdim=True)
    # A document's memory begins with it and holds position p at its p-th slot.
    start, block = first_of_run(documents), first_of_run(documents, streams, blocks)
    twin = (start + positions).clamp(0, targets.shape[1] - 1)
    is_same = (streams > 0) & (targets == -100) & is_ordered & (at(streams, twin) == 0)
    for column in (ids, positions, documents, blocks):
        is_same &= at(column, twin) == column
    is_same &= torch.where(everything == block, at(block, twin) == twin, twin == twin.roll(1, 1) + 1)
    others = (~is_same).long()
    repeats = others.cumsum(1) == at(others.cumsum(1) - others, block)  # itself and all before it in its block
    if not repeats.any():
        return whole
    kept = (is_used | (targets != -100)) & ~repeats
    places, counts = kept.cumsum(1) - 1, kept.sum(1, keepdim=True)
    ends = torch.zeros_like(twin).scatter_reduce(1, block, (at(places, twin) + 1) * repeats, "amax")
    left = (~kept).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    is_padding = everything[:, : left.shape[1]] >= counts
    named = {"stream_ids": streams, "block_ids": blocks, "document_ids": documents}
    compact = {name: at(column, left).masked_fill(is_padding, -1) for name, column in named.items()}
    compact |= {"input_ids": at(ids, left), "position_ids": at(positions, left)}
    return Compact(inputs | compact | {"memory_ends": at(at(ends, block), left)}, places)


def token_nll(
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood of each target, `(N,)` int64 in `[0, V)`, from `(N, D)` hidden states of the slots that
    carry a loss, without ever holding all logits: those of `chunk_size` rows exist at a time, and are computed again
    in the backward pass. The head, `(n, D) -> (n, V)`, is *called*, so that LoRA, FSDP and tensor-parallel hooks fire.

    Returns `(N,)` float32, in nats; and `(N,)` bool, whether the target is the likeliest token.
    """

    def chunk_nll(hidden: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = lm_head(hidden)
        nll = F.cross_entropy(logits.float(), target, reduction="none")
        return nll, logits.detach().argmax(-1) == target

    if hidden_states.shape[0] <= chunk_size:
        return chunk_nll(hidden_states, targets)
    chunks = [
        checkpoint(chunk_nll, hidden, target, use_reentrant=False)
        for hidden, target in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    nll, correct = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return nll, correct


@dataclass
class WeDLMCausalLMOutputWithPast(CausalLMOutputWithPast):
    """[`CausalLMOutputWithPast`], and what training and evaluation report beside the loss, 0 without a target."""

    token_nll: torch.Tensor | None = None  # (B, T) float32, of each slot's target, in nats, with its graph
    correct: torch.Tensor | None = None  # (B, T) bool, whether the target is the likeliest token


def forward_with_targets(
    model: Any,
    inputs: dict[str, Any],
    targets: torch.Tensor,
    loss_weights: torch.Tensor | None,
    labels: torch.Tensor | None,
    num_items_in_batch: torch.Tensor | int | None,
) -> WeDLMCausalLMOutputWithPast:
    """The forward of a [`WeDLMForCausalLM`], and Σ w·nll / N over the slots that have a target: mask loss and
    auxiliary AR loss at once (paper Eq. 10).

    The targets are `(B, T)` int64, -100 where a slot carries no loss; the weights, `(B, T)` float32, hold 1/γ, the AR
    weight and the normalisation of their sum; N is the number of supervised tokens of the whole optimizer step, 0
    gives a loss of 0. What it returns is attached to the graph even if no slot has a target.
    """
    # No cache unless asked for: nothing reads it, and the model config's default is for generation.
    config = model.config
    shows_states = config.output_hidden_states or config.output_attentions  # asked for by the caller, they are inputs
    compact = (Compact.whole if shows_states else leave_out_repeats)(inputs, targets)
    outputs = model.model(**{"use_cache": False} | compact.inputs)
    if num_items_in_batch is None:
        num_items_in_batch = ((targets if labels is None else labels[..., 1:]) != -100).sum()
    rows, columns = (targets != -100).nonzero(as_tuple=True)
    slots = rows * targets.shape[1] + columns
    states, size = outputs.last_hidden_state[rows, compact.places[rows, columns]], CHUNK_LOGITS // config.vocab_size
    nll, correct = token_nll(model.lm_head, states, targets.flatten()[slots], max(1, size))
    weighted = nll if loss_weights is None else nll * loss_weights.flatten()[slots]
    return WeDLMCausalLMOutputWithPast(
        loss=weighted.sum() / torch.as_tensor(num_items_in_batch, device=nll.device).clamp(min=1),
        token_nll=torch.zeros_like(targets, dtype=nll.dtype).flatten().index_copy(0, slots, nll).view_as(targets),
        correct=torch.zeros_like(targets, dtype=torch.bool).flatten().index_copy(0, slots, correct).view_as(targets),
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        **{CACHE: cache_of(outputs)},
    )
