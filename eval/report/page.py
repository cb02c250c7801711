"""What a report writes: a page without outside resources, JSON, CSV, and tables in Markdown files of the user's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ..decoders import AR, EXACT, WEDLM
from ..files import write_text
from ..sweep import FIELDS
from .figures import figures
from .numbers import AREA_LOSS, Numbers, rank_correlation

BLOCKS = ("summary", "tasks", "batches", "setup", "front")
FEW_PROMPTS = 50
ALL_TASKS = "all tasks"
_PLACE = re.compile(r"(<!-- measured: (\w+) -->\n)(.*?)(<!-- /measured -->)", flags=re.DOTALL)
_NAMES = {EXACT: "Verified decoding", WEDLM: "Streaming decoding without verification"}


def write_report(
    about: Mapping[str, Any], numbers: Numbers, folder: Path, figure_folder: Path | None, fill_files: Sequence[Path]
) -> dict[str, Any]:
    """Write report.json, .csv, .md and .html, table.csv, and the figures and blocks that were asked for.

    Returns:
        the content of report.json.
    """
    report = {**about, **_as_json(numbers)}
    drawn = figures(numbers, about["settings"]["window_size"], quality_words(about))
    shown = tables(about, numbers)
    write_text(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / "report.csv", summary_csv(numbers))
    write_text(folder / "table.csv", numbers.table.to_csv(index=False))
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    )
    page = template.render(
        report=report,
        tables={name: made.to_html(index=False, border=0, na_rep="–") for name, made in shown.items()},
        figures=drawn,
        summary=summary_sentences(about, numbers),
        setup=setup(about),
        chosen=chosen_sentence(about),
        same=same_sentence(numbers),
        correlation=_correlation_sentence(numbers),
        area_loss=f"{100 * AREA_LOSS:g}",
        no_area=bool(numbers.areas["area"].isna().any()),
        details=_details(about),
    )
    write_text(folder / "report.html", page)
    for figure in drawn:
        if figure_folder is not None:
            figure.write_png(figure_folder)
    page = _markdown_page(about, numbers, shown)
    write_text(folder / "report.md", page)
    for path in fill_files:
        write_text(path, fill(path.read_text(encoding="utf-8"), blocks_of(page)))
    return report


def _markdown_page(about: Mapping[str, Any], numbers: Numbers, shown: Mapping[str, pd.DataFrame]) -> str:
    """The main tables, in the blocks that [`fill`] takes to other files."""
    titles = {
        "summary": "In short",
        "tasks": "By task",
        "batches": "By batch size",
        "front": "The sweep’s best settings",
    }
    parts = [f"# {about['model']}", *summary_sentences(about, numbers), same_sentence(numbers), chosen_sentence(about)]
    parts += [f"## {title}\n\n{_block(name, as_markdown(shown[name]))}" for name, title in titles.items()]
    return "\n\n".join(filter(None, [*parts, _block("setup", f"{setup(about)}\n")])) + "\n"


def _block(name: str, content: str) -> str:
    return f"<!-- measured: {name} -->\n{content}<!-- /measured -->"


def blocks_of(text: str) -> dict[str, str]:
    """What stands in the measured blocks of a Markdown text, by name."""
    return {match[2]: match[3] for match in _PLACE.finditer(text)}


def tables(about: Mapping[str, Any], numbers: Numbers) -> dict[str, pd.DataFrame]:
    """All tables of a report, their cells as texts."""
    quality = quality_words(about)
    rename = {"tokens_per_forward": "tokens per forward", "prefix_cacheability": "prefix cacheability"}
    rename |= {"tokens_per_second": "tokens/s", "speed": "speed against AR", "quality": quality}
    main = ["quality", "tokens_per_forward", "prefix_cacheability"]
    sweep = _cells(numbers.sweep, [*main, "speed"], ["quality", "speed"]).assign(
        decoder=numbers.sweep["kind"],
        **{
            symbol: numbers.sweep[name].map("{:g}".format, "ignore")
            for symbol, name in zip("Wτλ", FIELDS, strict=True)
        },
    )
    sweep["largest loss"] = numbers.sweep["loss"].map("{:.1f}".format)
    sweep = sweep[["decoder", *"Wτλ", "quality", "largest loss", *main[1:], "speed"]].rename(columns=rename)
    front = numbers.sweep[numbers.sweep["on_front"]].sort_values("speed").index
    headline = _cells(numbers.headline, [*main, "tokens_per_second", "speed"], ["quality", "speed"]).reset_index()
    return {
        "summary": headline.rename(columns=rename),
        "tasks": _tasks(numbers, quality),
        "batches": _batches(numbers),
        "front": sweep.loc[front].fillna(""),
        "sweep": sweep.fillna(""),
        "areas": _cells(numbers.areas, ["area"], ["area"]).reset_index().rename(columns={"area": "area, AR = 1"}),
        "entropy": _entropy(numbers),
    }


FORMATS = {
    "quality": (100, 1, " %"),
    "same": (100, 0, " %"),
    "own_cost": (100, 0, " %"),
    "tokens_per_second": (1, 0, ""),
    "speed": (1, 2, "×"),
}
"""Factor, digits and unit; of other names, two digits."""


def _cell(name: str, value: float, error: float | None = None) -> str:
    """A value as text, with its standard error."""
    factor, digits, unit = FORMATS.get(name, (1, 2, ""))
    if pd.isna(value):
        return "–"
    spread = "" if error is None or pd.isna(error) else f" ± {factor * error:.{digits}f}"
    return f"{factor * value:,.{digits}f}{spread}{unit}"


def _cells(rows: pd.DataFrame, names: Sequence[str], with_errors: Sequence[str] = ()) -> pd.DataFrame:
    """Values as texts; those of AR's own speed have no error."""
    made = {}
    for name in names:
        errors = rows[f"{name}_error"] if name in with_errors else pd.Series(index=rows.index, dtype=float)
        if name == "speed":
            errors = errors.where(rows["speed"] != 1)
        made[name] = [_cell(name, *pair) for pair in zip(rows[name], errors, strict=True)]
    return pd.DataFrame(made, index=rows.index)


def _tasks(numbers: Numbers, quality: str) -> pd.DataFrame:
    """AR's quality, then that of the others with their speeds; the last line is that of all tasks together."""
    shown = [name for name in (WEDLM, EXACT) if name in numbers.headline.index]
    rows = [*numbers.tasks.loc[AR].index, None]
    made: dict[str, list[str]] = {"task": [ALL_TASKS if task is None else task for task in rows]}

    def column(decoder: str, name: str) -> list[str]:
        values = [numbers.headline.loc[decoder] if t is None else numbers.tasks.loc[(decoder, t)] for t in rows]
        return [_cell(name, value[name]) for value in values]

    for decoder in (AR, *shown[:1]):
        made[f"{decoder}: {quality}"] = column(decoder, "quality")
    for decoder in shown:
        made[f"{decoder}: tokens per forward"] = column(decoder, "tokens_per_forward")
        made[f"{decoder}: speed against AR"] = column(decoder, "speed")
    return pd.DataFrame(made)


def _batches(numbers: Numbers) -> pd.DataFrame:
    rows = numbers.batches
    cells = _cells(rows, ["tokens_per_second", "speed", "own_cost", "same"])
    cells.insert(2, "ms to first token", (1000 * rows["first_token_seconds"]).map("{:.1f}".format, "ignore"))
    cells["peak MiB"] = (rows["peak_bytes"] / 2**20).map("{:,.1f}".format, "ignore")
    names = {"batch_size": "batch size", "tokens_per_second": "tokens/s", "speed": "speed against AR"}
    names |= {"own_cost": "own cost", "same": "same answers"}
    return cells.reset_index().rename(columns=names)


def _entropy(numbers: Numbers) -> pd.DataFrame:
    names = {"entropy": "entropy, nats", "answer_tokens": "tokens of an answer"}
    means = numbers.prompts.groupby("task").mean().sort_values("entropy")
    made = means[[]].copy()
    for column in means:
        form = {"entropy": "{:.2g}", "answer_tokens": "{:.0f}"}.get(column, "{:.2f}")
        made[names.get(column, column.replace("_", " "))] = means[column].map(form.format, "ignore")
    return made.reset_index()


def as_markdown(table: pd.DataFrame) -> str:
    """Words to the left, numbers to the right; what Markdown would take for a column's end is escaped."""
    escaped = table.map(lambda cell: str(cell).replace("|", r"\|"))
    escaped.columns = [str(name).replace("|", r"\|") for name in table.columns]
    words = {"decoder", "task"}
    align = ["left" if name in words else "right" for name in escaped.columns]
    return str(escaped.to_markdown(index=False, colalign=align, disable_numparse=True)) + "\n"


def check_blocks(files: Sequence[Path]) -> None:
    """Raises `ValueError` for files without places for the [`BLOCKS`]."""
    for path in files:
        try:
            fill(path.read_text(encoding="utf-8"), dict.fromkeys(BLOCKS, ""))
        except ValueError as error:
            raise ValueError(f"`--fill {path}`: {error}.") from None


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Replace what stands between `<!-- measured: NAME -->` and `<!-- /measured -->`, each on a line of its own.

    Raises:
        ValueError: if the text has no such place, or one with a name that is not in `blocks`.
    """
    names = blocks_of(text)
    unknown = sorted(set(names) - set(blocks))
    if not names or unknown:
        raise ValueError(
            "expected blocks <!-- measured: NAME --> … <!-- /measured --> with a name among "
            f"{', '.join(blocks)}, got {', '.join(unknown) or 'none'}"
        )
    return _PLACE.sub(lambda match: f"{match[1]}{blocks[match[2]]}{match[4]}", text)


def quality_words(about: Mapping[str, Any]) -> str:
    """What quality is in this report."""
    return "right answers" if about["data"]["has_answers"] else "agreement with AR"


def summary_sentences(about: Mapping[str, Any], numbers: Numbers) -> list[str]:
    """What a reader in a hurry takes along, one sentence each."""
    rows = numbers.headline
    words = "right answers" if about["data"]["has_answers"] else "agreement with AR, no answers being known"
    lines = [
        f"{_NAMES[name]}: {rows['speed'][name]:.2f} times AR’s speed, {rows['quality'][name]:.1%} {words} "
        f"(AR {rows['quality'][AR]:.1%})."
        for name in (EXACT, WEDLM)
        if name in rows.index
    ]
    if (prompts := rows["prompts"][AR]) < FEW_PROMPTS:
        lines.append(f"These rest on {prompts} prompts: too few to decide by.")
    return lines


def chosen_sentence(about: Mapping[str, Any]) -> str:
    """Which settings the sweep picks."""
    allowed = about["max_loss"]
    limit = f"at most {allowed:g} points to AR on every task"
    if about["picked"] is None:
        fewest = min(about["data"]["counts"]["tuning"].values())
        answer = f" With {fewest} prompts of a task, one answer is {100 / fewest:.1f} points."
        coarse = answer if fewest * allowed < 100 else ""
        return f"No setting of unverified streaming decoding loses {limit}.{coarse}"
    return (
        f"The fastest setting of unverified streaming decoding, by tokens per forward, that loses {limit}: "
        f"{about['picked']}."
    )


def same_sentence(numbers: Numbers) -> str:
    """Whether verified answers are AR's."""
    if EXACT not in numbers.headline.index:
        return ""
    share, prompts = numbers.headline.loc[EXACT, ["same", "prompts"]]
    if share == 1:
        return f"Verified decoding gave AR’s own answer to all {prompts:.0f} prompts, token for token."
    line = f"Verified answers part from AR’s on {(1 - share) * prompts:.0f} of {prompts:.0f} prompts"
    if not numbers.partings:
        return f"{line}."
    steps = pd.DataFrame(numbers.partings).eval("gap / spacing")
    return (
        f"{line}: forwards of another width round differently, and there AR’s two best logits lie at most "
        f"{steps.max():.1f} steps of this dtype apart (median {steps.median():.1f})."
    )


def setup(about: Mapping[str, Any]) -> str:
    """How the numbers of the summary came about, in one paragraph."""
    settings, machine, data, timing = (about[name] for name in ("settings", "environment", "data", "timing"))
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    place = f"{threads} of {machine['processor']}" if machine["device"] == "cpu" else machine["device"]
    counts = sorted(set(data["counts"]["headline"].values()))
    count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    quality = "" if data["has_answers"] else "Agreement with AR: share of tokens that AR would have chosen too. "
    return (
        f"Settings: window {settings['window_size']}, τ = {settings['entropy_threshold']:g}, "
        f"λ = {settings['distance_penalty']:g}; with verification the library's defaults; greedy. "
        f"{quality}Quality: {count} prompts of each task of {data['source']} that no setting was picked on. "
        f"Speed: at most {timing['timed']} of them per task, one at a time, the decoders in turn, "
        f"median of {timing['repeats']}, {place}, {machine['dtype']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}. ±: standard error over prompts."
    )


def _correlation_sentence(numbers: Numbers) -> str:
    columns = [name for name in numbers.prompts if str(name).startswith("tokens_per_forward")]
    found = [f"{rank_correlation(numbers.prompts, name):+.2f} for {str(name).split(', ')[1]}" for name in columns]
    return f"Rank correlation of entropy and tokens per forward over all prompts: {', '.join(found)}." if found else ""


def summary_csv(numbers: Numbers) -> str:
    """A line for each part, decoder, setting and task; that of all tasks together names none."""
    headline = numbers.headline.reset_index().assign(part="headline")
    tasks = numbers.tasks.reset_index().assign(part="headline")
    sweep = numbers.sweep.assign(part="sweep").rename(columns={"kind": "decoder"})
    lines = pd.concat([headline, tasks, sweep], ignore_index=True)
    first = ["part", "decoder", *FIELDS, "task"]
    return str(lines[[*first, *(name for name in lines if name not in first)]].to_csv(index=False))


def _as_json(numbers: Numbers) -> dict[str, Any]:
    frames = {"headline": numbers.headline, "tasks": numbers.tasks, "batches": numbers.batches}
    frames |= {"sweep": numbers.sweep, "areas": numbers.areas, "prompts": numbers.prompts}
    made: dict[str, Any] = {
        name: json.loads(frame.reset_index().to_json(orient="records", force_ascii=False))
        for name, frame in frames.items()
    }
    return made | {"partings": numbers.partings}


def _details(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, data, timing = about["environment"], about["data"], about["timing"]
    parts = {
        name: ", ".join(f"{count} {task}" for task, count in counts.items()) for name, counts in data["counts"].items()
    }
    return [
        ("model", f"{about['model']}, weights {about['weights']['weights']}, {machine['dtype']}"),
        ("prompts", f"{data['source']}; no prompt is in both parts"),
        ("for the sweep", f"{parts['tuning']}; {timing['sweep_timed']} per task are timed"),
        ("for the headline", f"{parts['headline']}; {timing['timed']} per task are timed"),
        *(("note", note) for note in data["notes"]),
        ("speed", f"all decoders in turn, median of {timing['repeats']}; new tokens over wall clock"),
        ("quality", f"batches of {timing['batch_size']}; verified decoding one prompt at a time"),
        ("decoding", f"greedy, at most {timing['max_new_tokens']} new tokens"),
        ("settings of all", ", ".join(f"{k} = {v}" for k, v in about["common_settings"].items()) or "none"),
        ("errors", "standard errors, by 1,000 resamples of the prompts"),
        (
            "machine",
            f"{machine['device']}, {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads",
        ),
        (
            "versions",
            f"wedlm-hf {machine['wedlm_hf']}, torch {machine['torch']}, transformers {machine['transformers']}, "
            f"Python {machine['python']}",
        ),
    ]
