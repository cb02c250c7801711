"""Synthetic tasks: seeded generators of short chat samples, their held-out sets and their exact scores.

Six tasks, each with closed vocabularies and one regular answer format, so that a model of a few million parameters
can learn them from scratch and every answer can be checked without a judge:

- `counting`: a range of numbers, up or down, from its start, end and step, or by continuing its first terms.
- `arithmetic`: word problems of one or two operations, worked in columns from the right with carry and borrow.
- `sorting`: three to seven numbers, or three to six words, in either order.
- `json`: facts told in sentences, written as one JSON object.
- `chat`: questions about facts given in the conversation, "I do not know" when the fact is missing, greetings.
- `python`: the body of a function from its header and docstring.

A prompt belongs to the held-out split when the CRC-32 of its text falls into one bucket of sixteen, so held-out
prompts can be made fresh, in any number and with any seed, and none of them can ever have been trained on.

The held-out split of `python` holds generated functions only, because it must be the same on every machine. Its
training split also draws about three samples in ten from the sources of the standard library of the Python that runs
it; those differ a little between Python versions.

Run as a script it writes held-out prompts as `wedlm report` reads them: those of tasks.jsonl, which lies beside it.

    python examples/wedlm-nano/nano_tasks.py --count 130 --seed 2 --output examples/wedlm-nano/tasks.jsonl
"""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from nano_python import generated_function, stdlib_functions

from wedlm_hf.checkpoints.files import write_text
from wedlm_hf.eval.prompts import Prompt

SPLITS = ("train", "heldout")
HELDOUT_BUCKETS = 16
_MAX_REJECTIONS = 20_000

_NAMES = {
    **dict.fromkeys(("Anna", "Clara", "Emma", "Grace", "Iris", "Lena", "Maria", "Nina", "Rosa", "Tina"), "She"),
    **dict.fromkeys(("Ben", "David", "Frank", "Henry", "Jack", "Karl", "Oscar", "Paul", "Sam", "Victor"), "He"),
}
_CITIES = (
    "Athens Berlin Boston Cairo Delhi Dublin Lima Lisbon London Madrid Oslo Paris Prague Rome Tokyo Vienna".split()
)
_JOBS = "baker cook doctor driver farmer lawyer nurse painter pilot singer teacher writer".split()
_COLORS = "black blue brown green grey pink red white yellow".split()
_PETS = "cat dog duck goat hamster horse parrot rabbit".split()
_THINGS = "bag bike boat car chair coat cup hat kite lamp phone table".split()
_FOODS = "bread cake cheese fish pasta rice salad soup".split()
_STREETS = "Bridge Church Garden Hill Lake Market Mill Park River School".split()
_EVENTS = "concert dinner lesson meeting party race talk trip".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ITEMS = "apples books cards coins eggs marbles nuts pens shells stamps stones tickets".split()
_SORT_WORDS = sorted(_COLORS + _PETS + _THINGS + _FOODS)


MATCHES = {"arithmetic": "number", "json": "json"}
"""How replies are compared with the answer; those of the other tasks must be equal to it."""


def _sample(task: str, prompt: str, answer: str) -> Prompt:
    return _conversation(task, [{"role": "user", "content": prompt}], answer)


def _conversation(task: str, messages: list[dict[str, str]], answer: str) -> Prompt:
    """Turns alternate user and assistant and end with the user; the answer is the whole wanted reply, its working
    included. The text of all turns decides the split."""
    return Prompt(messages, task, (answer,), MATCHES.get(task, "exact"))


# --- counting -------------------------------------------------------------------------------------


def make_counting(rng: random.Random) -> Prompt:
    """4 to 20 terms between 0 and 999 with a step of 1, 2, 3, 4, 5 or 10, up or down."""
    step = rng.choice((1, 2, 3, 4, 5, 10))
    limit = rng.choice((99, 999))
    length = rng.randint(4, min(20, limit // step))
    low = rng.randint(0, limit - step * (length - 1))
    terms = [low + step * index for index in range(length)]
    down = rng.random() < 0.5
    if down:
        terms.reverse()
    first, last = terms[0], terms[-1]
    direction = "down" if down else "up"
    shown = rng.choice((2, 3))
    prompt = rng.choice(
        (
            f"Count {'down ' if down else ''}from {first} to {last} by {step}.",
            f"Count {direction} from {first} to {last} in steps of {step}.",
            f"Write the numbers from {first} {direction} to {last} with step {step}.",
            f"Start at {first} and count {direction} by {step} until {last}.",
            f"Continue {_listed(terms[:shown])} until {last}.",
        )
    )
    return _sample("counting", prompt, _listed(terms[shown:] if prompt.startswith("Continue") else terms))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


# --- arithmetic -----------------------------------------------------------------------------------

_GAINS = ("{who} buys {n} more.", "{who} finds {n} more.", "{who} gets {n} from {other}.", "{other} brings {n} more.")
_LOSSES = ("{who} sells {n}.", "{who} loses {n}.", "{who} gives {n} to {other}.", "{other} takes {n} of them.")


def make_arithmetic(rng: random.Random) -> Prompt:
    """A story of one or two operations on numbers below 1000, worked column by column."""
    who, other = rng.sample(list(_NAMES), 2)
    items = rng.choice(_ITEMS)
    working: list[str] = []
    if rng.random() < 0.35:
        factor = rng.randint(2, 9)
        each = rng.randint(11, 999 // factor)
        story = [
            rng.choice(
                (
                    f"{who} has {factor} boxes with {each} {items} in each box.",
                    f"{who} packs {factor} bags. Each bag holds {each} {items}.",
                    f"{who} collects {each} {items} every day for {factor} days.",
                )
            )
        ]
        total = each * factor
        _work(working, each, "*", factor)
        events = rng.randint(0, 1)
    else:
        total = rng.randint(10, 999)
        story = [
            rng.choice((f"{who} has {total} {items}.", f"There are {total} {items} in the shop of {who}.")),
        ]
        events = rng.randint(1, 2)
    for _ in range(events):
        gain = rng.random() < 0.5 if 20 <= total <= 980 else total < 500
        amount = rng.randint(10, 999 - total if gain else total)
        told = rng.choice(_GAINS if gain else _LOSSES)
        story.append(told.format(who=who, other=other, n=amount))
        _work(working, total, "+" if gain else "-", amount)
        total += amount if gain else -amount
    story.append(rng.choice((f"How many {items} does {who} have now?", f"How many {items} are there in the end?")))
    return _sample("arithmetic", " ".join(story), "\n".join([*working, f"Answer: {total}"]))


def _work(lines: list[str], left: int, operator: str, right: int) -> None:
    """Append one operation of written arithmetic: the operands, one line a column from the right, the result.

    `left` is the result on the last line when there is one, so a second operation goes on in that line. Numbers are
    padded with zeros to three digits, every line of one operator has the same shape, and each column names the carry
    (`+`, `*`) or borrow (`-`) that comes in: each character is a function of characters at fixed distances.

    >>> lines = []
    >>> _work(lines, 347, "+", 85)
    >>> _work(lines, 432, "-", 218)
    >>> lines
    ['347+085', '7+5+0=12', '4+8+1=13', '3+0+1=04', '432-218', '12-8-0=4', '03-1-1=1', '04-2-0=2', '214']
    >>> _work(lines := [], 124, "*", 6)
    >>> lines
    ['124*6', '4*6+0=24', '2*6+2=14', '1*6+1=07', '744']
    """
    operation = operator + (str(right) if operator == "*" else f"{right:03d}")
    lines[-1:] = [f"{left:03d}{operation}"]
    carry, result = 0, 0
    for place in (1, 10, 100):
        a, b = left // place % 10, right // place % 10
        if operator == "-":
            borrow = int(a < b + carry)
            value = 10 * borrow + a - b - carry
            lines.append(f"{borrow}{a}-{b}-{carry}={value}")
            carry = borrow
        else:
            b = right if operator == "*" else b
            value = (a * b if operator == "*" else a + b) + carry
            lines.append(f"{a}{operator}{b}+{carry}={value:02d}")
            carry = value // 10
        result += value % 10 * place
    lines.append(f"{result:03d}")


# --- sorting --------------------------------------------------------------------------------------


def make_sorting(rng: random.Random) -> Prompt:
    """Distinct numbers from 1 to 99 in either order, or distinct words in the order of the alphabet or its reverse."""
    down = rng.random() < 0.5
    values: list[int] | list[str]
    if rng.random() < 0.7:
        values = rng.sample(range(1, 100), rng.randint(3, 7))
        prompt = rng.choice(
            (
                f"Sort these numbers in {'descending' if down else 'ascending'} order: ",
                f"Sort from {'largest to smallest' if down else 'smallest to largest'}: ",
                f"Put the numbers in {'falling' if down else 'rising'} order: ",
            )
        )
    else:
        values = rng.sample(_SORT_WORDS, rng.randint(3, 6))
        prompt = rng.choice(
            (
                f"Sort these words {'from Z to A' if down else 'from A to Z'}: ",
                f"Put the words in {'reverse alphabetical' if down else 'alphabetical'} order: ",
            )
        )
    return _sample("sorting", prompt + _listed(values), _listed(sorted(values, reverse=down)))


# --- json -----------------------------------------------------------------------------------------


def make_json(rng: random.Random) -> Prompt:
    """Facts about a person, a product or an event in any order; the object's keys follow one fixed order."""
    record, sentences = rng.choice((_person, _person, _product, _event))(rng)
    order = rng.choice(("Write these facts as JSON: ", "Turn this text into JSON: ", "Give me JSON for this: "))
    return _sample("json", order + " ".join(sentences), json.dumps(record))


def _person(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    name = rng.choice(list(_NAMES))
    record: dict[str, Any] = {"name": name}
    facts = []  # sentences with the subject left open
    if rng.random() < 0.8:
        record["age"] = age = rng.randint(18, 90)
        facts.append(rng.choice((f"{{who}} is {age} years old.", f"{{who}} is {age}.")))
    if rng.random() < 0.6:
        record["job"] = job = rng.choice(_JOBS)
        facts.append(rng.choice((f"{{who}} works as a {job}.", f"{{who}} is a {job}.")))
    if rng.random() < 0.5:
        record["city"] = city = rng.choice(_CITIES)
        facts.append(rng.choice((f"{{who}} lives in {city}.", f"{{who}} has a flat in {city}.")))
    else:
        number, street, city = rng.randint(1, 99), f"{rng.choice(_STREETS)} Street", rng.choice(_CITIES)
        record["address"] = {"street": street, "number": number, "city": city}
        facts.append(f"{{who}} lives at {number} {street} in {city}.")
    if rng.random() < 0.5:
        record["pets"] = pets = rng.sample(_PETS, rng.randint(0, 2))
        facts.append("{who} has " + (" and ".join(f"a {pet}" for pet in pets) or "no pets") + ".")
    rng.shuffle(facts)
    subjects = [name] + [rng.choice((name, _NAMES[name])) for _ in facts[1:]]
    return record, [fact.format(who=who) for fact, who in zip(facts, subjects, strict=True)]


def _product(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    thing, color = rng.choice(_THINGS), rng.choice(_COLORS)
    price, stock = rng.randint(5, 400), rng.randint(0, 99)
    record: dict[str, Any] = {"product": thing, "color": color, "price": price}
    costs = rng.choice((f"The {thing} costs {price} dollars.", f"The price of the {thing} is {price} dollars."))
    sentences = [costs, rng.choice((f"The {thing} is {color}.", f"The color of the {thing} is {color}."))]
    if rng.random() < 0.7:
        record["stock"] = stock
        sentences.append(rng.choice((f"There are {stock} in stock.", f"The shop has {stock} left.")))
    if rng.random() < 0.3:
        record["new"] = new = rng.random() < 0.5
        sentences.append(f"The {thing} is {'new' if new else 'used'}.")
    rng.shuffle(sentences)
    return record, sentences


def _event(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    event, day, city, hour = rng.choice(_EVENTS), rng.choice(_DAYS), rng.choice(_CITIES), rng.randint(7, 21)
    guests = rng.sample(list(_NAMES), rng.randint(1, 3))
    record = {"event": event, "day": day, "hour": hour, "city": city, "guests": guests}
    listed = guests[0] if len(guests) == 1 else f"{', '.join(guests[:-1])} and {guests[-1]}"
    sentences = [
        rng.choice((f"The {event} is on {day} at {hour}.", f"On {day} at {hour} there is a {event}.")),
        rng.choice((f"The {event} takes place in {city}.", f"The place of the {event} is {city}.")),
        rng.choice((f"The guests are {listed}.", f"The {event} is for {listed}.")),
    ]
    rng.shuffle(sentences)
    return record, sentences


# --- chat -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Relation:
    """A kind of fact: how it is told, asked about by name or value, and answered; {n} is the name, {v} the value."""

    values: list[str]
    told: tuple[str, ...]  # the first form is also the answer
    asked: tuple[str, ...]
    asked_back: str
    clause: str  # completes "I do not know ..." for a question by name
    clause_back: str


_RELATIONS = (
    _Relation(
        _CITIES,
        ("{n} lives in {v}.", "The home of {n} is in {v}."),
        ("Where does {n} live?", "In which city does {n} live?"),
        "Who lives in {v}?",
        "where {n} lives",
        "who lives in {v}",
    ),
    _Relation(
        _JOBS,
        ("{n} works as a {v}.", "{n} is a {v}."),
        ("What is the job of {n}?", "What does {n} work as?"),
        "Who works as a {v}?",
        "what {n} works as",
        "who works as a {v}",
    ),
    _Relation(
        _PETS,
        ("{n} has a {v}.", "{n} owns a {v}."),
        ("Which pet does {n} have?", "What animal does {n} have?"),
        "Who has a {v}?",
        "which pet {n} has",
        "who has a {v}",
    ),
    _Relation(
        _FOODS,
        ("{n} likes {v}.", "{n} loves to eat {v}."),
        ("What does {n} like?", "Which food does {n} like?"),
        "Who likes {v}?",
        "what {n} likes",
        "who likes {v}",
    ),
    _Relation(
        [str(age) for age in range(18, 91)],
        ("{n} is {v} years old.", "The age of {n} is {v}."),
        ("How old is {n}?", "What is the age of {n}?"),
        "Who is {v} years old?",
        "how old {n} is",
        "who is {v} years old",
    ),
    _Relation(
        _COLORS,
        ("The car of {n} is {v}.", "{n} drives a {v} car."),
        ("What color is the car of {n}?", "Which color does the car of {n} have?"),
        "Whose car is {v}?",
        "what color the car of {n} is",
        "whose car is {v}",
    ),
)
_NOTED = "Thank you, I will remember that."


def make_chat(rng: random.Random) -> Prompt:
    """Two to five facts and a question in one turn, or a second turn that asks; one sample in twelve is a greeting."""
    if rng.random() < 1 / 12:
        return _greeting(rng)
    names = rng.sample(list(_NAMES), rng.randint(2, 4))
    count = rng.randint(2, 5)
    pairs = rng.sample([(name, relation) for name in names for relation in _RELATIONS], count + 1)
    taken: set[str] = set()
    facts = []
    for name, relation in pairs:  # no value twice, so that a question by value has one answer
        value = rng.choice([value for value in relation.values if value not in taken])
        taken.add(value)
        facts.append((name, relation, value))
    unknown = facts.pop()
    text = " ".join(rng.choice(relation.told).format(n=name, v=value) for name, relation, value in facts)
    questions = [_question(rng, *(unknown if rng.random() < 0.15 else fact), unknown) for fact in rng.sample(facts, 2)]
    (question, answer), (second_question, second_answer) = questions
    shape = rng.random()
    if shape < 0.6:
        return _sample("chat", f"{text} {question}", answer)
    if shape < 0.8:
        turns = [text, _NOTED, question]
    else:
        turns = [f"{text} {question}", answer, second_question]
        answer = second_answer
    roles = ("user", "assistant", "user")
    return _conversation("chat", [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)], answer)


def _question(
    rng: random.Random, name: str, relation: _Relation, value: str, unknown: tuple[str, _Relation, str]
) -> tuple[str, str]:
    """A question about the fact, by name or by value, with its answer; the fact `unknown` was never told."""
    told = (name, relation, value) != unknown
    if rng.random() < 0.6:
        question, clause = rng.choice(relation.asked), relation.clause
    else:
        question, clause = relation.asked_back, relation.clause_back
    answer = relation.told[0] if told else f"I do not know {clause}."
    return question.format(n=name, v=value), answer.format(n=name, v=value)


def _greeting(rng: random.Random) -> Prompt:
    hello = rng.choice(("Hello", "Hi", "Good morning", "Good evening", "Hey"))
    name = rng.choice(list(_NAMES))
    prompt, answer = rng.choice(
        (
            (f"{hello}!", "Hello! How can I help you?"),
            (f"{hello}, my name is {name}.", f"Hello {name}! How can I help you?"),
            (f"{hello}, I am {name}. What is my name?", f"Your name is {name}."),
            (f"{hello}, I am {name}. Who are you?", f"Hello {name}! I am a small language model."),
            (
                f"{hello}! What can you do?",
                "I can count, calculate, sort, write JSON and answer questions about facts.",
            ),
            (f"Thank you, {name} and I are happy.", "You are welcome!"),
            ("Thank you!", "You are welcome!"),
            ("What are you?", "I am a small language model."),
        )
    )
    return _sample("chat", prompt, answer)


# --- python ---------------------------------------------------------------------------------------

_PYTHON_ORDER = "Complete this Python code:\n"


def make_python(rng: random.Random, stdlib_share: float = 0.0) -> Prompt:
    """A function or class header with its docstring; the answer is the indented body.

    `stdlib_share` is the probability of a function from the standard library's sources instead of a generated one.
    """
    if rng.random() < stdlib_share:
        header, body = rng.choice(stdlib_functions())
    else:
        header, body = generated_function(rng)
    return _sample("python", _PYTHON_ORDER + header, body)


# --- sets of samples ------------------------------------------------------------------------------

TASKS: dict[str, Callable[[random.Random], Prompt]] = {
    "counting": make_counting,
    "arithmetic": make_arithmetic,
    "sorting": make_sorting,
    "json": make_json,
    "chat": make_chat,
    "python": make_python,
}
_TRAIN_TASKS: dict[str, Callable[[random.Random], Prompt]] = {
    **TASKS,
    "python": functools.partial(make_python, stdlib_share=0.3),
}


def is_heldout(prompt: str) -> bool:
    """Whether this prompt is reserved for evaluation; a function of its text alone."""
    return zlib.crc32(prompt.encode("utf-8")) % HELDOUT_BUCKETS == 0


def generate_samples(task: str, count: int, seed: int, split: str = "train") -> Iterator[Prompt]:
    """Yield `count` samples of `task`, the same ones for the same arguments.

    Samples of the split "heldout" have pairwise different prompts, none of which the split "train" can ever hold.

    Raises:
        ValueError: unknown `task` or `split`, `count` below 1, or, while iterating, more held-out samples wanted than
            the task has prompts.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}")
    return _generate(task, count, seed, split)


def _generate(task: str, count: int, seed: int, split: str) -> Iterator[Prompt]:
    rng = random.Random(f"{task}/{split}/{seed}")
    make = (_TRAIN_TASKS if split == "train" else TASKS)[task]
    seen: set[str] = set()
    for produced in range(count):
        for _ in range(_MAX_REJECTIONS):
            sample = make(rng)
            if is_heldout(sample.text) == (split == "heldout") and sample.text not in seen:
                break
        else:
            raise ValueError(
                f"task {task!r} has no more than about {produced} different held-out prompts, got {count}"
            )
        if split == "heldout":
            seen.add(sample.text)
        yield sample


def as_row(sample: Prompt) -> dict[str, Any]:
    """As `wedlm report` reads it: `task`, `prompt` or `messages`, `answer`, and `match` where that is not exact."""
    first, *others = sample.messages
    turns = {"messages": list(sample.messages)} if others else {"prompt": first["content"]}
    match = {"match": sample.match} if sample.match != "exact" else {}
    return {"task": sample.task, **turns, "answer": sample.answers[0], **match}


def main(
    output: Annotated[Path, typer.Option(help="JSONL file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Samples of each task.")] = 130,
    seed: int = 2,
    split: Annotated[str, typer.Option(help=" or ".join(SPLITS))] = "heldout",
) -> None:
    """Write samples of every task as JSON lines."""
    rows = [as_row(sample) for task in TASKS for sample in generate_samples(task, count, seed, split)]
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{output}: {len(rows)} samples")


if __name__ == "__main__":
    typer.run(main)
