"""Mask adapters on vLLM: low-rank updates of the rows that are masks alone (docs/algorithm.md#mask-adapters).

The weights and their meaning are those of [`MaskAdapter`]; vLLM's layers are fused and cut over processes, its rows
are those of all requests in one dimension, and compiled forwards and CUDA graphs want fixed buffers. So which rows are
masks stands in a buffer of flags, written before each forward.

`N` rows of a step, `M` of them masks, `H` hidden size, `A` requests, `K` drafts of one, `S` tokens of a shortlist.
"""

from typing import Any

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from ...adapters.adapter_files import MaskAdapterSettings, StoredMaskAdapter
from ...adapters.mask_adapter import PreviousTokenHead
from ...generation.sampling import SHORTLIST

# Layers that vLLM fuses into one, in the order of their outputs.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED_INTO = {part: name for name, parts in FUSED.items() for part in parts}


class AdaptedLinear(nn.Module):
    """A linear layer of vLLM, `base`, with an update added to the rows that are masks; where it `sums`, the parts of
    the processes must be added up."""

    # (in, ranks), of all layers that are fused into it; of a layer that is cut along its inputs, this process' part.
    down: torch.Tensor
    up: torch.Tensor  # (ranks, out), this process' part; each fused layer's updates its own outputs only
    flags: torch.Tensor  # (most rows, 1), 1 for rows that are masks, otherwise 0

    def __init__(self, base: nn.Module, down: torch.Tensor, up: torch.Tensor, flags: torch.Tensor, sums: bool):
        super().__init__()
        self.base, self.sums = base, sums
        for name, tensor in (("down", down), ("up", up), ("flags", flags)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, rows: torch.Tensor) -> Any:
        """`(N, in)` to `(N, out)` and the bias, which is left to the caller, as in vLLM."""
        output, bias = self.base(rows)
        inner = rows @ self.down * self.flags[: len(rows)]
        if self.sums:
            inner = tensor_model_parallel_all_reduce(inner)
        return torch.addmm(output, inner, self.up), bias  # adds exactly 0 to rows that are no masks


class VllmMaskAdapter(nn.Module):
    """The mask adapter of a folder or Hub id, in a [`WeDLMForCausalLM`] with weights; `most_rows` of a step.

    Raises `OSError` for missing or damaged files, and `ValueError` for weights that do not fit."""

    flags: torch.Tensor
    mask_embedding: torch.Tensor

    def __init__(self, name: str, model: Any, most_rows: int):
        super().__init__()
        stored = StoredMaskAdapter.read(name)
        settings = stored.settings
        self.num_masks = settings.num_masks
        parameter = next(model.model.parameters())
        self.dtype, device = parameter.dtype, parameter.device
        weights = {key: weight for key, weight in stored.weights.items() if weight.is_floating_point()}
        weights = {key: weight.to(device, self.dtype) for key, weight in weights.items()}
        self.register_buffer("flags", torch.zeros(most_rows, 1, dtype=self.dtype, device=device), persistent=False)
        try:
            self.register_buffer("mask_embedding", weights["mask_embedding"], persistent=False)
            for layer in sorted({FUSED_INTO.get(target, target) for target in settings.target_modules}):
                self._adapt(model, layer, settings, weights)
            self.head = self._make_head(settings, model.config.hidden_size, weights)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"The weights of {name!r} do not fit its adapter_config.json: {error}") from error

    def _adapt(self, model: Any, name: str, settings: MaskAdapterSettings, weights: dict[str, torch.Tensor]) -> None:
        """Puts the updates, `(layers, rank, in)` and `(layers, out, rank)`, into one layer of vLLM in each block."""
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parts = FUSED.get(name, (name,))
        sums = name not in FUSED and world > 1  # cut along its inputs
        updated = settings.layers_to_transform or range(len(model.model.layers))
        counts = {len(weight) for key, weight in weights.items() if key.startswith(("down.", "up."))}
        if max(updated) >= len(model.model.layers) or counts != {len(updated)}:
            raise RuntimeError(f"updates of {len(updated)} layers, up to number {max(updated)}")
        for place, index in enumerate(updated):
            if not model.model.start_layer <= index < model.model.end_layer:  # another process has it
                continue
            layer = model.model.layers[index]
            owner = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            linear = getattr(owner, name)
            downs: list[torch.Tensor] = []
            ups: list[torch.Tensor] = []  # of each part, what this process has; no rows where it has no update
            for part, target in enumerate(parts):
                size = linear.output_partition_sizes[part] if name in FUSED else linear.output_size
                if target not in settings.target_modules:
                    ups.append(self.flags.new_zeros(0, size))
                    continue
                down, up = weights[f"down.{target}"][place].T, weights[f"up.{target}"][place].T
                if name in FUSED:
                    pieces = up.split(size, dim=1)  # fewer than processes where key/value heads are shared
                    up = pieces[rank * len(pieces) // world]
                else:
                    down = down.chunk(world)[rank]
                downs.append(down)
                ups.append(up)
            down = torch.cat(downs, dim=1).contiguous()
            setattr(owner, name, AdaptedLinear(linear, down, torch.block_diag(*ups), self.flags, sums))

    def _make_head(
        self, settings: MaskAdapterSettings, hidden_size: int, weights: dict[str, torch.Tensor]
    ) -> PreviousTokenHead | None:
        if not settings.head_width:
            return None
        head = PreviousTokenHead(hidden_size, settings.head_width).requires_grad_(False)
        head.load_state_dict({name: weights[f"head.{name}"] for name in ("down", "up")}, assign=True)
        return head

    def mark(self, rows: torch.Tensor, is_mask: torch.Tensor, positions: torch.Tensor) -> None:
        """Says which rows of the next forward, of those of drafts and masks, are masks. No mask stands where the AR
        row before them gives the token: each is one position further on, so that the `positions` of all rows change.
        """
        self.flags.zero_()
        self.flags[rows, 0] = is_mask.to(self.flags.dtype)
        positions[rows] += is_mask.to(positions.dtype)

    def embed(self, embeddings: torch.Tensor) -> torch.Tensor:
        """`(N, H)` embeddings of a step, with the masks' own."""
        return torch.where(self.flags[: len(embeddings)] > 0, self.mask_embedding, embeddings)

    def draft(
        self, model: Any, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the drafts of each request one after the other, from the masks' last hidden states `(A, K, H)`,
        their logits `(A, K, V)`, and the two tokens before the first, `(A, 2)` int64. Returns the drafts, `(A, K)`
        int64, and their probabilities over a shortlist of tokens, `(A, K)`."""
        assert self.head is not None
        shortlist = logits.topk(min(SHORTLIST, logits.shape[-1] - 1), dim=-1).indices
        weight = getattr(model.lm_head, "weight", None)
        is_plain = get_tensor_model_parallel_world_size() == 1 and getattr(weight, "shape", ())[:1] >= (
            model.config.vocab_size,
        )
        weights = weight[shortlist] if is_plain and weight is not None else None  # (A, K, S, H)
        drafts, chances = [], []
        for depth in range(hidden.shape[1]):
            state, tokens = self.head(hidden[:, depth], model.model.embed_tokens(before)), shortlist[:, depth]
            if weights is not None:
                scores = (weights[:, depth].float() * state[:, None].float()).sum(-1)
            else:
                scores = model.logits_processor(model.lm_head, state).gather(1, tokens).float()
            best, place = scores.max(-1, keepdim=True)
            drafts.append(tokens.gather(1, place)[:, 0])
            chances.append((best[:, 0] - scores.logsumexp(-1)).exp())
            before = torch.stack([before[:, 1], drafts[-1]], dim=1)
        return torch.stack(drafts, 1), torch.stack(chances, 1)
