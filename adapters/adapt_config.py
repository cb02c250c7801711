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
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in the base's folder or Hub id.
        rank: of the adapter's updates.
        head_width: hidden units of its previous-token head.
        device: such as `"cuda"`; by default a GPU if there is one.
        seed: of prompts, sampled answers and training.

    Raises:
        ValueError: for no budget, and for one that is not positive.
    """

    minutes: Annotated[float | None, Option(help="Budget: minutes of work, over all runs.")] = None
    tokens: Annotated[int | None, Option(help="Budget: tokens of answers that the model writes.")] = None
    prompts: Annotated[Path | None, Option(help=f"{PROMPT_FILE}; default: the model writes its own.")] = None
    revision: RevisionOption = None
    gguf_file: GgufOption = None
    rank: Annotated[int, Option(min=1, help="Rank of the updates.")] = 64
    head_width: Annotated[int, Option(min=0, help="Hidden units of the previous-token head; 0 for none.")] = 640
    device: DeviceOption = None
    seed: Annotated[int, Option(help="Of prompts, sampled answers and training.")] = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise ValueError("A budget is needed: `minutes` of work or `tokens` of answers.")
        for name in ("minutes", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, got {value}.")

    def identity(self, base: str) -> dict[str, Any]:
        """What a run in a folder must agree on with the one that began it. The budget may grow."""
        digest = None if self.prompts is None else hashlib.sha256(self.prompts.read_bytes()).hexdigest()
        names = ("revision", "gguf_file", "rank", "head_width", "seed")
        return {"base": base, "prompts": digest} | {name: getattr(self, name) for name in names}
