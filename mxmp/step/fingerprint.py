"""A few values of each weight, by which a file of states knows the weights that it was saved with."""

from __future__ import annotations

import logging
from typing import Any, Callable, Sequence

import numpy as np

from ..messages.text import some
from .masters import Weight

logger = logging.getLogger("mxmp")

_COUNT = 8
# The mean over devices, which MXNet saves, may differ from equal values by a bit.
_ROUNDING = 1e-6


def fingerprint(weights: Sequence[Weight]) -> np.ndarray:
    """Return eight FP32 values from the middle of each weight (of its master), the mean over devices, as MXNet saves
    it; NaN for what is missing."""
    rows = np.full((len(weights), _COUNT), np.nan, np.float32)
    for row, weight in zip(rows, weights):
        source = weight.masters or weight.arrays
        if weight.trained and source and source[0].size and source[0].shape:
            size = source[0].size
            begin = max((size - _COUNT) // 2, 0)
            parts = [each.as_nd_ndarray().reshape((-1,))[begin : begin + _COUNT].asnumpy() for each in source]
            row[: min(size, _COUNT)] = np.mean(parts, axis=0)
    return rows


def other_weights(saved: np.ndarray, weights: Sequence[Weight], *, at_load: bool = True) -> list[str]:
    """Return the names of weights with other values than ``saved``; at load, none if one is as initialized."""
    now = fingerprint(weights)
    if saved.shape != now.shape:
        return []
    known = ~(np.isnan(now).all(axis=1) | np.isnan(saved).all(axis=1))
    differ = known & ~np.isclose(now, saved, rtol=_ROUNDING, atol=0, equal_nan=True).all(axis=1)
    # A run may read its states before its parameters.
    if at_load and any(map(_is_initial, now[differ])):
        return []
    return [weight.name for weight, other in zip(weights, differ) if other]


def _is_initial(row: np.ndarray) -> bool:
    values = row[~np.isnan(row)]
    return values[0] in (0, 1) and bool((values == values[0]).all())


class FirstStep:
    """Observes the first step after states were loaded, since parameters of another step may be loaded after them."""

    def __init__(
        self, observers: list[Any], saved: np.ndarray, weights: Callable[[], Sequence[Weight]], path: str
    ) -> None:
        self._observers, self._arguments = observers, (saved, weights, path)

    def before_update(self, gradients: Sequence[Any]) -> None:
        saved, weights, path = self._arguments
        _warn(other_weights(saved, weights(), at_load=False), path)

    def after_step(self) -> None:
        self._observers.remove(self)


def watch_weights(
    observers: list[Any], saved: np.ndarray | None, weights: Callable[[], Sequence[Weight]], path: str
) -> None:
    """Log one warning if the weights are not those of the file of states ``path``: now, or at the next step."""
    observers[:] = [each for each in observers if not isinstance(each, FirstStep)]
    if saved is not None and not _warn(other_weights(saved, weights()), path):
        observers.append(FirstStep(observers, saved, weights, path))


def _warn(names: list[str], path: str) -> bool:
    if names:
        logger.warning(
            "the states in %r were saved with other values of %s, as after another step: momenta, counts and FP32 "
            "master weights come from this file, all other weights stay. Load parameters and states of one step, the "
            "parameters first; mxmp.save_checkpoint and mxmp.load_checkpoint keep them together",
            path,
            some(names, 1),
        )
    return bool(names)
