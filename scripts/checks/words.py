"""Lists the names and docstrings in mxmp/ that the language rules of CONTRIBUTING.md exclude, and how many there are.

A name (of a module, class, function, argument, variable or attribute) contains none of the words that CONTRIBUTING's
glossary replaces. The docstring of a function begins with a verb, so not with a preposition, nor with What or Whether.

``--draw 30 --seed WORD`` prints docstrings drawn at random instead, as an editor shows them to a reader without the
code: first the beginning of the module's docstring and that of the class, then the signature and the docstring.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from pathlib import Path
from typing import Any, Iterator, NamedTuple

from support.options import parse
from support.results import ROOT

PRIVATE_WORDS = frozenset(["asked", "told", "foreign", "lent", "door", "doors"])
_OPENING = re.compile(
    r"""(what|which|how|whether|why|where|when|who
    |of|for|in|on|at|by|with|without|from|to|into|between|behind|before|after|under|over|through|among|as|beside
    |around|against|during|until|within)\b""",
    re.IGNORECASE | re.VERBOSE,
)


class Offender(NamedTuple):
    """A place that breaks a rule. ``where``: file and line; ``rule``: "name" or "docstring"."""

    where: str
    rule: str
    text: str


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments, draw=(0, "how many docstrings to print"), seed=("", "any text"))
    if options.draw:
        print("\n\n".join(random.Random(options.seed).sample(list(documented()), options.draw)))
        return 0
    found = list(offenders())
    for each in found:
        print(f"{each.where}: {each.rule}: {each.text}")
    counts = {rule: sum(each.rule == rule for each in found) for rule in ("name", "docstring")}
    print(f"{counts['name']} names and {counts['docstring']} docstrings")
    return 1 if found else 0


def offenders(package: Path = ROOT / "mxmp") -> Iterator[Offender]:
    """Yield each name that contains a private word, and each docstring with a wrong opening."""
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent).as_posix()
        if _words(path.stem) & PRIVATE_WORDS:
            yield Offender(module, "name", path.stem)
        seen = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _names(node):
                if name not in seen and _words(name) & PRIVATE_WORDS:
                    seen.add(name)
                    yield Offender(f"{module}:{getattr(node, 'lineno', 1)}", "name", name)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if _OPENING.match(first):
                    yield Offender(f"{module}:{node.lineno}", "docstring", f"{node.name}: {first}")


def documented(package: Path = ROOT / "mxmp") -> Iterator[str]:
    """Yield each class and function that has a docstring, as an editor shows it."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        around = (ast.get_docstring(tree) or "").split("\n\n")[0]
        yield from _documented(tree, path.relative_to(package.parent).as_posix(), f"[module: {around}]")


def _documented(inside: ast.AST, place: str, around: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(inside):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text, here = ast.get_docstring(node), f"{place}, {node.name}"
            if text:
                yield f"--- {here}\n{around}\n{ast.unparse(_outline(node))}\n{text}"
            more = f"{around}\n[class {node.name}: {text}]" if isinstance(node, ast.ClassDef) and text else around
            yield from _documented(node, here, more)


def _outline(node: Any) -> Any:
    """Return a copy of a class or function that has no code: a signature, or a class's fields and constructor."""
    node = copy.copy(node)
    constructors = [each for each in node.body if getattr(each, "name", "") == "__init__"]
    kept = [each for each in node.body if isinstance(each, ast.AnnAssign)] or [_outline(each) for each in constructors]
    node.body = (kept if isinstance(node, ast.ClassDef) else []) or [ast.Expr(ast.Constant(...))]
    return node


def _names(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def _words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))
