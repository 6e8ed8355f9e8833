"""The result of ``audit``, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..text import some, table

# What a finding's ``lost`` may be, with what it means.
LOST = {
    "overflowed": "values beyond the dtype's range became inf",
    "underflowed": "values too small for the dtype became zero",
    "integer rounded": "whole numbers, such as ids or positions, that the dtype does not have",
    "saturated": "values near a limit, such as 1, were rounded to the limit",
    "cancelled": "what is left of near-equal numbers, or beside a large offset, was rounded away",
    "constant rounded": "a number in the graph that the dtype does not have",
    "rounded": "rounding alone",
}


@dataclass(frozen=True)
class Change:
    """How far a replay of the batch is from FP32's.

    Each number is the size of the difference divided by the size of FP32's value (the norm of both), so 0.01 is one
    percent; inf where a value became inf or NaN. An output is measured by column of its last axis, and its size is its
    deviation from the column's mean.

    Attributes
    ----------
    loss : float or None
        The change of the loss; None where no loss was given.
    gradient : float or None
        That of the gradient of ``parameter``, the one that changed most beside what rounding elsewhere does to it.
    parameter : str
        The name of this parameter; empty in inference.
    output : float
        That of column ``column`` (0 for the first) of the last axis of output ``number``, chosen in the same way.
    number, column : int
    times_noise : float
        The largest of all changes, in units of the noise: how far rounding elsewhere moves the same number.
    times_limit : float
        The largest of three changes, each divided by a limit, however large the noise is: the loss (2 %), all gradients
        together (50 %), and an output (15 %, the root mean square over its columns).
    """

    loss: float | None
    gradient: float | None
    parameter: str
    output: float
    number: int
    column: int
    times_noise: float
    times_limit: float = 0.0

    def cells(self) -> list[str]:
        """Return the texts of a row of the report: times noise, loss, gradient with parameter, output with column."""
        gradient = "-" if self.gradient is None else f"{percent(self.gradient)} {self.parameter}"
        loss = "-" if self.loss is None else percent(self.loss)
        return [times(self.times_noise), loss, gradient, f"{percent(self.output)} [{self.number}][..., {self.column}]"]


@dataclass(frozen=True)
class Finding:
    """An operator that alone, with all else in FP32, changes the results by more than rounding elsewhere does.

    Attributes
    ----------
    name, op : str
        The operator in the FP32 graph, and its type: ``"net0_sigmoid0"`` and ``"sigmoid"``.
    change : Change
        What it changes, with all else in FP32.
    lost : str
        What was lost: one of ``"overflowed"``, ``"underflowed"``, ``"integer rounded"``, ``"saturated"``,
        ``"cancelled"``, ``"constant rounded"`` and ``"rounded"``.
    detail : str
        The tensor in which it was lost, with numbers.
    also : tuple of str
        Operators that only pass the same values on, and round them as well.
    """

    name: str
    op: str
    change: Change
    lost: str
    detail: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What ``audit`` found. ``print`` it. Plain data.

    Attributes
    ----------
    compute : str
        The compute dtype.
    candidates : int
        How many operators compute in low precision.
    replays : int
        How many times the batch was run.
    loss_scale : float
        The loss scale of the replays; 1 for bfloat16 and in inference.
    total : Change
        What all of them change together.
    findings : tuple of Finding
        The operators that stand out, the worst first; at most ``worst`` (argument of ``audit``). Empty if none does.
    remaining : Change or None
        What is left with the findings in FP32; None if there are none.
    exclude : tuple of str
        Patterns of ``exclude`` that keep all findings in FP32.
    full_ops : tuple of str
        Types of operators, all of whose operators in low precision are among the findings: ``full_ops`` with these is
        the shorter cure.
    threshold : float
        From how many times the noise an operator stands out.
    applied : bool
        Whether the network excludes the findings now.
    """

    compute: str
    candidates: int
    replays: int
    loss_scale: float
    total: Change
    findings: tuple[Finding, ...]
    remaining: Change | None
    exclude: tuple[str, ...]
    full_ops: tuple[str, ...]
    threshold: float
    applied: bool = False

    @property
    def is_healthy(self) -> bool:
        """Return whether nothing stands out: no operator, and not all of them together."""
        return not self.findings and self.total.times_noise <= self.threshold

    def __str__(self) -> str:
        lines = [
            f"audit: {self.candidates} operators in {self.compute}, {self.replays} replays of the batch"
            + (f" at a loss scale of {self.loss_scale:g}" if self.loss_scale != 1 else "")
        ]
        rows = [["", "x noise", "loss", "worst gradient", "worst output column", "lost"]]
        rows.append(["everything low", *self.total.cells(), ""])
        rows += [[f"{f.name} ({f.op})", *f.change.cells(), f.lost] for f in self.findings]
        if self.remaining is not None:
            rows.append(["with these in FP32", *self.remaining.cells(), ""])
        if self.is_healthy and self.total.times_limit > 1:
            lines.append(
                "nothing stands out, but the network multiplies any error, also one in its weights: no few operators "
                "in FP32 would cure that. Compare with FP32's own spread, and with a larger batch"
            )
        elif self.is_healthy:
            lines.append("nothing stands out: rounding changes loss, gradients and outputs as it does anywhere")
        elif not self.findings:
            lines.append(
                "no operator stands out by itself: together their roundings do. Compare with FP32's own spread"
            )
        lines += table(rows, "<><<<<")
        for found in self.findings:
            also = f"; passed on by {some(found.also, 3)}" if found.also else ""
            lines.append(f"  {found.name} {found.lost}: {found.detail}{also}")
        if self.findings:
            cure = f"exclude={list(self.exclude)}"
            lines.append(f"cure: {cure}" + (f", or full_ops={list(self.full_ops)}" if self.full_ops else ""))
            lines += ["      the network keeps them in FP32 now"] if self.applied else []
        return "\n".join(lines)


def percent(value: float) -> str:
    """Return a share as text: ``"0.31%"``, ``"1.2e+03%"``, ``"inf"``."""
    return f"{100 * value:.2g}%" if math.isfinite(value) else "inf"


def times(value: float) -> str:
    """Return how many times the noise something is, as text: ``"0.8"``, ``"120"``, ``">1e6"``."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}" if value < 1e6 else ">1e6"
