"""An executor whose tensors a ``mx.mon.Monitor`` reads, in the names and the precision of the FP32 network."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx

from ..precision.monitoring import NetworkView, in_full
from ..precision.plan import Plan
from . import _mxnet


class Monitored:
    """Wraps an executor so that a ``mx.mon.Monitor`` sees the user's FP32 network, without the casts that run in it."""

    def __init__(self, executor: mx.executor.Executor, symbol: mx.sym.Symbol, plan: Plan) -> None:
        self._executor = executor
        self._symbol = symbol
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Let ``callback(name, handle)`` get the tensors of the user's operators, in FP32; it must free each handle."""
        view = NetworkView(_mxnet.symbol_of(self._executor), self._plan)
        self._executor.set_monitor_callback(view.translated(callback), monitor_all)

    @property
    def arg_arrays(self) -> list[mx.nd.NDArray]:
        return [in_full(self._executor.arg_dict[name]) for name in self._symbol.list_arguments()]

    @property
    def aux_arrays(self) -> list[mx.nd.NDArray]:
        return [in_full(self._executor.aux_dict[name]) for name in self._symbol.list_auxiliary_states()]
