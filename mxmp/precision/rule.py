"""What a rule is: one row of ``rule_table.py``, and how it holds for a node with given attributes."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Mapping

__all__ = ["Kind", "Rule", "When"]

_FLOAT16_MAX = 65504.0
_FLOAT16_TINY = 2.0**-24  # the smallest subnormal


class Kind(enum.Enum):
    """How an operator takes part in mixed precision.

    ========  =========================================================================================
    ``LOW``     inputs and outputs in the compute dtype, accumulation in FP32 (the matrix operators)
    ``FOLLOW``  computes in the compute dtype between low-precision neighbours, otherwise in FP32
    ``FULL``    FP32 inputs, math and outputs
    ``NORM``    batch normalisation: ``FULL`` between casts of its own, or ``FOLLOW`` by ``norm="compute"``
    ``HEAD``    a loss head that ignores the gradient from above; FP32, and scaled by its own means
    ``ALONE``   inputs arrive exactly as in the FP32 graph: integers, indices, random, sparse, custom
    ========  =========================================================================================
    """

    LOW = "low"
    FOLLOW = "follow"
    FULL = "full"
    NORM = "norm"
    HEAD = "head"
    ALONE = "alone"


@dataclass(frozen=True)
class When:
    """An exception to a row: it holds where attribute ``attr`` has one of ``values``.

    Values are the strings of Symbol JSON. An attribute absent there has its default, so ``values``
    never holds a default: an absent attribute means no exception.
    """

    attr: str
    values: tuple[str, ...]
    kind: Kind
    reason: str

    def holds(self, attrs: Mapping[str, str]) -> bool:
        """Return whether a node with these attributes is the exception."""
        return attrs.get(self.attr) in self.values


@dataclass(frozen=True)
class Rule:
    """One row of the table: operators that are safe in the same precision for the same reason.

    Attributes
    ----------
    kind : Kind
    reason : str
        Why, in one line; ``explain`` shows it to the user.
    operators : str
        Names in Symbol JSON, with their aliases, separated by white space.
    keep : tuple of int
        Positions of inputs that always arrive as in the FP32 graph, whatever the node computes in:
        indices, labels, lengths, conditions, gamma, beta and running statistics.
    keep_outputs : tuple of int
        Positions of outputs that stay FP32 even where the node computes in the compute dtype.
    params : tuple of int
        Positions of trainable parameters of a ``FOLLOW`` operator: they have no vote, and are cast.
    normalized : bool
        The output is normalized values or probabilities, near 1 or below: operators that follow it may read it in
        float16, where one of their own readers does.
    exact : bool
        Output values are a selection of the input values, up to sign and zeros, and so are the
        gradients (relu, reshape, transpose, concat, slice...): rounding before or after is the same.
    when : tuple of When
        Exceptions by attribute; the first that holds counts.
    scalars : tuple of str
        Attributes with a constant that the kernel casts to the data's dtype: FP32 where float16
        would turn it into infinity (-1e18 for a mask) or zero (1e-12 for a logarithm).
    """

    kind: Kind
    reason: str
    operators: str = field(default="", repr=False, compare=False)
    keep: tuple[int, ...] = ()
    keep_outputs: tuple[int, ...] = ()
    params: tuple[int, ...] = ()
    normalized: bool = False
    exact: bool = False
    when: tuple[When, ...] = ()
    scalars: tuple[str, ...] = ()

    def resolve(self, attrs: Mapping[str, str], compute: str = "float16") -> tuple[Kind, str]:
        """Return the kind and the reason for a node with these attributes (strings, as in Symbol JSON)."""
        for exception in self.when:
            if exception.holds(attrs):
                return exception.kind, exception.reason
        if compute == "float16":
            for attr in self.scalars:
                value = attrs.get(attr)
                if value is not None and _leaves_float16(value):
                    return Kind.FULL, f"the constant {attr}={value} is outside float16's range"
        return self.kind, self.reason


def _leaves_float16(text: str) -> bool:
    """Return whether float16 turns a finite constant into infinity or zero."""
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return math.isfinite(value) and (value > _FLOAT16_MAX or 0 < value < _FLOAT16_TINY)
