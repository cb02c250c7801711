"""lm-evaluation-harness with WeDLM: the model `wedlm`, the built-in tasks, the suite of the paper's benchmarks.

    python -m wedlm_hf.eval run --model wedlm --model_args pretrained=PATH,strategy=wedlm --tasks wedlm_nano

It is the harness' own command line, with checks before the model is loaded and the statistics of decoding after the
tables. From Python, importing this module registers the model: `lm_eval.simple_evaluate(model="wedlm", …)`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import datasets
import lm_eval
import lm_eval.tasks
import torch
from lm_eval._cli import HarnessCLI
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import setup_logging
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from ..generation.settings_wedlm import SETTING_NAMES, WeDLMGenerationSettings
from ..modeling_wedlm import WeDLMConfig, WeDLMForCausalLM
from .likelihood import block_elbo
from .measure import Score, now, pooled

TASKS_FOLDER = Path(__file__).parent / "harness_tasks"
SUITES = {"paper": "wedlm_paper"}
"""`--suite`: the group of tasks, whose metadata hold the settings."""

Likelihood = Literal["ar", "elbo"]

logger = logging.getLogger("lm_eval.wedlm")  # shown as the harness shows its own

_DECODING = tuple(name for name in SETTING_NAMES if name != "output_trace")
_STATISTICS = (
    *("prompts", "new_tokens", "forwards", "token_instances", "seconds"),
    *("tokens_per_forward", "prefix_cacheability", "tokens_per_second"),
)
# What transformers takes besides the named parameters of `from_pretrained` and the fields of a config.
_LOADING = {"attn_implementation", "device_map", "load_in_4bit", "load_in_8bit", "quantization_config", "variant"}
# The harness' own names beside those of a generation config.
_REQUEST = {"until", "max_gen_toks", "max_tokens", "max_completion_tokens"}


@dataclass(frozen=True)
class Bound:
    """Sums over the likelihoods that were estimated as a block ELBO. Bounds add up.

    Attributes:
        requests: how many.
        tokens: that were scored.
        elbo: nats.
        variance: of `elbo`, by the choice of masks; nats².
        ar: log-probability of the same tokens by the AR head, nats.
    """

    requests: int = 0
    tokens: int = 0
    elbo: float = 0.0
    variance: float = 0.0
    ar: float = 0.0

    def __add__(self, other: Bound) -> Bound:
        mine, theirs = asdict(self), asdict(other)
        return Bound(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def standard_error(self) -> float:
        """Of `elbo`, nats."""
        return math.sqrt(self.variance)

    def to_dict(self) -> dict[str, float]:
        """The sums, and nats a token."""
        tokens = max(1, self.tokens)
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "elbo": self.elbo,
            "elbo_standard_error": self.standard_error,
            "ar": self.ar,
            "elbo_per_token": self.elbo / tokens,
            "elbo_per_token_standard_error": self.standard_error / tokens,
            "ar_per_token": self.ar / tokens,
        }


class _AnswerStops(StopStringCriteria):
    """The parent's on the answer alone: a stop string that begins in the prompt is none.

    Args:
        tokenizer: the model's.
        strings: to stop at.
        start: width of the prompts.
    """

    def __init__(self, tokenizer: Any, strings: list[str], start: int):
        super().__init__(tokenizer, strings)
        self.start = start

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return super().__call__(input_ids[:, self.start :], scores, **kwargs)


@register_model("wedlm")
class WeDLMHarnessLM(HFLM):
    """The harness' model of transformers, decoding in parallel.

    Args:
        pretrained: folder, Hub id, or a model.
        likelihood: `"ar"`: exact, by the AR head, as the parent; `"elbo"`: the block ELBO of the mask head, a lower
            bound. The parent's answer whether greedy decoding gives the continuation stays the AR head's.
        elbo_samples: draws of masks (default 16).
        elbo_block_size: B (default 32).
        elbo_seed: of the masks (default 0).
        kwargs: fields of [`WeDLMGenerationSettings`], and what the parent takes. A task's `gen_kwargs` go first.

    Raises:
        ValueError: for unknown names, values out of range, and settings without a meaning beside the others.
    """

    AUTO_MODEL_CLASS = WeDLMForCausalLM

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        likelihood: Likelihood = "ar",
        elbo_samples: int | None = None,
        elbo_block_size: int | None = None,
        elbo_seed: int | None = None,
        **kwargs: Any,
    ):
        self._decoding = {name: kwargs.pop(name) for name in _DECODING if name in kwargs}
        given = {"samples": elbo_samples, "block_size": elbo_block_size, "seed": elbo_seed}
        self._elbo = {name: value for name, value in given.items() if value is not None}
        _check_model_args(kwargs, self._decoding, likelihood, self._elbo)
        self._elbo = {"samples": 16, "block_size": 32, "seed": 0} | self._elbo
        self.likelihood = likelihood
        self.scores: dict[str, Score] = {}  # by task
        self.bounds: dict[str, Bound] = {}
        self.standard_errors: dict[tuple[str, int, int], float] = {}
        self._task = ""
        self._is_templated = False
        self._in_force: dict[str, WeDLMGenerationSettings] = {}
        self._scored: list[Bound] = []
        self._found_batch_size: int | None = None
        # Chosen by the parent from lists that only transformers' own models are on.
        kwargs = {"backend": "causal", "device": "cuda" if torch.cuda.is_available() else "cpu"} | kwargs
        super().__init__(pretrained, **kwargs)
        self._settings({})

    def _settings(self, gen_kwargs: Mapping[str, Any]) -> WeDLMGenerationSettings:
        """How requests with these options decode. Raises `ValueError` for what `generate` would refuse."""
        request = {name: value for name, value in gen_kwargs.items() if name not in _REQUEST}
        model = getattr(self.model, "get_base_model", lambda: self.model)()
        options = self._decoding | request
        if options.get("temperature") == 0:  # how many tasks say greedy
            options.pop("temperature")
        generation_config, unknown = model._prepare_generation_config(None, **options)
        if unknown:
            raise ValueError(_unknown("generation option", unknown, [*_DECODING, *vars(GenerationConfig())]))
        return WeDLMGenerationSettings.from_generation_config(generation_config, model.config)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The parent's; a missing one is an error before any prompt is made."""
        if chat_template and not self.tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer of {self.tokenizer.name_or_path!r} has no chat template: leave "
                "`--apply_chat_template` out, or add one to the checkpoint."
            )
        return super().chat_template(chat_template)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        """The parent's."""
        self._is_templated = True
        return str(super().apply_chat_template(*args, **kwargs))

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The parent's, which looks at the model's whole context if there are no requests: once is enough."""
        if requests is not None:
            return super()._detect_batch_size(requests, pos)
        if self._found_batch_size is None:
            self._found_batch_size = super()._detect_batch_size()
        return self._found_batch_size

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The parent's, one task after the other, so that each has statistics of its own."""
        if self.tokenizer.chat_template and not self._is_templated:
            logger.warning(
                "The checkpoint has a chat template, and the prompts go in without it: a model that was trained on "
                "conversations alone needs `--apply_chat_template`."
            )
        by_task: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_task.setdefault(request.task_name or "", []).append(index)
            if index == 0 or request.args[1] != requests[index - 1].args[1]:
                settings = self._settings(request.args[1])
            self._in_force[request.task_name or ""] = settings
        answers: dict[int, str] = {}
        before, self.scores = self.scores, {}
        for self._task, indices in by_task.items():
            texts = super().generate_until([requests[index] for index in indices], disable_tqdm)
            answers |= zip(indices, texts, strict=True)
        for scores in self.gather_object(self.scores) or []:  # of all processes, on the first
            before = _added(before, scores)
        self.scores = before
        return [answers[index] for index in range(len(requests))]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """The parent's with our settings; decoding itself stops at the stop strings, whatever order it fills in."""
        options = self._decoding | generation_kwargs
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        ends = options.pop("eos_token_id", self.model.generation_config.eos_token_id)
        end_tokens = {*(ends if isinstance(ends, list) else [ends])} - {None}
        end_tokens |= {special[text] for text in stop if text in special}
        strings = [text for text in stop if text and text not in special]
        criteria = [_AnswerStops(self.tokenizer, strings, context.shape[1])] if strings else []
        start = now(self.model)
        # The parent's own criterion answers for a whole batch at once.
        with patch("lm_eval.models.huggingface.stop_sequences_criteria", lambda *_: StoppingCriteriaList(criteria)):
            output = super()._model_generate(
                context, max_length, stop=[], eos_token_id=sorted(end_tokens), return_dict_in_generate=True, **options
            )
        seconds = now(self.model) - start
        answers = output.sequences[:, context.shape[1] :]
        stats = getattr(output, "stats", None)
        if stats is None:  # AR: one forward a token, and none for the last token
            new = sum(_length(answer, end_tokens, self.tokenizer.pad_token_id) for answer in answers.tolist())
            forwards, instances = new, new - len(answers)
        else:
            counts = (stats.new_tokens, stats.forwards, stats.token_instances)
            new, forwards, instances = (int(count.sum()) for count in counts)
        score = Score(
            prompts=len(answers), new_tokens=new, forwards=forwards, token_instances=instances, seconds=seconds
        )
        self.scores = _added(self.scores, {self._task: score})
        return output.sequences

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The parent's."""
        self._scored = []
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        if self.likelihood == "elbo":
            self._record(requests, self._scored)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The parent's; as a block ELBO, one text after the other, each of whose windows is a request."""
        if self.likelihood == "ar":
            return super().loglikelihood_rolling(requests, disable_tqdm)
        answers = []
        for request in self._tracked(requests, disable_tqdm):
            self._scored = []
            answers += super().loglikelihood_rolling([request], disable_tqdm=True)
            self._record([request], [sum(self._scored, Bound())])
        return answers

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self.likelihood == "ar":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        # Without their texts: the cache is for the ELBO.
        exact = super()._loglikelihood_tokens(
            [(None, context, continuation) for _, context, continuation in requests], True, override_bs
        )
        batch_size = override_bs or self.batch_size
        if batch_size == "auto":
            batch_size = max(1, self._detect_batch_size() // 2)  # a sample has up to twice the tokens
        answers = []
        step = 16 * batch_size  # enough to sort by length, few enough to keep when interrupted
        for start in self._tracked(range(0, len(requests), step), disable_tqdm):
            part = requests[start : start + step]
            pairs = []
            for _, context, continuation in part:
                room = self.max_length + 1 - len(continuation)
                pairs.append((context[-room:], continuation))
            estimates = block_elbo(self.model, self.tokenizer, pairs, batch_size=batch_size, **self._elbo)
            for (text, _, continuation), estimate, (ar, is_greedy) in zip(
                part, estimates, exact[start : start + step], strict=True
            ):
                self._scored.append(Bound(1, len(continuation), estimate.value, estimate.standard_error**2, ar))
                answers.append((estimate.value, is_greedy))
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answers[-1])
        return answers

    def _tracked(self, steps: Sequence[Any], disabled: bool) -> Iterable[Any]:
        """The steps, with a progress bar."""
        return track(steps, "Estimating likelihoods", console=Console(stderr=True), disable=disabled or self.rank != 0)

    def _record(self, requests: Sequence[Any], bounds: Sequence[Bound]) -> None:
        for request, bound in zip(requests, bounds, strict=True):
            self.bounds[request.task_name] = self.bounds.get(request.task_name, Bound()) + bound
            self.standard_errors[request.task_name, request.doc_id, request.idx] = bound.standard_error

    def get_model_info(self) -> dict[str, Any]:
        """The parent's, with the statistics of decoding and of likelihoods since the model was loaded."""
        different = {*self._in_force.values()} or {self._settings({})}
        info = super().get_model_info()
        info["decoding"] = asdict(next(iter(different)))
        if len(different) > 1:  # tasks may bring settings of their own
            info["decoding"] = {task: asdict(settings) for task, settings in self._in_force.items()}
        if self.scores:
            of_task = {task: _statistics(score) for task, score in self.scores.items()}
            info["decoding_statistics"] = {"pooled": _statistics(pooled(self.scores)), "tasks": of_task}
        info["likelihood"] = {"kind": self.likelihood}
        if self.bounds:
            total = sum(self.bounds.values(), Bound())
            bounds = {task: bound.to_dict() for task, bound in self.bounds.items()}
            info["likelihood"] |= {**self._elbo, "pooled": total.to_dict(), "tasks": bounds}
            info["likelihood"]["standard_errors"] = [
                [*request, error] for request, error in self.standard_errors.items()
            ]
        return info


def _check_model_args(
    others: Mapping[str, Any], decoding: Mapping[str, Any], likelihood: Any, elbo: Mapping[str, Any]
) -> None:
    """Raises `ValueError` for arguments of `--model_args` that cannot be honoured; `others` are not ours."""
    known = {*inspect.signature(HFLM.__init__).parameters, *vars(WeDLMConfig()), *_LOADING}
    known |= {*inspect.signature(PreTrainedModel.from_pretrained).parameters} - {"kwargs", "model_args"}
    if unknown := others.keys() - known:
        raise ValueError(_unknown("model argument", unknown, [*_DECODING, "likelihood", "elbo_samples", *known]))
    WeDLMGenerationSettings(**{name: value for name, value in decoding.items() if value is not None})
    if likelihood not in get_args(Likelihood):
        raise ValueError(
            f"`likelihood` must be one of {', '.join(map(repr, get_args(Likelihood)))}, got {likelihood!r}."
        )
    if elbo and likelihood == "ar":
        raise ValueError(
            f"`elbo_{next(iter(elbo))}` has no meaning with `likelihood='ar'`: pass `likelihood=elbo` too."
        )
    for name, value in elbo.items():
        least = {"samples": 2, "block_size": 1}.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            raise ValueError(f"`elbo_{name}` must be an integer{bound}, got {value!r}.")


def _unknown(kind: str, unknown: Any, known: Sequence[str]) -> str:
    hints = []
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, n=1)
        hints.append(f"`{name}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
    return f"Unknown {kind}{'s' * (len(hints) > 1)} {', '.join(hints)}. Those of decoding are {', '.join(_DECODING)}."


def _added(scores: Mapping[str, Score], more: Mapping[str, Score]) -> dict[str, Score]:
    return {**scores, **{task: scores.get(task, Score()) + score for task, score in more.items()}}


def _statistics(score: Score) -> dict[str, float]:
    numbers = score.to_dict()
    return {name: numbers[name] for name in _STATISTICS}


def _length(answer: list[int], end_tokens: set[int], pad_token: int | None) -> int:
    """How many tokens of a row of a batch are its answer: up to the first end token, or to the padding."""
    for index, token in enumerate(answer):
        if token in end_tokens:
            return index + 1
    while answer and answer[-1] == pad_token:
        answer = answer[:-1]
    return len(answer)


# --- running it -----------------------------------------------------------------------------------


def evaluate(**options: Any) -> dict[str, Any] | None:
    """`lm_eval.simple_evaluate` with checks before the model is loaded.

    - Options that cannot be honoured, and tasks whose data are missing, are refused, all of the latter at once.
    - The cache of answers is one for each `model_args`: the harness would hand out those of other settings.
    - Standard errors of single requests go to their logged samples.

    Raises:
        ValueError: as above.
        OSError: for a checkpoint that cannot be read.
    """
    is_ours, arguments = options.get("model") == "wedlm", options.get("model_args") or {}
    if isinstance(arguments, str):
        raise ValueError("`model_args` must be a mapping, got text.")
    if (limit := options.get("limit")) is not None and limit <= 0:
        raise ValueError(f"`--limit` must be above 0, got {limit:g}: without a document there is nothing to measure.")
    gen_kwargs = options.get("gen_kwargs") or {}
    if is_ours:
        _check_requests(arguments, gen_kwargs)
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
        folder = Path(str(arguments.get("pretrained", "")))
        files = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".json", ".bin"))
        states = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if folder.is_dir()]
        known = json.dumps([arguments, states], sort_keys=True, default=str)
        digest = hashlib.sha256(known.encode()).hexdigest()
        options["use_cache"] += f"_{digest[:12]}"
    results: dict[str, Any] | None = _simple_evaluate(**options)
    if results is None or not is_ours:
        return results
    errors = results["config"].get("likelihood", {}).pop("standard_errors", [])
    by_document: dict[tuple[str, int], list[float]] = {}
    for task, document, _, error in sorted(errors, key=lambda row: row[:3]):
        by_document.setdefault((task, document), []).append(error)
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            if (task, sample["doc_id"]) in by_document:
                sample["elbo_standard_errors"] = by_document[task, sample["doc_id"]]
    return results


_simple_evaluate = lm_eval.simple_evaluate


def _check_requests(model_args: Mapping[str, Any], gen_kwargs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for options of `--model_args` and `--gen_kwargs` that need no model to be refused, and
    `FileNotFoundError` for a folder without a checkpoint."""
    checkpoint = model_args.get("pretrained")
    if checkpoint is None:
        raise ValueError("`--model wedlm` needs a checkpoint: `--model_args pretrained=FOLDER_OR_HUB_ID`.")
    is_folder = isinstance(checkpoint, str) and (checkpoint.startswith((".", "/", "~")) or Path(checkpoint).is_dir())
    if is_folder and not Path(checkpoint, model_args.get("subfolder", ""), "config.json").is_file():
        raise FileNotFoundError(f"There is no checkpoint in {checkpoint!r}: it has no config.json.")
    ours = {"pretrained", "likelihood", "elbo_samples", "elbo_block_size", "elbo_seed"}
    decoding = {name: value for name, value in model_args.items() if name in _DECODING}
    elbo = {name.removeprefix("elbo_"): value for name, value in model_args.items() if name.startswith("elbo_")}
    others = {name: value for name, value in model_args.items() if name not in {*ours, *decoding}}
    _check_model_args(others, decoding, model_args.get("likelihood", "ar"), elbo)
    known = [*_DECODING, *_REQUEST, *vars(GenerationConfig())]
    if unknown := gen_kwargs.keys() - set(known):
        raise ValueError(_unknown("generation option", unknown, known))
    both = decoding | {name: value for name, value in gen_kwargs.items() if name in _DECODING}
    WeDLMGenerationSettings(**{name: value for name, value in both.items() if value is not None})


def load_tasks(manager: TaskManager, names: Sequence[Any]) -> list[Any]:
    """The tasks and groups of these names, with their data.

    Raises:
        ValueError: where any of them cannot be had; it says what to fetch, for all of them.
    """
    with _explained_downloads():
        try:
            return _top_level(manager.load(list(names)))
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


def _top_level(loaded: Mapping[str, Any]) -> list[Any]:
    """Groups that are in no other, and tasks that are in none."""
    inside = {name for children in loaded.get("group_map", {}).values() for name in children}
    entries = {**loaded.get("groups", {}), **loaded["tasks"]}
    return [entry for name, entry in entries.items() if name not in inside]


@contextmanager
def _explained_downloads() -> Iterator[None]:
    """Inside the block, a task whose dataset cannot be had says which it is and how to fetch it."""
    download: Callable[..., None] = ConfigurableTask.download

    def explained(task: ConfigurableTask, *args: Any, **kwargs: Any) -> None:
        try:
            download(task, *args, **kwargs)
        except (OSError, datasets.exceptions.DatasetsError) as error:
            where = ", ".join(repr(part) for part in (task.DATASET_PATH, task.DATASET_NAME) if part)
            is_gated = "gated" in str(error)
            access = "accept its terms on the Hub, run `hf auth login`, then " if is_gated else ""
            raise ValueError(
                f"its dataset is missing ({_first_line(error)}). To fetch it, with a connection: {access}"
                f'python -c "import datasets; datasets.load_dataset({where})"'
            ) from error

    with patch.object(ConfigurableTask, "download", explained):
        yield


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


def show(results: Mapping[str, Any]) -> None:
    """Prints the statistics of decoding and of likelihoods, as tables like the harness' own."""
    config = results["config"]
    if statistics := config.get("decoding_statistics"):
        header: Sequence[str] = ("prompts", "tokens", "forwards", "tokens/forward", "cacheability", "tokens/s")
        rows: dict[str, Sequence[str]] = {
            task: (
                *(f"{numbers[name]:,}" for name in ("prompts", "new_tokens", "forwards")),
                *(f"{numbers[name]:.2f}" for name in ("tokens_per_forward", "prefix_cacheability")),
                f"{numbers['tokens_per_second']:,.0f}",
            )
            for task, numbers in {**statistics["tasks"], "all": statistics["pooled"]}.items()
        }
        decoding = config["decoding"]
        is_one = "strategy" in decoding
        words = _in_words(WeDLMGenerationSettings(**decoding)) if is_one else "each task with settings of its own"
        _print_table(f"Decoding: {words}", header, rows)
    if tasks := config.get("likelihood", {}).get("tasks"):
        elbo = config["likelihood"]
        title = f"Block ELBO: {elbo['samples']} samples, B = {elbo['block_size']}, seed {elbo['seed']}; nats a token"
        header = ("requests", "tokens", "ELBO", "standard error", "AR head")
        names = ("elbo_per_token", "elbo_per_token_standard_error", "ar_per_token")
        rows = {
            task: (
                *(f"{numbers[name]:,}" for name in ("requests", "tokens")),
                *(f"{numbers[name]:.4f}" for name in names),
            )
            for task, numbers in {**tasks, "all": elbo["pooled"]}.items()
        }
        _print_table(title, header, rows)


def _print_table(title: str, header: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    table = Table(box=box.MARKDOWN)
    table.add_column("task")
    for name in header:
        table.add_column(name, justify="right")
    for task, cells in rows.items():
        table.add_row(task, *cells)
    print(title)
    Console(width=200).print(table)  # cells are never cut, whatever the terminal


def _in_words(settings: WeDLMGenerationSettings) -> str:
    if settings.strategy == "ar":
        return "strategy ar"
    return (
        f"strategy {settings.strategy}, verification {settings.verification}, W = {settings.window_size}, "
        f"τ = {settings.entropy_threshold:g}, λ = {settings.distance_penalty:g}"
    )


def main() -> None:
    """Run the harness' command line."""
    setup_logging()
    cli = HarnessCLI()
    choices = cli._subparsers.choices
    choices["run"].add_argument(
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
    shown: list[Mapping[str, Any]] = []

    def checked(**options: Any) -> dict[str, Any] | None:
        results = evaluate(**options)
        if results is not None:
            shown.append(results)
        return results

    # The harness reads thousands of files to find its own tasks, which takes longer than wedlm-nano's answers.
    ours = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False).all_tasks
    all_ours = {*(getattr(arguments, "tasks", None) or ["?"])} <= {*ours} - {*SUITES.values()}
    manager = functools.partial(TaskManager, include_defaults=not all_ours)
    try:
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
    for results in shown:
        show(results)


def _apply_suite(arguments: Any, suite: str) -> None:
    """Put a suite's tasks and settings where the arguments leave them open."""
    settings = load_yaml(TASKS_FOLDER / f"{suite}.yaml")["metadata"]
    arguments.tasks = arguments.tasks or [SUITES[suite]]
    arguments.gen_kwargs = settings["gen_kwargs"] | (arguments.gen_kwargs or {})
    if arguments.model == "wedlm":  # another model decodes in its own way
        given = arguments.model_args or {}
        arguments.model_args = given if given.get("strategy") == "ar" else settings["model_args"] | given
