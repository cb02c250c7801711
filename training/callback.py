"""New masks every epoch under any `transformers.Trainer`."""

from dataclasses import replace
from typing import Any

from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import RemoveColumnsCollator

from .collator import DataCollatorForDualStreamMasking


class DynamicMaskingCallback(TrainerCallback):
    """Masks a document anew in every epoch (RoBERTa's "dynamic masking"); without it, all epochs share their masks.

        Trainer(..., data_collator=DataCollatorForDualStreamMasking(tokenizer), callbacks=[DynamicMaskingCallback()])

    The training data get a collator of their own, whose epoch follows the trainer's, through persistent data workers
    and over a resume; evaluation keeps the trainer's collator, and so the same masks at every evaluation. Raises
    `ValueError` at the start of training under context or sequence parallelism, and for another collator.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Gives the training data their own collator."""
        refuse_context_parallelism(args.parallelism_config or AcceleratorState().parallelism_config)
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

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the epoch before the first batch is drawn."""
        self.collator.set_epoch(self.epoch)
        self.epoch += 1


def refuse_context_parallelism(parallelism_config: Any) -> None:
    """Raises `ValueError` where accelerate's `ParallelismConfig` asks for context or sequence parallelism."""
    if parallelism_config is not None and (parallelism_config.cp_enabled or parallelism_config.sp_enabled):
        raise ValueError(
            "Context and sequence parallelism cannot train a dual stream: they cut the sequence into pieces and drop "
            "the attention mask, which says who sees whom. Use data, sharded (FSDP2) or tensor parallelism."
        )
