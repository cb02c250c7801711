"""The model `wedlm` of lm-evaluation-harness: parallel decoding, block-ELBO likelihoods, and what they cost by task.

`B` prompts decoded together, `T` their width, `N` new tokens.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.utils.logging import tqdm

from ...generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from ...modeling_wedlm import WeDLMConfig, WeDLMForCausalLM
from ..measure import now, until_end
from .likelihood import LEAST, block_elbo, check_integer
from .statistics import COUNTS, by_task, decoding_statistics, likelihood_statistics

Likelihood = Literal["ar", "elbo"]

DECODING = tuple(name for name in SETTING_NAMES if name != "output_trace")
ELBO = {"samples": 16, "block_size": 32, "seed": 0}
"""Settings of [`block_elbo`], as `elbo_samples` and so on."""
# Names that the harness itself gives to options of a request.
_REQUEST = {"until", "max_gen_toks", "max_tokens", "max_completion_tokens"}
# What `from_pretrained` takes besides its named parameters and the fields of a config.
_LOADING = {"attn_implementation", "device_map", "load_in_4bit", "load_in_8bit", "quantization_config", "variant"}


class _AnswerStops(StopStringCriteria):
    """The parent's on new tokens alone, from position `start` on: a stop string that begins in the prompt ends
    nothing."""

    def __init__(self, tokenizer: Any, strings: list[str], start: int):
        super().__init__(tokenizer, strings)
        self.start = start

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return super().__call__(input_ids[:, self.start :], scores, **kwargs)


@register_model("wedlm")
class WeDLMHarnessLM(HFLM):
    """Identical to the harness' model for transformers except for

    1. `_model_generate`: our settings, and stop strings that end each row of a batch where it meets one;
    2. `likelihood="elbo"`: the block ELBO of the mask head, a lower bound, instead of the AR head's likelihood;
    3. statistics of both by task, in `get_model_info`.

    Args:
        pretrained: folder, Hub id, or a model.
        likelihood: `"ar"`: exact, by the AR head; `"elbo"`. Whether greedy decoding would give a continuation is the
            AR head's answer either way.
        kwargs: fields of [`WeDLMGenerationSettings`]; `elbo_samples` (draws of masks, 16), `elbo_block_size` (B, 32)
            and `elbo_seed` (of the masks, 0); what the parent takes. A task's `gen_kwargs` go first.

    Raises:
        ValueError: for unknown names, values out of range, and settings without a meaning beside the others.
    """

    AUTO_MODEL_CLASS = WeDLMForCausalLM

    def __init__(self, pretrained: str | PreTrainedModel, likelihood: Likelihood = "ar", **kwargs: Any):
        check_request(kwargs | {"likelihood": likelihood}, {})
        self.likelihood = likelihood
        self._decoding = {name: kwargs.pop(name) for name in DECODING if name in kwargs}
        self._elbo = {name: kwargs.pop(f"elbo_{name}", default) for name, default in ELBO.items()}
        # Of each answer that was decoded and each likelihood that was estimated, by this process and by all of them.
        self._records: dict[str, list[dict[str, Any]]] = {"decoding": [], "likelihood": []}
        self._all_records = self._records
        self._estimates: list[dict[str, float]] = []  # of the likelihoods that are being asked for
        self._task: str | None = None
        self._in_force: dict[str, WeDLMGenerationSettings] = {}
        # The parent would choose them by lists that only transformers' own models are on.
        kwargs = {"backend": "causal", "device": "cuda" if torch.cuda.is_available() else "cpu"} | kwargs
        super().__init__(pretrained, **kwargs)
        if self.batch_size == "auto":
            # Here, where every process is: they agree on a size, and a cache may leave some of them no requests.
            found = self._detect_batch_size()
            self.batch_size_per_gpu = max(1, found // 2) if likelihood == "elbo" else found  # twice the tokens
        self._settings({})

    # --- generation -------------------------------------------------------------------------------

    def _options(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of `generate` for a request. `temperature=0` alone is how many tasks say greedy."""
        options = self._decoding | {name: value for name, value in gen_kwargs.items() if name not in _REQUEST}
        if not options.get("temperature") and not options.get("do_sample"):
            options.pop("temperature", None)
            options["do_sample"] = False
        return options

    def _settings(self, gen_kwargs: Mapping[str, Any]) -> WeDLMGenerationSettings:
        """How a request decodes. Raises `ValueError` for what `generate` would refuse."""
        model = getattr(self.model, "get_base_model", lambda: self.model)()
        generation_config, unknown = model._prepare_generation_config(None, **self._options(gen_kwargs))
        _check_names("generation option", unknown, {*DECODING, *vars(GenerationConfig())})
        return WeDLMGenerationSettings.from_generation_config(generation_config, model.config)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The parent's for one task after the other, because `_model_generate` is not told whose prompts it gets."""
        by_task: dict[str | None, list[int]] = {}
        for index, (request, task) in enumerate(zip(requests, _tasks(requests), strict=True)):
            by_task.setdefault(task, []).append(index)
            if index == 0 or request.args[1] != requests[index - 1].args[1]:
                settings = self._settings(request.args[1])
            if task is not None:
                self._in_force[task] = settings
        answers: dict[int, str] = {}
        for self._task, indices in by_task.items():
            texts = super().generate_until([requests[index] for index in indices], disable_tqdm)
            answers |= zip(indices, texts, strict=True)
        return [answers[index] for index in sorted(answers)]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Decode with our settings until the end token or a stop string.

        Args:
            context: prompts, padded on the left, `(B, T)`; `generation_kwargs` has their `attention_mask`.
            max_length: T and the new tokens allowed.

        Returns:
            prompts and answers, `(B, T + N)`.
        """
        options = self._options(generation_kwargs)
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        ends = options.pop("eos_token_id", self.model.generation_config.eos_token_id)
        end_tokens = {*(ends if isinstance(ends, list) else [ends])} - {None}
        end_tokens |= {special[text] for text in stop if text in special}
        strings = [text for text in stop if text and text not in special]
        start = now(self.model)
        with torch.autocast(self.device.type, self.mixed_precision_dtype, self.mixed_precision_dtype is not None):
            output = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=[_AnswerStops(self.tokenizer, strings, context.shape[1])] if strings else [],
                eos_token_id=sorted(end_tokens),
                pad_token_id=self.tokenizer.pad_token_id,
                return_dict_in_generate=True,
                **options,
            )
        seconds = (now(self.model) - start) / len(context)
        stats = getattr(output, "stats", None)
        if stats is None:  # AR: one forward a token, and none for the last token
            answers = output.sequences[:, context.shape[1] :].tolist()
            lengths = [len(until_end(answer, end_tokens, self.tokenizer.pad_token_id)) for answer in answers]
            counts = [(length, length, length - 1) for length in lengths]
        else:
            counts = list(zip(*(getattr(stats, name).tolist() for name in COUNTS), strict=True))
        if self._task is not None:
            of_batch = {"task": self._task, "seconds": seconds}
            self._records["decoding"] += [of_batch | dict(zip(COUNTS, row, strict=True)) for row in counts]
        return output.sequences

    # --- likelihoods ------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The parent's, with records of what was estimated."""
        self._estimates = []
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        if self.likelihood == "elbo":
            self._record(requests, [[estimate] for estimate in self._estimates])
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The parent's, without its wait for all processes: one whose answers are cached would never come."""
        answers: list[float] = []
        for part in self._parts(requests, "Scoring texts", disable_tqdm, self.batch_size):
            self._estimates = []
            with patch.object(self, "_world_size", 1):
                answers += super().loglikelihood_rolling(part, True)
            if self.likelihood == "elbo":
                left = iter(self._estimates)
                windows = [math.ceil(len(self.tok_encode(request.args[0])) / self.max_length) for request in part]
                self._record(part, [list(itertools.islice(left, count)) for count in windows])
        return answers

    def _parts(self, requests: list[Any], title: str, disable_tqdm: bool, batch_size: int) -> Iterator[list[Any]]:
        """Enough of the requests to sort by length, few enough to lose when interrupted; with a progress bar."""
        step = 16 * batch_size
        for start in tqdm(range(0, len(requests), step), title, disable=disable_tqdm or self.rank != 0):
            yield requests[start : start + step]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The parent's or, for `likelihood="elbo"`, estimates."""
        disable_tqdm |= override_bs is not None  # one batch of a text
        if self.likelihood == "ar":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        answers: list[tuple[float, bool]] = []
        for part in self._parts(requests, "Estimating", disable_tqdm, override_bs or self.batch_size):
            # Without their texts: what goes into the cache of answers is the ELBO.
            exact = super()._loglikelihood_tokens([(None, *tokens) for _, *tokens in part], True, override_bs)
            pairs = [(context[-(self.max_length + 1 - len(rest)) :], rest) for _, context, rest in part]
            size = override_bs or self.batch_size
            estimates = block_elbo(self.model, self.tokenizer, pairs, batch_size=size, **self._elbo)
            for (text, _, rest), estimate, (ar, is_greedy) in zip(part, estimates, exact, strict=True):
                variance = estimate.standard_error**2
                self._estimates.append({"tokens": len(rest), "elbo": estimate.value, "variance": variance, "ar": ar})
                answers.append((estimate.value, is_greedy))
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answers[-1])
        return answers

    def _record(self, requests: Sequence[Any], of_requests: Sequence[Sequence[Mapping[str, float]]]) -> None:
        """Note the estimates of each request: one, or those of all windows of a text. Bounds and variances add up."""
        for request, task, estimates in zip(requests, _tasks(requests), of_requests, strict=True):
            if task is not None:
                whose = {"task": task, "document": request.doc_id, "index": request.idx}
                sums = {name: sum(one[name] for one in estimates) for name in ("tokens", "elbo", "variance", "ar")}
                self._records["likelihood"].append(whose | {"requests": len(estimates)} | sums)

    # --- statistics -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """The parent's, after the records of all processes have come to the first one.

        The harness has every process call it after each kind of request, also one whose answers were all cached.
        """
        gathered = self.gather_object(self._records)
        if gathered is not None:
            self._all_records = {kind: [row for one in gathered for row in one[kind]] for kind in self._records}
        super().barrier()

    def get_model_info(self) -> dict[str, Any]:
        """The parent's, with the statistics since the model was loaded."""
        info = super().get_model_info()
        in_force = {task: asdict(settings) for task, settings in self._in_force.items()}
        different = {*self._in_force.values()} or {self._settings({})}
        # Tasks may bring settings of their own.
        info["decoding"] = in_force if len(different) > 1 else asdict(different.pop())
        if decoded := self._all_records["decoding"]:
            info["decoding_statistics"] = by_task(decoded, decoding_statistics)
        info["likelihood"] = {"kind": self.likelihood}
        if estimated := self._all_records["likelihood"]:
            names = ("task", "document", "index")
            errors = [[*(row[name] for name in names), row["variance"] ** 0.5] for row in estimated]
            info["likelihood"] |= self._elbo | by_task(estimated, likelihood_statistics) | {"standard_errors": errors}
        return info


def _tasks(requests: Sequence[Any]) -> Iterator[str | None]:
    """The task of each request; None for what the harness repeats so that all processes have as many requests."""
    times: Counter[int] = Counter()
    for request in requests:
        times[id(request)] += 1
        yield (request.task_name or "") if times[id(request)] <= request.repeats else None


# --- checks -------------------------------------------------------------------------------------


def check_request(model_args: Mapping[str, Any], gen_kwargs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for `--model_args` and `--gen_kwargs` that cannot be honoured, as far as that needs no
    model."""
    elbo = {f"elbo_{name}": LEAST[name] for name in ELBO}
    known = {*DECODING, "likelihood", *elbo, *vars(WeDLMConfig()), *_LOADING}
    for function in (HFLM.__init__, PreTrainedModel.from_pretrained):
        known |= {*inspect.signature(function).parameters} - {"self", "kwargs", "model_args"}
    _check_names("model argument", model_args, known)
    _check_names("generation option", gen_kwargs, {*DECODING, *_REQUEST, *vars(GenerationConfig())})
    given = {**model_args, **gen_kwargs}
    WeDLMGenerationSettings(**{name: given[name] for name in DECODING if given.get(name) is not None})
    likelihood, allowed = model_args.get("likelihood", "ar"), get_args(Likelihood)
    if likelihood not in allowed:
        raise ValueError(f"`likelihood` must be one of {', '.join(map(repr, allowed))}, got {likelihood!r}.")
    for name in sorted(model_args.keys() & elbo):
        if likelihood == "ar":
            raise ValueError(f"`{name}` has no meaning with `likelihood='ar'`: pass `likelihood=elbo` too.")
        check_integer(name, model_args[name], elbo[name])


def _check_names(kind: str, given: Iterable[str], known: set[str]) -> None:
    hints = []
    for name in sorted({*given} - known):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hints.append(f"`{name}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
    if hints:
        names = f"{kind}{'s' * (len(hints) > 1)} {', '.join(hints)}"
        raise ValueError(f"Unknown {names}. Those of decoding are {', '.join(DECODING)}.")
