"""When two dtypes are taken to train equally well; stated before anything was trained.

The means over seeds are equivalent if they lie within the larger of the family's tolerance (0.2 points where the metric
has points) and two standard errors. Runs of one seed share weights and data order, so differences are paired by seed.

Where the spread over seeds is wider than the tolerance, equals exceed two standard errors of five pairs by chance in
one of nine comparisons (Student's t with four degrees of freedom). So a family with a miss gets twice the seeds, once,
and the verdict on all of them stands.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Mapping, NamedTuple


class Verdict(NamedTuple):
    """``difference``: mean of the low dtype less that of float32; ``bound``: how large it may be."""

    difference: float
    standard_error: float
    bound: float
    seeds: int

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.bound + 1e-9  # not so for NaN


def verdict(base: Mapping[int, float], low: Mapping[int, float], tolerance: float) -> Verdict | None:
    """By the seeds that both have; None with fewer than three. Not finite anywhere: it does not hold."""
    seeds = base.keys() & low.keys()
    if len(seeds) < 3:
        return None
    differences = [low[seed] - base[seed] for seed in seeds]
    if not all(map(math.isfinite, differences)):
        return Verdict(math.nan, math.nan, tolerance, len(seeds))
    error = stdev(differences) / math.sqrt(len(seeds))
    return Verdict(fmean(differences), error, max(tolerance, 2 * error), len(seeds))
