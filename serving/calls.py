"""Requests while they are answered: which of them are decoded together, how an answer streams, and how it ends.

All `generate` calls run one after the other on a thread of their own, transformers' `InferenceThread`. Requests that
decode alike share a call, and a call ends as soon as its clients have gone.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.cli.serving.utils import InferenceThread, ToolCall
from transformers.generation import BaseStreamer

from ..eval.measure import pad_left
from ..generation.grammar import Grammar, JSONConstraint, Thoughts
from ..generation.settings import OptionError
from .message import PlainParser
from .text import AnswerText

log = logging.getLogger("wedlm_hf.serving")

LARGEST_BATCH = 8  # requests that share a `generate` call
# Tokens of short answers and of their prompts: those do not wait for a longer call to end.
SHORT_ANSWER, SHORT_PROMPT = 64, 2048
IMPOSSIBLE = -9999.0  # the log-probability of what is, in OpenAI's API: JSON has no infinity
# Settings whose effect would reach other sequences of a batch, or the padding, and the values without an effect.
ALONE = {"max_time": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


class RequestError(Exception):
    """A request that is not answered: its status of HTTP, OpenAI's name of the error, and the field that is wrong."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": " ".join(str(self).split()), "type": kind, "param": self.param, "code": self.code}
        # They may quote a lone surrogate, which no response can hold.
        return {"error": {name: text and text.encode(errors="replace").decode() for name, text in error.items()}}


def as_request_error(error: Exception) -> RequestError:
    """What a client reads about an exception: a `ValueError` says what is wrong with the request, and knows the option
    of `generate` if there is one."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(str(error), param=error.option if isinstance(error, OptionError) else None)
    return RequestError(f"The answer could not be generated: {error}", status=500)


@dataclass(frozen=True)
class Chances:
    """How likely a token was, by the model's raw logits."""

    token: int
    log_prob: float
    likeliest: list[tuple[int, float]]  # tokens and their log-probabilities, descending


@dataclass(frozen=True, eq=False)
class Asked:
    """What the model is asked for, once or several times.

    Attributes:
        prompt: its tokens.
        config: of `generate`; its `max_new_tokens` is the longest answer.
        settings: of parallel decoding, keywords of `generate`.
        seed: of sampling; `None`: each answer is another.
        stops: strings before which an answer ends.
        parser: makes what tells content, thoughts and tool calls apart.
        special: tokens that people do not read, and their names.
        parsed: those of them that the parser reads.
        makes_one_call: an answer ends behind its first tool call.
        likeliest: so many tokens are listed at each place, beside the chosen one; `None`: no log-probabilities.
        grammar: what the answer must follow.
        thoughts: stand in front of it, and the prompt has opened them.
        is_ordered: tokens are chosen behind those before them; else how much room an answer has may change it.
    """

    prompt: list[int]
    config: GenerationConfig
    settings: dict[str, Any]
    seed: int | None = None
    stops: list[str] = field(default_factory=list)
    parser: Callable[[], Any] = PlainParser
    special: Mapping[int, str] = field(default_factory=dict)
    parsed: Collection[int] = ()
    makes_one_call: bool = False
    likeliest: int | None = None
    grammar: Grammar | None = None
    thoughts: Thoughts | None = None
    is_ordered: bool = True

    @cached_property
    def read(self) -> dict[int, str]:
        """Special tokens that a stop string names or the parser reads."""
        stops = "\0".join(self.stops)
        return {token: name for token, name in self.special.items() if token in self.parsed or name in stops}

    @cached_property
    def kind(self) -> Hashable:
        """Equal for those that may share a `generate` call; `None`: each answer has its own."""
        settings = self.config.to_dict() | ({"max_new_tokens": None} if self.is_ordered else {})
        if self.seed is not None or any(settings.get(name) not in (None, value) for name, value in ALONE.items()):
            return None
        grammar = self.grammar and self.grammar.text
        return repr(sorted(settings.items())), repr(sorted(self.settings.items())), grammar, self.thoughts

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        ends = self.config.eos_token_id
        return ends if isinstance(ends, list) else [ends] * (ends is not None)

    @property
    def processors(self) -> list[JSONConstraint]:
        """New logits processors for a call."""
        return [JSONConstraint(self.grammar, self.ends, self.thoughts)] if self.grammar else []


class Answer:
    """An answer while it is made. It sends `(index, item, chances)`: text, thoughts or a tool call, an exception that
    ends it, or `None` at its end; then `finish_reason` says why it ended. The [`Chances`] are of its tokens so far
    that were not sent, if they are asked for."""

    def __init__(self, asked: Asked, request_id: str, tokenizer: Any, send: Callable[[Any], Any], index: int):
        self.asked, self.request_id, self.send, self.index = asked, request_id, send, index
        # Here, as it may take its time, which the thread of the calls has not.
        self.kind = id(self) if asked.kind is None else asked.kind
        self.is_cancelled = threading.Event()  # the client has gone, or the server ends
        self.is_over = False
        self.has_calls = False
        self.finish_reason = "stop"
        self.tokens: list[int] = []
        self.replayed: list[int] = []  # tokens that went out before the call was begun anew, the last one first
        self.chances: list[Chances] = []  # of the next tokens
        self.ends = set(asked.ends)
        self.limit: int = asked.config.max_new_tokens
        self.thought_count = 0  # tokens of thoughts
        self.forwards = self.drafted = self.accepted = 0
        self._parser = asked.parser()
        self._text = AnswerText(tokenizer._tokenizer, asked.stops, asked.special, asked.read, asked.parsed)
        self.is_stopped, self.tail = self._text.is_stopped, self._text.tail
        self._unsent: list[tuple[int, Chances]] = []  # with the characters before the token

    @property
    def forwards_taken(self) -> int:
        """Forwards that the answer took part in; in AR decoding one a token."""
        return self.forwards or len(self.tokens)

    @property
    def is_short(self) -> bool:
        """Whether it takes few forwards."""
        return self.limit <= SHORT_ANSWER and len(self.asked.prompt) <= SHORT_PROMPT

    def put(self, tokens: list[int]) -> None:
        """Takes new tokens; after the end they are padding."""
        for token in tokens:
            if self.is_over:
                return
            chances = self.chances.pop(0) if self.asked.likeliest is not None else None
            if self.replayed:
                if token != self.replayed.pop():
                    raise RuntimeError("an answer beside it failed")
                continue
            self.tokens.append(token)
            if chances is not None and token not in self.ends:
                self._unsent.append((self._text.count, chances))
            if token not in self.ends:
                self._read(self._text.feed(token))
                self.thought_count += self._parser.is_thinking
            is_called = self.has_calls and self.asked.makes_one_call
            if token in self.ends or self._text.is_over or self.is_stopped(self.tokens) or is_called:
                self.finish("stop")
            elif len(self.tokens) >= self.limit:
                self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the answer."""
        if self.is_over:
            return
        try:
            self._read(self._text.rest())
            self._send(self._parser.end(is_cut=reason == "length"))
        except Exception as error:
            log.exception("%s: failed", self.request_id)
            self.fail(as_request_error(error))
            return
        self.finish_reason = "tool_calls" if self.has_calls and reason == "stop" else reason
        self.is_over = True
        self._enqueue(None)

    def fail(self, error: Exception) -> None:
        """Ends it by an error."""
        if not self.is_over:
            self.is_over = True
            self.send((self.index, error, []))

    def cut_off(self) -> None:
        """Ends it early: its client has gone, or the server ends."""
        count = len(self.tokens)
        log.info("%s: stopped after %d new tokens: its client has gone, or the server ends", self.request_id, count)
        self.fail(RequestError("The answer was cut off: the server ends.", status=503))

    def _read(self, text: str) -> None:
        if text:
            self._send(self._parser.read(text))

    def _send(self, items: list[Any]) -> None:
        for item in items:
            if self.has_calls and self.asked.makes_one_call:
                return
            self.has_calls |= isinstance(item, ToolCall)
            self._enqueue(item)

    def _enqueue(self, item: Any) -> None:
        is_whole = item is None and not self._text.is_over  # behind a stop string, nothing belongs to the text
        sent = [chances for start, chances in self._unsent if is_whole or start < self._text.passed]
        self._unsent = self._unsent[len(sent) :]
        self.send((self.index, item, sent))


class Turns:
    """Lets others in between the forwards of a call, and again when the call has run for as long as that took."""

    def __init__(self, let_in: Callable[[], None]):
        self.let_in = let_in
        self.alone_until = 0.0  # seconds: others are let in from then on

    def take(self) -> None:
        """It is others' turn, unless they had theirs just now."""
        start = time.perf_counter()
        if start >= self.alone_until:
            self.let_in()
            end = time.perf_counter()
            self.alone_until = end + (end - start)


class Batch(BaseStreamer, StoppingCriteria):
    """Sequences of one `generate` call: hands each its tokens, and ends each where it ends.

    Args:
        answers: of the call.
        between: is called behind each forward, once.
    """

    def __init__(self, answers: Sequence[Answer], between: Callable[[], None] = lambda: None):
        self.answers, self.between = answers, between
        # Whether `put_step` tells of forwards (else each `put` is one), and others had their turn behind the last one.
        self.has_steps = self.is_passed = False
        self.width = max(len(answer.asked.prompt) for answer in answers)
        self.is_prompt = True
        self.logits: torch.Tensor | None = None  # `(B, V)`, which AR decoding chooses the next tokens from

    def take_logits(self, model: Any, inputs: Any, output: Any) -> None:
        """Takes those of AR decoding: a hook on its forwards."""
        self.logits = output.logits[:, -1].float()

    def put_logits(self, rows: list[int], tokens: list[int], logits: torch.Tensor) -> None:
        """Takes what the next tokens were chosen from, see [`TokenStream`]."""
        for row, token, scores in zip(rows, tokens, logits, strict=True):
            if (count := self.answers[row].asked.likeliest) is not None:
                log_probs = scores.log_softmax(-1).clamp(min=IMPOSSIBLE)
                values, ids = log_probs.topk(min(count, len(scores)))
                likeliest = list(zip(ids.tolist(), values.tolist(), strict=True))
                self.answers[row].chances.append(Chances(token, log_probs[token].item(), likeliest))

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts, `(B, P)`, then new tokens: `(n,)` of a single sequence, else `(B,)`, one of each."""
        if not self.is_prompt:
            rows = [value.flatten().tolist()] if len(self.answers) == 1 else [[token] for token in value.tolist()]
            if self.logits is not None:
                self.put_logits([*range(len(self.answers))], value.tolist(), self.logits)
            for answer, tokens in zip(self.answers, rows, strict=True):
                try:
                    answer.put(tokens)
                except Exception as error:  # concerns no other
                    log.exception("%s: failed", answer.request_id)
                    answer.fail(as_request_error(error))
            if not self.is_passed:
                self.is_passed = self.has_steps
                self.between()
        self.is_prompt = False

    def put_step(self, counts: list[tuple[int, int, int]]) -> None:
        """Takes what a forward did, see [`TokenStream`]."""
        self.has_steps, self.is_passed = True, False
        for row, drafted, accepted in counts:
            answer = self.answers[row]
            answer.forwards += 1
            answer.drafted += drafted
            answer.accepted += accepted

    def end(self) -> None:
        """Nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Which sequences are over, `(B,)`."""
        count = input_ids.shape[1] - self.width
        is_over = []
        for answer, row in zip(self.answers, input_ids, strict=True):
            is_over.append(answer.is_over or answer.is_cancelled.is_set() or count >= answer.limit)
            if answer.asked.stops and not is_over[-1] and count > len(answer.tokens):  # of those it has, it knows
                is_over[-1] = answer.is_stopped(row[max(self.width, len(row) - answer.tail) :].tolist())
        return torch.tensor(is_over, device=input_ids.device)


class CallManager:
    """Runs `generate` calls one after the other, each for requests that decode alike."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.thread = InferenceThread()
        self.lock = threading.Lock()
        self.waiting: list[Answer] = []

    def submit(self, answers: Sequence[Answer]) -> None:
        """Takes answers that are to be made."""
        with self.lock:
            self.waiting += answers
        for _ in answers:
            self.thread.submit(self._answer_next)

    def wait(self) -> None:
        """Returns when everything submitted so far is over."""
        self.thread.submit(lambda: None).result(timeout=60)

    def run(self, call: Callable[[], Any]) -> Any:
        """The result of a call that takes its turn among the others."""

        def run() -> Any:
            with self._own_generators():
                return call()

        return self.thread.submit(run).result()

    def next_batch(self, is_short: bool = False) -> list[Answer]:
        """Takes out what is decoded next: the answer that has waited longest, and those that can share its call; or
        only short ones. A request of many answers has its next ones behind the first ones of all others."""
        with self.lock:
            self.waiting.sort(key=lambda answer: answer.index // LARGEST_BATCH)  # stable
            found = [answer for answer in self.waiting if answer.is_short or not is_short]
            batch = [answer for answer in found if answer.kind == found[0].kind][:LARGEST_BATCH]
            self.waiting = [answer for answer in self.waiting if answer not in batch]
        return batch

    def _answer_next(self, is_short: bool = False) -> None:
        """On the thread that all calls share."""
        batch = []
        for answer in self.next_batch(is_short):
            answer.cut_off() if answer.is_cancelled.is_set() else batch.append(answer)
        try:
            if batch:
                self._generate(batch, is_short)
        except Exception as error:
            log.exception("a call failed")
            for answer in batch:
                answer.fail(as_request_error(error))

    def _own_generators(self, is_needed: bool = True) -> Any:
        """What a seed does to the generators of this process ends with its call, and reaches none that is let in."""
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        return torch.random.fork_rng(devices, enabled=is_needed)

    def turns(self, config: GenerationConfig) -> Turns:
        """Short answers are made between the forwards of a call, and theirs let nobody in."""
        # A static cache is the model's only one, and `max_time` is for all that happens in a call.
        has_room = config.cache_implementation is None and config.max_time is None
        return Turns(self._let_in if has_room else lambda: None)

    def _let_in(self) -> None:
        if self.waiting:
            self._answer_next(is_short=True)

    def _generate(self, batch: list[Answer], is_let_in: bool = False) -> None:
        asked, start = batch[0].asked, time.perf_counter()
        config = copy.copy(asked.config)
        config.max_new_tokens = max(answer.limit for answer in batch)
        is_long = not all(answer.is_short for answer in batch)
        streamer = Batch(batch, self.turns(config).take) if is_long else Batch(batch)
        keywords = {**asked.settings, "generation_config": config, "stopping_criteria": [streamer]}
        keywords["logits_processor"] = asked.processors
        hook: Any = nullcontext()
        if asked.settings["strategy"] == "ar" and any(answer.asked.likeliest is not None for answer in batch):
            hook = self.model.register_forward_hook(streamer.take_logits)
        try:
            with hook, self._own_generators(asked.seed is not None or is_let_in):
                if asked.seed is not None:
                    torch.manual_seed(asked.seed)
                elif is_let_in:
                    torch.seed()
                prompts = pad_left([a.asked.prompt for a in batch], config.pad_token_id or 0, self.model.device)
                self.model.generate(**prompts, **keywords, streamer=streamer)
        except Exception as error:
            self._fail(batch, error, is_let_in)
        else:
            _finish(batch, time.perf_counter() - start)

    def _fail(self, batch: list[Answer], error: Exception, is_let_in: bool) -> None:
        """Answers of a batch that failed are tried again one by one: what one is to blame for concerns no other."""
        unfinished = [answer for answer in batch if not answer.is_over]
        if len(batch) > 1:
            for answer in unfinished:
                answer.replayed, answer.chances = answer.tokens[::-1], []
                answer.forwards = answer.drafted = answer.accepted = 0
                self._generate([answer], is_let_in)
            return
        if not isinstance(error, ValueError):
            log.error("%s: failed", batch[0].request_id, exc_info=error)
        for answer in unfinished:
            answer.fail(as_request_error(error))


def _finish(batch: list[Answer], seconds: float) -> None:
    """Ends all answers of a call, and notes what they took."""
    others = f", beside {len(batch) - 1} others" if len(batch) > 1 else ""
    for answer in batch:
        if answer.is_cancelled.is_set() and not answer.is_over:
            answer.cut_off()
            continue
        answer.finish("length")  # by `max_time`, if it is not over
        prompt, new, forwards = len(answer.asked.prompt), len(answer.tokens), answer.forwards_taken
        text = f"{prompt} prompt tokens, {new} new in {forwards} forwards"
        text += f" ({new / max(1, forwards):.2f} tokens per forward)"
        if answer.drafted:
            text += f", {answer.accepted} of {answer.drafted} drafts accepted"
        log.info("%s: %s, %.2f s (%.0f tokens/s)%s", answer.request_id, text, seconds, new / seconds, others)
