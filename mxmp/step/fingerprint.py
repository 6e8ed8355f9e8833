"""A few values of each weight, by which a file of states knows the weights that it was saved with."""

from __future__ import annotations

import logging
from typing import Sequence

import numpy as np

from .masters import Weight

logger = logging.getLogger("mxmp")

_COUNT = 8
# The mean over devices, which MXNet saves, may differ from equal values by a bit.
_ROUNDING = 1e-6


def fingerprint(weights: Sequence[Weight]) -> np.ndarray:
    """Return eight FP32 values from the middle of each weight (of its master); NaN for what is missing."""
    rows = np.full((len(weights), _COUNT), np.nan, np.float32)
    for row, weight in zip(rows, weights):
        source = weight.masters or weight.arrays
        if weight.trained and source and source[0].size and source[0].shape:
            flat = source[0].as_nd_ndarray().reshape((-1,))
            begin = max((flat.shape[0] - _COUNT) // 2, 0)
            part = flat[begin : begin + _COUNT].asnumpy()
            row[: len(part)] = part
    return rows


def warn_of_other_weights(saved: np.ndarray, weights: Sequence[Weight], path: str) -> None:
    """Log a warning if weights have other values than ``saved``, unless one is as initializers leave it."""
    now = fingerprint(weights)
    if saved.shape != now.shape:
        return
    known = ~(np.isnan(now).all(axis=1) | np.isnan(saved).all(axis=1))
    differ = known & ~np.isclose(now, saved, rtol=_ROUNDING, atol=0, equal_nan=True).all(axis=1)
    names = [weight.name for weight, other in zip(weights, differ) if other]
    # A run may read its states before its parameters, which are then all 0 or all 1 in a bias or a gamma.
    if names and not any(row[0] in (0, 1) and (row[~np.isnan(row)] == row[0]).all() for row in now[differ]):
        logger.warning(
            "the states in %r were saved with other values of %s%s, as after another step: momenta, counts and FP32 "
            "master weights come from this file, all other weights stay. Load parameters and states of one step, the "
            "parameters first; mxmp.save_checkpoint and mxmp.load_checkpoint keep them together",
            path,
            names[0],
            f" and {len(names) - 1} more" if len(names) > 1 else "",
        )
