"""What tests and sweeps need to know of a model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


@dataclass(frozen=True)
class Case:
    """One model: ``make`` returns the net, not initialized, and ``inputs`` the arrays of one call.

    ``loss``: from the outputs in training to a loss or a list of them. ``train_inputs``: the arrays of a call in
    training, where they are others (ground truth). ``ranked``: inference ends in a ranking (non-maximum suppression,
    top-k), on which no two roundings need agree: only whether it works is measured, and the outputs compared are those
    in training; ``compared`` picks them. ``copied``: operators that get copies around them, without which MXNet's FP32
    cannot train it on a CPU (``plain_copies``).
    """

    name: str
    kind: str
    make: Callable[[], Any]
    inputs: Callable[[], list]
    loss: Callable[[Any], Any] = field(default_factory=lambda: projection)
    train_inputs: Callable[[], list] | None = None
    init: Any = None
    ranked: bool = False
    compared: Callable[[Any], Any] = lambda outputs: outputs
    copied: tuple[str, ...] = ()

    @property
    def loss_name(self) -> str:
        return getattr(self.loss, "name", None) or getattr(self.loss, "__name__", type(self.loss).__name__)


def floating(outputs: Any) -> Iterator[mx.nd.NDArray]:
    """The arrays of floats in a net's outputs, in order."""
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from floating(each)
    elif outputs is not None and (outputs.dtype in (np.float32, np.float16) or outputs.dtype == BFLOAT16):
        yield outputs


def projection(outputs: Any) -> list:
    """The outputs' products with fixed random directions: a loss for a model that has none."""
    losses = []
    for seed, out in enumerate(floating(outputs)):
        direction = np.random.RandomState(seed).normal(0, 1, out.shape).astype("float32")
        numpy = isinstance(out, mx.np.ndarray)
        losses.append((out * (mx.np.array(direction) if numpy else mx.nd.array(direction))).sum())
    return losses


_drawn = 0


@contextlib.contextmanager
def other_inputs(number: int) -> Iterator[None]:
    """Within it cases draw other inputs and labels; number 0 is what they draw without it."""
    global _drawn
    _drawn, before = number, _drawn
    try:
        yield
    finally:
        _drawn = before


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed + 1000 * _drawn)


def images(*shape: int) -> mx.nd.NDArray:
    """Normal noise smoothed a little, as pictures are after normalisation."""
    noise = _random(1).normal(0, 1, shape).astype("float32")
    return mx.nd.array((noise + np.roll(noise, 1, -1) + np.roll(noise, 1, -2)) / 3**0.5)


def uniform(*shape: int) -> mx.nd.NDArray:
    return mx.nd.array(_random(2).uniform(-1, 1, shape))


def whole(high: int, *shape: int) -> mx.nd.NDArray:
    """Whole numbers below ``high``, as floats, as labels and tokens are in MXNet."""
    return mx.nd.array(_random(3).randint(0, high, shape))
