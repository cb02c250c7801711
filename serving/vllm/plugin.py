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
SUPPORTED = "0.32", "0.33"

# Options of a request that the decoder without verification cannot honour, and the values that mean: not asked for.
NOT_STREAMING: dict[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": None,
    "bad_words": [], "allowed_token_ids": None, "logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None,
    "thinking_token_budget": None,
}  # fmt: skip

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
        if options.verification == "none":
            _stream(vllm_config, options)
        elif options.is_drafting:
            if (other := scheduler.scheduler_cls) is not None:
                why = "Verified decoding of WeDLM brings a scheduler of its own and cannot work with another one"
                raise ValueError(f"{why}, got scheduler_cls={other!r}.")
            scheduler.scheduler_cls = "wedlm_hf.serving.vllm.scheduler.WeDLMScheduler"
            if vllm_config.use_v2_model_runner:
                _draft_on_runner_v2(vllm_config)


def _draft_on_runner_v2(vllm_config: Any) -> None:
    """Runner V2 refuses proposers of one's own. A model with a `ModelState` is told its number of draft tokens by what
    vLLM calls a canvas."""
    from vllm.config.diffusion import DiffusionConfig

    _check_runner_v2(vllm_config, "Verified decoding")
    tokens = vllm_config.speculative_config.num_speculative_tokens
    vllm_config.speculative_config, vllm_config.diffusion_config = None, DiffusionConfig(canvas_length=tokens)
    vllm_config.scheduler_config.scheduler_cls = "wedlm_hf.serving.vllm.scheduler.RunnerV2Scheduler"


def _stream(vllm_config: Any, options: EngineOptions) -> None:
    """Declares the model a diffusion model, which is how vLLM calls one of which a step may give no token."""
    from vllm.config.diffusion import DiffusionConfig

    rows = 2 * options.settings(vllm_config).window_size
    model_config = vllm_config.model_config
    model_config.hf_config.canvas_length = rows
    vars(model_config).pop("is_diffusion", None)  # vLLM has looked already
    vllm_config.diffusion_config = DiffusionConfig(canvas_length=rows)
    _check_runner_v2(vllm_config, "The decoder without verification")


def _check_runner_v2(vllm_config: Any, what: str) -> None:
    """Raises `ValueError` where model runner V2 cannot be used."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ValueError(
            f"{what} runs on vLLM's model runner V2 here, which needs Triton, and there is none for "
            f"{current_platform.device_type}. On this machine: `wedlm serve`, or verified decoding on model runner V1."
        )
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"{what} runs on vLLM's model runner V2, which is off: unset VLLM_USE_V2_MODEL_RUNNER, and leave out "
            "options that vLLM's log names as unsupported by it."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(f"{what} on model runner V2 cannot be cut into pipeline stages.")
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError(f"{what} on model runner V2 works without asynchronous scheduling only, which was asked for.")
    vllm_config.scheduler_config.async_scheduling = False


def _check_requests() -> None:
    """Lets vLLM refuse a request whose WeDLM options are wrong, as it refuses other wrong sampling parameters."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    if getattr(SamplingParams.verify, "checks_wedlm", False):
        return
    verify, validate_diffusion = SamplingParams.verify, SamplingParams._validate_diffusion

    def verify_with_wedlm(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        verify(self, model_config, *args, **kwargs)
        if model_config.architecture == ARCHITECTURE:
            canvas = getattr(model_config.hf_config, "canvas_length", None)
            try:
                options = RequestOptions.of(self.extra_args)
                options.check(canvas and canvas // 2)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="extra_args") from error
            if canvas and options.window_size:  # vLLM's own option for fewer rows
                self.extra_args["diffusion_canvas_length"] = 2 * options.window_size

    def validate_diffusion_with_wedlm(self: Any, model_config: Any) -> None:
        """Temperature, top-k, top-p, min-p and seed are ours to take; vLLM's sampler of diffusion has none of them."""
        if model_config.architecture != ARCHITECTURE or not model_config.is_diffusion:
            validate_diffusion(self, model_config)
            return
        for name, default in NOT_STREAMING.items():
            if getattr(self, name) not in (default, None):
                raise VLLMValidationError(f"`{name}` is not supported without verification.", parameter=name)

    verify_with_wedlm.checks_wedlm = True  # type: ignore[attr-defined]
    SamplingParams.verify, SamplingParams._validate_diffusion = verify_with_wedlm, validate_diffusion_with_wedlm
