"""The forward under way: what layers learn of the step that they compute.

A model's own code hands its layers rows and masks, and nothing else. The rest stands in one record of each thread,
which [`forward_as`] fills for one forward and empties behind it. Outside of it the record is empty, and all that reads
it does what transformers does. These read it:

    of the record      reads it                              which stands in a model since
    slots              hooks of the mask adapter             it was attached (adapters/attach.py), until it is unloaded
    is_grouped, alone  attention functions (attention.py)    its first step: a mapping of the file of its class
    has_short_chunks   chunked layers (below)                its first step: functions of the file of its class
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any, Protocol

import torch

from .rows import MaskRun
from .state import forgetting

# Functions of transformers that pad rows to whole chunks: two rows cost as much as a chunk of 64 to 256. Beside each,
# the package whose kernels replace it where it is installed; these are left alone.
CHUNKED = {"torch_chunk_gated_delta_rule": "fla", "mamba2_chunk_scan": "mamba_ssm"}


class DecodedModel(Protocol):
    """All that decoding asks of a model. What is below `has_mask_adapter` is asked of models with a mask adapter alone
    (`AttachedModel` in adapters/attach.py)."""

    config: Any
    device: torch.device
    dtype: torch.dtype

    def __call__(self, **inputs: Any) -> Any:
        """A forward: `input_ids` or `inputs_embeds`, `attention_mask`, `position_ids`, a cache by the name that the
        version of transformers has for it, `use_cache` and `logits_to_keep`. Its output has `logits`, `(A, T, V)`."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """As of every module."""

    def get_input_embeddings(self) -> Any:
        """As of every model of transformers; so is `get_output_embeddings`."""

    def get_output_embeddings(self) -> Any:
        """The head."""

    @property
    def has_mask_adapter(self) -> bool:
        """Whether slots are rows of a mask adapter; otherwise they hold the mask token."""

    @property
    def deepest(self) -> int:
        """Masks behind one row that are predicted."""

    @property
    def mask_run(self) -> MaskRun:
        """What the rows are that the adapter drafts with."""

    @property
    def drafts_from_root(self) -> bool:
        """Whether the root head drafts."""

    def slots(self, slots: int | torch.Tensor | None) -> Any:
        """The slots of a forward, for [`forward_as`]. Once it has run, their `states` are what the head read."""

    def draft_hidden(
        self, hidden: torch.Tensor, previous_ids: torch.Tensor, of_root: torch.Tensor | None = None
    ) -> torch.Tensor:
        """States of slots for the head, once the tokens before them are known."""

    def root_hidden(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """States for the head without masks."""

    def root_shortlist(self) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
        """The tokens that the root head drafts among, and what scores them."""


class _Forward(threading.local):  # torch.compile can follow it, unlike a context variable
    slots: Any = None  # of the mask adapter
    is_grouped = False  # a mask is one of [`grouped_mask`]
    alone: Sequence[tuple[torch.Tensor, Any]] = ()  # the step's masks, each with the keys of the first rows
    has_short_chunks = False  # chunks are no longer than the rows


UNDER_WAY = _Forward()


@contextmanager
def forward_as(forgotten: Sequence[Any] = (), **record: Any) -> Iterator[None]:
    """Within this context, this thread's forwards run by this record. What it does not name stays as it was.

    Args:
        forgotten: layers of a cache on whose states the forward leaves no trace.
        record: fields of [`_Forward`].
    """
    before = {name: getattr(UNDER_WAY, name) for name in record}
    try:
        for name, value in record.items():
            setattr(UNDER_WAY, name, value)
        with forgetting(forgotten):
            yield
    finally:
        for name, value in before.items():
            setattr(UNDER_WAY, name, value)


def prepare_chunks(model: Any) -> None:
    """Lets `has_short_chunks` act on a model: replaces the chunked functions in the files of models that its layers
    are from, which call them by name."""
    if getattr(model, "use_kernels", False):  # from the Hub
        return
    homes = {sys.modules[kind.__module__] for module in model.modules() for kind in type(module).__mro__}
    for name in _without_kernels():
        for home in homes:
            function = vars(home).get(name)
            if function is not None and not hasattr(function, "takes_short_chunks"):
                setattr(home, name, _fitting(function))


@cache
def _without_kernels() -> list[str]:
    return [name for name, package in CHUNKED.items() if find_spec(package) is None]


def _fitting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; where the record asks for it, with chunks no longer than its rows."""
    usual = signature(function).parameters["chunk_size"].default

    @wraps(function)
    def read(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if UNDER_WAY.has_short_chunks:
            kwargs["chunk_size"] = min(rows.shape[1], kwargs.get("chunk_size", usual))
        return function(rows, *args, **kwargs)

    read.takes_short_chunks = True  # type: ignore[attr-defined]
    return read
