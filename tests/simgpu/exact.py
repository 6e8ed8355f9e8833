"""Floating point by its definition: exact fractions, rounded once. What the table of instructions is held against."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

FORMATS = {16: (11, -14, 15), 32: (24, -126, 127), 64: (53, -1022, 1023)}  # bits of precision, least and most exponent
QUIET = {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}


class Number(NamedTuple):
    """A sign (1: negative) and a size; None is infinite. NaN is Python's None in the place of a number."""

    negative: int
    size: Fraction | None

    @property
    def value(self) -> Fraction:
        assert self.size is not None
        return -self.size if self.negative else self.size


def number(bits: int, width: int) -> Number | None:
    precision, least, most = FORMATS[width]
    negative, fraction = bits >> (width - 1), bits & ((1 << (precision - 1)) - 1)
    exponent = bits >> (precision - 1) & ((1 << (width - precision)) - 1)
    if exponent == most - least + 2:
        return None if fraction else Number(negative, None)
    if exponent:
        return Number(negative, (1 + Fraction(fraction, 1 << (precision - 1))) * Fraction(2) ** (exponent - 1 + least))
    return Number(negative, fraction * Fraction(2) ** (least - precision + 1))


def bits(value: Number | None, width: int, mode: str = "RN") -> int:
    """A number rounded: RN to the nearest, ties to even, RM down, RP up, RZ to zero."""
    if value is None:
        return QUIET[width]
    precision, least, most = FORMATS[width]
    sign, infinite = value.negative << (width - 1), (most - least + 2) << (precision - 1)
    if value.size is None:
        return sign | infinite
    if not value.size:
        return sign
    exponent = value.size.numerator.bit_length() - value.size.denominator.bit_length()
    exponent -= value.size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, least) - precision + 1)
    units = value.size / step
    whole = units.numerator // units.denominator
    rest = units - whole
    up = {"RN": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2), "RZ": False}
    up.update(RM=rest and value.negative, RP=rest and not value.negative)
    whole += bool(up[mode])
    # The leading bit of a normal number counts as one more exponent.
    found = ((max(exponent, least) - least) << (precision - 1)) + whole
    if found >= infinite:
        outward = mode == "RN" or mode == ("RM" if value.negative else "RP")
        found = infinite if outward else infinite - 1
    return sign | found


def multiply(a: Number | None, b: Number | None) -> Number | None:
    if a is None or b is None:
        return None
    if a.size is None or b.size is None:
        return None if 0 in (a.size, b.size) else Number(a.negative ^ b.negative, None)
    return Number(a.negative ^ b.negative, a.size * b.size)


def add(a: Number | None, b: Number | None, mode: str = "RN") -> Number | None:
    if a is None or b is None:
        return None
    if a.size is None or b.size is None:
        if a.size is None and b.size is None and a.negative != b.negative:
            return None
        return a if a.size is None else b
    total = a.value + b.value
    if not total:
        return Number(a.negative if a.negative == b.negative else int(mode == "RM"), total)
    return Number(int(total < 0), abs(total))


def flushed(raw: int) -> int:
    """FP32 with .FTZ: a subnormal number is 0 with its sign."""
    return raw if raw & 0x7F800000 else raw & 0x80000000


def saturated(raw: int) -> int:
    """FP32 with .SAT: between 0 and 1; NaN is 0."""
    found = number(raw, 32)
    if found is None or found.negative:
        return 0
    return 0x3F800000 if found.size is None or found.size > 1 else raw


def whole(value: Number | None, mode: str) -> Number | None:
    """A number without its fraction: RN, TRUNC, FLOOR or CEIL."""
    if value is None or value.size is None:
        return value
    size = value.size
    down = size.numerator // size.denominator
    rest = size - down
    up = {"RN": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2), "TRUNC": False}
    up.update(FLOOR=rest and value.negative, CEIL=rest and not value.negative)
    return Number(value.negative, Fraction(down + bool(up[mode])))
