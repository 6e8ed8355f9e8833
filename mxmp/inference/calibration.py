"""Ranges of tensors for INT8, by three calibrators from one pass over the data; and how far outputs are from FP32's."""

from __future__ import annotations

from statistics import NormalDist
from typing import Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.contrib.quantization import combine_histogram

# Bins of a histogram. With MXNet's 8001, its search for the range of least entropy takes a second per tensor.
_BINS = 2001
# With a later batch of larger values the histogram gets more bins, of the same width, up to so many.
_MOST_BINS = 10 * _BINS
# At most about this many values of a tensor and batch, evenly spread, enter the histogram; smallest and largest are
# found among all values.
_SAMPLES = 100_000
_INT8_BINS, _UINT8_BINS = 255, 511
_PERCENTILE = 0.9999
# MXNet writes ranges with six decimals, and a tensor of smaller values would lose more by that than by INT8.
_SMALLEST = 1e-4
# A column whose deviation is a smaller part of its values holds the rounding of FP32 alone.
_ROUNDING = 1e-5
# How probable it is at most that the column of least variance seems worse than it is, because its rows are few.
_CHANCE = 0.05


class Statistics:
    """Histograms of tensors over several batches, from which ``CALIBRATORS`` compute ranges for INT8."""

    def __init__(self) -> None:
        # By tensor, as in MXNet's quantization: counts, edges from -end to end, smallest and largest value, end.
        self.histograms: dict[str, tuple] = {}
        self._not_finite: set[str] = set()

    def add(self, name: str, values: np.ndarray) -> None:
        """Add a tensor's values in one more batch; infinity and NaN are left out."""
        is_finite = np.isfinite(values)
        finite = values.reshape(-1) if is_finite.all() else values[is_finite]
        if finite.size < values.size:
            self._not_finite.add(name)
        if not finite.size:
            return
        low, high = float(finite.min()), float(finite.max())
        flat = finite[:: max(finite.size // _SAMPLES, 1)]
        end = max(abs(low), abs(high), 1e-30)
        before = self.histograms.get(name)
        if before and end / before[4] * len(before[0]) <= _MOST_BINS:
            self.histograms[name] = combine_histogram(before, flat, low, high, end)
            return
        counts, edges = np.histogram(flat, bins=_BINS, range=(-end, end))
        if before:  # its bins are so narrow that as many as MXNet would add do not fit into memory
            earlier, narrow, least, most, _ = before
            counts = counts + np.histogram((narrow[1:] + narrow[:-1]) / 2, edges, weights=earlier)[0].astype(int)
            low, high = min(low, least), max(high, most)
        self.histograms[name] = (counts, edges, low, high, end)

    def unusable(self, names: Sequence[str]) -> dict[str, str]:
        """Return what was wrong with the values, for those of ``names`` that INT8 must not represent."""
        found = {}
        for name in names:
            low, high = self.histograms[name][2:4] if name in self.histograms else (0.0, 0.0)
            if name in self._not_finite:
                found[name] = "held infinity or NaN"
            elif name not in self.histograms:
                found[name] = "was never computed"
            elif low == high:  # INT8 would keep it so for good: it holds nothing beyond the range of calibration
                found[name] = f"was {low + 0.0:g} throughout"  # 0.0 for -0.0
            elif max(-low, high) < _SMALLEST:
                found[name] = f"was never beyond {max(-low, high):.0e}"
        return found

    def ranges(self, calibrator: str) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value that INT8 should represent, by tensor."""
        return {name: CALIBRATORS[calibrator](*histogram) for name, histogram in self.histograms.items()}


def _entropy(counts: np.ndarray, edges: np.ndarray, low: float, high: float, end: float) -> tuple[float, float]:
    """Return the range with the least Kullback-Leibler divergence, which MXNet's operator finds."""
    bins = _UINT8_BINS if low >= 0 else _INT8_BINS
    threshold, _ = mx.nd.contrib.calibrate_entropy(mx.nd.array(counts), mx.nd.array(edges), num_quantized_bins=bins)
    return _cut(float(threshold.asnumpy().reshape(-1)[0]), low, high)


def _percentile(counts: np.ndarray, edges: np.ndarray, low: float, high: float, end: float) -> tuple[float, float]:
    """Return the smallest range, in whole bins, that holds 99.99 % of the counted values."""
    half = len(counts) // 2
    folded = counts[half + 1 :] + counts[:half][::-1]
    share = (np.cumsum(folded) + counts[half]) / max(counts.sum(), 1)
    return _cut(float(edges[half + 2 + int(np.searchsorted(share, _PERCENTILE))]), low, high)


def _cut(threshold: float, low: float, high: float) -> tuple[float, float]:
    """Return the part of the range from -threshold to threshold in which values occur."""
    return max(-threshold, low), min(threshold, high)


# From the name of a calibrator to the function that returns a range for the items of one of ``Statistics.histograms``.
CALIBRATORS: Mapping[str, Callable[..., tuple[float, float]]] = {
    "min/max": lambda counts, edges, low, high, end: (low, high),
    "entropy": _entropy,
    "percentile 99.99": _percentile,
}


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """Return the signal to quantization noise ratio in dB, of two arrays of one shape; inf if they are equal."""
    finite = _finite(reference, value)
    if finite is None:
        return -np.inf
    exact = reference[finite].astype("float64")
    return _decibels(float(np.sum(exact**2)), float(np.sum((exact - value[finite]) ** 2)))


def _finite(reference: np.ndarray, value: np.ndarray) -> np.ndarray | None:
    """Return which elements of ``reference`` are finite, None if others are in ``value``."""
    # Infinite elements, as in a mask, must be equal, and count no further.
    finite = np.isfinite(reference)
    same = np.array_equal(reference[~finite], value[~finite]) and np.isfinite(value[finite]).all()
    return finite if same else None


def is_usable(low: float, high: float) -> bool:
    """Return whether a range can be that of an INT8 tensor: finite, not empty, and not too small."""
    return bool(np.isfinite([low, high]).all() and low < high and max(-low, high) >= _SMALLEST)


def column_axis(axes: int) -> int:
    """Return the axis of an output's columns, such as classes: 1 of four axes or more, as in images, else the last."""
    return 1 if axes > 3 else axes - 1


def columns_of(output: np.ndarray) -> np.ndarray:
    """Return an output as a matrix of its columns; one with fewer than two axes is one column."""
    if output.ndim < 2:
        return output.reshape(-1, 1)
    axis = column_axis(output.ndim)
    return np.moveaxis(output, axis, -1).reshape(-1, output.shape[axis])


def column_sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """Return the SQNR in dB of the worst column of two (rows, columns) matrices; its mean is no signal."""
    finite = _finite(reference, value)
    if finite is None:
        return -np.inf
    exact, found = (np.where(finite, each, 0.0).astype("float64") for each in (reference, value))
    if finite.sum(0).max(initial=0) < 2:  # a single row: the spread of its values
        finite, exact, found = (each.reshape(-1, 1) for each in (finite, exact, found))
    rows, noise, power = finite.sum(0), np.sum((exact - found) ** 2, 0), np.sum(exact**2, 0)
    deviation = np.sum(np.where(finite, exact - exact.sum(0) / np.maximum(rows, 1), 0.0) ** 2, 0)
    varies = deviation > _ROUNDING**2 * power
    # The mean of a column that does not vary, or by FP32's rounding alone, is all there is, and counts.
    signal = np.where(varies, deviation, power)
    # The fewer rows, the smaller is the least variance of so many columns by chance: the ratio is raised by that.
    own_noise = np.where(varies, noise * _least_share(rows - 1, len(rows)), noise)
    # Columns as one: those that vary, if some do, with the noise of those that are 0.
    shown, zero = varies if varies.any() else power > 0, power == 0
    together = _decibels(signal[shown].sum(), noise[shown | zero].sum())
    return min([together, *map(_decibels, signal[~zero], own_noise[~zero])])


def same_answers(reference: np.ndarray, value: np.ndarray) -> float | None:
    """Return the share of rows whose largest value is in the same column; None for one column."""
    if reference.shape[1] < 2 or not len(reference):
        return None
    return float((reference.argmax(1) == value.argmax(1)).mean())


def _least_share(freedom: np.ndarray, columns: int) -> np.ndarray:
    """Return which share of its true variance the least of so many estimates has by chance (Wilson-Hilferty)."""
    # ``freedom``: the number of values of an estimate less one. So few values that the share is 0 say nothing.
    spread = 2 / (9 * np.maximum(freedom, 1))
    return np.maximum(1 - spread + NormalDist().inv_cdf(_CHANCE / columns) * np.sqrt(spread), 0.0) ** 3


def _decibels(signal: float, noise: float) -> float:
    return float(10 * np.log10(max(signal, 1e-300) / noise)) if noise else np.inf
