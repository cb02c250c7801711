"""Draws the figures of docs/start.md, in light and dark, from what the code computes.

python docs/figures/draw.py
"""

from html import escape
from pathlib import Path

import torch
from transformers import AutoTokenizer

from wedlm_hf import WeDLMForCausalLM
from wedlm_hf.generation.attention import visibility
from wedlm_hf.generation.rows import Row, SequenceState, Tree, lay_out
from wedlm_hf.generation.trace import TraceStep
from wedlm_hf.modeling_wedlm.dual_stream import dual_stream_mask_function
from wedlm_hf.training.streams import reorder_blocks

HERE = Path(__file__).parent
NANO = HERE.parents[1] / "examples" / "wedlm-nano"
STYLE = """
  svg { font: 14px system-ui, sans-serif; --ink: #1f2328; --soft: #656d76; --line: #d0d7de;
        --known: #cfe3ff; --cached: #e6e9ee; --filled: #c9f0d0; --mask: #ffe2a8; --seen: #5b8def; --own: #3fa45b }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
          --known: #1f3f75; --cached: #2a3038; --filled: #1d4f2b; --mask: #6b4a0e } }
  text { fill: var(--ink) } .soft { fill: var(--soft); font-size: 12px }
  .mono { font-family: ui-monospace, monospace; font-size: 13px }
  rect { stroke: var(--line) } .known { fill: var(--known) } .cached { fill: var(--cached) }
  .filled { fill: var(--filled) } .mask { fill: var(--mask) } .seen { fill: var(--seen) } .own { fill: var(--own) }
  .none { fill: none } path { stroke: var(--soft); fill: none }
"""


class Drawing:
    """Rectangles, texts and lines of one SVG file, `unit` pixels to a step of the grid."""

    def __init__(self, columns: float, rows: float, title: str, unit: int = 34):
        self.unit, self.size, self.title = unit, (columns * unit, rows * unit), title
        self.parts: list[str] = []

    def cell(self, x: float, y: float, kind: str, label: str = "", width: float = 1) -> None:
        """One cell of the grid, with a text in its middle."""
        u = self.unit
        place = f'x="{x * u + 1:g}" y="{y * u + 1:g}" width="{width * u - 2:g}" height="{u - 2}"'
        self.parts.append(f'<rect class="{kind}" {place} rx="4"/>')
        if label:
            self.text(x + width / 2, y + 0.5, label, "mono")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Text around a point of the grid, or from there on with the anchor `start`."""
        place = f'x="{x * self.unit:g}" y="{y * self.unit + 5:g}"'
        self.parts.append(f'<text class="{kind}" {place} text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line from point to point."""
        u = self.unit
        self.parts.append(f'<path d="M{x * u:g} {y * u:g} L{to_x * u:g} {to_y * u:g}"/>')

    def legend(self, x: float, y: float, entries: dict[str, str], step: float) -> None:
        """What the colours mean, side by side."""
        for index, (kind, meaning) in enumerate(entries.items()):
            place = f'x="{(x + index * step) * self.unit:g}" y="{y * self.unit:g}"'
            self.parts.append(f'<rect class="{kind}" {place} width="16" height="16"/>')
            self.text(x + index * step + 0.65, y + 0.25, meaning, "soft", "start")

    def save(self, name: str) -> None:
        """Writes the file."""
        width, height = (f"{side:g}" for side in self.size)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self.title)}</title>'
        text = "\n".join([head, f"<style>{STYLE}</style>", *self.parts, "</svg>", ""])
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")


def reordering() -> None:
    """Topological reordering of six tokens, and who then sees whom under a causal mask."""
    words, masked = ["The", "cat", "M", "on", "M", "mat"], torch.tensor([[0, 0, 1, 0, 1, 0]]).bool()
    (order,) = reorder_blocks(masked, torch.ones_like(masked)).tolist()
    drawing = Drawing(22.5, 8.4, "Topological reordering: observed tokens first, then masks; positions stay")
    for y, places, name in ((1, range(6), "logical order"), (4.6, order, "physical order: what the model reads")):
        drawing.text(0.1, 0.5 if y == 1 else 6.6, name, "soft", "start")
        for column, place in enumerate(places):
            drawing.cell(2 * column, y, "mask" if masked[0, place] else "known", words[place], 1.9)
            drawing.text(2 * column + 1, y + 1.3, f"position {place}", "soft")
    for column, place in enumerate(order):
        drawing.line(2 * place + 1, 2.6, 2 * column + 1, 4.5)
    drawing.legend(0.1, 7.4, {"known": "observed token", "mask": "mask"}, 4.5)
    drawing.text(18.2, 0.5, "plain causal attention in physical order", "soft")
    for row, place in enumerate(order):
        drawing.text(14.9, row + 1.5, words[place], "mono", "end")
        for column in range(6):
            drawing.cell(15.2 + column, row + 1, ("mask" if masked[0, place] else "seen") if column <= row else "none")
    drawing.text(18.2, 7.6, "every mask (row) sees every observed token", "soft")
    drawing.save("reordering")


def dual_stream() -> None:
    """The visibility of dual-stream training: two blocks of four tokens, two of them masked in each."""
    length, block = 8, 4
    masked = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    cells = reorder_blocks(masked, torch.ones_like(masked)) + block * torch.arange(2)[:, None]
    order = cells.flatten().tolist()
    names = [f"x{i}" for i in range(length)] + ["M" + str(i) if masked.flatten()[i] else f"x{i}" for i in order]
    streams = torch.tensor([[0] * length + [1] * length])
    blocks = torch.tensor([[i // block for i in [*range(length), *order]]])
    visible = dual_stream_mask_function(streams, blocks, torch.zeros_like(blocks))
    at = torch.arange(2 * length)
    seen = visible(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
    drawing = Drawing(28.5, 20.2, "Who sees whom in dual-stream training", unit=28)
    drawing.text(6.2, 0.4, "memory stream: the clean text", "soft")
    drawing.text(14.6, 0.4, "prediction stream: reordered blocks", "soft")
    for i, name in enumerate(names):
        gap = 0.4 * (i >= length)
        drawing.text(2.7 + i + gap, 1.3, name, "mono")
        drawing.text(1.8, 2.4 + i + gap, name, "mono", "end")
        for j in range(2 * length):
            kind = "none" if not seen[i, j] else "own" if j >= length else "seen"
            drawing.cell(2.2 + j + 0.4 * (j >= length), 1.9 + i + gap, kind)
    for y, line in (
        (4.5, "memory: causal, and blind to"),
        (5.3, "the prediction stream"),
        (12.2, "block 0 of the prediction stream:"),
        (13.0, "its own slots, causally"),
        (16.2, "block 1: the memory before it,"),
        (17.0, "and its own slots"),
    ):
        drawing.text(19.1, y, line, "soft", "start")
    entries = {"seen": "sees the clean text", "own": "sees slots of its own block"}
    drawing.legend(2.2, 19.2, entries, 7)
    drawing.save("dual-stream")


def streaming_window() -> None:
    """The forwards of a real answer of wedlm-nano."""
    tokenizer = AutoTokenizer.from_pretrained(NANO, trust_remote_code=False)
    model = WeDLMForCausalLM.from_pretrained(NANO)
    chat = [{"role": "user", "content": "Sort from smallest to largest: 31, 7, 86, 12"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(
        **inputs,
        strategy="wedlm",
        verification="none",
        window_size=8,
        entropy_threshold=0.003,
        distance_penalty=0,
        max_new_tokens=18,
        output_trace=True,
        return_dict_in_generate=True,
    )
    start = inputs["input_ids"].shape[1]
    steps = output.trace
    drawing = Drawing(22.5, 1.4 * len(steps) + 2.4, "The forwards of streaming parallel decoding")
    drawing.text(0.1, 0.4, "each row is one forward; columns are positions of the answer", "soft", "start")
    for index, step in enumerate(steps):
        y = 0.9 + 1.4 * index
        drawing.text(0.1, y + 0.5, f"forward {index + 1}", "soft", "start")
        for position, kind, label in slots_of(step, start, tokenizer):
            drawing.cell(2.6 + position, y, kind, label)
    entries = {"cached": "in the cache", "known": "pending: final, cached by this forward"}
    drawing.legend(0.1, drawing.size[1] / 34 - 1, entries, 4)
    drawing.legend(13, drawing.size[1] / 34 - 1, {"filled": "filled, now or ahead of a gap", "mask": "mask"}, 6.4)
    drawing.save("streaming-window")


def slots_of(step: TraceStep, start: int, tokenizer: AutoTokenizer) -> list[tuple[int, str, str]]:
    """Position, kind and text of each slot that a forward read or had behind it, in a trace of one row."""
    positions = step.position_ids[0, -step.counts[0] :].tolist()
    tokens = step.input_ids[0, -step.counts[0] :].tolist()

    def text_of(token: int) -> str:
        return "end" if token == tokenizer.eos_token_id else tokenizer.decode(token).strip() or "␣"

    masks = dict(zip(step.logit_positions[0].tolist(), zip(step.filled[0], step.tokens[0], strict=True), strict=True))
    is_mask = dict(zip(step.logit_positions[0].tolist(), step.is_mask[0].tolist(), strict=True))
    found = [(position, "cached", "") for position in range(start, min(positions))]
    for row, (position, token) in enumerate(zip(positions, tokens, strict=True)):
        if position < start:
            continue
        if not is_mask.get(position):
            found.append((position, "known" if row < step.committed[0] else "filled", text_of(token)))
        else:
            filled, guess = masks[position]
            found.append((position, "filled", text_of(int(guess))) if filled else (position, "mask", "M"))
    return [(position - start, kind, label) for position, kind, label in found if position >= start]


def mask_adapter() -> None:
    """Which rows the adapter acts on, and the branches of masks behind each real row."""
    words = ["sky", "is", "blue"]
    rows = [Row(1, 1, -1), Row(2, 2, 0), Row(3, 3, 1)]
    for place in range(3):
        rows += [Row(None, place + 3, place), Row(None, place + 4, len(rows))]
    sequence = SequenceState(index=0, tokens=[0, 1], prompt_length=1, committed=1, limit=9, rows=Tree(rows))
    step = lay_out([sequence], [0], 9, torch.device("cpu"))
    seen = visibility(step)[0, 0, :, sequence.committed :].tolist()
    labels = [f"last final token: {words[0]}", f"draft 1: {words[1]}", f"draft 2: {words[2]}"]
    labels += [f"M for position {position}" for position in step.position_ids[0, 3:].tolist()]
    drawing = Drawing(26.5, 11.4, "A mask adapter acts on mask rows alone")
    drawing.cell(5, 0.1, "known", "base", 3)
    drawing.cell(8.2, 0.1, "mask", "base + adapter", 6)
    drawing.text(14.6, 0.6, "which weights compute a token", "soft", "start")
    for i, label in enumerate(labels):
        y = 1.5 + i + 0.2 * (i >= 3)
        drawing.text(4.7, y + 0.5, label, "soft", "end")
        for j in range(len(labels)):
            drawing.cell(5 + j + 0.2 * (j >= 3), y, "none" if not seen[i][j] else "seen" if j < 3 else "own")
    notes = {
        3.0: "real tokens see no mask: they are the base's, bit for bit",
        5.7: "masks behind the last final token",
        7.7: "masks behind draft 1",
        9.7: "masks behind draft 2: next drafts, if both are accepted",
    }
    for y, note in notes.items():
        drawing.text(14.6, y, note, "soft", "start")
    drawing.save("mask-adapter")


DRAWINGS = (reordering, dual_stream, streaming_window, mask_adapter)

if __name__ == "__main__":
    for draw in DRAWINGS:
        draw()
