"""The update: every optimizer of MXNet on FP32 masters, with the loss scale divided out on the way."""

from __future__ import annotations

import os
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..messages import keywords_of
from ..precision._mxnet import exact_text
from .gradients import Gradient, largest_on_cpu
from .masters import MasterPair, Masters, round_master
from .multi_tensor import round_all, widen_all
from .optimizer_data import InitialOptimizer
from .prepared_updates import PreparedUpdates, parts_of

_ALIASES = {"lr": "learning_rate", "weight_decay": "wd", "eps": "epsilon"}


def check_optimizer(optimizer: Any, optimizer_params: Any) -> None:
    """Raise ``ValueError`` if MXNet has no such optimizer, ``TypeError`` if its class takes no such parameter."""
    registered = mx.optimizer.Optimizer.opt_registry
    if isinstance(optimizer, str):
        if optimizer.lower() not in registered:
            near = get_close_matches(optimizer.lower(), registered, n=2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; there are {', '.join(registered)}"
            raise ValueError(f"Cannot find optimizer {optimizer}{hint}")
    elif not isinstance(optimizer, mx.optimizer.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise ValueError(f"optimizer must be a name such as 'sgd' or an object such as mx.optimizer.SGD(), got {got}")
    try:
        given = dict(optimizer_params or {})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"optimizer_params must be a dict, such as {{'learning_rate': 0.1}}, got {optimizer_params!r}"
        ) from error
    kind = registered[optimizer.lower()] if isinstance(optimizer, str) else None
    if kind is not None and kind.__module__.startswith("mxnet."):  # another may read what it likes
        known = keywords_of(kind)
        for name in given:
            if name not in known:
                near = [_ALIASES[name]] if name in _ALIASES else get_close_matches(str(name), known, n=1)
                others = ", ".join(sorted({*known} - {"self", "args", "kwargs"}))
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {others}"
                raise TypeError(f"the optimizer {kind.__name__} takes no {name!r}; {hint}")


class Update(NamedTuple):
    """The weight of one parameter on one device, and the gradient to update it by."""

    index: int  # type: ignore[assignment]  # of the parameter in the optimizer
    device: int  # index in the Trainer's or Module's contexts
    name: str
    weight: NDArray  # float16 if the parameter has an FP32 master
    grad: NDArray  # in the weight's dtype; contains the loss scale, unless ``unscale`` was called
    masters: Masters | None = None

    @property
    def gradient(self) -> Gradient:
        return Gradient(self.name, self.grad.as_nd_ndarray())


def exposed_pairs(updates: Sequence[Update]) -> list[MasterPair]:
    """Return the arrays that must be compared with their masters before the update, as a user may have them."""
    exposed = ((u, u.masters) for u in updates if u.masters is not None and u.masters.exposed)
    return [MasterPair(masters[u.device], u.weight) for u, masters in exposed]


def _masters_by_index(updates: Sequence[Update]) -> dict[int, NDArray]:
    return {u.index: u.masters[u.device].as_nd_ndarray() for u in updates if u.masters is not None}


class Updater(mx.optimizer.Updater):
    """MXNet's Updater for one device, which updates the FP32 master where a weight has one, and rounds it to float16.
    It is called within ``rescaled``, so that the optimizer divides the loss scale out itself, in FP32, except for those
    that ``_needs_true_gradients``. All states are those of FP32 weights."""

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        super().__init__(optimizer)
        self.states: dict[int, Any]
        self._prepared = PreparedUpdates()

    def __call__(self, index: Any, grad: Any, weight: Any, masters: Mapping[int, NDArray] | None = None) -> None:
        """Update weights, or their FP32 ``masters`` by index where there are some, and round these."""
        if not isinstance(index, (list, tuple)):
            index, grad, weight = [index], [grad], [weight]
        # MXNet's optimizers are written for mx.nd; an array of mx.np and its view share their memory.
        indices, grads, weights = index, *([array.as_nd_ndarray() for array in each] for each in (grad, weight))
        masters = masters or {}
        # States that were loaded wait on another device until MXNet's Updater moves them.
        is_ready = not self._needs_true_gradients() and all(self.states_synced.get(i, True) for i in indices)
        if is_ready and self._prepared.update(self.optimizer, indices, grads, weights, masters, self.states):
            return
        if masters and self._multi_precision_is_exact(indices, weights, masters):
            with self._as_multi_precision(masters):
                super().__call__(list(indices), grads, weights)
            return
        for part in parts_of(grads) if masters or self._needs_true_gradients() else [range(len(grads))]:
            some = ([each[k] for k in part] for each in (indices, grads, weights))
            self._update_by_copies(masters, *some)

    def _update_by_copies(
        self,
        masters: Mapping[int, NDArray],
        indices: Sequence[int],
        grads: Sequence[NDArray],
        weights: Sequence[NDArray],
    ) -> None:
        """Update weights, or their masters by FP32 copies of the gradients, and round these masters."""
        with_master = [k for k, i in enumerate(indices) if i in masters]
        half_grads = [grads[k] for k in with_master]
        at_once = self.aggregate_updates or weights[0].ctx.device_type == "gpu"  # one operator for every 60 arrays
        full_grads = widen_all(half_grads) if at_once else [g.astype("float32") for g in half_grads]
        replaced = dict(zip(with_master, full_grads))
        with self._true_gradients([replaced.get(k, grad) for k, grad in enumerate(grads)]) as true:
            self._update(indices, true, [masters.get(i, w) for i, w in zip(indices, weights)])
        if at_once:
            round_all([(masters[indices[k]], weights[k], grads[k]) for k in with_master])
        else:
            for k in with_master:
                round_master(masters[indices[k]], weights[k])

    def _update(self, indices: Sequence[int], grads: Sequence[NDArray], weights: Sequence[NDArray]) -> None:
        """Update ``weights``, or the masters that stand for them, in place, to the same bits as MXNet's Updater."""
        kind = type(self.optimizer)
        by_momentum = kind is mx.optimizer.SGD and self.optimizer.momentum > 0
        if by_momentum or kind is mx.optimizer.Adam:
            new = [k for k, index in enumerate(indices) if index not in self.states]
            for k in (new[at] for at in largest_on_cpu([weights[k] for k in new], _LARGE)):
                if weights[k].dtype == np.float32:
                    first = _zeros_apart(weights[k], 1)
                    self.states[indices[k]] = first if by_momentum else (first, _zeros_apart(weights[k], 2))
                    self.states_synced[indices[k]] = True
        super().__call__(list(indices), list(grads), list(weights))

    def _multi_precision_is_exact(
        self, indices: Sequence[int], weights: Sequence[NDArray], masters: Mapping[int, NDArray]
    ) -> bool:
        """Return whether ``multi_precision`` kernels, which update master and weight at once, give FP32's bits."""
        if type(self.optimizer) not in _MASTER_KERNELS or self._needs_true_gradients():
            return False
        return all((w.dtype == np.float16) == (i in masters) for i, w in zip(indices, weights))

    @contextmanager
    def _as_multi_precision(self, masters: Mapping[int, NDArray]) -> Iterator[None]:
        """Put masters into the states within the ``with`` block, as ``multi_precision`` kernels expect."""
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
        """Return whether the optimizer must get unscaled gradients, as it may not divide the loss scale out."""
        rescale = self.optimizer.rescale_grad
        scaled = getattr(rescale, "factors", (rescale, 1.0))[1] != 1.0
        # Code from outside MXNet may not read ``rescale_grad`` at all; below 1e-10 MXNet loses digits of it.
        inexact = _is_users_own(self.optimizer) or abs(rescale) < _SMALLEST_RESCALE
        # An LBSGD that takes norms or sums of gradients does so before it multiplies by ``rescale_grad``.
        raw = isinstance(self.optimizer, mx.optimizer.LBSGD) and (
            self.optimizer.batch_scale > 1 or self.optimizer.warmup_strategy == "lars"
        )
        return raw or (scaled and inexact)

    @contextmanager
    def _true_gradients(self, grads: Sequence[NDArray]) -> Iterator[list[NDArray]]:
        """Yield ``grads``, or unscaled copies if the optimizer needs those; ``rescale_grad`` is then the user's own."""
        if not self._needs_true_gradients():
            yield list(grads)
            return
        rescale = self.optimizer.rescale_grad
        self.optimizer.rescale_grad, factor = getattr(rescale, "factors", (rescale, 1.0))
        try:
            yield [g * factor for g in grads]
        finally:
            self.optimizer.rescale_grad = rescale


# The elements of a CPU's array whose states are placed by hand.
_LARGE = 1 << 16
_OFFSET = 256  # elements
# Not LAMB, LARS and LBSGD: their kernels take norms of the float16 arrays, and on a CPU square in float16.
_MASTER_KERNELS = (mx.optimizer.SGD, mx.optimizer.NAG)
# SGLD draws noise; Nadam's schedule and LBSGD's sums of gradients are the optimizer's, not a device's.
_NOT_PER_DEVICE = (mx.optimizer.SGLD, mx.optimizer.Nadam, mx.optimizer.LBSGD)


def _zeros_apart(weight: NDArray, number: int) -> NDArray:
    """Return zeros in the shape and dtype of ``weight``, ``256 * number`` elements into a new array."""
    # All large arrays of MXNet's begin at the same offset in a page of memory. At some distances from one another
    # (2**28 bytes is one) an AMD core's L1 cache confuses two of them, and an update takes several times as long.
    offset = _OFFSET * number
    return mx.nd.zeros(weight.size + offset, ctx=weight.ctx, dtype=weight.dtype)[offset:].reshape(weight.shape)


class Updaters(List[Updater]):
    """One Updater per device, all of the same optimizer; ``initial`` records it as it was made."""

    def __init__(self, optimizer: mx.optimizer.Optimizer, num_devices: int) -> None:
        super().__init__(Updater(optimizer) for _ in range(num_devices))
        self.optimizer = optimizer
        self.initial = InitialOptimizer.of(optimizer)

    def apply(self, updates: Sequence[Update], factor: float, *, reduced: bool) -> None:
        """Update all weights by gradients times ``factor``: that of clipping, over the loss scale. Does not wait.
        ``reduced``: the gradients were summed, so a weight must stay the same on all devices, too."""
        # An optimizer that could update devices differently updates one of them, and the result is copied.
        once = {update.index: update for update in reversed(updates)} if reduced and self._updates_can_differ() else {}
        with rescaled(self.optimizer, factor), _aggregated(self.optimizer, updates):
            for k, updater in enumerate(self):
                mine = [u for u in updates if u.device == k and once.get(u.index, u) is u]
                # MXNet updates weights one by one where one of those that it updates at once has a sparse gradient.
                sparse = [u for u in mine if isinstance(u.grad, BaseSparseNDArray)]
                dense = [u for u in mine if not isinstance(u.grad, BaseSparseNDArray)] if sparse else mine
                for some in (dense, sparse):
                    if some:
                        arrays = [u.grad for u in some], [u.weight for u in some]
                        updater([u.index for u in some], *arrays, _masters_by_index(some))
        for update in updates:
            source = once.get(update.index, update)
            if source is not update:
                source.weight.copyto(update.weight)
            if update.masters is not None:
                update.masters.before = None  # the weights are other ones now
                if source is not update:
                    update.masters[source.device].copyto(update.masters[update.device])

    def _updates_can_differ(self) -> bool:
        optimizer = self.optimizer
        return len(self) > 1 and (_is_users_own(optimizer) or isinstance(optimizer, _NOT_PER_DEVICE))

    def set_states(self, states: Mapping[int, Any], contexts: Sequence[mx.Context], place: Callable) -> None:
        """Replace the states of every Updater by copies of ``states``, by index, which ``place(state, ctx)`` makes."""
        for updater, ctx in zip(self, contexts):
            updater.states = {index: place(state, ctx) for index, state in states.items()}
            updater.states_synced = dict.fromkeys(updater.states, True)


# MXNet reads operator attributes from text and keeps 19 decimals: 10 zeros and an FP32's 9 digits.
_SMALLEST_RESCALE = 1e-10


def _is_users_own(optimizer: mx.optimizer.Optimizer) -> bool:
    return not type(optimizer).__module__.startswith("mxnet.")


@contextmanager
def rescaled(optimizer: mx.optimizer.Optimizer, factor: float) -> Iterator[None]:
    """Multiply ``rescale_grad`` by ``factor``, clipping over the loss scale, within the ``with`` block."""
    before = optimizer.rescale_grad
    optimizer.rescale_grad = _Rescale(before, factor)
    try:
        yield
    finally:
        optimizer.rescale_grad = before


# MXNet's LAMB updates as many weights at once; SGD's kernel takes up to 60.
_AGGREGATED = 45


@contextmanager
def _aggregated(optimizer: mx.optimizer.Optimizer, updates: Sequence[Update]) -> Iterator[None]:
    """Let SGD update 45 weights at once on a GPU within the ``with`` block, not 4, unless the user has set a number."""
    before = optimizer.aggregate_num
    on_gpu = any(update.weight.ctx.device_type == "gpu" for update in updates[:1])
    chosen = before != 4 or "MXNET_OPTIMIZER_AGGREGATION_SIZE" in os.environ
    if type(optimizer) is mx.optimizer.SGD and on_gpu and not chosen:
        optimizer.aggregate_num = _AGGREGATED
    try:
        yield
    finally:
        optimizer.aggregate_num = before


class _Rescale(float):
    """The product ``own * factor`` for ``rescale_grad``, whose text is its FP32 value without an exponent."""

    factors: tuple[float, float]
    _text: str

    def __new__(cls, own: float, factor: float) -> _Rescale:
        self = super().__new__(cls, own * factor)
        self.factors = own, factor
        self._text = exact_text(np.float32(own) * np.float32(factor))
        return self

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__
