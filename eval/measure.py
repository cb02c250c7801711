"""What decoding costs and what it gives, counted from outside: the core of `wedlm generate`, the sweep and the report.

Forwards are counted by a hook on the model and compared with the decoder's own statistics. Settings that are compared
decode each prompt one right after the other, in one process, so that whatever else the machine does hits all of them.

`B` prompts decoded together.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..modeling_wedlm import WeDLMForCausalLM
from .tasks import Sample, is_correct

Options = Mapping[str, Any]
"""Keywords of `generate`."""

LONGEST_ANSWER = 160
"""Limit of new tokens when answers to the tasks are scored: twice what the longest right ones take."""


class ForwardCounter:
    """Counts a model's forwards inside a `with` block.

    Attributes:
        forwards: forwards.
        rows: forwards times the rows that took part in each.
        slots: tokens that went through the model.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.forwards = self.rows = self.slots = 0

    def __enter__(self) -> ForwardCounter:
        self._hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input_ids = args[0] if args else kwargs["input_ids"]
        self.forwards += 1
        self.rows += input_ids.shape[0]
        self.slots += input_ids.numel()


@dataclass(frozen=True)
class Decoding:
    """The answer to one prompt, and its cost.

    Attributes:
        tokens: new tokens, the end token included.
        text: their text without special tokens.
        forwards: forwards that the prompt took part in, the prefill included.
        token_instances: tokens that went through the model after the prompt.
        seconds: wall clock of `generate`; in a batch, an equal share of it.
    """

    tokens: list[int]
    text: str
    forwards: int
    token_instances: int
    seconds: float


@dataclass(frozen=True)
class Score:
    """Sums over prompts. Scores add up.

    Attributes:
        prompts: how many.
        correct: prompts with a right answer.
        agreeing: prompts whose new tokens are those of the reference setting.
        new_tokens, forwards, token_instances, seconds: sums over [`Decoding`]s.
    """

    prompts: int = 0
    correct: int = 0
    agreeing: int = 0
    new_tokens: int = 0
    forwards: int = 0
    token_instances: int = 0
    seconds: float = 0.0

    def __add__(self, other: Score) -> Score:
        mine, theirs = asdict(self), asdict(other)
        return Score(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / max(1, self.prompts)

    @property
    def agreement(self) -> float:
        """Share of answers that are the reference's, token for token."""
        return self.agreeing / max(1, self.prompts)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens / forwards."""
        return self.new_tokens / max(1, self.forwards)

    @property
    def prefix_cacheability(self) -> float:
        """New tokens / tokens processed after the prompt; at most 1, for an answer's last token is never processed."""
        return min(1.0, self.new_tokens / max(1, self.token_instances))

    @property
    def tokens_per_second(self) -> float:
        """New tokens / wall clock."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @classmethod
    def of(cls, decoding: Decoding, *, correct: bool = False, agrees: bool = False) -> Score:
        """The score of one prompt."""
        costs = (len(decoding.tokens), decoding.forwards, decoding.token_instances, decoding.seconds)
        return cls(1, int(correct), int(agrees), *costs)

    def to_dict(self) -> dict[str, float]:
        """The sums, and the ratios that follow from them."""
        ratios = ("accuracy", "agreement", "tokens_per_forward", "prefix_cacheability", "tokens_per_second")
        return asdict(self) | {name: round(getattr(self, name), 4) for name in ratios}


def as_dicts(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Scores by task as JSON takes them: `{"pooled": …, "tasks": {task: …}}`."""
    tasks = {task: score.to_dict() for task, score in scores.items()}
    return {"pooled": pooled(scores).to_dict(), "tasks": tasks}


def pooled(scores: Mapping[str, Score]) -> Score:
    """The score over the prompts of all tasks."""
    return sum(scores.values(), Score())


def load(
    checkpoint: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> tuple[WeDLMForCausalLM, PreTrainedTokenizerBase]:
    """A checkpoint's model, in evaluation mode, and its tokenizer, without progress bars.

    Raises:
        OSError: for files that are missing or damaged.
        ValueError: for a checkpoint of another model type, and for weights that do not fit.
    """
    if Path(checkpoint).is_dir() and not (Path(checkpoint) / "config.json").exists():
        raise FileNotFoundError(f"There is no checkpoint in {str(checkpoint)!r}: it has no config.json.")
    transformers.utils.logging.disable_progress_bar()
    model = WeDLMForCausalLM.from_pretrained(checkpoint).to(device).eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation and of the header that asks for an answer."""
    # Not verbose: what is too long is refused when it is decoded.
    encoding: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
    )
    return list(encoding["input_ids"])


def decode(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    options: Options,
    streamer: BaseStreamer | None = None,
) -> list[Decoding]:
    """Decode `B` prompts together and count what it takes.

    Args:
        model: in evaluation mode.
        tokenizer: pads and turns tokens into text.
        prompts: tokens of each prompt.
        options: keywords of `generate`; `strategy` is that of the generation config if it is left out.
        streamer: gets the tokens as `generate` sends them.

    Raises:
        ValueError: whatever `generate` refuses.
    """
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    pad_token = tokenizer.pad_token_id or 0
    rows = zip(padding, prompts, strict=True)
    input_ids = torch.tensor([[pad_token] * count + prompt for count, prompt in rows], dtype=torch.int64)
    attention_mask = torch.tensor([[0] * count + [1] * (width - count) for count in padding], dtype=torch.int64)
    untyped: Any = model  # transformers states a type of `generate`'s `self` that its own models do not have
    with ForwardCounter(model) as counter:
        start = _now(model)
        output = untyped.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            streamer=streamer,
            return_dict_in_generate=True,
            **options,
        )
        seconds = (_now(model) - start) / len(prompts)
    answers = output.sequences[:, width:].tolist()
    stats = getattr(output, "stats", None)
    if stats is None:  # AR: one forward a token, and none for the last token
        answers = [_until_end(answer, model.generation_config.eos_token_id) for answer in answers]
        forwards = [len(answer) for answer in answers]
        instances = [len(answer) - 1 for answer in answers]
    else:
        answers = [answer[:count] for answer, count in zip(answers, stats.new_tokens.tolist(), strict=True)]
        forwards, instances = stats.forwards.tolist(), stats.token_instances.tolist()
    if stats is not None or len(prompts) == 1:  # AR goes on with finished rows of a batch
        assert counter.rows == sum(forwards), f"{counter.rows} forwards were seen, {sum(forwards)} were reported"
    if len(prompts) == 1:
        seen = counter.slots - width
        assert seen == instances[0], f"{seen} tokens were processed after the prompt, {instances[0]} were reported"
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    parts = zip(answers, texts, forwards, instances, strict=True)
    return [Decoding(*part, seconds) for part in parts]


def measure(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    settings: Mapping[str, Options],
    *,
    batch_size: int = 1,
    repeats: int = 1,
    title: str = "",
) -> dict[str, dict[str, Score]]:
    """Decode every sample under every setting.

    Args:
        model: in evaluation mode.
        tokenizer: has a chat template.
        samples: of any tasks.
        settings: `generate` keywords by name; the first setting is the reference for agreement.
        batch_size: samples of one task decoded together. Times are for comparison only at 1.
        repeats: how often each prompt is decoded under each setting, in turn (A B A B …); its time is the median.
        title: shown with a progress bar on standard error, if any.

    Returns:
        `{setting: {task: Score}}`.
    """
    for options in settings.values():  # warm-up
        decode(model, tokenizer, [encode(tokenizer, samples[0].messages)], options)
    scores: dict[str, dict[str, Score]] = {name: {} for name in settings}
    batches = _batches(samples, batch_size)
    for batch in track(batches, title, console=Console(stderr=True), disable=not title):
        prompts = [encode(tokenizer, sample.messages) for sample in batch]
        runs = [
            {name: decode(model, tokenizer, prompts, options) for name, options in settings.items()}
            for _ in range(repeats)
        ]
        reference = next(iter(runs[0].values()))
        for name, decodings in runs[0].items():
            seconds = median(run[name][0].seconds for run in runs)
            for sample, decoding, wanted in zip(batch, decodings, reference, strict=True):
                score = Score.of(
                    replace(decoding, seconds=seconds),
                    correct=is_correct(sample, decoding.text),
                    agrees=decoding.tokens == wanted.tokens,
                )
                scores[name][sample.task] = scores[name].get(sample.task, Score()) + score
    return scores


def environment(model: WeDLMForCausalLM) -> dict[str, str | int]:
    """Versions and machine, as far as they decide a measurement."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "processor": platform.machine(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }


def command_line(module: str) -> str:
    """The command that runs, as it can be typed again."""
    return " ".join(["python -m", f"wedlm_hf.eval.{module}", *sys.argv[1:]])


def _batches(samples: Sequence[Sample], batch_size: int) -> list[list[Sample]]:
    """Cut into batches of one task each, tasks in the order in which they first occur."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    return [
        group[start : start + batch_size] for group in by_task.values() for start in range(0, len(group), batch_size)
    ]


def _until_end(tokens: list[int], end_tokens: int | list[int] | None) -> list[int]:
    """Cut after the first end token."""
    ends = end_tokens if isinstance(end_tokens, list) else [end_tokens]
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in ends), tokens)


def _now(model: WeDLMForCausalLM) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
