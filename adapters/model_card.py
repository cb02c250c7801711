"""The model card that `wedlm adapt` writes beside an adapter: what it is, how to use it, what was measured."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.card import is_hub_id, provenance, render
from ..checkpoints.gguf import split_source


def model_card(
    base: str,
    adapter: str,
    facts: dict[str, Any],
    curve: dict[str, list[Any]],
    table: dict[str, Any],
    figure: str | None = None,
) -> str:
    """The text of a model card (README.md), in Markdown.

    Args:
        base: what the adapter was trained for.
        adapter: folder of the adapter.
        facts: what it was trained on and for how long; `is_chat`, whether the base has a chat template; `gguf_file`
            of the base.
        curve: see [`acceptance_table`].
        table: what was measured: `caption`, `columns` and `rows`; may be empty.
        figure: name of the file with the acceptance curve, if it was drawn.
    """
    _, stated = provenance(base)
    metadata = {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": base if is_hub_id(base) else None,  # the Hub links to ids
        "tags": ["mask-adapter"],
        **stated,
    }
    folder, gguf_file, _ = split_source(base, facts["gguf_file"])
    name = base if is_hub_id(base) else Path(base).absolute().stem
    # The code runs where `wedlm adapt` ran, and shows no absolute path, which is of this machine alone.
    folder, adapter = (
        each if is_hub_id(each) else Path(os.path.relpath(each)).as_posix() for each in (folder, adapter)
    )
    template = Path(__file__).with_suffix(".jinja")
    made: dict[str, Any] = {**facts, "curve": curve, "figure": figure, "table": table, "gguf_file": gguf_file}
    return render(template, metadata, name=name, folder=folder, adapter=adapter, repr=json.dumps, **made)


def read_log(log: Path) -> list[dict[str, Any]]:
    """The lines of a training log, without those that a full disk or a kill has cut off."""
    entries = []
    for line in log.read_bytes().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def acceptance_table(log: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Tokens per forward against trained mask rows: `columns` and `rows` of a table, of the log's evaluations; those
    of chains where the model decodes no branches."""
    has_branches = any("eval_tokens_per_forward_branch_1" in entry for entry in log)
    prefix = f"eval_tokens_per_forward_{'branch' if has_branches else 'chain'}_"
    entries = {entry["mask_rows"]: entry for entry in log if f"{prefix}1" in entry}.values()
    names = {name.removeprefix(prefix) for entry in entries for name in entry if name.startswith(prefix)}
    drafts = sorted(int(name) for name in names if name.isdigit())
    return {
        "columns": ["mask rows", *(f"{count} draft{'s' * (count > 1)}" for count in drafts)],
        "rows": [
            [f"{entry['mask_rows']:,}", *(f"{entry[prefix + str(count)]:.2f}" for count in drafts)]
            for entry in entries
        ],
    }
