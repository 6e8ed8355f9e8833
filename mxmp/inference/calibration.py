"""From what tensors hold to the ranges that INT8 has to hold: three calibrators on one pass over the data."""

from __future__ import annotations

from typing import Callable, Mapping

import mxnet as mx
import numpy as np
from mxnet.contrib.quantization import combine_histogram

__all__ = ["CALIBRATORS", "Statistics", "sqnr"]

# MXNet takes 8001, for which its search for the least entropy takes a second a tensor.
_BINS = 2001
# Of each tensor and batch this many values, evenly spread, enter the histogram; its ends see all of them.
_SAMPLES = 100_000
_INT8_BINS, _UINT8_BINS = 255, 511
_PERCENTILE = 0.9999


class Statistics:
    """Histograms of tensors by name, symmetrical around 0, and their exact ends."""

    def __init__(self) -> None:
        self.histograms: dict[str, tuple] = {}

    def add(self, name: str, values: np.ndarray) -> None:
        """Count the values of one batch."""
        low, high = float(values.min()), float(values.max())
        flat = values.reshape(-1)
        flat = flat[:: max(flat.size // _SAMPLES, 1)]
        end = max(abs(low), abs(high), 1e-30)
        if name in self.histograms:
            self.histograms[name] = combine_histogram(self.histograms[name], flat, low, high, end)
        else:
            counts, edges = np.histogram(flat, bins=_BINS, range=(-end, end))
            self.histograms[name] = (counts, edges, low, high, end)

    def ranges(self, calibrator: str) -> dict[str, tuple[float, float]]:
        """Return the range of every tensor by one of ``CALIBRATORS``."""
        return {name: CALIBRATORS[calibrator](*histogram) for name, histogram in self.histograms.items()}


def _min_max(counts: np.ndarray, edges: np.ndarray, low: float, high: float, end: float) -> tuple[float, float]:
    return low, high


def _entropy(counts: np.ndarray, edges: np.ndarray, low: float, high: float, end: float) -> tuple[float, float]:
    """Return the range that loses the least information (Kullback-Leibler), by MXNet's own operator."""
    bins = _UINT8_BINS if low >= 0 else _INT8_BINS
    threshold, _ = mx.nd.contrib.calibrate_entropy(mx.nd.array(counts), mx.nd.array(edges), num_quantized_bins=bins)
    return _cut(float(threshold.asnumpy().reshape(-1)[0]), low, high)


def _percentile(counts: np.ndarray, edges: np.ndarray, low: float, high: float, end: float) -> tuple[float, float]:
    half = len(counts) // 2
    folded = counts[half + 1 :] + counts[:half][::-1]
    share = (np.cumsum(folded) + counts[half]) / max(counts.sum(), 1)
    return _cut(float(edges[half + 2 + int(np.searchsorted(share, _PERCENTILE))]), low, high)


def _cut(threshold: float, low: float, high: float) -> tuple[float, float]:
    return max(-threshold, low), min(threshold, high)


CALIBRATORS: Mapping[str, Callable[..., tuple[float, float]]] = {
    "min/max": _min_max,
    "entropy": _entropy,
    "percentile 99.99": _percentile,
}


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """Return the signal to quantization noise ratio in dB: infinite where the two are equal.

    Infinities (of masks) must be the same ones; where they are not, and for NaN, it is -inf.
    """
    exact, finite = reference.astype("float64"), np.isfinite(reference)
    if not np.array_equal(exact[~finite], value[~finite]) or not np.isfinite(value[finite]).all():
        return -np.inf
    signal, noise = float(np.sum(exact[finite] ** 2)), float(np.sum((exact[finite] - value[finite]) ** 2))
    return float(10 * np.log10(max(signal, 1e-300) / noise)) if noise else np.inf
