"""Tables, sections and lists in the texts of reports."""

from __future__ import annotations

from typing import Callable, Hashable, Iterable, Sequence, TypeVar

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items of each key, in the order in which they come."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the lines of a text table; ``align`` has ``<`` or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [c.ljust(width) if side == "<" else c.rjust(width) for c, width, side in zip(row, widths, align)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def section(title: str, entries: Iterable[str]) -> list[str]:
    """Return an empty line, the title and a line for each entry; nothing if there are no entries."""
    lines = [f"    {entry}" for entry in entries]
    return ["", f"  {title}", *lines] if lines else []


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return the first ``limit`` names, and how many more there are: ``"a, b and 3 more"``."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
