"""Running lm-evaluation-harness with our tasks, and tokens per forward in its table of results."""

import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
from lm_eval._cli import HarnessCLI
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import setup_logging, simple_parse_args_string

from ...adapters import load_mask_adapter  # noqa: F401  # so that `--model hf` takes a mask adapter as `peft=`

TASKS_FOLDER = Path(__file__).parent / "tasks"
SUITES = {"paper": "wedlm_paper"}  # `--suite`: the group of tasks, whose metadata hold the settings

_simple_evaluate = lm_eval.simple_evaluate


def evaluate(**options: Any) -> dict[str, Any] | None:
    """`lm_eval.simple_evaluate` with our tasks, tokens per forward among the results, and a cache of answers for each
    set of `model_args`: the harness would hand out those of other settings. Raises `ValueError` for batches of
    `--model hf` with our decoding, and for what makes several processes wait for each other for ever."""
    is_ours, arguments = options.get("model") == "wedlm", options.get("model_args") or {}
    if isinstance(arguments, str):
        arguments = simple_parse_args_string(arguments)
    strategy = (options.get("gen_kwargs") or {}).get("strategy", "ar")
    if not is_ours and strategy != "ar" and str(options.get("batch_size") or 1) != "1":
        raise ValueError(
            f"`--model {options.get('model')}` with `strategy={strategy!r}` stops the sequences of a batch together: "
            "pass `--model wedlm` or `--batch_size 1`."
        )
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1 and is_ours:
        # They agree on sizes in the middle of a task. One whose answers are all cached, or that has no prompt of the
        # task, does not take part.
        for option, is_given, instead in (
            ("use_cache", bool(options.get("use_cache")), "leave it out, or run one process"),
            ("batch_size", not str(options.get("batch_size") or 1).isdigit(), "pass a number"),
        ):
            if is_given:
                how = f"`--{option} {options[option]}` on {processes} processes can hang"
                raise ValueError(f"{how}, since some may have nothing left to do: {instead}.")
    if options.get("task_manager") is None:
        options["task_manager"] = TaskManager(include_path=str(TASKS_FOLDER), metadata=options.get("metadata"))
    if is_ours and options.get("use_cache"):
        folder = Path(str(arguments.get("pretrained")))
        files = [(file.name, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))]
        options["use_cache"] += f"_{hashlib.sha256(repr((arguments, files)).encode()).hexdigest()[:12]}"
    results: dict[str, Any] | None = _simple_evaluate(**options)
    if results is not None and is_ours:
        for task, counts in results["config"]["decoding_statistics"].items():
            results["results"][task]["tokens_per_forward,none"] = counts["tokens_per_forward"]
    return results


def main() -> None:
    """Run the harness' command line."""
    setup_logging()
    cli = HarnessCLI()
    cli._subparsers.choices["run"].add_argument(
        "--suite",
        choices=sorted(SUITES),
        help="Published benchmarks with their shots and decoding settings; other arguments go first. "
        "Generated code runs in HumanEval and MBPP: HF_ALLOW_CODE_EVAL=1 and --confirm_run_unsafe_code.",
    )
    arguments = cli.parse_args()
    if hasattr(arguments, "include_path"):
        arguments.include_path = [str(TASKS_FOLDER), *([arguments.include_path] if arguments.include_path else [])]
    if suite := vars(arguments).pop("suite", None):
        _apply_suite(arguments, suite)
    try:
        with patch.object(lm_eval, "simple_evaluate", evaluate):  # its command line takes no other evaluator
            cli.execute(arguments)
    except (ValueError, OSError) as error:
        if logging.getLogger("lm_eval").isEnabledFor(logging.DEBUG):
            raise
        sys.exit(f"{type(error).__name__}: {error}")


def _apply_suite(arguments: Any, suite: str) -> None:
    """Put a suite's tasks and settings where the arguments leave them open."""
    settings = load_yaml(TASKS_FOLDER / f"{suite}.yaml")["metadata"]
    arguments.tasks = arguments.tasks or [SUITES[suite]]
    arguments.gen_kwargs = settings["gen_kwargs"] | (arguments.gen_kwargs or {})
    if arguments.model == "wedlm":  # another model decodes in its own way
        given = arguments.model_args or {}
        arguments.model_args = given if given.get("strategy") == "ar" else settings["model_args"] | given
