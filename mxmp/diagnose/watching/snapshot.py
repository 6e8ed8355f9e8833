"""One watched step, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterable

from ..shared.report import table
from .histogram import FORMATS, Format, Histogram

__all__ = ["KINDS", "Snapshot", "TensorReport", "merged"]

KINDS = ("activation", "gradient", "parameter gradient", "weight", "update")
_SCALED = ("gradient", "parameter gradient")


@dataclass(frozen=True)
class TensorReport:
    """The distribution of one tensor in one step.

    Attributes
    ----------
    kind : {"activation", "gradient", "parameter gradient", "weight", "update"}
        An operator's output, what it sends back to one of its inputs, or what belongs to a parameter.
    name : str
        ``"fc"``; ``"fc -> relu"`` for the gradient that fc sends back to relu; or the parameter's name.
    op : str
        The operator; empty for what belongs to a parameter.
    low : bool
        Whether it is rounded to the low dtype: an operator in low precision makes it, or reads it.
    histogram : Histogram
        The values before they are rounded, where the operator computes in FP32 and rounds (float16 on a CPU);
        gradients are multiplied by the loss scale.
    """

    kind: str
    name: str
    op: str
    low: bool
    histogram: Histogram

    @property
    def is_scaled(self) -> bool:
        """Return whether the loss scale multiplies it."""
        return self.kind in _SCALED

    def true(self, loss_scale: float) -> Histogram:
        """Return the histogram without the loss scale, to whole powers of two."""
        return self.histogram.scaled(-math.log2(loss_scale)) if self.is_scaled else self.histogram


@dataclass(frozen=True)
class Snapshot:
    """One watched step. ``print`` it, or read ``tensors``.

    Attributes
    ----------
    step : int
        Counted from 1, skipped steps included.
    loss_scale : float
        The factor of this step's gradients.
    skipped : bool
    compute : str
        The low dtype.
    tensors : tuple of TensorReport
        In the order in which they were made.
    """

    step: int
    loss_scale: float
    skipped: bool
    compute: str
    tensors: tuple[TensorReport, ...]

    @property
    def format(self) -> Format:
        """Return the low dtype's format."""
        return FORMATS[self.compute]

    def of(self, kind: str, *, low_only: bool = False) -> list[TensorReport]:
        """Return the tensors of a kind; ``low_only``: those that are rounded to the low dtype."""
        return [t for t in self.tensors if t.kind == kind and (t.low or not low_only)]

    @property
    def gradients(self) -> list[TensorReport]:
        """Return the gradients in low precision, of activations and of parameters, times the loss scale."""
        return [tensor for tensor in self.tensors if tensor.is_scaled and tensor.low]

    @property
    def tightest(self) -> TensorReport | None:
        """Return the gradient that would overflow first if the scale went up."""
        return min(self.gradients, key=lambda t: t.histogram.headroom(self.format), default=None)

    @property
    def headroom(self) -> float:
        """Return by how many powers of two the scale could go up before ``tightest`` overflows; inf without any."""
        tightest = self.tightest
        return math.inf if tightest is None else tightest.histogram.headroom(self.format)

    @property
    def underflow(self) -> float:
        """Return the share of the gradient values, zeros apart, that are too small for the low dtype at this scale."""
        return self._underflow([t.histogram for t in self.gradients])

    @property
    def underflow_unscaled(self) -> float:
        """Return the share that would be too small without loss scaling."""
        return self._underflow([t.true(self.loss_scale) for t in self.gradients])

    def _underflow(self, histograms: list[Histogram]) -> float:
        lost = sum(h.between(None, self.format.tiny - 2) for h in histograms)
        return lost / max(sum(h.counted for h in histograms), 1)

    def __str__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        return "\n".join(
            [
                f"step {self.step}{skipped}: loss scale {self.loss_scale:g}, {self.compute}",
                f"  {self.underflow:.2%} of gradient values round to zero; "
                f"unscaled {self.underflow_unscaled:.2%} would",
                *([f"  {_headroom(self.tightest, self.format)}"] if self.tightest else []),
                "",
                *self._table(),
            ]
        )

    def _table(self, each: int = 5) -> list[str]:
        """Return the lines of a table: of each kind the tensors with the largest share out of range, worst first."""
        form = self.format

        def out_of_range(tensor: TensorReport) -> float:
            found = tensor.histogram
            return found.underflow(form) + found.overflow(form) + (found.nans > 0) if tensor.low else -1.0

        rows: list[tuple[str, ...]] = [
            ("", "", "rounded to", "is 0", "to 0", "subnormal", "overflow", "smallest", "largest")
        ]
        for kind in KINDS:
            for number, tensor in enumerate(sorted(self.of(kind), key=out_of_range, reverse=True)[:each]):
                found, dtype = tensor.histogram, form.name if tensor.low else ""
                shares = found.zero_share, found.underflow(form), found.subnormal(form), found.overflow(form)
                numbers = [*(f"{share:.1%}" for share in shares), f"{found.smallest:.2g}", f"{found.largest:.2g}"]
                rows.append(("" if number else kind, tensor.name, dtype, *numbers))
        return table(rows, "<<<>>>>>>")


def merged(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    """Return one report for each tensor, which may have run on several devices or in several forwards."""
    found: dict[tuple[str, str], TensorReport] = {}
    for tensor in tensors:
        key = (tensor.kind, tensor.name)
        if key in found:
            tensor = replace(tensor, histogram=found[key].histogram + tensor.histogram)
        found[key] = tensor
    return tuple(found.values())


def _headroom(tensor: TensorReport, form: Format) -> str:
    powers = tensor.histogram.headroom(form)
    if not math.isfinite(powers):
        return f"overflow: {tensor.name} holds inf or NaN" if powers < 0 else "no gradient but zeros"
    can = f"the scale could go up by 2**{powers:.0f}" if powers >= 0 else f"the scale is too high by 2**{-powers:.0f}"
    return f"{can}: {tensor.name} reaches {tensor.histogram.largest:.3g}, and {form.name} holds {form.largest:.3g}"
