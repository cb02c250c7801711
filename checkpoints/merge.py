"""Merging: an adapter of PEFT becomes part of the weights of its model."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from .find import ADAPTER_FILE, find_checkpoint, find_file, reading

ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Logits of the merged model may be off, relative to their length, by what rounding merged weights to the dtype of the
# model does: so many times its precision, and at least this.
_ROUNDINGS, _LEAST = 8, 1e-4
_PROBES = 16  # tokens of the forward that is compared, beside those that the adapter trains by name


@contextmanager
def older_names() -> Iterator[None]:
    """Inside, transformers does not warn of the names by which TRL and PEFT switch activation checkpointing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield


@older_names()
@torch.no_grad()
def merge_adapter(model: Any, adapter: str | os.PathLike[str]) -> Any:
    """The model with an adapter of any of PEFT's methods merged into its weights, in place.

    It is the model under its adapter: one forward of both is compared, always. Tokens that were added before the
    adapter was trained are added here. Where the adapter changes only one of two tied matrices, both are kept.

    Raises:
        ImportError: where PEFT is not installed.
        OSError: for an adapter that is missing or damaged.
        ValueError: likewise, for one that does not fit the model, and for one that weights cannot express. The model
            is of no use then.
    """
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise ImportError("A LoRA needs PEFT: pip install '.[peft]' in the clone.") from error
    name = os.fspath(adapter)
    with reading(f"The adapter {name!r}"):
        config = PeftConfig.from_pretrained(name)
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(f"The adapter {name!r} cannot be merged: {config.peft_type.value} changes no weights.")
        _add_rows(model, name, config)
        probe = _probe(model, config)
        is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        config.base_model_name_or_path = None  # PEFT warns where a fine-tune or a copy of the base has another name
        wrapped = get_peft_model(model, config)
        found = wrapped.load_adapter(name, "default")
    # PEFT saves the embeddings of a model that was resized twice, the second time with names that it does not read; of
    # tied ones, it saves the trained rows under both names, and reads the first.
    again = r"\.(modules_to_save|original_module)\." + (r"|\.token_adapter\." if is_tied else "")
    unknown = [key for key in found.unexpected_keys if not re.search(again, key)]
    if unknown:
        raise ValueError(f"The adapter {name!r} belongs to another model: this one has no {unknown[0]!r}.")
    try:
        expected = wrapped.eval()(input_ids=probe).logits.float()
        is_untied = _untie(model)
        merged = wrapped.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"The adapter {name!r} cannot be merged: {error}") from error
    fault = float((merged(input_ids=probe).logits.float() - expected).norm() / expected.norm())
    if not fault <= max(_LEAST, _ROUNDINGS * torch.finfo(model.dtype).eps):
        raise ValueError(
            f"The adapter {name!r} cannot be merged: logits of the merged model would be {fault:.1%} from those of "
            "the model under its adapter."
        )
    if is_untied:
        _tie(merged)
    if getattr(merged.generation_config, "masks_ready", False):
        merged.generation_config.masks_ready = False  # it was said of the base
    return merged.requires_grad_(True)  # PEFT had frozen the weights


def _add_rows(model: Any, adapter: str, config: Any) -> None:
    """Gives the model as many embeddings as the adapter was trained with. Raises `ValueError` where the adapter lacks
    new ones: PEFT does not store those of a matrix that it leaves alone; and where the model would lose some."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {f"base_model.model.{name}.": module for name, module in model.named_modules() if module in tables}
    found = find_checkpoint(adapter, file=ADAPTER_FILE)
    with safe_open(str(find_file(adapter, ADAPTER_WEIGHTS, **found)), "pt") as tensors:
        shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    old, rows, whole = len(tables[0].weight), set[int](), set[int]()  # whole: tables that are stored with all rows
    for key, shape in shapes.items():
        for name in (name for name in names if key.startswith(name)):
            if ".lora_B." in key:
                rows.add(shape[0])
            elif ".lora_embedding_A" in key:
                rows.add(shape[1])
            elif key.endswith("weight") and ".lora_" not in key:
                rows.add(shape[0])
                whole.add(id(names[name].weight))
    if not rows:
        rows = {max(old, *(token + 1 for token in _trained_rows(config)), 0)}
    if len(rows) != 1 or rows == {old}:
        return
    (size,) = rows
    missing = {*range(old, size)} - {*_trained_rows(config)}
    is_lost = [id(table.weight) not in whole for table in tables]
    if size < old and any(is_lost):
        raise ValueError(
            f"The adapter {adapter!r} was trained on a model with {size} embeddings, and this one has {old} (`wedlm "
            "convert` may add one for the mask): merge it into the model that it was trained on, then convert that."
        )
    model.resize_token_embeddings(size)
    if missing and any(is_lost):
        raise ValueError(
            f"The adapter {adapter!r} was trained with {size - old} more tokens than the model has, and does not hold "
            "the embeddings of all of them: merge it where it was trained, or save it with "
            "`save_embedding_layers=True`."
        )


def _trained_rows(config: Any) -> list[int]:
    """Tokens whose embeddings the adapter trains one by one."""
    named = getattr(config, "trainable_token_indices", None) or getattr(config, "token_indices", None) or []
    return [token for each in named.values() for token in each] if isinstance(named, dict) else list(named)


def _probe(model: Any, config: Any) -> torch.Tensor:
    """`(1, L)` int64: tokens from the whole vocabulary, and those whose embeddings the adapter trains one by one."""
    last = len(model.get_input_embeddings().weight) - 1
    tokens = [last * place // (_PROBES - 1) for place in range(_PROBES)] + _trained_rows(config)[:_PROBES]
    return torch.tensor([tokens], device=model.device)


def _tables(model: Any) -> tuple[Any, Any]:
    """The embeddings and the head, without what PEFT puts around them."""
    embeddings, head = (
        module.get_base_layer() if hasattr(module, "get_base_layer") else module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    return embeddings, head


def _untie(model: Any) -> bool:
    """Gives the head weights of its own where they are the embeddings' and the adapter changes one of them: merged
    into one matrix, it would change both."""
    embeddings, head = _tables(model)
    if hasattr(head, "token_adapter"):  # a LoRA around the rows that are trained one by one
        own = head.token_adapter.get_base_layer()
        own.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.get_output_embeddings().base_layer = own
        model.config.tie_word_embeddings = False
        return True
    is_changed = embeddings is not model.get_input_embeddings() or head is not model.get_output_embeddings()
    if not is_changed or embeddings.weight is not head.weight:
        return False
    head.weight = nn.Parameter(embeddings.weight.clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    return True


def _tie(model: Any) -> None:
    """Ties the head again where the adapter has changed both in the same way."""
    embeddings, head = _tables(model)
    if embeddings.weight.equal(head.weight):
        head.weight = embeddings.weight
        model.config.tie_word_embeddings = True
