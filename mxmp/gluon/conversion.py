"""What one call of ``convert`` decided, shared by all blocks of the net."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Collection, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Constant, HybridBlock, Parameter

from ..conversion import Conversion
from ..pipeline import low_graph
from ..policy import Policy
from ..precision.graph import Graph
from ..precision.plan import Plan
from ..step.gradients import Gradient
from . import _mxnet
from .blocks import prefixes_of
from .parameter import BFLOAT16, store_full, store_low

__all__ = [
    "BUILDING",
    "Expected",
    "NetConversion",
    "any_conversion",
    "conversions_of",
    "forwards_so_far",
    "is_scaling",
    "is_tracing",
    "join",
    "leave",
    "refuse_contrib_amp",
    "statistics_of",
    "tracing",
]

# Global: one lock while a graph is made, for nets of several conversions may share blocks and Parameters.
BUILDING = threading.RLock()
# Global: whether this thread traces. Children that are called with Symbols lead to no conversion.
_local = threading.local()


def is_tracing() -> bool:
    """Whether this thread makes the graph of a converted block, whose children may be called with Symbols."""
    return getattr(_local, "tracing", False)


@contextmanager
def tracing() -> Iterator[None]:
    """While a block is being traced by mxmp, its children may be called with Symbols, converted or not."""
    before, _local.tracing = is_tracing(), True
    try:
        yield
    finally:
        _local.tracing = before


def refuse_contrib_amp() -> None:
    """Raise ``RuntimeError`` after ``amp.init()``: every graph would have the casts of both."""
    if _mxnet.is_amp_initialized():
        raise RuntimeError(
            "amp.init() of mxnet.contrib.amp was called in this process, and its casts would stand in every graph "
            "beside mxmp's. It cannot be undone: remove the call, and start Python again. mxmp.convert(net) needs none"
        )


def conversions_of(params: Iterable[Parameter]) -> list[NetConversion]:
    """The conversions of all nets that these parameters belong to, oldest first."""
    return list(dict.fromkeys(found for param in params for found in getattr(param, "mxmp_conversions", ())))


def join(param: Parameter, conversion: Conversion) -> None:
    """Note that the parameter's net, or one more of its nets, was converted."""
    param.mxmp_conversions = (*conversions_of([param]), conversion)


def leave(param: Parameter, gone: Collection[NetConversion]) -> None:
    """Forget these conversions; without any, the parameter is a plain FP32 one with its master's values."""
    found = conversions_of([param])
    left = tuple(conversion for conversion in found if conversion not in gone)
    if left:
        param.mxmp_conversions = left
    elif found:
        store_full(param)
        del param.mxmp_conversions


# How MXNet's norm layers name theirs, for nets that have no graph of ours to ask.
_RUNNING = ("running_mean", "running_var")
# Global: forwards in training mode, counted, which orders those of all nets.
_forwards = itertools.count(1)
# Global: the last forward of each converted net, 0 before the first. A backward writes the running statistics of nets
# whose parameters are another trainer's, and nothing leads from the trainer to them.
_last_forward: weakref.WeakKeyDictionary[NetConversion, int] = weakref.WeakKeyDictionary()


def forwards_so_far() -> int:
    """A moment among the forwards of converted nets, for ``statistics_of``."""
    return next(_forwards)


def any_conversion() -> bool:
    """Whether any net is converted now."""
    return bool(_last_forward)


def statistics_of(params: Sequence[Parameter], since: int) -> list[Gradient]:
    """Running statistics that a backward may write: of ``params``, and of converted nets that ran ``since``.

    A backward runs through nets whose parameters are another trainer's (a generator's through the critic).
    The graph says what is an auxiliary state; a mask that is never trained is none.
    """
    ran = [conversion for conversion, last in list(_last_forward.items()) if last > since]
    found = {id(p): p for p in params if not _mxnet.is_differentiable(p) and p.name.endswith(_RUNNING)}
    for conversion in dict.fromkeys([*conversions_of(params), *sorted(ran, key=id)]):
        found.update((id(p), p) for p in conversion.statistics.values())
    return [Gradient(p.name, array) for p in found.values() for array in _mxnet.arrays(p)]


def is_scaling(trainer: Any) -> bool:
    """Whether the trainer scales losses and updates FP32 masters."""
    return getattr(trainer, "updates_masters", False)


class Expected:
    """What the first graphs of a net must contain: something in low precision, and a match of every pattern.

    Warns where it is not so, once every block of ``roots`` has a graph.
    """

    def __init__(self, net: str, roots: Iterable[HybridBlock], patterns: Iterable[str]) -> None:
        self._net = net
        self._roots = frozenset(id(block) for block in roots)
        self._waiting = set(self._roots)
        self._unmatched = dict.fromkeys(patterns)
        self._any_low = False

    def is_root(self, block: HybridBlock) -> bool:
        """Whether its graph is one of the net's own, not of a part of one."""
        return id(block) in self._roots

    def note(self, block: HybridBlock, plan: Plan) -> None:
        """A graph of ``block`` follows ``plan``."""
        if id(block) not in self._waiting:
            return
        self._waiting.discard(id(block))
        self._unmatched = {pattern: None for pattern in self._unmatched if pattern in plan.unmatched}
        # A tuned plan without low operators says that FP32 is faster.
        self._any_low = self._any_low or plan.num_low > 0 or plan.tuned is not None
        if self._waiting:
            return
        if not self._any_low:
            warnings.warn(
                f"nothing in {self._net!r} computes in {plan.policy.compute}: it has no matrix operator that may; "
                "print(mxmp.explain(net)) says why",
                stacklevel=5,
            )
        if self._unmatched:
            warnings.warn(f"exclude: no node or block of {self._net!r} matches {list(self._unmatched)}", stacklevel=5)


class NetConversion(Conversion):
    """One conversion of a net, shared by all its blocks.

    Attributes
    ----------
    expected : Expected
        What the first graphs must contain.
    full : frozenset of str
        Names of parameters that code outside the graphs reads and that therefore stay FP32.
    statistics : dict of str to Parameter
        The auxiliary states of the graphs, by name.
    blocks : WeakSet of HybridBlock
    """

    def __init__(self, how: Policy | Plan, expected: Expected, full: Collection[str] = ()) -> None:
        super().__init__(how)
        self.expected = expected
        self.full = frozenset(full)
        self.statistics: dict[str, Parameter] = {}
        self.blocks: weakref.WeakSet = weakref.WeakSet()
        self._fits = False
        self._warned = False
        _last_forward[self] = 0

    def __getstate__(self) -> dict:
        """For copies of a net, whose blocks are others."""
        return {name: value for name, value in vars(self).items() if name != "blocks"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, blocks=weakref.WeakSet())

    def note_training(self) -> None:
        """A block of this net runs in training mode."""
        _last_forward[self] = next(_forwards)

    def check_trainer(self, plan: Plan, asked: Iterable[tuple[Parameter, str]]) -> None:
        """Warn, once, where a graph in float16 is recorded whose parameters a Trainer updates that does not scale.

        ``asked``: its parameters, and what is asked of their gradients.
        """
        if self._warned or self.policy.compute != "float16":
            return
        trainer = next((_mxnet.trainer_of(param) for param, request in asked if request != "null"), None)
        if trainer is None or plan.num_low == 0 or is_scaling(trainer):
            return
        self._warned = True
        warnings.warn(
            f"a net computes in float16 and is trained by a {type(trainer).__module__}.{type(trainer).__name__}, "
            "which does not scale the loss: gradients below 6e-8 become zero. Use mxmp.Trainer and "
            "trainer.backward(loss), or convert to bfloat16, which needs no scaling",
            stacklevel=4,
        )

    def build_graph(
        self,
        block: HybridBlock,
        symbol: mx.sym.Symbol,
        params: dict[str, Parameter],
        device: str,
        grad_req: Mapping[str, str],
        large_inputs: bool,
    ) -> tuple[Graph, Plan]:
        """Return the graph that runs and its plan; store the parameters as they decide.

        ``grad_req``, ``large_inputs``: see ``fit_to_device``.

        Raises
        ------
        ValueError
            The plan is of another net. It must be of the net's own graph, in the mode that it was tuned for;
            other graphs (of the other mode, of a part) follow it where they have the same operators.
        """
        self.statistics.update({name: params[name] for name in symbol.list_auxiliary_states() if name in params})
        _check_dtypes(params.values())
        strict = self._must_fit(block)
        graph, planned = self.build(
            symbol,
            device,
            params,
            stored={name: low for name, p in params.items() if (low := self._storage_of(p)) is not None},
            fixed={name for name, p in params.items() if isinstance(p, Constant)} | self.full,
            grad_req=grad_req,
            whole=strict,
            large_inputs=large_inputs,
        )
        self._fits = self._fits or strict
        for name, param in params.items():
            if self.stored_low[name]:
                store_low(param, self.policy.compute)
        plan = replace(planned, blocks=prefixes_of(block))
        self.expected.note(block, plan)
        return graph, plan

    def _low_graph(self, graph: Graph, device: str, **storage: Any) -> tuple[Graph, Plan]:
        """Return the graph where a net of another conversion may have stored parameters in float16.

        Raises
        ------
        ValueError
            This net needs such a parameter in another dtype.
        """
        low, new = storage["stored_low"], storage["parameters"]
        stores = self.policy.stores_low(device)
        shared = {name for name in low if not (stores and name in self.stored_low)}
        if not shared:
            return super()._low_graph(graph, device, **storage)
        if self.policy.compute == "float16":
            # As if this net stored it: every operator that reads it must read float16.
            policy, new = replace(self.policy, params="float16"), new if stores else set()
            asked = replace(self.plan, policy=policy) if self.plan else policy
            trial = {**storage, "parameters": new | shared, "stored_low": low - shared}
            wanted = low_graph(graph, asked, device, **trial)[1]
            shared -= wanted.low_variables
            if not shared:
                made, plan = low_graph(graph, asked, device, **{**storage, "parameters": new})
                return made, replace(plan, policy=self.policy)
        raise ValueError(
            f"Parameter {min(shared)!r} is shared with a net that was converted to store it in float16, and here "
            f"({self.policy}) it is read in another dtype: convert both nets with params='float32'"
        )

    def _must_fit(self, block: HybridBlock) -> bool:
        if self.plan is None or self._fits or not self.expected.is_root(block):
            return False
        return self.plan.tuned is None or self.plan.tuned.training == autograd.is_training()

    def _storage_of(self, param: Parameter) -> bool | None:
        """Whether a graph of any of the parameter's nets stored it low, None where none has been made."""
        stored = (c.stored_low.get(param.name) for c in [self, *conversions_of([param])])
        return next((low for low in stored if low is not None), None)


def _check_dtypes(params: Iterable[Parameter]) -> None:
    for param in params:
        dtype = np.dtype(param.dtype)
        if dtype in (np.float16, BFLOAT16) or (dtype == np.float64 and param.grad_req != "null"):
            raise ValueError(
                f"Parameter {param.name!r} is {param.dtype}: a converted net casts by itself, from FP32. Call "
                "net.cast('float32'), or mxmp.restore(net) before another cast"
            )
