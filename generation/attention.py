"""Who sees whom in a step: one mask for each kind of layer, and attention that reads the cache without copying it.

`A` sequences in use, `Q` physical rows of each, `H` query heads, `G` of them share a key/value head, `D` head width.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from .rows import Step, lines

# Attention implementations that take any mask as a tensor.
DENSE_MASK_ATTENTION = ("sdpa", "eager")
# Kinds of layers whose mask is known here, by the names of `config.layer_types`.
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
GROUPED, ROWS = "wedlm_grouped_sdpa", "wedlm_eager_rows"  # what takes the place of sdpa and eager during a step
# Rows up to which a CPU's bfloat16 products give a row the same bits: oneDNN takes another kernel for more.
ROWS_ALIKE = 32
# Forwards under way that attend so, by the identity of their config.
_READING: Counter[int] = Counter()
_LOCK = Lock()


def implementation_of(model: Any) -> str:
    """The model's attention implementation, also during another thread's step."""
    name: str = model.config.get_text_config(decoder=True)._attn_implementation
    return {GROUPED: "sdpa", ROWS: "eager"}.get(name, name)


def layer_types(config: Any) -> list[str]:
    """The kind of each decoder layer."""
    config = config.get_text_config(decoder=True)
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    is_sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if is_sliding else "full_attention"] * config.num_hidden_layers


class StepAttention:
    """The masks of a model's steps.

    Args:
        model: whose layers attend.

    Attributes:
        kinds: of its layers.
        groups: query heads of each key/value head, G, where [`grouped_sdpa`] can be used; otherwise 0.
        takes_rows: whether rows can attend one by one, by [`grouped_sdpa`] or [`eager_rows`].
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.implementation = implementation_of(model)
        self.kinds = sorted(set(layer_types(model.config)))
        layers = [module for module in model.modules() if getattr(module, "num_key_value_groups", None)]
        groups = {module.num_key_value_groups for module in layers}
        is_known = getattr(model, "_supports_attention_backend", False)
        self.groups = next(iter(groups), 1) if is_known and self.implementation == "sdpa" and len(groups) <= 1 else 0
        is_eager = is_known and self.implementation == "eager" and all(map(_eager_of, layers))
        self.takes_rows = bool(self.groups) or is_eager

    def masks(
        self, step: Step, position_ids: torch.Tensor, alone: int | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The `attention_mask` of a forward.

        Args:
            step: its rows.
            position_ids: `(A, Q)` int64, logical positions.
            alone: how many of the first rows attend one by one, see [`attends_by_row`]; 0 for prompts, whose rows
                attend together, in the very call of AR decoding. `None`: all rows attend together.

        Returns:
            `None` where the model makes the right one by itself; a tensor where all layers are of one kind, and
            otherwise one for each kind, as transformers' models take them: boolean for sdpa, [`grouped_mask`] for
            grouped and eager attention.
        """
        is_dense = self.implementation in DENSE_MASK_ATTENTION
        is_local = is_dense and self.kinds != ["full_attention"] and step.start != 0
        is_own = step.start == 0 or step.slots.shape[1] == 1 or not is_dense
        if step.start is not None and step.is_chain and is_own and not is_local:
            return None
        assert is_dense, self.implementation  # others would take a tensor for something else
        visible, masks = visibility(step), {}
        for kind in self.kinds:
            near = _near(kind, step, position_ids, self.config)
            mask = visible if near is None else visible & near
            if self.implementation != "sdpa" or (self.groups and alone != 0):
                mask = grouped_mask(mask, self.groups or 1, self.dtype, alone or 0)
            masks[kind] = mask
        return masks if len(self.kinds) > 1 else masks[self.kinds[0]]

    @contextmanager
    def reading(self, masks: Any) -> Iterator[None]:
        """Within this context, the model's layers attend as these masks ask."""
        some = next(iter(masks.values())) if isinstance(masks, dict) else masks
        name = GROUPED if self.groups else ROWS if hasattr(some, "alone") else None
        if masks is None or name is None:
            yield
            return
        key = id(self.config)
        with _LOCK:  # several threads may decode with one model
            _READING[key] += 1
            self.config._attn_implementation = name
        try:
            yield
        finally:
            with _LOCK:
                _READING[key] -= 1
                if not _READING[key]:
                    del _READING[key]
                    self.config._attn_implementation = self.implementation


def _near(kind: str, step: Step, queries: torch.Tensor, config: Any) -> torch.Tensor | None:
    """Keys that a layer's window or chunk leaves, by logical positions: `(A, 1, Q, end)` bool; `None` for all."""
    if kind == "full_attention":
        return None
    # A cached key's slot is its position. The rows of this step may lie in another order.
    keys = torch.arange(step.end, device=queries.device).repeat(len(queries), 1)
    keys = keys.scatter(1, step.slots, queries)[:, None, None]
    queries = queries[:, None, :, None]
    if kind == "chunked_attention":
        return keys // config.attention_chunk_size == queries // config.attention_chunk_size
    return keys > queries - config.sliding_window


def attends_by_row(model: Any) -> bool:
    """Whether each real row of a step should attend in a call of its own, the call of an AR step.

    A row's last bits depend on how many rows attend together. In bfloat16 answers then part at near-ties, and layers
    that quantize what they read make large differences of small ones. A CPU's bfloat16 and integer products give a row
    the same bits beside up to [`ROWS_ALIKE`] others: attention is all that differs.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    is_concerned = dtype == torch.bfloat16 or getattr(model, "is_quantized", False)
    return model.device.type == "cpu" and is_concerned and StepAttention(model).takes_rows


def grouped_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype, alone: int = 0) -> torch.Tensor:
    """The mask of [`grouped_sdpa`], made once for all layers.

    Args:
        visible: `(B or 1, 1, Q, K)` bool.
        groups: query heads of each key/value head, G.
        dtype: of the queries.
        alone: N, how many of the first rows attend one by one; with B = 1.

    Returns:
        `(B or 1, 1, G * (Q - N), K)`, additive, of the other rows; its attribute `alone` has the keys of each of N.
    """
    together = visible[:, :, alone:]
    mask = torch.zeros_like(together, dtype=dtype).masked_fill_(~together, float("-inf")).repeat(1, 1, groups, 1)
    if alone:
        mask.alone = [_keys(row) for row in visible[0, 0, :alone]]  # type: ignore[attr-defined]
    return mask


def _keys(visible: torch.Tensor) -> slice | torch.Tensor:
    """The keys that a row sees, from `(K,)` bool: a range, if they are one, is read where it is."""
    keys = visible.nonzero()[:, 0]
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else keys


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of grouped queries under an explicit mask, an attention function of transformers.

    transformers repeats keys and values for every query head where a mask is given, because kernels take either a mask
    or groups: a copy of the whole cache per layer and step. Here the queries of a group lie one after the other along
    the query axis instead, and only the mask is repeated.

    Args:
        query: `(A, H, Q, D)`.
        key, value: `(A, H / G, K, D)`.
        attention_mask: of [`grouped_mask`]; any other mask is handed to transformers' sdpa.
        dropout, scaling: of the scores.

    Returns:
        `(A, Q, H, D)`, and `None` in place of the weights.
    """
    how: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    outputs = []
    if alone := getattr(attention_mask, "alone", ()):
        is_grouped = query.shape[1] != key.shape[1]
        for row, keys in zip(query[:, :, : len(alone)].split(1, dim=2), alone, strict=True):
            seen = key[:, :, keys], value[:, :, keys]
            outputs.append(F.scaled_dot_product_attention(row, *seen, enable_gqa=is_grouped, **how))
        query = query[:, :, len(alone) :]
    folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    if attention_mask is None or attention_mask.shape[2] != folded.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if query.shape[2]:
        output = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, **how)
        outputs.append(output.view(*query.shape[:3], -1))
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output.transpose(1, 2).contiguous(), None


def eager_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The model's own eager attention, where the mask asks for it row by row; see [`grouped_sdpa`]."""
    eager, alone = _eager_of(module), getattr(attention_mask, "alone", [])
    assert eager is not None
    parts = [
        eager(module, query[:, :, row : row + 1], key[:, :, keys], value[:, :, keys], None, **kwargs)[0]
        for row, keys in enumerate(alone)
    ]
    if query.shape[2] > len(alone):
        parts.append(eager(module, query[:, :, len(alone) :], key, value, attention_mask, **kwargs)[0])
    return torch.cat(parts, dim=1), None


def _eager_of(module: torch.nn.Module) -> Any:
    """The eager attention function that stands beside the class of a layer, or beside one that it inherits from."""
    homes = [sys.modules[kind.__module__] for kind in type(module).__mro__]
    return next((home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward")), None)


for _name, _attend, _mask in ((GROUPED, grouped_sdpa, sdpa_mask), (ROWS, eager_rows, eager_mask)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _mask)


def visibility(step: Step) -> torch.Tensor:
    """Who sees whom: a row sees what the cache holds of its sequence, its own line, and itself.

    Row with 3 cached slots, 1 pending token p, a filled slot f and two masks; a second row with nothing pending:

            cached  p f M M                 cached  · f M M
        p   ■ ■ ■   ■ · · ·             ·                       (padding: written behind the others, seen by none)
        f   ■ ■ ■   ■ ■ · ·             f   ■ ■ ■     ■ · ·
        M   ■ ■ ■   ■ ■ ■ ·             M   ■ ■ ■     ■ ■ ·
        M   ■ ■ ■   ■ ■ ■ ■             M   ■ ■ ■     ■ ■ ■

    Row with 3 cached slots, a pending token p, a draft d, two masks behind p and two behind d:

            cached  p d M M M M
        p   ■ ■ ■   ■ · · · · ·
        d   ■ ■ ■   ■ ■ · · · ·
        M   ■ ■ ■   ■ · ■ · · ·             (p's)
        M   ■ ■ ■   ■ · ■ ■ · ·
        M   ■ ■ ■   ■ ■ · · ■ ·             (d's)
        M   ■ ■ ■   ■ ■ · · ■ ■

    Returns:
        `(A or 1, 1, Q, end)` bool.
    """
    slots = step.slots[:1] if step.start is not None and step.is_chain else step.slots
    visible = torch.arange(step.end, device=slots.device) <= slots[:, None, :, None]
    if not step.is_chain:  # all that branches is among the last rows, and stands behind all rows in front of them
        tail = step.parents.shape[1]
        own = slots[:, None, None, -tail:].expand(-1, 1, tail, -1)
        visible[:, :, -tail:].scatter_(3, own, lines(step.parents)[:, None])
    return visible
