"""Supervised fine-tuning, instruction tuning and adaptation from AR on TRL's `SFTTrainer`."""

import copy
import json
import math
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer, pack_dataset
from trl.models.utils import unwrap_model_for_generation

from ..checkpoints.card import CARD_NAME, is_written_by_a_person, provenance, read_card, render, write_card
from ..checkpoints.files import write_text
from ..checkpoints.merge import older_names
from ..generation.threads import sleeping_beside_others
from ..modeling_wedlm.hub import remove_hub_files
from ..modeling_wedlm.modeling_wedlm import WeDLMForCausalLM
from .collator import DataCollatorForDualStreamMasking, DynamicMaskingCallback
from .examples import Preparation, first_example, reading_of
from .metrics import decode, divide, evaluation_sums, masks_are_ready, prompt_of
from .model import prepare_model, prepare_quantized
from .saving import ResumableTrainer, check_same_adapter
from .sft_config import CHATML, WeDLMSFTConfig
from .streams import IGNORE_INDEX, SETTINGS

COLLATOR_FIELDS = (*SETTINGS, "seed")
# Of evaluation: a bound on −log p that any two runs can be compared by, on the tokens that the AR loss is of.
_EVALUATION: dict[str, Any] = {
    "seed": 0, "ratio_sampler": "stratified", "suffix_probability": 0.0, "num_eos": 1, "ar_weight": 1.0,
}  # fmt: skip


class _EveryPassSteps(TrainerCallback):
    """Ends a training that would read a stream again and again without a step."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            raise ValueError(
                "No step was made in a pass over all of the train dataset: it has fewer batches than "
                f"`gradient_accumulation_steps`, {args.gradient_accumulation_steps} for each process, of "
                f"`per_device_train_batch_size`, {args.per_device_train_batch_size}. Lower them, or read the data "
                "without `streaming`."
            )


class WeDLMSFTTrainer(ResumableTrainer, SFTTrainer):
    """[`trl.SFTTrainer`] with dual-stream batches and the dual-stream loss; identical to it except that

    1. it collates with [`DataCollatorForDualStreamMasking`], masks anew every epoch, and takes the model's own loss;
    2. chat data supervise all assistant turns unless told otherwise, and packed documents never see each other;
    3. every example that is shortened or dropped is counted: see `data_reports`, and the log;
    4. evaluation sums over tokens and processes and divides once, with fixed uniform masks whatever training uses:
       `eval_ar_nll` and `eval_elbo_nll` (nats per supervised token, the block-wise bound on −log p), `eval_loss` of
       both, `eval_mask_nll_ratio_*` by masked fraction (25: γ ≤ ¼), `eval_accuracy_offset_*` by offset in the block,
       and what real decoding of a few prompts says (see [`decode`]): `eval_tokens_per_forward`, and whether the masks
       are ready to decode without verification, which the saved generation config tells commands (`masks_ready`) if
       each evaluation dataset says so;
    5. with a `peft_config`, the mask token's embedding row is trained too where it is new (see [`mask_row_is_new`]);
    6. checkpoints and models are saved whole or not at all (see [`ResumableTrainer`]), `resume_from_checkpoint=True`
       takes the newest *complete* checkpoint, and a loss that is not finite ends the training before it reaches the
       weights.

    Args:
        model: a WeDLM model (or PEFT model of one), or the folder or Hub id of a WeDLM checkpoint, or of a Qwen2,
            Qwen2.5 or Qwen3 one, which is then converted. Loaded in float32 unless `args.model_init_kwargs` say
            otherwise: at small learning rates most bf16 weights never move.
        args: settings; default: those of [`WeDLMSFTConfig`].
        train_dataset: examples with `messages` (or `conversations`), `prompt` and `completion`, `text`, or
            `input_ids`; of a map or of an iterable dataset.
        eval_dataset: likewise, or a dictionary of datasets.
        processing_class: the tokenizer; default: the model's.
        peft_config, quantization_config, callbacks, optimizers, formatting_func: as in [`trl.SFTTrainer`].

    Raises:
        TypeError: for `args` or a `processing_class` of another kind.
        ValueError: before any training, for data or a tokenizer that cannot be trained on.
        FloatingPointError: during training, for a loss that is not finite.
    """

    _tag_names = ["trl", "sft", "wedlm"]
    _name = "WeDLM SFT"
    loss_is_scaled_for_ga: bool | None = True  # type: ignore[assignment]  # the parent states None alone
    args: WeDLMSFTConfig
    model: Any

    def __init__(
        self,
        model: str | PreTrainedModel | Any,
        args: WeDLMSFTConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        quantization_config: Any = None,
        formatting_func: Any = None,
    ):
        args = WeDLMSFTConfig("wedlm-sft") if args is None else args
        if not isinstance(args, WeDLMSFTConfig):
            raise TypeError(f"`args` must be a WeDLMSFTConfig, got {type(args).__name__}.")
        if not isinstance(processing_class, PreTrainedTokenizerBase | None):
            kind = type(processing_class).__name__
            raise TypeError(f"`processing_class` must be a tokenizer of transformers, or None, got {kind}.")
        if train_dataset is None:
            raise ValueError("`train_dataset` is required.")
        self._preparation = Preparation(args, formatting_func)
        self.data_reports = self._preparation.reports
        datasets = {"train": train_dataset, **_by_name(eval_dataset)}
        readings = [reading_of(dataset, name, args, formatting_func) for name, dataset in datasets.items()]
        needs_template = any(reading.is_chat for reading in readings)
        model, processing_class, peft_config = prepare_model(
            model, processing_class, args, peft_config, quantization_config, needs_template=needs_template
        )
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        # What the parent would do on its own view of the first example, or warn of, is done here.
        parents = copy.copy(args)
        parents.assistant_only_loss, parents.model_init_kwargs = False, None
        if args.chat_template_path == str(CHATML):
            parents.chat_template_path = None
        if pictures := {"image", "images"} & set(first_example(train_dataset, "train")):  # all of them empty
            train_dataset = train_dataset.remove_columns(sorted(pictures))
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        rest = {"optimizers": optimizers, "peft_config": peft_config, "formatting_func": formatting_func}
        ours = [DynamicMaskingCallback(), _EveryPassSteps()]
        with older_names():
            super().__init__(model, parents, callbacks=[*ours, *(callbacks or [])], **data, **rest)
        self.args.assistant_only_loss = args.assistant_only_loss
        prepare_quantized(self.model)
        # Only now: with `packing=True` the parent refuses every collator but its own.
        settings = {name: getattr(args, name) for name in COLLATOR_FIELDS}
        self.data_collator = collator = DataCollatorForDualStreamMasking(processing_class, **settings)
        self._eval_collator = replace(collator, **_EVALUATION)
        self._eval_sums: Counter[str] = Counter()
        self._ready: dict[tuple[int, str], bool] = {}  # by the step, and the dataset's prefix
        self._since_log: dict[str, torch.Tensor | float] = {}
        self._log_time = time.perf_counter()

    # Data.

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """Tokenises, shortens, drops and counts, then packs."""
        if packing and args.max_length is None:
            raise ValueError("`packing=True` needs a `max_length`, got None.")
        dataset = self._preparation.tokenize(
            dataset, dataset_name, processing_class, self._vocab_size, self._positions
        )
        if "seq_lengths" in dataset.column_names:  # packed by its owner
            return dataset
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        if packing:
            dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
            dataset = dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset
        return dataset

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The parent's; evaluation has fixed uniform masks."""
        training_collator = self.data_collator
        if not kwargs.get("is_training"):
            self.data_collator = self._eval_collator
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = training_collator

    # Loss.

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss; counts what `log` reports."""
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        if self.model.training:
            memory = inputs["stream_ids"] == 0
            learnt = inputs["targets"] != IGNORE_INDEX
            token_nll = outputs.token_nll.detach()
            sums = {
                "tokens": memory.sum(),
                "supervised_tokens": (inputs["labels"] != IGNORE_INDEX).sum(),
                "ar_nll": (token_nll * memory).sum(),
                "ar_nll/count": (learnt & memory).sum(),
                "mask_nll": (token_nll * ~memory).sum(),
                "mask_nll/count": (learnt & ~memory).sum(),
            }
            for name, value in sums.items():
                self._since_log[name] = self._since_log.get(name, 0.0) + value.double()
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The parent's. Raises `FloatingPointError` for a loss that is not finite; weights and checkpoints are as they
        were."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss of step {self.state.global_step + 1} is {loss.item()}: training ends before it reaches "
                f"the weights. The checkpoints in {self.args.output_dir!r} are as they were; a smaller "
                "`learning_rate` or `max_grad_norm`, or bf16 in place of fp16, usually helps."
            )
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The parent's; a gradient that is not finite ends the training too (fp16's scaler skips such steps)."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if grad_norm is not None and self.accelerator.scaler is None and not math.isfinite(float(grad_norm)):
            step = f"The gradient norm of step {self.state.global_step + 1} is {float(grad_norm)}"
            raise FloatingPointError(f"{step}: training ends before it reaches the weights.")
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The parent's, with the throughput and both parts of the loss since the last training log: clean tokens (the
        memory stream) of all processes a second, and those with a loss; `ar_nll` and `mask_nll`, means over tokens in
        nats, `mask_nll` without its weights."""
        if "loss" in logs and self._since_log:
            seconds, self._log_time = time.perf_counter() - self._log_time, time.perf_counter()
            names = list(self._since_log)
            local = torch.stack([torch.as_tensor(self._since_log[name]) for name in names])
            # Tensor-parallel processes hold the same batch.
            totals = self.accelerator.reduce(local, "sum") / self.get_tp_size()
            sums = dict(zip(names, totals.tolist(), strict=True))
            self._since_log.clear()
            for name in ("tokens", "supervised_tokens"):
                logs[f"{name}_per_second"] = sums.pop(name) / seconds
            logs |= divide(sums)
        super().log(logs, start_time)

    # Evaluation.

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss alone; adds to the sums that `evaluation_loop` divides."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        sums = evaluation_sums(inputs, outputs, self._eval_collator)
        # Gathered by sequence: those that only fill up the last batch of a process are left out again.
        totals = self.accelerator.gather_for_metrics(torch.stack(list(sums.values()), dim=-1)).sum(0).tolist()
        for name, total in zip(sums, totals, strict=True):
            self._eval_sums[name] += total
        return outputs.loss.detach(), None, None

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """The metrics of `evaluate` for a dataset of examples, as `train_dataset` is one. There are no predictions."""
        packing = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
        prepared = self._prepare_dataset(test_dataset, self.processing_class, self.args, packing, None, "test")
        return super().predict(prepared, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The parent's, with the metrics that the class docstring lists."""
        prefix = kwargs.get("metric_key_prefix", "eval")
        self._eval_sums.clear()
        begin = time.perf_counter()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        metrics = divide(self._eval_sums)
        weight = self.args.ar_weight
        metrics["loss"] = (metrics["elbo_nll"] + weight * metrics["ar_nll"]) / (1 + weight)
        metrics |= self._decode(dataloader.dataset, prefix)
        reported = {**(output.metrics or {}), **{f"{prefix}_{name}": value for name, value in metrics.items()}}
        self._log_time += time.perf_counter() - begin  # no part of the training's throughput
        return output._replace(metrics=reported)

    def _decode(self, dataset: Any, prefix: str) -> dict[str, float]:
        """What [`decode`] says of a few prompts of the dataset. Every process answers all of them, since
        sharded weights need every process in every forward: a stream, of which each reads a part, is not decoded."""
        if isinstance(dataset, TorchIterableDataset) and self.accelerator.num_processes > 1:
            return {}
        prompts = list(filter(None, map(prompt_of, islice(iter(dataset), self.args.eval_decoding_samples))))
        if not prompts or not self.args.eval_decoding_tokens:
            return {}
        title = "Decoding held-out prompts" if self.is_world_process_zero() and not self.args.disable_tqdm else ""
        with older_names():
            unwrapped = unwrap_model_for_generation(self.model_wrapped, self.accelerator)
            with unwrapped as model, self.accelerator.autocast():
                metrics = decode(model, prompts, self.args.eval_decoding_tokens, self.accelerator.device, title)
        # What commands read: without it, they verify. Of several datasets, each must say so.
        step = self.state.global_step
        self._ready = {key: ready for key, ready in self._ready.items() if key[0] == step}
        self._ready[step, prefix] = masks_are_ready(metrics)
        self.model.generation_config.masks_ready = all(self._ready.values())
        return metrics

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The parent's. A checkpoint of a run is loaded where this package is, and goes without the code and the card
        that travel with a model, unless it is pushed."""
        file = Path(output_dir or str(self.args.output_dir), CARD_NAME)
        card = read_card(file.parent)
        is_ours = not is_written_by_a_person(card)
        if self.args.should_save and is_ours:
            file.unlink(missing_ok=True)  # else PEFT adds to it what it knows, such as paths of this machine
        super().save_model(output_dir, _internal_call)
        if not self.args.should_save:
            return
        if _internal_call and not self.args.push_to_hub:
            remove_hub_files(file.parent)
        if _internal_call and is_ours and not self.args.push_to_hub:
            file.unlink(missing_ok=True)
        elif is_ours:
            self._write_card(file.parent)
        else:
            write_text(file, str(card))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, by ours."""
        if self.is_world_process_zero():
            self._write_card(Path(str(self.args.output_dir)))

    def _write_card(self, folder: Path) -> None:
        """Writes the card of an adapter, unless a person wrote one there. A model's is written where it is saved."""
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, WeDLMForCausalLM):
            return
        name = str(model.config.name_or_path)
        base, inherited = provenance(name)
        config = next(iter(model.peft_config.values()))
        place = name if base == name else Path(name).name
        tokenizer: Any = self.processing_class
        counts = [str(report) for report in self.data_reports.values()]
        card = render(
            Path(__file__).with_name("adapter_card.jinja"),
            {"base_model": base, "library_name": "peft", "pipeline_tag": "text-generation"} | inherited,
            title=folder.absolute().name,
            kind={"LORA": "LoRA"}.get(config.peft_type.value, config.peft_type.value),
            base=base,
            name=place,
            base_place=json.dumps(place),
            place=json.dumps(self.args.hub_model_id or "."),
            is_chat=tokenizer.chat_template is not None,
            facts=[*counts, f"{self.state.global_step:,} steps"],
        )
        write_card(folder, card)

    @sleeping_beside_others()
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The parent's; reports what the streams have lost."""
        self._log_time = time.perf_counter()
        with older_names():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._preparation.report_streams()
        return output

    def check_checkpoint(self, checkpoint: Path) -> None:
        """The parent's, which also compares the adapters."""
        super().check_checkpoint(checkpoint)
        check_same_adapter(checkpoint, getattr(self.model, "peft_config", {}))


def _by_name(eval_dataset: Any) -> dict[str, Any]:
    """Datasets to evaluate on, by the names that their metrics have."""
    if isinstance(eval_dataset, dict):
        return eval_dataset
    return {} if eval_dataset is None else {"eval": eval_dataset}
