"""What one call of ``convert`` decided, shared by all blocks of the net."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Constant, Parameter

from ..policy import Policy
from ..precision.graph import Graph
from ..precision.heads import HeadScale
from ..precision.pipeline import low_graph
from ..precision.plan import Plan
from ..step.gradients import Gradient
from . import _mxnet
from .parameter import store_low

__all__ = ["Conversion", "conversion_of", "conversions_of", "statistics_of"]


def conversion_of(param: Parameter) -> Conversion | None:
    """The conversion that a parameter's net went through, None without one."""
    return getattr(param, "mxmp_conversion", None)


def conversions_of(params: Iterable[Parameter]) -> list[Conversion]:
    """The conversions of all nets that these parameters belong to."""
    found = (conversion_of(param) for param in params)
    return list(dict.fromkeys(conversion for conversion in found if conversion is not None))


def statistics_of(params: Sequence[Parameter]) -> list[Gradient]:
    """Running statistics among ``params`` and in their nets: parameters that are never differentiable."""
    found = {p.name: p for p in params if not _mxnet.is_differentiable(p)}
    for conversion in conversions_of(params):
        found.update(conversion.statistics)
    return [Gradient(name, array) for name, param in found.items() for array in _mxnet.arrays(param)]


class Conversion:
    """The policy, how parameters are stored, and the loss scale of the heads inside the net."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.head_scale = HeadScale()
        self.statistics: dict[str, Parameter] = {}
        self.lock = threading.RLock()
        self._stored: dict[str, bool] = {}
        self._local = threading.local()

    @property
    def tracing(self) -> bool:
        return getattr(self._local, "tracing", False)

    @contextmanager
    def trace(self) -> Iterator[None]:
        """While a block of this net is being traced, its children may be called with Symbols."""
        before, self._local.tracing = self.tracing, True
        try:
            yield
        finally:
            self._local.tracing = before

    def build(self, symbol: mx.sym.Symbol, params: dict[str, Parameter], device: str) -> tuple[Graph, Plan]:
        """The graph that runs, and parameters stored as it wants them. The first graph decides."""
        self.statistics.update({name: p for name, p in params.items() if not _mxnet.is_differentiable(p)})
        graph, plan = low_graph(
            Graph.from_symbol(symbol),
            self.policy,
            device,
            parameters={n for n, p in params.items() if n not in self._stored and not isinstance(p, Constant)},
            stored_low={n for n in params if self._stored.get(n)},
        )
        if self.policy.stores_low(device):
            for name, param in params.items():
                if self._stored.setdefault(name, name in plan.low_variables):
                    store_low(param, self.policy.compute)
        return graph, plan
