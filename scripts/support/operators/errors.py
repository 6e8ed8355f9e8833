"""Rounding, units in the last place, and the errors of many values in them."""

from __future__ import annotations

import math

import numpy as np

_BITS = {"bfloat16": (7, -126), "float16": (10, -14)}  # of the mantissa, and the smallest normal exponent
_LARGEST = {"bfloat16": 3.3895e38, "float16": 65504.0}
# The largest error of one rounding, in units of each value's last place, with what FP32 adds; and of a few, in units of
# the last place of a tensor's largest value.
ONE, FEW = 0.51, 2.0


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest value of ``dtype``, ties to even, in FP32."""
    if dtype == "float16":
        return value.astype("float16").astype("float32")
    bits = np.ascontiguousarray(value, "float32").view("uint32").astype("uint64")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype("uint32").view("float32").reshape(value.shape)


def ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """The distance of the neighbours of ``value`` in ``dtype``; of small ones that of the tensor's typical value.

    A sum that happens to cancel is as wrong as its terms, so a sixteenth of the root mean square is the floor.
    """
    mantissa, smallest = _BITS[dtype]
    size = np.abs(value.astype("float64"))
    size = np.where(np.isfinite(size), size, 0)
    floor = math.sqrt(float(np.mean(size**2))) / 16 if size.size else 0.0
    exponent = np.floor(np.log2(np.maximum(np.maximum(size, floor), 2.0**smallest)))
    return np.exp2(exponent - mantissa)


def unit_of_largest(value: np.ndarray) -> float:
    """One unit in the last place of the largest finite number that float16 has in an array."""
    inside = np.abs(value[np.abs(value) < 65520])
    return float(2.0 ** (np.floor(np.log2(inside.max(initial=2.0**-14))) - 10))


def largest_error(value: np.ndarray, wanted: np.ndarray, unit: float | np.ndarray | None = None) -> float:
    """The largest error in units, those of ``unit_of_largest`` by default; infinite where a finite number is not."""
    unit = unit_of_largest(wanted) if unit is None else unit
    with np.errstate(all="ignore"):
        wanted = np.where(np.abs(wanted) >= 65520, np.sign(wanted) * np.inf, wanted)
        same = (value == wanted) | (np.isnan(value) & np.isnan(wanted))
        apart = np.where(same, 0, np.abs(value.astype("float64") - wanted)) / unit
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0))


def short(error: float) -> float:
    """Return an error as the results keep it: three digits, and no infinity."""
    return float(f"{min(error, 1e9):.3g}")


class Errors:
    """Errors in ulps, gathered over tensors of one case."""

    def __init__(self) -> None:
        self._found: list[tuple[np.ndarray, ...]] = []  # of every draw: errors, those beyond rounding, signs
        self.bad = ""

    def add(self, value: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
        within = np.abs(wanted) <= _LARGEST[dtype]
        if np.isnan(value[~np.isnan(wanted)]).any() or not np.isfinite(value[within]).all():
            self.bad = "NaN" if np.isnan(value).any() else "infinity"
        good = within & np.isfinite(value)
        unit = ulp(wanted, dtype)[good]
        error = (value.astype("float64") - wanted)[good] / unit
        beyond = (value.astype("float64") - rounded(wanted, dtype))[good] / unit
        self._found.append((error, beyond, np.sign(wanted[good])))

    def summary(self) -> tuple[float, float, bool]:
        """Mean absolute error; bias; whether it is more than 0.1, beyond chance.

        The bias is the mean distance from the *rounded* FP32 value, away from zero or upwards.
        """
        found = [draw for draw in self._found if draw[0].size]
        if not found:
            return 0.0, 0.0, False
        every = np.concatenate([error for error, _, _ in found])
        outwards = _mean([float(np.mean(beyond * sign)) for _, beyond, sign in found])
        upwards = _mean([float(np.mean(beyond)) for _, beyond, _ in found])
        bias, deviation = max(outwards, upwards, key=lambda pair: abs(pair[0]))
        return float(np.mean(np.abs(every))), bias, abs(bias) - 4 * deviation > 0.1


def _mean(values: list[float]) -> tuple[float, float]:
    """A mean over draws, and its standard deviation: values of one draw may be copies of each other."""
    return float(np.mean(values)), float(np.std(values)) / math.sqrt(max(len(values) - 1, 1))
