"""The model card that `wedlm adapt` writes beside an adapter: what it is, how to use it, what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_USE = """\
```python
import torch
from peft import PeftModel
from wedlm_hf import WeDLMForCausalLM

model = WeDLMForCausalLM.from_pretrained({base!r}, dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, {adapter!r})
output = model.generate(**inputs, strategy="wedlm", verification="exact", max_new_tokens=256)
```"""


def model_card(
    base: str,
    converted: str | None,
    adapter: str,
    facts: dict[str, Any],
    log: Sequence[dict[str, Any]],
    table: dict[str, Any],
) -> str:
    """The text of a model card (README.md), in Markdown.

    Args:
        base: what the adapter was trained for.
        converted: folder of the WeDLM checkpoint made of it; `None` where the base is one.
        adapter: folder of the adapter.
        facts: what it was trained on and for how long.
        log: entries of the training log.
        table: what was measured: `caption`, `columns` and `rows`; may be empty.
    """
    made = (
        f"`{converted}` is that base as a WeDLM checkpoint, its weights unchanged; `wedlm convert {base} FOLDER` "
        "makes it again, so it need not be uploaded with the adapter."
        if converted
        else "The base is a WeDLM checkpoint itself."
    )
    link = "" if Path(base).exists() else f"base_model: {base}\n"  # the Hub links to ids
    parts = [
        f"---\nlibrary_name: peft\npipeline_tag: text-generation\n{link}tags:\n- wedlm\n- mask-adapter\n---\n\n"
        f"# A mask adapter for {base}\n\n"
        "With it, `generate` predicts several tokens in each forward and checks them in the same forward: the text is "
        f"the base model's own, written in fewer forwards. The base's weights are not changed. {made}",
        "## Use\n\n" + _USE.format(base=converted or base, adapter=adapter),
        "## Training\n\n"
        f"On {facts['answers']:,} of the model's own answers ({facts['answer_tokens']:,} tokens, written in "
        f"{facts['answer_seconds'] / 60:.1f} minutes): {facts['mask_rows']:,} mask rows in "
        f"{facts['training_seconds'] / 60:.1f} minutes. Rank {facts['rank']}, a previous-token head of "
        f"{facts['head_width']} units, seed {facts['seed']}. Made by `wedlm adapt`.",
    ]
    if curve := _curve(log):
        parts.append(
            f"Tokens per forward of verified greedy decoding, replayed on {facts['held_out']} answers that were not "
            f"trained on:\n\n{curve}"
        )
    if table:
        parts.append(f"## Measured\n\n{table['caption']}\n\n{_markdown(table['columns'], table['rows'])}")
    return "\n\n".join(parts) + "\n"


def _curve(log: Sequence[dict[str, Any]]) -> str:
    """Tokens per forward against trained mask rows."""
    prefix = "eval_tokens_per_forward_branch_"
    entries = {entry["mask_rows"]: entry for entry in log if f"{prefix}1" in entry}.values()
    if not entries:
        return ""
    names = {name.removeprefix(prefix) for entry in entries for name in entry if name.startswith(prefix)}
    drafts = sorted(int(name) for name in names if name.isdigit())
    columns = ["mask rows", *(f"{count} draft{'s' * (count > 1)}" for count in drafts)]
    rows = [
        [f"{entry['mask_rows']:,}", *(f"{entry[prefix + str(count)]:.2f}" for count in drafts)] for entry in entries
    ]
    return _markdown(columns, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
