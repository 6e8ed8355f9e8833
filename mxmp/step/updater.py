"""The update: every optimizer of MXNet on FP32 masters, with the loss scale divided out on the way."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .gradients import Gradient
from .masters import publish, take_over

__all__ = ["Update", "Updater", "Updaters", "rescaled"]


class Update(NamedTuple):
    """One weight on one device, and the gradient that is due to it."""

    index: int  # type: ignore[assignment]
    device: int
    name: str
    weight: NDArray
    grad: NDArray

    @property
    def gradient(self) -> Gradient:
        return Gradient(self.name, self.grad.as_nd_ndarray())


class Updater(mx.optimizer.Updater):
    """MXNet's Updater for one device, which updates the FP32 master where a weight has one, and rounds it back.

    The loss scale is divided out through the ``rescale_grad`` that ``rescaled`` sets; optimizers
    that look at gradients before that get unscaled copies.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    masters : callable
        From a weight's index to its FP32 master or None.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer, masters: Callable[[int], NDArray | None]) -> None:
        super().__init__(optimizer)
        self.master = masters

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update one weight, or lists of indices, gradients and weights."""
        indices, grads, weights = (
            (index, grad, weight) if isinstance(index, (list, tuple)) else ([index], [grad], [weight])
        )
        pairs = [(self.master(i), low) for i, low in zip(indices, weights)]
        for master, low in pairs:
            if master is not None:
                take_over(master, low)
        full = [g if m is None else g.astype("float32") for g, (m, _) in zip(grads, pairs)]
        with self._true_gradients(full) as full, _best_aggregation(self.optimizer, weights):
            super().__call__(list(indices), full, [low if m is None else m for m, low in pairs])
        for master, low in pairs:
            if master is not None:
                publish(master, low)

    @contextmanager
    def _true_gradients(self, grads: list[NDArray]) -> Iterator[list[NDArray]]:
        """``grads``, as unscaled copies where scaling by ``rescale_grad`` would not be the same."""
        rescale = self.optimizer.rescale_grad
        plain, factor = getattr(rescale, "factors", (rescale, 1.0))
        if not (_reads_raw_gradients(self.optimizer) or (factor != 1.0 and abs(rescale) < _SMALLEST_RESCALE)):
            yield grads
            return
        self.optimizer.rescale_grad = plain
        try:
            yield [g * factor for g in grads]
        finally:
            self.optimizer.rescale_grad = rescale


# SGLD draws noise; Nadam's schedule and LBSGD's sums of gradients belong to the optimizer, not to a device.
_TOGETHER = (mx.optimizer.SGLD, mx.optimizer.Nadam, mx.optimizer.LBSGD)


class Updaters(List[Updater]):
    """One Updater per device, all of one optimizer.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    num_devices : int
    master : callable
        From a weight's index and a device's number to the FP32 master or None.
    """

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        num_devices: int,
        master: Callable[[int, int], NDArray | None],
    ) -> None:
        super().__init__(Updater(optimizer, partial(_on_device, master, k)) for k in range(num_devices))
        self.optimizer = optimizer

    def apply(self, updates: Sequence[Update], factor: float, *, reduced: bool) -> None:
        """Apply gradients times ``factor``, on top of the optimizer's own ``rescale_grad``.

        ``reduced``: the gradients of a weight are the same on all devices, and so shall the weights be.
        """
        once = {update.index: update for update in reversed(updates)} if reduced and self._updates_apart() else {}
        with rescaled(self.optimizer, factor):
            for k, updater in enumerate(self):
                mine = [u for u in updates if u.device == k and once.get(u.index, u) is u]
                if mine:
                    updater([m.index for m in mine], [m.grad for m in mine], [m.weight for m in mine])
        for update in updates:
            source = once.get(update.index, update)
            if source is not update:
                self._copy(source, update)

    def _updates_apart(self) -> bool:
        """Whether updates of two devices can differ: the optimizer draws, or counts for all of them together.

        Plain MXNet updates once, on the kvstore. Nobody knows what a user's own optimizer does.
        """
        optimizer = self.optimizer
        own = not type(optimizer).__module__.startswith("mxnet.")
        return len(self) > 1 and (own or isinstance(optimizer, _TOGETHER))

    def _copy(self, source: Update, to: Update) -> None:
        master, other = self[source.device].master(source.index), self[to.device].master(to.index)
        if master is None or other is None:
            source.weight.copyto(to.weight)
        else:
            master.copyto(other)
            publish(other, to.weight)

    def set_states(self, states: Mapping[int, Any], contexts: Sequence[mx.Context], place: Callable) -> None:
        """Continue from ``states`` by index; ``place(state, ctx)`` brings one to a device."""
        for updater, ctx in zip(self, contexts):
            updater.states = {index: place(state, ctx) for index, state in states.items()}
            updater.states_synced = dict.fromkeys(updater.states, True)


def _on_device(master: Callable[[int, int], NDArray | None], device: int, index: int) -> NDArray | None:
    return master(index, device)


@contextmanager
def _best_aggregation(optimizer: mx.optimizer.Optimizer, weights: list[NDArray]) -> Iterator[None]:
    """SGD with one weight per kernel on a CPU, where MXNet's kernels for several weights take longer.

    The bits are the same. (LAMB's are not, so it is left.) In MXNet's profile of a ResNet-50 step: 36 ms
    instead of 49.
    """
    before = optimizer.aggregate_num
    if before > 1 and isinstance(optimizer, mx.optimizer.SGD) and weights[0].ctx.device_type != "gpu":
        optimizer.aggregate_num = 1
    try:
        yield
    finally:
        optimizer.aggregate_num = before


# MXNet reads operator attributes from text and keeps 19 decimals: 10 zeros and an FP32's 9 digits.
_SMALLEST_RESCALE = 1e-10


def _reads_raw_gradients(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether it takes norms or sums of gradients before it multiplies by ``rescale_grad``."""
    return isinstance(optimizer, mx.optimizer.LBSGD) and (
        optimizer.batch_scale > 1 or optimizer.warmup_strategy == "lars"
    )


@contextmanager
def rescaled(optimizer: mx.optimizer.Optimizer, factor: float) -> Iterator[None]:
    """``optimizer.rescale_grad`` times ``factor`` for the time of an update, then as it was."""
    plain = optimizer.rescale_grad
    optimizer.rescale_grad = _Rescale(plain, factor)
    try:
        yield
    finally:
        optimizer.rescale_grad = plain


class _Rescale(float):
    """``plain * factor``, whose text is the fixed-point decimal of its float32 value.

    MXNet passes operator attributes as text and misreads exponent notation: about a fifth of small
    ``rescale_grad`` came out one ulp off. ``Updater`` reads the two factors.
    """

    factors: tuple[float, float]
    _text: str

    def __new__(cls, plain: float, factor: float) -> _Rescale:
        self = super().__new__(cls, plain * factor)
        self.factors = plain, factor
        rounded = np.float32(plain) * np.float32(factor)
        self._text = np.format_float_positional(rounded, unique=True, trim="-")
        return self

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__
