"""Mask adapters as a PEFT method: `PeftModel.from_pretrained(base, adapter)`, and saving and uploading by PEFT.

PEFT alone does not know the method, so it refuses such an adapter: no other library applies one to slots alone.
Importing this module makes it known: `wedlm_hf` does, once PEFT is imported.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NoReturn

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from ..generation.versions import check_format
from ..training import peft_targets as peft_targets
from .adapter_files import KEY_PREFIX, PEFT_TYPE, MaskAdapterSettings, base_of, check_base, without_ngrams
from .attach import attach, attached_in, train_alone, unload_mask_adapter
from .probe import check_attachable


class MaskAdapterPeftType(str, Enum):  # noqa: UP042  # as PEFT has its own
    """PEFT looks methods up by members like this one; its own enumeration cannot be extended."""

    MASK_ADAPTER = PEFT_TYPE


@dataclass
class MaskAdapterConfig(PeftConfig):
    """The adapter_config.json of a mask adapter, see [`MaskAdapterSettings`]; `base` is what tells its base."""

    rank: int = 64
    target_modules: list[str] = field(default_factory=list)
    head_width: int = 640
    num_masks: int = MaskAdapterSettings.num_masks
    layers_to_transform: list[int] = field(default_factory=list)
    root_width: int = 0
    root_layer: int | None = None
    base: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = MaskAdapterPeftType.MASK_ADAPTER
        self.task_type = "CAUSAL_LM"
        layers: Any = self.layers_to_transform  # in PEFT, `None` means all and a number one
        self.layers_to_transform = [layers] if isinstance(layers, int) else list(layers or ())

    @classmethod
    def check_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        """What was read from a file. Raises `ValueError` for a later format."""
        check_format(kwargs)
        return kwargs


class _Layer(nn.Module, BaseTunerLayer):
    """What `PeftModel.disable_adapter` looks for."""

    merged_adapters: list[str] = []


class MaskAdapterTuner(BaseTuner):
    """Attaches the mask adapter to a model; there is one at a time.

    It acts on slots alone, so it may stand beside a LoRA on all rows, or be put on a `PeftModel` that has one.
    """

    prefix = "mask_adapter."
    tuner_layer_cls = BaseTunerLayer
    target_module_mapping: dict[str, list[str]] = {}

    def __init__(self, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if isinstance(peft_config, PeftConfig):  # of `PeftModel` it is a dictionary
            raise ValueError(
                "transformers' `load_adapter` and `add_adapter` cannot place the weights of a mask adapter: call "
                "`wedlm_hf.load_mask_adapter(model, folder)` or `PeftModel.from_pretrained(model, folder)`."
            )
        below = dict(getattr(model, "peft_config", {}))
        try:
            super().__init__(model, peft_config, adapter_name, *args, **kwargs)
            if below:  # PEFT would share one table with the `PeftModel` below, whose adapter may have the same name
                self.peft_config = {adapter_name: self.peft_config[adapter_name]}
        finally:
            if below:
                model.peft_config = below

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds the adapter. Raises `ValueError` for a model that cannot carry it or is not the adapter's base."""
        config: Any = self.peft_config[adapter_name]
        if nn.LayerNorm(1).weight.is_meta:  # which draws no random numbers
            raise ValueError("A mask adapter is small, and not loaded with `low_cpu_mem_usage=True`: leave that out.")
        # The model may be a `PeftModel` around that of transformers.
        owner: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
        check_attachable(owner)
        if config.base:
            check_base(owner, config.base)
        else:
            config.base = base_of(owner)
        settings = MaskAdapterSettings(
            **{each.name: getattr(config, each.name) for each in fields(MaskAdapterSettings)}
        )
        trained = {name for name, parameter in owner.named_parameters() if parameter.requires_grad}
        adapter = attach(owner, settings)
        train_alone(owner)
        config.target_modules, config.root_layer = list(adapter.settings.target_modules), adapter.settings.root_layer
        adapter.layer, adapter.peft_config = _Layer(), config
        if config.inference_mode:
            adapter.to(owner.dtype).requires_grad_(False)
        if any("lora" in name for name in trained):  # beside an adapter in training, which goes on
            for name in trained:
                owner.get_parameter(name).requires_grad_(True)
            adapter.frozen = set()

    def unload(self) -> nn.Module:
        """Takes the adapter away and returns the base."""
        unload_mask_adapter(attached_in(self.model))
        if isinstance(self.model, PreTrainedModel) and vars(self.model).get("peft_config") is self.peft_config:
            vars(self.model).pop("peft_config", None)
        return self.model

    def delete_adapter(self, adapter_name: str) -> None:
        """Takes the adapter away."""
        del self.peft_config[adapter_name]
        self.active_adapter = []
        self.unload()

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """There is one adapter, which is always the active one."""
        self.active_adapter = adapter_name

    def enable_adapter_layers(self) -> None:
        """Lets the model use the adapter again."""
        self._enable(True)

    def disable_adapter_layers(self) -> None:
        """The model decodes as if it had no adapter."""
        self._enable(False)

    def _enable(self, is_enabled: bool) -> None:
        adapter = attached_in(self.model).mask_adapter
        adapter.is_enabled = is_enabled
        adapter.layer.enable_adapters(is_enabled)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raises `ValueError`: see [`merge_and_unload`]."""
        self.merge_and_unload()

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `ValueError`: merged into the weights, the updates would act on real rows too."""
        raise ValueError(
            "A mask adapter cannot be merged: it acts on mask rows alone, and in the base's weights it would act on "
            "every row and change the model's answers. Keep it beside the base; merge other adapters before it is "
            "loaded."
        )

    def unmerge_adapter(self) -> None:
        """Nothing was merged."""

    # What PEFT saves and loads: the adapter's own state dict, without the adapter's name in the keys.

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, model: Any, state_dict: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return {KEY_PREFIX + name: state_dict[key] for key, name in _keys(state_dict)}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key

    @classmethod
    def _remap_adapter_state_dict_for_load(  # type: ignore[override]
        cls, model: Any, state_dict: dict[str, Any], **kwargs: Any
    ) -> Any:
        places = {name: key for key, name in _keys(model.state_dict())}
        weights = without_ngrams({key.removeprefix(KEY_PREFIX): value for key, value in state_dict.items()})
        return {places.get(key, key): value for key, value in weights.items()}

    # What PEFT asks of methods that replace layers.

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None: ...

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None: ...


def _keys(state_dict: dict[str, Any]) -> list[tuple[str, str]]:
    """Keys of a state dict that belong to a mask adapter, and their names in it."""
    marker = "mask_adapter."
    return [(key, key.rpartition(marker)[2]) for key in state_dict if marker in key]


PEFT_TYPE_TO_CONFIG_MAPPING[MaskAdapterPeftType.MASK_ADAPTER] = MaskAdapterConfig  # type: ignore[index]
PEFT_TYPE_TO_TUNER_MAPPING[MaskAdapterPeftType.MASK_ADAPTER] = MaskAdapterTuner  # type: ignore[index]
PEFT_TYPE_TO_PREFIX_MAPPING[MaskAdapterPeftType.MASK_ADAPTER] = MaskAdapterTuner.prefix  # type: ignore[index]
