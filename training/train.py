"""Fine-tuning from a recipe: a YAML file of settings, each of which the command line can override.

wedlm train examples/recipes/sft.yaml --model_name_or_path Qwen/Qwen3-0.6B --dataset chats.jsonl
accelerate launch -m wedlm_hf.training.train examples/recipes/lora.yaml --learning_rate 1e-4
"""

import logging
import math
import re
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from transformers import ProgressCallback
from transformers.integrations import get_reporting_integration_callbacks
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from .cpu import cpu_note
from .metrics import LEAST_ANSWERS, masks_are_ready
from .model import check_source
from .progress import RunProgress, draw_curve
from .rows import load
from .saving import newest_complete_checkpoint, only_writer
from .sft_config import WeDLMSFTConfig, check_range, setting
from .sft_trainer import WeDLMSFTTrainer

logger = logging.getLogger(__name__)

TRAIN_ON = 2.0  # tokens per forward below which masks have hardly begun

# Settings that `--help` shows, beside our own.
_INHERITED = """
    model_name_or_path attn_implementation use_peft lora_r lora_alpha lora_target_modules use_dora load_in_4bit
    output_dir per_device_train_batch_size per_device_eval_batch_size max_steps eval_strategy eval_steps logging_steps
    save_steps save_total_limit resume_from_checkpoint packing chat_template_path eos_token report_to seed bf16
    gradient_checkpointing push_to_hub help h
""".split()

_EXPECTED = (TypeError, FloatingPointError, SafetensorError, TemplateError, torch.OutOfMemoryError)


@dataclass
class DataConfig:
    """Where the examples come from."""

    dataset: str = field(
        metadata={"help": "A .jsonl, .json, .csv or .parquet file, or a folder or Hub id that `datasets` reads."}
    )
    dataset_config: str | None = setting(None, "Configuration of a Hub id.")
    dataset_split: str = setting("train", "Split of a folder or Hub id.")
    streaming: bool = setting(False, "Read while training; needs `max_steps`.")
    eval_dataset: str | None = setting(None, "Like `dataset`, to evaluate on.")
    eval_split: str = setting("test", "Split of `eval_dataset`.")
    eval_share: float = setting(0.0, "Share of `dataset` to keep for evaluation where there is no `eval_dataset`.")

    def __post_init__(self) -> None:
        for name in ("dataset", "eval_dataset"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(f"`{name}` must be a file, a folder or a Hub id, got an empty text.")
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"`eval_share` must lie in [0, 1), got {self.eval_share}.")
        if self.eval_share and self.streaming and self.eval_dataset is None:
            reason = "no share of a stream can be kept. Pass an `eval_dataset` to evaluate on"
            raise ValueError(f"`eval_share` must be 0 with `streaming`, got {self.eval_share}: {reason}.")


def run(
    data: DataConfig, args: WeDLMSFTConfig, model: ModelConfig, report: Callable[[dict[str, Any]], None] | None = None
) -> WeDLMSFTTrainer:
    """Loads data and model, trains, evaluates, saves; returns the trainer. The [`results`] go to `report`; by default
    they are printed as a table. Raises `OSError` for files that cannot be read or written, and while another run
    writes into the output folder; `ValueError` for settings or data that cannot be trained on; `FloatingPointError`
    for a loss that is not finite."""
    if model.model_name_or_path is None:
        raise ValueError("`model_name_or_path` is required: a folder or Hub id of a checkpoint.")
    if not args.output_dir or Path(args.output_dir).is_file():
        raise ValueError(f"`output_dir` must be a folder, got {args.output_dir!r}.")
    if data.streaming and args.max_steps < 1:
        raise ValueError(f"`streaming` needs `max_steps`: a stream has no length. Got {args.max_steps}.")
    if model.use_peft:
        for number, least, below in (("lora_r", 1, math.inf), ("lora_alpha", 1, math.inf), ("lora_dropout", 0, 1)):
            check_range(model, number, least, below)
    output, is_writer = Path(args.output_dir), args.process_index == 0
    with only_writer(output, is_writer and output.exists()):
        pass  # refused before any work
    _check_reports(args)
    given = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    given["revision"] = None if model.model_revision == "main" else model.model_revision
    settings = {name: value for name, value in given.items() if value is not None}
    check_source(model.model_name_or_path, settings.get("revision"), is_base=model.use_peft)
    train_dataset, eval_dataset = _datasets(data, args.seed)
    args.model_init_kwargs = settings | (args.model_init_kwargs or {})  # type: ignore[operator]
    if model.use_peft and model.lora_target_modules is None:
        model.lora_target_modules = "all-linear"  # type: ignore[assignment]
    if isinstance(name := model.lora_target_modules, str) and re.fullmatch(r"[\w.]+", name):
        model.lora_target_modules = [name]  # TRL unpacks a list of one, and PEFT would take it for a whole path
    configs: Any = {"peft_config": get_peft_config(model), "quantization_config": get_quantization_config(model)}
    trainer = WeDLMSFTTrainer(model.model_name_or_path, args, train_dataset, eval_dataset, **configs)
    console = Console(stderr=True)
    progress = RunProgress(trainer, console)
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)  # whose bar does not say what the losses are
        if is_writer:
            trainer.add_callback(progress)
            if args.use_cpu:
                console.print(cpu_note(bool(args.bf16)), highlight=False)
    with only_writer(output, is_writer):
        try:
            trainer.train(_resume_from(args))
            metrics = trainer.evaluate() if eval_dataset is not None else {}
        except KeyboardInterrupt:
            progress.close()
            if is_writer:
                console.print(_stopped(args), highlight=False, soft_wrap=True)
            raise
        finally:
            progress.close()
        trainer.save_model()
        trainer.save_state()
        curve = draw_curve(trainer.state.log_history, output) if is_writer else None
    if trainer.is_world_process_zero():
        found = results(trainer, metrics) | {"curve": curve and str(curve)}
        (report or summarize)(found)
    if args.push_to_hub:
        trainer.push_to_hub()
    return trainer


def _check_reports(args: WeDLMSFTConfig) -> None:
    """Raises `ValueError` for a `report_to` whose package is not installed, before any work."""
    for kind in get_reporting_integration_callbacks(args.report_to):
        try:
            kind()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"`report_to` {args.report_to}: {error} Or pass `--report_to none`.") from None


def _stopped(args: WeDLMSFTConfig) -> str:
    """What a stopped run leaves."""
    try:
        newest = newest_complete_checkpoint(Path(str(args.output_dir))).name
    except ValueError:
        return f"No checkpoint was saved yet (`--save_steps` is {args.save_steps:g}): the run begins anew."
    return f"`--resume_from_checkpoint auto` goes on from {newest}."


def _datasets(data: DataConfig, seed: int) -> tuple[Any, Any]:
    """What to train on, and what to evaluate on, if anything."""
    train = load(data.dataset, data.dataset_split, config_name=data.dataset_config, streaming=data.streaming)
    if data.eval_dataset is not None:
        return train, load(data.eval_dataset, data.eval_split)
    if data.eval_share and len(train) < 2:
        logger.warning("The only example of %r is trained on, and none is left to evaluate on.", data.dataset)
    elif data.eval_share:
        parts = train.train_test_split(test_size=data.eval_share, seed=seed)
        return parts["train"], parts["test"]
    return train, None


def _resume_from(args: WeDLMSFTConfig) -> str | bool | None:
    """`resume_from_checkpoint`: a folder, `true` (the newest complete one), or `auto` (that, if there is any)."""
    wanted = str(args.resume_from_checkpoint or "").lower()
    if wanted == "auto":
        try:
            return str(newest_complete_checkpoint(Path(str(args.output_dir))))
        except ValueError:
            return None
    if wanted in ("true", "false", ""):
        return wanted == "true" or None
    return args.resume_from_checkpoint


def results(trainer: WeDLMSFTTrainer, metrics: dict[str, float]) -> dict[str, Any]:
    """What was trained on what, and what came out; `metrics` of the evaluation, empty where there was none."""
    weights = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
    logs: dict[str, Any] = {}
    for entry in trainer.state.log_history:
        logs |= entry
    names = ("loss", "ar_nll", "mask_nll", "tokens_per_second", "supervised_tokens_per_second")
    evaluated = {name: value for name, value in metrics.items() if isinstance(value, float)}
    return {
        "output_dir": str(trainer.args.output_dir),
        "data": [str(report) for report in trainer.data_reports.values()],
        "weights": sum(count for count, _ in weights),
        "weights_trained": sum(count for count, is_trained in weights if is_trained),
        "steps": trainer.state.global_step,
        "last": {name: logs[name] for name in names if name in logs},
        "evaluation": {name: value for name, value in evaluated.items() if name.startswith("eval_")},
        "masks": verdict(metrics, is_adapter=hasattr(trainer.model, "peft_config")),
        "base": str(trainer.model.config.name_or_path) if hasattr(trainer.model, "peft_config") else None,
    }


def verdict(metrics: dict[str, float], *, is_adapter: bool = False) -> str:
    """How far the masks are, and what follows from that."""
    if "eval_tokens_per_forward" not in metrics:
        return (
            "How far the masks are was not measured: keep some examples by `--eval_share`, or pass `--eval_dataset`."
        )
    tokens = metrics["eval_tokens_per_forward"]
    about = f"{tokens:.1f} tokens per forward on held-out prompts"
    if masks_are_ready(metrics, "eval_"):
        free = metrics["eval_unverified_tokens_per_forward"]
        how = "by which commands now decode"
        if is_adapter:
            how = "which `--verification none` asks for: an adapter cannot say that its masks are ready"
        return f"The masks are ready: {about}, {free:.1f} without verification, {how}."
    same = f"{metrics['eval_unverified_as_ar']:.0%} of the answers without verification are AR's"
    if (count := metrics["eval_decoded_prompts"]) < LEAST_ANSWERS:
        more = "raise `--eval_share` or `--eval_decoding_samples`"
        same += f" (of {count:.0f} answers; {LEAST_ANSWERS} would tell whether masks are ready: {more})"
    advice = "train on: the masks learn later than the rest"
    if tokens >= TRAIN_ON:
        advice = "more training makes it faster, and so does a mask adapter on it (`wedlm adapt`)"
    return f"{about[:1].upper()}{about[1:]}; {advice}. {same}, so commands verify every token."


def summarize(results: dict[str, Any]) -> None:
    """Prints [`results`] as a table, and how to use what was trained."""
    table = Table("", "", title=f"Saved in {results['output_dir']}", show_header=False)
    for report in results["data"]:
        table.add_row("data", report)
    table.add_row("weights trained", f"{results['weights_trained']:,} of {results['weights']:,}")
    table.add_row("steps", str(results["steps"]))
    last = {f"last {name}": value for name, value in results["last"].items()}
    for name, value in (last | results["evaluation"]).items():
        table.add_row(name, f"{value:,.4g}")
    console = Console()
    console.print(table)
    folder = results["output_dir"]
    if results.get("curve"):
        console.print(f"Curves: {results['curve']}", highlight=False, soft_wrap=True)
    if results.get("masks"):
        console.print(results["masks"], highlight=False, soft_wrap=True)
    model = ("--model", folder) if results.get("base") is None else ("--model", results["base"], "--adapter", folder)
    command = shlex.join(("wedlm", "generate", "YOUR QUESTION", *model))
    console.print(f"To try it: {command}", highlight=False, soft_wrap=True)


class _Parser(TrlParser):
    """Raises what argparse would print below two screens of usage, and shows the settings that most runs need."""

    shows_all = True
    common = {*_INHERITED, *WeDLMSFTConfig.__annotations__, *DataConfig.__annotations__}

    def add_argument(self, *names: Any, **how: Any) -> Any:
        """The parent's; a setting that is not shown has no help."""
        if not self.shows_all and not {name.lstrip("-") for name in names} & self.common:
            how["help"] = SUPPRESS
        return super().add_argument(*names, **how)

    def error(self, message: str) -> NoReturn:
        """Raises `ValueError` with the message."""
        raise ValueError(f"{message}. `wedlm train --help` lists the settings, `--help_all` all of them.")


def _parse(
    words: Sequence[str], description: str | None = None, epilog: str | None = None
) -> tuple[DataConfig, WeDLMSFTConfig, ModelConfig]:
    """Settings of the recipe and of the command line. Raises `ValueError` for what cannot be read as such."""
    recipe = [] if not words or words[0].startswith("-") else ["--config"]
    kinds: Any = (DataConfig, WeDLMSFTConfig, ModelConfig)
    usage = "wedlm train [RECIPE.yaml] [--SETTING VALUE …]"
    _Parser.shows_all = "--help_all" in words
    words = ["--help" if word == "--help_all" else word for word in words]
    epilog = f"{epilog or ''} --help_all shows the settings of TRL's SFTConfig and ModelConfig, too."
    parser = _Parser(kinds, usage=usage, allow_abbrev=False, description=description, epilog=epilog)
    try:
        data, args, model = parser.parse_args_and_config([*recipe, *words])
    except OSError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"The recipe is not UTF-8: {error}.") from None
    except Exception as error:  # PyYAML's, and what settings of a wrong type run into
        if "keywords must be strings" in str(error):
            wrong = "a number, a date or yes, no, on, off before a colon"
            raise ValueError(f"The name of a setting must be text, but the recipe has {wrong}.") from None
        raise ValueError(str(error)) from error
    return data, args, model


def main(
    arguments: Sequence[str] | None = None,
    *,
    description: str | None = None,
    epilog: str | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Command line: `[recipe.yaml] [--setting value …]`. `wedlm train` makes one line of what it raises: `OSError` as
    [`run`], and `ValueError` for whatever is wrong with the request or with the machine, not with this program.
    `description` and `epilog` are the text of `--help` above the settings, and its last line; `report` as in [`run`].
    """
    try:
        run(*_parse(sys.argv[1:] if arguments is None else arguments, description, epilog), report)
    except _EXPECTED as error:
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    main()
