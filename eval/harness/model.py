"""The model `wedlm` of lm-evaluation-harness: parallel decoding, and the block ELBO as another likelihood."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from ...generation.settings import SETTING_NAMES, WeDLMGenerationSettings
from ...modeling_wedlm import WeDLMForCausalLM
from ...training.collator import DataCollatorForDualStreamMasking
from ...training.log_probs import response_log_probs
from ...training.streams import IGNORE_INDEX
from ..measure import default_threads, rates

Likelihood = Literal["ar", "elbo"]
DECODING = tuple(name for name in SETTING_NAMES if name != "output_trace")
ELBO = {"samples": 16, "block_size": 32, "seed": 0}  # of `block_elbo`
COUNTS = ("new_tokens", "forwards", "token_instances")


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

    1. `_model_generate`: our settings, and stop strings that end each sequence of a batch where it meets one;
    2. `likelihood="elbo"`: the block ELBO of the mask head, a lower bound, instead of the AR head's likelihood;
    3. statistics of both in `get_model_info`: those of decoding by task, of what this process has decoded.

    Args:
        pretrained: folder, Hub id, or a model.
        likelihood: `"ar"`: exact, by the AR head; `"elbo"`. Whether greedy decoding would give a continuation is the
            AR head's answer either way.
        kwargs: fields of [`WeDLMGenerationSettings`]; `elbo_samples` (draws of masks, 16), `elbo_block_size` (B, 32)
            and `elbo_seed` (of the masks, 0); what the parent takes. A task's `gen_kwargs` go first.

    Raises:
        ValueError: for values out of range, and settings without a meaning beside the others.
    """

    AUTO_MODEL_CLASS = WeDLMForCausalLM

    def __init__(self, pretrained: str | PreTrainedModel, likelihood: Likelihood = "ar", **kwargs: Any):
        if likelihood not in get_args(Likelihood):
            raise ValueError(f"`likelihood` must be one of 'ar', 'elbo', got {likelihood!r}.")
        if likelihood == "ar" and (given := [name for name in kwargs if name.startswith("elbo_")]):
            raise ValueError(f"`{given[0]}` has no meaning with `likelihood='ar'`: pass `likelihood=elbo` too.")
        if likelihood == "elbo" and not str(kwargs.get("batch_size", 1)).isdigit():
            raise ValueError(f"`likelihood=elbo` needs a number as `batch_size`, got {kwargs['batch_size']!r}.")
        self.likelihood = likelihood
        self._decoding = {name: kwargs.pop(name) for name in DECODING if name in kwargs}
        WeDLMGenerationSettings(**self._decoding)
        self._elbo = {name: kwargs.pop(f"elbo_{name}", default) for name, default in ELBO.items()}
        for name, least in (("samples", 2), ("block_size", 1), ("seed", 0)):
            _check_whole(f"elbo_{name}", self._elbo[name], least)
        self._elbo_sums: Counter[str] = Counter()
        self._task, self._counts = "", dict[str, Counter[str]]()
        self._in_force: dict[str, dict[str, Any]] = {}
        # The parent would choose the backend by a list of transformers' own models, and CUDA without a look for it.
        kwargs = {"backend": "causal", "device": "cuda" if torch.cuda.is_available() else "cpu"} | kwargs
        super().__init__(pretrained, **kwargs)
        if self.device.type == "cpu":
            torch.set_num_threads(default_threads(self.model))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The parent's for one task after the other, because `_model_generate` does not know whose prompts it gets."""
        by_task: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_task.setdefault(request.task_name or "", []).append(index)
        answers: dict[int, str] = {}
        for self._task, indices in by_task.items():
            texts = super().generate_until([requests[index] for index in indices], disable_tqdm)
            answers |= zip(indices, texts, strict=True)
        return [answers[index] for index in sorted(answers)]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Decode prompts that are padded on the left, `(B, T)`, to `(B, T + N)`, until an end token or stop string."""
        options = self._decoding | generation_kwargs
        if not options.get("temperature") and not options.get("do_sample"):  # how many tasks say greedy
            options.pop("temperature", None)
            options["do_sample"] = False
        strings = [text for text in stop if text]
        with torch.autocast(self.device.type, self.mixed_precision_dtype, self.mixed_precision_dtype is not None):
            output = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=[_AnswerStops(self.tokenizer, strings, context.shape[1])] if strings else [],
                pad_token_id=self.tokenizer.pad_token_id,
                return_dict_in_generate=True,
                **options,
            )
        self._in_force[self._task] = {name: options[name] for name in DECODING if name in options}
        if (stats := getattr(output, "stats", None)) is not None:  # none of assisted decoding and of beams
            counts = {name: int(getattr(stats, name).sum()) for name in COUNTS} | {"prompts": len(context)}
            self._counts.setdefault(self._task, Counter()).update(counts)
        sequences: torch.Tensor = output.sequences
        return sequences

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The parent's or, for `likelihood="elbo"`, estimates."""
        if self.likelihood == "ar":
            exact: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return exact
        # Without their texts: what goes into the cache of answers is the ELBO.
        exact = super()._loglikelihood_tokens([(None, *tokens) for _, *tokens in requests], True, override_bs)
        pairs = [(context[-(self.max_length + 1 - len(rest)) :], rest) for _, context, rest in requests]
        size = override_bs or int(self.batch_size)
        estimates = block_elbo(self.model, self.tokenizer, pairs, batch_size=size, **self._elbo)
        answers = []
        for (text, _, rest), estimate, (ar, is_greedy) in zip(requests, estimates, exact, strict=True):
            counts = {"tokens": len(rest), "elbo": estimate.value, "variance": estimate.standard_error**2, "ar": ar}
            self._elbo_sums.update(counts)
            answers.append((estimate.value, is_greedy))
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answers[-1])
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """The parent's, with the statistics since the model was loaded."""
        info: dict[str, Any] = super().get_model_info()
        info["decoding"] = self._in_force
        info["decoding_statistics"] = {task: counts | rates(counts) for task, counts in self._counts.items()}
        info["likelihood"] = {"kind": self.likelihood}
        if tokens := self._elbo_sums["tokens"]:
            sums = self._elbo_sums
            per_token = {"elbo": sums["elbo"], "elbo_standard_error": sums["variance"] ** 0.5, "ar": sums["ar"]}
            info["likelihood"] |= {f"{name}_per_token": value / tokens for name, value in per_token.items()}
            info["likelihood"] |= self._elbo | {"tokens": tokens}
        return info


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


class Estimate(NamedTuple):
    """A block ELBO, nats."""

    value: float  # mean over its samples
    standard_error: float  # of that mean; 0 where masks cannot vary


@torch.no_grad()
def block_elbo(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[list[int], list[int]]],
    *,
    samples: int = 16,
    block_size: int = 32,
    seed: int = 0,
    batch_size: int = 1,
) -> list[Estimate]:
    """Estimate what the mask head says of each continuation after its context (pairs of tokens, none empty).

    Where the AR head gives log p(continuation | context) exactly, the mask head gives a lower bound on it: block after
    block, the mean over all numbers m of masks and all places of them of (n/m)·Σ log p(masked token | what its mask
    sees), n being the block's scored tokens (paper Eq. 10). One draw of masks is an unbiased sample of that mean. The
    masks are a function of the seed, the number of the sample and the tokens alone.

    Each of the `samples` (at least 2, for the standard error) is a forward over context and continuation; where masks
    cannot vary (one token, or blocks of one), one is taken. Blocks begin at multiples of `block_size`, as in training.
    Raises `ValueError` for settings out of range, and for a pair without a context or a continuation.
    """
    for name, value, least in (("samples", samples, 2), ("batch_size", batch_size, 1)):
        _check_whole(name, value, least)
    for context, rest in pairs:
        if not context or not rest:
            got = f"got {len(context)} and {len(rest)}"
            raise ValueError(f"A likelihood needs at least one token of context and one of continuation, {got}.")
    # Strata: same mean as "count", less noise.
    collator = DataCollatorForDualStreamMasking(
        tokenizer, block_size=block_size, num_eos=1, ratio_sampler="stratified", seed=seed
    )
    estimates: dict[int, Estimate] = {}
    by_length = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    for is_fixed in (False, True):
        group = [index for index in by_length if (len(pairs[index][1]) == 1 or block_size == 1) == is_fixed]
        for start in range(0, len(group), batch_size):
            batch = group[start : start + batch_size]
            examples = [
                {"input_ids": [*context, *rest], "labels": [IGNORE_INDEX] * len(context) + rest}
                for context, rest in (pairs[index] for index in batch)
            ]
            drawn = []
            for sample in range(1 if is_fixed else samples):
                collator.set_epoch(sample)
                drawn.append(response_log_probs(model, examples, collator).mask_tokens.double().sum(1).cpu())
            values = torch.stack(drawn)  # (samples, pairs)
            errors = values.std(0, correction=0 if is_fixed else 1) / math.sqrt(len(values))
            for index, value, error in zip(batch, values.mean(0).tolist(), errors.tolist(), strict=True):
                estimates[index] = Estimate(value, error)
    return [estimates[index] for index in range(len(pairs))]
