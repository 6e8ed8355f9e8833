"""What a rule is: one row of ``rule_table.py``, and what it says of a node with given parameters."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, Mapping

import numpy as np

_FLOAT16_MAX = 65504.0
_HALF_ULP = 2.0**-11  # float16's rounding of a normal number, relative to it
# x + 4 has two bits less for x than x has; MobileNetV3's hard swish adds 3.
_LARGEST_OFFSET = 4.0


class Need(enum.IntEnum):
    """What a reader may need of values, and low precision may take from them: a bit of an int (``needs.py``)."""

    DISTANCE = 1  # to a limit that the values come near: 1 - p, where p is 0.9999
    SMALL = 2  # the size of values that float16 flushes to zero: a product of probabilities, 1e-9
    EXACT = 4  # every digit: positions, ids, what is compared
    CANCELS = 8  # what is left where a product and the squares of its factors cancel: a² + b² - 2ab


class Kind(enum.Enum):
    """How an operator takes part in mixed precision."""

    LOW = "low"  # reads and writes the compute dtype, sums in FP32: convolutions and matrix products
    FOLLOW = "follow"  # in low precision if all inputs that decide are, else FP32; see ``Rule.normalized``
    FULL = "full"  # reads, computes and writes FP32
    NORM = "norm"  # BatchNorm: ``FULL``, or ``FOLLOW`` with the policy's norm="compute"
    HEAD = "head"  # a loss head, which ignores its output's gradient: FP32, and ``scale_heads`` scales what it writes
    # In the dtypes of the FP32 graph, never by ``low_ops``: on indices, masks or integers, creation, Custom.
    ALONE = "alone"


class Role(enum.Enum):
    """What an operator computes, where that decides what cancels or accumulates."""

    SUM = "sum"  # of its inputs, or their difference
    TIMES = "times"  # the product of its inputs, value by value
    MATRIX = "matrix"  # a product of matrices: a sum of products
    SQUARE = "square"
    SCALE = "scale"  # a product with its first ``scalars``
    OTHER = ""


@dataclass(frozen=True)
class When:
    """An exception to a rule for certain values of one parameter, such as ``act_type="softrelu"``."""

    attr: str
    values: tuple[str, ...]  # as in Symbol JSON, which may leave out the default: it must not be among them
    kind: Kind
    reason: str
    makes: int = 0
    draws: bool = False

    def holds(self, attrs: Mapping[str, str]) -> bool:
        return attrs.get(self.attr) in self.values


@dataclass(frozen=True)
class Rule:
    """One row of the rule table: operators that are safe in the same precision for the same reason."""

    kind: Kind
    reason: str  # in one line, which ``explain`` shows to the user
    operators: str = field(default="", repr=False, compare=False)  # as graphs name them, separated by white space
    # Positions of inputs that are never cast to low precision: indices, labels, lengths, conditions, gamma, statistics.
    keep: tuple[int, ...] = ()
    keep_outputs: tuple[int, ...] = ()  # positions of outputs that are always FP32
    params: tuple[int, ...] = ()  # for ``FOLLOW``: positions of inputs that get the dtype that the others determine
    # Positions of the inputs that are taken for parameters where the caller does not say which variables are.
    weights: tuple[int, ...] = ()
    # The first output is about 1 or less, as after a normalization or softmax, and so is safe in float16: operators
    # that read it beside float16 inputs stay float16, others as ``cost.py`` says. Not in bfloat16 or by
    # ``full_ops``.
    normalized: bool = False
    # Its float16 kernel on a GPU sums in FP32 if MXNET_SAFE_ACCUMULATION is set, else in float16 (``safe_sums.py``).
    sums_safely: bool = False
    reads_either: bool = False  # such a kernel may read FP32, as its parameter ``dtype`` says; it then rounds less
    # Each output value is an input value, perhaps negated, or zero, and gradients likewise: rounding before such an
    # operator gives what rounding after it gives.
    exact: bool = False
    exact_with: tuple[str, str] = ("", "")  # a parameter, and its value with which such an operator selects values
    when: tuple[When, ...] = ()  # the first that holds counts
    # Constants that the kernel casts to the dtype of the data: FP32 where float16 cannot hold one (a mask's -1e18).
    scalars: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()  # those of ``scalars`` that must be exact where FP32 reads the values
    # What low precision takes from the values that it computes, where a reader needs it: ``sigmoid(9.5)`` is 1.
    makes: int = 0
    passes: int = 0  # what its values are because its inputs' are, and needed of these if of its values
    needs: int = 0  # of its inputs, those in ``keep`` too
    needs_of: tuple[int, ...] = ()  # positions of the inputs of which it ``needs`` that; () for all
    role: Role = Role.OTHER
    offsets: tuple[str, ...] = ()  # those of ``scalars`` that are added
    shrinks: bool = False  # the output is smaller than the input, and so a cast of it costs less
    draws: bool = False  # random numbers, in training at least; see also ``share``
    share: float | None = None  # of the values, which it drops at random, where the parameter ``p`` does not say it

    def resolve(self, attrs: Mapping[str, str], compute: str = "float16") -> tuple[Kind, str]:
        """Return how an operator of this rule with these parameters takes part in mixed precision, and why."""
        for exception in self.when:
            if exception.holds(attrs):
                return exception.kind, exception.reason
        if compute == "float16":
            for attr in self.scalars:
                value = attrs.get(attr)
                if value is not None and _leaves_float16(value):
                    return Kind.FULL, f"float16 cannot hold the constant {attr}={value}"
        for attr in self.offsets:
            if abs(_number(attrs.get(attr, "")) or 0.0) > _LARGEST_OFFSET:
                return Kind.FULL, f"{compute} has no bits left for what an offset of {attrs[attr]} is added to"
        return self.kind, self.reason

    def made(self, attrs: Mapping[str, str], compute: str) -> int:
        """Return what ``compute`` takes from the values of such an operator if a reader needs it."""
        exception = next((each for each in self.when if each.holds(attrs)), None)
        made = exception.makes if exception else self.makes
        return made | Need.DISTANCE if self.rounded_limit(attrs, compute) else made

    def draws_with(self, attrs: Mapping[str, str]) -> bool:
        """Return whether an operator of this rule with these parameters draws random numbers, in training at least."""
        if any(each.draws for each in self.when if each.holds(attrs)):
            return True
        return self.draws and (self.share is None or float(attrs.get("p", self.share)) > 0)

    def rounded_limit(self, attrs: Mapping[str, str], compute: str) -> str:
        """Return a constant of ``limits`` that ``compute`` does not hold, such as ``"a_max=0.9999"``, or ``""``."""
        given = (attr for attr in self.limits if attr in attrs)
        return next((f"{attr}={attrs[attr]}" for attr in given if not is_exact(attrs[attr], compute)), "")


def _leaves_float16(text: str) -> bool:
    """Return whether float16 cannot hold the finite number in ``text`` to a rounding: beyond 65504, or subnormal."""
    value = _number(text)
    if value is None:
        return False
    size = abs(value)
    return size > _FLOAT16_MAX or abs(_rounded(size, "float16") - size) > _HALF_ULP * size


def is_exact(text: str, compute: str) -> bool:
    """Return whether rounding the constant in ``text`` to ``compute`` leaves what FP32 holds of it."""
    value = _number(text)
    return value is None or _rounded(value, compute) == _rounded(value, "float32")


def _number(text: str) -> float | None:
    """Return the number in ``text``, or None if it is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _rounded(value: float, dtype: str) -> float:
    """Return ``value`` rounded to the nearest number of a dtype, infinity beyond its range."""
    with np.errstate(over="ignore"):
        rounded: Any = np.float16(value) if dtype == "float16" else np.float32(value)
    if dtype == "bfloat16" and np.isfinite(rounded):  # the upper half of an FP32 number; ties go to even
        bits = int(rounded.view(np.uint32))
        rounded = np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return float(rounded)
