"""What reports share: files that hold them, and text."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from reprlib import repr as shorten
from typing import Any, ClassVar, Iterable, Sequence, TypeVar, get_args, get_origin, get_type_hints

from ...files import read_json, replacing

__all__ = ["Saved", "read_report", "some", "table"]

_Report = TypeVar("_Report", bound="Saved")


class Saved:
    """A report that can be saved: a dataclass of numbers, text, and tuples of the same or of other dataclasses.

    The modules of these dataclasses do without ``from __future__ import annotations`` and take the types of their
    fields from ``typing``, so that Python 3.8 too can tell what a field holds.
    """

    FORMAT: ClassVar[str]  # of the file

    def save(self, path: str) -> None:
        """Write JSON; the file appears whole or not at all."""
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": self.FORMAT, **asdict(self)}, file, indent=1)  # type: ignore[call-overload]
            file.write("\n")

    @classmethod
    def load(cls: type[_Report], path: str) -> _Report:
        """Read what ``save`` wrote. Raises ``ValueError`` for any other file."""
        return read_report(path, cls)


def read_report(path: str, *kinds: type[Saved]) -> Any:
    """Read a report that is one of ``kinds``.

    Raises
    ------
    ValueError
        The file holds none of them, or a field of it holds what cannot be there.
    """
    known = {kind.FORMAT: kind for kind in kinds}
    try:
        raw = read_json(path)
        if not isinstance(raw, dict) or raw.get("format") not in list(known):
            raise ValueError("it has no such 'format'")
        return _made(known[raw.pop("format")], raw, "the report")
    except (TypeError, ValueError) as error:
        formats = ", ".join(known)
        raise ValueError(f"{os.fspath(path)!r} is no report that was saved by mxmp ({formats}): {error}") from error


def _made(kind: Any, raw: Any, where: str) -> Any:
    """Make a value of type ``kind`` of what JSON holds for it. Raises ``ValueError`` if it is of another type."""
    if get_args(kind):  # Tuple[item, ...]
        items = _checked(raw, list, where)
        return tuple(_made(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if kind in (str, bool):
        return _checked(raw, kind, where)
    if kind in (int, float):
        if isinstance(raw, bool) or not isinstance(raw, (int, kind)) or not 0 <= raw < math.inf:
            raise ValueError(f"{where} must be of type {kind.__name__} and at least 0, got {shorten(raw)}")
        return raw
    fields = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}
    named = dict(zip(fields, _checked(raw, list, where))) if issubclass(kind, tuple) else _checked(raw, dict, where)
    if len(named) < len(raw) or not named.keys() <= fields.keys():
        raise ValueError(f"{where} must have the fields {', '.join(fields)}, got {', '.join(named)}")
    return kind(**{name: _made(fields[name], value, f"{where}.{name}") for name, value in named.items()})


def _checked(raw: Any, kind: type, where: str) -> Any:
    if not isinstance(raw, kind):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {shorten(raw)}")
    return raw


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the lines of a table; ``align`` has ``<`` or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [c.ljust(width) if side == "<" else c.rjust(width) for c, width, side in zip(row, widths, align)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def some(names: Iterable[str], limit: int = 8) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
