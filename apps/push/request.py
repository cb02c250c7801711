"""What `wedlm push` is asked for. Light to import: `--help` needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class PushRequest:
    """Push.

    Raises:
        OSError: for a folder that is not there.
    """

    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Of a model, or of an adapter that `wedlm adapt` or PEFT has saved."),
    ]
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="Where to: NAME or OWNER/NAME on the Hub; made if it is not there.")
    ]
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check alone, upload nothing.")] = False
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False
    revision: Annotated[str | None, typer.Option(help="Branch to upload to; default: main.")] = None
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of a commit.")] = False
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload by wedlm push"
    license: Annotated[str | None, typer.Option(help="For the model card, such as apache-2.0.")] = None
    base: Annotated[str | None, typer.Option(help="Of an adapter: the model to check it on; default: its own.")] = None

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise NotADirectoryError(f"There is no folder {str(self.folder)!r}.")
