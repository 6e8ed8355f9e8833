"""Overflows at a loss scale that cannot fall: the largest finite gradient, and which of three cures fits."""

from __future__ import annotations

from typing import Any, Collection, Sequence

from .gradients import Gradient, largest_finite

_LARGEST, _NORMAL = 65504.0, 2.0**-14  # float16's largest number, and its smallest with all digits
# Where a few elements are beyond float16's range, the largest finite one is not far below its end.
_NEAR = 2.0**-8
# Sums of gradients, over devices or backwards, are FP32, and may be finite beyond float16's range.
_SUMMED = 2.0**10
# By how much a floor that is too high is lowered.
_LOWER = 2.0**-10


FORWARD_FAILED = (
    "the loss or an output is inf or NaN already, which no loss scale cures: mxmp.diagnose.blame names the first "
    "operator and, where low precision is the cause, the exclude that cures it, and mxmp.guard moves that to FP32; "
    "otherwise look at the learning rate and the data"
)


def lower_scale_fits(peaks: Sequence[float], finite: Collection[int]) -> bool:
    """Return whether gradients are large everywhere, so that a lower loss scale is the cure, and no layer in FP32.
    ``peaks`` contain the loss scale; ``finite`` has the positions of gradients without an overflow."""
    near = _LARGEST * _NEAR <= max(peaks, default=0.0) <= _LARGEST * _SUMMED
    return near and all(peaks[i] == 0 or peaks[i] * _LOWER >= _NORMAL for i in finite)


def cure(gradients: Sequence[Gradient], bad: Sequence[Gradient], scale: float, scaler: Any, unscaled: bool) -> str:
    """Return which finite gradient is the largest, and what to do: lower the scale, move a layer to FP32, or look.
    ``bad`` are those of ``gradients`` with an overflow; ``unscaled``: ``scale`` is divided out already."""
    peaks = [peak * (scale if unscaled else 1.0) for peak in largest_finite(gradients)]
    peak, largest = max(zip(peaks, map(str, gradients)))
    wrong = {id(gradient.array) for gradient in bad}
    finite = [i for i, gradient in enumerate(gradients) if id(gradient.array) not in wrong]
    look = (
        "mxmp.diagnose.blame names the operator and, if low precision is at fault, the cure; if not, look at the "
        "learning rate, the data and the loss"
    )
    look = f"lower it, or {look}" if scale > 1 else f"so scaling is not the cause: {look}"
    if peak == 0:
        return f"no gradient has a finite value but 0; {look}"
    seen = f"the largest finite gradient is {peak:.4g}, or {peak / scale:.4g} without the loss scale, of {largest}"
    if lower_scale_fits(peaks, finite):
        floor = getattr(scaler, "min_scale", None)
        lower = "lower it, or use loss_scale='dynamic'"
        if floor is not None:
            lower = f"lower the floor, loss_scale=mxmp.{type(scaler).__name__}(min_scale={floor * _LOWER:.3g})"
        return f"{seen}. float16 ends at 65504, and no gradient is too small for a lower scale: {lower}"
    layers = {gradient.name.rpartition("_")[0] or gradient.name for gradient in bad}
    if len(layers) > 1 or not finite:
        return f"{seen}; {look}, or let mxmp.diagnose.guard move the layer that overflows to FP32"
    return f"{seen}; {look}, or keep the layer that overflows in FP32: exclude=['*{layers.pop()}*']"
