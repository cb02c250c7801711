"""Loading a model with what adapters add to it."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..checkpoints.find import (
    ADAPTER_FILE,
    base_path,
    find_checkpoint,
    find_file,
    is_adapter,
    read_adapter_config,
)
from ..checkpoints.gguf import parsed_once
from ..checkpoints.loading import FASTEST, TOKENIZER_FILES, load_model, load_tokenizer, set_format
from ..checkpoints.merge import merge_adapter
from ..checkpoints.packed import PACKINGS
from ..modeling_wedlm.convert import require_wedlm
from . import load_mask_adapter
from .adapter_files import PEFT_TYPE, WEIGHTS_NAME

logger = logging.getLogger(__name__)

UNO = "uno:"  # before the name of an Uno adapter, whose files are those of any LoRA
_USUAL_SCALE = 8.0  # of a LoRA on all rows, at most: that of Uno's is 16


@parsed_once()
def load_adapted(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    any_base: bool = False,
    needs_masks: bool = True,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model and its tokenizer, where one of the names may be that of an adapter.

    A LoRA, or what another method of PEFT made, is merged into the weights. A mask adapter is attached; verified
    decoding is the default then.

    Args:
        source: folder or Hub id of a checkpoint, or folder of an adapter, whose base is loaded with it.
        adapter: folder or Hub id of a LoRA or of a mask adapter; `uno:` before it for one of Uno, whose files do not
            tell it from a LoRA.
        dtype: as [`load_model`] takes it; weights are packed after a LoRA is merged.
        device: where the model is put.
        any_base: of a mask adapter, see [`compare_bases`].
        needs_masks: refuse a model that can only decode token by token.

    Raises:
        ImportError: for a LoRA where PEFT is not installed.
        OSError: for what is missing or damaged.
        ValueError: likewise, and for an adapter that does not fit the model.
    """
    name, uno = os.fspath(adapter or ""), None
    if name.startswith(UNO):
        adapter, uno = None, _find_uno(name.removeprefix(UNO))
    source, adapters = _base_and_adapters(source, adapter)
    masks = [each for each in adapters if _peft_type(each) == PEFT_TYPE]
    loras = [each for each in adapters if each not in masks]
    if any_base and not masks:
        raise ValueError("`any_base` is about the base of a mask adapter, and there is none.")
    is_late = bool(loras) and dtype in (*PACKINGS, FASTEST)
    # A model of any class carries a mask adapter; without one, parallel decoding needs a WeDLM model.
    if needs_masks and not masks and uno is None:
        require_wedlm(source)
    model = load_model(source, dtype="auto" if is_late else dtype, device=device)
    for each in loras:
        _warn_of_uno(each)
        model = merge_adapter(model, each)
        if hasattr(model.config, "masks_trained"):  # WeDLM's own
            model.config.masks_trained = True
    if is_late:
        set_format(model, dtype, device)
    for each, where in [*((each, {}) for each in masks), *([] if uno is None else [uno])]:
        load_mask_adapter(model, each, any_base=any_base, **where)
        if getattr(model.generation_config, "verification", None) is None:
            model.generation_config.verification = "exact"
    own = [each for each in adapters if any(Path(each, name).is_file() for name in TOKENIZER_FILES)]
    return model, load_tokenizer([source, *own][-1])


def _warn_of_uno(adapter: str | os.PathLike[str]) -> None:
    config = read_adapter_config(adapter)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, int) and isinstance(alpha, int | float) and alpha > _USUAL_SCALE * rank:
        logger.warning(
            "%s has an unusual scale, %g, and is merged into the weights. If it is one of Uno, which acts on draft "
            "rows alone, name it `%s%s`.", adapter, alpha / rank, UNO, adapter,
        )  # fmt: skip


def _find_uno(name: str) -> tuple[str, dict[str, str]]:
    """Folder or Hub id of an Uno adapter, and where in it: a bundle has the base at the root and the adapter in
    `adapter`. Raises `OSError` or `ValueError` where there is none."""
    errors: list[OSError] = []
    for subfolder in ("", "adapter"):
        try:
            found = find_checkpoint(name, file=ADAPTER_FILE, subfolder=subfolder)
            if find_file(name, ADAPTER_FILE, is_needed=False, **found) is not None:
                return name, {"subfolder": subfolder} if subfolder else {}
        except OSError as error:
            errors.append(error)
    raise errors[0] if errors else FileNotFoundError(f"There is no adapter in {name!r}: it has no {ADAPTER_FILE}.")


def _base_and_adapters(
    source: str | os.PathLike[str], adapter: str | os.PathLike[str] | None
) -> tuple[str | os.PathLike[str], list[str | os.PathLike[str]]]:
    """The checkpoint on which these stand, and all adapters in the order in which they are loaded."""
    adapters = [] if adapter is None else [adapter]
    while is_adapter(source) and source not in adapters[:-1]:
        adapters.insert(0, source)
        source = base_path(source)
        if not os.path.exists(source):
            _check_base(source, adapters[0])
    return source, adapters


def _check_base(base: str, adapter: str | os.PathLike[str]) -> None:
    """Raises `OSError` or `ValueError` for the base of an adapter that cannot be found."""
    try:
        find_checkpoint(base)
    except (OSError, ValueError) as error:
        how = f"`--model BASE --adapter {os.fspath(adapter)}` names another place"
        raise type(error)(
            f"The base of the adapter {os.fspath(adapter)!r}: {str(error).rstrip('.')}; {how}."
        ) from None


def _peft_type(adapter: str | os.PathLike[str]) -> Any:
    """The kind of an adapter. Raises `OSError` for one that is missing or has no safetensors."""
    found = find_checkpoint(adapter, file=ADAPTER_FILE)
    if find_file(adapter, WEIGHTS_NAME, is_needed=False, **found) is None:  # PEFT would unpickle other files
        raise FileNotFoundError(f"The adapter {os.fspath(adapter)!r} has no {WEIGHTS_NAME}.")
    return read_adapter_config(adapter, **found).get("peft_type")
