"""What pictures share: matplotlib, which is imported for them only, and files that are whole or not there."""

from __future__ import annotations

import os
from typing import Any

from ...files import replacing

__all__ = ["figure_of", "saved"]

_KINDS = ("png", "svg", "pdf")


def figure_of(size: tuple[float, float]) -> Any:
    """A new matplotlib Figure, no window's.

    Raises
    ------
    ImportError
        matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
    return Figure(figsize=size, layout="constrained")


def saved(figure: Any, path: str | None) -> Any:
    """The figure, written to ``path`` where there is one.

    Raises
    ------
    ValueError
        The path does not end with .png, .svg or .pdf.
    """
    if path is not None:
        kind = os.path.splitext(path)[1][1:]
        if kind not in _KINDS:
            raise ValueError(f"{os.fspath(path)!r} is no picture: expected a name that ends with .png, .svg or .pdf")
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=110)
    return figure
