"""SGD's and Adam's updates of FP32 weights by prepared operators, to the bits of MXNet's own.

On a small network MXNet's Python, which makes an operator's arguments anew in each step, takes longer than the kernels.
A CPU's kernel for many arrays is a third as fast as that for one array if they are large (scripts/dev.py bench update),
so only small arrays share an operator there. On a GPU, where each operator is a launch, those share one that
``aggregate_num`` lets.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ._mxnet import Prepared, counted_rates, have_equal_counts

# The most elements of an array on a CPU that shares an operator, and the most arrays of one.
_SMALL, _SHARING = 1 << 11, 45


class PreparedUpdates:
    """The operators of one device, as long as weights, gradients and states are the same arrays."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._arrays: list[Any] = []
        self._operators: list[tuple[list[int], Prepared]] | None = None
        self._settings: dict[str, str] = {}
        self._rates: tuple[list[float], list[float]] = [], []

    def update(
        self,
        optimizer: mx.optimizer.Optimizer,
        indices: Sequence[int],
        grads: Sequence[NDArray],
        weights: Sequence[NDArray],
        states: Mapping[int, Any],
    ) -> bool:
        """Update the weights, or return False: for other optimizers, dtypes and storage, and for arrays that are other
        ones than in the call before, as each is at a first step."""
        if type(optimizer) not in (mx.optimizer.SGD, mx.optimizer.Adam):
            return False
        momentum = getattr(optimizer, "momentum", 0.0) > 0
        key = (type(optimizer), momentum, optimizer.aggregate_num, tuple(indices))
        own = [states.get(index) for index in indices]
        arrays = [*grads, *weights, *own]
        if key != self._key or not all(map(is_, arrays, self._arrays)):
            self._key, self._arrays, self._operators = key, arrays, None
            return False
        if self._operators is None:
            self._device = weights[0].ctx.device_id
            self._operators = list(_operators(optimizer, momentum, grads, weights, own))
            self._settings, self._rates = {}, ([], [])
        if not self._operators or not have_equal_counts(optimizer, indices, self._device):
            return False
        self._run(optimizer, indices, self._operators)
        return True

    def _run(
        self,
        optimizer: mx.optimizer.Optimizer,
        indices: Sequence[int],
        operators: Sequence[tuple[list[int], Prepared]],
    ) -> None:
        rates, decays, count = counted_rates(optimizer, indices, self._device)
        if isinstance(optimizer, mx.optimizer.Adam):
            correction = math.sqrt(1.0 - optimizer.beta2**count) / (1.0 - optimizer.beta1**count)
            rates = [rate * correction for rate in rates]
        settings = {name: str(value) for name, value in _settings(optimizer).items()}
        if settings != self._settings:
            self._settings = settings
            for _, operator in operators:
                operator.set(**settings)
        if (rates, decays) != self._rates:
            self._rates = rates, decays
            for members, operator in operators:
                if "lr" in operator:
                    operator.set(lr=rates[members[0]], wd=decays[members[0]])
                else:
                    operator.set(lrs=[rates[k] for k in members], wds=[decays[k] for k in members])
        for _, operator in operators:
            operator()


def _settings(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return the attributes that all operators of an update share."""
    shared = {"rescale_grad": optimizer.rescale_grad, "clip_gradient": optimizer.clip_gradient or -1.0}
    if isinstance(optimizer, mx.optimizer.Adam):
        return {**shared, "beta1": optimizer.beta1, "beta2": optimizer.beta2, "epsilon": optimizer.epsilon}
    return {**shared, "momentum": optimizer.momentum} if optimizer.momentum > 0 else shared


def _operators(
    optimizer: mx.optimizer.Optimizer,
    momentum: bool,
    grads: Sequence[NDArray],
    weights: Sequence[NDArray],
    states: Sequence[Any],
) -> Iterator[tuple[list[int], Prepared]]:
    """Yield operators and the positions of the weights that each updates; none if one of the arrays suits none."""
    is_adam = isinstance(optimizer, mx.optimizer.Adam)
    own = [state if is_adam else [state] * momentum for state in states]
    groups = [[weight, grad, *(state or ())] for weight, grad, state in zip(weights, grads, own)]
    expected = 4 if is_adam else 2 + momentum
    if not all(len(group) == expected and all(map(_suits, group)) for group in groups):
        return
    settings = _settings(optimizer)
    name = "adam_update" if is_adam else f"sgd{'_mom' * momentum}_update"
    for members in [[k] for k in range(len(groups))] if is_adam else _sharing(weights, optimizer.aggregate_num):
        inputs = [array for k in members for array in groups[k]]
        out = [weights[k] for k in members]
        if is_adam or (momentum and len(members) == 1):  # without momentum the one operator rounds otherwise
            yield members, Prepared(name, inputs, out, lr=0.0, wd=0.0, **settings)
        else:
            many = {"num_weights": len(members), "lrs": [0.0] * len(members), "wds": [0.0] * len(members)}
            yield members, Prepared(f"multi_{name}", inputs, out, **many, **settings)


def _suits(array: Any) -> bool:
    return isinstance(array, NDArray) and array.stype == "default" and array.dtype == np.float32


def _sharing(weights: Sequence[NDArray], aggregate_num: int) -> list[list[int]]:
    """Divide the positions of weights of one device by the operators that update them."""
    if weights[0].ctx.device_type == "gpu":
        alone, rest, number = [], list(range(len(weights))), max(aggregate_num, 1)
    else:
        # The kernel takes the time of its largest array for each.
        by_size = sorted(range(len(weights)), key=lambda k: -weights[k].size)
        alone = [k for k in by_size if weights[k].size > _SMALL]
        rest, number = by_size[len(alone) :], _SHARING
    return [*([k] for k in alone), *(rest[start : start + number] for start in range(0, len(rest), number))]
