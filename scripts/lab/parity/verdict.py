"""The verdict on a dtype that trained beside FP32, and the mean over all families.

Two one-sided tests at 5 % (Schuirmann, 1987): a dtype is equivalent where the 90 % interval of the paired difference
lies within the margin. Noise widens the interval, never the margin, so a noisy family is undecided.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev, variance
from typing import Mapping, NamedTuple, Sequence

import numpy as np
from scipy.stats import t as student

LEAST = 3  # pairs of runs; fewer are not judged
POWER = 0.8
MOST = 10_000  # seeds that ``seeds_needed`` tries


class Metric(NamedTuple):
    """``margin``: a difference that a practitioner would not care about, in the metric's unit.

    ``relative``: the margin is a share of the mean of FP32. ``higher``: whether higher values are better.
    """

    margin: float
    relative: bool = False
    higher: bool = False


METRICS = {
    "top-1, %": Metric(1, higher=True),
    "accuracy, %": Metric(1, higher=True),
    "mIoU, %": Metric(1, higher=True),
    "letter error rate, %": Metric(1),
    "mAP, %": Metric(2, higher=True),
    "BLEU": Metric(0.5, higher=True),
    "perplexity": Metric(0.01, relative=True),
    "perplexity of hidden words": Metric(0.01, relative=True),
    "bits per sample": Metric(0.01, relative=True),
    "Frechet distance": Metric(0.01, relative=True),
    "log-mel difference, dB": Metric(0.1),
    "PSNR in the holes, dB": Metric(0.1, higher=True),
}


class Verdict(NamedTuple):
    """The paired difference of a dtype to FP32, in the metric's unit.

    ``difference``: the mean over seeds of the dtype's value less that of FP32; NaN where a run diverged.
    ``spread``: the standard deviation of a seed, within one dtype. ``gain``: 1 where higher is better, otherwise -1.
    """

    difference: float
    standard_error: float
    spread: float
    margin: float
    gain: int
    seeds: int

    @property
    def kind(self) -> str:
        """Return "equivalent", "different", "undecided" or "diverged"."""
        if not math.isfinite(self.difference):
            return "diverged"
        if self.holds_from <= self.margin + 1e-9:
            return "equivalent"
        low, high = self.interval(0.95)
        apart, beyond = low > 0 or high < 0, max(-low, high) > self.margin
        return "different" if apart and beyond else "undecided"

    @property
    def worse(self) -> bool:
        """Return whether the dtype is shown to be worse than FP32: different to that side, or diverged."""
        return self.kind == "diverged" or (self.kind == "different" and self.gain * self.difference < 0)

    @property
    def text(self) -> str:
        """Return the kind in words, with the side of a difference, or how many seeds would settle what is undecided."""
        if self.kind == "undecided":
            return f"undecided, {self.seeds_needed} seeds"
        return f"different, {'worse' if self.worse else 'better'}" if self.kind == "different" else self.kind

    @property
    def holds_from(self) -> float:
        """Return the smallest margin with which the dtype would be equivalent."""
        return max(map(abs, self.interval(0.9)))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the lower and the upper end of the difference's interval of confidence, such as 0.9."""
        half = student.ppf((1 + level) / 2, self.seeds - 1) * self.standard_error
        return self.difference - half, self.difference + half

    @property
    def seeds_needed(self) -> int:
        """Return how many pairs would show equivalence in ``POWER`` of all cases, if the true difference is 0.

        The spread of the differences is taken to be the one observed. At most ``MOST``.
        """
        deviation = self.standard_error * math.sqrt(self.seeds)
        for seeds in range(LEAST, MOST):
            quantiles = student.ppf([0.95, (1 + POWER) / 2], seeds - 1).sum()
            if quantiles * deviation <= self.margin * math.sqrt(seeds):
                return seeds
        return MOST


def verdict(base: Mapping[int, float], low: Mapping[int, float], metric: Metric) -> Verdict | None:
    """Return the verdict on the values ``low`` by seed against those of FP32, by the seeds that both have.

    None where these are fewer than ``LEAST``.
    """
    seeds = sorted(base.keys() & low.keys())
    if len(seeds) < LEAST:
        return None
    pairs = [(base[seed], low[seed]) for seed in seeds]
    margin = metric.margin * (fmean(first for first, _ in pairs) if metric.relative else 1)
    gain = 1 if metric.higher else -1
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        return Verdict(math.nan, math.nan, math.nan, margin, gain, len(seeds))
    differences = [second - first for first, second in pairs]
    spread = math.sqrt(fmean(variance(values) for values in zip(*pairs)))
    return Verdict(fmean(differences), stdev(differences) / math.sqrt(len(seeds)), spread, margin, gain, len(seeds))


class Mean(NamedTuple):
    """A mean over families, in standard deviations of a seed, above 0 where the dtype is better; 95 % interval."""

    mean: float
    low: float
    high: float
    families: int


def pooled(found: Sequence[Verdict]) -> Mean:
    """Return the random-effects mean of the standardised differences (DerSimonian and Laird, 1986).

    The interval is that of Hartung and Knapp (2001), by the scatter of the families.
    """
    effects, errors = standardised(found)
    fixed = errors**-2
    scatter = (fixed * (effects - np.average(effects, weights=fixed)) ** 2).sum()
    between = max(0, (scatter - len(effects) + 1) / (fixed.sum() - (fixed**2).sum() / fixed.sum()))
    return weighted(effects, 1 / (errors**2 + between))


def plain_mean(found: Sequence[Verdict]) -> Mean:
    """Return the mean in which each family counts alike, however precise its difference is."""
    effects, _ = standardised(found)
    return weighted(effects, np.ones(len(effects)))


def standardised(found: Sequence[Verdict]) -> tuple[np.ndarray, np.ndarray]:
    """Return gains in standard deviations of a seed and their standard errors, both of shape (families,)."""
    effects = [each.gain * each.difference / each.spread for each in found]
    return np.array(effects), np.array([each.standard_error / each.spread for each in found])


def weighted(effects: np.ndarray, weights: np.ndarray) -> Mean:
    """Return the weighted mean with an interval by Student's t and the scatter around the mean."""
    mean, freedom = np.average(effects, weights=weights), len(effects) - 1
    error = math.sqrt((weights * (effects - mean) ** 2).sum() / freedom / weights.sum())
    half = student.ppf(0.975, freedom) * error
    return Mean(mean, mean - half, mean + half, len(effects))
