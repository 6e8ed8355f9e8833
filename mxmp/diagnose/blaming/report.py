"""What ``blame`` found, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

__all__ = ["Blame", "Range"]


@dataclass(frozen=True)
class Range:
    """The values of one tensor: how large the finite ones are, and how many are not finite.

    ``largest``: of the absolute values; nan where none is finite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    lowest: float
    highest: float
    infs: int
    nans: int

    @property
    def finite(self) -> bool:
        return not (self.infs or self.nans)

    @property
    def largest(self) -> float:
        return max(abs(self.lowest), abs(self.highest))

    def __str__(self) -> str:
        bad = [f"{n} {what}" for n, what in ((self.infs, "inf"), (self.nans, "NaN")) if n]
        values = "" if math.isnan(self.lowest) else f"from {self.lowest:.4g} to {self.highest:.4g}"
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} ({shape}, {self.dtype}): {', '.join(filter(None, [values, *bad]))}"


@dataclass(frozen=True)
class Blame:
    """The first tensor that was not finite when a step was replayed. ``print`` it.

    Attributes
    ----------
    reproduced : bool
        False where all was finite: then ``where`` is ``"nowhere"``.
    where : {"nowhere", "input", "parameter", "forward", "loss", "backward", "update"}
        ``"loss"``: in the loss, which is no part of the net and was not looked into, or in its gradient.
        ``"update"``: in the gradient of a parameter only, where several were summed.
    name, op : str
        The operator, parameter or input, and the operator's kind.
    dtype : str
        In which the operator computes; the low dtype also where its result overflowed when it was rounded.
    cause : str
        In a sentence.
    output : Range or None
        What it made.
    inputs : tuple of Range
        What went in; and, where the result overflowed when it was rounded, what it was before.
    loss_scale : float
        Of the replay.
    """

    reproduced: bool
    where: str
    name: str
    op: str
    dtype: str
    cause: str
    output: Range | None
    inputs: tuple[Range, ...]
    loss_scale: float

    def __str__(self) -> str:
        at = f", at a loss scale of {self.loss_scale:g}"
        if not self.reproduced:
            return f"not reproduced{at}: {self.cause}"
        who = f"{self.name} ({self.op})" if self.op else self.name
        what = f"{who}, {self.where}" if self.where in ("forward", "backward") else who
        return "\n".join([f"{what}{at}: {self.cause}", *self._ranges()])

    def _ranges(self) -> Iterable[str]:
        for each in self.inputs:
            yield f"  in   {each}"
        if self.output is not None:
            yield f"  out  {self.output}"
