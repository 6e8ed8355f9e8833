"""What a rule is: one row of ``rule_table.py``, and what it says of a node with given parameters."""

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

    ==========  ===========================================================================================
    ``LOW``     reads and writes the compute dtype and sums in FP32: convolutions and matrix products
    ``FOLLOW``  computes in low precision if all inputs that it computes on are in low precision; else in FP32
    ``FULL``    reads, computes and writes FP32
    ``NORM``    BatchNorm: ``FULL``, or ``FOLLOW`` if the policy has ``norm="compute"``
    ``HEAD``    a loss head, which ignores the gradient of its output: FP32, and ``heads.py`` scales its gradient
    ``ALONE``   is not touched: its inputs are what they are in the FP32 graph (integers, indices, random numbers,
                sparse arrays, Custom operators)
    ==========  ===========================================================================================
    """

    LOW = "low"
    FOLLOW = "follow"
    FULL = "full"
    NORM = "norm"
    HEAD = "head"
    ALONE = "alone"


@dataclass(frozen=True)
class When:
    """An exception to a rule for nodes whose parameter ``attr`` has one of ``values``, such as ``act_type="softrelu"``.

    Attributes
    ----------
    attr : str
        The parameter's name.
    values : tuple of str
        Values as Symbol JSON writes them. A parameter that the JSON does not have has its default, so the default is
        never among them.
    kind : Kind
        How such a node takes part, in place of the rule's kind.
    reason : str
        Why, in one line, for the user.
    """

    attr: str
    values: tuple[str, ...]
    kind: Kind
    reason: str

    def holds(self, attrs: Mapping[str, str]) -> bool:
        """Return whether the exception is for a node with the parameters ``attrs``, as in Symbol JSON."""
        return attrs.get(self.attr) in self.values


@dataclass(frozen=True)
class Rule:
    """One row of the rule table: operators that are safe in the same precision for the same reason.

    Attributes
    ----------
    kind : Kind
        How the operators take part in mixed precision.
    reason : str
        Why, in one line, which ``explain`` shows to the user.
    operators : str
        Names in Symbol JSON, with their aliases, separated by white space.
    keep : tuple of int
        Positions of the inputs that arrive as in the FP32 graph, whatever the operator computes in: indices, labels,
        lengths, conditions, gamma, beta and running statistics.
    keep_outputs : tuple of int
        Positions of the outputs that are FP32 even where the operator computes in low precision.
    params : tuple of int
        Of a ``FOLLOW`` operator, the positions of the inputs that are parameters. They are cast to what the operator
        computes in, and do not count among the inputs that it follows.
    normalized : bool
        Whether the first output is normalized values or probabilities, near 1 or below. A ``FOLLOW`` operator that
        reads it may then compute in float16, if one of that operator's own readers computes in low precision.
    exact : bool
        Whether the output values, and the gradients, are some of the input values up to sign and zeros (relu, reshape,
        transpose, concat, slice...). Rounding before such an operator gives what rounding after it gives.
    when : tuple of When
        Exceptions by parameter; the first that holds counts.
    scalars : tuple of str
        Parameters with a constant that the kernel casts to the dtype of the data. The operator stays in FP32 where
        float16 would turn the constant into infinity (-1e18 for a mask) or zero (1e-12 for a logarithm).
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
        """Return how a node with the parameters ``attrs`` takes part in mixed precision, and the reason.

        ``attrs`` are strings as in Symbol JSON. ``compute`` is the compute dtype: float16 has a smaller range than
        FP32, so a constant outside of it gives ``Kind.FULL``; bfloat16 has FP32's range.
        """
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
    """Return whether float16 turns the number in ``text`` into infinity or zero; False for what is no finite number."""
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return math.isfinite(value) and (value > _FLOAT16_MAX or 0 < value < _FLOAT16_TINY)
