"""The result of ``blame``, as plain data, and its text."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The range of the values of one tensor.

    Attributes
    ----------
    name : str
        Which tensor it is. An output has the name of its operator; a parameter and a Module's input have their own
        names. A net's only input is ``"the input"``; several are ``"input 0"``, ``"input 1"`` and so on. Other names
        are ``"the loss"``; ``"fc -> relu"`` for the gradient that fc sends back to relu; and, for example, ``"the
        gradient of fc_weight"``. With ``", unrounded"`` at the end: that tensor in FP32, before it was rounded.
    shape : tuple of int
    dtype : str
        Such as ``"float16"``.
    lowest, highest : float
        The lowest and the highest finite value, with their signs; nan where no value is finite.
    infs, nans : int
        How many values are inf or -inf, and how many are NaN.
    zeros : int
        How many values are 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    lowest: float
    highest: float
    infs: int
    nans: int
    zeros: int = 0

    @property
    def finite(self) -> bool:
        """Return whether no value of the tensor is inf or NaN."""
        return not (self.infs or self.nans)

    @property
    def largest(self) -> float:
        """Return the largest absolute value among the finite ones; nan where no value is finite."""
        return max(abs(self.lowest), abs(self.highest))

    def __str__(self) -> str:
        bad = [f"{n} {what}" for n, what in ((self.infs, "inf"), (self.nans, "NaN")) if n]
        values = "" if math.isnan(self.lowest) else f"from {self.lowest:.4g} to {self.highest:.4g}"
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} ({shape}, {self.dtype}): {', '.join(filter(None, [values, *bad]))}"


@dataclass(frozen=True)
class Blame:
    """What ``blame`` found: the first tensor with an inf or NaN in a replayed step. ``print`` it. Plain data.

    Attributes
    ----------
    reproduced : bool
        False if all values of the replay were finite; then ``where`` is ``"nowhere"``.
    where : {"nowhere", "input", "parameter", "forward", "loss", "backward", "update"}
        What kind of tensor it is. ``"forward"``: an output of an operator. ``"backward"``: the gradient that an
        operator sends back. ``"loss"``: the loss or its gradient, where the net does not compute the loss itself.
        ``"update"``: the gradient of a parameter, where no gradient before it was inf or NaN. It is the sum over
        several calls of blocks that read the parameter, or a block that runs as Python computed it.
    name, op : str
        The operator and its type, such as ``"fc1"`` and ``"FullyConnected"``. Where ``where`` is neither ``"forward"``
        nor ``"backward"``, ``name`` is that of the tensor, and ``op`` is empty. Both are empty for ``"nowhere"``.
    dtype : str
        The compute dtype, if an FP32 tensor overflowed when it was rounded. If not, it is for ``"forward"`` and
        ``"backward"`` the dtype that the operator computes in, but ``"float32"`` if the tensor is in FP32. Otherwise
        it is the dtype of the tensor. Empty where ``where`` is ``"nowhere"``.
    cause : str
        What happened, in a sentence.
    output : Range or None
        The tensor that is not finite; None where all are finite.
    inputs : tuple of Range
        The tensors that the operator read; in backward also the gradients that were sent to it. For the loss, the last
        tensor that an operator or a cast made in the forward. Where a tensor overflowed when it was rounded, that
        tensor in FP32 is the last. Empty for any other tensor.
    loss_scale : float
        The loss scale of the replay.
    cure : tuple of str
        Patterns of ``exclude`` that were tried: with these operators in FP32 the same batch is finite, at a loss scale
        that a scaler reaches. Empty where a lower loss scale alone avoids it, where nothing has to be cured, and where
        FP32 fails too or could not be tried, as ``cause`` then says.
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
    cure: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f", at a loss scale of {self.loss_scale:g}"
        if not self.reproduced:
            return f"not reproduced{at}: {self.cause}"
        name = f"{self.name} ({self.op})" if self.op else self.name
        name = f"{name}, {self.where}" if self.where in ("forward", "backward") else name
        ranges = [*(f"  in   {r}" for r in self.inputs), f"  out  {self.output}"]
        return "\n".join([f"{name}{at}: {self.cause}", *ranges])
