"""What stands inside MXNet's HybridBlock in place of its own: the cached op and the hooks' dictionary."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import mxnet as mx
from mxnet.ndarray import NDArray

from .heads import SCALE_NAME, HeadScale

__all__ = ["LowOp", "QuietHooks"]


class LowOp:
    """Stands in ``_cached_op``: MXNet's CachedOp on the low graph, called with the FP32 graph's inputs."""

    def __init__(self, low: mx.sym.Symbol, names: list, given: list, data: list, flags: list) -> None:
        position = {name: i for i, name in enumerate(given)}
        self._order = [position.get(name) for name in names]
        self.head_scale: HeadScale | None = None
        self._op = mx.nd.CachedOp(
            low,
            [
                ("data_indices", [i for i, name in enumerate(names) if name in data or name == SCALE_NAME]),
                ("param_indices", [i for i, name in enumerate(names) if name not in data and name != SCALE_NAME]),
                *flags,
            ],
        )

    def __call__(self, *inputs: NDArray) -> Any:
        if self.head_scale is not None:
            scale = self.head_scale.array(inputs[0].ctx)
            return self._op(*(scale if i is None else inputs[i] for i in self._order))
        return self._op(*(inputs[i] for i in self._order if i is not None))

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._op._register_op_hook(callback, monitor_all)


class QuietHooks(OrderedDict):
    """Hooks of a block that has only ours: false, or ``hybridize`` warns that a hook is lost.

    MXNet reads ``active and hooks or pre_hooks`` there, a precedence slip that ``hybridize(False)``
    meets as well.
    """

    def __bool__(self) -> bool:
        return any(not getattr(hook, "quiet", False) for hook in self.values())
