"""The private attributes of MXNet's that this package uses. A test holds each against 1.9.1."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from types import FunctionType
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, OpHandle, c_handle_array, c_str, c_str_array, check_call
from mxnet.ndarray import NDArray


def replicate_update_counts(optimizer: mx.optimizer.Optimizer, contexts: Sequence[mx.Context]) -> None:
    """Give every device in ``contexts`` the update counts of the device with the most updates."""
    # MXNet keeps the counts per device, and a file has those of the saved run's devices only. On any other device
    # Adam's bias correction would start again, and a weight would no longer be the same on all devices.
    saved = optimizer._all_index_update_counts.values()
    counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
    devices = {context.device_id for context in contexts}
    optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]


class Prepared:
    """An operator on the same arrays in each call. Its arguments are made for C once, where MXNet's Python makes them,
    with a text of each attribute, in every call, which takes longer than MXNet's engine on a small network."""

    def __init__(self, operator: str, inputs: Sequence[NDArray], out: Sequence[NDArray], **attributes: Any) -> None:
        self._operator, self._inputs, self._outputs = operator, list(inputs), list(out)  # C has addresses alone
        self._places = {name: place for place, name in enumerate(attributes)}
        self._texts = [""] * len(attributes)
        self._values = (ctypes.c_char_p * len(attributes))()
        handle, self._stypes = OpHandle(), ctypes.POINTER(ctypes.c_int)()
        check_call(_LIB.NNGetOpHandle(c_str(operator), ctypes.byref(handle)))
        self._number, self._out = (
            ctypes.c_int(len(out)),
            ctypes.cast(c_handle_array(out), ctypes.POINTER(NDArrayHandle)),
        )
        self._arguments = (
            handle,
            ctypes.c_int(len(inputs)),
            c_handle_array(inputs),
            ctypes.byref(self._number),
            ctypes.byref(self._out),
            ctypes.c_int(len(attributes)),
            c_str_array(list(attributes)),
            self._values,
            ctypes.byref(self._stypes),
        )
        self.set(**attributes)

    def set(self, **attributes: Any) -> None:
        """Change attributes that the constructor was given."""
        for name, value in attributes.items():
            place, text = self._places[name], str(value)
            if text != self._texts[place]:
                self._texts[place], self._values[place] = text, text.encode()

    def __contains__(self, attribute: str) -> bool:
        return attribute in self._places

    def __call__(self) -> None:
        check_call(_LIB.MXImperativeInvokeEx(*self._arguments))

    def __reduce__(self) -> tuple:
        """Copy it with its arrays: C's addresses are of the original's."""
        return partial(Prepared, **dict(zip(self._places, self._texts))), (self._operator, self._inputs, self._outputs)


def counted_rates(
    optimizer: mx.optimizer.Optimizer, indices: Sequence[int], device_id: int
) -> tuple[list[float], list[float], int]:
    """Count an update of weights that have had equally many; return learning rates, weight decays and their count."""
    optimizer._set_current_context(device_id)
    optimizer._update_count(indices)
    return optimizer._get_lrs(indices), optimizer._get_wds(indices), optimizer._index_update_count[indices[0]]


def have_equal_counts(optimizer: mx.optimizer.Optimizer, indices: Sequence[int], device_id: int) -> bool:
    """Return whether the weights have had equally many updates on the device."""
    counts = optimizer._all_index_update_counts.get(device_id, {})
    return len({counts.get(index) for index in indices}) == 1


def python_operators() -> list[Any]:
    """Return the living objects whose method ``backward`` MXNet may call: custom operators, ``autograd.Function``s."""
    made = list(mx.operator._registry.ref_holder.values())
    customs = [each for each in made if isinstance(each, mx.operator.CustomOp)]
    return [*customs, *mx.operator.PythonOp._ref_holder, *_recorded_functions()]


def _recorded_functions() -> list[autograd.Function]:
    # MXNet keeps the callbacks of a recorded Function, closures over it, in C structures.
    found: list[autograd.Function] = []
    seen: set[int] = set()
    todo: list[Any] = list(autograd.Function._registry.ref_holder.values())
    while todo:
        inner = [each for each in gc.get_referents(*todo) if not isinstance(each, type) and id(each) not in seen]
        seen.update(map(id, inner))
        held = [cell.cell_contents for each in inner for cell in getattr(each, "__closure__", None) or ()]
        found += [each for each in held if isinstance(each, autograd.Function)]
        todo = [each for each in inner if not isinstance(each, FunctionType)]
    return list({id(each): each for each in found}.values())
