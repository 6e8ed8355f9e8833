"""The picture of ``advise``: what each operator can reach on a GPU, by its FLOPs a byte."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..shared.pictures import figure_of, saved
from .advice import Advice, MatrixReport

__all__ = ["plot_roofline"]

_NAMES = {"float16": "float16, Tensor Cores", "tf32": "TF32, Tensor Cores", "float32": "FP32"}
_COLORS = {"float16": "#1b7837", "tf32": "#762a83", "float32": "#b35806", "int8": "#2166ac"}
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
    figure = figure_of((8, 5))
    axes = figure.subplots()
    gpu = advice.gpu
    dots = _dots(advice)
    intensities = [intensity for intensity, _, _ in dots]
    low, high = min([1.0, *intensities]) / 2, max([gpu.ridge("float16") * 8, *intensities]) * 2
    for dtype in gpu.roofs:
        ridge, peak = gpu.ridge(dtype), gpu.peak(dtype) / _TERA
        axes.plot([low, ridge, high], [low * gpu.bandwidth / _TERA, peak, peak], color=_COLORS[dtype], zorder=1)
        axes.plot([ridge], [peak], marker="|", markersize=12, color=_COLORS[dtype])
        label = f"{_NAMES[dtype]}: {peak:.4g} (ridge {ridge:.0f})"
        axes.annotate(label, (high, peak), (-4, 10), textcoords="offset points", ha="right", color=_COLORS[dtype])
    for (intensity, math, how), flops in dots.items():
        reached = min(intensity * gpu.bandwidth, gpu.peak(math)) / _TERA
        area = 12 + 500 * flops / advice.flops
        filled = _COLORS[how] if how == math else "none"
        axes.scatter([intensity], [reached], s=area, facecolor=filled, edgecolor=_COLORS[how], alpha=0.7, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(None, gpu.peak("float16") / _TERA * 2))
    note = "a dot: operators, its area their share of the FLOPs; hollow: low, but not on Tensor Cores"
    axes.annotate(note, (1, 0), (-4, 4), "axes fraction", "offset points", ha="right", fontsize=8, color="#555555")
    axes.set_xlabel("FLOPs per byte that is read or written")
    axes.set_ylabel("attainable TFLOP/s")
    axes.set_title(
        f"{advice.name} ({advice.policy}) on {gpu.name}\n"
        f"{advice.flops / 1e9:,.1f} GFLOPs a forward, {advice.tensor_share:.1%} can run on Tensor Cores",
        fontsize=10,
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    return saved(figure, path)


def _dots(advice: Advice) -> dict[tuple[float, str, str], float]:
    """FLOPs by intensity, by the roof that limits an operator, and by the dtype that it computes in."""
    found: dict[tuple[float, str, str], float] = defaultdict(float)
    for matrix in advice.matrices:
        if matrix.flops:
            found[matrix.intensity, _math(matrix, advice), matrix.dtype] += matrix.flops
    return found


def _math(matrix: MatrixReport, advice: Advice) -> str:
    """FP32 cores compute what no Tensor Core can, at their own peak."""
    if matrix.dtype == "float32" and not matrix.depthwise:
        return advice.gpu.fp32_math
    return matrix.dtype if matrix.on_tensor_cores(advice.gpu) else "float32"
