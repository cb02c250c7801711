"""Uno's adapters (arXiv 2609.04010), in PEFT's files as they lie on the Hub: LoRA on draft rows alone.

A draft row holds a random token, at the place before the one that it predicts: a row of the text does, too. So the
rows behind a row of the text are as many as masks would be, one place earlier. Uno decodes with two forwards, one that
drafts and one that checks; here both are one.
"""

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..checkpoints.find import find_file
from ..checkpoints.loading import load_tokenizer
from ..generation.rows import MaskRun
from .adapter_files import WEIGHTS_NAME, MaskAdapterSettings
from .layers import base_layer, decoder_layers

DEPTH = 15  # rows behind a row of the text: Uno trains with blocks of up to 16
NOISE = ("deterministic_uniform", "random_uniform", "mask")
K2_TYPES = ("xllm", "k2_aurora", "k2_horizon")  # whose mask token stands behind the vocabulary
MASK_TOKEN = "<|MASK|>"  # where neither a config nor a tokenizer says another one
_KEY = re.compile(r"base_model\.model\.(?:.*\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
# What PEFT may add to a LoRA, and what stands in its config where it has not.
_PLAIN = dict.fromkeys(
    "use_dora fan_in_fan_out lora_bias rank_pattern alpha_pattern modules_to_save trainable_token_indices "
    "layer_replication".split()
) | {"bias": "none"}


@dataclass(frozen=True)
class NoiseRun(MaskRun):
    """Draft rows that hold random tokens.

    Args:
        mask_token_id: the tokens are below it, and at least 1.
        noise: `"deterministic_uniform"`, a function of the text, of the row's place in its run and of nothing else;
            `"random_uniform"`, others each time; `"mask"`, the mask token itself.
    """

    first: int = 1
    skipped: int = 0
    mask_token_id: int = 0
    noise: str = NOISE[0]

    holds_tokens: ClassVar[bool] = True

    def fill(self, prompt: Sequence[int], text: Sequence[int], place: int) -> int:
        """See [`MaskRun`]."""
        if self.noise == "mask":
            return self.mask_token_id
        if self.noise == "random_uniform":
            return random.SystemRandom().randrange(1, self.mask_token_id)  # takes no number from the caller's seed
        known = f"{_digest(tuple(prompt))} {len(text)} {text[-1]} {place}"
        number = int.from_bytes(blake2b(known.encode(), digest_size=8).digest())
        return 1 + number % (self.mask_token_id - 1)


@lru_cache(maxsize=256)
def _digest(prompt: tuple[int, ...]) -> str:
    return blake2b(repr(prompt).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class StoredUnoAdapter:
    """An Uno adapter as it lies in a folder or on the Hub, see [`StoredAdapter`]."""

    name: str
    found: Mapping[str, Any]  # what finds its files, see [`find_adapter`]
    settings: MaskAdapterSettings
    weights: dict[str, torch.Tensor]  # state dict of the `MaskAdapter`

    @classmethod
    def of(
        cls, name: str | os.PathLike[str], config: Mapping[str, Any], found: Mapping[str, Any]
    ) -> "StoredUnoAdapter":
        """Reads and checks the weights that belong to an adapter_config.json.

        Raises:
            OSError: for missing or damaged files, and for weights that are no safetensors.
            ValueError: for a LoRA that Uno's are not, and for weights that do not fit the config.
        """
        what = f"The adapter {os.fspath(name)!r}"
        if "r" not in config:
            raise ValueError(f"{os.fspath(name)!r} is no mask adapter: its `peft_type` is 'LORA', without a rank `r`.")
        rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
        if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
            raise ValueError(f"{what} must state a rank and a scale, got `r` {rank!r} and `lora_alpha` {alpha!r}.")
        if odd := [key for key, plain in _PLAIN.items() if config.get(key) and config[key] != plain]:
            raise ValueError(
                f"{what} is a LoRA with {', '.join(f'`{key}` {config[key]!r}' for key in odd)}, and no adapter of Uno."
            )
        path = find_file(name, WEIGHTS_NAME, is_needed=False, **found)
        if path is None:  # PEFT would unpickle other files
            raise FileNotFoundError(f"{what} has no {WEIGHTS_NAME}; .bin files are not read, since they may run code.")
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise OSError(f"The weights of {os.fspath(name)!r} are damaged or truncated: {error}.") from error
        parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        for key, weight in stored.items():
            if (match := _KEY.fullmatch(key)) is None:
                raise ValueError(f"{what} holds {key!r}: Uno's are LoRA on linear layers of the decoder alone.")
            layer, target, half = match.groups()
            parts.setdefault((target, half), {})[int(layer)] = weight
        layers = sorted({layer for part in parts.values() for layer in part})
        names = sorted({target for target, _ in parts})
        lacking = [
            f"layers.{layer}.{target}.lora_{half}"
            for target in names
            for half in "AB"
            for layer in layers
            if layer not in parts.get((target, half), {})
        ]
        stated = targets if isinstance(targets, list) else []
        lacking += [each for each in stated if not any(f".{name}".endswith(f".{each}") for name in names)]
        if lacking or not names:
            raise ValueError(f"{what} lacks {len(lacking)} matrices, {(lacking or ['all of them'])[0]} among them.")
        for (target, half), part in parts.items():
            ranks = {weight.shape[0 if half == "A" else -1] for weight in part.values()}
            if ranks != {rank} or len({weight.shape for weight in part.values()}) > 1:
                raise ValueError(f"{what} states rank {rank}, and {target} has others: {sorted(ranks)}.")
            if not all(bool(weight.isfinite().all()) for weight in part.values()):
                raise ValueError(f"{what} holds NaN or infinite numbers: {target}.lora_{half}.")
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        weights = {}
        for (target, half), part in parts.items():
            stacked = torch.stack([part[layer].float() for layer in layers])
            side, stacked = ("down", stacked) if half == "A" else ("up", scale * stacked)
            weights[f"{side}.{target.replace('.', '/')}"] = stacked
        settings = MaskAdapterSettings(
            rank=rank,
            target_modules=tuple(names),
            head_width=0,
            num_masks=DEPTH,
            layers_to_transform=tuple(layers),
        )
        return cls(os.fspath(name), found, settings, weights)

    def draft_rows(self, model: Any, mask_token_id: int | None, noise: str | None) -> NoiseRun:
        """See [`NoiseRun`]. Raises `ValueError` for a mask token that is not known, or that the model does not have,
        and for noise of another kind."""
        noise, config = noise or NOISE[0], model.config.get_text_config(decoder=True)
        if noise not in NOISE:
            raise ValueError(f"`noise` must be one of {', '.join(map(repr, NOISE))}, got {noise!r}.")
        size: int = config.vocab_size
        token = getattr(model.config, "mask_token_id", None) if mask_token_id is None else mask_token_id
        if token is None:
            token = self._token_of_tokenizer(model)
        if token is None and model.config.model_type in K2_TYPES and noise != "mask":
            token = size
        if token is None:
            raise ValueError(
                f"The mask token of the adapter {self.name!r} is not known: neither the model's config nor a "
                "tokenizer names one. Pass `mask_token_id` to `load_mask_adapter`: draft rows hold tokens below it."
            )
        most = size - 1 if noise == "mask" else size
        if type(token) is not int or not 1 < token <= most:
            raise ValueError(f"`mask_token_id` must be a token of the model, 2 to {most}, got {token!r}.")
        return NoiseRun(mask_token_id=token, noise=noise)

    def _token_of_tokenizer(self, model: Any) -> int | None:
        """The mask token of the adapter's tokenizer, or of the model's."""
        for source, found in ((self.name, self.found), (model.config.name_or_path, None)):
            try:
                where = {name: value for name, value in (found or {}).items() if name in ("revision", "subfolder")}
                tokenizer = load_tokenizer(source, **where)
            except (OSError, ValueError):
                continue
            if tokenizer.mask_token_id is not None:
                return int(tokenizer.mask_token_id)
            if MASK_TOKEN in (vocabulary := tokenizer.get_vocab()):
                return int(vocabulary[MASK_TOKEN])
        return None

    def check_base(self, model: Any, *, any_base: bool) -> None:
        """Raises `ValueError` for a model whose layers these weights do not fit: the files tell no more of it."""
        layers, updated = decoder_layers(model), self.settings.layers_to_transform
        other = f"The adapter {self.name!r} belongs to another base than this model"
        if max(updated) >= len(layers):
            raise ValueError(f"{other}, which has {len(layers)} layers: it updates layer {max(updated)}.")
        for target in self.settings.target_modules:
            key = target.replace(".", "/")
            sizes = self.weights[f"up.{key}"].shape[1], self.weights[f"down.{key}"].shape[2]
            for layer in updated:
                modules = dict(layers[layer].named_modules())
                module = base_layer(modules.get(target))
                own = getattr(module, "out_features", None), getattr(module, "in_features", None)
                if own != sizes:
                    has = "no such layer" if module is None else f"{own[0]} x {own[1]}"
                    raise ValueError(f"{other}: {target} of layer {layer} is {sizes[0]} x {sizes[1]}, here {has}.")
