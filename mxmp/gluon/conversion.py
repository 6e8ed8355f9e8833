"""What one call of ``convert`` decided, shared by all blocks of the net."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import contextmanager
from typing import Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Constant, Parameter

from ..policy import Policy
from ..precision.graph import Graph
from ..precision.pipeline import low_graph
from ..precision.plan import Plan
from ..step.gradients import Gradient
from . import _mxnet
from .expected import Expected
from .parameter import store_low

__all__ = ["Conversion", "conversion_of", "conversions_of", "forwards_so_far", "statistics_of"]


def conversion_of(param: Parameter) -> Conversion | None:
    """The conversion that a parameter's net went through, None without one."""
    return getattr(param, "mxmp_conversion", None)


def conversions_of(params: Iterable[Parameter]) -> list[Conversion]:
    """The conversions of all nets that these parameters belong to."""
    found = (conversion_of(param) for param in params)
    return list(dict.fromkeys(conversion for conversion in found if conversion is not None))


# How MXNet's norm layers name theirs, for nets that have no graph of ours to ask.
_RUNNING = ("running_mean", "running_var")
# Forwards in training mode, counted, and the last one of each converted net.
_forwards = itertools.count(1)
_last_forward: weakref.WeakKeyDictionary[Conversion, int] = weakref.WeakKeyDictionary()


def forwards_so_far() -> int:
    """A moment among the forwards of converted nets, for ``statistics_of``."""
    return next(_forwards)


def statistics_of(params: Sequence[Parameter], since: int) -> list[Gradient]:
    """Running statistics that a backward may write: of ``params``, and of converted nets that ran ``since``.

    A backward runs through nets whose parameters are another trainer's (a generator's through the critic).
    The graph says what is an auxiliary state; a mask that is never trained is none.
    """
    ran = [conversion for conversion, last in list(_last_forward.items()) if last > since]
    found = {id(p): p for p in params if not _mxnet.is_differentiable(p) and p.name.endswith(_RUNNING)}
    for conversion in dict.fromkeys([*conversions_of(params), *sorted(ran, key=id)]):
        found.update((id(p), p) for p in conversion.statistics.values())
    arrays = [(p.name, array) for p in found.values() for array in _mxnet.arrays(p)]
    return [Gradient(name, array) for name, array in arrays if array.dtype == np.float32]


class Conversion:
    """The policy, and how parameters are stored."""

    def __init__(self, policy: Policy, expected: Expected) -> None:
        self.policy = policy
        self.expected = expected
        self.statistics: dict[str, Parameter] = {}
        self.lock = threading.RLock()
        self._stored: dict[str, bool] = {}
        self._local = threading.local()

    def note_training(self) -> None:
        """A block of this net runs in training mode."""
        _last_forward[self] = next(_forwards)

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

    def build(
        self, symbol: mx.sym.Symbol, params: dict[str, Parameter], device: str, grad_req: Mapping[str, str]
    ) -> tuple[Graph, Plan]:
        """The graph that runs, and parameters stored as it wants them. The first graph decides."""
        self.statistics.update({name: params[name] for name in symbol.list_auxiliary_states() if name in params})
        graph, plan = low_graph(
            Graph.from_symbol(symbol),
            self.policy,
            device,
            parameters={n for n, p in params.items() if n not in self._stored and not isinstance(p, Constant)},
            stored_low={n for n in params if self._stored.get(n)},
            grad_req=grad_req,
        )
        if self.policy.stores_low(device):
            for name, param in params.items():
                if self._stored.setdefault(name, name in plan.low_variables):
                    store_low(param, self.policy.compute)
        return graph, plan
