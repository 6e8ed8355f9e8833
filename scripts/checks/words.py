"""Lists in mxmp/ what the section "Words" of CONTRIBUTING.md excludes: private words, and docstrings that are too long.

A name contains none of the words that the glossary replaces. The docstring of an internal function or class has at
most 3 lines, that of an internal module 12. A public name has a docstring, of any length. Public are ``mxmp.__all__``
and ``mxmp.diagnose.__all__``, what these functions return, the plain data that these classes hold, and the bases,
methods and properties of all classes among them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, NamedTuple

from support.options import parse
from support.results import ROOT

PRIVATE_WORDS = frozenset(["asked", "told", "foreign", "lent", "door", "doors"])
LONGEST, LONGEST_OF_MODULE = 3, 12
MOST = 0.35  # docstring lines per code line
_PUBLIC_MODULES = ("mxmp/__init__.py", "mxmp/diagnose/__init__.py", "mxmp/__main__.py")
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Offender(NamedTuple):
    """A place that breaks a rule. ``where``: file and line; ``rule``: "name" or "docstring"."""

    where: str
    rule: str
    text: str


def main(arguments: list[str] | None = None) -> int:
    parse(__doc__, arguments)
    found, (documentation, code) = list(offenders(public=public_names())), line_counts()
    for each in found:
        print(f"{each.where}: {each.rule}: {each.text}")
    counts = {rule: sum(each.rule == rule for each in found) for rule in ("name", "docstring")}
    print(f"{counts['name']} names and {counts['docstring']} docstrings")
    print(f"{documentation:,} docstring lines, {code:,} code lines: {documentation / code:.2f}, at most {MOST}")
    return 1 if found or documentation > MOST * code else 0


def offenders(
    package: Path = ROOT / "mxmp", public: Mapping[tuple[str, str], bool] | None = None
) -> Iterator[Offender]:
    """Yield each name that contains a private word, and each docstring that is too long or, of a public name, missing.

    ``public`` is what ``public_names`` returns; without it, all names are internal.
    """
    public = public or {}
    for path, tree in _parsed(package):
        file = path.relative_to(package.parent).as_posix()
        module = re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".")
        if _words(path.stem) & PRIVATE_WORDS:
            yield Offender(file, "name", path.stem)
        if file not in _PUBLIC_MODULES and _docstring_lines(tree) > LONGEST_OF_MODULE:
            yield Offender(file, "docstring", f"the module's has {_docstring_lines(tree)} lines")
        seen = set()
        for node in ast.walk(tree):
            for name in _names(node):
                if name not in seen and _words(name) & PRIVATE_WORDS:
                    seen.add(name)
                    yield Offender(f"{file}:{getattr(node, 'lineno', 1)}", "name", name)
        for name, node in _definitions(tree):
            lines, is_documented = _docstring_lines(node), public.get((module, name))
            if is_documented is False:
                yield Offender(f"{file}:{node.lineno}", "docstring", f"{name} is public and has none")
            if is_documented is None and lines > LONGEST:
                yield Offender(f"{file}:{node.lineno}", "docstring", f"{name} is internal and has {lines} lines")


def public_names() -> dict[tuple[str, str], bool]:
    """Return, by module and qualified name, what is public, and whether it has a docstring, its own or inherited."""
    import mxmp
    import mxmp.diagnose

    found: dict[tuple[str, str], bool] = {}
    left = [getattr(module, name) for module in (mxmp, mxmp.diagnose) for name in module.__all__]
    while left:
        each = inspect.unwrap(left.pop())
        key = each.__module__, each.__qualname__
        if key in found or key[0].split(".")[0] != "mxmp":
            continue
        found[key] = not _is_public(each.__name__) or bool(inspect.getdoc(each))
        if inspect.isfunction(each):
            left += _mentioned(each, ["return"])
            continue
        left += [*each.__bases__, *filter(_is_data, _mentioned(each, vars(each).get("__annotations__", {})))]
        for name, member in vars(each).items():
            function = getattr(member, "fget", getattr(member, "__func__", member))
            if inspect.isfunction(function) and function.__module__ == each.__module__:
                if _is_public(name):
                    left += filter(_is_data, _mentioned(function, ["return"]))
                    found[key[0], function.__qualname__] = bool(inspect.getdoc(getattr(each, name)))
                elif name in ("__init__", "__call__"):  # may have one, of any length
                    found[key[0], function.__qualname__] = True
    return found


def line_counts(package: Path = ROOT / "mxmp") -> tuple[int, int]:
    """Return how many lines of docstrings a package has, and of code: neither docstring nor comment nor empty."""
    documentation = others = 0
    for path, tree in _parsed(package):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        for node in (tree, *(node for _, node in _definitions(tree))):
            length = _docstring_lines(node)
            start = node.body[0].lineno - 1 if length else 0
            documentation += length
            lines[start : start + length] = [""] * length
        others += sum(bool(line) and not line.startswith("#") for line in lines)
    return documentation, others


def _mentioned(owner: Any, names: Iterable[str]) -> Iterator[type]:
    """Yield the classes in annotations of a class or function, which are texts."""
    known = vars(sys.modules[owner.__module__])
    for name in names:
        if _is_public(name):
            words = re.findall(r"\w+", str(owner.__annotations__.get(name, "")))
            yield from (known[word] for word in words if inspect.isclass(known.get(word)))


def _is_data(found: type) -> bool:
    return issubclass(found, tuple) or dataclasses.is_dataclass(found)


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _parsed(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _definitions(inside: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each class and function with its qualified name."""
    for node in ast.iter_child_nodes(inside):
        if isinstance(node, _DEFINITIONS):
            yield prefix + node.name, node
            more = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from _definitions(node, prefix + node.name + more)
        else:
            yield from _definitions(node, prefix)


def _docstring_lines(node: Any) -> int:
    return node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) is not None else 0


def _names(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def _words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))
