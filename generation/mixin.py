"""`model.generate(..., strategy="wedlm")`: how parallel decoding plugs into transformers' `generate`."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from sys import maxsize
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)

from .attention import DENSE_MASK_ATTENTION, ROWS_ALIKE, attends_by_row, implementation_of
from .cache import WindowCache
from .decoding import ParallelDecoder, has_compiled_forward
from .drafter import make_drafter
from .fixed_plan import FixedPlan
from .planner import Planner
from .request import DecodingRequest, decoding_request, prompts_of
from .rules import FillRule, Rule
from .sampling import TokenSampler
from .settings import SETTING_NAMES, WINDOW_SETTINGS, OptionError, WeDLMGenerationSettings, is_left_out
from .state import keeps_state
from .stats import DecodingStats, EndRecorder, ScoreRecorder, StatsRecorder, WeDLMGenerateOutput
from .step_times import StepTimes
from .streaming import TokenStream
from .threads import sleeping_beside_others
from .verify import VerifyRule
from .versions import CACHE, explained, is_checkpointing, rename_cache

logger = logging.getLogger(__name__)

# Options of `generate` that cannot be honoured, with the values that change nothing; docs/reference.md says why.
REFUSED_OPTIONS = {
    "cache_implementation": (None, "static", "dynamic"),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prefill_chunk_size": (None,),
    "remove_invalid_values": (None, False),
    "use_cache": (None, True),
}

# The share of the time of a forward of one row that each further row adds, until it is measured. Most of that time
# reads the weights.
SLOT_COSTS = {"cpu": 0.035, "cuda": 0.004}

# The `id` of the model that filled a cache; missing where the cache was copied or unpickled.
FILLED_BY: WeakKeyDictionary[WindowCache, int] = WeakKeyDictionary()

# The parent's loops in place of which parallel decoding runs.
LOOP_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

# Inputs from `generate` that are used here, or refused with a message of their own.
USED_INPUTS = set(
    "attention_mask inputs_embeds logits_to_keep output_attentions output_hidden_states position_ids tokenizer "
    "use_cache".split()
) | {CACHE}


class WeDLMGenerationMixin(GenerationMixin):
    """[`GenerationMixin`] whose `generate` takes the fields of [`WeDLMGenerationSettings`] as keywords.

    With `strategy="ar"` (the default) everything is the parent's. Otherwise greedy decoding and sampling run
    [`ParallelDecoder`], with the parent's preparation of inputs, lengths, processors and stopping criteria;
    `return_dict_in_generate=True` returns a [`WeDLMGenerateOutput`]. What cannot be honoured is refused before any
    forward.
    """

    has_mask_adapter = False  # a class with a mask adapter says otherwise
    trace_recorder: Any = None  # the package sets it; it is not in the code beside a checkpoint

    def _wedlm_settings(self: Any, generation_config: Any) -> WeDLMGenerationSettings:
        needs_mask_token = not self.has_mask_adapter
        return WeDLMGenerationSettings.from_generation_config(generation_config, self.config, needs_mask_token)

    @explained
    def _extract_generation_mode_kwargs(
        self: Any, custom_generate: Any, kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> dict[str, Any]:
        if custom_generate is not None and kwargs.get("strategy") not in (None, "ar"):
            raise ValueError(
                f"`custom_generate` brings a loop of its own: leave `strategy={kwargs['strategy']!r}` out beside it."
            )
        return super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **more)

    @explained
    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        rename_cache(kwargs)
        ours = {name: kwargs.pop(name) for name in SETTING_NAMES if name in kwargs}
        passed = {name for name in SETTING_NAMES if getattr(generation_config, name, None) is not None}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]
        if generation_config.is_assistant:
            if ours.get("strategy") not in (None, "ar"):
                raise ValueError(f"An assistant decodes as AR: leave `strategy={ours['strategy']!r}` out.")
            ours["strategy"] = "ar"  # whatever is stored: the model it assists asks for AR drafts
        for name, value in ours.items():
            setattr(generation_config, name, value)
        # What a checkpoint stores of the window was chosen for the decoder that it stores.
        stored = getattr(self.generation_config, "verification", None) or "none"
        if (getattr(generation_config, "verification", None) or "none") != stored:
            for name in {*WINDOW_SETTINGS} - ours.keys() - passed:
                setattr(generation_config, name, None)
        settings = self._wedlm_settings(generation_config)
        is_static = getattr(generation_config, "cache_implementation", None) == "static"
        _check_passed(settings, settings.unread(is_static), ours)
        if settings.strategy != "ar":
            _check_options(self, settings, generation_config, model_kwargs.get(CACHE))
        return generation_config, model_kwargs

    @explained
    def _validate_generation_mode(
        self: Any, generation_mode: GenerationMode, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> None:
        super()._validate_generation_mode(generation_mode, generation_config, *args, **kwargs)  # type: ignore[misc]
        strategy = getattr(generation_config, "strategy", None) or "ar"
        if strategy != "ar" and generation_mode not in LOOP_MODES:
            raise ValueError(
                f"`strategy={strategy!r}` decodes greedily or by sampling, but the other options ask for "
                f"{generation_mode.value.replace('_', ' ')} (num_beams={generation_config.num_beams}). "
                "Leave them out or use `strategy='ar'`."
            )

    @explained
    @sleeping_beside_others()
    def _sample(
        self: Any,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        settings = self._wedlm_settings(generation_config)
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, WindowCache) and any(cache.lengths) and FILLED_BY.get(cache, id(self)) != id(self):
            raise ValueError(f"Another model filled the cache of `{CACHE}`: pass one of this model, or none.")
        if settings.strategy == "ar":
            if isinstance(cache, WindowCache):
                prompts = prompts_of(input_ids, generation_config, model_kwargs)
                model_kwargs[CACHE] = cache.as_dynamic(prompts, input_ids.shape[1], self.config)
            ends = EndRecorder(stopping_criteria)
            inputs = input_ids, logits_processor, ends, generation_config, synced_gpus, streamer
            output = super()._sample(*inputs, **model_kwargs)  # type: ignore[misc]
            if not isinstance(output, GenerateDecoderOnlyOutput):
                return output
            return WeDLMGenerateOutput(**output, stats=DecodingStats.of_ar(ends.new_tokens.cpu()))
        model_kwargs.pop("cache_params", None)  # that `generate` made for Mamba 2
        if not isinstance(cache, WindowCache):
            cache = WindowCache()  # in place of the one that `generate` made
        FILLED_BY[cache] = id(self)
        is_static = generation_config.cache_implementation == "static" or cache.extent.capacity is not None
        _warn(self, settings, is_static)
        _check_inputs(self, settings, input_ids.shape[0], is_static, logits_processor, model_kwargs)
        request = decoding_request(self, input_ids, stopping_criteria, generation_config, settings, model_kwargs)
        compiled = None
        if is_static:
            compiled = self._fixed_shape_forward(cache, request, settings, generation_config, model_kwargs)
        rule, kept = _rule(self, settings, logits_processor, generation_config, request, is_static)
        go_on = partial(self._has_unfinished_sequences, synced_gpus=synced_gpus, device=input_ids.device)
        with kept:
            decoder = ParallelDecoder(self, request, rule, cache, compiled, go_on)
            with cache.emptied_on_failure():
                return _decode(decoder, settings, generation_config, streamer)

    def _fixed_shape_forward(
        self: Any,
        cache: WindowCache,
        request: DecodingRequest,
        settings: WeDLMGenerationSettings,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Callable[..., Any]:
        """Makes room in the cache for all that this call can need: the prompt, the answer, and the windows at its end.
        Returns the model, compiled where transformers would compile it."""
        length = max(map(len, request.prompts)) + request.limit
        prepared = model_kwargs[CACHE]
        if prepared is not cache:
            # Transformers' own is as long as the longest call so far, or as `max_cache_len` asks: one shape for all.
            # Its sliding layers are no longer than their windows.
            lengths = [getattr(layer, "max_cache_len", 0) for layer in prepared.layers]
            length = max(length, 1 + max(generation_config.max_cache_len or 0, *lengths))
        cache.extent.capacity = max(length + 2 * settings.width(True), cache.extent.capacity or 0)
        if self._valid_auto_compile_criteria(model_kwargs, generation_config):
            return self.get_compiled_call(generation_config.compile_config)
        return self.__call__

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The parent's, with our settings in generation_config.json."""
        generation_config: Any = getattr(self, "generation_config", None)
        if generation_config is not None:
            # Before any file is written; transformers would find out with half of them there.
            generation_config.validate(strict=True)
            self._wedlm_settings(generation_config)
            # With this flag, which a config derived from the model's carries, reloading would drop our fields.
            generation_config._from_model_config = None
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _warn(model: Any, settings: WeDLMGenerationSettings, is_static: bool) -> None:
    """Warns of a model that will write no text, and of one that will be compiled again and again."""
    is_trained = getattr(model.config, "masks_trained", True) or hasattr(model, "peft_config")
    if not is_trained and settings.verification == "none":
        logger.warning_once(  # type: ignore[attr-defined]  # which transformers gives to all loggers
            "This checkpoint is an untrained copy of an AR model (`wedlm convert`): it cannot fill masks, and its "
            "text makes no sense without verification. Train it (`wedlm train`), or pass `verification='exact'`."
        )
    if model.has_mask_adapter and settings.verification == "none":
        logger.warning("A mask adapter gives drafts: unchecked they make no text. Pass `verification='exact'`.")
    if not is_static and has_compiled_forward(model):
        logger.warning(
            "The model's forward is compiled, but the rows of a window change from step to step: it may be "
            "compiled eight times. Pass `cache_implementation='static'`, where shapes are fixed."
        )


def _check_passed(settings: WeDLMGenerationSettings, unread: frozenset[str], passed: dict[str, Any]) -> None:
    """Raises `OptionError` for a passed setting that this call does not read, or warns, if the text is the same."""
    for name in sorted(name for name in unread & passed.keys() if not is_left_out(passed[name])):
        value = passed[name]
        if settings.strategy == "ar":
            raise OptionError(
                f"`{name}={value!r}` has no meaning with `strategy='ar'`: pass `strategy='wedlm'` too.", name
            )
        if settings.verification == "none":
            raise OptionError(f"`{name}={value!r}` goes with `verification='exact'`: pass that too.", name)
        logger.warning(f"`{name}={value!r}` is not read by this call: verified decoding has no use for it here.")


def _check_options(
    model: Any, settings: WeDLMGenerationSettings, generation_config: GenerationConfig, cache: Any
) -> None:
    """Raises `ValueError` for an option that parallel decoding cannot honour."""
    for option, harmless in REFUSED_OPTIONS.items():
        if (value := getattr(generation_config, option, None)) not in harmless:
            raise ValueError(
                f"`{option}={value!r}` is not supported with `strategy={settings.strategy!r}`: "
                f"pass `{option}={harmless[-1]!r}` or `strategy='ar'`."
            )
    if settings.output_trace and model.trace_recorder is None:
        raise ValueError("`output_trace=True` needs the package `wedlm-hf`: load the model with its WeDLMForCausalLM.")
    if cache is not None and not isinstance(cache, WindowCache):
        raise ValueError(
            f"Parallel decoding needs a `WindowCache`, got {type(cache).__name__}: pass the `{CACHE}` that an "
            "earlier call returned, or `WindowCache()`."
        )


def _check_inputs(
    model: Any,
    settings: WeDLMGenerationSettings,
    batch_size: int,
    is_static: bool,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises `ValueError` for what parallel decoding cannot do with this model and these inputs."""
    strategy = settings.strategy
    # A model that takes images has an empty `mm_encoder_outputs` where there are none.
    unused = {name for name, value in model_kwargs.items() if value is not None and value != {}} - USED_INPUTS
    if unused:
        raise ValueError(f"`strategy={strategy!r}` has no use for the inputs {sorted(unused)}: leave them out.")
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "The model's `prepare_inputs_for_generation` was replaced (PEFT does so for prompt and prefix tuning), "
            f"but `strategy={strategy!r}` prepares its inputs by itself: use `strategy='ar'`."
        )
    _check_training_mode(model)
    if keeps_state(model):
        _check_state(model, settings, batch_size, is_static)
    implementation = implementation_of(model)
    if (batch_size > 1 or is_static) and implementation not in DENSE_MASK_ATTENTION:
        raise ValueError(
            f"Attention implementation {implementation!r} cannot decode rows of different lengths together, nor with "
            f"a static cache: load the model with one of {DENSE_MASK_ATTENTION}, or generate one prompt at a time, "
            "without `cache_implementation='static'`."
        )
    if batch_size > 1 and any(isinstance(processor, SynthIDTextWatermarkLogitsProcessor) for processor in processors):
        raise ValueError(
            "SynthID watermarking keeps one state for the whole batch, but parallel decoding advances each sequence "
            "at its own pace: generate one sequence at a time or use `strategy='ar'`."
        )


def _check_training_mode(model: Any) -> None:
    """Raises `ValueError` where training mode forbids parallel decoding."""
    if model.training and is_checkpointing(model):
        raise ValueError(
            "Gradient checkpointing in training mode leaves no cache to decode with: call `model.eval()`."
        )
    if model.training and model.has_mask_adapter:
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        if any([*rates, getattr(model.config.get_text_config(decoder=True), "attention_dropout", 0.0)]):
            raise ValueError(
                "In training mode dropout changes the model from forward to forward, and drafts are checked by "
                "another model than the one that follows: call `model.eval()`."
            )


def _check_state(model: Any, settings: WeDLMGenerationSettings, batch_size: int, is_static: bool) -> None:
    """Raises `ValueError` for a call that a model with a state cannot decode."""
    asked = "`cache_implementation='static'`" if is_static else ""
    if batch_size > 1:  # sequences advance at paces of their own, and a state would read the padding between them
        asked = f"a batch of {batch_size} sequences"
    if settings.verification == "none":
        asked = f"`strategy={settings.strategy!r}` without verification"
    if asked:
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state, which can forget no row that it has read: it decodes "
            "one sequence at a time, with `verification='exact'` and a dynamic cache, or with `strategy='ar'`; "
            f"got {asked}."
        )


def _rule(
    model: Any,
    settings: WeDLMGenerationSettings,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    request: DecodingRequest,
    is_static: bool,
) -> tuple[Rule, AbstractContextManager[Any]]:
    """The rule of a call, and what it learns in, a context. Raises `ValueError` for processors that cannot be honoured
    without verification."""
    size = settings.width(is_static) if is_static else min(settings.width(is_static), request.limit)
    sampler = TokenSampler(processors, bool(generation_config.do_sample), request.mask_token_id, request.prompt_ids)
    if settings.verification == "none":
        sampler.check_out_of_order()
        return FillRule(settings, sampler, request.end_tokens, size, settings.strategy == "block"), nullcontext()
    is_planned = settings.is_planned(is_static)
    has_state = keeps_state(model)  # which has one past: no branches
    takes_any_mask = implementation_of(model) in DENSE_MASK_ATTENTION and not has_state
    if model.has_mask_adapter:
        size = min(size, model.deepest)
    # Drafts from the text are a branch beside those of masks.
    drafter = make_drafter(model, sampler, request.end_tokens, is_planned and takes_any_mask)
    # Masks behind each of W drafts are W squared: too many where shapes are fixed, or a window is as wide as WeDLM's.
    is_chain = is_static or not takes_any_mask or not (is_planned or model.has_mask_adapter)
    is_by_row = not is_static and len(request.prompts) == 1 and attends_by_row(model)
    # A commit may have a row more than the step before.
    how = is_chain, drafter.run, has_state, ROWS_ALIKE - has_state if is_by_row else maxsize
    if not is_planned:
        return VerifyRule(sampler, drafter, FixedPlan(size, *how), size, is_by_row, has_state), nullcontext()
    planner, kept = _planner(model, settings, sampler, size - drafter.run.skipped, *how)
    return VerifyRule(sampler, drafter, planner, size, is_by_row, has_state), kept


def _planner(
    model: Any, settings: WeDLMGenerationSettings, sampler: TokenSampler, depth: int, *how: Any
) -> tuple[Planner, AbstractContextManager[Any]]:
    """The planner of a call, and the context of its use. Where it measures times, it knows what it learned in the
    calls before."""
    # The processes of tensor parallelism must plan alike: nothing there may depend on a clock.
    is_timed = settings.slot_cost is None and (getattr(model, "tp_size", None) or 1) == 1
    usual = SLOT_COSTS.get(sampler.device.type, SLOT_COSTS["cuda"])
    new = Planner(StepTimes(usual if settings.slot_cost is None else settings.slot_cost, is_timed), depth, *how)
    if not is_timed:
        return new, nullcontext()
    home = model.__dict__.setdefault("_planners", {})
    key = str(sampler.device), model.dtype, sampler.do_sample, depth, *how
    # Taken away while it is used: other threads make one of their own.
    planner, kept = home.pop(key, new), ExitStack()
    kept.callback(home.__setitem__, key, planner)
    return planner, kept


def _decode(
    decoder: ParallelDecoder, settings: WeDLMGenerationSettings, generation_config: GenerationConfig, streamer: Any
) -> torch.Tensor | WeDLMGenerateOutput:
    """Decodes, and returns the outputs that the call asks for."""
    request, is_dict = decoder.request, generation_config.return_dict_in_generate
    is_kept = {
        "log_probs": settings.verification != "none",
        "scores": generation_config.output_scores,
        "logits": generation_config.output_logits,
    }
    stats = StatsRecorder(decoder.sequences)
    scores = ScoreRecorder([name for name in is_kept if is_kept[name] and is_dict])
    observers = [stats.observe, scores.observe]
    trace = WeDLMGenerationMixin.trace_recorder() if settings.output_trace else None
    if trace is not None:
        observers.append(trace.observe)
    if streamer is not None:
        stream = TokenStream(streamer, decoder.sequences, request.pad_token_id, request.mask_token_id)
        observers.append(stream.observe)
    sequences = torch.cat([request.prompt_ids, decoder.run(observers)], dim=1)
    if streamer is not None:
        streamer.end()
    if not is_dict:
        return sequences
    counts = stats.stats
    fields: dict[str, Any] = {CACHE: decoder.cache, **scores.output(counts.new_tokens, request.pad_token_id)}
    output = WeDLMGenerateOutput(sequences=sequences, stats=counts, **fields)  # type: ignore[arg-type]
    if trace is not None:
        output.trace, output.step_map = trace.steps, trace.step_map(counts.new_tokens)
    return output
