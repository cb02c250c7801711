"""Whether a model can carry a mask adapter: what is known of its kind, and what a few forwards show."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.attention import (
    ATTENTION_KINDS,
    DENSE_MASK_ATTENTION,
    StepAttention,
    implementation_of,
    layer_types,
    rounds_rows,
)
from ..generation.cache import WindowCache
from ..generation.forward import forward_as, prepare_chunks
from ..generation.rows import Row, SequenceState, Tree, lay_out
from ..generation.state import keeps_state
from ..generation.versions import cache_name
from .adapter_files import base_embeddings
from .layers import evaluating

# Single tokens that are read to see that a state is the same, and by how much of the largest logit theirs may differ.
SINGLES, LEAST_STATE = 8, 1e-4
TABLES = ("codegen", "gptj")  # model types whose rotary embeddings are a table
SHARDED = "Drafting calls the embeddings and the head by themselves, which FSDP does not allow"


def check_attachable(model: Any) -> None:
    """Raises `TypeError` or `ValueError`, with the reason, for a model that cannot carry a mask adapter."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        is_wrapped = hasattr(model, "module") or hasattr(model, "get_base_model")
        inner = "a compiled" if name == "OptimizedModule" else "a wrapped" if is_wrapped else "no"
        raise TypeError(
            f"A mask adapter sits on a causal language model of transformers; {name} is {inner} one. Attach the "
            "adapter first, to the plain model, and compile or wrap it then."
        )
    if hasattr(model, "mask_adapter"):
        raise ValueError(f"{name} has a mask adapter already: call `unload_mask_adapter(model)` first.")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(f"{name} is compiled: attach the mask adapter before `model.compile()`.")
    away = [key for key, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if away:
        raise ValueError(
            f"{len(away)} weights of {name} are on the device 'meta' (offloaded, or not loaded yet), {away[0]} among "
            "them: load the whole model into memory first."
        )
    if any(type(module).__name__.startswith("FSDP") for module in model.modules()):
        raise ValueError(f"{name} is sharded. {SHARDED}.")
    if any(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError(
            f"{name} is split over processes by tensor parallelism, and a mask adapter needs whole rows: load it "
            "without `tp_plan` and `tp_size`."
        )
    if why := _unfit(model):
        raise ValueError(f"{name} cannot carry a mask adapter: {why}.")


def _unfit(model: Any) -> str | None:
    """Why masks cannot be predicted with this architecture."""
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and masks stand behind the tokens of a decoder alone"
    if config.model_type == "moshi":
        return "its prompts see further back than the sliding window of its cache"
    if model.get_output_embeddings() is None or not hasattr(model, "generate"):
        return "it has no language modelling head"
    thresholds = {getattr(getattr(module, "state", None), "threshold", 0) for module in model.modules()}
    if largest := max(thresholds):  # of bitsandbytes' 8 bits: larger activations are multiplied apart, for all rows
        instead = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
        return f"its 8-bit layers give a row other numbers beside others (llm_int8_threshold={largest}); use {instead}"
    if keeps_state(model):  # its rows are in the order of the text: what matters is seen, see `check_masks`
        return None
    if odd := sorted(set(layer_types(config)) - set(ATTENTION_KINDS)):
        return f"its layers choose what a row sees in a way of their own ({', '.join(odd)})"
    if getattr(config.get_text_config(decoder=True), "alibi", False):
        return "its positions are ALiBi's, which count keys instead of logical positions"
    is_rotary = any("Rotary" in type(module).__name__ for module in model.modules())
    if config.model_type in TABLES:
        return "its rotary embeddings are a table, behind whose end no mask can stand"
    if not is_rotary:
        return "it has no rotary position embeddings, which alone let a token lie anywhere"
    return None


def check_masks(model: Any) -> None:
    """Raises `ValueError` for a model that does not attend by the masks of a step.

    Two tokens in the cache, then a token, a wrong draft and a right one, and masks, must give at the right draft what
    four tokens alone give. Where attention takes no masks as tensors, there is no wrong draft. For a model that keeps
    a state, see [`_check_states`].
    """
    if keeps_state(model):
        _check_states(model)
        return
    device, name = model.device, type(model).__name__
    # From all of the vocabulary: among its first are special tokens, behind which small differences may grow.
    text = [place * base_embeddings(model).num_embeddings // 6 for place in (4, 2, 5, 3)]
    rows = [Row(text[2], 2, -1), Row(text[3], 3, 0), Row(None, 4, 1), Row(None, 5, 2)]
    if implementation_of(model) in DENSE_MASK_ATTENTION:
        wrong = Row(text[1], 3, 0)
        rows = [rows[0], wrong, Row(text[3], 3, 0), Row(None, 4, 0), Row(None, 5, 2)]
    try:
        with torch.no_grad(), evaluating(model):
            expected = model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[:, -1]
            logits, _ = decode_step(model, text[:2], rows)
    except Exception as error:
        raise ValueError(f"{name} cannot carry a mask adapter: a forward with masks fails: {error!r}.") from error
    right = rows.index(next(row for row in rows if row.token == text[3]))
    if not is_close(logits[:, right], expected, model):
        raise ValueError(
            f"{name} cannot carry a mask adapter: its attention does not follow the masks of a step (its logits "
            f"differ by {(logits[:, right] - expected).abs().max():.1e} of {expected.abs().max():.1e})."
        )


def _check_states(model: Any) -> None:
    """Raises `ValueError` for a model whose state cannot be read with several tokens, or not forget them.

    Tokens are read as decoding reads them, and must give what the whole text gives: several behind a first part, with
    masks, in a forward that is forgotten; the same and one more, once it is; one by one.
    """
    name, known, single = type(model).__name__, 5, "single tokens, one by one,"
    reads = (
        (known, 3, 2, "several tokens behind others in one forward"),
        (known, 4, 0, "tokens behind a forward that was forgotten"),
        *((known + 4 + place, 1, 0, single) for place in range(SINGLES)),
    )
    tokens = [*range(1, known + 5 + SINGLES)]
    try:
        with torch.no_grad(), evaluating(model):
            expected = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
            prepare_chunks(model)
            cache = WindowCache()
            cache.open([tokens], model.device, model.config)
            found = [_read(model, cache, tokens[:known], 0, 0)]
            found += [_read(model, cache, tokens[: at + count], at, masks) for at, count, masks, _ in reads]
    except Exception as error:
        raise ValueError(
            f"{name} cannot carry a mask adapter: it keeps a state, and a forward on that fails: {error!r}."
        ) from error
    for (at, count, _, what), logits in zip(reads, found[1:], strict=True):
        if not is_close(logits, right := expected[:, at : at + count], model, LEAST_STATE):
            raise ValueError(
                f"{name} cannot carry a mask adapter: it keeps a state, and {what} give other logits than the same "
                f"text at once (they differ by {(logits - right).abs().max():.1e} of {right.abs().max():.1e})."
            )


def _read(model: Any, cache: WindowCache, tokens: list[int], known: int, masks: int) -> torch.Tensor:
    """Logits of tokens behind the first `known` ones, `(1, T, V)`; with masks behind, the forward is forgotten."""
    sequence = SequenceState(0, tokens, len(tokens), known, 1)
    count = sequence.pending
    guesses = (Row(None, len(tokens) + place, count - 1 + place) for place in range(masks))
    sequence.rows = Tree([*sequence.pending_rows, *guesses])
    step = lay_out([sequence], [0], 0, model.device)
    cache.announce(step)
    inputs = {"input_ids": step.input_ids, "position_ids": step.position_ids, cache_name(model): cache}
    with forward_as(cache.layers if masks else (), has_short_chunks=bool(known)):
        logits: torch.Tensor = model(**inputs, use_cache=True).logits
    cache.commit([[] if masks else [*range(count)]])
    return logits[:, :count]


def decode_step(model: Any, known: list[int], rows: list[Row], slots: int | None = None) -> tuple[torch.Tensor, Any]:
    """Logits `(1, T, V)` of rows behind tokens that lie in a cache, as decoding computes them.

    With a number of `slots`, the last rows are slots, and what is known of them is returned too.
    """
    cache, attention = WindowCache(), StepAttention(model)
    sequence = SequenceState(0, known, len(known), 0, 1)
    cache.open([[*known, 0]], model.device, model.config)
    for part, count in ((sequence.pending_rows, None), (rows, slots)):
        sequence.rows = Tree(part)
        step = lay_out([sequence], [0], 0, model.device)
        cache.announce(step)
        masks = attention.masks(step, step.position_ids)
        found = None if count is None else model.slots(count)
        with forward_as(slots=found, **attention.record):
            logits = model(
                input_ids=step.input_ids, attention_mask=masks, position_ids=step.position_ids,
                use_cache=True, **{cache_name(model): cache},
            ).logits  # fmt: skip
        sequence.committed = len(known)
        cache.commit([[*range(len(known))]])
    return logits, found


def is_close(found: torch.Tensor, expected: torch.Tensor, model: Any, least: float = 1e-3) -> bool:
    """Whether a model computed the same rows, `(..., H)`, in two ways: in 32 bits, but for `least` of the largest.

    Matrices of other shapes round differently, another expert may be chosen and activations may be quantized. In 16
    bits, some rows of several may then differ by anything; a mask that is not followed makes most rows differ.
    """
    difference = found.float() - expected.float()
    if model.dtype in (torch.float32, torch.float64) and not rounds_rows(model):
        return bool(difference.abs().max() <= least * expected.abs().max())
    distances = (difference.norm(dim=-1) / expected.float().norm(dim=-1)).flatten().sort().values
    return bool(distances[len(distances) // 2] <= 0.25)  # the upper median: one row of two may not differ
