"""Lists the names and docstrings in mxmp/ that the language rules of CONTRIBUTING.md exclude, and how many there are.

A name (of a module, class, function, argument, variable or attribute) contains none of the words that CONTRIBUTING's
glossary replaces. The docstring of a function begins with a verb, so not with a preposition, nor with What or Whether.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Iterator, NamedTuple

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
    parse(__doc__, arguments)
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


def _names(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def _words(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))
