"""Several listeners at one place: MXNet tells one of each operator's outputs, and hands each array over once."""

from __future__ import annotations

from typing import Any, Callable

from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ...precision.monitoring import GraphListener

__all__ = ["Listeners", "Tell"]

# Called with the monitor's name of a tensor, and the tensor.
Tell = Callable[[str, NDArray], None]


class Listeners(GraphListener):
    """What MXNet calls, by ``set_monitor_callback`` of an executor or ``register_op_hook`` of a block."""

    def __init__(self) -> None:
        self._told: list[Tell] = []

    def __bool__(self) -> bool:
        return True  # MXNet asks whether there is a callback

    @property
    def idle(self) -> bool:
        return not self._told

    def add(self, tell: Tell) -> None:
        self._told.append(tell)

    def remove(self, tell: Tell) -> None:
        self._told.remove(tell)

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)  # frees the handle
        for tell in list(self._told):
            tell(name.decode() if isinstance(name, bytes) else name, array)
