"""Running lm-evaluation-harness: checks before the model is loaded, what is missing by name, the tables at the end."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import lm_eval
import lm_eval.tasks
from lm_eval._cli import HarnessCLI
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import setup_logging, simple_parse_args_string

from ...modeling_wedlm.loading import find_checkpoint, load_tokenizer
from .model import check_request
from .statistics import show

TASKS_FOLDER = Path(__file__).parent / "tasks"
SUITES = {"paper": "wedlm_paper"}
"""`--suite`: the group of tasks, whose metadata hold the settings."""

logger = logging.getLogger("lm_eval.wedlm")  # shown as the harness shows its own

_simple_evaluate, _own_download = lm_eval.simple_evaluate, ConfigurableTask.download


def evaluate(**options: Any) -> dict[str, Any] | None:
    """`lm_eval.simple_evaluate` with checks before the model is loaded.

    - Options that cannot be honoured, and tasks whose data are missing, are refused, all of the latter at once.
    - The cache of answers is one for each `model_args`: the harness would hand out those of other settings.
    - Standard errors of single likelihoods go to their logged samples.

    Raises:
        ValueError: as above.
        OSError: for a checkpoint that cannot be read.
    """
    is_ours, arguments = options.get("model") == "wedlm", options.get("model_args") or {}
    if isinstance(arguments, str):
        options["model_args"] = arguments = simple_parse_args_string(arguments)
    if (limit := options.get("limit")) is not None and limit <= 0:
        raise ValueError(f"`--limit` must be above 0, got {limit:g}: without a document there is nothing to measure.")
    gen_kwargs = options.get("gen_kwargs") or {}
    if is_ours:
        _check_request(arguments, gen_kwargs, options.get("apply_chat_template", False))
    elif gen_kwargs.get("strategy") not in (None, "ar") and str(options.get("batch_size") or 1) != "1":
        raise ValueError(
            f"`--model {options.get('model')}` with `strategy={gen_kwargs['strategy']!r}` stops the rows of a batch "
            "together: pass `--model wedlm` or `--batch_size 1`."
        )
    manager = options.get("task_manager") or TaskManager(
        include_path=str(TASKS_FOLDER), metadata=options.get("metadata")
    )
    options |= {"task_manager": manager, "tasks": load_tasks(manager, options.get("tasks") or [])}
    if options.get("use_cache") and is_ours:
        options["use_cache"] += f"_{_fingerprint(arguments)}"
    results: dict[str, Any] | None = _simple_evaluate(**options)
    if results is not None and is_ours:
        _add_standard_errors(results)
    return results


def _check_request(model_args: Mapping[str, Any], gen_kwargs: Mapping[str, Any], is_templated: bool | str) -> None:
    """Raises `ValueError` and `OSError` for what can be refused before the model is loaded."""
    checkpoint = model_args.get("pretrained")
    if checkpoint is None:
        raise ValueError("`--model wedlm` needs a checkpoint: `--model_args pretrained=FOLDER_OR_HUB_ID`.")
    check_request(model_args, gen_kwargs)
    source = model_args.get("tokenizer") or checkpoint
    if not isinstance(source, str):
        return
    find_checkpoint(checkpoint, revision=model_args.get("revision"), subfolder=model_args.get("subfolder", ""))
    where = ("revision", "subfolder", "trust_remote_code", "gguf_file")
    tokenizer = load_tokenizer(source, **{name: model_args[name] for name in where if name in model_args})
    if is_templated and not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {source!r} has no chat template: leave `--apply_chat_template` out, or add one to "
            "the checkpoint."
        )
    if tokenizer.chat_template and not is_templated:
        logger.warning(
            "The checkpoint has a chat template, and the prompts go in without it: a model that was trained on "
            "conversations alone needs `--apply_chat_template`."
        )


def _fingerprint(model_args: Mapping[str, Any]) -> str:
    """Of the arguments and, where they name a folder, of the files in it, 12 hexadecimal digits."""
    folder = Path(str(model_args.get("pretrained")))
    files = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".json"))
    states = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    text = json.dumps([model_args, states], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _add_standard_errors(results: dict[str, Any]) -> None:
    """Move the standard errors of estimated likelihoods beside the samples that they belong to."""
    errors = results["config"].get("likelihood", {}).pop("standard_errors", [])
    by_document: dict[tuple[str, int], list[float]] = {}
    for task, document, _, error in sorted(errors):
        by_document.setdefault((task, document), []).append(error)
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            if (task, sample["doc_id"]) in by_document:
                sample["elbo_standard_errors"] = by_document[task, sample["doc_id"]]


# --- tasks --------------------------------------------------------------------------------------


def load_tasks(manager: TaskManager, names: Sequence[Any]) -> list[Any]:
    """The tasks and groups of these names, with their data.

    Raises:
        ValueError: where any of them cannot be had; it says what to fetch, for all of them.
    """
    with patch.object(ConfigurableTask, "download", _download):
        try:
            loaded = manager.load(list(names))
        except Exception as first:
            problems = []
            for name in names:
                entry = manager.task_index.get(name) if isinstance(name, str) else None
                children = load_yaml(entry.yaml_path)["task"] if entry and "group" in (entry.cfg or {}) else [name]
                for child in children:
                    part = child.get("task") or child["group"] if isinstance(child, dict) else child
                    try:
                        manager.load([part])
                    except Exception as error:
                        problems.append(f"- {part}: {_explained(error)}")
            if not problems:
                raise
            raise ValueError(
                f"{len(problems)} of the tasks cannot run (with a connection, data come by themselves):\n"
                + "\n".join(problems)
            ) from first
    inside = {name for children in loaded.get("group_map", {}).values() for name in children}
    return [entry for name, entry in {**loaded.get("groups", {}), **loaded["tasks"]}.items() if name not in inside]


def _download(task: ConfigurableTask, *args: Any, **kwargs: Any) -> None:
    """The harness' own, whose error does not say which dataset cannot be had."""
    try:
        _own_download(task, *args, **kwargs)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        where = ", ".join(repr(part) for part in (task.DATASET_PATH, task.DATASET_NAME) if part)
        access = "accept its terms on the Hub, run `hf auth login`, then " if "gated" in str(error) else ""
        raise ValueError(
            f"its dataset is missing ({_first_line(error)}). To fetch it, with a connection: {access}"
            f'python -c "import datasets; datasets.load_dataset({where})"'
        ) from error


def _explained(error: Exception) -> str:
    text = _first_line(error)
    if "Couldn't find a module script" in text:  # the harness' code tasks score by a metric of the Hub
        name = Path(text.split("module script at ")[1].split(".py")[0]).name
        return (
            f"its metric is missing. To fetch it, with a connection: "
            f"HF_ALLOW_CODE_EVAL=1 python -c \"import evaluate; evaluate.load('{name}')\""
        )
    if "HF_ALLOW_CODE_EVAL" in str(error):
        return "it runs code that the model wrote: set HF_ALLOW_CODE_EVAL=1 and pass --confirm_run_unsafe_code."
    return text


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


# --- the command --------------------------------------------------------------------------------


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
    found: list[dict[str, Any] | None] = []

    def checked(**options: Any) -> dict[str, Any] | None:
        found.append(evaluate(**options))
        return found[-1]

    # The harness reads thousands of files to find its own tasks, which takes longer than wedlm-nano's answers.
    ours = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False).all_tasks
    all_ours = {*(getattr(arguments, "tasks", None) or ["?"])} <= {*ours} - {*SUITES.values()}
    manager = functools.partial(TaskManager, include_defaults=not all_ours)
    try:
        # Its command line takes no other evaluator.
        with patch.object(lm_eval, "simple_evaluate", checked), patch.object(lm_eval.tasks, "TaskManager", manager):
            cli.execute(arguments)
    except (ValueError, OSError) as error:
        if logging.getLogger("lm_eval").isEnabledFor(logging.DEBUG):
            raise
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        kept = "answers so far are in the cache: the same command goes on from there, except for sampled answers"
        lost = "answers so far are lost: with `--use_cache PATH` the same command would go on from there"
        print(f"Interrupted; {kept if arguments.use_cache else lost}.", file=sys.stderr)
        sys.exit(130)
    for results in filter(None, found):
        show(results)


def _apply_suite(arguments: Any, suite: str) -> None:
    """Put a suite's tasks and settings where the arguments leave them open."""
    settings = load_yaml(TASKS_FOLDER / f"{suite}.yaml")["metadata"]
    arguments.tasks = arguments.tasks or [SUITES[suite]]
    arguments.gen_kwargs = settings["gen_kwargs"] | (arguments.gen_kwargs or {})
    if arguments.model == "wedlm":  # another model decodes in its own way
        given = arguments.model_args or {}
        arguments.model_args = given if given.get("strategy") == "ar" else settings["model_args"] | given
