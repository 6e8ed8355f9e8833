"""The update: every optimizer of MXNet on FP32 masters, with the loss scale divided out on the way."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from . import _mxnet
from .gradients import Gradient, largest_on_cpu
from .masters import round_master
from .multi_tensor import round_all, widen_all
from .resume import AsMade

__all__ = ["Update", "Updater", "Updaters", "rescaled"]


class Update(NamedTuple):
    """One weight on one device, and the gradient to update it by."""

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

    MXNet's own ``multi_precision`` kernels do both, where it has them and they are exact. The loss scale is divided out
    through the ``rescale_grad`` that ``rescaled`` sets; optimizers that read gradients before that get unscaled copies.
    States are kept as those of FP32 weights. ``masters`` returns the FP32 master for a weight's index, or None.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer, masters: Callable[[int], NDArray | None]) -> None:
        super().__init__(optimizer)
        self.states: dict[int, Any]
        self.master = masters
        self._large: tuple[tuple, list[int]] = (), []

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update one weight, or lists of indices, gradients and weights."""
        if not isinstance(index, (list, tuple)):
            index, grad, weight = [index], [grad], [weight]
        # MXNet's optimizers are written for mx.nd; an array of mx.np and its view share their memory.
        indices, grads, weights = index, *([array.as_nd_ndarray() for array in each] for each in (grad, weight))
        masters = {i: master.as_nd_ndarray() for i in indices if (master := self.master(i)) is not None}
        if masters and self._has_kernels(indices, weights, masters):
            with self._masters_in_states(masters):
                super().__call__(list(indices), grads, weights)
            return
        stored_half = [k for k, i in enumerate(indices) if i in masters]
        rounded = [grads[k] for k in stored_half]
        wide = widen_all(rounded) if self.aggregate_updates else [grad.astype("float32") for grad in rounded]
        full = dict(zip(stored_half, wide))
        with self._true_gradients([full.get(k, grad) for k, grad in enumerate(grads)]) as true:
            self._update(indices, true, [masters.get(i, w) for i, w in zip(indices, weights)])
        if self.aggregate_updates:
            round_all([(masters[indices[k]], weights[k], grads[k]) for k in stored_half])
        else:
            for k in stored_half:
                round_master(masters[indices[k]], weights[k])

    def _update(self, indices: Sequence[int], grads: Sequence[NDArray], weights: Sequence[NDArray]) -> None:
        """Update as MXNet's Updater, but the largest arrays on a CPU one by one, which is faster and the same."""
        alone: set[int] = set()
        if type(self.optimizer) is mx.optimizer.SGD and self.optimizer.momentum > 0:
            here = (k for k in self._largest(indices, weights) if self.states_synced.get(indices[k], True))
            alone = {k for k in here if grads[k].stype == "default"}
        for k in alone:
            index, weight, grad = indices[k], weights[k], grads[k]
            if index not in self.states:
                self.states[index] = _zero_momentum(weight)
                self.states_synced[index] = True
            _mxnet.update_by_momentum(self.optimizer, index, weight, grad, self.states[index])
        rest = [k for k in range(len(indices)) if k not in alone]
        super().__call__(*([each[k] for k in rest] for each in (indices, grads, weights)))

    def _largest(self, indices: Sequence[int], weights: Sequence[NDArray]) -> list[int]:
        """Return the positions of the largest FP32 arrays on a CPU; searched once for the same parameters."""
        if self._large[0] != (key := tuple(indices)):
            found = largest_on_cpu(weights, _ALONE_FROM, _MOST_ALONE)
            self._large = key, [k for k in found if weights[k].dtype == np.float32]
        return self._large[1]

    def _has_kernels(self, indices: Sequence[int], weights: Sequence[NDArray], masters: Mapping[int, NDArray]) -> bool:
        """Return whether MXNet's kernels for float16 weights compute the same as the FP32 ones with the masters.

        Those of LAMB, LARS and LBSGD do not: they take norms of the float16 arrays, and on a CPU of squares in float16.
        """
        if type(self.optimizer) not in _MASTER_KERNELS or self._needs_true_gradients():
            return False
        return all((w.dtype == np.float16) == (i in masters) for i, w in zip(indices, weights))

    @contextmanager
    def _masters_in_states(self, masters: Mapping[int, NDArray]) -> Iterator[None]:
        """Nest states as ``multi_precision`` does within the block; an update works on the arrays in place."""
        optimizer, states, before = self.optimizer, self.states, self.optimizer.multi_precision
        for i, master in masters.items():
            if i not in states:
                states[i] = optimizer.create_state_multi_precision(i, master)
                self.states_synced[i] = True
        self.states = {**states, **{i: (states[i], master) for i, master in masters.items()}}
        optimizer.multi_precision = True
        try:
            yield
        finally:
            states.update({i: state for i, state in self.states.items() if i not in masters})
            self.states, optimizer.multi_precision = states, before

    def _needs_true_gradients(self) -> bool:
        """Return whether scaling by ``rescale_grad`` would not be the same as scaling the gradients."""
        rescale = self.optimizer.rescale_grad
        scaled = getattr(rescale, "factors", (rescale, 1.0))[1] != 1.0
        return _reads_raw_gradients(self.optimizer) or (scaled and abs(rescale) < _SMALLEST_RESCALE)

    @contextmanager
    def _true_gradients(self, grads: Sequence[NDArray]) -> Iterator[list[NDArray]]:
        """Yield ``grads``, or unscaled copies where the optimizer needs those."""
        if not self._needs_true_gradients():
            yield list(grads)
            return
        rescale = self.optimizer.rescale_grad
        self.optimizer.rescale_grad, factor = getattr(rescale, "factors", (rescale, 1.0))
        try:
            yield [g * factor for g in grads]
        finally:
            self.optimizer.rescale_grad = rescale


# MXNet's kernel for many arrays goes through them all at once, on a CPU a third as fast as the one for one array where
# they are large (scripts/dev.py bench update). Each takes an operator more, so there are only a few.
_ALONE_FROM, _MOST_ALONE = 1 << 18, 12
_OFFSET = 256  # elements
_MASTER_KERNELS = (mx.optimizer.SGD, mx.optimizer.NAG)
# SGLD draws noise; Nadam's schedule and LBSGD's sums of gradients are the optimizer's, not a device's.
_NOT_PER_DEVICE = (mx.optimizer.SGLD, mx.optimizer.Nadam, mx.optimizer.LBSGD)


def _zero_momentum(weight: NDArray) -> NDArray:
    """Return zeros as SGD makes them, a kilobyte further on in their page of memory.

    Large arrays all begin at the same place of a page. At some distances from one another (2**28 bytes is one) an AMD
    core's L1 cache confuses two of them, and an update takes several times as long.
    """
    return mx.nd.zeros(weight.size + _OFFSET, ctx=weight.ctx, dtype=weight.dtype)[_OFFSET:].reshape(weight.shape)


class Updaters(List[Updater]):
    """One Updater per device, all of one optimizer, which has not updated yet.

    ``master`` returns the FP32 master for a weight's index and a device's number, or None.
    """

    def __init__(
        self, optimizer: mx.optimizer.Optimizer, num_devices: int, master: Callable[[int, int], NDArray | None]
    ) -> None:
        super().__init__(Updater(optimizer, partial(_master_of, master, k)) for k in range(num_devices))
        self.optimizer = optimizer
        self.as_made = AsMade.of(optimizer)

    def apply(self, updates: Sequence[Update], factor: float, *, reduced: bool) -> None:
        """Apply gradients times ``factor``, on top of the optimizer's own ``rescale_grad``.

        ``reduced``: the gradients of a weight are the same on all devices, and the weights stay so.
        """
        once = {update.index: update for update in reversed(updates)} if reduced and self._updates_can_differ() else {}
        with rescaled(self.optimizer, factor):
            for k, updater in enumerate(self):
                mine = [u for u in updates if u.device == k and once.get(u.index, u) is u]
                if mine:
                    updater([m.index for m in mine], [m.grad for m in mine], [m.weight for m in mine])
        for update in updates:
            source = once.get(update.index, update)
            if source is not update:
                self._copy_weight(source, update)

    def _updates_can_differ(self) -> bool:
        """Return whether updates of two devices can differ: the optimizer draws, or counts for all of them together.

        MXNet's own Trainer updates once, on the kvstore. A user's own optimizer may do anything.
        """
        optimizer = self.optimizer
        own = not type(optimizer).__module__.startswith("mxnet.")
        return len(self) > 1 and (own or isinstance(optimizer, _NOT_PER_DEVICE))

    def _copy_weight(self, source: Update, to: Update) -> None:
        master, other = self[source.device].master(source.index), self[to.device].master(to.index)
        if master is None or other is None:
            source.weight.copyto(to.weight)
        else:
            master.copyto(other)
            round_master(other, to.weight)

    def set_states(self, states: Mapping[int, Any], contexts: Sequence[mx.Context], place: Callable) -> None:
        """Continue from ``states`` by index; ``place(state, ctx)`` brings one to a device."""
        for updater, ctx in zip(self, contexts):
            updater.states = {index: place(state, ctx) for index, state in states.items()}
            updater.states_synced = dict.fromkeys(updater.states, True)


def _master_of(master: Callable[[int, int], NDArray | None], device: int, index: int) -> NDArray | None:
    return master(index, device)


# MXNet reads operator attributes from text and keeps 19 decimals: 10 zeros and an FP32's 9 digits.
_SMALLEST_RESCALE = 1e-10


def _reads_raw_gradients(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether it takes norms or sums of gradients before it multiplies by ``rescale_grad``."""
    return isinstance(optimizer, mx.optimizer.LBSGD) and (
        optimizer.batch_scale > 1 or optimizer.warmup_strategy == "lars"
    )


@contextmanager
def rescaled(optimizer: mx.optimizer.Optimizer, factor: float) -> Iterator[None]:
    """Multiply ``optimizer.rescale_grad`` by ``factor`` within the block."""
    before = optimizer.rescale_grad
    optimizer.rescale_grad = _Rescale(before, factor)
    try:
        yield
    finally:
        optimizer.rescale_grad = before


class _Rescale(float):
    """``own * factor``, whose text is the fixed-point decimal of its float32 value.

    MXNet passes operator attributes as text and misreads exponent notation: about a fifth of small ``rescale_grad``
    came out one ulp off. ``Updater`` reads the two factors.
    """

    factors: tuple[float, float]
    _text: str

    def __new__(cls, own: float, factor: float) -> _Rescale:
        self = super().__new__(cls, own * factor)
        self.factors = own, factor
        self._text = np.format_float_positional(np.float32(own) * np.float32(factor), unique=True, trim="-")
        return self

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__
