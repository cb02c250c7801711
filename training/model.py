"""The model that is trained: loaded or converted, checked against its tokenizer and data, prepared for adapters."""

import copy
from contextlib import suppress
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template
from trl.chat_template_utils import has_generation_markers

from ..checkpoints.loading import load_model, load_tokenizer
from ..modeling_wedlm import WeDLMForCausalLM
from ..modeling_wedlm.convert import convert, read_source_config
from . import peft_targets as peft_targets
from .log import get_logger
from .sft_config import CHATML, WeDLMSFTConfig

logger = get_logger(__name__)

_IM_END = "<|im_end|>"


def mask_row_is_new(model: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the mask token's embedding is still the mean of all others, as `convert` leaves a row that it adds."""
    weight = model.get_input_embeddings().weight
    if weight.is_meta or not weight.is_floating_point() or weight.ndim != 2:
        return False
    mask = tokenizer.mask_token_id
    rows = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - {mask}), device=weight.device)
    with torch.no_grad():
        mean = weight[rows[rows < len(weight)]].float().mean(0)
        return bool((weight[mask].float() - mean).norm() <= 0.02 * mean.norm())


def check_source(name: str, revision: str | None, *, is_base: bool) -> None:
    """Raises `OSError` or `ValueError` for a checkpoint that cannot be trained; reads nothing but its config.
    `is_base`: an adapter is trained on it, which WeDLM must be able to load onto it again."""
    if read_source_config(name, revision).model_type != "wedlm" and is_base:
        raise ValueError(
            f"An adapter is loaded onto the checkpoint that it was trained on, and {name!r} is not a WeDLM one. "
            f"Convert it first, `wedlm convert {name} FOLDER`, and train on FOLDER."
        )


def prepare_model(
    model: Any, tokenizer: Any, args: WeDLMSFTConfig, peft_config: Any, quantization: Any, *, needs_template: bool
) -> tuple[Any, PreTrainedTokenizerBase, Any]:
    """Model, tokenizer and PEFT config to train with: loaded or converted where the model is a name, and checked; the
    tokenizer has a chat template where the data need one. Raises `OSError` for what cannot be loaded, and `ValueError`
    for what cannot be trained or used together."""
    check_method(model, peft_config)
    if isinstance(model, str):
        init_kwargs: Any = args.model_init_kwargs or {}
        check_source(model, init_kwargs.get("revision"), is_base=peft_config is not None)
        model, tokenizer = load_or_convert(model, args, tokenizer, init_kwargs, quantization)
    else:
        if peft_config is not None and model.config.name_or_path:
            check_source(model.config.name_or_path, None, is_base=True)
        tokenizer = tokenizer or load_tokenizer(str(model.config.name_or_path or ""))
    check_vocabulary(model, tokenizer)
    check_targets(model, peft_config)
    if args.chat_template_path == str(CHATML):
        use_chatml(tokenizer, args.eos_token)
    elif needs_template and args.chat_template_path is None and tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template: pass one as `chat_template_path` ('chatml' is this package's)."
        )
    names_rows = "embed_tokens" in (getattr(peft_config, "modules_to_save", None) or ())
    names_rows = names_rows or getattr(peft_config, "trainable_token_indices", 0) is not None
    if peft_config is not None and not names_rows and mask_row_is_new(model, tokenizer):
        peft_config = copy.copy(peft_config)
        peft_config.trainable_token_indices = {"embed_tokens": [tokenizer.mask_token_id]}
        logger.info(f"The mask token's row {tokenizer.mask_token_id} is new: it is trained along with the adapter.")
    return model, tokenizer, peft_config


def check_method(model: Any, peft_config: Any) -> None:
    """Raises `ValueError` for methods of PEFT that put virtual tokens before the input: a dual stream has no place for
    them."""
    configs = [peft_config] if peft_config is not None else list(getattr(model, "peft_config", {}).values())
    for config in configs:
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"{type(config).__name__} cannot be trained: it puts virtual tokens before the input, and a dual "
                "stream says of each of its rows whom it sees. Take a method that changes layers, such as LoRA."
            )


def check_targets(model: Any, peft_config: Any) -> None:
    """Raises `ValueError` for a name in a list of `target_modules` that no module has: PEFT drops it in silence where
    another name has one."""
    targets = getattr(peft_config, "target_modules", None)
    if targets is None or isinstance(targets, str):  # a regular expression, or "all-linear"
        return
    modules = dict(model.named_modules())
    for target in sorted(targets):
        if target not in modules and not any(name.endswith(f".{target}") for name in modules):
            linear = {name.rpartition(".")[2] for name, each in modules.items() if isinstance(each, torch.nn.Linear)}
            raise ValueError(
                f"`target_modules` must be names of the model's modules, got {target!r}: its linear layers are "
                f"{', '.join(sorted(linear))}."
            )


def load_or_convert(
    name: str, args: WeDLMSFTConfig, tokenizer: Any, init_kwargs: dict[str, Any] | None, quantization_config: Any
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model and its tokenizer; a Qwen checkpoint is converted."""
    settings: dict[str, Any] = {**(init_kwargs or {})}
    revision = settings.get("revision")
    dtype = settings.pop("dtype", "float32")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if read_source_config(name, revision).model_type != "wedlm":
        attention = settings.pop("attn_implementation", None)
        if left_over := sorted(set(settings) - {"revision"}):
            reason = "which is converted while it is read"
            raise ValueError(f"`model_init_kwargs` {left_over} are not for {name!r}, {reason}.")
        if quantization_config is not None:
            raise ValueError(f"Convert {name!r} before you quantise it: `wedlm convert {name} FOLDER`.")
        conversion = convert(name, revision=revision)
        logger.info(f"Converted {name!r}: {conversion}")
        converted: Any = conversion.model
        if attention is not None:
            converted.set_attn_implementation(attention)
        return (converted if dtype == "auto" else converted.to(dtype)), tokenizer or conversion.tokenizer
    if quantization_config is not None:
        settings |= {"quantization_config": quantization_config, "device_map": {"": PartialState().device}}
    consent: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    model = load_model(name, dtype=dtype, model_class=WeDLMForCausalLM, **consent | settings)
    return model, tokenizer or load_tokenizer(name, revision=revision, **consent)


def prepare_quantized(model: Any) -> None:
    """Undoes what would freeze weights of a quantised model's adapter in silence; leaves other models as they are."""
    if not any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        return
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype == torch.bfloat16:  # TRL's cast: small steps are lost in it
            weight.data = weight.data.float()
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks weights at the first inference. From then on no gradient
        # passes them, so an evaluation would end the training.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` unless the tokenizer is that of a WeDLM model, and the model's own."""
    config = model.config.get_text_config()
    if config.model_type != "wedlm":
        raise ValueError(
            f"`model` must be a WeDLM model, got one of type {config.model_type!r}: convert it with `wedlm convert`, "
            "or pass its name, and it is converted here."
        )
    if tokenizer.mask_token is None:
        raise ValueError("The tokenizer has no `mask_token`, which dual-stream training needs.")
    if config.mask_token_id is not None and tokenizer.mask_token_id != config.mask_token_id:
        raise ValueError(
            f"The tokenizer's mask token is id {tokenizer.mask_token_id}, the model's is {config.mask_token_id}: "
            "they do not belong together."
        )
    rows, largest = model.get_input_embeddings().weight.shape[0], max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ValueError(
            f"The tokenizer has ids up to {largest}, and the model {rows} embedding rows: they do not belong together."
        )


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template to train with: TRL's version of a well-known one, or None for the tokenizer's own."""
    template = tokenizer.chat_template
    with suppress(ValueError):  # of a template that TRL does not know
        if not has_generation_markers(template):
            return get_training_chat_template(tokenizer)
    return None


def use_chatml(tokenizer: PreTrainedTokenizerBase, eos_token: str | None) -> None:
    """Gives the tokenizer the template of this package. Where its vocabulary has no `<|im_end|>`, turns end in its end
    token."""
    template = CHATML.read_text(encoding="utf-8")
    if _IM_END not in tokenizer.get_vocab():
        template = template.replace(repr(_IM_END), repr(eos_token or tokenizer.eos_token))
    tokenizer.chat_template = template
