"""What the site has beyond docs/: the README as its first page, the files that pages link to, the commands' options.

Pages link to files of the repository by relative paths, as they work in a checkout. On the site such a file becomes a
page below `source/`, so that every link of the site is checked and leads somewhere.
"""

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import click
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.main import get_command

from wedlm_hf import cli

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "build" / "api"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
FENCE = re.compile(r"(^ *```.*?^ *```$)", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = {".sbatch": "bash", ".jsonl": "json", ".jinja": "jinja", ".cfg": "ini", ".txt": "text"}
# Public names beyond those of the package itself, in the order of the page that shows them.
SHOWN = {
    "Model": (
        "WeDLMForCausalLM", "WeDLMModel", "WeDLMConfig", "modeling_wedlm.convert.convert",
        "modeling_wedlm.convert.Conversion",
        "checkpoints.packed.pack",
    ),
    "Mask adapters": (
        "adapters.attach.load_mask_adapter", "adapters.attach.add_mask_adapter", "adapters.attach.save_mask_adapter",
        "adapters.attach.unload_mask_adapter", "adapters.attach.AttachedModel", "adapters.adapt.adapt",
        "adapters.adapt_config.AdaptConfig", "adapters.answers.write_answers", "adapters.answers.AnswerConfig",
        "adapters.answers.read_user_prompts", "MaskAdapterTrainer", "MaskTrainingConfig",
    ),
    "Generation": (
        "generation.WeDLMGenerationMixin", "generation.WeDLMGenerationSettings", "generation.WeDLMGenerateOutput",
        "generation.DecodingStats", "generation.TraceStep", "generation.WindowCache",
    ),
    "Training": (
        "WeDLMSFTTrainer", "WeDLMSFTConfig", "DataCollatorForDualStreamMasking", "DynamicMaskingCallback",
        "training.ResumableTrainer", "training.response_log_probs", "training.ResponseLogProbs",
    ),
    "Evaluation": (
        "eval.prompts.Prompt", "eval.prompts.encode_prompt", "eval.measure.measure", "eval.measure.decode",
        "eval.compare.compare", "eval.metrics.judge",
        "eval.measure.Decoding", "eval.measure.ForwardCounter", "eval.trace.record.record",
        "eval.request.AnswerRequest", "eval.trace.page.page", "eval.harness.model.WeDLMHarnessLM",
    ),
}  # fmt: skip
HOME = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}


def on_config(config: MkDocsConfig) -> None:
    """Lays the package out as it is installed, for mkdocstrings: it reads sources and imports nothing. Links to the
    repository that this one was cloned from."""
    called = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    url = re.sub(r"^git@([^:]+):", r"https://\1/", called.stdout.strip()).removesuffix(".git")
    if url.startswith("https://"):
        config.repo_url, config.repo_name = url, url.rpartition("/")[2]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    shutil.rmtree(API, ignore_errors=True)
    for package in setup["options"]["packages"].split():
        name, *parts = package.split(".")
        if name != "wedlm_hf":  # the command's
            continue
        folder = Path(*parts)
        (API / "wedlm_hf" / folder).mkdir(parents=True)
        for file in (ROOT / folder).glob("*.py"):
            shutil.copyfile(file, API / "wedlm_hf" / folder / file.name)


def site_path(path: PurePosixPath) -> str:
    """Where a file of the repository is on the site, as a source path of MkDocs."""
    if path.parts[:1] == ("docs",):
        return str(path.relative_to("docs"))
    if str(path) in HOME:
        return HOME[str(path)]
    target = PurePosixPath("source") / path
    is_copied = path.suffix in {".md", ".png", ".svg", ".html"}
    return str(target if is_copied else target / "index.md" if (ROOT / path).is_dir() else f"{target}.md")


def resolve(page: PurePosixPath, link: str) -> PurePosixPath | None:
    """The file of the repository that a link on a page means; a folder's README where it has one."""
    path = PurePosixPath(os.path.normpath(page.parent / link))
    if (ROOT / path / "README.md").is_file():
        path /= "README.md"
    return path if (ROOT / path).exists() and path.parts[:1] != ("..",) else None


def links_of(text: str) -> list[str]:
    """The relative links of a page, outside of code blocks."""
    return [link for part in FENCE.split(text)[::2] for link in LINK.findall(part)]


def as_page(path: PurePosixPath) -> str:
    """A file or folder of the repository as Markdown."""
    file = ROOT / path
    if file.is_dir():
        listed = [f"- [{name.name}]({name.name})" for name in sorted(file.iterdir()) if name.suffix in {".py", ".md"}]
        return f"# {path}\n\n" + "\n".join(listed) + "\n"
    text = file.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(map(as_markdown, json.loads(text)["cells"]))
    fence = "`" * (3 + max(map(len, re.findall("`+", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(path.suffix, path.suffix[1:])}\n{text}\n{fence}\n"


def as_markdown(cell: dict[str, Any]) -> str:
    """A cell of a notebook with its outputs."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    parts = [f"```python\n{text}\n```"]
    for output in cell["outputs"]:
        if "text" in output:
            parts.append(f"```text\n{''.join(output['text'])}\n```")
        for picture in filter(None, [output.get("data", {}).get("image/png")]):
            parts.append(f"![Output of the cell above](data:image/png;base64,{''.join(picture).strip()})")
    return "\n\n".join(parts)


ORIGIN: dict[str, PurePosixPath] = {}  # source path on the site: path in the repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README, command line, and every file that a page links to, and those that these link to."""
    files.append(File.generated(config, "commands.md", content=command_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    pages = [PurePosixPath("docs", file.src_uri) for file in files if file.is_documentation_page()]
    queue = [*pages[:-2], *map(PurePosixPath, HOME)]
    while queue:
        path = queue.pop()
        source = site_path(path)
        if source in ORIGIN:
            continue
        ORIGIN[source] = path
        is_page = source.endswith(".md")
        if files.get_file_from_path(source) is None:
            content = {"content": as_page(path)} if is_page else {"abs_src_path": str(ROOT / path)}
            files.append(File.generated(config, source, **content))
        if is_page and (path.suffix in {".md", ".ipynb"} or (ROOT / path).is_dir()):
            queue += filter(None, (resolve(base_of(path), link) for link in links_of(as_page(path))))
    return files


def base_of(path: PurePosixPath) -> PurePosixPath:
    """What the links of a page are relative to."""
    return path / "index.md" if (ROOT / path).is_dir() else path


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at where their files are on the site. Those that lead nowhere stay, for MkDocs to complain of. The
    search leaves sources out."""
    path = ORIGIN.get(page.file.src_uri)
    if page.file.src_uri == "api.md":
        page.meta["search"] = {"boost": 0.3}  # guides come first
    if path is not None and path.suffix != ".md" and page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}  # sources
    if path is None:
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = resolve(base_of(path), match[0])
        start = str(PurePosixPath(page.file.src_uri).parent)
        return os.path.relpath(site_path(target), start) if target else match[0]

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)


def command_page() -> str:
    """The options of every command, as the commands themselves tell them."""
    command = get_command(cli.app)
    with click.Context(command, info_name="wedlm") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="wedlm")
    first = "`wedlm COMMAND --help` prints the same."
    return text.replace("# `wedlm`", f"# Commands\n\n{first}", 1)


def api_page() -> str:
    """The public classes and functions, for mkdocstrings."""
    parts = [
        f"## {title}\n\n" + "\n\n".join(f"::: wedlm_hf.{name}" for name in names) for title, names in SHOWN.items()
    ]
    return "# Classes and functions\n\n" + "\n\n".join(parts) + "\n"


class DocstringLinks(griffe.Extension):
    """Makes links of the names in docstrings that stand in brackets, where an API page shows them; else plain code."""

    def __init__(self) -> None:
        names = [f"wedlm_hf.{name}" for part in SHOWN.values() for name in part]
        self.shown = {name.rpartition(".")[2]: name for name in names}

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring:
            text = re.sub(r"\[`([\w.]+)`\](?![(\[])", self.link, obj.docstring.value)
            # An argument's type is shown as code anyway.
            obj.docstring.value = re.sub(
                r"^( *[\w*, ]+ \()(.*)(?=\): )", lambda m: m[1] + m[2].replace("`", ""), text, flags=re.MULTILINE
            )

    def link(self, match: re.Match[str]) -> str:
        """``[`Name`]`` with its target, or without brackets."""
        path = self.shown.get(match[1].rpartition(".")[2])
        return f"[`{match[1]}`][{path}]" if path else f"`{match[1]}`"
