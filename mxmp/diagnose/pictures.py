"""What pictures share: matplotlib, which is imported for them only."""

from __future__ import annotations

from typing import Any

__all__ = ["new_axes"]


def new_axes(width: float = 8, height: float = 5) -> Any:
    """Axes of a new figure, which is no window's and need not be closed.

    Raises
    ------
    ImportError
        matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure.add_subplot()
