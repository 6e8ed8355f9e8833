"""A Parameter stored in float16 with FP32 master weights, and the conversions of the nets that have a Parameter."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, Collection, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from ..messages.callers import is_called_by_user
from ..messages.text import class_of
from ..step.masters import Masters, Weight
from . import _mxnet


class LowParameter(gluon.Parameter):
    """A gluon Parameter that is stored in float16, with an FP32 master per context; ``store_low`` gives it this class.
    ``data()`` and ``grad()`` are float16; ``dtype`` and what is set, saved and loaded are FP32. What a user writes into
    ``data()`` (clipping, moving averages) is copied to the master at the next update or save."""

    _data: Any
    _masters: Masters  # empty before the Parameter has its arrays
    _low_dtype: str

    def masters(self) -> Masters:
        """Return the FP32 masters, after copying into them what a user wrote into ``data()``; does not wait."""
        self._check_and_get(self._data, list)
        return self._masters.taken_over(self._data)

    @property
    def held_masters(self) -> Masters:
        """Return the masters without what a user wrote since the last update."""
        return self._masters

    def list_data(self) -> list[NDArray]:
        self._masters.exposed = self._masters.exposed or is_called_by_user()
        return super().list_data()

    def data(self, ctx: mx.Context | None = None) -> NDArray:
        """Return the float16 array; raise ``ValueError`` for an unconverted block, which computes in FP32."""
        reader = _mxnet.reader_in_python()
        if reader is not None and _mxnet.is_redirected(reader):  # ``summary`` runs it so, in FP32
            return self._check_and_get(full_arrays(self), ctx)
        if reader is not None:
            raise ValueError(
                f"Parameter {self.name!r} is stored in {self._low_dtype} for a converted net and shared with "
                f"{reader.name!r}, which is not converted and computes in FP32: mxmp.convert that net too, or keep "
                "the parameters in FP32 with Policy(params='float32'). To predict with it after training, call "
                "mxmp.restore on the converted net first"
            )
        self._masters.exposed = self._masters.exposed or is_called_by_user()
        return super().data(ctx)

    def __reduce__(self) -> Any:
        # ``pickle`` finds a class by its name in a module, and not one that ``_low_class`` made.
        return _empty, (_full_class(type(self)),), vars(self)

    def set_data(self, data: NDArray) -> None:
        """Set the masters to ``data`` (FP32), and the float16 arrays to the rounded values."""
        if self._data is None:
            super().set_data(data)
            return
        self.shape = data.shape
        set_to = self._masters.put_back if is_called_by_user() else self._masters.assign
        set_to(data, self._data)

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
        self._check_and_get(self._data, list)
        return self._masters.mean(self._data)

    def store_low(self, dtype: str) -> None:
        """Make the FP32 arrays the masters; if there are none yet, this follows when the shape is known."""
        self._low_dtype, self._masters = dtype, Masters()
        if self._data is not None:
            self._make_masters()

    def store_full(self) -> None:
        """Become an FP32 Parameter of its former class, with the values of the masters and new gradients of zeros."""
        masters = self.masters() if self._data is not None else None
        self.__class__ = _full_class(type(self))
        del self._low_dtype, self._masters
        if masters is not None:
            with autograd.pause():
                _mxnet.set_arrays(self, list(masters))

    def _make_masters(self) -> None:
        with autograd.pause():
            self._masters = Masters(a.detach() for a in self._data)
            self._data = [m.astype(self._low_dtype) for m in self._masters]
            self._init_grad()


def store_low(param: gluon.Parameter, dtype: str) -> None:
    """Make ``param`` a ``LowParameter`` stored in ``dtype``, in place, unless it is one; its gradients become zero.
    Raises ``TypeError`` if MXNet's own Trainer, which would not update the master, holds it, and ``ValueError`` if it
    holds a recorded result."""
    if not isinstance(param, LowParameter):
        _check_trainer(param, _mxnet.trainer_of(param), dtype)
        if any(map(_mxnet.is_computed, _mxnet.arrays(param))):  # a copy in float16 would end the gradient
            raise ValueError(
                f"Parameter {param.name!r} holds an array that was computed within autograd.record(), which would lose "
                f"its gradient, as this first call of the net stores it in {dtype}: call the net once before, or keep "
                "the parameters in FP32 with Policy(params='float32')"
            )
        param.__class__ = _low_class(type(param))
        param.store_low(dtype)


def overridden(param: gluon.Parameter) -> set[str]:
    """Return which methods and properties of Parameter the user's own class of ``param`` overrides."""
    # Such a Parameter stays in FP32: its methods may read or set the arrays in their own way.
    kinds = [kind for kind in type(param).__mro__ if kind.__module__.partition(".")[0] not in ("mxnet", "mxmp")]
    names = {name for kind in kinds for name in vars(kind) if kind is not object and not name.startswith("__")}
    return names & {*vars(gluon.Parameter)}


def refuse_own_arrays(param: gluon.Parameter) -> None:
    """Raise ``ValueError`` if the user's class of ``param`` overrides what MXNet's Trainer reads arrays by."""
    for name in sorted({"list_data", "list_grad"} & overridden(param)):
        raise ValueError(
            f"{type(param).__name__} {param.name!r} overrides {name}(), which gluon.Trainer reads in its update. An "
            "mxmp.Trainer checks, unscales and applies the arrays that backward writes, so it would pass that method "
            "by. Change gradients between trainer.unscale() and trainer.step(), and weights after step, or use data()"
        )


# Global: the subclass of LowParameter for each class of Parameters; copies of a Parameter must have the same class.
_low_classes: dict[type, Any] = {gluon.Parameter: LowParameter}


def _low_class(kind: type) -> Any:
    """Return the subclass of ``LowParameter`` and of ``kind``, a class of Parameters, whose methods it keeps."""
    return _low_classes.get(kind) or _low_classes.setdefault(kind, type(kind.__name__, (LowParameter, kind), {}))


def _full_class(low: type) -> type:
    """Return the class of Parameters from which ``_low_class`` made the class ``low``."""
    return gluon.Parameter if low is LowParameter else low.__mro__[low.__mro__.index(LowParameter) + 1]


def _empty(kind: type) -> gluon.Parameter:
    return object.__new__(_low_class(kind))


def conversions_of(params: Iterable[gluon.Parameter]) -> list[Any]:
    """Return the conversions of all nets with one of ``params``, in the order of the calls; none of deleted nets."""
    listed = dict.fromkeys(found for param in params for found in getattr(param, "mxmp_conversions", ()))
    return [conversion for conversion in listed if conversion.blocks]


def replace_conversions(old: Collection[Any], new: Mapping[gluon.Parameter, Collection[Any]]) -> None:
    """Remove ``old`` from the conversions that each Parameter lists, and add its new ones.
    If none remains in between, the Parameter is stored in FP32 again: the next graph that reads it decides anew."""
    if not {*conversions_of(new)} <= {*old}:
        gc.collect()  # blocks refer to themselves, so a net that was deleted counts until Python collects such cycles
    for param, added in new.items():
        kept = [conversion for conversion in conversions_of([param]) if conversion not in old]
        if not kept and isinstance(param, LowParameter):
            param.store_full()
        vars(param).pop("mxmp_conversions", None)
        if kept or added:
            param.mxmp_conversions = (*kept, *added)


def is_scaling(trainer: Any) -> bool:
    """Return whether ``trainer`` is an mxmp.Trainer, which scales losses and updates FP32 masters; False for None."""
    return getattr(trainer, "updates_masters", False)


def _check_trainer(param: gluon.Parameter, trainer: gluon.Trainer | None, dtype: str) -> None:
    """Raise ``TypeError`` unless ``trainer`` is an mxmp.Trainer or None: others do not update FP32 masters."""
    if trainer is not None and not is_scaling(trainer):
        raise TypeError(
            f"Parameter {param.name!r} is stored in {dtype} with an FP32 master, which a "
            f"{class_of(trainer)} would not update: use mxmp.Trainer, or keep the "
            "parameters in FP32 with Policy(params='float32')"
        )


def full_arrays(param: gluon.Parameter) -> Sequence[NDArray]:
    """Return the FP32 values of ``param``, one array per context, which may be its own."""
    arrays = _mxnet.arrays(param)
    return param.held_masters.values(arrays) if isinstance(param, LowParameter) else arrays


def set_values(param: gluon.Parameter, value: NDArray) -> None:
    """Set the data of ``param``, of ``mx.np`` or not as they are, or as they will be made."""
    arrays = _mxnet.arrays(param)
    param.set_data(_mxnet.of_kind(value, _mxnet.is_numpy(arrays[0]) if arrays else mx.util.is_np_array()))


def weight_of(param: gluon.Parameter) -> Weight:
    """Return ``param`` as a ``Weight``, after copying into its masters what a user wrote into ``data()``."""
    ready = _mxnet.is_initialized(param)
    masters = param.masters() if ready and isinstance(param, LowParameter) else None
    assign = partial(set_values, param) if ready or _mxnet.is_deferred(param) else lambda value: None
    return Weight(param.name, tuple(param.shape or ()), _mxnet.arrays(param), masters, assign, param.grad_req != "null")
