"""What a rule is: one row of ``rule_table.py``, and what it says of a node with given parameters."""

from __future__ import annotations

import enum
import math
import re
import struct
from dataclasses import dataclass, field
from typing import Mapping

_FLOAT16_MAX = 65504.0
_HALF_ULP = 2.0**-11  # float16's rounding of a normal number, relative to it


class Kind(enum.Enum):
    """How an operator takes part in mixed precision.

    ==========  ===========================================================================================
    ``LOW``     reads and writes the compute dtype and sums in FP32: convolutions and matrix products
    ``FOLLOW``  computes in low precision if all its inputs are in low precision, else in FP32. Inputs in
                ``Rule.keep`` (indices) and ``Rule.params`` do not count; see ``Rule.normalized`` for an exception
    ``FULL``    reads, computes and writes FP32
    ``NORM``    BatchNorm: ``FULL``, or ``FOLLOW`` if the policy has ``norm="compute"``
    ``HEAD``    a loss head, which ignores the gradient of its output: computes in FP32, and ``scale_heads`` has the
                gradient that it writes multiplied by the loss scale
    ``ALONE``   reads and writes the dtypes of the FP32 graph, and ``low_ops`` must not name it: it works on indices,
                masks or integers, creates a tensor, or runs user code (Custom)
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
    """An exception to a rule for operators with certain values of one parameter, such as ``act_type="softrelu"``.

    Attributes
    ----------
    attr : str
        The parameter's name.
    values : tuple of str
        The values for which the exception applies, as Symbol JSON writes them. The JSON may leave out a parameter that
        has its default, so the default must not be among them.
    kind : Kind
        How such an operator takes part in mixed precision, in place of the rule's kind.
    reason : str
        Why, in one line, which ``explain`` shows to the user.
    saturates : bool
        As ``Rule.saturates``, for such operators.
    """

    attr: str
    values: tuple[str, ...]
    kind: Kind
    reason: str
    saturates: bool = False

    def holds(self, attrs: Mapping[str, str]) -> bool:
        """Return whether this exception to a rule applies to an operator with the parameters ``attrs``.

        These are strings as in Symbol JSON.
        """
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
        Positions of the inputs that are never cast to low precision, even where the operator computes in it: indices,
        labels, lengths, conditions, gamma, beta and running statistics.
    keep_outputs : tuple of int
        Positions of the outputs that are FP32 even where the operator computes in low precision.
    params : tuple of int
        For ``Kind.FOLLOW``, the positions of the inputs that are parameters. They are cast to the dtype in which the
        operator computes; the dtypes of the other inputs determine it.
    normalized : bool
        Whether the values of the first output are about 1 or less, as after a normalization or softmax, and so are safe
        in float16. A ``Kind.FOLLOW`` operator that reads such an FP32 output beside float16 inputs still computes in
        float16. One that reads only such outputs does so in the three cases that ``settle`` in ``decide.py`` lists,
        such as where an operator reads its output in float16. Has no effect in bfloat16, or if ``full_ops`` names
        the operator that has this rule.
    exact : bool
        Whether each output value is an input value, perhaps with another sign, or zero, and gradients likewise (relu,
        reshape, transpose, concat, slice...). Rounding before such an operator gives what rounding after it gives.
    when : tuple of When
        Exceptions for certain values of parameters; the first one that applies counts.
    scalars : tuple of str
        Names of the parameters that hold a constant which the kernel casts to the dtype of the data. In a float16
        network the operator stays in FP32 if float16 cannot hold the constant to a rounding (-1e18 for a mask, 1e-12
        for a logarithm, 9e-8 for small targets).
    limits : tuple of str
        Those of ``scalars`` that must be exact where the operator's values are read in FP32: the limits of a clip, what
        is added or subtracted.
    saturates : bool
        Whether the first output comes near a limit, so that what matters is the distance to it, which low precision
        rounds away: ``sigmoid(9.5)`` is 1 in bfloat16. ``readers.py`` keeps it for those that read it in FP32.
    shrinks : bool
        Whether the output is smaller than the input, so that a cast in front of the operator costs more than one
        behind.
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
    limits: tuple[str, ...] = ()
    saturates: bool = False
    shrinks: bool = False

    def resolve(self, attrs: Mapping[str, str], compute: str = "float16") -> tuple[Kind, str]:
        """Return how an operator of this rule with the parameters ``attrs`` takes part in mixed precision, and why.

        ``attrs`` are strings as in Symbol JSON. The first exception in ``when`` that applies counts. If none does, a
        constant that float16 cannot hold (see ``scalars``) gives ``Kind.FULL`` where ``compute`` is ``"float16"``. In
        all other cases the rule's own ``kind`` and ``reason`` are returned.
        """
        for exception in self.when:
            if exception.holds(attrs):
                return exception.kind, exception.reason
        if compute == "float16":
            for attr in self.scalars:
                value = attrs.get(attr)
                if value is not None and _leaves_float16(value):
                    return Kind.FULL, f"float16 cannot hold the constant {attr}={value}"
        return self.kind, self.reason

    def loses(self, attrs: Mapping[str, str], compute: str) -> str:
        """Return what ``compute`` takes from the values of such an operator that an FP32 reader may need, or ``""``."""
        exception = next((each for each in self.when if each.holds(attrs)), None)
        if exception.saturates if exception else self.saturates:
            return "it comes near a limit, to which its distance matters"
        rounded = (
            f"{attr}={attrs[attr]}" for attr in self.limits if attr in attrs and not _is_exact(attrs[attr], compute)
        )
        return next((f"{compute} does not hold {constant} exactly" for constant in rounded), "")


def is_true(text: str | None) -> bool:
    """Return whether the text of an operator's boolean parameter in Symbol JSON says True; False for None.

    True is ``"1"`` or, as in MXNet, ``"true"`` in upper or lower case: R writes ``"TRUE"``.
    """
    return text is not None and text.lower() in ("true", "1")


def numbers_in(text: str | None) -> tuple[int, ...]:
    """Return the numbers in the text of an operator's tuple parameter: (3, 3) for ``"(3, 3)"``; ``()`` for None.

    MXNet also reads ``"3"``, a tuple of one number, and the ``"(3L, 3L)"`` that Python 2 wrote. Signs are ignored.
    """
    return tuple(map(int, re.findall("[0-9]+", text or "")))


def _leaves_float16(text: str) -> bool:
    """Return whether float16 cannot hold the finite number in ``text`` to a rounding: beyond 65504, or subnormal."""
    value = _number(text)
    if value is None:
        return False
    size = abs(value)
    return size > _FLOAT16_MAX or abs(_rounded(size, "float16") - size) > _HALF_ULP * size


def _is_exact(text: str, compute: str) -> bool:
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
    code = "<e" if dtype == "float16" else "<f"
    try:
        packed = struct.pack(code, value)
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype == "bfloat16":  # the upper half of an FP32 number; ties go to even
        bits = int.from_bytes(packed, "little")
        packed = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to_bytes(5, "little")[:4]
    return struct.unpack(code, packed)[0]
