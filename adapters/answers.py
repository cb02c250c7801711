"""A model's own answers: what a mask adapter of it is trained on (docs/faster.md).

Prompts are the user's, or drawn from the model itself: the chat template up to the user's turn, continued at
temperature 1. Each is answered by the model, greedily or sampled, and the answers are appended to a JSONL file, so
that a run may be stopped at any moment and goes on where it was.
"""

import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from ..console.prompts import Turns, encode, read_rows
from ..generation.state import keeps_state

# What a drawn prompt begins with. Left to itself a small model asks the same few questions again and again.
STARTERS = tuple(
    r"""
What is|What are|What does|What happens when|What would you|What's the difference between|How do|How does
How can I|How many|How long|How to|Why do|Why is|Why does|Who was|Who is|When did|When is|Where is|Where can
Which|Is it|Are there|Can you|Could you|Do you|Does|Should I|Would|Explain|Explain in simple words
Explain step by step|Describe|Define|Tell me about|Tell me a|Teach me|Give me|Give an example of|Give me three
Name five|Name the|List|List the steps to|List ten|List the main|Make a list of|Make a table of|Make a plan for
Write|Write a short story about|Write a poem about|Write an email to|Write a letter|Write a paragraph about
Write a recipe for|Write a dialogue between|Write a title for|Write a function that|Write a Python function
Write a Python program that|Write a Python class|Write a JavaScript|Write a SQL query|Write a Java
Write a bash script|Write HTML|Write code|Write unit tests|Fix this code:\n|Fix the bug|def |Rewrite
Rewrite this sentence:|Rewrite in a formal tone:|Rephrase|Paraphrase|Correct the grammar:|Shorten|Summarize
Summarize the following text:\n|Translate|Translate to French:|Turn this into a list:|Compare|Contrast|Classify
Convert|Calculate|Solve|Solve the equation|If|Suppose|Imagine|I have|I want to|I need|I am|I'm trying to|My
Help me|Please|Let's|Create|Create a|Generate|Generate five|Suggest|Recommend|Plan|Design|Outline|Discuss
Discuss the role of|Argue|Compose|Draft|Act as|You are|Find|Identify|Extract|Answer the question:|Choose
Complete|Continue the story:|Fill in|Sort|Order|Reverse|Count|Spell|Format as JSON:|A train|In which|In history,
In biology,|In physics,|In Python,|The|Here is|Hello|Hi|Thanks|Tips for|Steps to|Facts about|Ideas for
Benefits of|History of
""".strip()
    .replace("\n", "|")
    .replace("\\n", "\n")
    .split("|")
)
_DRAWN_FROM = 200  # likeliest tokens; from all of them, a small model would draw gibberish
_FIRST = 8  # prompts of the first batch, or a sixth of `batch_size` if that is more
_EMPTY_BATCHES = 5  # after so many batches in a row without an answer, it gives up
_USER = "\N{WHITE STAR}user\N{WHITE STAR}"  # stands for the user's text while the chat template is taken apart


class Answer(TypedDict):
    """One line of the file: `prompt_ids` (chat template included), `response_ids` (its end token too, unless the
    answer was cut at `max_new_tokens`), whether it is the `greedy` answer, and the number of its `batch`."""

    prompt_ids: list[int]
    response_ids: list[int]
    greedy: bool
    batch: int


@dataclass(frozen=True)
class AnswerConfig:
    """How prompts are drawn and answered.

    Args:
        batch_size: prompts answered at once.
        max_prompt_tokens: longer prompts are left out; drawn ones end within a third of it.
        max_new_tokens: longest answer, in tokens.
        temperature: of sampled answers. Every second batch is greedy.
        seed: the noise of a batch is a function of this and of the batch's number.

    Raises:
        ValueError: for a size below 1 or a temperature that is not positive.
    """

    batch_size: int = 48
    max_prompt_tokens: int = 192
    max_new_tokens: int = 192
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not self.temperature > 0:
            raise ValueError(f"`temperature` must be greater than 0, got {self.temperature}.")


@dataclass(frozen=True)
class AnswerCount:
    """How many `answers` a file holds, how many response `tokens` in them, and how many have `ended` by themselves."""

    answers: int
    tokens: int
    ended: int

    def plus(self, answers: Sequence[Answer], ends: Collection[int]) -> "AnswerCount":
        """With more answers."""
        tokens = sum(len(answer["response_ids"]) for answer in answers)
        ended = sum(answer["response_ids"][-1:] != [] and answer["response_ids"][-1] in ends for answer in answers)
        return AnswerCount(self.answers + len(answers), self.tokens + tokens, self.ended + ended)


def read_user_prompts(file: Path) -> list[str | Turns]:
    """The user's prompts: texts, and conversations of several turns (docs/reference.md says what files hold).

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for what can be read only once, and as [`read_rows`].
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise ValueError(f"The prompts must be a file, since a run that goes on reads it again: got {str(file)!r}.")
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"The prompts must be UTF-8 text, got a binary file: {str(file)!r} ({error}).") from None
    return [row.prompt for row in read_rows(str(file), text)]


def check_conversations(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | Turns]) -> None:
    """Raises `ValueError` for a conversation that the chat template refuses, and for any without a chat template.

    Templates refuse conversations by their roles: one of each order of roles is tried.
    """
    template = _Template.of(tokenizer)
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    for chat in {tuple(turn["role"] for turn in chat): chat for chat in chats}.values():
        template.prompt(chat)


class DamagedAnswersError(ValueError):
    """A line of a file of answers is none."""

    def __init__(self, file: Path, line: int):
        self.file = file
        what = "must be an object with the lists `prompt_ids` and `response_ids` of whole numbers"
        super().__init__(f"Line {line} of {str(file)!r} {what}.")


def read_answers(file: Path) -> list[Answer]:
    """All whole lines of the file, which may still grow; an absent file has none.

    Raises:
        DamagedAnswersError: for a line that is no answer, with its number.
    """
    return [answer for _, answer in _lines(file)]


def _lines(file: Path) -> Iterator[tuple[int, Answer]]:
    """As [`read_answers`], with the byte at which each line begins."""
    lines = file.read_bytes().split(b"\n") if file.exists() else []
    end = 0
    for number, line in enumerate(lines, start=1):
        start, end = end, end + len(line) + 1
        if not line.strip():
            continue
        try:
            answer = json.loads(line)
            lists = [answer[name] for name in ("prompt_ids", "response_ids")]
            is_whole = all(type(tokens) is list and all(type(token) is int for token in tokens) for tokens in lists)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            if number == len(lines):  # not written to its end
                break
            raise DamagedAnswersError(file, number) from None
        yield start, answer


def write_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    prompts: Sequence[str | Turns] | None = None,
    config: AnswerConfig | None = None,
    is_over: Callable[[int], bool] = lambda written: False,
) -> Iterator[AnswerCount]:
    """Answers prompts for as long as the caller iterates, and appends the answers of each batch to `file`.

    A run that was stopped goes on after its last whole batch; its file is then the one an uninterrupted run writes.

    Args:
        model: with a mask adapter, in evaluation mode; answers are those of its next-token head, without the sampling
            settings of its generation config.
        tokenizer: of the model; with a chat template, a text is a user's turn, without one it is plain text.
        file: JSONL, one [`Answer`] a line.
        prompts: the user's; each is answered greedily first and sampled in later rounds. By default they are drawn
            from the model.
        config: how prompts are drawn and answered.
        is_over: asked before every token, with the tokens that each answer of the batch may have so far; once it says
            so, the batch is cut off there, and is the last.

    Yields:
        What the file holds, first as found, then after every batch.

    Raises:
        ValueError: for prompts that are all longer than `max_prompt_tokens`, and for a model that answers nothing.
    """
    config = config or AnswerConfig()
    found = _mend(file)
    writer = _Writer(model, _Template.of(tokenizer), config, is_over, prompts)
    known = {tuple(answer["prompt_ids"]) for answer in found}
    count = AnswerCount(0, 0, 0).plus(found, writer.ends)
    batch, empty = (found[-1]["batch"] + 1 if found else 0), 0
    yield count
    while not is_over(0):
        with _seeded(config.seed, batch, model.device):
            answers = writer.write(batch, known)
        known |= {tuple(answer["prompt_ids"]) for answer in answers}
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(answer) + "\n" for answer in answers))
        count = count.plus(answers, writer.ends)
        batch += 1
        empty = 0 if answers else empty + 1
        if empty == _EMPTY_BATCHES:
            what = "it answers none of the prompts"
            if prompts is None:
                what = "it ends no prompt of its own in time; pass `prompts`, a file of them"
            raise ValueError(f"The model gave no answer in {empty} batches: {what}.")
        yield count


def _mend(file: Path) -> list[Answer]:
    """The answers of a file that a stop may have cut off: then its last batch is removed, to be answered again."""
    starts, answers = [], []
    for start, answer in _lines(file):
        starts.append(start)
        answers.append(answer)
    if not file.exists() or file.read_bytes().endswith(b"\n") or not file.stat().st_size:
        return answers
    kept = [answer for answer in answers if answer["batch"] < answers[-1]["batch"]]
    with file.open("r+b") as stream:
        stream.truncate(starts[len(kept)] if answers else 0)
    return kept


@contextmanager
def _seeded(seed: int, batch: int, device: torch.device) -> Iterator[None]:
    """The global random state is a function of `seed` and `batch` inside, and what it was before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(random.Random(f"{seed} {batch} noise").getrandbits(63))
        yield


@dataclass(frozen=True)
class _Template:
    """The text around a user's turn, up to where the answer begins."""

    tokenizer: PreTrainedTokenizerBase
    before: str
    after: str
    turn_end: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "_Template":
        if tokenizer.chat_template is None:
            return cls(tokenizer, tokenizer.bos_token or "", "", "")
        turn = [{"role": "user", "content": _USER}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, _, after = str(text).partition(_USER)
        first = tokenizer.encode(after, add_special_tokens=False)[:1]
        is_special = bool(first) and first[0] in tokenizer.added_tokens_decoder
        turn_end = str(tokenizer.decode(first)) if is_special else after.strip().partition("\n")[0]
        return cls(tokenizer, before, after, turn_end)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, prompt: str | Turns) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.encode(self.before + prompt + self.after)
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"Without a chat template, a prompt is a single turn of the user, got {len(prompt)} turns."
            )
        return tuple(encode(self.tokenizer, prompt))


class _Writer:
    """Lets a model write prompts and answers."""

    def __init__(
        self,
        model: Any,
        template: _Template,
        config: AnswerConfig,
        is_over: Callable[[int], bool],
        prompts: Sequence[str | Turns] | None,
    ):
        self.model, self.template, self.config, self.is_over = model, template, config, is_over
        ends = model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        rows = dict.fromkeys(template.prompt(prompt) for prompt in prompts or ())
        self.rows = [row for row in rows if len(row) <= config.max_prompt_tokens]
        self.answers_begin: int | None = None  # where a batch's answers begin, while they are written
        if prompts is not None and not self.rows:
            raise ValueError(
                f"All {len(prompts)} prompts are longer than `max_prompt_tokens`, {config.max_prompt_tokens}."
            )

    def write(self, number: int, known: Collection[tuple[int, ...]]) -> list[Answer]:
        """The answers of more than three tokens to the next prompts: the user's in rounds, the first of them greedily,
        or new ones of the model's own."""
        size, limit = self.config.batch_size, self.config.max_new_tokens
        if self.rows:
            batches = -(-len(self.rows) // size)
            rows, greedy = self.rows[number % batches * size :][:size], number < batches
        else:
            # On a slow machine the minutes may end within the first batch: a small one leaves some answers.
            size = min(size, max(_FIRST, size // 6)) if number == 0 else size
            drawn, greedy = self.draw(random.Random(f"{self.config.seed} {number}"), size * 3 // 2), number % 2 == 0
            rows = [row for row in dict.fromkeys(drawn) if row not in known][:size]
        self.answers_begin = max(map(len, rows), default=0)
        texts = self._continue(rows, limit, None if greedy else self.config.temperature) if rows else []
        self.answers_begin = None
        return [
            {"prompt_ids": list(row), "response_ids": text, "greedy": greedy, "batch": number}
            for row, text in zip(rows, texts, strict=True)
            if len(text) > 3
        ]

    def draw(self, rng: random.Random, count: int) -> list[tuple[int, ...]]:
        """Prompts that the model writes itself: user turns that begin with a starter and that it ends in time."""
        template, most = self.template, self.config.max_prompt_tokens
        # Without a template and a BOS token, nothing stands before the starter.
        share = 0.9 if template.encode(template.before) else 1.0
        starts = [rng.choice(STARTERS) if rng.random() < share else "" for _ in range(count)]
        begun = [template.encode(template.before + start) for start in starts]
        drawn = self._continue(begun, max(8, most // 3), temperature=1.0, top_k=_DRAWN_FROM)
        rows = []
        for start, tokens in zip(starts, drawn, strict=True):
            text = start + str(template.tokenizer.decode(tokens))
            user, ended, _ = text.partition(template.turn_end) if template.turn_end else (text, True, "")
            row = template.prompt(user.strip())
            if ended and len(user.split()) > 2 and "\ufffd" not in user and len(row) <= most:
                rows.append(row)
        return rows

    def _stop(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        written = 0 if self.answers_begin is None else ids.shape[1] - self.answers_begin
        return torch.full((len(ids),), self.is_over(written), device=ids.device)

    @torch.inference_mode()
    def _continue(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, temperature: float | None, top_k: int = 0
    ) -> list[list[int]]:
        """What the model writes after each row, up to and with its end token; greedily without a `temperature`."""
        pad = self.template.tokenizer.pad_token_id
        pad = min(self.ends, default=0) if pad is None else pad
        tokens = [torch.tensor(row, dtype=torch.long, device=self.model.device) for row in rows]
        left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        ids = pad_sequence(tokens, padding_value=pad, **left)
        # Token by token in our own loop: it costs what AR `generate` does, but rows that have ended cost nothing.
        settings: dict[str, Any] = {"strategy": "wedlm", "verification": "exact", "window_size": 1, "do_sample": False}
        if keeps_state(self.model):  # which takes no batches there
            settings = {"strategy": "ar", "do_sample": False}
        if temperature is not None:
            settings |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": 1.0}
        output = self.model.generate(
            ids,
            attention_mask=pad_sequence([torch.ones_like(row) for row in tokens], **left),
            max_new_tokens=max_new_tokens,
            repetition_penalty=1.0,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([self._stop]),
            tokenizer=self.template.tokenizer,  # for stop strings that a checkpoint stores
            **settings,
        )
        texts: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return [
            text[: next((i + 1 for i, token in enumerate(text) if token in self.ends), len(text))] for text in texts
        ]
