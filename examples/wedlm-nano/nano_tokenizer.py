"""Train a small byte-level BPE tokenizer with the special tokens and the chat template of a WeDLM checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
MASK_TOKEN = "<|mask|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN, MASK_TOKEN)

CHAT_TEMPLATE = (files("wedlm_hf.training") / "chat_template.jinja").read_text(encoding="utf-8")
"""ChatML; the generation span of each assistant turn is its content and `<|im_end|>`, not the newline behind it."""

# Words take the space before them. Each digit stands alone, and so does each newline: a turn's first token then never
# depends on the role line before it. Punctuation in front of a digit takes the space between, as in "37, 40".
_PRE_TOKENS = (
    r"\p{N}|\n| ?\p{L}+| ?[^\s\p{L}\p{N}]+ (?=\p{N})| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?=\n|$)|[^\S\n]+(?=[^\S\n])|[^\S\n]"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, model_max_length: int = 512, min_frequency: int = 2
) -> PreTrainedTokenizerFast:
    """Train on `texts` and return a tokenizer that pads on the left and decodes any text without loss.

    The same texts in the same order give the same files, byte for byte. The first ids are `SPECIAL_TOKENS`, then the
    256 bytes, then the merges; `vocab_size` counts all of them and is an upper bound where the texts hold fewer pairs.

    Args:
        texts: training text without special tokens.
        vocab_size: most entries that the vocabulary may have; at least 260.
        model_max_length: context length of the model, in tokens.
        min_frequency: occurrences that a pair needs to be merged.

    Raises:
        ValueError: `vocab_size` too small for the special tokens and the bytes, or no text at all.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"`vocab_size` must be at least {smallest} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError("`texts` must hold at least one text that is not empty")
    # The role names stand in front of every turn, so they count as often as there are texts.
    backend.train_from_iterator((f"user\nassistant\n{text}" for text in texts), trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        mask_token=MASK_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
    )
