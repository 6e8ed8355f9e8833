"""The result of ``blame``, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Blame", "Range"]


@dataclass(frozen=True)
class Range:
    """The values of one tensor: the lowest and highest finite one (nan without), and how many are inf and NaN."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    lowest: float
    highest: float
    infs: int
    nans: int

    @property
    def finite(self) -> bool:
        """Return whether all values are finite."""
        return not (self.infs or self.nans)

    @property
    def largest(self) -> float:
        """Return the largest absolute value of the finite ones; nan where there are none."""
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
        What the operator computes in; the low dtype also where its result overflowed when it was rounded.
    cause : str
        In a sentence.
    output : Range or None
        The tensor.
    inputs : tuple of Range
        What the operator read; and, where the result overflowed when it was rounded, what it was before.
    loss_scale : float
        The scale of the replay.
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
        name = f"{self.name} ({self.op})" if self.op else self.name
        name = f"{name}, {self.where}" if self.where in ("forward", "backward") else name
        return "\n".join([f"{name}{at}: {self.cause}", *(f"  in   {r}" for r in self.inputs), f"  out  {self.output}"])
