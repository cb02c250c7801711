"""What decoding costs and what it gives, counted from outside: the core of `wedlm generate`, `bench` and `report`.

Forwards are counted by a hook on the model and compared with the decoder's own statistics. Settings that are compared
decode each prompt one right after the other, in one process, so that whatever else the machine does hits all of them.

`B` prompts decoded together.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
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
    """Counts and times a model's forwards inside a `with` block.

    Attributes:
        shapes: rows and tokens per row of each forward.
        starts: host clock at the start of each forward, seconds.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.shapes: list[tuple[int, int]] = []
        self.starts: list[float] = []
        self._begins: list[Any] = []
        self._ends: list[Any] = []

    def __enter__(self) -> ForwardCounter:
        self._hooks = (
            self.model.register_forward_pre_hook(self._count, with_kwargs=True),
            self.model.register_forward_hook(self._finish),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input_ids = args[0] if args else kwargs["input_ids"]
        self.shapes.append(tuple(input_ids.shape))
        self.starts.append(time.perf_counter())
        self._begins.append(self._mark(input_ids))

    def _finish(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._ends.append(self._mark(output.logits))

    def _mark(self, tensor: torch.Tensor) -> Any:
        """A point in time, without waiting for a GPU: there, it is one in the stream of its work."""
        if tensor.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def forwards(self) -> int:
        """How many there were."""
        return len(self.shapes)

    @property
    def rows(self) -> int:
        """Sum over forwards of the rows that took part."""
        return sum(rows for rows, _ in self.shapes)

    @property
    def slots(self) -> int:
        """Tokens that went through the model."""
        return sum(rows * width for rows, width in self.shapes)

    @property
    def spans(self) -> list[float]:
        """Seconds inside each forward; on a GPU those of its stream, which must have been waited for."""
        marks = zip(self._begins, self._ends, strict=False)  # a forward that failed has no end
        return [
            begin.elapsed_time(end) / 1000 if isinstance(begin, torch.cuda.Event) else end - begin
            for begin, end in marks
        ]


@dataclass(frozen=True)
class Decoding:
    """The answer to one prompt, and its cost.

    Attributes:
        tokens: new tokens, the end token included.
        text: their text without special tokens.
        forwards: forwards that the prompt took part in, the prefill included.
        token_instances: tokens that went through the model after the prompt.
        seconds: wall clock of `generate`; in a batch, an equal share of it.
        forward_seconds: the part of it inside the model's forward; 0 where that is not known.
    """

    tokens: list[int]
    text: str
    forwards: int
    token_instances: int
    seconds: float
    forward_seconds: float = 0.0


@dataclass(frozen=True)
class Score:
    """Sums over prompts. Scores add up.

    Attributes:
        prompts: how many.
        correct: prompts with a right answer.
        agreeing: prompts whose new tokens are those of the reference setting.
        new_tokens, forwards, token_instances, seconds, forward_seconds: sums over [`Decoding`]s.
    """

    prompts: int = 0
    correct: int = 0
    agreeing: int = 0
    new_tokens: int = 0
    forwards: int = 0
    token_instances: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0

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

    @property
    def own_cost(self) -> float | None:
        """Time outside the model's forward / time inside it; `None` where the latter is not known."""
        return self.seconds / self.forward_seconds - 1 if self.forward_seconds else None

    @classmethod
    def of(cls, decoding: Decoding, *, correct: bool = False, agrees: bool = False) -> Score:
        """The score of one prompt."""
        counts = (len(decoding.tokens), decoding.forwards, decoding.token_instances)
        return cls(1, int(correct), int(agrees), *counts, decoding.seconds, decoding.forward_seconds)

    def to_dict(self) -> dict[str, float]:
        """The sums, and the ratios that follow from them."""
        ratios = ["accuracy", "agreement", "tokens_per_forward", "prefix_cacheability", "tokens_per_second"]
        ratios += ["own_cost"] if self.own_cost is not None else []
        return asdict(self) | {name: round(getattr(self, name), 4) for name in ratios}


def pooled(scores: Mapping[str, Score]) -> Score:
    """The score over the prompts of all tasks."""
    return sum(scores.values(), Score())


def load(
    checkpoint: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: str | torch.dtype = "auto"
) -> tuple[WeDLMForCausalLM, PreTrainedTokenizerBase]:
    """A checkpoint's model, in evaluation mode, and its tokenizer, without progress bars.

    Args:
        checkpoint: folder or Hub id.
        device: where the model goes.
        dtype: of the weights; `"auto"` is the checkpoint's own.

    Raises:
        OSError: for files that are missing or damaged.
        ValueError: for a checkpoint of another model type, and for weights that do not fit.
    """
    if Path(checkpoint).is_dir() and not (Path(checkpoint) / "config.json").exists():
        raise FileNotFoundError(f"There is no checkpoint in {str(checkpoint)!r}: it has no config.json.")
    transformers.utils.logging.disable_progress_bar()
    model = WeDLMForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation and of the header that asks for an answer."""
    # Not verbose: what is too long is refused when it is decoded.
    encoding: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
    )
    return list(encoding["input_ids"])


def encode_text(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> list[int]:
    """Tokens of a prompt, as a user's turn or, if `raw`, as it is.

    Raises:
        ValueError: where they leave no room for an answer in the model's context.
    """
    if raw:
        tokens = list(tokenizer(prompt, verbose=False)["input_ids"])
    else:
        tokens = encode(tokenizer, [{"role": "user", "content": prompt}])
    context = model.config.max_position_embeddings
    if not 1 <= len(tokens) < context:
        shown = prompt if len(prompt) <= 40 else f"{prompt[:40]}…"
        raise ValueError(f"A prompt needs 1 to {context - 1} tokens for this model, got {len(tokens)}: {shown!r}.")
    return tokens


def pad_left(
    prompts: Sequence[list[int]], pad_token: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of `B` prompts, both `(B, longest)` int64."""
    width = max(map(len, prompts))
    rows = [(width - len(prompt), prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[pad_token] * padding + prompt for padding, prompt in rows], device=device),
        "attention_mask": torch.tensor([[0] * padding + [1] * len(prompt) for padding, prompt in rows], device=device),
    }


def decode(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    options: Options,
    streamer: BaseStreamer | None = None,
    *,
    seed: int | None = None,
) -> list[Decoding]:
    """Decode `B` prompts together and count what it takes.

    Args:
        model: in evaluation mode.
        tokenizer: pads and turns tokens into text; without one, texts are empty.
        prompts: tokens of each prompt.
        options: keywords of `generate`; `strategy` is that of the generation config if it is left out.
        streamer: gets the tokens as `generate` sends them.
        seed: of sampling; by default the state of torch's generators is left as it is.

    Raises:
        ValueError: whatever `generate` refuses.
    """
    inputs = pad_left(prompts, (tokenizer.pad_token_id if tokenizer else None) or 0, model.device)
    width = inputs["input_ids"].shape[1]
    untyped: Any = model  # transformers states a type of `generate`'s `self` that its own models do not have
    if seed is not None:
        torch.manual_seed(seed)
    with ForwardCounter(model) as counter:
        start = now(model)
        output = untyped.generate(**inputs, streamer=streamer, return_dict_in_generate=True, **options)
        seconds = (now(model) - start) / len(prompts)
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
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True) if tokenizer else [""] * len(prompts)
    parts = zip(answers, texts, forwards, instances, strict=True)
    return [Decoding(*part, seconds, sum(counter.spans) / len(prompts)) for part in parts]


@torch.no_grad()
def answer_entropy(model: WeDLMForCausalLM, prompt: list[int], answer: list[int]) -> float:
    """Entropy of the AR head's next-token distribution, mean over the tokens of an answer, nats; by one forward."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
    return float(torch.distributions.Categorical(logits=logits.float()).entropy().mean())


Decoder = Callable[[Sequence[list[int]]], list[Decoding]]
"""Decodes prompts together."""


def take_turns(
    decoders: Mapping[str, Decoder], batches: Sequence[Sequence[list[int]]], *, repeats: int = 1, title: str = ""
) -> Iterator[list[dict[str, list[Decoding]]]]:
    """Decode batches of prompts with every decoder in turn, A B A B …, after a warm-up.

    Args:
        decoders: by name.
        batches: tokens of the prompts that are decoded together.
        repeats: how often each batch is decoded by each decoder.
        title: shown with a progress bar on standard error, if any.

    Yields:
        for each batch its runs: the decodings of each decoder.
    """
    for decoder in decoders.values():
        decoder(batches[0])
    for batch in track(batches, title, console=Console(stderr=True), disable=not title):
        yield [{name: decoder(batch) for name, decoder in decoders.items()} for _ in range(repeats)]


def typical(runs: Sequence[list[Decoding]]) -> list[Decoding]:
    """The first of several runs of one decoder over one batch, with the medians of their times."""
    medians = {
        name: median(getattr(run[0], name) for run in runs) for name in ("seconds", "forward_seconds")
    }  # rows share a batch's time equally
    return [replace(decoding, **medians) for decoding in runs[0]]


@contextmanager
def endless(model: WeDLMForCausalLM) -> Iterator[None]:
    """No end token inside the block, so that answers are as long as they may be."""
    saved: Any = model.generation_config
    model.generation_config = copy(saved)
    model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        model.generation_config = saved


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

    def decoder(options: Options) -> Decoder:
        return lambda prompts: decode(model, tokenizer, prompts, options)

    decoders = {name: decoder(options) for name, options in settings.items()}
    scores: dict[str, dict[str, Score]] = {name: {} for name in settings}
    places = batches_of_tasks([sample.task for sample in samples], batch_size)
    batches = [[samples[index] for index in batch] for batch in places]
    prompts = [[encode(tokenizer, sample.messages) for sample in batch] for batch in batches]
    turns = take_turns(decoders, prompts, repeats=repeats, title=title)
    for batch, runs in zip(batches, turns, strict=True):
        decodings = {name: typical([run[name] for run in runs]) for name in settings}
        reference = next(iter(decodings.values()))
        for name in settings:
            for sample, decoding, wanted in zip(batch, decodings[name], reference, strict=True):
                score = Score.of(
                    decoding, correct=is_correct(sample, decoding.text), agrees=decoding.tokens == wanted.tokens
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


def batches_of_tasks(tasks: Sequence[str], batch_size: int) -> list[list[int]]:
    """Indices of samples in batches of one task each, tasks in the order in which they first occur."""
    by_task: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        by_task.setdefault(task, []).append(index)
    return [
        group[start : start + batch_size] for group in by_task.values() for start in range(0, len(group), batch_size)
    ]


def _until_end(tokens: list[int], end_tokens: int | list[int] | None) -> list[int]:
    """Cut after the first end token."""
    ends = end_tokens if isinstance(end_tokens, list) else [end_tokens]
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in ends), tokens)


def now(model: WeDLMForCausalLM) -> float:
    """The clock, seconds, once a GPU has done its work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
