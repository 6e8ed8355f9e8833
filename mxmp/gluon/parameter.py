"""A Parameter that computes in float16 and is FP32 to everyone else, and the conversions of a Parameter's nets."""

from __future__ import annotations

from typing import Any, Collection, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from ..step._mxnet import is_called_by_user
from ..step.masters import MasterPair, Weight, assign, take_over
from . import _mxnet

__all__ = [
    "BFLOAT16",
    "LowParameter",
    "conversions_of",
    "exposed_pairs",
    "is_scaling",
    "master_at",
    "replace_conversions",
    "store_full",
    "store_low",
    "weight_of",
]


BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


class LowParameter(gluon.Parameter):
    """A Parameter that computes in float16 and is FP32 to everyone else.

    ``data()`` and ``grad()`` are float16, ``masters()`` FP32. ``dtype`` says float32, and so do
    ``set_data``, ``save_parameters``, ``load_parameters`` and ``export``. A write into ``data()``
    (weight clipping, moving averages) reaches the master at the next update or save. Only a parameter whose
    ``data()`` a user has called is compared with its master there, since MXNet does not notify of writes.
    """

    _data: Any
    _masters: list[NDArray]
    _low_dtype: str
    _exposed = False

    def masters(self) -> list[NDArray]:
        """Return the FP32 values, one array per context, with what was written into ``data()`` taken over."""
        self._check_and_get(self._data, list)
        for pair in self.exposed_pairs():
            take_over(*pair)
        return self._masters

    def exposed_pairs(self) -> list[MasterPair]:
        """Return each master with its float16 array, if a user may have written into that; otherwise none."""
        return list(map(MasterPair, self._masters, self._data)) if self._exposed else []

    def master(self, device: int) -> NDArray:
        """Return the FP32 value on one context, by its number, as the last update or ``masters`` left it."""
        return self._masters[device]

    def list_data(self) -> list[NDArray]:
        """Return the float16 arrays, one per context."""
        self._exposed = self._exposed or is_called_by_user()
        return super().list_data()

    def data(self, ctx: mx.Context | None = None) -> NDArray:
        """Return the float16 array on one context.

        Raises ``ValueError`` when an unconverted block calls it, which cannot compute with float16.
        """
        reader = _mxnet.unconverted_reader()
        if reader is not None:
            raise ValueError(
                f"Parameter {self.name!r} is stored in {self._low_dtype} for a converted net and shared with "
                f"{reader.name!r}, which is not converted and computes in FP32: mxmp.convert that net too, or keep "
                "the parameters in FP32 with Policy(params='float32')"
            )
        self._exposed = self._exposed or is_called_by_user()
        return super().data(ctx)

    def __reduce__(self) -> Any:
        """Return what makes a copy; a class that ``store_low`` made is found by the class that it was made from."""
        return _empty, (_full_class(type(self)),), vars(self)

    def set_data(self, data: NDArray) -> None:
        """Set the value on all contexts: FP32 into the masters, rounded into ``data()``."""
        if self._data is None:
            super().set_data(data)
            return
        self.shape = data.shape
        assign(data, self._masters, self._data)

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
        self._make_masters()

    def _reduce(self) -> NDArray:
        masters = [m.copyto(mx.cpu()) for m in self.masters()]
        if len(masters) == 1:
            return masters[0]
        mean = mx.nd.add_n(*(master.as_nd_ndarray() for master in masters)) / len(masters)
        return mean.as_np_ndarray() if isinstance(masters[0], mx.np.ndarray) else mean

    def store_low(self, dtype: str) -> None:
        """Begin to compute in ``dtype``; the values so far become the masters. Call once, after the class changed."""
        self._low_dtype = dtype
        if self._data is not None:
            self._make_masters()

    def store_full(self) -> None:
        """Become an FP32 Parameter of the class that it was before, with the masters' values."""
        masters = self.masters() if self._data is not None else None
        self.__class__ = _full_class(type(self))
        for name in ("_low_dtype", "_masters", "_exposed"):
            self.__dict__.pop(name, None)
        if masters is not None:
            with autograd.pause():
                _mxnet.set_arrays(self, masters)

    def _make_masters(self) -> None:
        """Make the arrays that are now in ``_data`` the masters, and float16 copies the data."""
        self._exposed = False
        with autograd.pause():
            self._masters = [a.detach() for a in self._data]
            self._data = [m.astype(self._low_dtype) for m in self._masters]
            self._init_grad()


def store_low(param: gluon.Parameter, dtype: str) -> None:
    """Turn ``param`` into a LowParameter in place: references, sharing and settings stay.

    Raises ``TypeError`` where MXNet's own Trainer holds it, which would update float16 weights without the master.
    """
    if not isinstance(param, LowParameter):
        _check_trainer(param, _mxnet.trainer_of(param), dtype)
        param.__class__ = _low_class(type(param))
        param.store_low(dtype)


def store_full(param: gluon.Parameter) -> None:
    """Undo ``store_low``: make ``param`` FP32, with the master's value."""
    if isinstance(param, LowParameter):
        param.store_full()


# Global: one class for each class of Parameters, so that copies are of the same.
_low_classes: dict[type, Any] = {gluon.Parameter: LowParameter}


def _low_class(kind: type) -> Any:
    return _low_classes.get(kind) or _low_classes.setdefault(kind, type(kind.__name__, (LowParameter, kind), {}))


def _full_class(low: type) -> type:
    return gluon.Parameter if low is LowParameter else low.__mro__[low.__mro__.index(LowParameter) + 1]


def _empty(kind: type) -> gluon.Parameter:
    return object.__new__(_low_class(kind))


def conversions_of(params: Iterable[gluon.Parameter]) -> list[Any]:
    """Return the NetConversions of all nets that these parameters belong to, oldest first."""
    return list(dict.fromkeys(found for param in params for found in getattr(param, "mxmp_conversions", ())))


def replace_conversions(param: gluon.Parameter, old: Collection[Any], new: Collection[Any] = ()) -> None:
    """Replace conversions of a parameter; if none of the earlier ones is kept, store it in FP32 again."""
    before = conversions_of([param])
    kept = [conversion for conversion in before if conversion not in old]
    if before and not kept:
        store_full(param)
        del param.mxmp_conversions
    if kept or new:
        param.mxmp_conversions = (*kept, *new)


def is_scaling(trainer: Any) -> bool:
    """Return whether a Trainer scales losses and updates FP32 masters."""
    return getattr(trainer, "updates_masters", False)


def _check_trainer(param: gluon.Parameter, trainer: gluon.Trainer | None, dtype: str) -> None:
    if trainer is not None and not is_scaling(trainer):
        raise TypeError(
            f"Parameter {param.name!r} is stored in {dtype} with an FP32 master, which a "
            f"{type(trainer).__module__}.{type(trainer).__name__} would not update: use mxmp.Trainer, or keep the "
            "parameters in FP32 with Policy(params='float32')"
        )


def master_at(params: Sequence[gluon.Parameter], index: int, device: int) -> NDArray | None:
    """Return the FP32 master of ``params[index]`` on its ``device``-th context, None where it has none."""
    param = params[index]
    return param.master(device) if isinstance(param, LowParameter) else None


def exposed_pairs(params: Iterable[gluon.Parameter]) -> list[MasterPair]:
    """Return the masters with the float16 arrays of initialized parameters into which a user may have written."""
    return [pair for param in params if isinstance(param, LowParameter) for pair in param.exposed_pairs()]


def weight_of(param: gluon.Parameter) -> Weight:
    """Return the parameter as files and other workers see it.

    One that was never initialized ignores what is assigned to it.
    """
    ready = _mxnet.is_initialized(param)
    masters = param.masters() if ready and isinstance(param, LowParameter) else None
    assign = param.set_data if ready or _mxnet.is_deferred(param) else lambda value: None
    return Weight(param.name, param.shape, _mxnet.arrays(param), masters, assign)
