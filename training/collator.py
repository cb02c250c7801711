"""Examples in, dual-stream batches out: all that `WeDLMForCausalLM.forward` needs under any `Trainer`; and new masks
every epoch."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import RemoveColumnsCollator

from ..generation.settings import check_mask_token_id
from . import streams
from .streams import IGNORE_INDEX, RatioSampler, Tokens


@dataclass
class DataCollatorForDualStreamMasking:
    """Turns tokenised examples into dual-stream batches (paper §4, Eq. 10).

    An example has `input_ids` and says what is supervised by `labels` (-100 = not; elsewhere `input_ids` again, not
    shifted), `assistant_masks` or `completion_mask` (1 = supervised), or by none of them (everything, as in
    pre-training). The first token of a document is never supervised: nothing predicts it. A packed example also has
    `seq_lengths`, the lengths of its documents (TRL's packing writes this column), or `document_ids`, one per token.
    Documents never see each other, and positions restart at 0 in each.

    `Trainer` drops every column that the model's `forward` does not name, before the collator sees it. Of the columns
    above, `input_ids`, `labels` and `document_ids` stay; the others need `remove_unused_columns=False`.

    A *response* is a run of supervised tokens that ends in the end token. A conversation of several responses becomes
    one document per response: the turns up to its end, itself alone supervised. So each response gets its `num_eos`
    end tokens, yet no later turn has "learnable padding" in its context, and no masked token sees the turn that
    follows: decoding never meets either. N and the AR loss are those of the whole conversation. Unsupervised tokens
    after the last response (a template's newline) are left out.

    Args:
        tokenizer: gives the padding, end and mask tokens.
        block_size: B, tokens per prediction block (paper §6.1: 32).
        num_eos: copies of the end token at the end of a response (1 real, the others "learnable padding" that only the
            mask loss sees). A truncated answer gets none: it is never taught to stop.
        ar_weight: a, weight of the auxiliary next-token loss; the sum of both is divided by 1 + a.
        ratio_sampler: see [`sample_masked_counts`].
        suffix_probability: see [`mask_blocks`]; 0 is the paper's layout.
        num_copies: independent prediction copies that share one memory stream (paper: 1).
        seed: the noise is a function of (seed, epoch, tokens of the document), of nothing else: it is the same for any
            batch size, order, packing, number of workers or processes, and after a resume. The epoch is 0 unless
            [`DynamicMaskingCallback`] or `set_epoch` says otherwise.

    Raises:
        ValueError: for settings out of range, and for a tokenizer without a needed token.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int = 32
    num_eos: int = 8
    ar_weight: float = 1.0
    ratio_sampler: RatioSampler = "count"
    suffix_probability: float = 0.0
    num_copies: int = 1
    seed: int = 0
    _epoch: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # In shared memory: persistent data workers see a new epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        check_settings(self)
        for name in ("mask_token_id", "eos_token_id"):
            if getattr(self.tokenizer, name) is None:
                raise ValueError(f"The tokenizer has no `{name}`, which dual-stream masking needs.")
        tokenizer = self.tokenizer
        check_mask_token_id(tokenizer.mask_token_id, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)

    @property
    def epoch(self) -> int:
        """The epoch that the noise depends on."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the noise depends on, in this process and in the data workers that it started."""
        if epoch < 0:
            raise ValueError(f"`epoch` must be at least 0, got {epoch}.")
        self._epoch.fill_(epoch)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes a batch of `B` sequences, each of `T` physical rows: the memory stream, then the prediction copies.

        Returns:
            `input_ids`, `position_ids`, `stream_ids` (-1 padding, 0 memory, c ≥ 1 prediction copy c), `block_ids`,
            `document_ids`, `targets` (-100 where no loss), all `(B, T)` int64; `loss_weights` `(B, T)` float32; and
            `labels`, the clean supervised tokens, `(B, L)` int64, which `Trainer` counts to normalise the loss.

        Raises:
            ValueError: for an example without `input_ids`, or with columns that do not fit them.
        """
        tokens, supervised = read_tokens(examples)
        pad, eos, mask = (getattr(self.tokenizer, f"{name}_token_id") for name in ("pad", "eos", "mask"))
        layout = streams.Layout(**{name: getattr(self, name) for name in streams.SETTINGS}, eos=eos, mask=mask)
        return streams.lay_out(tokens, supervised, self._noise_key, layout, eos if pad is None else pad)

    def _noise_key(self, document: torch.Tensor) -> int:
        """A 64-bit key of (seed, epoch, tokens)."""
        epoch, seed = self.epoch.to_bytes(8, "little"), str(self.seed).encode()
        tokens: Any = document.numpy().view("u1")
        digest = hashlib.blake2b(tokens, digest_size=8, salt=epoch, key=seed)
        return int.from_bytes(digest.digest(), "little", signed=True)


class DynamicMaskingCallback(TrainerCallback):
    """Masks a document anew in every epoch (RoBERTa's "dynamic masking"); without it, all epochs share their masks.

        Trainer(..., data_collator=DataCollatorForDualStreamMasking(tokenizer), callbacks=[DynamicMaskingCallback()])

    The training data get a collator of their own, whose epoch follows the trainer's, through persistent data workers
    and over a resume; evaluation keeps the trainer's collator, and so the same masks at every evaluation. Raises
    `ValueError` at the start of training under context or sequence parallelism, and for another collator.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Gives the training data their own collator."""
        from accelerate.state import AcceleratorState  # which the collator does not need

        parallelism: Any = args.parallelism_config or AcceleratorState().parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "Context and sequence parallelism cannot train a dual stream: they cut the sequence into pieces and "
                "drop the attention mask, which says who sees whom. Use data, sharded (FSDP2) or tensor parallelism."
            )
        owner: Any = getattr(train_dataloader, "base_dataloader", train_dataloader)  # inside accelerate's wrapper
        name = "collate_fn"
        if isinstance(owner.collate_fn, RemoveColumnsCollator):
            owner, name = owner.collate_fn, "data_collator"
        collator = getattr(owner, name)
        if not isinstance(collator, DataCollatorForDualStreamMasking):
            wanted = "DynamicMaskingCallback needs a `data_collator` of type DataCollatorForDualStreamMasking"
            raise ValueError(f"{wanted}, got {type(collator).__name__}.")
        self.collator = replace(collator)
        self.epoch = int(state.epoch or 0)
        setattr(owner, name, self.collator)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Sets the epoch before the first batch is drawn."""
        self.collator.set_epoch(self.epoch)
        self.epoch += 1


def check_settings(settings: Any) -> None:
    """Raises `ValueError` for a value out of range, of the collator or of a config that has the same fields."""
    for name in ("block_size", "num_eos", "num_copies"):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value}.")
    if not isinstance(settings.ar_weight, int | float) or not 0 <= settings.ar_weight < math.inf:
        raise ValueError(f"`ar_weight` must be a number of at least 0, got {settings.ar_weight}.")
    if not isinstance(settings.suffix_probability, int | float) or not 0 <= settings.suffix_probability <= 1:
        raise ValueError(f"`suffix_probability` must lie in [0, 1], got {settings.suffix_probability}.")
    if settings.ratio_sampler not in get_args(RatioSampler):
        raise ValueError(f"`ratio_sampler` must be one of {get_args(RatioSampler)}, got {settings.ratio_sampler!r}.")


def read_tokens(examples: Sequence[Mapping[str, Any]]) -> tuple[Tokens, torch.Tensor]:
    """The tokens of a batch's examples, concatenated, and which are supervised, `(S,)` bool. Raises `ValueError` for
    columns that do not fit together."""
    parts, marks = [], []
    lengths, sequences = list[int](), list[int]()
    for sequence, example in enumerate(examples):
        if "input_ids" not in example:
            raise ValueError(f"An example needs `input_ids`, got the columns {sorted(example)}.")
        input_ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)
        if input_ids.ndim != 1:
            raise ValueError(f"`input_ids` must be one sequence of tokens, got the shape {tuple(input_ids.shape)}.")
        parts.append(input_ids)
        marks.append(supervised_of(example, input_ids))
        lengths += _document_lengths(example, input_ids)
        sequences += [sequence] * (len(lengths) - len(sequences))
    return Tokens(torch.cat(parts), torch.tensor(lengths), torch.tensor(sequences)), torch.cat(marks)


def supervised_of(example: Mapping[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens of the example are supervised, `(L,)` bool. Raises `ValueError` for marks that do not fit them."""
    supervised = torch.ones_like(input_ids, dtype=torch.bool)
    for column in ("labels", "assistant_masks", "completion_mask"):
        if example.get(column) is not None:
            try:
                marks = torch.as_tensor(example[column])
            except (TypeError, ValueError, RuntimeError):
                marks = torch.empty(0, 0)
            if marks.shape != input_ids.shape:
                wanted = f"a list as long as `input_ids`, {len(input_ids)} entries"
                raise ValueError(f"`{column}` must be {wanted}, got {example[column]!r:.80}.")
            supervised &= marks != (IGNORE_INDEX if column == "labels" else 0)
            if column == "labels" and not torch.equal(marks[supervised], input_ids[supervised]):
                raise ValueError("`labels` must repeat `input_ids`, unshifted, wherever they are not -100.")
    return supervised


def _document_lengths(example: Mapping[str, Any], input_ids: torch.Tensor) -> list[int]:
    """Lengths of the documents that an example packs."""
    if example.get("seq_lengths") is not None:
        lengths = [int(length) for length in example["seq_lengths"]]
    elif example.get("document_ids") is not None:
        lengths = torch.as_tensor(example["document_ids"]).unique_consecutive(return_counts=True)[1].tolist()
    else:
        lengths = [len(input_ids)]
    if sum(lengths) != len(input_ids) or min(lengths, default=0) < 1:
        raise ValueError(
            "`input_ids` must hold at least one token, and `seq_lengths` (or the runs of `document_ids`) must be "
            f"positive and add up to their number; got {len(input_ids)} tokens and lengths {lengths}."
        )
    return lengths
