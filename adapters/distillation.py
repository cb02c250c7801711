"""What a mask adapter learns from: the base's own next-token distributions, at masks behind random cuts.

`B` answers, `L` tokens, `C` cuts, `K` masks after each, `M = C · K` slots of an answer, `N` slots of the batch with a
target, `P` positions that they predict, `S` candidate tokens, `H` hidden size.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.masking_utils import sdpa_mask

from ..generation.attention import layer_types
from ..generation.drafter import scaled
from ..generation.forward import forward_as
from ..generation.rows import Row
from ..generation.state import keeps_state
from ..generation.versions import CACHE, cache_name
from ..training.streams import IGNORE_INDEX
from .layers import evaluating
from .probe import decode_step, is_close
from .states import StateMemory

MASK_RUNS = "wedlm_mask_runs"  # the attention function of this module
DEPTH_DECAY = 0.85  # of the loss weights, which begin at 1: a deep draft counts only if all before it are accepted
PLAIN_WEIGHT = 0.5  # of the cross-entropy without the previous-token head


@dataclass(frozen=True)
class MaskRuns:
    """Runs of K masks, each behind a cut in the memory."""

    memory: Any  # a cache: keys and values of the answers, without a graph
    length: int  # K
    has_softcap: bool  # scores are capped where layers ask for it: transformers' sdpa does not
    # The mask of all runs, `(B, 1, M, L + K)`, where the forward has each run as a sequence of its own.
    apart: torch.Tensor | None = None


_RUNS: ContextVar[MaskRuns | None] = ContextVar("wedlm_mask_runs", default=None)


def attend_in_runs(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of masks to the memory up to their cut, and to the masks of their run up to themselves.

    No score of two runs is computed, and no gradient of the memory.

    Args:
        query: `(B, A, M, D)` of A heads.
        key, value: `(B, A / G, M, D)`.
        attention_mask: `(B, 1, M, L + K)`, 0 where a mask sees a memory token or a mask of its run, -inf elsewhere.
        scaling: of the scores.
        softcap: of the scores, as in Gemma 2.
        s_aux: `(A,)`, attention sinks, as in gpt-oss.

    Returns:
        `(B, M, A, D)`, and None in place of the attention weights.
    """
    runs = _RUNS.get()
    assert runs is not None
    layer, length = runs.memory.layers[module.layer_idx], runs.length
    if runs.apart is not None:
        attention_mask = runs.apart
        query, key, value = (
            states.unflatten(0, (len(attention_mask), -1)).transpose(1, 2).flatten(2, 3)
            for states in (query, key, value)
        )
    batch, _, slots, width = query.shape
    kv_heads = key.shape[1]
    query = query * (width**-0.5 if scaling is None else scaling)
    # (B, kv heads, G, M, D): the queries of a group share their keys.
    grouped = query.reshape(batch, kv_heads, -1, slots, width)
    to_memory = (grouped.flatten(2, 3) @ layer.keys.transpose(-1, -2)).view(*grouped.shape[:-1], -1)
    in_runs = grouped.reshape(batch, kv_heads, -1, slots // length, length, width)
    shape = (batch, kv_heads, 1, slots // length, length)
    to_run = in_runs @ key.reshape(*shape, width).transpose(-1, -2)
    if softcap is not None and runs.has_softcap:
        to_memory, to_run = (softcap * (scores / softcap).tanh() for scores in (to_memory, to_run))
    parts = [torch.cat([to_memory, to_run.flatten(3, 4)], dim=-1) + attention_mask[:, :, None]]
    if s_aux is not None:
        parts.append(s_aux.view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, slots, 1))
    weights = torch.cat(parts, dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    seen = layer.keys.shape[2]
    on_memory, on_run = weights[..., :seen], weights[..., seen : seen + length]
    output = (on_memory.flatten(2, 3) @ layer.values).view(*grouped.shape[:-1], -1)
    output = output + (on_run.unflatten(3, (-1, length)) @ value.reshape(*shape, value.shape[-1])).flatten(3, 4)
    output = output.flatten(1, 2).transpose(1, 2).contiguous()
    return output if runs.apart is None else output.unflatten(1, (-1, length)).flatten(0, 1), None


AttentionInterface.register(MASK_RUNS, attend_in_runs)
AttentionMaskInterface.register(MASK_RUNS, sdpa_mask)


def soft_cross_entropy(targets: torch.Tensor, logits: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Σ p (log-sum − logit), `(N,)` nats. The base's mass on candidates counts, which is nearly all of it.

    Args:
        targets: `(N, S)`, the base's probabilities of the candidates.
        logits: `(N, S)`, of the masks.
        log_sums: `(N,)`, of the exponentials of the masks' logits of the whole vocabulary, estimated.
    """
    return log_sums * targets.sum(-1) - (targets * logits).sum(-1)


class MaskDistillation(nn.Module):
    """A frozen base and its mask adapter as one trainable module.

    The memory, prompt and answer, runs once without a graph; then the masks alone run on its keys and values, or on
    its states at the cuts. Each
    mask learns the base's distribution of the token at its position (soft cross-entropy), once through the
    previous-token head, which is given the true token before, and once without it.

    The sum over the vocabulary is estimated: over the likeliest tokens of the base at every position of the batch, and
    over a random sample of all others, each of which stands for many.

    Args:
        model: with a mask adapter.
        num_masks: K; default: the adapter's.
        top_tokens: likeliest tokens of the base at each position that are candidates.
        sampled_tokens: of all others, how many stand for them.

    Raises:
        ValueError: for a model whose masks cannot be run behind many cuts at once.
    """

    accepts_loss_kwargs = True

    depth_weights: torch.Tensor

    def __init__(self, model: Any, num_masks: int | None = None, top_tokens: int = 16, sampled_tokens: int = 2048):
        super().__init__()
        model.mask_adapter.check_own()
        self.model: Any = model
        self.config = model.config
        self._text: Any = model.config.get_text_config(decoder=True)
        self._keeps_state = keeps_state(model)
        # What keeps a state has no part in the masks of attention.
        self._kinds = ["full_attention"] if self._keeps_state else sorted(set(layer_types(model.config)))
        self.num_masks: int = num_masks or model.mask_adapter.settings.num_masks
        self.top_tokens, self.sampled_tokens = top_tokens, sampled_tokens
        self.register_buffer("depth_weights", DEPTH_DECAY ** torch.arange(self.num_masks), persistent=False)
        self._check()

    @property
    def _decoder(self) -> Any:
        """The model without its head. Llama 4 keeps it under another name than its class says."""
        base = self.model.base_model
        return base if base is not self.model else self.model.model

    @torch.no_grad()
    def _check(self) -> None:
        """Raises `ValueError` where training would be on other states, or other targets, than decoding has."""
        name, device, count = type(self.model).__name__, self.model.device, self.num_masks
        tokens, rows = [1, 2, 3], [Row(None, 4 + place, place - 1) for place in range(count)]
        try:
            autocast = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
            with evaluating(self.model), torch.autocast(autocast, enabled=False):
                cuts = torch.tensor([[2]], device=device)
                _, memory = self.memory(torch.tensor([tokens], device=device), cuts)
                states = self.masks(memory, cuts)[0, 0]
                logits, slots = decode_step(self.model, tokens, rows, count)
                expected, targets = slots.hidden[0], self.scaled(self.model.get_output_embeddings()(states))
        except Exception as error:
            raise ValueError(f"{name} cannot train a mask adapter: masks in runs fail: {error!r}.") from error
        if not (is_close(states, expected, self.model) and is_close(targets, logits[0].float(), self.model)):
            raise ValueError(
                f"{name} cannot train a mask adapter: its attention, or its head, computes in a way of its own, and "
                "masks would learn from other states than decoding has."
            )

    def train(self, mode: bool = True) -> "MaskDistillation":
        """The base stays in evaluation mode: its distributions are the targets."""
        super().train(mode)
        self.model.eval()
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        cuts: torch.Tensor,
        labels: torch.Tensor,
        noise_key: torch.Tensor,
        num_items_in_batch: torch.Tensor | float | None = None,
    ) -> dict[str, torch.Tensor]:
        """The loss of a batch of [`DataCollatorForMaskRuns`].

        Args:
            num_items_in_batch: what the weighted sum of losses is divided by; default: the sum of the weights.

        Returns:
            `loss`; and without a graph, of the slots with a target: `correct` and `correct_plain` `(B, C, K)` bool
            (the likeliest candidate is the base's, with and without the previous-token head), `counted` `(B, C, K)`
            bool, `soft_loss` and `soft_loss_plain` `(B, C, K)` in nats.
        """
        counted = labels != IGNORE_INDEX
        memory_hidden, memory = self.memory(input_ids, cuts)
        hidden = self.masks(memory, cuts)[counted]
        places, of_slot, tokens = self.targets(input_ids, cuts, counted)
        with torch.no_grad():
            teacher, candidates, shares = self._teacher(memory_hidden.flatten(0, 1)[places], int(noise_key))
            of_place = self.model.get_input_embeddings()(tokens)
        head = self.model.mask_adapter.head
        states = [hidden] if head is None else [hidden, head(hidden, of_place[of_slot])]
        lm_head = self.model.get_output_embeddings()
        bias = None if lm_head.bias is None else lm_head.bias[candidates]
        logits = self.scaled(nn.functional.linear(torch.cat(states), lm_head.weight[candidates], bias))
        log_sums = (logits + shares).logsumexp(-1)
        targets, likeliest = teacher[of_slot], teacher.argmax(-1)[of_slot]
        parts = zip(logits.chunk(len(states)), log_sums.chunk(len(states)), strict=True)
        losses = [soft_cross_entropy(targets, *part) for part in parts]
        correct = [part.argmax(-1) == likeliest for part in logits.detach().chunk(len(states))]
        weights = self.depth_weights.expand_as(counted)[counted]
        total = losses[-1] + (PLAIN_WEIGHT * losses[0] if len(states) > 1 else 0)
        items = weights.sum() if num_items_in_batch is None else num_items_in_batch
        grid = torch.zeros_like(counted, dtype=torch.float32)
        return {
            "loss": (total * weights).sum() / items,
            "counted": counted,
            "correct": torch.zeros_like(counted).masked_scatter_(counted, correct[-1]),
            "correct_plain": torch.zeros_like(counted).masked_scatter_(counted, correct[0]),
            "soft_loss": grid.masked_scatter(counted, losses[-1].detach()),
            "soft_loss_plain": grid.masked_scatter(counted, losses[0].detach()),
        }

    def targets(
        self, input_ids: torch.Tensor, cuts: torch.Tensor, counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the base says what the slots of a batch must predict: at the token before each slot's position.

        Returns:
            `(P,)` int64, places of these tokens among all of the batch; `(N,)` int64, which of them each slot has that
            is `counted`; and `(P, 2)` int64, the token before each of them and it itself.
        """
        before = (cuts[..., None] + 1 + torch.arange(self.num_masks, device=cuts.device)).clamp(min=0)
        rows = torch.arange(len(cuts), device=cuts.device)[:, None, None].expand_as(before)
        places, of_slot = (rows * input_ids.shape[1] + before)[counted].unique(return_inverse=True)
        tokens = input_ids.flatten()
        return places, of_slot, torch.stack([tokens[(places - 1).clamp(min=0)], tokens[places]], dim=1)

    @torch.no_grad()
    def memory(self, input_ids: torch.Tensor, cuts: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        """What the base alone makes of answers.

        Args:
            input_ids: `(B, L)`, right-padded.
            cuts: `(B, C)`, where masks will stand, see [`masks`].

        Returns:
            Last hidden states `(B, L, H)`, and what masks behind these cuts read of it, for [`masks`].
        """
        if self._keeps_state:
            states = StateMemory(self._text)
            return states.read(self._decoder, input_ids, cuts), states
        memory = DynamicCache()  # made with the config, it would forget what sliding layers no longer see
        hidden = self._decoder(input_ids=input_ids, use_cache=True, **{CACHE: memory}).last_hidden_state
        return hidden, memory

    @torch.no_grad()
    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The base's last hidden states `(B, L, H)` of answers `(B, L)`, right-padded; `(B, L, 2H)`, with the inner
        states behind, where the root head reads them."""
        with self.model.predicting(None) as slots:
            states: torch.Tensor = self._decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return states if slots is None else slots.with_inner(states)

    @torch.no_grad()
    def memory_of_part(self, input_ids: torch.Tensor, cuts: torch.Tensor, memory: Cache | None) -> Cache:
        """As [`memory`], for some of the cuts at a time: goes on from the `memory` of those in front of them, if there
        is one. States are kept at `cuts` alone."""
        if memory is None or not self._keeps_state:
            memory = StateMemory(self._text) if self._keeps_state else memory or self.memory(input_ids, cuts)[1]
        if isinstance(memory, StateMemory):
            memory.read(self._decoder, input_ids[:, : int(cuts.max()) + 1], cuts)
        return memory

    def masks(self, memory: Cache, cuts: torch.Tensor) -> torch.Tensor:
        """Last hidden states `(B, C, K, H)` of K masks behind each cut.

        Args:
            memory: of [`memory`], for these cuts.
            cuts: `(B, C)`: position of the last token that the masks of a run see, -1 for none. The first mask stands
                two positions further on.
        """
        device, cuts = cuts.device, cuts.clamp(min=0)[..., None]
        runs = cuts + 2 + torch.arange(self.num_masks, device=device)
        positions = runs.flatten(1)
        own = positions[..., None]
        places = torch.arange(self._length(memory), device=device).expand(*runs.shape, -1)
        keys = torch.cat([places, runs[:, :, None].expand(*runs.shape, -1)], dim=-1).flatten(1, 2)
        seen = torch.cat([places <= cuts[..., None], runs[:, :, None] <= runs[..., None]], dim=-1).flatten(1, 2)
        visible = {}
        for kind in self._kinds:
            near = seen
            if kind == "sliding_attention":
                near = seen & (keys > own - self._text.sliding_window)
            elif kind == "chunked_attention":
                size = self._text.attention_chunk_size
                near = seen & (keys // size == own // size)
            visible[kind] = torch.zeros(near.shape, dtype=self.model.dtype, device=device)
            visible[kind] = visible[kind].masked_fill_(~near, float("-inf"))[:, None]
        implementation = self._text._attn_implementation
        inputs: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        apart = None
        if isinstance(memory, StateMemory):
            apart, positions = visible["full_attention"], runs.flatten(0, 1)
            inputs = {"position_ids": positions, "use_cache": True, cache_name(self._decoder): memory.runs()}
        else:
            inputs["attention_mask"] = visible if len(visible) > 1 else visible[self._kinds[0]]
        token = _RUNS.set(MaskRuns(memory, self.num_masks, implementation == "eager", apart))
        self._text._attn_implementation = MASK_RUNS
        try:
            with self.model.predicting(positions.shape[1]), forward_as(has_short_chunks=True):
                hidden: torch.Tensor = self._decoder(
                    input_ids=torch.zeros_like(positions),  # slots have an embedding of their own
                    **inputs,
                ).last_hidden_state
        finally:
            self._text._attn_implementation = implementation
            _RUNS.reset(token)
        return hidden.reshape(*runs.shape, -1)

    @staticmethod
    def _length(memory: Cache) -> int:
        return memory.length if isinstance(memory, StateMemory) else memory.get_seq_length()

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """What the family makes of its head's output, in float32."""
        return scaled(logits, self._text)

    def drafts(
        self, hidden: torch.Tensor, previous_ids: torch.Tensor, root: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The likeliest token of each mask.

        Args:
            hidden: `(N, H)`, of [`masks`].
            previous_ids: `(N, 2)` int64, the two tokens before each mask.
            root: `(N, H)` or `(N, 2H)`, of [`hidden`], the rows that first masks stand behind, where a root head
                drafts, too.

        Returns:
            `(N,)` int64.
        """
        of_root = None if root is None else self.model.root_hidden(root, previous_ids)
        states = self.model.draft_hidden(hidden, previous_ids, of_root)
        logits: torch.Tensor = self.model.get_output_embeddings()(states)
        return logits.argmax(-1)

    def _teacher(self, hidden: torch.Tensor, noise_key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The base's distributions at some positions.

        Args:
            hidden: `(P, H)` last hidden states.
            noise_key: seed of the sampled candidates.

        Returns:
            Probabilities `(P, S)`; the candidates `(S,)`; and `(S,)` the logarithm of how many tokens each stands for.
        """
        logits = self.model.get_output_embeddings()(hidden)
        likely = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        likely[logits.topk(min(self.top_tokens, logits.shape[-1]), sorted=False).indices.flatten()] = True
        generator = torch.Generator().manual_seed(noise_key)
        sampled = torch.randint(logits.shape[-1], (self.sampled_tokens,), generator=generator).to(logits.device)
        sampled = sampled.unique()
        sampled = sampled[~likely[sampled]]
        likely = likely.nonzero().flatten()
        others = logits.shape[-1] - len(likely)
        shares = torch.zeros(len(likely) + len(sampled), device=logits.device)
        if len(sampled):
            shares[len(likely) :] = torch.tensor(others / len(sampled)).log()
        candidates = torch.cat([likely, sampled])
        # In portions: all logits in float32 are large, and few rows stay in the cache of a CPU.
        rows = 8 if logits.device.type == "cpu" else 64
        log_sums = torch.cat([self.scaled(portion).logsumexp(-1) for portion in logits.split(rows)])
        return (self.scaled(logits[:, candidates]) - log_sums[:, None]).exp(), candidates, shares
