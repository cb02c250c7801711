"""Python functions as (header, body) pairs: generated from templates, or cut from the standard library's sources."""

from __future__ import annotations

import ast
import functools
import random
import string
import sysconfig
import textwrap
from pathlib import Path

_SCALARS = "amount cost height length limit price rate score size speed total weight width x y z".split()
_LISTS = "items keys lines names numbers prices rows scores values words".split()
_STRINGS = "key label line message name path text title word".split()
_CLASSES = "Account Box Circle Node Order Person Point Task Team User".split()

# (parameters, docstring, body) of a function; {a} {b} {c} scalars, {s} {t} strings, {xs} a list and {x} its element,
# {k} a small integer, {f} the function's own name.
_FUNCTIONS = (
    ("add", "{a}, {b}", "Return the sum of {a} and {b}.", "return {a} + {b}"),
    ("subtract", "{a}, {b}", "Return {a} minus {b}.", "return {a} - {b}"),
    ("multiply", "{a}, {b}", "Return the product of {a} and {b}.", "return {a} * {b}"),
    ("scale", "{a}", "Return {a} times {k}.", "return {a} * {k}"),
    ("combine", "{a}, {b}, {c}", "Return {a} times {b} plus {c}.", "return {a} * {b} + {c}"),
    (
        "divide",
        "{a}, {b}",
        "Return {a} divided by {b}. Raise ValueError if {b} is zero.",
        'if {b} == 0:\n    raise ValueError("{b} must not be zero")\nreturn {a} / {b}',
    ),
    ("is_multiple", "{a}", "Return True if {a} is a multiple of {k}.", "return {a} % {k} == 0"),
    ("larger", "{a}, {b}", "Return the larger of {a} and {b}.", "if {a} > {b}:\n    return {a}\nreturn {b}"),
    ("smaller", "{a}, {b}", "Return the smaller of {a} and {b}.", "if {a} < {b}:\n    return {a}\nreturn {b}"),
    ("clamp", "{a}, {b}, {c}", "Limit {a} to the range from {b} to {c}.", "return max({b}, min({c}, {a}))"),
    ("swap", "{a}, {b}", "Return {b} and {a}.", "return {b}, {a}"),
    ("check", "{a}", "Return True if {a} is between 0 and {k}.", "return 0 <= {a} <= {k}"),
    (
        "require",
        "{a}",
        "Return {a}. Raise ValueError if {a} is less than {k}.",
        'if {a} < {k}:\n    raise ValueError("{a} must be at least {k}")\nreturn {a}',
    ),
    ("select", "{xs}", "Return the {xs} greater than {k}.", "return [{x} for {x} in {xs} if {x} > {k}]"),
    ("shift", "{xs}", "Return the {xs} plus {k}.", "return [{x} + {k} for {x} in {xs}]"),
    ("scale_all", "{xs}, {a}", "Return the {xs} times {a}.", "return [{x} * {a} for {x} in {xs}]"),
    (
        "sum_all",
        "{xs}",
        "Return the sum of the {xs} in a loop.",
        "result = 0\nfor {x} in {xs}:\n    result += {x}\nreturn result",
    ),
    (
        "count_equal",
        "{xs}, {a}",
        "Count the {xs} equal to {a}.",
        "count = 0\nfor {x} in {xs}:\n    if {x} == {a}:\n        count += 1\nreturn count",
    ),
    (
        "find",
        "{xs}, {a}",
        "Return the index of {a} in {xs} or -1.",
        "for index, {x} in enumerate({xs}):\n    if {x} == {a}:\n        return index\nreturn -1",
    ),
    ("first", "{xs}", "Return the first of the {xs}.", "return {xs}[0]"),
    ("last", "{xs}", "Return the last of the {xs}.", "return {xs}[-1]"),
    ("take", "{xs}", "Return the first {k} of the {xs}.", "return {xs}[:{k}]"),
    ("drop", "{xs}", "Return the {xs} without the first {k}.", "return {xs}[{k}:]"),
    ("mean", "{xs}", "Return the mean of the {xs}.", "return sum({xs}) / len({xs})"),
    ("is_empty", "{xs}", "Return True if there are no {xs}.", "return len({xs}) == 0"),
    ("extend", "{xs}, {a}", "Append {a} to the {xs} and return them.", "{xs}.append({a})\nreturn {xs}"),
    ("order", "{xs}", "Return the {xs} sorted in reverse.", "return sorted({xs}, reverse=True)"),
    ("show", "{xs}", "Print each of the {xs}.", "for {x} in {xs}:\n    print({x})"),
    ("upper", "{s}", "Return {s} in upper case.", "return {s}.upper()"),
    ("clean", "{s}", "Return {s} without spaces around it.", "return {s}.strip()"),
    ("starts", "{s}, {t}", "Return True if {s} starts with {t}.", "return {s}.startswith({t})"),
    ("replace", "{s}, {t}", "Return {s} without {t}.", 'return {s}.replace({t}, "")'),
    ("join", "{xs}, {s}", "Join the {xs} with {s} between them.", "return {s}.join({xs})"),
    ("split", "{s}, {t}", "Split {s} at each {t}.", "return {s}.split({t})"),
    ("lookup", "{xs}, {s}", "Return {xs}[{s}] or None.", "return {xs}.get({s})"),
    ("store", "{xs}, {s}, {a}", "Store {a} in {xs} under {s}.", "{xs}[{s}] = {a}\nreturn {xs}"),
    (
        "countdown",
        "{a}",
        "Print {a} and count down to zero.",
        "while {a} >= 0:\n    print({a})\n    {a} -= 1",
    ),
    (
        "power",
        "{a}, {b}",
        "Return {a} to the power of {b} by recursion.",
        "if {b} == 0:\n    return 1\nreturn {a} * {f}({a}, {b} - 1)",
    ),
    ("read", "{s}", "Read the file {s}.", "with open({s}) as file:\n    return file.read()"),
)


def generated_function(rng: random.Random) -> tuple[str, str]:
    """(header, body) of a small function, or of the initialiser of a class; the body is indented as in the file."""
    if rng.random() < 0.15:
        return _initialiser(rng)
    verb, parameters, doc, body = rng.choice(_FUNCTIONS)
    a, b, c = rng.sample(_SCALARS, 3)
    s, t = rng.sample(_STRINGS, 2)
    xs = rng.choice(_LISTS)
    words = {"a": a, "b": b, "c": c, "s": s, "t": t, "xs": xs, "x": xs[:-1], "k": rng.randint(2, 20)}
    subject = next(field for _, field, _, _ in string.Formatter().parse(parameters) if field)
    words["f"] = name = rng.choice((verb, f"{verb}_{words[subject]}"))
    header = f'def {name}({parameters}):\n    """{doc}"""'
    return header.format(**words), textwrap.indent(body.format(**words), " " * 4)


def _initialiser(rng: random.Random) -> tuple[str, str]:
    fields = rng.sample(_SCALARS + _STRINGS, rng.randint(1, 4))
    header = f"class {rng.choice(_CLASSES)}:\n    def __init__(self, {', '.join(fields)}):"
    return header, "\n".join(f"        self.{field} = {field}" for field in fields)


_STDLIB_FILES = (
    "_collections_abc _weakrefset abc argparse ast base64 bdb bisect calendar cmd code codecs collections/__init__ "
    "colorsys configparser contextlib copy csv dataclasses difflib dis email/message email/utils enum filecmp "
    "fileinput fnmatch fractions functools genericpath getopt gettext glob gzip heapq html/parser http/client "
    "http/cookies inspect io json/decoder json/encoder linecache locale logging/__init__ logging/handlers mimetypes "
    "numbers operator optparse os pathlib pdb pickle pickletools posixpath pprint profile pstats queue quopri random "
    "reprlib sched selectors shelve shlex shutil smtplib socketserver sre_parse statistics string subprocess symtable "
    "tarfile tempfile textwrap threading timeit tokenize trace traceback types unittest/case unittest/suite "
    "urllib/parse urllib/request uuid warnings wave weakref xml/dom/minidom xml/etree/ElementTree zipfile"
).split()


@functools.cache
def stdlib_functions() -> tuple[tuple[str, str], ...]:
    """(header, body) of every short function in a fixed list of modules; one that this Python lacks is passed over."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[tuple[str, str], None] = {}
    for name in _STDLIB_FILES:
        path = root / f"{name}.py"
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                pair = _header_and_body(node, lines)
                if pair is not None:
                    pairs[pair] = None
    return tuple(pairs)


def _header_and_body(node: ast.FunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Split a function's source after its docstring (or signature); None when it is long or has no body of its own."""
    first, *rest = node.body
    documented = ast.get_docstring(node, clean=False) is not None
    if documented and not rest:
        return None
    start = (rest if documented else node.body)[0].lineno
    if node.lineno == start or node.end_lineno is None or node.end_lineno - node.lineno >= 12:
        return None
    if documented and first.end_lineno is not None and first.end_lineno >= start:
        return None
    source = lines[node.lineno - 1 : node.end_lineno]
    code = textwrap.dedent("\n".join(source))
    if len(code) > 400 or not code.isascii() or "\t" in code or not code.startswith("def "):
        return None
    split = code.splitlines()
    header, body = split[: start - node.lineno], split[start - node.lineno :]
    return "\n".join(header).rstrip(), "\n".join(body)
