"""What was watched, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterable

from ..shared.report import table
from .histogram import FORMATS, Format, Histogram

__all__ = ["KINDS", "Snapshot", "TensorReport", "joined"]

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
        The operator; empty for a parameter's.
    low : bool
        Whether it is rounded to the low dtype: a low operator makes it, or reads it.
    histogram : Histogram
        Before it is rounded, where the operator computes in FP32 and rounds (float16 on a CPU); of gradients
        times the loss scale.
    """

    kind: str
    name: str
    op: str
    low: bool
    histogram: Histogram

    @property
    def is_scaled(self) -> bool:
        return self.kind in _SCALED

    def true(self, loss_scale: float) -> Histogram:
        """Without the loss scale, to whole powers of two."""
        return self.histogram.scaled(-math.log2(loss_scale)) if self.is_scaled else self.histogram


@dataclass(frozen=True)
class Snapshot:
    """One watched step. ``print`` it, or read ``tensors``.

    Attributes
    ----------
    step : int
        Counted from 1, skipped steps included.
    loss_scale : float
        By which the gradients of this step are multiplied.
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
        return FORMATS[self.compute]

    def of(self, kind: str, *, low_only: bool = False) -> list[TensorReport]:
        return [t for t in self.tensors if t.kind == kind and (t.low or not low_only)]

    @property
    def gradients(self) -> list[TensorReport]:
        """Gradients that stand in low precision, of activations and of parameters, times the loss scale."""
        return [tensor for tensor in self.tensors if tensor.is_scaled and tensor.low]

    @property
    def tightest(self) -> TensorReport | None:
        """The gradient that would overflow first if the scale went up."""
        return min(self.gradients, key=lambda t: t.histogram.headroom(self.format), default=None)

    @property
    def headroom(self) -> float:
        """By how many powers of two the scale could go up: until the tightest gradient overflows."""
        tightest = self.tightest
        return math.inf if tightest is None else tightest.histogram.headroom(self.format)

    @property
    def first_overflow(self) -> TensorReport | None:
        """The first in the order of the computation that holds NaN, inf, or more than the dtype that it is rounded to.

        Of activations and of gradients that pass between operators; ``blame`` says what went into it.
        """

        def bad(tensor: TensorReport) -> bool:
            found = tensor.histogram
            return bool(found.infs or found.nans or (tensor.low and found.overflow(self.format)))

        return next((t for t in self.tensors if t.kind in KINDS[:2] and bad(t)), None)

    @property
    def underflow(self) -> float:
        """The share of the gradient values, exact zeros apart, that are too small for the low dtype at this scale."""
        return self._underflow([t.histogram for t in self.gradients])

    @property
    def underflow_unscaled(self) -> float:
        """The same without loss scaling."""
        return self._underflow([t.true(self.loss_scale) for t in self.gradients])

    def _underflow(self, histograms: list[Histogram]) -> float:
        lost = sum(h.between(None, self.format.tiny - 2) for h in histograms)
        return lost / max(sum(h.counted for h in histograms), 1)

    def __str__(self) -> str:
        tightest, first = self.tightest, self.first_overflow
        skipped = ", skipped" if self.skipped else ""
        return "\n".join(
            [
                f"step {self.step}{skipped}: loss scale {self.loss_scale:g}, {self.compute}",
                f"  {self.underflow:.2%} of gradient values round to zero; "
                f"unscaled {self.underflow_unscaled:.2%} would",
                *([f"  {_room(tightest, self.format)}"] if tightest else []),
                *([f"  {_first(first, self.format)}"] if first else []),
                "",
                *_table(self._worst(), self.format),
            ]
        )

    def _worst(self, each: int = 5) -> list[TensorReport]:
        """Of each kind those with the largest share out of range, worst first."""

        def out(tensor: TensorReport) -> float:
            found = tensor.histogram
            bad = found.underflow(self.format) + found.overflow(self.format) + (found.nans > 0)
            return bad if tensor.low else -1.0

        return [t for kind in KINDS for t in sorted(self.of(kind), key=out, reverse=True)[:each]]


def joined(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    """One report for each tensor that was met several times: on several devices, or in several forwards."""
    found: dict[tuple[str, str], TensorReport] = {}
    for tensor in tensors:
        key = (tensor.kind, tensor.name)
        if key in found:
            tensor = replace(tensor, histogram=found[key].histogram + tensor.histogram)
        found[key] = tensor
    return tuple(found.values())


def _first(tensor: TensorReport, form: Format) -> str:
    found = tensor.histogram
    beyond = f"reaches {found.largest:.3g}, beyond {form.name}"
    what = "holds NaN" if found.nans else "holds inf" if found.infs else beyond
    return f"the first to go wrong: {tensor.name} ({tensor.op or tensor.kind}) {what}"


def _room(tensor: TensorReport, form: Format) -> str:
    room = tensor.histogram.headroom(form)
    if not math.isfinite(room):
        return f"overflow: {tensor.name} holds inf or NaN" if room < 0 else "no gradient but zeros"
    can = f"the scale could go up by 2**{room:.0f}" if room >= 0 else f"the scale is too high by 2**{-room:.0f}"
    return f"{can}: {tensor.name} reaches {tensor.histogram.largest:.3g}, and {form.name} holds {form.largest:.3g}"


def _table(tensors: list[TensorReport], form: Format) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "", "rounded to", "is 0", "to 0", "subnormal", "overflow", "smallest", "largest")
    ]
    kind = ""
    for tensor in tensors:
        found = tensor.histogram
        shares = (found.zero_share, found.underflow(form), found.subnormal(form), found.overflow(form))
        dtype = form.name if tensor.low else ""
        ends = [f"{x:.2g}" for x in (found.smallest, found.largest)]
        rows.append(
            (tensor.kind if tensor.kind != kind else "", tensor.name, dtype, *(f"{s:.1%}" for s in shares), *ends)
        )
        kind = tensor.kind
    return table(rows, "<<<>>>>>>")
