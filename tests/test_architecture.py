"""The layout of the project, held by reading its source: who may import whom, and what a built wheel contains.

    examples, cli -> serving -> eval -> adapters -> training -> console -> modeling_wedlm
    modeling_wedlm -> generation, checkpoints

What ships (`hub.SHIPPED`) also travels beside the weights to the Hub, whose loader is a regex over one flat folder.
What the library uses of other packages beyond their documented interface stands in private_names.toml, with its
reason: each name is a future break.
"""

import ast
import configparser
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports

import wedlm_hf
from wedlm_hf.generation.forward import CHUNKED
from wedlm_hf.modeling_wedlm import hub

ROOT = Path(__file__).parents[1]
# Each lowest layer first, with what setup.cfg must require for it: extras, or None for the standard library alone.
LAYERS = {
    "checkpoints": ["gguf", "peft"], "generation": ["grammar"], "modeling_wedlm": [],
    "console": ["cli"], "training": ["train"], "adapters": ["train"], "eval": ["eval"], "serving": ["serve", "vllm"],
    "cli": ["cli"], "__main__": None,
}  # fmt: skip
RANKS = {name: rank for rank, name in enumerate(LAYERS)}

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")

COMMAND = "wedlm_cli"  # a package of its own, which the import of ours does not slow down
OUTSIDE_PACKAGE = {COMMAND, "tests", "examples", "benchmarks", "docs", "build", "dist"}
FOLDERS = [path for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name not in OUTSIDE_PACKAGE]
FOLDERS = [path for path in FOLDERS if not path.name.startswith((".", "__"))]
FILES = sorted(ROOT.glob("*.py")) + sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
SHIPPED = [ROOT / path for path in hub.SHIPPED]


def name_of(file: Path) -> str:
    """`ROOT/generation/window.py` -> `generation.window`; the root package is the empty name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree: several tests ask for those of each file."""
    return [*ast.walk(tree)]


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement of a file, those inside functions included."""
    return [node for node in walk(tree_of(file)) if isinstance(node, ast.Import | ast.ImportFrom)]


def top_imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in tree_of(file).body if isinstance(node, ast.Import | ast.ImportFrom)]


def local_targets(file: Path, node: ast.Import | ast.ImportFrom) -> set[str]:
    """Names of our own modules that a relative import reaches."""
    if isinstance(node, ast.Import) or node.level == 0:
        return set()
    source = resolved(file, "." * node.level + (node.module or ""))
    children = {f"{source}.{alias.name}".lstrip(".") for alias in node.names}
    return {child if child in MODULES else source for child in children}


def resolved(file: Path, name: str) -> str:
    """The module of ours that a relative name means in a file."""
    level = len(name) - len(name.lstrip("."))
    source = ".".join([*file.relative_to(ROOT).parts[:-level], *filter(None, [name.lstrip(".")])])
    assert source in MODULES, f"{file.relative_to(ROOT)} imports {name!r}, which does not exist"
    return source


def reached(file: Path) -> set[str]:
    """Modules of ours that the imports of a file reach."""
    return {target for node in imports_of(file) for target in local_targets(file, node)}


def string_targets(file: Path) -> set[str]:
    """Modules of ours that `import_module` reaches by relative names, in a call or in a table of names."""
    found = []
    for node in walk(tree_of(file)):
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", None)) != "import_module":
            continue
        name = ast.unparse(node.args[0])
        if "_HOME[" in name:
            texts = [str(each.value) for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
            prefix = "".join(text for text in texts if text.startswith("."))
            given = [each for each in tree_of(file).body if isinstance(each, ast.Assign)]
            (table,) = [each.value for each in given if ast.unparse(each.targets[0]) == "_HOME"]
            found += [prefix + value for value in ast.literal_eval(table).values()]
        else:
            assert isinstance(node.args[0], ast.Constant), f"{file.relative_to(ROOT)}:{node.lineno} imports {name}"
            found.append(node.args[0].value)
    return {resolved(file, each) for each in found if each.startswith(".")}


def outside_packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Top-level names of the installed packages that an import needs, the standard library left out."""
    is_local = isinstance(node, ast.ImportFrom) and node.level
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return set() if is_local else {name.split(".")[0] for name in names} - sys.stdlib_module_names


def requirements(*extras: str) -> list[Requirement]:
    """What setup.cfg requires, with the given extras."""
    texts = [SETUP["options"]["install_requires"], *(SETUP["options.extras_require"][extra] for extra in extras)]
    return [Requirement(line) for text in texts for line in text.split("\n") if line]


def declared(*extras: str) -> set[str]:
    """Import names of the packages that setup.cfg requires, with the given extras and those that they name."""
    found = requirements(*extras)
    named = {extra for each in found for extra in each.extras if each.name == SETUP["metadata"]["name"]}
    names = {each.name.replace("-", "_").removesuffix("_py") for each in found} - {"wedlm_hf"}
    return names | (declared(*named) if named else set())


def installed_first(name: str) -> set[str]:
    """Modules of ours that an import of this one loads, it included: what functions import is left out."""
    found, left = set(), [name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [name.rpartition(".")[0]]
            left += [target for node in top_imports_of(MODULES[name]) for target in local_targets(MODULES[name], node)]
    return found


def test_layers_import_only_from_below():
    for name, file in MODULES.items():
        if not name:
            continue  # the root package names all layers, lazily
        for target in reached(file) | string_targets(file):
            assert target, f"{name} imports the root package"
            is_below = RANKS[target.split(".")[0]] <= RANKS[name.split(".")[0]]
            assert is_below, f"{name} imports {target}, a layer above its own"


def test_modules_form_no_cycle():
    try:
        TopologicalSorter({name: reached(file) - {name} for name, file in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_every_outside_package_is_declared_in_setup_cfg_and_the_package_imports_itself_relatively():
    allowed = {name: set() if extras is None else declared(*extras) for name, extras in LAYERS.items()} | {"": set()}
    for name, file in MODULES.items():
        for node in imports_of(file):
            missing = outside_packages(node) - allowed[name.split(".")[0]]
            assert not missing, f"{file.relative_to(ROOT)}:{node.lineno} imports {missing}"


@pytest.mark.parametrize("name", ["generation", "checkpoints.loading", "modeling_wedlm", "adapters"])
def test_a_model_loads_and_generates_with_the_packages_of_the_plain_install(name):
    for module in installed_first(name):
        for node in top_imports_of(MODULES[module]):
            assert outside_packages(node) <= declared(), f"{module}:{node.lineno}"


def test_public_names_resolve_and_are_listed_for_type_checkers():
    nodes = [node for node in imports_of(ROOT / "__init__.py") if isinstance(node, ast.ImportFrom) and node.level]
    assert {alias.name for node in nodes for alias in node.names} == set(wedlm_hf.__all__)
    assert all(getattr(wedlm_hf, name).__name__ == name for name in wedlm_hf.__all__)
    with pytest.raises(AttributeError, match="module 'wedlm_hf' has no attribute 'WeDML'"):
        wedlm_hf.WeDML  # noqa: B018


def test_no_module_is_loaded_twice():
    has_vllm = importlib.util.find_spec("vllm") is not None
    loadable = {name: file for name, file in MODULES.items() if has_vllm or not name.startswith("serving.vllm")}
    for name in loadable:
        importlib.import_module(f"wedlm_hf.{name}".rstrip("."))
    names: dict[Path, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if path := getattr(module, "__file__", None):
            names.setdefault(Path(path).resolve(), set()).add(name)
    for name, file in loadable.items():
        if name:  # pytest imports the root __init__.py under a name of its own
            assert names[file.resolve()] == {f"wedlm_hf.{name}"}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_file_imports_in_the_forms_that_the_hub_loader_follows(file: Path):
    assert [each.name for each in SHIPPED].count(file.name) == 1
    nodes = imports_of(file)
    # Those beside torch and transformers come with transformers, which needs them itself.
    outside = set().union(*map(outside_packages, nodes))
    assert outside <= {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"}
    nested = [node.lineno for node in nodes if node not in tree_of(file).body]
    assert not nested, f"imports inside functions, conditions or try blocks, lines {nested}"

    folders = "|".join(folder.name for folder in FOLDERS)
    form = re.compile(rf"from (\.|\.\.({folders})\.)\w+ import (\w+(, )?)+")
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    for node in relative:
        assert form.fullmatch(ast.unparse(node)), f"line {node.lineno}: {ast.unparse(node)}"
        assert all(MODULES[target] in SHIPPED for target in local_targets(file, node)), "imports what does not ship"

    # The loader reads text: an import-like line in a docstring would count as an import.
    seen = [line for line in file.read_text(encoding="utf-8").splitlines() if re.match(r"\s*(from|import)\s+\.", line)]
    assert len(seen) == len(relative), f"lines that look like relative imports: {seen}"
    assert set(get_relative_imports(file)) == {"." * (node.level - 1) + (node.module or "") for node in relative}


def pins_of(name: str) -> dict[str, Requirement]:
    """What a list of requirements pins."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    return {canonicalize_name(each.name): each for each in pins}


def test_every_pinned_package_takes_the_oldest_python_that_the_readme_names():
    pinned = pins_of("requirements.txt")
    for found in distributions():
        if canonicalize_name(found.metadata["Name"]) in pinned:
            assert "3.11.0" in SpecifierSet(found.metadata.get("Requires-Python") or ""), found.metadata["Name"]


def test_the_lowest_set_pins_the_lower_bounds_of_setup_cfg():
    pinned, extras = pins_of("requirements-lowest.txt"), {*SETUP["options.extras_require"]} - {"docs", "vllm"}
    for each in requirements(*extras):
        if each.name != SETUP["metadata"]["name"]:
            (lowest,) = [bound.version for bound in each.specifier if bound.operator in (">=", "==")]
            assert lowest in pinned[canonicalize_name(each.name)].specifier, each


def test_every_package_folder_is_listed_in_setup_cfg():
    folders = {file.parent for file in FILES}
    missing = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]
    assert not missing, f"folders without __init__.py: {missing}"
    expected = {f"wedlm_hf.{name_of(folder / '__init__.py')}".rstrip(".") for folder in folders}
    assert set(SETUP["options"]["packages"].split()) == expected | {COMMAND}


def test_a_built_wheel_holds_every_module_and_data_file(tmp_path: Path):
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=skipped, symlinks=True)
    (source / "training" / "probe.jinja").touch()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("wedlm_hf/")}
    patterns = (
        "training/*.jinja checkpoints/*.jinja checkpoints/*.c adapters/*.jinja eval/harness/tasks/* "
        "eval/**/*.html eval/trace/page.*s serving/page/serve.[chj]* examples/wedlm-nano/[!.]*"
    )
    data = [file for pattern in patterns.split() for file in ROOT.glob(pattern) if file.is_file()]
    files = [*FILES, *data, ROOT / "py.typed"]
    expected = {f"wedlm_hf/{file.relative_to(ROOT).as_posix()}" for file in files}
    assert packed == expected | {"wedlm_hf/training/probe.jinja"}


LARGE = {
    f"examples/{name}" for name in (
        "real-wedlm/adapter/adapter_model.safetensors", "real-wedlm/wedlm/adapter_model.safetensors",
        "smollm2/adapter_model.safetensors", "wedlm-nano/model.safetensors",
    )
}  # fmt: skip


def test_no_file_above_a_megabyte_is_tracked_but_weights_that_are_shown():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = {name: (ROOT / name).stat().st_size for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    assert {name for name, size in sizes.items() if size > 2**20} == LARGE


LISTED = tomllib.loads((ROOT / "tests" / "private_names.toml").read_text(encoding="utf-8"))
DOCUMENTED = LISTED.pop("documented modules")
PACKAGES = ("accelerate", "huggingface_hub", "peft", "transformers", "trl")
ITSELF = ("self", "cls", "super()")
ACCESS = ("getattr", "setattr", "hasattr", "delattr")
NAMEDTUPLE = ("_asdict", "_fields", "_replace")  # documented
# Private names in the text of a class: its methods, class attributes and attributes of its instances.
PRIVATE = re.compile(r"(?:\b(?:self|cls)\.|\bdef |^    )(_[A-Za-z]\w*)", flags=re.MULTILINE)


def is_private(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None and name not in NAMEDTUPLE


def undocumented_imports(file: Path) -> Iterator[str]:
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name and alias.name not in DOCUMENTED)
        elif not node.level:
            is_documented = "." not in str(node.module) or node.module in DOCUMENTED
            names = [alias.name for alias in node.names if is_private(alias.name) or not is_documented]
            yield from {f"{node.module}.{name}" for name in names} - {*DOCUMENTED}


def defined(tree: ast.AST) -> set[str]:
    """Private names that are given to functions, classes, variables and attributes of `self`."""
    names = set()
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ITSELF:
            names.add(node.attr)
    return set(filter(is_private, names))


def attributes(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private attributes that are read or set, by a dot or by `getattr` and its like; whether on the object itself."""
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            place, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ACCESS and node.args[1:]:
            place, name = node.args[0], getattr(node.args[1], "value", None)
        else:
            continue
        if is_private(name):
            yield name, ast.unparse(place) in ITSELF


@cache
def private_in(cls: type) -> frozenset[str]:
    """Private names in the source of a class."""
    return frozenset(PRIVATE.findall(inspect.getsource(cls)))


def inherited(cls: type) -> set[str]:
    """Private names that the classes of other packages above this one define or use."""
    return {name for base in cls.__mro__ if base.__module__.split(".")[0] in LISTED for name in private_in(base)}


def private_names() -> dict[str, str]:
    """Every such name that the library uses, and where."""
    found = {f"transformers.{name}": "generation.forward" for name in CHUNKED}  # by their names in strings
    # What vllm/ uses of vLLM, one minor version of it, is left out.
    files = {name: file for name, file in MODULES.items() if not name.startswith("serving.vllm")}
    ours = set().union(*(defined(tree_of(file)) for file in files.values())) - inherited(PreTrainedModel)
    for module, file in files.items():
        found |= {name: module for name in undocumented_imports(file) if name.split(".")[0] in PACKAGES}
        elsewhere = {name for name, is_own in attributes(tree_of(file)) if not is_own}
        found |= dict.fromkeys(elsewhere - ours, module)
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef):
                names = {name for name, _ in attributes(node)} | defined(node)
                cls = getattr(importlib.import_module(f"wedlm_hf.{module}".rstrip(".")), node.name)
                found |= dict.fromkeys(names & inherited(cls), f"{module}.{node.name}")
    return found


def test_every_private_or_undocumented_name_of_another_package_is_listed_with_its_reason_and_used():
    listed = {name if is_private(name) else f"{package}.{name}" for package in LISTED for name in LISTED[package]}
    found = private_names()
    assert {name: place for name, place in found.items() if name not in listed} == {}
    assert listed - found.keys() == set()
    assert all(len(reason) > 20 for reasons in LISTED.values() for reason in reasons.values())
