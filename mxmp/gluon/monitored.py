"""The CachedOps of a graph whose tensors MXNet reports to an op hook, a user's or one of mxmp's listeners."""

from __future__ import annotations

import copy
import threading
from typing import Any, Callable, Dict, Tuple

import mxnet as mx
from mxnet import autograd

from ..observed import with_gradients_of_outputs
from ..precision.monitoring import GraphListener, NetworkView
from ..precision.plan import Plan
from . import _mxnet


class MonitoredOps(Dict[int, Tuple[Any, tuple]]):
    """From a thread's number to its CachedOp with an op hook, and the monitor that the hook was registered with.
    ``make`` makes a CachedOp of a Symbol and flags."""

    def __init__(self, symbol: mx.sym.Symbol, plan: Plan, flags: list, make: Callable) -> None:
        super().__init__()
        self._symbol, self._plan, self._make = symbol, plan, make
        # With ``static_alloc`` and ``static_shape`` MXNet would call the callback for few outputs.
        self._flags = [flag for flag in flags if not flag[0].startswith("static_")]

    def op(self, monitor: tuple) -> mx.nd.CachedOp | None:
        """Return this thread's CachedOp with ``monitor`` as its only op hook, or None if it does not get this call."""
        thread, (callback, monitor_all) = threading.get_ident(), monitor
        is_own = isinstance(callback, GraphListener)
        if is_own and not autograd.is_recording():
            return None  # it belongs to no training step
        op, registered = self.get(thread, (None, (None, False)))
        if op is None or is_own != isinstance(registered[0], GraphListener):
            _mxnet.silence_removed()
            symbol = with_gradients_of_outputs(self._symbol) if is_own else copy.copy(self._symbol)
            op = self._make(symbol, self._flags)
        if callback is not registered[0] or monitor_all != registered[1]:
            self[thread] = op, monitor
            if not is_own:
                # A user's callback gets the names of before conversion, and values in FP32.
                callback = NetworkView(self._symbol, self._plan).translated(callback)
            _mxnet.register_op_hook(op, callback, monitor_all)
        return op

    def forget(self, monitor: tuple) -> None:
        self.remove(monitor)
        _mxnet.silence_removed()

    def remove(self, monitor: tuple | None = None) -> None:
        """Remove the CachedOps with the callback of ``monitor``, or all.
        MXNet may still call the callbacks in a backward, until ``_mxnet.silence_removed``."""
        for thread, (op, registered) in list(self.items()):
            if monitor is None or registered[0] is monitor[0]:
                del self[thread]
                _mxnet.remove_op_hook(op, thread=thread)
