"""SGD's, Adam's and LAMB's updates by prepared operators, to the bits of MXNet's own.

On a small network MXNet's Python, which makes an operator's arguments anew in each step, takes longer than the kernels.
A CPU's kernel for many arrays is a third as fast as that for one array if they are large (scripts/dev.py bench update),
so only small arrays share an operator there. On a GPU, where each operator is a launch, ``aggregate_num`` arrays share
one. Adam has no kernel for masters, and LAMB's squares in float16: they update masters by FP32 copies of the gradients.
"""

from __future__ import annotations

from math import prod, sqrt
from operator import is_
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ._mxnet import Prepared, counted_rates, have_equal_counts
from .multi_tensor import FlatCopies, chunks, rounding, widening

_KINDS = (mx.optimizer.SGD, mx.optimizer.Adam, mx.optimizer.LAMB)
# The most elements of an array on a CPU that shares an operator, and the most arrays of one.
_SMALL, _SHARING = 1 << 11, 45
# The most elements of gradients of which FP32 copies exist at a time (64 MiB), if no single gradient has more.
_COPIED = 1 << 24


class _Weight(NamedTuple):
    weight: NDArray
    grad: NDArray
    states: list[NDArray]  # FP32
    master: NDArray | None  # FP32, if weight and gradient are float16

    @property
    def is_known(self) -> bool:
        """Return whether all arrays are dense, and of the dtypes that the operators take."""
        own = "float32" if self.master is None else "float16"
        full = [*self.states, *([] if self.master is None else [self.master])]
        return all(_is_dense(each, own) for each in (self.weight, self.grad)) and all(
            _is_dense(each, "float32") for each in full
        )


class _Operator(NamedTuple):
    run: Prepared
    members: Sequence[int] = ()  # the positions of the weights whose learning rates and decays it takes


class PreparedUpdates:
    """The operators of one device, as long as weights, masters, gradients and states are the same arrays."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._arrays: list[Any] = []
        self._operators: list[_Operator] = []
        self._device = 0
        self._settings: dict[str, str] = {}
        self._rates: tuple[list[float], list[float], int] = [], [], 0

    def update(
        self,
        optimizer: mx.optimizer.Optimizer,
        indices: Sequence[int],
        grads: Sequence[NDArray],
        weights: Sequence[NDArray],
        masters: Mapping[int, NDArray],
        states: Mapping[int, Any],
    ) -> bool:
        """Update the weights, or return False: for other optimizers, dtypes and storage, and where a state is missing,
        as at a first step."""
        if type(optimizer) not in _KINDS or not all(map(states.__contains__, indices)):
            return False
        key = (type(optimizer), _has_momentum(optimizer), optimizer.aggregate_num, tuple(indices))
        own = [states.get(index) for index in indices]
        full = [masters.get(index) for index in indices]
        arrays = [*grads, *weights, *own, *full]
        if key != self._key or not all(map(is_, arrays, self._arrays)):
            lists = [list(state) if isinstance(state, tuple) else [] if state is None else [state] for state in own]
            self._key, self._arrays, self._device = key, arrays, weights[0].ctx.device_id
            self._operators = _operators(optimizer, list(map(_Weight, weights, grads, lists, full)))
            self._settings, self._rates = {}, ([], [], 0)
        if not self._operators or not have_equal_counts(optimizer, indices, self._device):
            return False
        self._set(optimizer, indices, self._operators)
        for operator, _ in self._operators:
            operator()
        return True

    def _set(self, optimizer: mx.optimizer.Optimizer, indices: Sequence[int], operators: Sequence[_Operator]) -> None:
        rates, decays, count = counted_rates(optimizer, indices, self._device)
        if isinstance(optimizer, mx.optimizer.Adam):
            correction = sqrt(1.0 - optimizer.beta2**count) / (1.0 - optimizer.beta1**count)
            rates = [rate * correction for rate in rates]
        settings = {name: str(value) for name, value in _settings(optimizer).items()}
        changed = settings if settings != self._settings else {}
        own = rates, decays, count if isinstance(optimizer, mx.optimizer.LAMB) else 0
        if not changed and own == self._rates:
            return
        self._settings, self._rates = settings, own
        for operator, members in operators:
            if "lr" in operator:
                operator.set(lr=rates[members[0]], wd=decays[members[0]], **changed)
            elif members:
                many: dict[str, list] = {
                    "lrs": rates,
                    "learning_rates": rates,
                    "wds": decays,
                    "step_count": [count] * len(rates),
                }
                lists = {name: [each[k] for k in members] for name, each in many.items() if name in operator}
                operator.set(**lists, **changed)


def _has_momentum(optimizer: mx.optimizer.Optimizer) -> bool:
    return bool(getattr(optimizer, "momentum", 0.0) > 0)


def _settings(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return the attributes that all operators of an update share."""
    shared = {"rescale_grad": optimizer.rescale_grad, "clip_gradient": optimizer.clip_gradient or -1.0}
    if isinstance(optimizer, (mx.optimizer.Adam, mx.optimizer.LAMB)):
        shared.update(beta1=optimizer.beta1, beta2=optimizer.beta2, epsilon=optimizer.epsilon)
    if isinstance(optimizer, mx.optimizer.LAMB):
        bounds = {"lower_bound": optimizer.lower_bound or -1.0, "upper_bound": optimizer.upper_bound or -1.0}
        shared.update(bounds, bias_correction=optimizer.bias_correction)
    return {**shared, "momentum": optimizer.momentum} if _has_momentum(optimizer) else shared


def _operators(optimizer: mx.optimizer.Optimizer, weights: Sequence[_Weight]) -> list[_Operator]:
    """Return the operators of an update, in their order; none if an array suits none of them."""
    is_sgd, is_lamb = isinstance(optimizer, mx.optimizer.SGD), isinstance(optimizer, mx.optimizer.LAMB)
    if is_lamb and optimizer.aggregate_num <= 1:
        return []  # MXNet has other operators for one array
    expected = int(_has_momentum(optimizer)) if is_sgd else 2
    if not all(len(each.states) == expected and each.is_known for each in weights):
        return []
    half = [k for k, each in enumerate(weights) if each.master is not None]
    full = [k for k, each in enumerate(weights) if each.master is None]
    if is_sgd:
        return [*_sgd(weights, full, optimizer), *_sgd_of_masters(weights, half, optimizer)]
    update = _lamb if is_lamb else _adam
    return [*update(weights, full, optimizer), *_of_masters(weights, half, optimizer, update)]


def _sgd(weights: Sequence[_Weight], full: Sequence[int], optimizer: mx.optimizer.SGD) -> Iterator[_Operator]:
    name, settings = f"sgd{'_mom' * (_has_momentum(optimizer))}_update", _settings(optimizer)
    for members in _sharing([weights[k].weight for k in full], full, optimizer.aggregate_num):
        out = [weights[k].weight for k in members]
        inputs = [array for k in members for array in (weights[k].weight, weights[k].grad, *weights[k].states)]
        if len(members) == 1 and _has_momentum(optimizer):  # without momentum the operator for one rounds otherwise
            yield _Operator(Prepared(name, inputs, out, lr=0.0, wd=0.0, **settings), members)
        else:
            yield _Operator(Prepared(f"multi_{name}", inputs, out, **_many(members), **settings), members)


def _sgd_of_masters(
    weights: Sequence[_Weight], half: Sequence[int], optimizer: mx.optimizer.SGD
) -> Iterator[_Operator]:
    name, settings = f"multi_mp_sgd{'_mom' * (_has_momentum(optimizer))}_update", _settings(optimizer)
    for members in chunks(half, max(optimizer.aggregate_num, 1)):
        some = [weights[k] for k in members]
        inputs = [array for w in some for array in (w.weight, w.grad, *w.states, w.master)]
        yield _Operator(Prepared(name, inputs, [w.weight for w in some], **_many(members), **settings), members)


def _adam(weights: Sequence[_Weight], full: Sequence[int], optimizer: mx.optimizer.Adam) -> Iterator[_Operator]:
    settings = _settings(optimizer)
    for k in full:
        each = weights[k]
        inputs = [each.weight, each.grad, *each.states]
        yield _Operator(Prepared("adam_update", inputs, [each.weight], lr=0.0, wd=0.0, **settings), [k])


def _lamb(weights: Sequence[_Weight], full: Sequence[int], optimizer: mx.optimizer.LAMB) -> Iterator[_Operator]:
    settings = _settings(optimizer)
    for members in chunks(full, optimizer.aggregate_num):
        some, zeros = [weights[k] for k in members], [0.0] * len(members)
        inputs = [array for w in some for array in (w.weight, w.grad, *w.states)]
        lists = {"num_tensors": len(some), "learning_rates": zeros, "wds": zeros, "step_count": [1] * len(some)}
        yield _Operator(Prepared("_multi_lamb_update", inputs, [w.weight for w in some], **lists, **settings), members)


def _of_masters(
    weights: Sequence[_Weight], half: Sequence[int], optimizer: mx.optimizer.Optimizer, update: Callable
) -> Iterator[_Operator]:
    """Yield the operators that ``update`` masters by FP32 copies of the gradients, and round them."""
    if not half:
        return
    parts = parts_of([weights[k].grad for k in half])
    at_once = optimizer.aggregate_num > 0 or weights[half[0]].grad.ctx.device_type == "gpu"
    sizes = [sum(weights[half[at]].grad.size for at in part) for part in parts]
    memory = mx.nd.empty(max(sizes), weights[half[0]].grad.ctx)
    for part, size in zip(parts, sizes):
        some = [half[at] for at in part]
        grads = [weights[k].grad for k in some]
        copies = FlatCopies.like(grads, memory[:size])
        yield from map(_Operator, widening(grads, copies, at_once=at_once))
        full = {k: weights[k]._replace(weight=weights[k].master, grad=copy) for k, copy in zip(some, copies.each)}
        yield from update(full, some, optimizer)
        triples = [(weights[k].master, weights[k].weight, weights[k].grad) for k in some]
        yield from map(_Operator, rounding(triples, at_once=at_once))


def _many(members: Sequence[int]) -> dict[str, Any]:
    return {"num_weights": len(members), "lrs": [0.0] * len(members), "wds": [0.0] * len(members)}


def _is_dense(array: Any, dtype: str) -> bool:
    return isinstance(array, NDArray) and array.stype == "default" and np.dtype(array.dtype).name == dtype


def _sharing(arrays: Sequence[NDArray], positions: Sequence[int], aggregate_num: int) -> Iterator[Sequence[int]]:
    """Divide the positions of FP32 arrays of one device by the operators that update them."""
    if not arrays or arrays[0].ctx.device_type == "gpu":
        return chunks(positions, max(aggregate_num, 1))
    # The kernel takes the time of its largest array for each.
    sizes = dict(zip(positions, (array.size for array in arrays)))
    by_size = sorted(positions, key=lambda k: -sizes[k])
    alone = [k for k in by_size if sizes[k] > _SMALL]
    return iter([*([k] for k in alone), *chunks(by_size[len(alone) :], _SHARING)])


def parts_of(grads: Sequence[NDArray]) -> list[range]:
    """Divide the positions of gradients into ranges, each with at most ``_COPIED`` elements, or with one gradient."""
    parts, size = [range(0)], 0
    for k, grad in enumerate(grads):
        own = prod(grad.shape)  # a row-sparse array has no ``size``
        size += own
        if size > _COPIED and parts[-1]:
            parts.append(range(k, k))
            size = own
        parts[-1] = range(parts[-1].start, k + 1)
    return parts
