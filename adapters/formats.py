"""The formats of mask adapters: a class for each, which says what a draft row is.

Another format takes such a class and its line in [`FORMATS`]; decoding asks for nothing else (docs/algorithm.md).
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..generation.rows import MaskRun
from .adapter_files import PEFT_TYPE, MaskAdapterSettings, StoredMaskAdapter, find_adapter
from .uno import StoredUnoAdapter


class StoredAdapter(Protocol):
    """An adapter as it lies in a folder or on the Hub, read and checked."""

    @property
    def settings(self) -> MaskAdapterSettings:
        """Its shape."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The state dict of its `MaskAdapter`."""

    def draft_rows(self, model: Any, mask_token_id: int | None, noise: str | None) -> MaskRun | None:
        """How draft rows stand behind a row and which tokens they hold; `None` for masks of ours, whose embedding the
        adapter has. Raises `ValueError` for settings that it cannot follow."""

    def check_base(self, model: Any, *, any_base: bool) -> None:
        """Raises `ValueError` for a model that is not its base."""


FORMATS: dict[Any, Any] = {PEFT_TYPE: StoredMaskAdapter, "LORA": StoredUnoAdapter}  # by their `peft_type`


def read_adapter(name: str | os.PathLike[str], **download_options: Any) -> StoredAdapter:
    """Reads and checks an adapter. Raises `OSError` for missing or damaged files, `ValueError` for those of another
    kind, and for files that do not belong together."""
    config, found = find_adapter(name, **download_options)
    if (kind := config.get("peft_type")) not in FORMATS:
        raise ValueError(f"{str(name)!r} is no mask adapter: its `peft_type` is {kind!r}.")
    stored: StoredAdapter = FORMATS[kind].of(name, config, found)
    return stored
