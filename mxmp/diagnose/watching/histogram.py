"""How many values of a tensor lie between which powers of two, and how a 16-bit format rounds them. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# FP32's own range, subnormal numbers included: 2**-149 to below 2**128.
_LOWEST, _HIGHEST = -149, 127
_COUNT = _HIGHEST - _LOWEST + 1
_SUBNORMAL = -126 - _LOWEST  # the number of exponents below those of normal FP32 numbers
_INF = 0x7F800000


class Format(NamedTuple):
    """The range of a 16-bit dtype; ``tiny``, ``normal`` and ``top`` are exponents of two."""

    name: str
    tiny: int  # of the smallest subnormal number
    normal: int  # of the smallest normal number
    top: int  # of the largest number
    largest: float


FORMATS = {
    "float16": Format("float16", -24, -14, 15, 65504.0),
    "bfloat16": Format("bfloat16", -133, -126, 127, 3.3895313892515355e38),
}


@dataclass(frozen=True)
class Histogram:
    """How many values of a tensor lie between which powers of two. Plain data; ``+`` adds two histograms.

    Attributes
    ----------
    counts : numpy.ndarray
        int64, shape (277,): for each exponent e from -149 to 127, how many values have ``2**e <= |x| < 2**(e + 1)``.
    zeros, infs, nans : int
        How many values are 0, inf or -inf, and NaN.
    smallest : float
        The smallest ``|x|`` among the counted values that are neither 0, inf nor NaN; nan if there are none.
    largest : float
        The largest ``|x|`` of the whole tensor, also where only a sample of its values was counted. If the tensor holds
        an inf or NaN, the largest finite ``|x|`` of the counted values. nan if all are 0, inf or NaN.
    size : int
        Number of elements of the tensor. It is larger than ``counted`` where only a sample was counted.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_COUNT, np.int64))
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    smallest: float = math.nan
    largest: float = math.nan
    size: int = 0

    @classmethod
    def of(cls, values: np.ndarray, size: int | None = None, largest: float = 0.0) -> Histogram:
        """Return the histogram of ``values``, an array of any shape and float dtype, after rounding them to FP32.

        Leave out ``size`` and ``largest`` if ``values`` are a whole tensor. If they are a sample of one, ``size`` is
        the number of elements of the tensor, and ``largest`` is its largest ``|x|``. If ``largest`` is inf or nan, the
        histogram counts at least one inf or NaN, even if the sample has none.
        """
        # FP32 without the sign bit, as integers: ordered like the numbers, with the exponent in the upper bits
        bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.int32) & 0x7FFFFFFF
        there = bits[(bits > 0) & (bits < _INF)]
        counts = np.zeros(_COUNT, np.int64)
        counts[_SUBNORMAL:] = np.bincount(there >> 23, minlength=255)[1:]
        subnormal = there[there < 1 << 23]
        if subnormal.size:  # a multiple of 2**-149
            counts[:_SUBNORMAL] = np.bincount(np.frexp(subnormal.astype(float))[1] - 1, minlength=_SUBNORMAL)
        ends = np.array([there.min(), there.max()] if there.size else [_INF + 1, 0], np.int32).view(np.float32)
        peak = max(float(ends[1]), largest if math.isfinite(largest) else 0.0)
        infs, nans = int((bits == _INF).sum()), int((bits > _INF).sum())
        return cls(
            counts,
            bits.size - there.size - infs - nans,
            max(infs, int(math.isinf(largest))),
            max(nans, int(math.isnan(largest))),
            float(ends[0]),
            peak or math.nan,
            bits.size if size is None else size,
        )

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.infs + other.infs,
            self.nans + other.nans,
            float(np.fmin(self.smallest, other.smallest)),
            float(np.fmax(self.largest, other.largest)),
            self.size + other.size,
        )

    def scaled(self, power: float) -> Histogram:
        """Return the histogram that the tensor would have if multiplied by ``2**power``.

        ``power`` is rounded to an integer. Values that leave FP32's range are counted as zero or inf.
        """
        shift = round(power)
        counts = np.zeros_like(self.counts)
        moved = np.arange(_COUNT) + shift
        kept = (moved >= 0) & (moved < _COUNT)
        counts[moved[kept]] = self.counts[kept]
        under, over = int(self.counts[moved < 0].sum()), int(self.counts[moved >= _COUNT].sum())
        with np.errstate(over="ignore"):
            smallest, largest = (float(np.ldexp(x, shift)) for x in (self.smallest, self.largest))
        return Histogram(counts, self.zeros + under, self.infs + over, self.nans, smallest, largest, self.size)

    @property
    def counted(self) -> int:
        """Return how many values were counted, zeros, infs and NaNs included."""
        return int(self.counts.sum()) + self.zeros + self.infs + self.nans

    def between(self, low: int | None, high: int | None) -> int:
        """Return how many values x have ``2**low <= |x| < 2**(high + 1)``; None means no limit.

        Zeros, infs and NaNs are not counted.
        """
        start = 0 if low is None else max(low - _LOWEST, 0)
        stop = _COUNT if high is None else max(high - _LOWEST + 1, 0)
        return int(self.counts[start:stop].sum())

    def exponents(self) -> np.ndarray:
        """Return the exponent of two that each element of ``counts`` stands for: an int array, from -149 to 127."""
        return np.arange(_LOWEST, _HIGHEST + 1)

    # -- in a format --------------------------------------------------------------------------------

    def underflow(self, form: Format = FORMATS["float16"]) -> float:
        """Return the share of the counted values, from 0 to 1, that are not zero but round to zero in ``form``.

        Those below half of the format's smallest subnormal number (2**-25 for float16) round to zero. Values that are
        zero already are part of the total only.
        """
        return self._share(self.between(None, form.tiny - 2))

    def subnormal(self, form: Format = FORMATS["float16"]) -> float:
        """Return the share of the counted values, from 0 to 1, that become subnormal, but not zero, in ``form``."""
        return self._share(self.between(form.tiny - 1, form.normal - 1))

    def overflow(self, form: Format = FORMATS["float16"]) -> float:
        """Return the share of the counted values, from 0 to 1, that are too large for ``form`` or already inf.

        A histogram knows only exponents: float16's largest number is 65504, but only values from 65536 on are counted
        as too large. NaNs are part of the total only.
        """
        return self._share(self.between(form.top + 1, None) + self.infs)

    @property
    def zero_share(self) -> float:
        """Return the share of the counted values that are exactly 0, from 0 to 1."""
        return self._share(self.zeros)

    def headroom(self, form: Format = FORMATS["float16"]) -> float:
        """Return the largest n for which the tensor times ``2**n`` still fits into the format ``form``.

        n is a whole number, as a float: 3.0 means that the tensor times 8 fits, and times 16 overflows. It is negative
        if the largest value overflows already, ``-inf`` if the tensor holds an inf or NaN, and ``inf`` if it is empty
        or all zeros.
        """
        if self.infs or self.nans:
            return -math.inf
        return math.inf if math.isnan(self.largest) else float(math.floor(math.log2(form.largest / self.largest)))

    def _share(self, count: int) -> float:
        return count / self.counted if self.counted else 0.0
