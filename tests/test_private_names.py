"""What the library uses of other packages beyond their documented interface. Each name is a future break: it stands in
private_names.toml, with its reason."""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from test_architecture import MODULES, imports_of, tree_of
from transformers import PreTrainedModel

from wedlm_hf.generation.state import CHUNKED

LISTED = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text(encoding="utf-8"))
DOCUMENTED = LISTED.pop("documented modules")
PACKAGES = ("accelerate", "huggingface_hub", "peft", "transformers", "trl")
ITSELF = ("self", "cls", "super()")
ACCESS = ("getattr", "setattr", "hasattr", "delattr")
NAMEDTUPLE = ("_asdict", "_fields", "_replace")  # documented
# What vllm/ uses of vLLM, one minor version of it, is left out.
FILES = {name: file for name, file in MODULES.items() if not name.startswith("serving.vllm")}

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
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ITSELF:
            names.add(node.attr)
    return set(filter(is_private, names))


def attributes(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private attributes that are read or set, by a dot or by `getattr` and its like; whether on the object itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            place, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ACCESS and node.args[1:]:
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
    found = {f"transformers.{name}": "generation.state" for name in CHUNKED}  # by their names in strings
    ours = set().union(*(defined(tree_of(file)) for file in FILES.values())) - inherited(PreTrainedModel)
    for module, file in FILES.items():
        found |= {name: module for name in undocumented_imports(file) if name.split(".")[0] in PACKAGES}
        elsewhere = {name for name, is_own in attributes(tree_of(file)) if not is_own}
        found |= dict.fromkeys(elsewhere - ours, module)
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef):
                names = {name for name, _ in attributes(node)} | defined(node)
                cls = getattr(import_module(f"wedlm_hf.{module}".rstrip(".")), node.name)
                found |= dict.fromkeys(names & inherited(cls), f"{module}.{node.name}")
    return found


def test_every_private_or_undocumented_name_of_another_package_is_listed_with_its_reason_and_used():
    listed = {name if is_private(name) else f"{package}.{name}" for package in LISTED for name in LISTED[package]}
    found = private_names()
    assert {name: place for name, place in found.items() if name not in listed} == {}
    assert listed - found.keys() == set()
    assert all(len(reason) > 20 for reasons in LISTED.values() for reason in reasons.values())
