"""`model.generate(..., strategy="wedlm")`: how parallel decoding plugs into transformers' `generate`."""

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
)

from .cache_wedlm import WindowCache
from .decoding_wedlm import DENSE_MASK_ATTENTION, ParallelDecoder
from .sampling_wedlm import TokenSampler
from .scores_wedlm import ScoreRecorder
from .settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from .stats_wedlm import WeDLMGenerateOutput, step_map

# Options of `generate` that have no meaning here, with the values that can be honoured.
REFUSED_OPTIONS = {
    "cache_implementation": (None, "static", "dynamic"),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prefill_chunk_size": (None,),
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

    def _prepare_generation_config(
        self: Any, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        ours = {name: kwargs.pop(name) for name in SETTING_NAMES if name in kwargs}
        generation_config, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, *args, **kwargs
        )
        for name, value in ours.items():
            setattr(generation_config, name, value)
        if generation_config.is_assistant:
            generation_config.strategy = "ar"  # whatever is stored: the model it assists asks for AR drafts
        settings = WeDLMGenerationSettings.from_generation_config(generation_config, self.config)
        if settings.strategy == "ar":
            for name in ours.keys() - {"strategy", "mask_token_id"}:
                if ours[name] not in (None, "none", False):
                    raise ValueError(
                        f"`{name}={ours[name]!r}` has no meaning with `strategy='ar'`: pass `strategy='wedlm'` too."
                    )
        return generation_config, model_kwargs

    def _validate_generation_mode(
        self: Any, generation_mode: GenerationMode, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> None:
        super()._validate_generation_mode(  # type: ignore[misc]
            generation_mode, generation_config, *args, **kwargs
        )
        strategy = getattr(generation_config, "strategy", None) or "ar"
        if strategy == "ar":
            return
        if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"`strategy={strategy!r}` decodes greedily or by sampling, but the other options ask for "
                f"{generation_mode.value.replace('_', ' ')} (num_beams={generation_config.num_beams}). "
                "Leave them out or use `strategy='ar'`."
            )
        for option, harmless in REFUSED_OPTIONS.items():
            if (value := getattr(generation_config, option, None)) not in harmless:
                raise ValueError(
                    f"`{option}={value!r}` is not supported with `strategy={strategy!r}`: "
                    f"pass `{option}={harmless[-1]!r}` or `strategy='ar'`."
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
            cache = model_kwargs.get("past_key_values")
            if isinstance(cache, WindowCache) and model_kwargs.get("attention_mask") is not None:
                raise ValueError("AR decoding goes on from a `WindowCache` only without padding in the prompts.")
            output = super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
            if isinstance(cache, WindowCache):
                cache.remember(output if isinstance(output, torch.Tensor) else output.sequences)
            return output
        is_static = generation_config.cache_implementation == "static"
        _check_this_call(self, settings.strategy, input_ids.shape[0], is_static, model_kwargs)
        input_ids = input_ids.long()  # type: ignore[assignment]
        embeds = model_kwargs.get("inputs_embeds")
        # The tokens behind embeddings are not known.
        prompt_ids = input_ids if embeds is None else input_ids.new_full(embeds.shape[:2], -1)
        prompt_mask = _checked_prompt_mask(prompt_ids, model_kwargs, self.config.max_position_embeddings)
        # From the criteria, as AR decoding does: a caller's own `MaxLengthCriteria` replaces `max_length`, and so on.
        limits = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
        ends = [criterion.eos_token_id for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
        limit = max(1, min(limits) - input_ids.shape[1])
        pad_token = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
        assert settings.mask_token_id is not None
        sampler = TokenSampler(
            logits_processor,
            generation_config.do_sample,
            settings.mask_token_id,
            input_ids,
            ahead=min(settings.window_size, limit) + 1,
        )
        if settings.verification == "none":
            sampler.check_out_of_order()
        cache = _window_cache(model_kwargs.get("past_key_values"))
        compiled = None
        if is_static:
            cache.capacity = prompt_ids.shape[1] + limit + 2 * min(settings.window_size, limit)
            compiled = self.__call__
            if self._valid_auto_compile_criteria({"past_key_values": cache}, generation_config):
                compiled = self.get_compiled_call(generation_config.compile_config)
        recorder = None
        if generation_config.return_dict_in_generate:
            keep = bool(generation_config.output_scores), bool(generation_config.output_logits)
            if any(keep) or settings.verification != "none":
                recorder = ScoreRecorder(len(prompt_ids), limit, *keep, input_ids.device)
        decoder = ParallelDecoder(
            model=self,
            settings=settings,
            sampler=sampler,
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            cache=cache,
            limit=limit,
            end_tokens=torch.cat([input_ids.new_empty(0), *(end.to(input_ids.device) for end in ends)]),
            pad_token_id=pad_token,
            stopping_criteria=StoppingCriteriaList(
                criterion
                for criterion in stopping_criteria
                if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)
            ),
            streamer=streamer,
            recorder=recorder,
            prompt_embeds=embeds,
            compiled=compiled,
            go_on=lambda is_finished: self._has_unfinished_sequences(is_finished, synced_gpus, input_ids.device),
        )
        sequences = torch.cat([input_ids, decoder.run()], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        new_tokens = decoder.stats.new_tokens
        output = WeDLMGenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            past_key_values=cache,
            stats=decoder.stats,
            trace=decoder.trace if settings.output_trace else None,
            step_map=step_map(decoder.trace, new_tokens) if settings.output_trace else None,
        )
        if recorder is not None:
            if settings.verification != "none":
                output.log_probs = recorder.log_probs[:, : int(new_tokens.max())]
            if recorder.keep_scores:
                output.scores = recorder.by_token(new_tokens, pad_token, raw=False)  # type: ignore[assignment]
            if recorder.keep_logits:
                output.logits = recorder.by_token(new_tokens, pad_token, raw=True)  # type: ignore[assignment]
        return output

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


def _check_this_call(
    model: Any, strategy: str, batch_size: int, is_static: bool, model_kwargs: dict[str, Any]
) -> None:
    """Raises `ValueError` for what parallel decoding cannot do with this model and these inputs."""
    unused = {name for name, value in model_kwargs.items() if value is not None} - USED_INPUTS
    if unused:
        raise ValueError(f"`strategy={strategy!r}` has no use for the inputs {sorted(unused)}: leave them out.")
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


def _window_cache(cache: Any) -> WindowCache:
    """The caller's cache if it is one of ours, a new one if `generate` made its own. Raises `ValueError` otherwise."""
    if isinstance(cache, WindowCache):
        return cache
    if getattr(cache, "_is_user_defined", False):
        raise ValueError(
            "Parallel decoding needs a `WindowCache`: pass the `past_key_values` that an earlier call returned, or "
            f"`WindowCache()`; got {type(cache).__name__}."
        )
    return WindowCache()


def _checked_prompt_mask(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], max_position_embeddings: int
) -> torch.Tensor:
    """`(B, P)` bool, True on tokens. Raises `ValueError` for prompts that cannot be decoded."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(
            "`attention_mask` must have the shape of `input_ids`, got "
            f"{tuple(mask.shape)} and {tuple(input_ids.shape)}."
        )
    lengths = mask.sum(1)
    if input_ids.shape[1] == 0 or not bool(lengths.all()):
        row = 0 if input_ids.shape[1] == 0 else int((lengths == 0).nonzero()[0])
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
    position_ids = model_kwargs.get("position_ids")
    expected = mask.cumsum(1) - 1
    if position_ids is not None and (
        position_ids.shape[-1] != mask.shape[1] or not bool(((position_ids == expected) | ~mask).all())
    ):
        raise ValueError("Parallel decoding counts positions from each row's first token: leave `position_ids` out.")
    return mask
