"""What vLLM calls at the start of each of its processes, and what is checked before an engine starts."""

from typing import Any

from .options import ARCHITECTURE, NEEDS_VLLM, EngineOptions, RequestOptions

try:
    import vllm
    from packaging.version import Version
    from vllm.logger import init_logger
except ModuleNotFoundError as error:
    raise ImportError(NEEDS_VLLM) from error

# The versions whose internals this plug-in was tested with: from the first to below the second.
SUPPORTED = "0.33", "0.34"

logger = init_logger("vllm.wedlm")


def version_fault() -> str | None:
    """Why this version of vLLM cannot be used; `None` if it can."""
    first, end = SUPPORTED
    if Version(first) <= Version(vllm.__version__) < Version(end):
        return None
    return (
        f"The WeDLM plug-in of wedlm-hf works with vLLM {first} up to, not including, {end}; installed is vLLM "
        f"{vllm.__version__}. Install a version that fits: pip install 'vllm>={first},<{end}'."
    )


def register() -> None:
    """Makes WeDLM checkpoints known to vLLM. With another version of vLLM than the supported ones it says so in the
    log, and WeDLM checkpoints are refused; other models are served as without it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from ... import modeling_wedlm  # noqa: F401  # registers the config class with transformers

    if fault := version_fault():
        logger.warning(fault)
    ModelRegistry.register_model(ARCHITECTURE, "wedlm_hf.serving.vllm.model:WeDLMForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = StartUpChecks
    if not fault:
        _check_requests()


class StartUpChecks:
    """Called by vLLM while it puts an engine's configuration together, before anything is loaded."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Raises `ValueError` for a vLLM of another version."""
        if fault := version_fault():
            raise ValueError(fault)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Checks what was asked for, and puts the scheduler in place that it needs. Raises `ValueError` for a
        checkpoint without a mask token, and options that cannot be honoured."""
        options = EngineOptions.of(vllm_config)
        options.check(vllm_config)
        scheduler = vllm_config.scheduler_config
        if options.is_drafting:
            if (other := scheduler.scheduler_cls) is not None:
                why = "Verified decoding of WeDLM brings a scheduler of its own and cannot work with another one"
                raise ValueError(f"{why}, got scheduler_cls={other!r}.")
            scheduler.scheduler_cls = "wedlm_hf.serving.vllm.scheduler.WeDLMScheduler"


def _check_requests() -> None:
    """Lets vLLM refuse a request whose WeDLM options are wrong, as it refuses other wrong sampling parameters."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    if getattr(SamplingParams.verify, "checks_wedlm", False):
        return
    verify = SamplingParams.verify

    def verify_with_wedlm(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        verify(self, model_config, *args, **kwargs)
        if model_config.architecture == ARCHITECTURE:
            try:
                RequestOptions.of(self.extra_args)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="extra_args") from error

    verify_with_wedlm.checks_wedlm = True  # type: ignore[attr-defined]
    SamplingParams.verify = verify_with_wedlm
