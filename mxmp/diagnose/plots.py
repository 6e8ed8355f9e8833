"""Pictures of watched steps and of the loss scale. Only drawing imports matplotlib: ``pip install 'mxmp[plots]'``."""

from __future__ import annotations

import math
from typing import Any, Iterable, Sequence

import numpy as np

from ..pictures import new_figure, save_figure
from ..step.step import ScaleEvent, StepView
from .verifying.report import Verification
from .watching.histogram import Format, Histogram
from .watching.snapshot import KINDS, Snapshot, TensorReport
from .watching.watch import Watch

_TITLES = {
    "activation": "Activations",
    "gradient": "Gradients between operators, times the loss scale",
    "parameter gradient": "Gradients of parameters, times the loss scale",
    "weight": "Weights",
    "update": "Updates",
}
_LEAST_DRAWN = 1e-8  # of a difference: exactly equal gradients lie there
_LOST, _WEAK, _EDGE = "#f4c7c3", "#fce8b2", "firebrick"


def plot_histograms(snapshot: Snapshot, path: str | None = None, *, kinds: Sequence[str] = KINDS[:2]) -> Any:
    """Draw how the values of a watched step's tensors lie in the range of the compute dtype.

    The x axis has the values' exponents of two. The first picture shows all gradients together, with and without the
    loss scale. Below it there is a picture for each of ``kinds``, with one row for each tensor, in the order in which
    they were computed: the darker an exponent, the more of the tensor's values have it. Only tensors that are rounded
    to the compute dtype are drawn.

    Parameters
    ----------
    snapshot : Snapshot
        A step that ``watch`` watched, such as ``watched.latest``.
    path : str, optional
        The file to write: .png, .svg or .pdf. Without it no file is written.
    kinds : sequence of str
        The kinds of tensors to draw: "activation", "gradient", "parameter gradient", "weight", "update". Default: the
        first two.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        ``kinds`` has a name that is none of these, or ``path`` has another ending.
    """
    _check(isinstance(snapshot, Snapshot), "plot_histograms", "a Snapshot, such as watched.latest", snapshot)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"kinds are {', '.join(map(repr, KINDS))}, got {unknown[0]!r}")
    drawn = [(kind, tensors) for kind in kinds if (tensors := snapshot.of(kind, low_only=True))]
    heights = [3.4, *(1.1 + 0.24 * len(tensors) for _, tensors in drawn)]
    first, *others = axes = _axes((10, sum(heights)), heights, "exponent: values from $2^e$ to $2^{e+1}$")
    unscaled = [t.true(snapshot.loss_scale) for t in snapshot.gradients]
    low, high = _exponent_range([*(t.histogram for _, tensors in drawn for t in tensors), *unscaled], snapshot.format)
    _draw_gradients(first, snapshot, unscaled)
    image = None
    for axis, (kind, tensors) in zip(others, drawn):
        image = _draw_rows(axis, tensors, low, high)
        axis.set_title(_TITLES[kind], fontsize=10, loc="left")
        for edge in _edges(snapshot.format):
            axis.axvline(edge, color=_EDGE, linewidth=1)
    first.set_xlim(low, high)
    for axis in axes:
        axis.tick_params(axis="x", labelbottom=True)
    if image is not None:
        bar = first.figure.colorbar(image, ax=others, location="bottom", aspect=60, pad=0.02, extend="min")
        bar.set_label("share of a tensor's values that have the exponent (white: less than 0.01 %)", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    skipped = ", skipped" if snapshot.skipped else ""
    first.figure.suptitle(
        f"Step {snapshot.step}{skipped}, loss scale {_scale_text(snapshot.loss_scale)}, {snapshot.compute}"
    )
    return save_figure(first.figure, path)


def plot_loss_scale(
    run: StepView | Sequence[ScaleEvent], path: str | None = None, *, watched: Watch | Sequence[Snapshot] = ()
) -> Any:
    """Draw the loss scale from step to step, and a cross at each skipped step.

    Parameters
    ----------
    run : Trainer, Module, BucketingModule or sequence of ScaleEvent
        What trains, whose ``scale_history`` is drawn up to its last step; or a ``scale_history``.
    path : str, optional
        The file to write: .png, .svg or .pdf. Without it no file is written.
    watched : Watch or sequence of Snapshot
        Steps of the same training that ``watch`` watched. For them the figure also shows the largest loss scale at
        which no gradient would overflow and, in a second picture, the share of gradient values that round to zero.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    TypeError
        ``run`` is none of these, such as a net.
    ImportError
        matplotlib is not installed.
    ValueError
        The history is empty, or ``path`` has another ending.
    """
    is_history = isinstance(run, Iterable) and all(isinstance(each, ScaleEvent) for each in run)
    wanted = "what trains, a Trainer or Module, or its scale_history"
    _check(isinstance(run, StepView) or is_history, "plot_loss_scale", wanted, run)
    events = list(run.scale_history if isinstance(run, StepView) else run)
    if not events:
        raise ValueError("scale_history is empty: the first scale is its first event")
    snapshots = list(watched.snapshots if isinstance(watched, Watch) else watched)
    taken = run.scaled_step.steps if isinstance(run, StepView) else 1
    end = max(events[-1].step, taken, *(s.step for s in snapshots))
    steps, scales = [e.step for e in events], [e.loss_scale for e in events]
    first, *others = axes = _axes((10, 5.5 if snapshots else 3.5), (1, 1) if snapshots else (1,), "step")
    first.step([*steps, end], [*scales, scales[-1]], where="post", label="loss scale", color="tab:blue")
    # the event after a skip carries the scale of the next step; the skipped one ran at the scale before it
    skips = [(e.step - 1, before.loss_scale) for before, e in zip(events, events[1:]) if e.skipped]
    if skips:
        label = f"{len(skips)} skipped step{'s' if len(skips) > 1 else ''}"
        first.plot(*zip(*skips), "x", color=_EDGE, label=label)
    first.set_yscale("log", base=2)
    first.set_ylabel("loss scale")
    first.set_title("The loss scale from step to step", fontsize=10, loc="left")
    for second in others:
        second.set_title("Gradients that are lost, at watched steps", fontsize=10, loc="left")
        at = [s.step for s in snapshots]
        largest = [s.loss_scale * 2.0 ** min(s.headroom, 120) if s.headroom > -120 else math.nan for s in snapshots]
        first.plot(at, largest, color="0.6", linewidth=1, label="largest scale without overflow, where watched")
        second.plot(at, [100 * s.underflow for s in snapshots], label="at this scale", color="tab:blue")
        second.plot(at, [100 * s.underflow_unscaled for s in snapshots], label="without scaling", color="0.6")
        second.set(ylabel="% of gradient values\nthat round to zero", ylim=(0, None))
    for axis in axes:
        axis.legend(fontsize=8)
    return save_figure(first.figure, path)


def plot_verification(found: Verification, path: str | None = None) -> Any:
    """Draw the loss, and how far the gradients are from those of the plain run, update by update.

    The first picture has the loss in plain MXNet, through mxmp in FP32 and in low precision, where the script has a
    loss that a Trainer's ``backward`` gets. In the second, the grey band is the noise of one rounding.

    Parameters
    ----------
    found : Verification
        What ``verify`` returned.
    path : str, optional
        The file to write: .png, .svg or .pdf. Without it no file is written.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        No run came to an update, or ``path`` has another ending.
    """
    _check(isinstance(found, Verification), "plot_verification", "what verify returned", found)
    courses = found.courses
    if not courses:
        raise ValueError("there is nothing to draw: mxmp and plain MXNet did not both come to an update")
    dtype = found.dtype
    names = {
        "plain": ("plain MXNet", "0.3", "-"),
        "graph": ("mxmp in FP32", "tab:green", "--"),
        "reference": (f"plain, without the {found.skipped} batches that {dtype} skipped", "0.6", "-"),
        "low": (dtype, "tab:blue", ":"),
    }
    has_loss = any(course.losses for course in courses.values())
    *first, last = axes = _axes((10, 6.5 if has_loss else 3.8), (1, 1) if has_loss else (1,), "update")
    for axis in first:
        for run in [each for each in names if each in courses and (found.skipped or each != "reference")]:
            label, color, style = names[run]
            axis.plot(*_from_one(courses[run].losses), style, label=label, color=color, linewidth=2)
        axis.set_title("Loss", fontsize=10, loc="left")
    noise = [courses[run].gradients for run in ("noise 1", "noise 2") if run in courses]
    if noise:
        updates, limits = _from_one([max(*each, _LEAST_DRAWN) for each in zip(*noise)])
        last.fill_between(updates, _LEAST_DRAWN, limits, color="0.88", label="noise of one rounding")
    for run in ("graph", "low"):
        label, color, _ = names[run]
        sizes = [size if math.isnan(size) else max(size, _LEAST_DRAWN) for size in courses[run].gradients]
        last.plot(*_from_one(sizes), "o-", label=label, color=color, markersize=4)
    last.xaxis.get_major_locator().set_params(integer=True)
    last.set(yscale="log", ylabel=f"relative difference\n(at least {_LEAST_DRAWN:g})")
    last.set_title("Gradients of all parameters, against plain MXNet", fontsize=10, loc="left")
    for axis in axes:
        axis.legend(fontsize=8)
    return save_figure(last.figure, path)


# -- What they share --------------------------------------------------------------------------------


def _from_one(values: Sequence[float]) -> tuple[range, Sequence[float]]:
    """Return x and y of a curve over updates, which are counted from 1."""
    return range(1, len(values) + 1), values


def _check(is_right: bool, function: str, wanted: str, got: Any) -> None:
    if not is_right:
        raise TypeError(f"{function} takes {wanted}, got {type(got).__name__}")


def _axes(size: tuple[float, float], heights: Sequence[float], xlabel: str) -> list[Any]:
    """Return pictures one below the other in a new Figure, whose ``size`` is in inches, with a common x axis."""
    grid = {"height_ratios": heights}
    found = new_figure(*size).subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    found[-1].set_xlabel(xlabel)
    return list(found)


def _draw_gradients(axis: Any, snapshot: Snapshot, unscaled: Sequence[Histogram]) -> None:
    """Draw the share of all gradients' values at each exponent, with the loss scale and without (``unscaled``)."""
    form, (tiny, normal, top) = snapshot.format, _edges(snapshot.format)
    # Red: rounds to zero or overflows; yellow: becomes subnormal and loses bits.
    for start, stop, color in ((-200, tiny, _LOST), (tiny, normal, _WEAK), (top, 200, _LOST)):
        axis.axvspan(start, stop, color=color, zorder=0, linewidth=0)
    for edge, text in _edges(form).items():
        axis.axvline(edge, color=_EDGE, linewidth=1)
        axis.text(edge, 1.01, text, transform=axis.get_xaxis_transform(), fontsize=7, color=_EDGE, ha="center")
    curves = {f"times {_scale_text(snapshot.loss_scale)}": ([t.histogram for t in snapshot.gradients], "tab:blue")}
    if snapshot.loss_scale != 1:
        curves = {"without the scale": (list(unscaled), "0.55"), **curves}
    for label, (histograms, color) in curves.items() if unscaled else ():
        total = sum(histograms[1:], histograms[0])
        text = f"{label}: {total.underflow(form):.1%} round to zero ({total.zero_share:.1%} are zero already)"
        share = total.counts / max(total.counted, 1)
        axis.step(total.exponents() + 1, share, where="pre", label=text, color=color)
    axis.set(ylim=(0, 1.1 * axis.get_ylim()[1]), ylabel="share of the values")
    axis.set_title("All gradients in low precision", fontsize=10, loc="left", pad=44 if unscaled else 16)
    if unscaled:  # above the picture, where it hides nothing
        axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(-0.01, 1.05), frameon=False, borderaxespad=0)


def _draw_rows(axis: Any, tensors: Sequence[TensorReport], low: int, high: int) -> Any:
    """Draw a row for each tensor: the darker, the more values have the exponent; return the image, for a colour bar."""
    from matplotlib.colors import LogNorm

    start = low - int(tensors[0].histogram.exponents()[0])
    counts = [(t.histogram.counts[start : start + high - low], t.histogram.counted) for t in tensors]
    grid, extent = np.stack([each / max(total, 1) for each, total in counts]), (low, high, len(tensors) - 0.5, -0.5)
    image = axis.imshow(grid, aspect="auto", cmap="Blues", extent=extent, norm=LogNorm(vmin=1e-4, vmax=1.0))
    axis.set_yticks(range(len(tensors)), [_row_label(t.name) for t in tensors], fontsize=7)
    return image


def _edges(form: Format) -> dict[int, str]:
    """Return the exponents of two that limit a 16-bit format's range, with the texts to draw there."""
    return {
        form.tiny - 1: "zero below",
        form.normal: f"{form.name}: subnormal below",
        form.top + 1: "overflow above",
    }


def _exponent_range(histograms: Sequence[Histogram], form: Format) -> tuple[int, int]:
    """Return the lowest exponent on the x axis of ``plot_histograms``, and one more than the highest."""
    found = [e for h in histograms for e in h.exponents()[h.counts > 0]]
    narrow = form.name == "float16"  # bfloat16's range is FP32's: only the exponents that occur are drawn
    ends = [*found, *((form.tiny - 2, form.top + 2) if narrow else ())]
    return int(min(ends, default=-1)), int(max(ends, default=0)) + 1


def _scale_text(scale: float) -> str:
    """Return ``"$2^{10}$"`` for 1024, and ``"1000"`` for 1000, which is no power of two."""
    exponent = math.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent == round(exponent) else f"{scale:g}"


def _row_label(name: str) -> str:
    short = name if len(name) <= 48 else f"{name[:23]}…{name[-24:]}"
    return short.replace("$", r"\$")  # matplotlib would read what follows as a formula
