"""Mask adapters on vLLM: low-rank updates of the rows that are masks, and of no others (ALGORITHM.md §5).

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

from ...generation.branches_wedlm import SHORTLIST
from ...modeling_wedlm.mask_adapter_wedlm import (
    MaskAdapterSettings,
    PreviousTokenHead,
    check_base,
    read_adapter_config,
    read_weights,
    settings_of,
)

# Layers that vLLM fuses into one, in the order of their outputs.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class AdaptedLinear(nn.Module):
    """A linear layer of vLLM, with an update added to the rows that are masks.

    Args:
        base: the layer.
        down: `(in, rank)`; of a layer that is cut along its inputs, this process' part.
        up: `(rank, out)`, this process' part.
        start: the first of the outputs that are updated.
        flags: `(most rows, 1)` bool, which rows are masks.
        sums: the parts of the processes must be added up.
    """

    down: torch.Tensor
    up: torch.Tensor
    flags: torch.Tensor

    def __init__(
        self, base: nn.Module, down: torch.Tensor, up: torch.Tensor, start: int, flags: torch.Tensor, sums: bool
    ):
        super().__init__()
        self.base, self.start, self.sums = base, start, sums
        for name, tensor in (("down", down), ("up", up), ("flags", flags)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, rows: torch.Tensor) -> Any:
        """`(N, in)` to `(N, out)` and the bias, which is left to the caller, as in vLLM."""
        output, bias = self.base(rows)
        inner = rows @ self.down
        if self.sums:
            inner = tensor_model_parallel_all_reduce(inner)
        end = self.start + self.up.shape[1]
        here = output[:, self.start : end]
        updated = torch.where(self.flags[: len(rows)], here + inner @ self.up, here)
        return torch.cat([output[:, : self.start], updated, output[:, end:]], dim=1), bias


class VllmMaskAdapter(nn.Module):
    """The mask adapter of a model on vLLM.

    Args:
        name: folder or Hub id.
        model: the [`WeDLMForCausalLM`] that it is put into, with its weights loaded.
        most_rows: of a step.
        any_base: see [`MaskAdapterMixin.load_mask_adapter`].

    Raises:
        OSError: for missing or damaged files.
        ValueError: for an adapter of another base or another mask token, and weights that do not fit.
    """

    flags: torch.Tensor
    mask_embedding: torch.Tensor

    def __init__(self, name: str, model: Any, most_rows: int, any_base: bool):
        super().__init__()
        config, weights = read_adapter_config(name), read_weights(name)
        settings = settings_of(config)
        base = config.get("base")
        samples = (model.model.embed_tokens, model.model.norm)  # which processes of a group may lack
        if get_tensor_model_parallel_rank() == 0 and all(hasattr(sample, "weight") for sample in samples):
            check_base(model, base if isinstance(base, dict) else {}, any_base=any_base)
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise ValueError(f"The weights of {name!r} hold NaN or infinite numbers.")
        parameter = next(model.model.parameters())
        self.dtype, device = parameter.dtype, parameter.device
        weights = {key: weight.to(device, self.dtype) for key, weight in weights.items()}
        self.register_buffer("flags", torch.zeros(most_rows, 1, dtype=torch.bool, device=device), persistent=False)
        try:
            self.register_buffer("mask_embedding", weights["mask_embedding"], persistent=False)
            for target in settings.target_modules:
                self._adapt(model, target, weights[f"down.{target}"], weights[f"up.{target}"])
            self.head = self._make_head(settings, model.config.hidden_size, weights)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"The weights of {name!r} do not fit its adapter_config.json: {error}") from error

    def _adapt(self, model: Any, target: str, down: torch.Tensor, up: torch.Tensor) -> None:
        """Puts the updates of `(layers, rank, in)` and `(layers, out, rank)` into the layers of this process."""
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        fused = next((name for name, parts in FUSED.items() if target in parts), target)
        for index in range(model.model.start_layer, model.model.end_layer):
            layer = model.model.layers[index]
            owner = layer.self_attn if hasattr(layer.self_attn, fused) else layer.mlp
            linear = getattr(owner, fused)
            base: Any = linear
            while isinstance(base, AdaptedLinear):
                base = base.base
            start, cut_down, cut_up = 0, down[index].T, up[index].T
            if fused == target:  # cut along its inputs
                cut_down = cut_down.chunk(world)[rank]
            else:
                sizes = list(base.output_partition_sizes)
                place = FUSED[fused].index(target)
                start, size = sum(sizes[:place]), sizes[place]
                heads = cut_up.shape[1] // size  # fewer parts than processes where key/value heads are shared
                cut_up = cut_up.split(size, dim=1)[rank * heads // world]
            sums = fused == target and world > 1
            adapted = AdaptedLinear(linear, cut_down.contiguous(), cut_up.contiguous(), start, self.flags, sums)
            setattr(owner, fused, adapted)

    def _make_head(
        self, settings: MaskAdapterSettings, hidden_size: int, weights: dict[str, torch.Tensor]
    ) -> PreviousTokenHead | None:
        if not settings.head_width:
            return None
        head = PreviousTokenHead(hidden_size, settings.head_width).requires_grad_(False)
        head.load_state_dict({name: weights[f"head.{name}"] for name in ("down", "up")}, assign=True)
        return head

    def mark(self, rows: torch.Tensor, is_mask: torch.Tensor, positions: torch.Tensor) -> None:
        """Says which rows of the next forward are masks.

        No mask stands where the AR row before the masks gives the token: each is one position further on.

        Args:
            rows: of drafts and masks.
            is_mask: which of them are masks.
            positions: of all rows of the forward, which change.
        """
        self.flags.zero_()
        self.flags[rows, 0] = is_mask
        positions[rows] += is_mask.to(positions.dtype)

    def embed(self, embeddings: torch.Tensor) -> torch.Tensor:
        """`(N, H)` embeddings of a step, with the masks' own."""
        return torch.where(self.flags[: len(embeddings)], self.mask_embedding, embeddings)

    def draft(
        self, model: Any, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the drafts of each request one after the other.

        Args:
            model: the model.
            hidden: `(A, K, H)`, last hidden states of the masks.
            logits: `(A, K, V)`, theirs.
            before: `(A, 2)` int64, the two tokens before the first.

        Returns:
            `(A, K)` int64, the drafts; `(A, K)`, their probabilities over a shortlist of tokens.
        """
        if self.head is None:
            best, tokens = logits.float().max(-1)
            return tokens, (best - logits.float().logsumexp(-1)).exp()
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
