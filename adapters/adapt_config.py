"""Settings of `wedlm adapt`, which are its options too. Light to import: `wedlm --help` needs no torch."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_MASKS = 32  # generation's LARGEST_WINDOW, which takes torch to import


@dataclass(frozen=True)
class AdaptConfig:
    """Adapter.

    What [`adapt`] is to do; the first line is the title of its options in `wedlm adapt --help`.

    Args:
        minutes: budget in minutes of work, over all runs: a fifth for answers, a tenth for the root head, the rest for
            masks and for measuring.
        tokens: budget in tokens of answers; training then takes three mask rows for each of them.
        prompts: prompts, one a line, or .jsonl with `prompt` or `messages`; default: the model writes its own.
        answers: file of the model's own answers, such as work/answers.jsonl of another run: no others are written.
        start: folder or Hub id of a mask adapter to train further, such as that of the model that this one is a
            fine-tune of; default: a new one.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in that folder or Hub id.
        rank: of a new adapter's updates; default: 64.
        head_width: hidden units of a new adapter's previous-token head, 0 for none; default: 640.
        root_width: hidden units of a new root head, which drafts where no masks did; 0 for none. Default: 1024.
        num_masks: drafts of a forward at most; 16 for answers of a fixed form, which are easy to foresee. Default: 4,
            or what `start` has.
        device: such as cpu or cuda; default: cuda if there is one.
        seed: of prompts, sampled answers and training.

    Raises:
        ValueError: for no budget, for a number out of range, for `prompts` beside `answers`, and for the shape of an
            adapter that has its own.
    """

    minutes: float | None = None
    tokens: int | None = None
    prompts: Path | None = None
    answers: Path | None = None
    start: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    rank: int | None = None
    head_width: int | None = None
    root_width: int | None = None
    num_masks: int | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise ValueError("A budget is needed: `--minutes` of work, such as 60, or `--tokens` of answers.")
        for name in ("minutes", "tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be a finite number greater than 0, got {value}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be an integer of at least 0, below {2**32}, got {self.seed}.")
        if self.prompts is not None and self.answers is not None:
            raise ValueError("`answers` need no `prompts`: pass one of the two.")
        least = {"rank": 1, "head_width": 0, "root_width": 0, "num_masks": 1}
        given = {name: value for name in least if (value := getattr(self, name)) is not None}
        own = [f"`{name}`" for name in given if name != "num_masks"]  # which alone may change
        if self.start is not None and own:
            raise ValueError(f"The adapter {self.start!r} has its own shape: leave out {' and '.join(own)}.")
        for name, value in given.items():
            if value < least[name]:
                raise ValueError(f"`{name}` must be at least {least[name]}, got {value}.")
        if given.get("num_masks", 0) > MOST_MASKS:
            raise ValueError(f"`num_masks` must be at most {MOST_MASKS}, the rows of a step, got {self.num_masks}.")

    def identity(self, base: str) -> dict[str, Any]:
        """What a run in a folder must agree on with the one that began it. The budget may grow."""
        digest = None if self.prompts is None else hashlib.sha256(self.prompts.read_bytes()).hexdigest()
        names = ("start", "revision", "gguf_file", "rank", "head_width", "root_width", "num_masks", "seed")
        return {"base": base, "prompts": digest} | {name: getattr(self, name) for name in names}
