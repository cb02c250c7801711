"""The two files of a mask adapter, adapter_config.json and adapter_model.safetensors: written, read and checked."""

import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoints.files import write_text, written_whole
from ..checkpoints.find import ADAPTER_FILE, find_checkpoint, find_file, read_adapter_config
from ..generation.versions import check_format

WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_TYPE = "MASK_ADAPTER"
ROOT_TOKENS = "root_head.tokens"  # what the root head drafts among
MOST_FREQUENT = 4096  # of these: 85 % of the tokens of SmolLM2's answers. More take longer to score.
KEY_PREFIX = "base_model.model.model.mask_adapter."  # PEFT's way to write `model.mask_adapter.`

# What an adapter's base must share with the model that it is loaded into. Sizes that a config lacks are not compared.
BASE_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_LARGEST_WEIGHT = 65504.0  # of float16
_SAMPLED = 128  # numbers of each weight
_ROUNDING, _SMALLEST = 2**-7, 2**-24  # two roundings to bfloat16, relative; two to float16's smallest numbers


@dataclass(frozen=True)
class MaskAdapterSettings:
    """Shape of a mask adapter.

    Attributes:
        rank: of the updates.
        target_modules: names of the linear layers that are updated, the same ones in all these layers; none: the
            projection out of attention and the last one of the MLP, whatever they are called.
        head_width: hidden units of the previous-token head; 0 for none.
        num_masks: masks behind one row that it is trained to predict; decoding asks for no more.
        layers_to_transform: decoder layers that are updated, counted from 0; none: all of them.
        root_width: hidden units of the root head, which drafts without masks; 0 for none. Its drafts stand where
            branches are planned: not with a static cache or a fixed window. It counts in the drafts of first masks,
            too. With a recurrent state, nothing reads it.
        root_layer: how many decoder layers make the inner state that the root head reads beside the last one; 0: it
            reads the last one alone. Default: three quarters of the layers.
    """

    rank: int = 64
    target_modules: tuple[str, ...] = ()
    head_width: int = 640
    num_masks: int = 4
    layers_to_transform: tuple[int, ...] = ()
    root_width: int = 0
    root_layer: int | None = None

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("rank", "head_width", "num_masks", "root_width")}
        numbers["root_layer"] = 0 if self.root_layer is None else self.root_layer
        if wrong := [f"`{name}` {value!r}" for name, value in numbers.items() if type(value) is not int]:
            raise ValueError(f"The shape of a mask adapter is stated in whole numbers; got {', '.join(wrong)}.")
        if isinstance(self.target_modules, str):
            raise ValueError(f"`target_modules` is a list of names, got the text {self.target_modules!r}.")
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        is_named_twice = len(set(self.target_modules)) != len(self.target_modules)
        if (
            self.rank < 1
            or min(self.head_width, self.root_width, numbers["root_layer"]) < 0
            or self.num_masks < 1
            or is_named_twice
        ):
            raise ValueError(
                "A mask adapter needs a `rank` of at least 1, `target_modules` named once each, a `head_width` of at "
                f"least 0, `num_masks` of at least 1, `root_width` and `root_layer` of at least 0; got {self}."
            )
        if self.root_layer and not self.root_width:
            raise ValueError(
                f"`root_layer` {self.root_layer} goes with a `root_width`: without it, no root head reads."
            )
        layers = tuple(self.layers_to_transform)
        if len(set(layers)) != len(layers) or any(type(layer) is not int or layer < 0 for layer in layers):
            raise ValueError(f"`layers_to_transform` counts layers from 0 and names each once; got {layers}.")
        object.__setattr__(self, "layers_to_transform", tuple(sorted(layers)))


def find_adapter(name: str | os.PathLike[str], **download_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The adapter_config.json of a folder or Hub id, and what else finds its files. Raises `OSError` for one that is
    missing or damaged."""
    where = {key: value for key, value in download_options.items() if key in ("revision", "subfolder")}
    # Found here, or transformers would try for long.
    found = find_checkpoint(name, file=ADAPTER_FILE, **where) | download_options
    return read_adapter_config(name, **found), found


@dataclass(frozen=True)
class StoredMaskAdapter:
    """A mask adapter as it lies in a folder or on the Hub."""

    settings: MaskAdapterSettings
    base: dict[str, Any]  # what tells the model that it was trained for, see `base_of`
    weights: dict[str, torch.Tensor]  # state dict of the `MaskAdapter`

    @classmethod
    def read(cls, name: str | os.PathLike[str], **download_options: Any) -> "StoredMaskAdapter":
        """Reads and checks the files of a folder or Hub id.

        Raises:
            OSError: for missing or damaged files.
            ValueError: for an adapter of another kind or of a later format, and for files that do not belong together.
        """
        config, found = find_adapter(name, **download_options)
        if config.get("peft_type") != PEFT_TYPE:
            raise ValueError(f"{str(name)!r} is no mask adapter: its `peft_type` is {config.get('peft_type')!r}.")
        return cls.of(name, config, found)

    @classmethod
    def of(
        cls, name: str | os.PathLike[str], config: Mapping[str, Any], found: Mapping[str, Any]
    ) -> "StoredMaskAdapter":
        """As [`read`], of what [`find_adapter`] found."""
        check_format(config)
        settings, base = _settings_of(config), config.get("base")
        try:
            stored = load_file(str(find_file(name, WEIGHTS_NAME, **found)))
        except SafetensorError as error:
            raise OSError(f"The weights of {str(name)!r} are damaged or truncated: {error}.") from error
        weights = without_ngrams({key.removeprefix(KEY_PREFIX): weight for key, weight in stored.items()})
        for key, weight in weights.items():
            if weight.is_floating_point() == (key == ROOT_TOKENS):
                kind = "whole numbers" if key == ROOT_TOKENS else "floating point"
                raise ValueError(f"The weights of {str(name)!r} must be {kind}; {key} is {weight.dtype}.")
            if weight.is_floating_point() and not bool((weight.abs() <= _LARGEST_WEIGHT).all()):
                raise ValueError(
                    f"The weights of {str(name)!r} hold NaN, infinite numbers or numbers beyond float16's largest, "
                    f"{_LARGEST_WEIGHT:.0f}: {key}."
                )
        # Before memory is asked for.
        ranks = {weight.shape[1:2] for key, weight in weights.items() if key.startswith("down.")}
        widths = {weight.shape[:1] for key, weight in weights.items() if key == "head.down"}
        roots = {weight.shape[:1] for key, weight in weights.items() if key == "root_head.down"}
        stated = settings.rank, settings.head_width, settings.root_width
        if [ranks, widths, roots] != [{(size,)} if size else set() for size in stated]:
            raise ValueError(
                f"The weights of {str(name)!r} do not fit its {ADAPTER_FILE}: `rank` {settings.rank}, `head_width` "
                f"{settings.head_width}, `root_width` {settings.root_width}."
            )
        return cls(settings, base if isinstance(base, dict) else {}, weights)

    def draft_rows(self, model: Any, mask_token_id: int | None, noise: str | None) -> None:
        """Nothing: draft rows are masks, whose embedding the adapter has. Raises `ValueError` for settings of others'
        draft rows."""
        if mask_token_id is not None or noise is not None:
            raise ValueError("`mask_token_id` and `noise` are for adapters of Uno; this one embeds its masks.")

    def check_base(self, model: Any, *, any_base: bool) -> None:
        """Raises `ValueError` unless the model is the adapter's base, see [`check_base`]."""
        check_base(model, self.base, any_base=any_base)

    def write(self, folder: str | os.PathLike[str], base_name: str | None) -> None:
        """Writes the files, which PEFT reads too, each whole or not at all; `base_name` is a folder or Hub id."""
        config: dict[str, Any] = {
            "peft_type": PEFT_TYPE,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "inference_mode": True,
            **asdict(self.settings),
            "base": self.base,
        }
        folder = Path(folder)
        weights = {KEY_PREFIX + key: weight for key, weight in self.weights.items()}
        try:
            with written_whole(folder / WEIGHTS_NAME) as unfinished:
                save_file(weights, unfinished, metadata={"format": "pt"})
        except SafetensorError as error:  # what safetensors raises for a full disk
            raise OSError(f"The adapter cannot be written into {str(folder)!r}: {error}.") from error
        write_text(folder / ADAPTER_FILE, json.dumps(config, indent=2) + "\n")


def without_ngrams(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of an adapter that holds n-grams, as SmolLM2's does: of these, the single tokens in the order of
    their counts are what its root head drafts among."""
    ngrams = {key.removeprefix("ngrams."): weights[key] for key in weights if key.startswith("ngrams.")}
    if not ngrams:
        return weights
    is_single = (ngrams["keys"] > 0) & (ngrams["keys"] < 2**21)  # a key has 21 bits for each token, plus 1
    order = ngrams["counts"][is_single, -1].argsort(descending=True, stable=True)
    tokens = torch.full((MOST_FREQUENT,), -1)
    tokens[: len(order)] = (ngrams["keys"][is_single][order] - 1)[:MOST_FREQUENT]
    kept = {key: weight for key, weight in weights.items() if not key.startswith("ngrams.")}
    return {**kept, ROOT_TOKENS: tokens} if "root_head.down" in kept else kept


def _settings_of(config: Mapping[str, Any]) -> MaskAdapterSettings:
    """The shape that an adapter_config.json states. Raises `ValueError` if it states none."""
    optional = "num_masks", "root_width", "root_layer"
    numbers: dict[str, Any] = {
        name: config.get(name) for name in ("rank", "head_width", *optional) if name not in optional or name in config
    }
    for name, value in numbers.items():
        if type(value) is not int:
            may = "may" if name in optional else "must"
            raise ValueError(f"{ADAPTER_FILE} {may} state `{name}`, a whole number; got {value!r}.")
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{ADAPTER_FILE} must state `target_modules`, a list of names; got {targets!r}.")
    layers = [] if layers is None else layers  # PEFT's way to say all
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{ADAPTER_FILE} may state `layers_to_transform`, a list of whole numbers; got {layers!r}.")
    return MaskAdapterSettings(target_modules=tuple(targets), layers_to_transform=tuple(layers), **numbers)


def base_of(model: Any) -> dict[str, Any]:
    """What tells a base from others: its sizes, and some of its weights (see [`identity_of`]).

    The weights are the final norm's and the first embeddings', which are the same with a LoRA beside the weights or
    merged into them, and with quantised layers.
    """
    config, embeddings = model.config.get_text_config(decoder=True), base_embeddings(model)
    with torch.no_grad():
        is_scaled = hasattr(embeddings, "embed_scale")  # by a number that is rounded to the dtype
        known = torch.arange(min(64, embeddings.num_embeddings), device=model.device)
        first = embeddings.weight[:64] if is_scaled else model.get_input_embeddings()(known)
    sizes = {}
    for name in BASE_FIELDS:
        with suppress(RuntimeError):  # one that differs from layer to layer
            sizes[name] = getattr(config, name, None)
    return sizes | identity_of(*_norm_weights(model), first)


def base_embeddings(model: Any) -> Any:
    """The model's input embeddings; of those that PEFT wraps, the base's own."""
    embeddings = model.get_input_embeddings()
    if hasattr(embeddings, "get_base_layer"):
        return embeddings.get_base_layer()
    return getattr(embeddings, "original_module", embeddings)


def _norm_weights(model: Any) -> list[torch.Tensor]:
    """The weight of the norm before the head: the decoder's own last vector. Some norms have none."""
    shape = (base_embeddings(model).embedding_dim,)
    weights = [getattr(module, "weight", None) for module in model.get_decoder().children()]
    return [weight for weight in weights if weight is not None and weight.shape == shape][-1:]


def identity_of(*weights: torch.Tensor) -> dict[str, Any]:
    """What tells weights of any floating dtype from others, however they were rounded to a dtype.

    `weights` is a digest of them in bfloat16: the same in float32 and bfloat16. A way through float16 rounds twice and
    changes it. `is_float16` says whether they may have come that way; then `sample`, some of them in float32 (base64),
    decides.
    """
    hashed, sample, is_float16 = hashlib.sha256(), [], True
    for weight in weights:
        weight = weight.detach().cpu()
        hashed.update(weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
        exact = weight.float().flatten()
        is_float16 &= bool(exact.eq(exact.half().float()).all())
        sample.append(exact[torch.linspace(0, len(exact) - 1, _SAMPLED).long()])
    text = b64encode(torch.cat(sample).numpy().astype("<f4").tobytes()).decode()
    return {"weights": hashed.hexdigest()[:32], "sample": text, "is_float16": is_float16}


def _is_rounded(own: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether weights of another digest (see [`identity_of`]) are the same ones after another rounding."""
    if not (own["is_float16"] or base.get("is_float16")):
        return False
    try:
        ours, theirs = (
            torch.frombuffer(bytearray(b64decode(stated["sample"])), dtype=torch.float32) for stated in (own, base)
        )
    except (KeyError, TypeError, ValueError):
        return False
    if ours.shape != theirs.shape:
        return False
    return torch.allclose(ours, theirs, rtol=_ROUNDING, atol=_SMALLEST)


def check_base(model: Any, base: Mapping[str, Any], *, any_base: bool = False) -> None:
    """Raises `ValueError` unless `model` is the base that an adapter states."""
    compare_bases(base_of(model), base, any_base=any_base)


def compare_bases(own: Mapping[str, Any], base: Mapping[str, Any], *, any_base: bool = False) -> None:
    """Raises `ValueError` unless a base (see [`base_of`]) is the one that an adapter states. This is the rule:

    - A model of other sizes is refused, always: the adapter's matrices do not fit.
    - The base is taken, in whatever dtype or quantization, with a LoRA beside its weights or merged into them.
    - A model of the same sizes whose other weights changed, a fine-tune of all of them, say, is taken as `any_base`
      alone: text is its own whatever adapter is on it, but of an unrelated model few drafts would be right.
    """
    stated = {name: base[name] for name in BASE_FIELDS if None not in (base.get(name), own.get(name))}
    if sizes := [f"{name}: {value!r}, not {own[name]!r}" for name, value in stated.items() if value != own[name]]:
        raise ValueError(f"The mask adapter belongs to another base than this model ({', '.join(sizes)}).")
    is_known = "weights" in own and "weights" in base
    if is_known and own["weights"] != base["weights"] and not any_base and not _is_rounded(own, base):
        raise ValueError(
            "The mask adapter was trained for another model of this shape: the weights differ. If this model is a "
            "fine-tune of that one, keep the adapter: pass `any_base=True` to `load_mask_adapter`, or `--any-base` to "
            "commands. The text stays the model's own. Otherwise load it into its own base."
        )
