"""Pictures by matplotlib, if it is there, in files that appear complete or not at all."""

from __future__ import annotations

import os
from typing import Any

from .files import replacing


def new_figure(width: float, height: float) -> Any:
    """Return a new matplotlib ``Figure`` of a size in inches, without a window; ``ImportError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def picture_format(path: str) -> str:
    """Return the format of the picture ``path`` by its name: ``"png"``, ``"svg"`` or ``"pdf"``; else ``ValueError``."""
    kind = os.path.splitext(path)[1][1:]
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"{os.fspath(path)!r} is no picture: expected a name that ends with .png, .svg or .pdf")
    return kind


def save_figure(figure: Any, path: str | None) -> Any:
    """Write a matplotlib ``Figure`` to ``path``, unless this is None, and return it; ``ValueError`` for its format."""
    if path is not None:
        kind = picture_format(path)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=110)
    return figure
