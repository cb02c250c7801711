"""Settings of `wedlm adapt`, which are its options too. Light to import: `wedlm --help` needs no torch."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..console.prompts import PROMPT_FILE

RevisionOption = Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")]
GgufOption = Annotated[str | None, Option(help="Name of a GGUF file in that folder or Hub id.")]
DeviceOption = Annotated[str | None, Option(help="Such as cpu or cuda; default: cuda if there is one.")]


@dataclass(frozen=True)
class AdaptConfig:
    """Adapter.

    What [`adapt`] is to do; the first line is the title of its options in `wedlm adapt --help`.

    Args:
        minutes: of work, over all calls; a third of them for answers, at least half for training.
        tokens: of answers to write; training then takes six mask rows for each of them.
        prompts: file of prompts (see [`read_prompts`]); by default they are drawn from the model.
        answers: file of answers of the model (see [`read_answers`]), such as `work/answers.jsonl` of another run:
            none are written, and all the time goes into training.
        start: folder or Hub id of a mask adapter of the model, to be trained further; by default a new one.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in the base's folder or Hub id.
        rank: of a new adapter's updates; 64 by default.
        head_width: hidden units of its previous-token head, 0 for none; 640 by default.
        device: such as `"cuda"`; by default a GPU if there is one.
        seed: of prompts, sampled answers and training.

    Raises:
        ValueError: for no budget, for one that is not positive, for `prompts` beside `answers`, and for a shape of an
            adapter that has its own.
    """

    minutes: Annotated[float | None, Option(help="Budget: minutes of work, over all runs.")] = None
    tokens: Annotated[int | None, Option(help="Budget: tokens of answers that the model writes.")] = None
    prompts: Annotated[Path | None, Option(help=f"{PROMPT_FILE}; default: the model writes its own.")] = None
    answers: Annotated[Path | None, Option(help="File of the model's answers, instead of new ones.")] = None
    start: Annotated[str | None, Option("--from", help="Adapter to train further: folder or Hub id.")] = None
    revision: RevisionOption = None
    gguf_file: GgufOption = None
    rank: Annotated[int | None, Option(min=1, help="Rank of a new adapter's updates; default: 64.")] = None
    head_width: Annotated[
        int | None, Option(min=0, help="Hidden units of its previous-token head; 0 for none, default: 640.")
    ] = None
    device: DeviceOption = None
    seed: Annotated[int, Option(help="Of prompts, sampled answers and training.")] = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise ValueError("A budget is needed: `minutes` of work or `tokens` of answers.")
        for name in ("minutes", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, got {value}.")
        if self.prompts is not None and self.answers is not None:
            raise ValueError("`answers` need no `prompts`: pass one of the two.")
        if self.start is not None and (self.rank, self.head_width) != (None, None):
            raise ValueError(f"The adapter {self.start!r} has its own `rank` and `head_width`: leave these out.")

    def identity(self, base: str) -> dict[str, Any]:
        """What a run in a folder must agree on with the one that began it. The budget may grow."""
        digest = None if self.prompts is None else hashlib.sha256(self.prompts.read_bytes()).hexdigest()
        names = ("start", "revision", "gguf_file", "rank", "head_width", "seed")
        return {"base": base, "prompts": digest} | {name: getattr(self, name) for name in names}
