"""Pictures of reports and runs. matplotlib is imported when one is drawn: ``pip install 'mxmp[plots]'``."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import Any, Sequence

import numpy as np

from ..files import replacing
from ..step.step import ScaleEvent, StepView
from .advising.advice import Advice, MatrixReport
from .profiling.kernels import BULK, CAST, MATRIX, OTHER, TENSOR
from .profiling.report import Profile
from .watching.histogram import Format, Histogram
from .watching.snapshot import KINDS, Snapshot
from .watching.watch import Watch

__all__ = ["plot_histograms", "plot_loss_scale", "plot_profile", "plot_roofline", "plot_steps"]


def _axes(size: tuple[float, float], heights: Sequence[float] = (1,), **options: Any) -> list[Any]:
    """Axes below each other that share the x axis, in a new matplotlib Figure of no window.

    Raises
    ------
    ImportError
        matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): pip install 'mxmp[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    found[-1].set(**options)
    return list(found)


def _saved(axis: Any, path: str | None) -> Any:
    """The figure of an axis, written to ``path`` where there is one.

    Raises
    ------
    ValueError
        The path does not end with .png, .svg or .pdf.
    """
    if path is not None:
        kind = os.path.splitext(path)[1][1:]
        if kind not in ("png", "svg", "pdf"):
            raise ValueError(f"{os.fspath(path)!r} is no picture: expected a name that ends with .png, .svg or .pdf")
        with replacing(path) as temporary:
            axis.figure.savefig(temporary, format=kind, dpi=110)
    return axis.figure


def _text(name: str, limit: int = 48) -> str:
    """A name as it stands in a picture: short, and no formula."""
    short = name if len(name) <= limit else f"{name[: limit // 2 - 1]}…{name[-limit // 2 :]}"
    return short.replace("$", r"\$")


# -- Reports ----------------------------------------------------------------------------------------

_KINDS = {TENSOR: "#1b7837", MATRIX: "#b35806", CAST: "#762a83", OTHER: "#bababa", BULK: "#878787"}
_MOST = 12


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
    title = f"{profile.source}, {_text(', '.join(profile.devices))}: {profile.seconds * 1e3:,.2f} ms"
    (axis,) = _axes((8, 5), xlabel="ms")
    axis.set_title(title, fontsize=10)
    shown = profile.operators[:_MOST]
    left = np.zeros(len(shown))
    for kind, name in profile.kinds.items():
        widths = np.array([1e3 * operator.seconds[kind] for operator in shown])
        label = f"{name}: {profile.share(kind):.1%}"
        axis.barh(range(len(shown)), widths, left=left, color=_KINDS[kind], label=label)
        left += widths
    axis.set_yticks(range(len(shown)), [_text(operator.name, 40) for operator in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.05 * max(left, default=0.0) or 1.0)
    axis.legend(loc="lower right")
    return _saved(axis, path)


_ROOFS = {
    "float16": ("float16, Tensor Cores", "#1b7837"),
    "tf32": ("TF32, Tensor Cores", "#762a83"),
    "float32": ("FP32", "#b35806"),
    "int8": ("INT8, Tensor Cores", "#2166ac"),
}
_TERA = 1e12


def plot_roofline(advice: Advice, path: str | None = None) -> Any:
    """A roof for each dtype, with its ridge point, and a dot for each operator in the dtype that it computes in.

    The dot's area is the operator's share of the FLOPs; it is hollow where low precision misses the Tensor Cores.

    Parameters
    ----------
    advice : Advice
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
    (axis,) = _axes((8, 5), xlabel="FLOPs per byte that is read or written", ylabel="attainable TFLOP/s")
    axis.set_title(
        f"{_text(advice.name)} ({_text(advice.policy)}) on {advice.gpu.name}\n"
        f"{advice.flops / 1e9:,.1f} GFLOPs a forward, {advice.tensor_share:.1%} can run on Tensor Cores",
        fontsize=10,
    )
    gpu = advice.gpu
    dots: dict[tuple[float, str, str], float] = defaultdict(float)
    for matrix in advice.matrices:
        if matrix.flops:
            dots[matrix.intensity, _roof(matrix, advice), matrix.dtype] += matrix.flops
    intensities = [intensity for intensity, _, _ in dots]
    low, high = min([1.0, *intensities]) / 2, max([gpu.ridge("float16") * 8, *intensities]) * 2
    for dtype in gpu.roofs:
        (name, color), ridge, peak = _ROOFS[dtype], gpu.ridge(dtype), gpu.peak(dtype) / _TERA
        axis.plot([low, ridge, high], [low * gpu.bandwidth / _TERA, peak, peak], color=color, zorder=1)
        axis.plot([ridge], [peak], marker="|", markersize=12, color=color)
        label = f"{name}: {peak:.4g} (ridge {ridge:.0f})"
        axis.annotate(label, (high, peak), (-4, 10), textcoords="offset points", ha="right", color=color)
    for (intensity, roof, dtype), flops in dots.items():
        reached = min(intensity * gpu.bandwidth, gpu.peak(roof)) / _TERA
        color = _ROOFS[dtype][1]
        fill, area = color if dtype == roof else "none", 12 + 500 * flops / advice.flops
        axis.scatter([intensity], [reached], s=area, facecolor=fill, edgecolor=color, alpha=0.7, zorder=3)
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, gpu.peak("float16") / _TERA * 2))
    note = "a dot: operators, its area: their share of the FLOPs; hollow: low precision without Tensor Cores"
    axis.annotate(note, (1, 0), (-4, 4), "axes fraction", "offset points", ha="right", fontsize=8, color="#555555")
    axis.grid(visible=True, which="major", alpha=0.3)
    return _saved(axis, path)


def _roof(matrix: MatrixReport, advice: Advice) -> str:
    """FP32 cores compute what no Tensor Core can, at their own peak."""
    if matrix.dtype == "float32" and not matrix.depthwise:
        return advice.gpu.fp32_math
    return matrix.dtype if matrix.on_tensor_cores(advice.gpu) else "float32"


# -- Watched steps ----------------------------------------------------------------------------------

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
    first, *others = axes = _axes((10, sum(heights)), heights, xlabel="exponent: values from $2^e$ to $2^{e+1}$")
    true = [t.true(snapshot.loss_scale) for t in snapshot.gradients]
    drawn = [t.histogram for _, tensors in shown for t in tensors]
    low, high = _ends([*drawn, *true], snapshot.format)
    _gradients(first, snapshot, true)
    for axis, (kind, tensors) in zip(others, shown):
        _image(axis, [t.histogram for t in tensors], low, high, (low, high, len(tensors) - 0.5, -0.5))
        axis.set_yticks(range(len(tensors)), [_text(t.name) for t in tensors], fontsize=7)
        axis.set_title(_TITLES[kind], fontsize=10, loc="left")
        for edge in _edges(snapshot.format):
            axis.axvline(edge, color="firebrick", linewidth=1)
    first.set_xlim(low, high)
    for axis in axes:
        axis.tick_params(axis="x", labelbottom=True)
    skipped = ", skipped" if snapshot.skipped else ""
    first.figure.suptitle(
        f"Step {snapshot.step}{skipped}, loss scale {_power(snapshot.loss_scale)}, {snapshot.compute}"
    )
    return _saved(first, path)


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
        Where to save the picture; its ending says in which format.
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
    columns: dict[int, Histogram] = {}
    for number, snapshot in enumerate(snapshots):
        chosen = [t.histogram for t in snapshot.of(kind, low_only=name is None) if name in (None, t.name)]
        if chosen:
            columns[number] = sum(chosen[1:], chosen[0])
    if not columns:
        known = sorted({t.name for s in snapshots for t in s.of(kind)})
        raise ValueError(f"no snapshot has {kind} {name!r}: there are {', '.join(known) or 'none of that kind'}")
    (axis,) = _axes((10, 4.5), xlabel="step", ylabel="exponent")
    form, steps = snapshots[0].format, [snapshots[number].step for number in columns]
    low, high = _ends(list(columns.values()), form)
    extent = (-0.5, len(columns) - 0.5, low, high)
    image = _image(axis, list(columns.values()), low, high, extent, upright=True)
    ticks = np.unique(np.linspace(0, len(columns) - 1, min(len(columns), 10)).round().astype(int))
    axis.set_xticks(ticks, [str(steps[i]) for i in ticks])
    for edge, text in _edges(form).items():
        axis.axhline(edge, color="firebrick", linewidth=1)
        axis.text(0.01, edge, text, transform=axis.get_yaxis_transform(), fontsize=8, va="center", **_PLATE)
    axis.figure.colorbar(image, ax=axis, label="share of the values")
    axis.set_title(_text(name) if name else _TITLES.get(kind, kind), fontsize=10, loc="left")
    return _saved(axis, path)


def plot_loss_scale(
    run: StepView | Sequence[ScaleEvent], path: str | None = None, *, watched: Watch | Sequence[Snapshot] = ()
) -> Any:
    """The loss scale from step to step, and which steps were skipped.

    Parameters
    ----------
    run : Trainer, Module, BucketingModule or sequence of ScaleEvent
        Whose ``scale_history`` is drawn, up to the last step taken.
    path : str, optional
        Where to save the picture; its ending says in which format.
    watched : Watch or sequence of Snapshot
        Of the same run: adds the share of the gradient values that round to zero, and how far up the scale
        could have gone.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        Without matplotlib.
    ValueError
        There is no event.
    """
    events = list(run.scale_history if isinstance(run, StepView) else run)
    if not events:
        raise ValueError("scale_history is empty: the first scale is its first event")
    snapshots = list(watched.snapshots if isinstance(watched, Watch) else watched)
    taken = run.scaled_step.steps if isinstance(run, StepView) else 1
    end = max(events[-1].step, taken, *(s.step for s in snapshots))
    steps, scales = [e.step for e in events], [e.loss_scale for e in events]
    first, *others = axes = _axes((10, 5.5 if snapshots else 3.5), (1, 1) if snapshots else (1,), xlabel="step")
    first.step([*steps, end], [*scales, scales[-1]], where="post", label="loss scale", color="tab:blue")
    # the event after a skip carries the scale of the next step; the skipped one ran at the scale before it
    skips = [(e.step - 1, before.loss_scale) for before, e in zip(events, events[1:]) if e.skipped]
    if skips:
        label = f"{len(skips)} skipped step{'s' if len(skips) > 1 else ''}"
        first.plot(*zip(*skips), "x", color="firebrick", label=label)
    first.set_yscale("log", base=2)
    first.set_ylabel("loss scale")
    for second in others:
        at = [s.step for s in snapshots]
        room = [s.loss_scale * 2.0 ** min(s.headroom, 120) if s.headroom > -120 else float("nan") for s in snapshots]
        first.plot(at, room, color="0.6", linewidth=1, label="largest scale without overflow, where watched")
        second.plot(at, [100 * s.underflow for s in snapshots], label="at this scale", color="tab:blue")
        second.plot(at, [100 * s.underflow_unscaled for s in snapshots], label="without scaling", color="0.6")
        second.set(ylabel="% of gradient values\nthat round to zero", ylim=(0, None))
    for axis in axes:
        axis.legend(fontsize=8)
    return _saved(first, path)


def _gradients(axis: Any, snapshot: Snapshot, true: Sequence[Histogram]) -> None:
    """All gradients together, over the format's range: red where values are lost, yellow where they lose bits."""
    form, (tiny, normal, top) = snapshot.format, _edges(snapshot.format)
    for start, stop, color in ((-200, tiny, _LOST), (tiny, normal, _WEAK), (top, 200, _LOST)):
        axis.axvspan(start, stop, color=color, zorder=0, linewidth=0)
    for edge, text in _edges(form).items():
        axis.axvline(edge, color="firebrick", linewidth=1)
        axis.text(edge, 1.01, text, transform=axis.get_xaxis_transform(), fontsize=7, color="firebrick", ha="center")
    curves = {f"times {_power(snapshot.loss_scale)}": ([t.histogram for t in snapshot.gradients], "tab:blue")}
    if snapshot.loss_scale != 1:
        curves = {"without the scale": (list(true), "0.55"), **curves}
    for label, (histograms, color) in curves.items() if true else ():
        total = sum(histograms[1:], histograms[0])
        text = f"{label}: {total.underflow(form):.1%} round to zero ({total.zero_share:.1%} are zero already)"
        share = total.counts / max(total.counted, 1)
        axis.step(total.exponents() + 1, share, where="pre", label=text, color=color)
    axis.set(ylim=(0, 1.5 * axis.get_ylim()[1]), ylabel="share of the values")
    axis.set_title("All gradients that stand in low precision", fontsize=10, loc="left", pad=16)
    if true:
        axis.legend(fontsize=8, loc="upper left", framealpha=0.9)


def _image(
    axis: Any, histograms: Sequence[Histogram], low: int, high: int, extent: tuple, *, upright: bool = False
) -> Any:
    """The share of the values at each exponent from ``low`` to ``high``: a row for each histogram, or a column."""
    from matplotlib.colors import LogNorm

    start = low - int(histograms[0].exponents()[0])
    grid = np.stack([h.counts[max(start, 0) : start + high - low] / max(h.counted, 1) for h in histograms])
    norm, origin = LogNorm(vmin=1e-4, vmax=1.0), "lower" if upright else "upper"
    return axis.imshow(
        grid.T if upright else grid, origin=origin, aspect="auto", cmap="Blues", extent=extent, norm=norm
    )


def _edges(form: Format) -> dict[int, str]:
    """Where the format's range has its edges: below the first all is zero, beyond the last inf."""
    return {
        form.tiny - 1: "zero below",
        form.normal: f"{form.name}: subnormal below",
        form.top + 1: "overflow above",
    }


def _ends(histograms: Sequence[Histogram], form: Format) -> tuple[int, int]:
    found = [e for h in histograms for e in h.exponents()[h.counts > 0]]
    narrow = form.name == "float16"  # bfloat16's range is FP32's: show what there is
    ends = [*found, *((form.tiny - 2, form.top + 2) if narrow else ())]
    return int(min(ends, default=-1)), int(max(ends, default=0)) + 1


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent == round(exponent) else f"{scale:g}"
