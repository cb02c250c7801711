"""Settings of `wedlm adapt`, which are its options too. Light to import: `wedlm --help` needs no torch."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AdaptConfig:
    """Adapter.

    What [`adapt`] is to do; the first line is the title of its options in `wedlm adapt --help`.

    Args:
        minutes: budget in minutes of work, over all runs; a third of them for answers, at least half for training.
        tokens: budget in tokens of answers; training then takes six mask rows for each of them.
        prompts: prompts, one a line, or .jsonl with `prompt` or `messages`; default: the model writes its own.
        revision: branch, tag or commit of a Hub id.
        gguf_file: name of a GGUF file in that folder or Hub id.
        rank: of the adapter's updates.
        head_width: hidden units of the previous-token head; 0 for none.
        device: such as cpu or cuda; default: cuda if there is one.
        seed: of prompts, sampled answers and training.

    Raises:
        ValueError: for no budget, and for a number out of range.
    """

    minutes: float | None = None
    tokens: int | None = None
    prompts: Path | None = None
    revision: str | None = None
    gguf_file: str | None = None
    rank: int = 64
    head_width: int = 640
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise ValueError("A budget is needed: `--minutes` of work, such as 60, or `--tokens` of answers.")
        for name in ("minutes", "tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, got {value}.")
        if self.rank < 1 or self.head_width < 0:
            raise ValueError(
                f"`rank` must be at least 1 and `head_width` at least 0, got {self.rank} and {self.head_width}."
            )

    def identity(self, base: str) -> dict[str, Any]:
        """What a run in a folder must agree on with the one that began it. The budget may grow."""
        digest = None if self.prompts is None else hashlib.sha256(self.prompts.read_bytes()).hexdigest()
        names = ("revision", "gguf_file", "rank", "head_width", "seed")
        return {"base": base, "prompts": digest} | {name: getattr(self, name) for name in names}
