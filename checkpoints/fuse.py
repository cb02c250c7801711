"""Which modules of a packed model are fused: those that stay what they are. Names only say what may be tried."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from .fused import Fused, FusedAttention, FusedMLP, fused_class, shared_product
from .fused_layer import FusedLayer
from .kernels import has_kernels
from .packed_layers import PackedLinear, PackedNorm

# Numbers of rows, and how large their numbers are. Modules of a known kind are spared the last.
_PROBED = ((3, 1.0), (5, 50.0), (1, 1.0))
# How far kernels may be from torch, as a share: layers of few bits round their inputs, which enlarges differences.
_CLOSE = 0.02


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Fuses the modules of a packed model that give the same values so."""
    keeps_state = getattr(model, "_is_stateful", False)  # the rows of its steps attend together
    known: set[Any] = set()  # kinds of modules that were fused
    modules = [module for module in model.modules() if not isinstance(module, Fused) and "forward" not in vars(module)]
    for module in modules:
        for mixin in (FusedAttention, FusedMLP):
            layers = [getattr(module, name, None) for name in mixin.layer_names]
            if None not in layers and shared_product(*layers) is not None:
                _try(module, mixin, known)
        if isinstance(module, FusedAttention):
            module.attends_by_row = module.has_kernels and not keeps_state
    for module in modules:
        if all(hasattr(module, name) for name in FusedLayer.layer_names):
            _try(module, FusedLayer, known)


def _try(module: Any, mixin: Any, known: set[Any]) -> None:
    """Fuses a module, if it stays what it is. Of a kind that is known, fewer probes are enough."""
    before, base = dict(vars(module)), module.__class__
    layers = [each for each in module.modules() if isinstance(each, PackedLinear)]
    kind = mixin, base, *((each.in_features, each.out_features, each.bias is None) for each in layers)
    probed = _PROBED[:-1] if kind in known else _PROBED
    module.__class__ = fused_class(mixin, base)
    for name in ("cache", "past_key_values"):  # of newer versions of transformers and of older ones
        # Whatever the forward of another kind of module raises: it is not fused.
        with suppress(Exception):
            module.prepare()
            module.training = False
            if mixin.needs_kernels:  # then its parts are computed by the same kernels
                module.has_kernels = module.suits_kernels()
                is_fused = module.has_kernels and _is_same(module, base, name, probed)
            else:
                norms = [each for each in module.modules() if isinstance(each, PackedNorm) and each.has_kernels]
                for norm in norms:
                    norm.has_kernels = False
                try:
                    is_fused = _is_same(module, base, name, probed)
                finally:
                    for norm in norms:
                        norm.has_kernels = True
                if is_fused:
                    module.has_kernels = has_kernels() and module.suits_kernels()
                    module.has_kernels = module.has_kernels and _is_close(module, base, name, probed)
            if is_fused:
                module.training = before["training"]
                if module.has_kernels or not has_kernels():  # else kernels are probed anew
                    known.add(kind)
                return
    vars(module).clear()
    vars(module).update(before)
    module.__class__ = base


def _is_same(*probe: Any) -> bool:
    """Whether a fused module gives rows the bits that its base gives them."""
    return all(torch.equal(found, own) for found, own in _both(*probe))


def _is_close(*probe: Any) -> bool:
    """Whether it gives them nearly the same values."""
    return all(bool((found - own).norm() <= _CLOSE * own.norm()) for found, own in _both(*probe))


def _both(module: Any, base: Any, cache: str, probed: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a fused module and its base give."""
    size = next(layer.in_features for layer in module.modules() if isinstance(layer, PackedLinear))
    for count, scale in probed:
        rows = torch.randn(1, count, size, generator=torch.Generator().manual_seed(count)) * scale
        calls = module.forward, partial(base.forward, module)
        yield from zip(*(module.probe(call, rows, cache) for call in calls), strict=True)
