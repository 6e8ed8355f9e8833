"""Tables in Markdown, and pictures."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

__all__ = ["row", "subplots", "table"]


def row(cells: Iterable[Any]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: str, rows: Iterable[Iterable[Any]], after: str = "") -> Iterator[str]:
    """Yield the lines of a table: its head with bars between the columns, its rows, and a line behind it."""
    first = f"| {head} |"
    yield first
    yield "|" + "---|" * (first.count("|") - 1)
    yield from map(row, rows)
    yield after


def subplots(*shape: int, **options: Any) -> tuple[Any, Any]:
    """Return a figure without a window and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, **options)
