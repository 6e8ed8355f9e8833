"""Pictures of what was watched. matplotlib is imported when one is drawn: ``pip install 'mxmp[plots]'``."""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np

from ..shared.pictures import figure_of, saved
from .histogram import Format, Histogram
from .snapshot import KINDS, Snapshot, TensorReport

__all__ = ["plot_histograms", "plot_steps"]

_TITLES = {
    "activation": "Activations",
    "gradient": "Gradients between operators, times the loss scale",
    "parameter gradient": "Gradients of parameters, times the loss scale",
    "weight": "Weights",
    "update": "Updates",
}
_LOST, _WEAK = "#f4c7c3", "#fce8b2"
_PLATE = {"color": "firebrick", "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}}


def plot_histograms(snapshot: Snapshot, path: str | None = None, *, kinds: Sequence[str] = KINDS[:2]) -> Any:
    """One watched step over the low dtype's range: all gradients with and without the loss scale, then each tensor.

    Exponents on the x axis. Each row of the lower pictures is a tensor, in the order in which they were made; the
    darker, the more of its values.

    Parameters
    ----------
    snapshot : Snapshot
    path : str, optional
        Where to save the picture; its ending says in which format.
    kinds : sequence of str
        Which tensors: of "activation", "gradient", "parameter gradient", "weight", "update".

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        Without matplotlib.
    ValueError
        For a kind that there is not.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"kinds are {', '.join(map(repr, KINDS))}, got {unknown[0]!r}")
    shown = [(kind, tensors) for kind in kinds if (tensors := snapshot.of(kind, low_only=True))]
    heights = [3.0, *(1.1 + 0.24 * len(tensors) for _, tensors in shown)]
    figure = figure_of((10, sum(heights)))
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    low, high = _span([t for _, tensors in shown for t in tensors], snapshot)
    _gradients(axes[0], snapshot)
    for axis, (kind, tensors) in zip(axes[1:], shown):
        _rows(axis, tensors, low, high)
        axis.set_title(_TITLES[kind], fontsize=10, loc="left")
        _mark(axis, snapshot.format, shade=False)
    axes[0].set_xlim(low, high)
    for axis in axes:
        axis.tick_params(axis="x", labelbottom=True)
    axes[-1].set_xlabel("exponent: values from $2^e$ to $2^{e+1}$")
    skipped = ", skipped" if snapshot.skipped else ""
    figure.suptitle(f"Step {snapshot.step}{skipped}, loss scale {_power(snapshot.loss_scale)}, {snapshot.compute}")
    return saved(figure, path)


def plot_steps(
    snapshots: Sequence[Snapshot], path: str | None = None, *, kind: str = "gradient", name: str | None = None
) -> Any:
    """How the exponents of one tensor, or of all of a kind together, moved over the watched steps.

    Steps on the x axis, exponents on the y axis with the low dtype's range marked.

    Parameters
    ----------
    snapshots : sequence of Snapshot
        ``watched.snapshots``.
    path : str, optional
    kind, name : str
        Which tensor; without a name all of the kind that stand in low precision.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        Without matplotlib.
    ValueError
        No snapshot has such a tensor.
    """
    columns: list[tuple[Snapshot, Histogram]] = []
    for snapshot in snapshots:
        chosen = [t.histogram for t in snapshot.of(kind, low_only=name is None) if name in (None, t.name)]
        if chosen:
            columns.append((snapshot, sum(chosen[1:], chosen[0])))
    if not columns:
        known = sorted({t.name for s in snapshots for t in s.of(kind)})
        raise ValueError(f"no snapshot has {kind} {name!r}: there are {', '.join(known) or 'none of that kind'}")
    figure = figure_of((10, 4.5))
    axis = figure.subplots()
    form = columns[0][0].format
    low, high = _ends([h for _, h in columns], form)
    grid = np.stack([_shares(h, low, high) for _, h in columns], axis=1)
    image = axis.imshow(
        grid, origin="lower", aspect="auto", cmap="Blues", extent=(-0.5, len(columns) - 0.5, low, high), norm=_log()
    )
    ticks = np.unique(np.linspace(0, len(columns) - 1, min(len(columns), 10)).round().astype(int))
    axis.set_xticks(ticks)
    axis.set_xticklabels([str(columns[i][0].step) for i in ticks])
    axis.set_xlabel("step")
    axis.set_ylabel("exponent")
    for edge, text in _edges(form):
        axis.axhline(edge, color="firebrick", linewidth=1)
        axis.text(0.01, edge, text, transform=axis.get_yaxis_transform(), fontsize=8, va="center", **_PLATE)
    figure.colorbar(image, ax=axis, label="share of the values")
    axis.set_title(name or _TITLES.get(kind, kind), fontsize=10, loc="left")
    return saved(figure, path)


def _gradients(axis: Any, snapshot: Snapshot) -> None:
    form = snapshot.format
    _mark(axis, form, shade=True)
    scaled = [t.histogram for t in snapshot.gradients]
    true = [t.true(snapshot.loss_scale) for t in snapshot.gradients]
    curves = [(scaled, f"times {_power(snapshot.loss_scale)}", "tab:blue")]
    if snapshot.loss_scale != 1:
        curves.insert(0, (true, "without the scale", "0.55"))
    for histograms, label, color in curves if scaled else ():
        total = sum(histograms[1:], histograms[0])
        lost, zero = total.underflow(form), total.zero_share
        text = f"{label}: {lost:.1%} round to zero ({zero:.1%} are zero already)"
        share = total.counts / max(total.counted, 1)
        axis.step(total.exponents() + 1, share, where="pre", label=text, color=color)
    axis.set_ylim(0, 1.5 * axis.get_ylim()[1])
    axis.set_ylabel("share of the values")
    axis.set_title("All gradients that stand in low precision", fontsize=10, loc="left", pad=16)
    if scaled:
        axis.legend(fontsize=8, loc="upper left", framealpha=0.9)


def _rows(axis: Any, tensors: Sequence[TensorReport], low: int, high: int) -> None:
    grid = np.stack([_shares(t.histogram, low, high) for t in tensors])
    axis.imshow(grid, aspect="auto", cmap="Blues", extent=(low, high, len(tensors) - 0.5, -0.5), norm=_log())
    axis.set_yticks(range(len(tensors)))
    axis.set_yticklabels([_short(t.name) for t in tensors], fontsize=7)


def _mark(axis: Any, form: Format, *, shade: bool) -> None:
    for edge, _ in _edges(form):
        axis.axvline(edge, color="firebrick", linewidth=1)
    if shade:
        tiny, normal, top = (edge for edge, _ in _edges(form))
        for start, stop, color in ((-200, tiny, _LOST), (tiny, normal, _WEAK), (top, 200, _LOST)):
            axis.axvspan(start, stop, color=color, zorder=0, linewidth=0)
        for edge, text in _edges(form):
            axis.text(
                edge, 1.01, text, transform=axis.get_xaxis_transform(), fontsize=7, color="firebrick", ha="center"
            )


def _edges(form: Format) -> list[tuple[int, str]]:
    """Where the format's range has its edges: below the first all is zero, beyond the last inf."""
    return [
        (form.tiny - 1, "zero below"),
        (form.normal, f"{form.name}: subnormal below"),
        (form.top + 1, "overflow above"),
    ]


def _span(tensors: Sequence[TensorReport], snapshot: Snapshot) -> tuple[int, int]:
    true = [t.true(snapshot.loss_scale) for t in snapshot.gradients]
    return _ends([*(t.histogram for t in tensors), *true], snapshot.format)


def _ends(histograms: Sequence[Histogram], form: Format) -> tuple[int, int]:
    found = [e for h in histograms for e in h.exponents()[h.counts > 0]]
    narrow = form.name == "float16"  # bfloat16's range is FP32's: show what there is
    ends = [*found, *((form.tiny - 2, form.top + 2) if narrow else ())]
    return int(min(ends, default=-1)), int(max(ends, default=0)) + 1


def _shares(histogram: Histogram, low: int, high: int) -> np.ndarray:
    start = low - int(histogram.exponents()[0])
    return histogram.counts[max(start, 0) : start + high - low] / max(histogram.counted, 1)


def _short(name: str, limit: int = 48) -> str:
    return name if len(name) <= limit else f"{name[: limit // 2 - 1]}…{name[-limit // 2 :]}"


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent == round(exponent) else f"{scale:g}"


def _log() -> Any:
    from matplotlib.colors import LogNorm

    return LogNorm(vmin=1e-4, vmax=1.0)
