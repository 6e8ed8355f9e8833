"""The manual's generated pages: templates in Markdown that tables go into, and pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterable, Iterator


def row(cells: Iterable[Any]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def lines(head: str, rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: its head with bars between the columns, and its rows."""
    yield f"| {head} |\n{'|---' * (head.count('|') + 1)}|"
    yield from map(row, rows)


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(lines(head, rows))


def show(head: str, rows: Iterable[Iterable[Any]]) -> None:
    """Print a table, each row as soon as it was measured."""
    for line in lines(head, rows):
        print(line, flush=True)


def filled(module: str, **parts: Any) -> str:
    """Return the template beside a page's module with its ``{{names}}`` filled in.

    A paragraph of an empty part is left out, and so is a section whose parts are all empty.
    """
    template = Path(module).with_suffix(".md").read_text(encoding="utf-8")
    page = ""
    for section in re.split(r"^(?=## )", template, flags=re.MULTILINE):
        names = re.findall(r"{{(\w+)}}", section)
        if not names or any(parts[name] for name in names):
            section = re.sub(r"{{(\w+)}}\n\n", lambda m: f"{parts[m[1]]}\n\n" if parts[m[1]] else "", section)
            page += re.sub(r"{{(\w+)}}", lambda m: str(parts[m[1]]), section)
    return page


def subplots(*shape: int, **options: Any) -> tuple[Any, Any]:
    """Return a figure without a window and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, **options)
