"""WeDLM for Hugging Face transformers: diffusion language models that decode in parallel under causal attention.

The four sub-packages are the library: `modeling_wedlm` (model, conversion, Hub bundle), `generation` (decoding),
`training` (masking, collator, loss) and `eval`. The names below are shortcuts, looked up on first use, so that
`import wedlm_hf` itself loads neither torch nor transformers.

It makes the model known to the Auto classes of transformers and mask adapters to PEFT: at once where those are loaded,
else as soon as they are. Where other programs run, threads of a torch that loads after it wait without spinning.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import (
        add_mask_adapter,
        load_mask_adapter,
        save_mask_adapter,
        unload_mask_adapter,
    )
    from .adapters.budget import MaskTrainingConfig
    from .adapters.trainer import MaskAdapterTrainer
    from .checkpoints.packed import pack
    from .modeling_wedlm import WeDLMConfig, WeDLMForCausalLM, WeDLMModel
    from .modeling_wedlm.convert import convert
    from .training import DataCollatorForDualStreamMasking, DynamicMaskingCallback, WeDLMSFTConfig, WeDLMSFTTrainer

__version__ = "0.1.0"

__all__ = [
    "DataCollatorForDualStreamMasking",
    "DynamicMaskingCallback",
    "MaskAdapterTrainer",
    "MaskTrainingConfig",
    "WeDLMConfig",
    "WeDLMForCausalLM",
    "WeDLMModel",
    "WeDLMSFTConfig",
    "WeDLMSFTTrainer",
    "add_mask_adapter",
    "convert",
    "load_mask_adapter",
    "pack",
    "save_mask_adapter",
    "unload_mask_adapter",
]

_HOME = {
    "DataCollatorForDualStreamMasking": "training",
    "DynamicMaskingCallback": "training",
    "MaskAdapterTrainer": "adapters.trainer",
    "MaskTrainingConfig": "adapters.budget",
    "WeDLMConfig": "modeling_wedlm",
    "WeDLMForCausalLM": "modeling_wedlm",
    "WeDLMModel": "modeling_wedlm",
    "WeDLMSFTConfig": "training",
    "WeDLMSFTTrainer": "training",
    "add_mask_adapter": "adapters",
    "convert": "modeling_wedlm.convert",
    "load_mask_adapter": "adapters",
    "pack": "checkpoints.packed",
    "save_mask_adapter": "adapters",
    "unload_mask_adapter": "adapters",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its sub-package on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])


# What registers itself when it is imported, by the module that it registers itself with.
_WAITING = {"transformers.models.auto.modeling_auto": "modeling_wedlm", "peft": "adapters.peft_method"}


class _Registration:
    """A finder of modules that finds none, but has ours imported behind those that they register themselves with: once
    no module of transformers or PEFT is half imported, since ours may need any of them."""

    depth = 0  # such modules whose import is under way

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders say; the loader of a module of theirs tells when its import begins and ends."""
        if not _WAITING or name.partition(".")[0] not in ("transformers", "peft"):
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            with cls.importing():
                run(module)
            cls.register()

        if not hasattr(spec.loader, "is_watched"):  # a loader of many modules is asked for each
            spec.loader.exec_module, spec.loader.is_watched = run_and_register, True  # type: ignore[attr-defined, method-assign]
        return spec

    @classmethod
    @contextmanager
    def importing(cls) -> Iterator[None]:
        """Within this context, nothing registers itself."""
        cls.depth += 1
        try:
            yield
        finally:
            cls.depth -= 1

    @classmethod
    def register(cls) -> None:
        """Imports ours whose counterparts are there, unless an import is under way."""
        while not cls.depth and (theirs := next((name for name in _WAITING if name in sys.modules), None)):
            with cls.importing():
                import_module(f".{_WAITING[theirs]}", __name__)
            _WAITING.pop(theirs, None)


if __name__ == "wedlm_hf":  # not where pytest imports this file by another name
    if "torch" not in sys.modules:  # which reads it as it loads
        import_module(".threads", __name__).wait_without_spinning()
    sys.meta_path.insert(0, _Registration)
    _Registration.register()
