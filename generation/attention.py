"""Who sees whom in a step: one mask for each kind of layer, and attention that reads the cache without copying it.

`A` sequences in use, `Q` physical rows of each, `H` query heads, `G` of them share a key/value head, `D` head width.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from .forward import UNDER_WAY, prepare_chunks
from .rows import Step, lines
from .state import keeps_state

# Attention implementations that take any mask as a tensor.
DENSE_MASK_ATTENTION = ("sdpa", "eager")
# Kinds of layers whose mask is known here, by the names of `config.layer_types`.
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
# Rows up to which a CPU's bfloat16 products give a row the same bits, with AMX: oneDNN takes another kernel for more.
ROWS_ALIKE = 32

Keys = slice | torch.Tensor  # that a row sees: a range, or their places


def implementation_of(model: Any) -> str:
    """The model's attention implementation."""
    name: str = model.config.get_text_config(decoder=True)._attn_implementation
    return name


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
        has_state: whether the model keeps a state: then it makes its own masks, since rows are in the text's order.
        kinds: of its layers.
        groups: query heads of each key/value head, G, where [`grouped_sdpa`] can be used; otherwise 0.
        takes_rows: whether rows can attend one by one.
        has_kernels: whether all of them do so in steps, in kernels of packed layers.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.has_state = keeps_state(model)
        if self.has_state:
            prepare_chunks(model)
        self.implementation = implementation_of(model)
        self.kinds = sorted(set(layer_types(model.config)))
        layers = [module for module in model.modules() if getattr(module, "num_key_value_groups", None)]
        groups = {module.num_key_value_groups for module in layers}
        is_known = getattr(model, "_supports_attention_backend", False) and not self.has_state
        is_known = is_known and all(map(_prepare, layers))
        self.groups = next(iter(groups), 1) if is_known and self.implementation == "sdpa" and len(groups) <= 1 else 0
        is_eager = is_known and self.implementation == "eager"
        self.takes_rows = bool(self.groups) or is_eager
        self.has_kernels = any(getattr(module, "attends_by_row", False) for module in model.modules())
        self._alone: list[tuple[torch.Tensor, Sequence[Keys]]] = []

    def masks(
        self, step: Step, position_ids: torch.Tensor, alone: int | None = None, is_prompt: bool = False
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The `attention_mask` of a forward.

        Args:
            step: its rows.
            position_ids: `(A, Q)` int64, logical positions.
            alone: how many of the first rows attend one by one, see [`attends_by_row`]. 0 for a prompt: AR decoding
                reads it in one call, too. `None`: all rows attend together. In kernels each attends by itself.
            is_prompt: rows attend together in kernels, too.

        Returns:
            `None` where the model makes the right mask by itself; a tensor where all layers are of one kind, and
            otherwise a tensor for each kind, as transformers' models take them: boolean for sdpa, [`grouped_mask`] for
            grouped and eager attention.
        """
        self._alone.clear()
        if self.has_state:
            return None
        is_dense = self.implementation in DENSE_MASK_ATTENTION
        is_local = is_dense and self.kinds != ["full_attention"] and step.start != 0
        is_own = step.start == 0 or step.slots.shape[1] == 1 or not is_dense
        if step.start is not None and step.is_chain and is_own and not is_local:
            return None
        assert is_dense, self.implementation  # others would take a tensor for something else
        visible, masks = visibility(step), {}
        for kind in self.kinds:
            near = _near(kind, step, position_ids, self.config)
            mask = seen = visible if near is None else visible & near
            if self.implementation != "sdpa" or (self.groups and alone != 0):
                mask = grouped_mask(seen[:, :, alone or 0 :], self.groups or 1, self.dtype)
            if alone:
                self._alone.append((mask, [*map(keys_of, seen[0, 0, :alone])]))
            if self.has_kernels and not is_prompt and mask is not seen:
                mask.visible = seen  # type: ignore[attr-defined]
            masks[kind] = mask
        return masks if len(self.kinds) > 1 else masks[self.kinds[0]]

    @property
    def record(self) -> dict[str, Any]:
        """How layers attend under the last masks, for [`forward_as`]."""
        return {"is_grouped": bool(self.groups), "alone": tuple(self._alone)}


def _near(kind: str, step: Step, queries: torch.Tensor, config: Any) -> torch.Tensor | None:
    """The keys inside each row's window or chunk, by logical positions: `(A, 1, Q, end)` bool; `None`: all keys."""
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
    """Whether each real row of a step should attend in a call of its own, as an AR step does.

    The last bits of a row's attention depend on how many rows attend together. In bfloat16 they decide near-ties, and
    layers that quantize their inputs enlarge such differences. Matrix products need no such care: a CPU's in bfloat16
    and integers mostly give a row the same bits for up to [`ROWS_ALIKE`] rows, and so do a GPU's in the mode of
    batch_invariant_ops.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else model.dtype
    is_alike = dtype == torch.bfloat16 or rounds_rows(model)
    if (products := sys.modules.get("batch_invariant_ops")) is not None and products.is_batch_invariant_mode_enabled():
        return StepAttention(model).takes_rows
    return model.device.type == "cpu" and is_alike and StepAttention(model).takes_rows


def rounds_rows(model: Any) -> bool:
    """Whether layers may quantize their inputs, and so enlarge small differences between rows."""
    is_packed = any(getattr(module, "rounds_rows", False) for module in model.modules())
    return is_packed or getattr(model, "is_quantized", False)


def grouped_mask(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of [`grouped_sdpa`], made once for all layers: `(B or 1, 1, G * Q, K)`.

    Args:
        visible: `(B or 1, 1, Q, K)` bool.
        groups: query heads of each key/value head, G.
        dtype: of the queries.
    """
    return visible.to(dtype).log_().repeat(1, 1, groups, 1)  # of 1 and 0: 0 and -inf


def keys_of(visible: torch.Tensor) -> Keys:
    """The places of the keys that a row sees, from `(K,)` bool; a slice where they are a range, to copy nothing."""
    keys = visible.nonzero()[:, 0]
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else keys


def grouped_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    alone: Sequence[Keys] = (),
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention of grouped queries under an explicit mask.

    Kernels take either a mask or groups, so under a mask transformers repeats keys and values for every query head: a
    copy of the whole cache in each layer and step. Here the queries of a group lie one after the other along the query
    axis instead, and only the mask is repeated.

    Args:
        query: `(A, H, Q, D)`.
        key, value: `(A, H / G, K, D)`.
        mask: of [`grouped_mask`].
        alone: keys of each of the first N rows, which attend one by one; the mask is that of the others.
        dropout, scaling: of the scores.

    Returns:
        `(A, Q, H, D)`.
    """
    how: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    outputs, is_grouped = [], query.shape[1] != key.shape[1]
    for row, keys in enumerate(alone):
        own = query[:, :, row : row + 1], key[:, :, keys], value[:, :, keys]
        outputs.append(F.scaled_dot_product_attention(*own, enable_gqa=is_grouped, **how))
    query = query[:, :, len(alone) :]
    if query.shape[2]:
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, **how)
        outputs.append(output.view(*query.shape[:3], -1))
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output.transpose(1, 2).contiguous()


class StepFunctions(AttentionInterface):
    """The attention functions of a file of models, some of them replaced.

    Args:
        before: the file's own functions. Those registered there later count here too.
        own: the replacements, by name.
    """

    def __init__(self, before: AttentionInterface, own: dict[str, Any]) -> None:
        super().__init__()
        self.before, self.own = before, own

    def __getitem__(self, key: str) -> Any:
        return self.own[key] if key in self.own else self.before[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.own.pop(key, None)
        self.before[key] = value


def _prepare(layer: torch.nn.Module) -> bool:
    """Lets an attention layer attend as a step asks. Returns whether it can. Each file of models in transformers looks
    up attention functions in a mapping: here it gets replacements, which call the former ones outside of steps."""
    homes = [sys.modules[kind.__module__] for kind in type(layer).__mro__]
    homes = [home for home in homes if hasattr(home, "ALL_ATTENTION_FUNCTIONS")]
    for home in homes:
        functions: Any = home.ALL_ATTENTION_FUNCTIONS
        if not isinstance(functions, StepFunctions):
            own = {"sdpa": _sdpa_of(functions)}
            if hasattr(home, "eager_attention_forward"):
                own["eager"] = _eager_rows_of(home.eager_attention_forward)
            home.ALL_ATTENTION_FUNCTIONS = StepFunctions(functions, own)  # type: ignore[attr-defined]
    return bool(homes) and all(hasattr(home, "eager_attention_forward") for home in homes)


def _sdpa_of(functions: Any) -> Any:
    """sdpa, but with [`grouped_sdpa`] for the masks of steps."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        alone = _alone(attention_mask)
        is_grouped = UNDER_WAY.is_grouped and attention_mask is not None
        rows = (query.shape[2] - len(alone)) * (query.shape[1] // key.shape[1])
        if not is_grouped or attention_mask.shape[2] != rows:
            return functions["sdpa"](module, query, key, value, attention_mask, **kwargs)
        how = {name: kwargs[name] for name in ("dropout", "scaling") if name in kwargs}
        return grouped_sdpa(query, key, value, attention_mask, alone, **how), None

    attend.takes_kernels = True  # type: ignore[attr-defined]
    return attend


def _eager_rows_of(eager: Any) -> Any:
    """The eager attention of a file of models, row by row where a step asks for it."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        if not (alone := _alone(attention_mask)):
            return eager(module, query, key, value, attention_mask, **kwargs)
        parts = [
            eager(module, query[:, :, row : row + 1], key[:, :, keys], value[:, :, keys], None, **kwargs)[0]
            for row, keys in enumerate(alone)
        ]
        if query.shape[2] > len(alone):
            parts.append(eager(module, query[:, :, len(alone) :], key, value, attention_mask, **kwargs)[0])
        return torch.cat(parts, dim=1), None

    return attend


def _alone(mask: Any) -> Sequence[Keys]:
    return next((keys for own, keys in UNDER_WAY.alone if own is mask), ())


def visibility(step: Step) -> torch.Tensor:
    """Who sees whom: a row sees the cached part of its sequence, and its own line.

    A sequence with 3 cached slots, a pending token p, a filled slot f and two masks; another with nothing pending:

            cached  p f M M                 cached  · f M M
        p   ■ ■ ■   ■ · · ·             ·                       (padding: written behind the others, seen by no row)
        f   ■ ■ ■   ■ ■ · ·             f   ■ ■ ■     ■ · ·
        M   ■ ■ ■   ■ ■ ■ ·             M   ■ ■ ■     ■ ■ ·
        M   ■ ■ ■   ■ ■ ■ ■             M   ■ ■ ■     ■ ■ ■

    A sequence with 3 cached slots, a pending token p, a draft d, two masks behind p and two behind d:

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
    if not step.is_chain:  # only the last rows branch, and they stand behind all rows in front of them
        tail = step.parents.shape[1]
        own = slots[:, None, None, -tail:].expand(-1, 1, tail, -1)
        visible[:, :, -tail:].scatter_(3, own, lines(step.parents)[:, None])
    return visible
