"""What to decode: a `generate` call's prompts, lengths and end tokens.

`B` rows, `P` columns of the prompts, `H` hidden size.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from .cache import WindowCache
from .settings import WeDLMGenerationSettings
from .versions import CACHE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodingRequest:
    """What to decode, and when to stop."""

    prompts: list[list[int]]  # each row's tokens, without padding; -1 behind embeddings
    limit: int  # new tokens allowed, at least 1
    end_tokens: frozenset[int]  # that end a row
    mask_token_id: int | None  # M; `None` where slots need no token, since a mask adapter embeds them
    pad_token_id: int  # stands after a row's end in the output
    # Those beyond end tokens and length; asked after each token, as if they had come one by one.
    stopping_criteria: StoppingCriteriaList
    prompt_ids: torch.Tensor  # `(B, P')` int64, the padded prompts as processors and stopping criteria see them
    prompt_embeds: torch.Tensor | None  # `(B, P, H)`, left-padded, instead of tokens; needs an empty cache


def decoding_request(
    model: Any,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    settings: WeDLMGenerationSettings,
    model_kwargs: dict[str, Any],
) -> DecodingRequest:
    """The request of a call. Lengths and end tokens come from the criteria, as in AR decoding: a caller's own
    `MaxLengthCriteria` replaces `max_length`, and so on."""
    limits, ends, others = [], [], StoppingCriteriaList()
    for criterion in stopping_criteria:
        if isinstance(criterion, MaxLengthCriteria):
            limits.append(criterion.max_length)
        elif isinstance(criterion, EosTokenCriteria):
            ends += criterion.eos_token_id.tolist()
        else:
            others.append(criterion)
    pad_token = generation_config.pad_token_id
    if pad_token is None and ends:
        pad_token = ends[0]
    prompts = prompts_of(input_ids, generation_config, model_kwargs)
    _check_context(model.config, list(map(len, prompts)))
    limit = max(1, min(limits) - input_ids.shape[1])
    _check_positions(model.config, list(map(len, prompts)), limit, model_kwargs.get(CACHE))
    return DecodingRequest(
        prompts=prompts,
        limit=limit,
        end_tokens=frozenset(ends),
        mask_token_id=settings.mask_token_id,
        pad_token_id=0 if pad_token is None else int(pad_token),
        stopping_criteria=others,
        prompt_ids=input_ids.long(),
        prompt_embeds=model_kwargs.get("inputs_embeds"),
    )


def context_length(config: Any) -> int:
    """Tokens that the model's context holds."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def _check_positions(config: Any, lengths: list[int], limit: int, cache: Any) -> None:
    """Raises `ValueError` for a call in which a row's result depends on the other rows of its forward.

    Rotary embeddings of the types "dynamic" and "longrope" are another function once the largest position of a forward
    is beyond a point, and masks stand further on than the tokens of AR decoding. Llama 4 scales queries by their place
    among the physical rows: by 1 up to `floor_scale`.
    """
    config, longest = config.get_text_config(decoder=True), max(lengths) + limit
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        name = str(kind.get("rope_type"))
        if name != "longrope" and "dynamic" not in name:
            continue
        point = kind["original_max_position_embeddings"] if name == "longrope" else config.max_position_embeddings
        cached = [length for length in getattr(cache, "lengths", ()) if length]
        if longest > point and min(lengths + cached) <= point:
            raise ValueError(
                f"Rotary embeddings of the type {name!r} change for all tokens at once behind token {point}, and "
                f"parallel decoding cannot cross that point, got up to {longest} tokens: pass a smaller "
                "`max_new_tokens`, a longer prompt without a cache, or `strategy='ar'`."
            )
    if getattr(config, "attn_temperature_tuning", False) and 2 * longest > config.floor_scale:
        raise ValueError(
            f"This model scales attention by steps of {config.floor_scale} physical rows (`attn_temperature_tuning`), "
            f"which parallel decoding reorders: prompt and answer may have {config.floor_scale // 2} tokens, got "
            f"{longest}. Pass a smaller `max_new_tokens` or `strategy='ar'`."
        )


def mask_length(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int | None:
    """The width of the caller's attention mask, `None` where there was none. Newer versions of transformers drop one
    that is all ones, and note its width."""
    mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]


def _check_context(config: Any, lengths: list[int]) -> None:
    """Warns of a prompt beyond the model's context, which AR decoding takes too."""
    if (longest := max(lengths)) >= (context := context_length(config)):
        logger.warning(
            f"The prompt of row {lengths.index(longest)} has {longest} tokens, but the model's context is {context} "
            "(`max_position_embeddings`): its answer may be poor, whatever decodes it."
        )


def prompts_of(
    input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> list[list[int]]:
    """The prompts' tokens, without padding; -1 behind embeddings. Raises `ValueError` for what cannot be decoded."""
    embeds, cache = model_kwargs.get("inputs_embeds"), model_kwargs.get(CACHE)
    if embeds is not None and isinstance(cache, WindowCache) and any(cache.lengths):
        raise ValueError(
            "Nothing tells whether a cache belongs to `inputs_embeds`: pass an empty one, or `input_ids`; got "
            f"{cache.lengths} cached tokens."
        )
    prompt_ids = input_ids if embeds is None else input_ids.new_full(embeds.shape[:2], -1)
    mask, width = model_kwargs.get("attention_mask"), mask_length(generation_config, model_kwargs)
    if mask is None:
        mask = prompt_ids.new_ones(len(prompt_ids), prompt_ids.shape[1] if width is None else width)
    mask = mask.bool()
    _check_prompt_mask(mask, prompt_ids.shape)
    position_ids = model_kwargs.get("position_ids")
    expected = mask.cumsum(1) - 1
    if position_ids is not None and (
        position_ids.shape[-1] != mask.shape[1] or not bool(((position_ids == expected) | ~mask).all())
    ):
        raise ValueError("Parallel decoding counts positions from each row's first token: leave `position_ids` out.")
    return [row_ids[row_mask].tolist() for row_ids, row_mask in zip(prompt_ids, mask, strict=True)]


def _check_prompt_mask(mask: torch.Tensor, shape: torch.Size) -> None:
    """Raises `ValueError` unless all rows are left-padded and hold a token."""
    if mask.shape != shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, got {tuple(mask.shape)} and {tuple(shape)}."
        )
    lengths = mask.sum(1)
    if not bool(lengths.all()):
        row = int(lengths.argmin())
        raise ValueError(f"The prompt of row {row} is empty: parallel decoding needs at least one token.")
    has_gap = (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if bool(has_gap.any()):
        raise ValueError(
            f"The prompts must be left-padded, but row {int(has_gap.nonzero()[0])} has padding after a token: set "
            "`tokenizer.padding_side = 'left'`."
        )
