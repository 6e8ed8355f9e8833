"""FP32 masters: a float16 copy to compute with, an FP32 one to update, save, load and set.

Updates smaller than 2**-11 of a weight vanish in float16 ("Mixed Precision Training", ICLR 2018,
section 3.1). MXNet's ``multi_precision`` keeps the FP32 copy in the optimizer's state, made from the
already rounded weight, and files then hold float16. Here the master belongs to the weight: the
optimizer updates it as it updates any FP32 weight (the same bits as ``multi_precision`` for every
optimizer of MXNet 1.9.1), and what is saved or loaded is FP32 with no trainer in sight.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["LowParameter", "Updater", "master_of", "share_initial", "store_full", "store_low"]


class LowParameter(gluon.Parameter):
    """A Parameter that computes in float16 and is FP32 to everyone else.

    ``data()`` and ``grad()`` are float16, ``masters()`` FP32. ``dtype`` says float32, and so do
    ``set_data``, ``save_parameters``, ``load_parameters`` and ``export``. A write into ``data()``
    (weight clipping, moving averages) reaches the master at the next update or save.
    """

    _data: Any
    _masters: list[NDArray]
    _low_dtype: str

    def masters(self) -> list[NDArray]:
        """The FP32 values, one array per context, with what was written into ``data()`` taken over."""
        low = self._check_and_get(self._data, list)
        for master, data in zip(self._masters, low):
            take_over(master, data)
        return self._masters

    def set_data(self, data: NDArray) -> None:
        """Set the value on all contexts: FP32 into the masters, rounded into ``data()``."""
        if self._data is None:
            super().set_data(data)
            return
        self.shape = data.shape
        for master, low in zip(self._masters, self._data):
            master[:] = data
            publish(master, low)

    def _set_trainer(self, trainer: gluon.Trainer | None) -> None:
        _check_trainer(self, trainer, self._low_dtype)
        super()._set_trainer(trainer)

    def cast(self, dtype: str) -> None:
        if dtype not in ("float32", np.float32):
            raise ValueError(
                f"Parameter {self.name!r} has an FP32 master and cannot be cast to {dtype}: call "
                "mxmp.restore(net) first, or convert with another policy"
            )

    def _init_impl(self, data: NDArray, ctx_list: Sequence[mx.Context]) -> None:
        super()._init_impl(data, ctx_list)
        self._split()

    def _reduce(self) -> NDArray:
        masters = [m.copyto(mx.cpu()) for m in self.masters()]
        return masters[0] if len(masters) == 1 else mx.nd.add_n(*masters) / len(masters)

    def _split(self) -> None:
        """Make the arrays that are now in ``_data`` the masters, and float16 copies the data."""
        with autograd.pause():
            self._masters = [a.detach() for a in self._data]
            self._data = [m.astype(self._low_dtype) for m in self._masters]
            self._init_grad()


def store_low(param: gluon.Parameter, dtype: str) -> None:
    """Turn ``param`` into a LowParameter in place: references, sharing and settings stay.

    Raises
    ------
    TypeError
        A plain ``gluon.Trainer`` holds the parameter: it would update float16 weights without the
        master.
    """
    if isinstance(param, LowParameter):
        return
    _check_trainer(param, param._trainer, dtype)
    kind = type(param)
    param.__class__ = LowParameter if kind is gluon.Parameter else type(kind.__name__, (LowParameter, kind), {})
    param._low_dtype = dtype
    if param._data is not None:
        param._split()


def _check_trainer(param: gluon.Parameter, trainer: gluon.Trainer | None, dtype: str) -> None:
    if trainer is not None and not getattr(trainer, "updates_masters", False):
        raise TypeError(
            f"Parameter {param.name!r} is stored in {dtype} with an FP32 master, which a "
            f"{type(trainer).__module__}.{type(trainer).__name__} would not update: use mxmp.Trainer, or keep the "
            "parameters in FP32 with Policy(params='float32')"
        )


def store_full(param: gluon.Parameter) -> None:
    """Undo ``store_low``: an FP32 Parameter with the master's values."""
    if not isinstance(param, LowParameter):
        return
    masters = param.masters() if param._data is not None else None
    bases = type(param).__mro__
    param.__class__ = gluon.Parameter if bases[0] is LowParameter else bases[bases.index(LowParameter) + 1]
    del param._low_dtype
    if masters is not None:
        del param._masters
        with autograd.pause():
            param._data = masters
            param._init_grad()


def master_of(param: gluon.Parameter, device_index: int) -> NDArray | None:
    """The FP32 master of ``param`` on its ``device_index``-th context, None where it has none."""
    return param._masters[device_index] if isinstance(param, LowParameter) else None


def take_over(master: NDArray, low: NDArray) -> None:
    """Where ``low`` is no longer the rounded master, someone wrote into it: that value holds."""
    with autograd.pause():
        value = mx.nd.Cast(low, dtype="float32")
        rounded = mx.nd.Cast(mx.nd.Cast(master, dtype=low.dtype.__name__), dtype="float32")
        mx.nd.where(rounded == value, master, value, out=master)


def publish(master: NDArray, low: NDArray) -> None:
    """Round the master into the array that computes."""
    with autograd.pause():
        mx.nd.Cast(master, dtype=low.dtype.__name__, out=low)


def share_initial(kvstore: mx.kv.KVStore, masters: dict, arrays: Sequence[NDArray]) -> None:
    """Wait until this worker holds rank 0's values, masters included, before it pushes anything. Synchronizes.

    MXNet broadcasts without waiting, and workers diverged in most runs.

    Parameters
    ----------
    kvstore : KVStore
        Has the ``arrays`` on their way already.
    masters : dict
        From a free key to the masters of one parameter and the arrays that compute with them.
    arrays : sequence of NDArray
        All that must have arrived.
    """
    for key, (full, low) in masters.items():
        kvstore.broadcast(key, full[0], full)
        for master, array in zip(full, low):
            publish(master, array)
    for array in arrays:
        array.wait_to_read()


class Updater(mx.optimizer.Updater):
    """MXNet's Updater that updates the FP32 master, where a weight has one, and rounds it back.

    The loss scale is divided out through the ``rescale_grad`` that ``step.rescaled`` sets; optimizers
    that look at gradients before that get unscaled copies.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    masters : callable
        From a weight's index to its FP32 master or None.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer, masters: Callable[[int], NDArray | None]) -> None:
        super().__init__(optimizer)
        self._master = masters

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update one weight, or lists of indices, gradients and weights."""
        indices, grads, weights = (
            (index, grad, weight) if isinstance(index, (list, tuple)) else ([index], [grad], [weight])
        )
        pairs = [(self._master(i), low) for i, low in zip(indices, weights)]
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
