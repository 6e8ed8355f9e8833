"""The picture of ``profile``: time by operator and kind."""

from __future__ import annotations

from typing import Any

from ..shared.pictures import figure_of, saved
from .kernels import BULK, CAST, MATRIX, OTHER, TENSOR
from .report import Profile

__all__ = ["plot_profile"]

_COLORS = {TENSOR: "#1b7837", MATRIX: "#b35806", CAST: "#762a83", OTHER: "#bababa", BULK: "#878787"}
_MOST = 12
_WIDTH = 40


def plot_profile(profile: Profile, path: str | None = None) -> Any:
    """A bar for each operator, longest first, by kind.

    Parameters
    ----------
    profile : Profile
    path : str, optional
        Where to save the picture; its ending says in which format.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        Without matplotlib.
    """
    figure = figure_of((8, 5))
    axes = figure.subplots()
    shown = profile.operators[:_MOST]
    places = range(len(shown))
    left = [0.0] * len(shown)
    for kind, name in profile.kinds.items():
        widths = [operator.seconds[kind] * 1e3 for operator in shown]
        axes.barh(places, widths, left=left, color=_COLORS[kind], label=f"{name}: {profile.share(kind):.1%}")
        left = [a + b for a, b in zip(left, widths)]
    labels = [each.name if len(each.name) <= _WIDTH else each.name[: _WIDTH - 3] + "..." for each in shown]
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * (max(left, default=0) or 1.0))
    axes.set_xlabel("ms")
    axes.legend(loc="lower right")
    axes.set_title(f"{profile.source}, {', '.join(profile.devices)}: {profile.seconds * 1e3:,.2f} ms", fontsize=10)
    return saved(figure, path)
