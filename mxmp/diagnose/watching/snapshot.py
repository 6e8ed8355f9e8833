"""What ``watch`` returns of one watched step, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterable

from ..text import table
from .histogram import FORMATS, Format, Histogram

KINDS = ("activation", "gradient", "parameter gradient", "weight", "update")
_SCALED = ("gradient", "parameter gradient")


@dataclass(frozen=True)
class TensorReport:
    """The distribution of the values of one tensor in one training step. A Snapshot has one for each tensor.

    Attributes
    ----------
    kind : {"activation", "gradient", "parameter gradient", "weight", "update"}
        ``"activation"``: an output of an operator. ``"gradient"``: the gradient that an operator sends back to one of
        its inputs. The others belong to a parameter: its gradient, its value before the step, and what the step added;
        the last two are those of the FP32 master weights where there are some.
    name : str
        Of an activation, the operator: ``"fc"``. Of a gradient, ``"fc -> relu"`` if fc sends it back to its input, the
        output of relu; ``"the loss -> fc"`` if it is the gradient of a graph output that fc makes, or
        ``"the loss, out -> fc"`` if the operator out also reads that output. Otherwise, the name of the parameter.
    op : str
        The type of an operator, such as ``"FullyConnected"``: of the one that makes the activation or sends the
        gradient back (of several, the first); for ``"the loss -> fc"``, of fc. Empty for the kinds that belong to a
        parameter.
    low : bool
        True if the tensor is rounded to the compute dtype, because an operator in low precision makes or reads it.
    histogram : Histogram
        How many values lie between which powers of two. Gradients are multiplied by the loss scale. Where an operator
        computes in FP32 and then rounds (float16 on a CPU), these are the values before they are rounded.
    lost : float
        Of a gradient: the share of its values, 0 to 1, that are 0 because the gradient that it was computed from was
        rounded to zero. Estimated: at most the share of zeros in that gradient after rounding.
    """

    kind: str
    name: str
    op: str
    low: bool
    histogram: Histogram
    lost: float = 0.0

    @property
    def is_scaled(self) -> bool:
        """Return whether the loss scale multiplies the values: for kind ``"gradient"`` or ``"parameter gradient"``."""
        return self.kind in _SCALED

    def to_zero(self, form: Format) -> float:
        """Return the share of the values, 0 to 1, that rounding has made 0: in this tensor (if ``low``), or before."""
        return self.lost + (self.histogram.underflow(form) if self.low else 0.0)

    @property
    def has_gradient(self) -> bool:
        """Return whether not all values are 0."""
        return self.histogram.zeros < self.histogram.counted

    def true(self, loss_scale: float) -> Histogram:
        """Return the tensor's histogram without the loss scale; if not ``is_scaled``, the histogram as it is.

        If ``is_scaled``, the values are divided by ``loss_scale`` rounded to a power of two, since a histogram only
        knows exponents.
        """
        return self.histogram.scaled(-math.log2(loss_scale)) if self.is_scaled else self.histogram


@dataclass(frozen=True)
class Snapshot:
    """The distributions of the values of all tensors in one training step, as recorded by ``watch``.

    ``print`` it, or read ``tensors``. Plain data.

    Attributes
    ----------
    step : int
        The number of the step, counted by its Trainer or module from 1; skipped steps count.
    loss_scale : float
        The loss scale of this step, by which all gradients in ``tensors`` are multiplied; where ``Trainer.unscale``
        has divided them by it, they are multiplied again here.
    skipped : bool
        True if the step was skipped because of an overflow; then there are no updates in ``tensors``.
    compute : {"float16", "bfloat16"}
        The compute dtype.
    tensors : tuple of TensorReport
        One report for each tensor, in the order in which the tensors were computed.
    """

    step: int
    loss_scale: float
    skipped: bool
    compute: str
    tensors: tuple[TensorReport, ...]

    @property
    def format(self) -> Format:
        """Return the Format of the compute dtype: its largest number and the exponents that limit its range."""
        return FORMATS[self.compute]

    def of(self, kind: str, *, low_only: bool = False) -> list[TensorReport]:
        """Return the reports on tensors of one kind, such as ``"gradient"``, in the order of ``tensors``.

        ``low_only=True`` leaves out the tensors that are not rounded to the compute dtype.
        """
        return [t for t in self.tensors if t.kind == kind and (t.low or not low_only)]

    @property
    def gradients(self) -> list[TensorReport]:
        """Return the reports on all gradients, of activations and parameters, that are rounded to the compute dtype."""
        return [tensor for tensor in self.tensors if tensor.is_scaled and tensor.low]

    @property
    def tightest(self) -> TensorReport | None:
        """Return the report on the gradient that would overflow first if the loss scale were raised.

        None if no gradient is rounded to the compute dtype.
        """
        return min(self.gradients, key=lambda t: t.histogram.headroom(self.format), default=None)

    @property
    def headroom(self) -> float:
        """Return the largest n for which no gradient overflows at ``2**n`` times the loss scale of this step.

        n is a whole number, as a float: 3.0 means that the loss scale could be 8 times as large. It is negative if a
        gradient overflows already, ``-inf`` if one holds an inf or NaN, and ``inf`` if there are no gradients that are
        rounded to the compute dtype, or all are zero.
        """
        tightest = self.tightest
        return math.inf if tightest is None else tightest.histogram.headroom(self.format)

    @property
    def underflow(self) -> float:
        """Return the share, 0 to 1, of the values of ``gradients`` that are zero because the compute dtype rounds.

        ``gradients`` has only those tensors that are rounded to the compute dtype. Their values are multiplied by the
        loss scale of this step. A value counts that rounds to zero, and one that is zero because the gradient that it
        was computed from was rounded to zero (``TensorReport.lost``); other zeros are part of the total only. 0 if
        ``gradients`` is empty. Where a GPU's kernel rounds its result, its zeros are not seen to come from rounding.
        """
        return self._underflow([t.histogram for t in self.gradients])

    @property
    def underflow_unscaled(self) -> float:
        """Return the share of the values of all ``gradients``, 0 to 1, that would round to zero without loss scaling.

        Values that are zero at the loss scale of this step count as for ``underflow``. 0 if there are no gradients.
        """
        return self._underflow([t.true(self.loss_scale) for t in self.gradients])

    def _underflow(self, histograms: list[Histogram]) -> float:
        lost = float(sum(h.between(None, self.format.tiny - 2) for h in histograms))
        lost += sum(t.lost * t.histogram.counted for t in self.gradients)
        return lost / max(sum(h.counted for h in histograms), 1)

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradient is all zeros, in the order of the parameters."""
        return tuple(t.name for t in self.of("parameter gradient") if not t.has_gradient)

    def _of_lost_parameters(self) -> list[str]:
        """Return a line on the parameters without a gradient, if any, and the first layer of them in the backward."""
        names, total = self.without_gradient, len(self.of("parameter gradient"))
        if not names:
            return []
        senders = (t.name.rpartition(" -> ")[::2] for t in self.of("gradient"))
        first = next((layer for layer, to in senders if to in names), names[-1])
        return [
            f"  {len(names)} of {total} parameters get no gradient, all of it is 0; first, from the loss on, at {first}"
        ]

    def __str__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        return "\n".join(
            [
                f"step {self.step}{skipped}: loss scale {self.loss_scale:g}, {self.compute}",
                *self._of_lost_parameters(),
                f"  {self.underflow:.2%} of gradient values round to zero; "
                f"unscaled {self.underflow_unscaled:.2%} would",
                *([f"  {_headroom(self.tightest, self.format)}"] if self.tightest else []),
                "",
                *self._table(),
            ]
        )

    def _table(self) -> list[str]:
        """Return a table of the worst tensors of every kind, at most five of a kind, the worst first."""
        form = self.format

        def out_of_range(tensor: TensorReport) -> float:
            # The share of values that leave the range; NaNs come first, tensors that are not rounded last.
            found = tensor.histogram
            return tensor.to_zero(form) + found.overflow(form) + (found.nans > 0) if tensor.low else -1.0

        rows: list[tuple[str, ...]] = [
            ("", "", "rounded to", "is 0", "to 0", "subnormal", "overflow", "smallest", "largest")
        ]
        for kind in KINDS:
            for number, tensor in enumerate(sorted(self.of(kind), key=out_of_range, reverse=True)[:5]):
                found, dtype = tensor.histogram, form.name if tensor.low else ""
                lost = tensor.lost + found.underflow(form)
                shares = found.zero_share - tensor.lost, lost, found.subnormal(form), found.overflow(form)
                ends = ("-" if math.isnan(end) else f"{end:.2g}" for end in (found.smallest, found.largest))
                numbers = [*(f"{share:.1%}" for share in shares), *ends]
                rows.append(("" if number else kind, tensor.name, dtype, *numbers))
        return table(rows, "<<<>>>>>>")


def merged(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    """Merge the reports on one tensor, which was computed on several devices or in several forwards."""
    found: dict[tuple[str, str], TensorReport] = {}
    for tensor in tensors:
        key = (tensor.kind, tensor.name)
        if key in found:
            tensor = replace(tensor, histogram=found[key].histogram + tensor.histogram)
        found[key] = tensor
    return tuple(found.values())


def with_lost(tensors: Iterable[TensorReport], form: Format) -> tuple[TensorReport, ...]:
    """Return ``tensors``, in the order of their computation, with ``lost`` of each gradient."""

    def zeros(tensor: TensorReport) -> float:
        return tensor.histogram.zero_share + tensor.to_zero(form) - tensor.lost

    sent: dict[str, TensorReport] = {}
    found = []
    for tensor in tensors:
        if tensor.is_scaled:
            # "fc -> relu" is computed from "... -> fc", whose zeros make zeros in it. Which of its own these are is not
            # known: taken are as many as the source has, or all.
            sender, _, to = tensor.name.rpartition(" -> ")
            source = sent.get(sender or to)
            if source is not None and zeros(source):
                part = source.to_zero(form) / zeros(source)
                tensor = replace(tensor, lost=part * min(tensor.histogram.zero_share, zeros(source)))
            # Several readers of a tensor send a gradient each, and only where all are zero the sum must be.
            sent[to] = min(sent.get(to, tensor), tensor, key=zeros)
        found.append(tensor)
    return tuple(found)


def _headroom(tensor: TensorReport, form: Format) -> str:
    """Return a line on how far the loss scale could rise before a gradient overflows."""
    powers = tensor.histogram.headroom(form)
    if not math.isfinite(powers):
        return f"overflow: {tensor.name} holds inf or NaN" if powers < 0 else "no gradient but zeros"
    can = f"the scale could go up by 2**{powers:.0f}" if powers >= 0 else f"the scale is too high by 2**{-powers:.0f}"
    return f"{can}: {tensor.name} reaches {tensor.histogram.largest:.3g}, and {form.name} holds {form.largest:.3g}"
