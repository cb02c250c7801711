"""What decoding costs and what it gives, counted from outside: the core of all that compares decoders.

Forwards are counted by a hook on the model and compared with the decoder's own statistics. Settings that are compared
decode each prompt one right after the other, in one process, so that whatever else the machine does hits all of them.

`B` prompts decoded together.
"""

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from ..checkpoints.packed import count_weights, format_of, is_packed
from ..console.progress import track
from ..generation.mixin import WeDLMGenerationMixin
from ..modeling_wedlm import WeDLMForCausalLM
from .decoders import Options
from .prompts import LONGEST_ANSWER, Prompt, answer_limit

WORK_PER_THREAD = 300_000_000  # multiplications, about 10 ms of a core: for less, a thread is not worth waiting for
WINDOW_ROWS = 16  # of a forward, a decoder's window
MOST_TURNS = 5  # after which decoding goes on no longer to find a possible speed
_COUNTED = ("forwards", "token_instances", "drafted_by_depth", "accepted_by_depth")  # by `generate` itself
_WITHOUT_EFFECT = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}

Measured = dict[str, Any]  # a line of the table of measurements


class ForwardCounter:
    """Counts and times a model's forwards inside a `with` block, but for those inside [`paused`]. `entered` and `left`
    are the host clock at both ends of the block, seconds, once a GPU has done its work. `note` gets the logits of each
    forward."""

    def __init__(self, model: torch.nn.Module, note: Callable[[torch.Tensor], None] | None = None):
        self.model, self.note = model, note
        self.shapes: list[tuple[int, int]] = []  # rows and tokens per row of each forward
        self.starts: list[float] = []  # host clock, seconds
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._is_paused, self._away = False, 0.0  # seconds in pauses

    def __enter__(self) -> "ForwardCounter":
        self.entered = self.left = now(self.model)
        self._hooks = (
            self.model.register_forward_pre_hook(self._count, with_kwargs=True),
            self.model.register_forward_hook(self._end),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.left = now(self.model) - self._away
        for hook in self._hooks:
            hook.remove()

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_paused:
            return
        input_ids = args[0] if args else kwargs["input_ids"]
        self.shapes.append(tuple(input_ids.shape))
        self.starts.append(time.perf_counter() - self._away)
        self._begins.append(_mark(input_ids))

    def _end(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_paused:
            return
        self._ends.append(_mark(output.logits))
        if self.note is not None:
            self.note(output.logits)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the model does inside is another's."""
        start, self._is_paused = now(self.model), True
        try:
            yield
        finally:
            self._is_paused = False
            self._away += now(self.model) - start

    @property
    def forwards(self) -> int:
        """How many there were."""
        return len(self.shapes)

    @property
    def moments(self) -> list[float]:
        """The start of each forward and then the end of the block, seconds since its beginning."""
        return [moment - self.entered for moment in (*self.starts, self.left)]

    @property
    def spans(self) -> list[float]:
        """Seconds inside each forward; on a GPU those of its stream, which must have been waited for."""
        marks = list(zip(self._begins, self._ends, strict=False))  # a forward that failed has no end
        if marks and isinstance(marks[0][0], torch.cuda.Event):
            return [begin.elapsed_time(end) / 1000 for begin, end in marks]
        return [end - begin for begin, end in marks]


def _mark(tensor: torch.Tensor) -> Any:
    """A point in time, without waiting for a GPU: there, it is one in the stream of its work."""
    if tensor.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Pausing(BaseStreamer):
    """Passes tokens on to a streamer, and then lets others use the model, but not before the first forward."""

    def __init__(self, streamer: BaseStreamer | None, counter: ForwardCounter, between: Callable[[], None]):
        self.streamer, self.counter, self.between = streamer, counter, between

    def put(self, value: torch.Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(value)
        if self.counter.forwards:
            with self.counter.paused():
                self.between()

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


@dataclass(frozen=True)
class Decoding:
    """The answer to one prompt, and its cost."""

    tokens: list[int]  # new ones, the end token included
    text: str  # without special tokens
    forwards: int  # that the prompt took part in, the prefill included
    token_instances: int  # tokens that went through the model after the prompt
    seconds: float  # of `generate`; in a batch, an equal share of them
    drafted_by_depth: Sequence[int] = ()  # drafts that were checked, by their place in their run
    accepted_by_depth: Sequence[int] = ()  # those of them that passed


@dataclass(frozen=True)
class Speed:
    """AR's time to a decoder's own, for as many tokens.

    A forward of several rows takes at least as long as AR's forward of one. So a ratio above `limit`, the tokens per
    forward, shows a machine that was busy with something else during AR's turn.
    """

    ratio: float
    limit: float

    @classmethod
    def of(cls, ar: Sequence[Decoding], own: Sequence[Decoding]) -> "Speed":
        """From answers to the same prompts. Where they differ, AR's seconds count for as many tokens as the decoder
        has."""
        pairs = list(zip(ar, own, strict=True))
        seconds = sum(its.seconds * len(mine.tokens) / len(its.tokens) for its, mine in pairs)
        tokens, forwards = sum(len(decoding.tokens) for decoding in own), sum(decoding.forwards for decoding in own)
        return cls(seconds / sum(decoding.seconds for decoding in own), tokens / forwards)

    @property
    def is_possible(self) -> bool:
        """Whether it is not above its limit, but for rounding."""
        return not self.ratio > self.limit + 0.005

    def __str__(self) -> str:
        return f"{self.ratio:.2f}×" + ("" if self.is_possible else " (busy machine)")


def in_turn(turns: Sequence[Decoding]) -> Decoding:
    """The first of several equal answers, with the median of their times."""
    return replace(turns[0], seconds=median(turn.seconds for turn in turns))


def pad_left(prompts: Sequence[list[int]], pad_token: int, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of `B` prompts, both `(B, longest)` int64."""
    width = max(map(len, prompts))
    ids = [[pad_token] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def decode(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    options: Options,
    streamer: BaseStreamer | None = None,
    *,
    seed: int | None = None,
) -> list[Decoding]:
    """Call `generate` with these options on `B` prompts (tokens) together, look at the clock, and count twice: by the
    decoder and by the hook. Without a tokenizer, texts are empty; without a seed, the state of torch's generators is
    left as it is. Raises `ValueError` for what `generate` refuses."""
    return decode_call(model, tokenizer, prompts, options, streamer, seed=seed)[0]


def decode_call(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Sequence[list[int]],
    options: Options,
    streamer: BaseStreamer | None = None,
    *,
    seed: int | None = None,
    note: Callable[[torch.Tensor], None] | None = None,
    between: Callable[[], None] | None = None,
) -> tuple[list[Decoding], Any, ForwardCounter]:
    """As [`decode`], with what `generate` returned and the counter of its forwards; `note` gets the logits of each.
    `between` is called where tokens come: what it does with the model is neither counted nor timed."""
    inputs = pad_left(prompts, (tokenizer.pad_token_id if tokenizer else None) or 0, model.device)
    own = dict(options)
    if own.get("strategy") == "ar" and not isinstance(model, WeDLMGenerationMixin):
        del own["strategy"]  # which a stock model knows no other of
    untyped: Any = model  # transformers states a type of `generate`'s `self` that its own models do not have
    if seed is not None:
        torch.manual_seed(seed)
    flags = {} if "generation_config" in options else {"return_dict_in_generate": True}  # one of them asks for it
    with ForwardCounter(model, note) as counter:
        stream = _Pausing(streamer, counter, between) if between else streamer
        output = untyped.generate(**inputs, tokenizer=tokenizer, streamer=stream, **flags, **own)
    rows = _counts(model, inputs["input_ids"].shape[1], options, output, counter)
    answers = [row["tokens"] for row in rows]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True) if tokenizer else [""] * len(rows)
    share = counter.moments[-1] / len(prompts)
    decodings = [Decoding(text=text, **row, seconds=share) for text, row in zip(texts, rows, strict=True)]
    return decodings, output, counter


def _counts(
    model: WeDLMForCausalLM, width: int, options: Options, output: Any, counter: ForwardCounter
) -> list[dict[str, Any]]:
    """The counts of a [`Decoding`] of each prompt, as reported; what was seen must be the same."""
    rows: list[dict[str, Any]] = []
    strategy = options.get("strategy") or getattr(model.generation_config, "strategy", None)
    stats = None if strategy in (None, "ar") else output.stats
    seen_forwards = sum(count for count, _ in counter.shapes)  # of rows
    seen_tokens = sum(count * length for count, length in counter.shapes)
    for index, answer in enumerate(output.sequences[:, width:].tolist()):
        if stats is None:  # AR, whose own statistics know nothing of assisted decoding
            ends = options.get("eos_token_id") or model.generation_config.eos_token_id
            tokens = until_end(answer, ends if isinstance(ends, list) else [ends])
            counts = {"forwards": len(tokens), "token_instances": len(tokens) - 1}  # none for the last token
            if len(output.sequences) == 1:  # transformers reports nothing, and drafts, say, change them
                counts = {"forwards": seen_forwards, "token_instances": seen_tokens - width}
            rows.append({"tokens": tokens, **counts})
            continue
        new, *numbers = (getattr(stats, name)[index].tolist() for name in ("new_tokens", *_COUNTED))
        row: dict[str, Any] = dict(zip(_COUNTED, numbers, strict=True))
        depth = sum(map(bool, row["drafted_by_depth"]))  # as deep as its own drafts went
        row |= {name: row[name][:depth] for name in _COUNTED if name.endswith("_by_depth")}
        rows.append({"tokens": answer[:new], **row})
    reported = sum(row["forwards"] for row in rows)
    if stats is not None or len(rows) == 1:  # AR goes on with finished rows of a batch
        assert seen_forwards == reported, f"{seen_forwards} forwards were seen, {reported} were reported"
    if len(rows) == 1:
        seen, expected = seen_tokens - width, rows[0]["token_instances"]
        is_static = "static" in (options.get("cache_implementation"), model.generation_config.cache_implementation)
        # Padding makes the forwards of a static cache alike.
        assert seen >= expected if is_static else seen == expected, (
            f"{seen} tokens were processed after the prompt, {expected} were reported"
        )
    return rows


def measure(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    decoders: Mapping[str, Options],
    *,
    batch_size: int = 1,
    repeats: int = 1,
    title: str = "",
) -> list[Measured]:
    """Decode every prompt (with its tokens) with every decoder, in turn (A B A B …), after a warm-up.

    Decoders are keywords of `generate` by name; `model` among them is another model, with the same tokenizer. Only
    prompts of one task are decoded together. A `title` is that of a progress bar on standard error. Returns, for each
    decoder, prompt and repeat, `decoder`, `batch_size`, the prompt's index as `prompt`, its `task`, the fields of the
    [`Decoding`], `new_tokens`, `right` (0 to 1; `None` if unknown) and `repeat`.
    """
    limit = max(options.get("max_new_tokens") or LONGEST_ANSWER for options in decoders.values())
    batches = batches_of(model, prompts, batch_size, limit)
    take_turns(model, tokenizer, prompts, decoders, batches[0])
    return [
        row | {"repeat": repeat}
        for batch, repeat in track(list(itertools.product(batches, range(repeats))), title)
        for row in take_turns(model, tokenizer, prompts, decoders, batch)
    ]


def take_turns(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    decoders: Mapping[str, Options],
    batch: Sequence[int],
) -> list[Measured]:
    """Decode some of the prompts (indices) together, with one decoder right after the other; answers are as long as
    the context allows at most. Returns the rows of [`measure`], without `repeat`."""
    tokens = [list(prompts[index].tokens) for index in batch]
    rows = []
    for name, options in decoders.items():
        limit = answer_limit(model, max(map(len, tokens)), options.get("max_new_tokens"))
        own = {**options, "max_new_tokens": limit}
        decodings = decode(own.pop("model", model), tokenizer, tokens, own)
        rows += [
            {"decoder": name, "batch_size": len(batch), "prompt": index, "task": prompts[index].task}
            | vars(decoding)
            | {"new_tokens": len(decoding.tokens), "right": prompts[index].score(decoding.text)}
            for index, decoding in zip(batch, decodings, strict=True)
        ]
    return rows


def batches_of(
    model: WeDLMForCausalLM, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int
) -> list[list[int]]:
    """Indices of prompts in batches of one task each. A prompt that leaves room for fewer than `max_new_tokens` in the
    model's context is a batch of its own, so that it shortens no other answer."""
    groups: dict[str | int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        has_room = answer_limit(model, len(prompt.tokens), max_new_tokens) == max_new_tokens
        groups.setdefault(prompt.task if has_room else index, []).append(index)
    return [group[at : at + batch_size] for group in groups.values() for at in range(0, len(group), batch_size)]


def environment(model: WeDLMForCausalLM) -> dict[str, str | int]:
    """Versions and machine, as far as they decide a measurement."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "processor": platform.machine(),
        "kernels": cpu_kernels(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "dtype": format_of(model),
        "attention": model.config._attn_implementation,
    }


def fingerprint(model: WeDLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Of `weights`, `config` and `tokenizer`, each 16 hexadecimal digits: what decides a model's answers."""
    weights, parameters = hashlib.sha256(), dict(model.named_parameters())
    if is_packed(model):  # nor is a table in 16 bits a parameter
        parameters |= {name: weight for name, weight in model.state_dict().items() if name.endswith(".weight")}
    for name, parameter in sorted(parameters.items()):
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        weights.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    digests = {
        "weights": weights,
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()),
        "tokenizer": hashlib.sha256(f"{vocabulary}\n{tokenizer.chat_template}".encode()),
    }
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def cpu_kernels() -> str:
    """What a CPU multiplies with, as far as torch uses it: such as AVX2, or AVX512 with AMX."""
    capability = str(torch.backends.cpu.get_cpu_capability())
    has_tiles = capability.startswith("AVX512") and torch.cpu.get_capabilities().get("amx_bf16")
    return f"{capability} with AMX" if has_tiles else capability


def default_threads(model: torch.nn.Module) -> int:
    """CPU threads for the forwards of a decoder: as many as have work, for they wait for each other after every
    operation. A model of 2M parameters loses most of its speed to that."""
    return max(1, min(torch.get_num_threads(), count_weights(model) * WINDOW_ROWS // WORK_PER_THREAD))


def rates(sums: Mapping[str, Any]) -> dict[str, Any]:
    """`tokens_per_forward`, `prefix_cacheability` and, where there are seconds, `tokens_per_second`, from sums over
    answers (numbers, columns or tables): `new_tokens`, `forwards`, `token_instances`, perhaps `seconds`."""
    found = {
        "tokens_per_forward": sums["new_tokens"] / sums["forwards"],
        # At most 1: an answer's last token is never processed.
        "prefix_cacheability": np.minimum(sums["new_tokens"] / np.maximum(sums["token_instances"], 1), 1.0),
    }
    if "seconds" in sums:
        found["tokens_per_second"] = sums["new_tokens"] / sums["seconds"]
    return found


def until_end(tokens: list[int], end_tokens: Collection[int | None], pad_token: int | None = None) -> list[int]:
    """The answer in a row of a batch: up to the first end token, else without the padding."""
    for index, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: index + 1]
    while tokens and tokens[-1] == pad_token:
        tokens = tokens[:-1]
    return tokens


def now(model: Any) -> float:
    """The clock, seconds, once a GPU has done its work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@torch.no_grad()
def ar_logits(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logits of the AR head after the prompt and after each token of an answer but the last, by one forward:
    `(len(answer), V)` float32."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()


def answer_entropy(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Entropy of the AR head's next-token distribution, mean over the tokens of an answer, nats."""
    return float(torch.distributions.Categorical(logits=ar_logits(model, prompt, answer)).entropy().mean())


def agreeing_tokens(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of an answer greedy AR decoding would have chosen after the tokens before them. It chooses
    neither the mask token nor tokens that the generation config suppresses."""
    logits = ar_logits(model, prompt, answer)
    impossible = [getattr(model.config, "mask_token_id", None), *(model.generation_config.suppress_tokens or ())]
    logits[:, [token for token in impossible if token is not None]] = float("-inf")
    return int((logits.argmax(-1) == torch.tensor(answer, device=model.device)).sum())
