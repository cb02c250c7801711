"""Two kinds of work for a small model, written by two public packages: the same texts on every machine.

- *reasoning*: school problems with worked solutions (GSM-Symbolic, by `reasoning-gym`). The answer ends in `#### 42`.
- *extraction*: orders, contacts, appointments and the like (names and places by `Faker`), answered as JSON.

    pip install reasoning-gym==0.1.25 Faker==40.63.0
    python examples/real-wedlm/data.py extraction --count 3

A problem is a function of its task, split, seed and number. Held-out problems never occur in training, whatever their
seed. `check` compares the first training texts with their digest: other versions of the packages write other texts.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from datetime import date, timedelta
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

import reasoning_gym
from faker import Faker

PACKAGES = {"reasoning-gym": "0.1.25", "Faker": "40.63.0"}
DIGEST = "d26620f0aceba8b7ee68aec6b7cf80141d05f5617017dd0e958f2ad56cebf598"
TASKS = ("extraction", "reasoning")
TRAIN_SEED = 0
# Problems that training may draw, by task; what is held out is none of them.
TRAIN_COUNT = 8000


class Problem(NamedTuple):
    """A question and the answer that is learnt."""

    task: str
    question: str
    answer: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The turns before the answer."""
        return [{"role": "user", "content": self.question}]

    @property
    def example(self) -> dict[str, Any]:
        """A line of training data, as TRL and `wedlm train` read it."""
        return {"messages": [*self.prompt, {"role": "assistant", "content": self.answer}]}


def training_problems(task: str) -> Iterator[Problem]:
    """The problems of a task that training draws from, in order."""
    return _problems(task, TRAIN_SEED, TRAIN_COUNT)


def held_out_problems(task: str, count: int, seed: int) -> list[Problem]:
    """Problems drawn with a seed, none of which training can have seen."""
    if task not in TASKS:
        raise ValueError(f"`task` must be one of {TASKS}, got {task!r}.")
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}.")
    # Seeds of training are even, those of held-out problems odd; GSM-Symbolic repeats some problems all the same.
    candidates = (each for each in _problems(task, 2 * seed + 1, 50 * count) if each.question not in _learnt(task))
    found: dict[str, Problem] = {}
    for each in candidates:
        found.setdefault(each.question, each)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"There are only {len(found)} held-out problems of {task!r} with seed {seed}, not {count}.")


def check() -> None:
    """Raises `ValueError` where the installed packages write other texts than those of the weights."""
    learnt = hashlib.sha256()
    for task in TASKS:
        for problem in islice(training_problems(task), 200):
            learnt.update(json.dumps(problem.example).encode())
    if learnt.hexdigest() != DIGEST:
        installed = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        wanted = " ".join(f"{name}=={number}" for name, number in PACKAGES.items())
        raise ValueError(
            f"The installed packages ({installed}) write other problems than those of the weights that were trained: "
            f"`pip install {wanted}`. Digest {learnt.hexdigest()}, expected {DIGEST}."
        )


@cache
def _learnt(task: str) -> frozenset[str]:
    return frozenset(problem.question for problem in training_problems(task))


def _problems(task: str, seed: int, count: int) -> Iterator[Problem]:
    return _reasoning(seed, count) if task == "reasoning" else _extraction(seed, count)


def _reasoning(seed: int, count: int) -> Iterator[Problem]:
    """GSM-Symbolic, without the problems whose solution writes its result otherwise than the answer (8.0 for 8)."""
    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)
    for number in range(count):
        entry = dataset[number]
        solution = entry["metadata"]["answer_cot"].rstrip()
        if solution.endswith(f"#### {entry['answer']}"):
            yield Problem("reasoning", entry["question"], solution)


# --- extraction --------------------------------------------------------------------------------------------------

PRODUCTS = (
    "desk lamp, office chair, water bottle, notebook, backpack, phone case, wireless mouse, keyboard, headphones, "
    "coffee mug, rain jacket, running shoes, yoga mat, garden hose, toolbox, picture frame, wall clock, blanket, "
    "bread knife, frying pan, tea kettle, bicycle helmet, camping tent, sleeping bag, flashlight, printer paper, "
    "monitor stand, USB cable, power bank, bookshelf, floor mat, paint brush, screwdriver set, flower pot"
).split(", ")
REASONS = (
    "a check-up, a haircut, an interview, a viewing, a consultation, a tax review, a repair, a fitting, "
    "a piano lesson, a vaccination, an eye test, a physiotherapy session, a team meeting, a product demo"
).split(", ")
TROUBLES = (
    "does not turn on, makes a loud noise, loses its connection, arrived broken, shows a blank screen, overheats, "
    "has a scratch, is missing a part, stopped charging, leaks, smells of smoke, freezes every hour"
).split(", ")
EVENTS = (
    "book club, street market, jazz concert, charity run, science fair, wine tasting, film night, pottery workshop, "
    "chess tournament, farmers' market, poetry reading, flea market, choir rehearsal, coding meetup"
).split(", ")
OPENINGS = ("", "", "Hello, ", "Hi there! ", "Good morning. ", "Dear team, ", "Hey, ", "Quick note: ")
CLOSINGS = ("", "", " Thanks!", " Best regards", " Many thanks in advance.", " Let me know if anything is unclear.")
ASKS = (
    "Extract the {kind} as JSON with the keys {keys}.",
    "Turn this message into JSON ({keys}).",
    "Read the text and write the {kind} as JSON. Keys: {keys}. Use null for what is not there.",
    "Which {kind} does this describe? Answer in JSON with {keys}.",
)


class _Writer:
    """Draws the pieces of one problem."""

    def __init__(self, seed: int, number: int):
        self.rng = random.Random(f"extraction {seed} {number}")
        self.fake = _faker()
        self.fake.seed_instance(self.rng.getrandbits(64))

    def pick(self, choices: Any) -> Any:
        return self.rng.choice(choices)

    def maybe(self, value: Any, share: float = 0.75) -> Any:
        """The value, or `None`: it does not occur in the text."""
        return value if self.rng.random() < share else None

    def day(self) -> tuple[str, str]:
        """A date as people write it, and as ISO 8601."""
        day = date(2025, 1, 1) + timedelta(days=self.rng.randrange(1000))
        forms = (f"{day:%B} {day.day}, {day.year}", f"{day.day} {day:%B} {day.year}", day.isoformat())
        return self.pick(forms), day.isoformat()

    def time(self) -> str:
        return f"{self.rng.randrange(8, 20):02}:{self.pick(('00', '15', '30', '45'))}"

    def price(self) -> float:
        return self.rng.randrange(300, 30000) / 100

    def phone(self) -> str:
        return f"{self.rng.randrange(200, 1000)}-555-{self.rng.randrange(10000):04}"

    def mail(self, name: str) -> str:
        user = name.lower().replace(" ", self.pick((".", "_", ""))).replace("'", "")
        return f"{user}@{self.fake.domain_name()}"

    def street(self) -> str:
        return f"{self.rng.randrange(1, 400)} {self.fake.street_name()}"

    def text(self, *sentences: str | None, is_ordered: bool = False) -> str:
        """A message of these sentences, `None` left out, in any order."""
        there = [sentence for sentence in sentences if sentence is not None]
        if not is_ordered:
            self.rng.shuffle(there)
        return self.pick(OPENINGS) + " ".join(there) + self.pick(CLOSINGS)


@lru_cache(maxsize=1)
def _faker() -> Faker:
    return Faker("en_US")


def _order(w: _Writer) -> tuple[str, dict[str, Any]]:
    name, city, (said, day) = w.fake.name(), w.fake.city(), w.day()
    items = [
        {"product": product, "quantity": w.rng.randrange(1, 10), "price": w.price()}
        for product in w.rng.sample(PRODUCTS, w.rng.randrange(1, 4))
    ]
    listed = [
        w.pick(("{quantity} x {product} at ${price}", "{quantity} {product} (${price} each)")) for _ in items[:1]
    ]
    goods = ", ".join(listed[0].format(**item) for item in items)
    phone = w.maybe(w.phone(), 0.5)
    text = w.text(
        w.pick(("I would like to order {}.", "Please send me {}.", "My order: {}.", "We need {}.")).format(goods),
        w.pick(("My name is {}.", "The order is for {}.", "Customer: {}.", "This is {}.")).format(name),
        w.pick(("Ship it to {}.", "Delivery to {}, please.", "The address is {}.")).format(
            address := f"{w.street()}, {city}"
        ),
        w.pick(("I need it by {}.", "Please deliver on {}.", "It should arrive on {}.")).format(said),
        phone and w.pick(("Call me at {}.", "My phone number is {}.", "Phone: {}.")).format(phone),
    )
    return text, {"customer": name, "phone": phone, "items": items, "address": address, "delivery_date": day}


def _contact(w: _Writer) -> tuple[str, dict[str, Any]]:
    name, job, company, city = w.fake.name(), w.fake.job(), w.fake.company(), w.fake.city()
    mail, phone = w.maybe(w.mail(name)), w.maybe(w.phone())
    text = w.text(
        w.pick(("I met {} from {}.", "{} works at {}.", "Please add {} of {} to our list.")).format(name, company),
        w.pick(("The job title is {}.", "Position: {}.", "Job: {}.")).format(job),
        mail and w.pick(("You can write to {}.", "The e-mail address is {}.", "Mail: {}.")).format(mail),
        phone and w.pick(("The number is {}.", "Phone {}.", "Calls go to {}.")).format(phone),
        w.pick(("The office is in {}.", "Based in {}.", "They sit in {}.")).format(city),
    )
    return text, {"name": name, "company": company, "job": job, "email": mail, "phone": phone, "city": city}


def _appointment(w: _Writer) -> tuple[str, dict[str, Any]]:
    name, other, (said, day), time = w.fake.name(), f"Dr. {w.fake.last_name()}", w.day(), w.time()
    reason, place, minutes = w.pick(REASONS), w.maybe(w.street()), w.maybe(w.pick((15, 20, 30, 45, 60, 90)))
    text = w.text(
        w.pick(("{} has {} with {}.", "Book {} for {} with {}.", "Put {} down for {} with {}.")).format(
            *((name, reason, other))
        )
        if w.rng.random() < 0.5
        else f"{name} needs {reason} with {other}.",
        w.pick(("It is on {} at {}.", "The date is {}, {}.", "When: {}, {}.")).format(said, time),
        place and w.pick(("The place is {}.", "It takes place at {}.", "Where: {}.")).format(place),
        minutes and w.pick(("It takes {} minutes.", "Plan {} minutes.", "Length: {} minutes.")).format(minutes),
        is_ordered=w.rng.random() < 0.5,
    )
    wanted = {"person": name, "with": other, "reason": reason, "date": day, "time": time}
    return text, wanted | {"place": place, "duration_minutes": minutes}


def _invoice(w: _Writer) -> tuple[str, dict[str, Any]]:
    number, seller, buyer = f"INV-{w.rng.randrange(10000, 100000)}", w.fake.company(), w.fake.company()
    (said, day), (due_said, due) = w.day(), w.day()
    net, tax = w.price(), w.pick((5, 7, 10, 19, 20))
    total = round(net * (100 + tax) / 100, 2)
    text = w.text(
        w.pick(("Invoice {} from {} to {}.", "{} was issued by {} for {}.")).format(number, seller, buyer),
        w.pick(("It is dated {}.", "Date of issue: {}.", "Issued on {}.")).format(said),
        w.pick(("Payment is due on {}.", "Due date: {}.", "Please pay by {}.")).format(due_said),
        w.pick(("Net {} USD plus {} % tax, {} USD in total.", "Net {}, tax {} %, total {}.")).format(net, tax, total),
    )
    wanted = {"invoice_number": number, "seller": seller, "buyer": buyer, "issued": day, "due": due}
    return text, wanted | {"net": net, "tax_percent": tax, "total": total}


def _ticket(w: _Writer) -> tuple[str, dict[str, Any]]:
    name, product, trouble = w.fake.name(), w.pick(PRODUCTS), w.pick(TROUBLES)
    (said, day), number = w.day(), w.maybe(f"{w.pick('ABCDEF')}{w.rng.randrange(10**5, 10**6)}", 0.6)
    mail, urgency = w.maybe(w.mail(name)), w.pick(("low", "medium", "high"))
    text = w.text(
        w.pick(("My {} {}.", "The {} that I bought {}.", "I have a problem: the {} {}.")).format(product, trouble),
        w.pick(("I bought it on {}.", "The purchase was on {}.", "Bought {}.")).format(said),
        number and w.pick(("The order number is {}.", "Order {}.", "My reference is {}.")).format(number),
        w.pick(("My name is {}.", "This is {}.", "Customer: {}.")).format(name),
        mail and w.pick(("Please answer to {}.", "My e-mail is {}.", "Write to {}.")).format(mail),
        w.pick(("The urgency is {}.", "Priority: {}.", "I would call the urgency {}.")).format(urgency),
    )
    wanted = {"customer": name, "email": mail, "product": product, "problem": trouble, "order_number": number}
    return text, wanted | {"purchase_date": day, "urgency": urgency}


def _event(w: _Writer) -> tuple[str, dict[str, Any]]:
    title, host, city, (said, day) = w.pick(EVENTS), w.fake.name(), w.fake.city(), w.day()
    begin, fee, seats = w.time(), w.maybe(w.price()), w.maybe(w.rng.randrange(10, 500))
    text = w.text(
        w.pick(("There is a {} in {}.", "Join us for a {} in {}!", "We announce a {} in {}.")).format(title, city),
        w.pick(("It starts on {} at {}.", "{}, {}.", "Save the date: {}, {}.")).format(said, begin),
        w.pick(("The host is {}.", "{} organizes it.", "Ask {} for details.")).format(host),
        fee and w.pick(("Tickets cost ${}.", "Entry is ${}.", "The fee is ${}.")).format(fee),
        seats and w.pick(("There are {} seats.", "Room for {} people.", "Up to {} guests.")).format(seats),
    )
    wanted = {"event": title, "city": city, "date": day, "start": begin, "host": host}
    return text, wanted | {"price": fee, "seats": seats}


def _travel(w: _Writer) -> tuple[str, dict[str, Any]]:
    name, origin, target = w.fake.name(), w.fake.city(), w.fake.city()
    (said, day), number = w.day(), f"{w.pick(('LH', 'BA', 'AF', 'UA', 'DL', 'KL'))}{w.rng.randrange(100, 1000)}"
    seat, bags = w.maybe(f"{w.rng.randrange(1, 40)}{w.pick('ABCDEF')}"), w.rng.randrange(0, 4)
    text = w.text(
        w.pick(("{} flies from {} to {}.", "Trip of {}: {} to {}.", "Please book {} from {} to {}.")).format(
            name, origin, target
        ),
        w.pick(("The flight is {} on {}.", "Flight {}, {}.", "Take {} on {}.")).format(number, said),
        seat and w.pick(("Seat {}.", "The seat is {}.", "Sitting in {}.")).format(seat),
        w.pick(("Bags: {}.", "Number of bags: {}.", "Checked bags: {}.")).format(bags),
    )
    wanted = {"passenger": name, "from": origin, "to": target, "flight": number, "date": day}
    return text, wanted | {"seat": seat, "bags": bags}


def _job(w: _Writer) -> tuple[str, dict[str, Any]]:
    title, company, city = w.fake.job(), w.fake.company(), w.fake.city()
    pay, (said, day), years = w.maybe(1000 * w.rng.randrange(30, 160)), w.day(), w.maybe(w.rng.randrange(1, 12))
    remote, contact = w.rng.random() < 0.5, w.fake.name()
    text = w.text(
        w.pick(("{} is looking for: {}.", "{} has an opening: {}.", "Now hiring at {}: {}.")).format(company, title),
        w.pick(("The office is in {}.", "Location: {}.", "Place of work: {}.")).format(city),
        pay and w.pick(("The salary is ${} a year.", "Pay: ${}.", "We pay ${} a year.")).format(pay),
        w.pick(("Start on {}.", "You begin on {}.", "Starting date: {}.")).format(said),
        years and w.pick(("{} years of experience are needed.", "Experience: {} years.")).format(years),
        w.pick(("Remote work is possible.", "You may work from home."))
        if remote
        else w.pick(("No remote work.", "Work is on site only.")),
        w.pick(("Contact {}.", "Applications go to {}.", "Ask for {}.")).format(contact),
    )
    wanted = {"title": title, "company": company, "city": city, "salary": pay, "start_date": day}
    return text, wanted | {"experience_years": years, "remote": remote, "contact": contact}


KINDS = {
    "order": _order, "contact": _contact, "appointment": _appointment, "invoice": _invoice, "support ticket": _ticket,
    "event": _event, "flight": _travel, "job offer": _job,
}  # fmt: skip


def _extraction(seed: int, count: int) -> Iterator[Problem]:
    for number in range(count):
        writer = _Writer(seed, number)
        kind = writer.pick(list(KINDS))
        text, wanted = KINDS[kind](writer)
        ask = writer.pick(ASKS).format(kind=kind, keys=", ".join(wanted))
        parts = (ask, text) if writer.rng.random() < 0.7 else (text, ask)
        yield Problem("extraction", "\n\n".join(parts), json.dumps(wanted))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--count", type=int, default=3, help="held-out problems to print")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check()
    for problem in held_out_problems(options.task, options.count, options.seed):
        print(f"{problem.question}\n\n{problem.answer}\n{'-' * 80}")


if __name__ == "__main__":
    main()
