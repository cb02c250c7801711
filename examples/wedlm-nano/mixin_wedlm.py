"""`model.generate(..., strategy="wedlm")`: how parallel decoding plugs into transformers' `generate`."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)

from .cache_wedlm import WindowCache
from .decoding_wedlm import DENSE_MASK_ATTENTION, ParallelDecoder
from .sampling_wedlm import TokenSampler
from .scores_wedlm import ScoreRecorder
from .settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from .stats_wedlm import WeDLMGenerateOutput, step_map

# Options of `generate` that cannot be honoured, with the values that change nothing; docs/generation.md says why.
REFUSED_OPTIONS = {
    "cache_implementation": (None, "static", "dynamic"),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prefill_chunk_size": (None,),
    "remove_invalid_values": (None, False),
    "use_cache": (None, True),
}

# What `generate` hands on that is used here, or refused with a message of its own.
USED_INPUTS = {
    "attention_mask",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "tokenizer",
    "use_cache",
}


class WeDLMGenerationMixin(GenerationMixin):
    """[`GenerationMixin`] whose `generate` takes the fields of [`WeDLMGenerationSettings`] as keywords.

    With `strategy="ar"` (the default) everything is the parent's. Otherwise greedy decoding and sampling run
    [`ParallelDecoder`], with the parent's preparation of inputs, lengths, processors and stopping criteria;
    `return_dict_in_generate=True` returns a [`WeDLMGenerateOutput`]. What cannot be honoured is refused before any
    forward.
    """

    def _extract_generation_mode_kwargs(
        self: Any, custom_generate: Any, kwargs: dict[str, Any], *args: Any, **more: Any
    ) -> dict[str, Any]:
        if custom_generate is not None and kwargs.get("strategy") not in (None, "ar"):
            raise ValueError(
                f"`custom_generate` brings a loop of its own: leave `strategy={kwargs['strategy']!r}` out beside it."
            )
        return super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **more)

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        ours = {name: kwargs.pop(name) for name in SETTING_NAMES if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, *args, **kwargs
        )
        if generation_config.is_assistant:
            if ours.get("strategy") not in (None, "ar"):
                raise ValueError(f"An assistant decodes as AR: leave `strategy={ours['strategy']!r}` out.")
            ours["strategy"] = "ar"  # whatever is stored: the model it assists asks for AR drafts
        for name, value in ours.items():
            setattr(generation_config, name, value)
        settings = WeDLMGenerationSettings.from_generation_config(generation_config, self.config)
        if settings.strategy == "ar":
            for name in ours.keys() - {"strategy", "mask_token_id"}:
                if ours[name] not in (None, "none", False):
                    raise ValueError(
                        f"`{name}={ours[name]!r}` has no meaning with `strategy='ar'`: pass `strategy='wedlm'` too."
                    )
        else:
            settings.check_together(ours)
            _check_options(settings.strategy, generation_config)
            cache = model_kwargs.get("past_key_values")
            if cache is not None and not isinstance(cache, WindowCache):
                raise ValueError(
                    "Parallel decoding needs a `WindowCache`: pass the `past_key_values` that an earlier call "
                    f"returned, or `WindowCache()`; got {type(cache).__name__}."
                )
        return generation_config, model_kwargs

    def _validate_generation_mode(
        self: Any, generation_mode: GenerationMode, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> None:
        super()._validate_generation_mode(  # type: ignore[misc]
            generation_mode, generation_config, *args, **kwargs
        )
        strategy = getattr(generation_config, "strategy", None) or "ar"
        if strategy != "ar" and generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"`strategy={strategy!r}` decodes greedily or by sampling, but the other options ask for "
                f"{generation_mode.value.replace('_', ' ')} (num_beams={generation_config.num_beams}). "
                "Leave them out or use `strategy='ar'`."
            )

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
        settings = WeDLMGenerationSettings.from_generation_config(generation_config, self.config)
        if settings.strategy == "ar":
            _check_ar_inputs(model_kwargs)
            output = super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
            _remember_ar_tokens(output, model_kwargs)
            return output
        cache = model_kwargs.get("past_key_values")
        if not isinstance(cache, WindowCache):
            cache = WindowCache()  # in place of the one that `generate` made
        is_static = generation_config.cache_implementation == "static" or cache.capacity is not None
        _check_inputs(self, settings.strategy, input_ids.shape[0], is_static, logits_processor, model_kwargs)
        prompt_ids, prompt_mask = _prompt(input_ids, model_kwargs, self.config.max_position_embeddings)
        limit, end_tokens, criteria = _split_criteria(stopping_criteria, input_ids)
        compiled = None
        if is_static:
            # The prompt, the answer, and the windows at its end.
            slots = prompt_ids.shape[1] + limit, 2 * min(settings.window_size, limit)
            compiled = self._fixed_shape_forward(cache, *slots, generation_config, model_kwargs)
        pad_token = generation_config._pad_token_tensor
        decoder = ParallelDecoder(
            model=self,
            settings=settings,
            sampler=_sampler(settings, logits_processor, generation_config, input_ids.long(), limit),
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            cache=cache,
            limit=limit,
            end_tokens=end_tokens,
            pad_token_id=0 if pad_token is None else int(pad_token),
            stopping_criteria=criteria,
            streamer=streamer,
            recorder=_recorder(settings, generation_config, prompt_ids, limit),
            prompt_embeds=model_kwargs.get("inputs_embeds"),
            compiled=compiled,
            go_on=lambda is_finished: self._has_unfinished_sequences(is_finished, synced_gpus, input_ids.device),
        )
        sequences = torch.cat([input_ids.long(), decoder.run()], dim=1)
        return _output(decoder, sequences) if generation_config.return_dict_in_generate else sequences

    def _fixed_shape_forward(
        self: Any,
        cache: WindowCache,
        length: int,
        windows: int,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Callable[..., Any]:
        """Makes room in the cache for all that this call can need. Returns the model, compiled where transformers
        would compile it."""
        prepared = model_kwargs["past_key_values"]
        if prepared is not cache:
            # Transformers' own is as long as the longest call so far, or as `max_cache_len` asks: one shape for all.
            length = max(length, 1 + max(layer.max_cache_len for layer in prepared.layers))
        cache.capacity = max(length + windows, cache.capacity or 0)
        if self._valid_auto_compile_criteria(model_kwargs, generation_config):
            return self.get_compiled_call(generation_config.compile_config)
        return self.__call__

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's, with our settings in generation_config.json."""
        generation_config: Any = getattr(self, "generation_config", None)
        if generation_config is not None:
            # Before any file is written; transformers would find out with half of them there.
            generation_config.validate(strict=True)
            WeDLMGenerationSettings.from_generation_config(generation_config, self.config)  # type: ignore[attr-defined]
            # With this flag, which a config derived from the model's carries, reloading would drop our fields.
            generation_config._from_model_config = None
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _check_options(strategy: str, generation_config: GenerationConfig) -> None:
    """Raises `ValueError` for an option that parallel decoding cannot honour."""
    for option, harmless in REFUSED_OPTIONS.items():
        if (value := getattr(generation_config, option, None)) not in harmless:
            raise ValueError(
                f"`{option}={value!r}` is not supported with `strategy={strategy!r}`: "
                f"pass `{option}={harmless[-1]!r}` or `strategy='ar'`."
            )


def _check_ar_inputs(model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for what AR decoding cannot do on a [`WindowCache`]."""
    is_window_cache = isinstance(model_kwargs.get("past_key_values"), WindowCache)
    mask = model_kwargs.get("attention_mask")  # newer versions of transformers drop one that is all ones
    if is_window_cache and mask is not None and not bool(mask.all()):
        raise ValueError("AR decoding goes on from a `WindowCache` only without padding in the prompts.")


def _remember_ar_tokens(output: Any, model_kwargs: dict[str, Any]) -> None:
    """Tells a [`WindowCache`] which tokens AR decoding appended, so that it knows the prompts that it fits."""
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, WindowCache) and model_kwargs.get("inputs_embeds") is None:
        cache.remember(output if isinstance(output, torch.Tensor) else output.sequences)


def _check_inputs(
    model: Any,
    strategy: str,
    batch_size: int,
    is_static: bool,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises `ValueError` for what parallel decoding cannot do with this model and these inputs."""
    unused = {name for name, value in model_kwargs.items() if value is not None} - USED_INPUTS
    if unused:
        raise ValueError(f"`strategy={strategy!r}` has no use for the inputs {sorted(unused)}: leave them out.")
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            "The model's `prepare_inputs_for_generation` was replaced (PEFT does so for prompt and prefix tuning), "
            f"but `strategy={strategy!r}` prepares its inputs by itself: use `strategy='ar'`."
        )
    implementation = model.config._attn_implementation
    if (batch_size > 1 or is_static) and implementation not in DENSE_MASK_ATTENTION:
        raise ValueError(
            f"Attention implementation {implementation!r} cannot decode rows of different lengths together, nor with "
            f"a static cache: load the model with one of {DENSE_MASK_ATTENTION}, or generate one prompt at a time, "
            "without `cache_implementation='static'`."
        )
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            "Gradient checkpointing in training mode leaves no cache to decode with: call `model.eval()`."
        )
    if batch_size > 1 and any(isinstance(processor, SynthIDTextWatermarkLogitsProcessor) for processor in processors):
        raise ValueError(
            "SynthID watermarking keeps a state that all rows advance together, but here rows advance at paces of "
            "their own: generate one sequence at a time or use `strategy='ar'`."
        )


def _prompt(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], max_position_embeddings: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt's tokens `(B, P)` int64, -1 behind embeddings, and where it has any `(B, P)` bool.

    Raises:
        ValueError: for prompts that cannot be decoded.
    """
    embeds, cache = model_kwargs.get("inputs_embeds"), model_kwargs.get("past_key_values")
    if embeds is not None and isinstance(cache, WindowCache) and any(cache.lengths):
        raise ValueError(
            "Nothing tells whether a cache belongs to `inputs_embeds`: pass an empty one, or `input_ids`; got "
            f"{cache.lengths} cached tokens."
        )
    prompt_ids = input_ids.long() if embeds is None else input_ids.new_full(embeds.shape[:2], -1).long()
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(prompt_ids, dtype=torch.bool) if mask is None else mask.bool()
    _check_prompt_mask(mask, prompt_ids.shape, max_position_embeddings)
    position_ids = model_kwargs.get("position_ids")
    expected = mask.cumsum(1) - 1
    if position_ids is not None and (
        position_ids.shape[-1] != mask.shape[1] or not bool(((position_ids == expected) | ~mask).all())
    ):
        raise ValueError("Parallel decoding counts positions from each row's first token: leave `position_ids` out.")
    return prompt_ids, mask


def _check_prompt_mask(mask: torch.Tensor, shape: torch.Size, max_position_embeddings: int) -> None:
    """Raises `ValueError` unless all rows are left-padded, hold a token and fit into the model's context."""
    if mask.shape != shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, got {tuple(mask.shape)} and {tuple(shape)}."
        )
    lengths = mask.sum(1)
    if shape[1] == 0 or not bool(lengths.all()):
        row = 0 if shape[1] == 0 else int((lengths == 0).nonzero()[0])
        raise ValueError(f"The prompt of row {row} is empty: parallel decoding needs at least one token.")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        row = int((mask[:, :-1] & ~mask[:, 1:]).any(1).nonzero()[0])
        raise ValueError(
            f"The prompts must be left-padded, but row {row} has padding after a token: set "
            "`tokenizer.padding_side = 'left'`."
        )
    if int(lengths.max()) >= max_position_embeddings:
        raise ValueError(
            f"The prompt of row {int(lengths.argmax())} has {int(lengths.max())} tokens, but the model's context is "
            f"{max_position_embeddings} (`max_position_embeddings`)."
        )


def _split_criteria(
    stopping_criteria: StoppingCriteriaList, input_ids: torch.Tensor
) -> tuple[int, torch.Tensor, StoppingCriteriaList]:
    """How many new tokens are allowed, which tokens `(E,)` int64 end a row, and the criteria beyond those two.

    From the criteria, as AR decoding does: a caller's own `MaxLengthCriteria` replaces `max_length`, and so on.
    """
    limits = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
    ends = [criterion.eos_token_id for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
    others = [
        criterion for criterion in stopping_criteria if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)
    ]
    end_tokens = torch.tensor([], dtype=torch.int64, device=input_ids.device)
    return (
        max(1, min(limits) - input_ids.shape[1]),
        torch.cat([end_tokens, *(end.to(end_tokens) for end in ends)]),
        StoppingCriteriaList(others),
    )


def _sampler(
    settings: WeDLMGenerationSettings,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    input_ids: torch.Tensor,
    limit: int,
) -> TokenSampler:
    """What chooses the tokens. Raises `ValueError` for processors that cannot be honoured unverified."""
    assert settings.mask_token_id is not None
    sampler = TokenSampler(
        processors,
        bool(generation_config.do_sample),
        settings.mask_token_id,
        input_ids,
        ahead=min(settings.window_size, limit) + 1,
    )
    if settings.verification == "none":
        sampler.check_out_of_order()
    return sampler


def _recorder(
    settings: WeDLMGenerationSettings, generation_config: GenerationConfig, prompt_ids: torch.Tensor, limit: int
) -> ScoreRecorder | None:
    """What keeps scores, logits and log-probabilities, if the caller gets to see any of them."""
    keep = bool(generation_config.output_scores), bool(generation_config.output_logits)
    if not generation_config.return_dict_in_generate or (settings.verification == "none" and not any(keep)):
        return None
    return ScoreRecorder(prompt_ids.shape[0], limit, *keep, prompt_ids.device)


def _output(decoder: ParallelDecoder, sequences: torch.Tensor) -> WeDLMGenerateOutput:
    """All that a call has to tell."""
    stats, recorder, is_traced = decoder.stats, decoder.recorder, decoder.settings.output_trace
    output = WeDLMGenerateOutput(
        sequences=sequences,  # type: ignore[arg-type]
        past_key_values=decoder.cache,
        stats=stats,
        trace=decoder.trace if is_traced else None,
        step_map=step_map(decoder.trace, stats.new_tokens) if is_traced else None,
    )
    if recorder is not None:
        if decoder.settings.verification != "none":
            output.log_probs = recorder.log_probs[:, : int(stats.new_tokens.max())]
        output.scores = recorder.scores(stats.new_tokens, decoder.pad_token_id)  # type: ignore[assignment]
        output.logits = recorder.logits(stats.new_tokens, decoder.pad_token_id)  # type: ignore[assignment]
    return output
