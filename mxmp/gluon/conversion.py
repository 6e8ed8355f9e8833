"""What one call of ``convert`` decided, shared by all blocks of the net."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Collection, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Constant, Parameter

from ..policy import Policy
from ..precision.graph import Graph
from ..precision.heads import HeadScale
from ..precision.pipeline import low_graph
from ..precision.plan import Plan
from ..step.gradients import Gradient
from . import _mxnet
from .parameter import BFLOAT16, store_full, store_low

__all__ = [
    "BUILDING",
    "Conversion",
    "conversions_of",
    "is_tracing",
    "join",
    "leave",
    "statistics_of",
]

# Held while a graph is made: nets of several conversions may share blocks and Parameters.
BUILDING = threading.RLock()
_local = threading.local()


def is_tracing() -> bool:
    """Whether this thread makes the graph of a converted block, whose children may be called with Symbols."""
    return getattr(_local, "tracing", False)


def conversions_of(params: Iterable[Parameter]) -> list[Conversion]:
    """The conversions of all nets that these parameters belong to, oldest first."""
    return list(dict.fromkeys(found for param in params for found in getattr(param, "mxmp_conversions", ())))


def join(param: Parameter, conversion: Conversion) -> None:
    """Note that the parameter's net, or one more of its nets, was converted."""
    param.mxmp_conversions = (*conversions_of([param]), conversion)


def leave(param: Parameter, gone: Collection[Conversion]) -> None:
    """Forget these conversions; without any, the parameter is a plain FP32 one with its master's values."""
    found = conversions_of([param])
    left = tuple(conversion for conversion in found if conversion not in gone)
    if left:
        param.mxmp_conversions = left
    elif found:
        store_full(param)
        del param.mxmp_conversions


def statistics_of(params: Sequence[Parameter]) -> list[Gradient]:
    """Running statistics among ``params`` and in their nets: parameters that are never differentiable."""
    found = {p.name: p for p in params if not _mxnet.is_differentiable(p)}
    for conversion in conversions_of(params):
        found.update(conversion.statistics)
    return [Gradient(name, array) for name, param in found.items() for array in _mxnet.arrays(param)]


class Conversion:
    """The policy, how parameters are stored, and the loss scale of the heads inside the net.

    ``blocks``: those that are converted so. ``full``: names of parameters that code outside the graphs reads
    and that therefore stay FP32.
    """

    def __init__(self, policy: Policy, full: Collection[str] = ()) -> None:
        self.policy = policy
        self.full = frozenset(full)
        self.head_scale = HeadScale()
        self.statistics: dict[str, Parameter] = {}
        self.blocks: weakref.WeakSet = weakref.WeakSet()
        self._stored: dict[str, bool] = {}

    def __getstate__(self) -> dict:
        """For copies of a net: their blocks and heads are others."""
        return {name: value for name, value in vars(self).items() if name not in ("blocks", "head_scale")}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["policy"])  # type: ignore[misc]
        vars(self).update(state)

    @contextmanager
    def trace(self) -> Iterator[None]:
        """While a block of a converted net is being traced, its children may be called with Symbols."""
        before, _local.tracing = is_tracing(), True
        try:
            yield
        finally:
            _local.tracing = before

    def excludes(self, name: str) -> bool:
        """Whether the policy keeps the block of this name in FP32."""
        patterns = [whole for pattern in self.policy.exclude for whole in (pattern, pattern + "_*")]
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def build(self, symbol: mx.sym.Symbol, params: dict[str, Parameter], device: str) -> tuple[Graph, Plan]:
        """The graph that runs, and parameters stored as it wants them. The first graph decides, of any net."""
        self.statistics.update({name: p for name, p in params.items() if not _mxnet.is_differentiable(p)})
        _check_dtypes(params.values())
        decided = {name: found for name, p in params.items() if (found := self._storage_of(p)) is not None}
        fixed = {name for name, p in params.items() if isinstance(p, Constant)} | self.full
        graph, plan = self._low_graph(
            Graph.from_symbol(symbol),
            device,
            parameters={n for n in params if n not in decided and n not in fixed},
            stored_low={n for n, low in decided.items() if low},
        )
        for name, param in params.items():
            if self._stored.setdefault(name, decided.get(name, name in plan.low_variables)):
                store_low(param, self.policy.compute)
        return graph, plan

    def _low_graph(self, graph: Graph, device: str, **storage: set[str]) -> tuple[Graph, Plan]:
        """As ``low_graph``, for parameters that a net of another conversion may have stored in float16.

        Raises
        ------
        ValueError
            This net needs such a parameter in another dtype.
        """
        low, new = storage["stored_low"], storage["parameters"]
        stores = self.policy.stores_low(device)
        shared = {name for name in low if not (stores and name in self._stored)}
        if not shared:
            return low_graph(graph, self.policy, device, **storage)
        if self.policy.compute == "float16":
            # As if this net stored it: every operator that reads it must read float16.
            asked, new = replace(self.policy, params="float16"), new if stores else set()
            wanted = low_graph(graph, asked, device, parameters=new | shared, stored_low=low - shared)[1]
            shared -= wanted.low_variables
            if not shared:
                made, plan = low_graph(graph, asked, device, parameters=new, stored_low=low)
                return made, replace(plan, policy=self.policy)
        raise ValueError(
            f"Parameter {min(shared)!r} is shared with a net that was converted to store it in float16, and here "
            f"({self.policy}) it is read in another dtype: convert both nets with params='float32'"
        )

    def _storage_of(self, param: Parameter) -> bool | None:
        """Whether a graph of any of the parameter's nets stored it low, None where none has been made."""
        stored = (c._stored.get(param.name) for c in [self, *conversions_of([param])])
        return next((low for low in stored if low is not None), None)


def _check_dtypes(params: Iterable[Parameter]) -> None:
    for param in params:
        if np.dtype(param.dtype) in (np.float16, np.float64, BFLOAT16):
            raise ValueError(
                f"Parameter {param.name!r} is {param.dtype}: a converted net casts by itself, from FP32. Call "
                "net.cast('float32'), or mxmp.restore(net) before another cast"
            )
