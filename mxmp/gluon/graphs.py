"""The graphs of one block: made from a trace in low precision, told apart by what a call may change."""

from __future__ import annotations

import copy
import threading
import weakref
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Dict, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..callbacks import hold_interrupts
from ..kernels.padding import LargeInputs
from ..precision.graph import Graph, as_shape
from ..precision.heads import SCALE_NAME, scale_heads
from ..precision.monitoring import GraphListener, NetworkView
from ..precision.plan import Plan
from . import _mxnet
from .conversion import NetConversion, refuse_contrib_amp, tracing
from .scaling import call_with_scale, note_call

__all__ = ["BuiltGraph", "GraphKey", "Graphs", "UntraceableError", "build", "pushing", "read_inputs", "traced_alone"]


class GraphKey(NamedTuple):
    """What tells the graphs of one block apart."""

    training: bool
    structure: str
    device: str
    variant: Any = None


class Graphs(Dict[GraphKey, "BuiltGraph"]):
    """The graphs of one block since it was last hybridized; a copy of the block makes its own."""

    def __reduce__(self) -> tuple:
        return Graphs, ()


class BuiltGraph(NamedTuple):
    """One graph of a block: what it runs, the plan behind it, and the shapes that it was first called with.

    ``only_for``: what it is right for, None where that is any shapes.
    """

    traced: _mxnet.Traced
    op: _LowOp
    plan: Plan
    shapes: dict[str, tuple]
    asked: list[tuple[Parameter, str]]
    only_for: LargeInputs | None

    def serves(self, inputs: list) -> bool:
        """Whether it is right for these, and for what is asked of the gradients now ("write", "add" or "null")."""
        if self.only_for is not None and not self.only_for.at([array.shape for array in inputs]):
            return False
        return all(param.grad_req == request for param, request in self.asked)

    def run(self, inputs: list, monitor: tuple | None) -> Any:
        """What the block returns for flat inputs; ``monitor`` is told of every operator's outputs."""
        given = [inputs[i] if is_data else _mxnet.data(i) for is_data, i in self.traced.op_args]
        out = self.op(given, monitor)
        flat = [out] if isinstance(out, NDArray) else out
        return _named(_mxnet.regroup(flat, self.traced.out_format), self.traced.answer)


class UntraceableError(Exception):
    """A block's Python code cannot run on Symbols. ``blocks``: from the one called to the one that failed."""

    def __init__(self, blocks: list[Block], reason: Exception) -> None:
        super().__init__(blocks, reason)
        self.blocks = blocks
        self.reason = reason


def build(block: HybridBlock, args: tuple, device: str, conversion: NetConversion) -> BuiltGraph:
    """Trace the block as MXNet does, then make the operator from the low-precision graph.

    Raises
    ------
    UntraceableError
        The user's code fails on Symbols.
    """
    with tracing():
        clone = _trace(block, args)
        traced = _mxnet.built(clone, args)
    data, symbol = traced.graph
    params = {param.name: param for is_data, param in traced.op_args if not is_data}
    asked = {name: param.grad_req for name, param in params.items()}
    flat = [a for a in _mxnet.flatten(args)[0] if a is not None]
    shapes = {variable.name: array.shape for variable, array in zip(data, flat)}
    large = _large_inputs(symbol, shapes, conversion.policy.compute) if device == "cpu" else None
    graph, plan = conversion.build_graph(block, symbol, params, device, asked, large_inputs=large is not None)
    scale_heads(graph)
    op = _LowOp(graph.to_symbol(), plan, symbol.list_inputs(), [d.name for d in data], _mxnet.flags(block))
    traced = traced._replace(answer=_kinds(traced.answer))
    return BuiltGraph(traced, op, plan, shapes, [(params[name], request) for name, request in asked.items()], large)


def _large_inputs(symbol: mx.sym.Symbol, shapes: dict[str, tuple], compute: str) -> LargeInputs | None:
    """What to ask about other shapes, where some convolution's input could be too small, and here none is."""
    large = LargeInputs(Graph.from_symbol(symbol), list(shapes), compute)
    return large if large and large.at(list(shapes.values())) else None


def read_inputs(inputs: Sequence[Any]) -> tuple[tuple, list[NDArray]]:
    """Return what a block is to be called with, FP32 zeros on the CPU in place of each shape; and these zeros.

    ``inputs``: arrays, shapes, None, and lists of them, as ``tune`` and ``advise`` take them.

    Raises
    ------
    ValueError
        One is neither an array nor a shape.
    """
    drawn: list[NDArray] = []
    zeros = mx.np.zeros if mx.util.is_np_array() else mx.nd.zeros

    def read(value: Any) -> Any:
        if value is None or isinstance(value, NDArray):
            return value
        if isinstance(value, (list, tuple)) and value and all(_is_input(each) for each in value):
            return [read(each) for each in value]
        drawn.append(zeros(as_shape(value), ctx=mx.cpu()))
        return drawn[-1]

    if inputs and all(isinstance(each, int) for each in inputs):
        raise ValueError(f"got the numbers {', '.join(map(str, inputs))}: give a shape as one tuple, {tuple(inputs)}")
    return tuple(map(read, inputs)), drawn


def _is_input(value: Any) -> bool:
    """Whether it may stand in a list of inputs: a list of anything else is a shape, right or wrong."""
    return value is None or isinstance(value, (NDArray, list, tuple))


def traced_alone(
    block: HybridBlock, args: tuple, training: bool
) -> tuple[mx.sym.Symbol, dict[str, NDArray], dict[str, Parameter]]:
    """The FP32 graph of a block, its inputs and its parameters by name; the block stays as it is, shapes unknown.

    Raises
    ------
    ValueError
        The user's code fails on Symbols.
    """
    try:
        with tracing(), autograd.train_mode() if training else autograd.predict_mode():
            data, symbol = _mxnet.traced(_trace(block, args)).graph
    except UntraceableError as error:
        raise ValueError(
            f"{error.blocks[-1].name!r} cannot be traced, so it has no graph to plan: {error.reason}"
        ) from error
    flat = [array for array in _mxnet.flatten(args)[0] if array is not None]
    given = {variable.name: array for variable, array in zip(data, flat)}
    names = set(symbol.list_inputs())
    params = {param.name: param for param in block.collect_params().values() if param.name in names}
    return symbol, {name: array for name, array in given.items() if name in names}, params


def _trace(block: HybridBlock, args: tuple) -> HybridBlock:
    """Another block, with the graph."""
    refuse_contrib_amp()
    clone = _mxnet.copied(block)
    try:
        # A plan is by name: operators that the user's code does not name are numbered from 0 in every trace.
        with mx.name.NameManager():
            _mxnet.trace(clone, args)
    except Exception as error:
        found = [block if each is clone else each for each in _blocks_in(error.__traceback__)]
        raise UntraceableError(list(dict.fromkeys([block, *found])), error) from error
    return clone


# Global: one lock for MXNet's engine, which is one for the process.
_pushing = threading.RLock()


@contextmanager
def pushing() -> Iterator[None]:
    """While one thread hands operators to MXNet's engine, others wait; to the last one, which MXNet keeps in bulk.

    The engine notes each array of an operator by itself: of two threads whose operators read and write the same
    two arrays (weights, running statistics), each may wait for the other for ever. In plain MXNet too.
    """
    with _pushing:
        try:
            yield
        finally:
            with mx.engine.bulk(0):  # flushes
                pass


class _LowOp:
    """MXNet's CachedOp on the low graph, called with the FP32 graph's inputs.

    MXNet's is not made for several threads (src/imperative/cached_op_threadsafe.h stands beside it, and
    cannot record). A recorded call comes back in its backward, of which nothing tells: each thread records
    with an operator of its own. All others share one.
    """

    def __init__(self, low: mx.sym.Symbol, plan: Plan, given: list, data: list, flags: list) -> None:
        names = low.list_inputs()
        position = {name: i for i, name in enumerate(given)}
        fed = [*data, SCALE_NAME]
        self._order = [position.get(name) for name in names]
        self.symbol = low
        self._plan = plan
        self._flags = [
            ("data_indices", [i for i, name in enumerate(names) if name in fed]),
            ("param_indices", [i for i, name in enumerate(names) if name not in fed]),
            *flags,
        ]
        self._shared: mx.nd.CachedOp | None = None
        self._own = threading.local()
        self._monitored: dict[tuple, mx.nd.CachedOp] = {}
        weakref.finalize(self, _remove, self._monitored).atexit = False

    def __call__(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        if None in self._order:
            out = call_with_scale(lambda scale: self._run(inputs, monitor, scale), inputs[0].ctx)
        else:
            out = self._run(inputs, monitor)
        if autograd.is_recording():
            note_call(out if isinstance(out, NDArray) else out[0])
        return out

    def _run(self, inputs: Sequence[NDArray], monitor: tuple | None, scale: NDArray | None = None) -> Any:
        given = [scale if i is None else inputs[i] for i in self._order]
        with pushing():
            if monitor is None:
                return self._operator()(*given)
            with hold_interrupts():
                return self._told(monitor)(*given)

    def forget(self, monitor: tuple) -> None:
        """Let go of what calls with ``monitor`` left here."""
        _remove(self._monitored, [key for key in list(self._monitored) if key[1] == monitor])
        _mxnet.silence_removed()

    def _operator(self) -> mx.nd.CachedOp:
        if not autograd.is_recording():
            self._shared = self._shared or self._make()
            return self._shared
        if not hasattr(self._own, "op"):
            self._own.op = self._make()
        return self._own.op

    def _told(self, monitor: tuple) -> mx.nd.CachedOp:
        """One that tells ``monitor`` of every operator: not with static memory, where MXNet tells of few."""
        key = (threading.get_ident(), monitor)
        if key not in self._monitored:
            _mxnet.silence_removed()
            flags = [(name, value) for name, value in self._flags if not name.startswith("static_")]
            self._monitored[key] = mx.nd.CachedOp(copy.copy(self.symbol), flags)
            callback, monitor_all = monitor
            if not isinstance(callback, GraphListener):
                callback = NetworkView(self.symbol, self._plan).translated(callback)
            _mxnet.register_op_hook(self._monitored[key], callback, monitor_all)
        return self._monitored[key]

    def _make(self) -> mx.nd.CachedOp:
        return mx.nd.CachedOp(copy.copy(self.symbol), self._flags)


def _remove(monitored: dict[tuple, mx.nd.CachedOp], keys: Sequence[tuple] | None = None) -> None:
    """Let go of the hooks of these operators, by thread and monitor; None: of all."""
    for key in list(monitored) if keys is None else keys:
        op = monitored.pop(key, None)
        if op is not None:
            _mxnet.remove_op_hook(op, thread=key[0])


def _blocks_in(trace: TracebackType | None) -> Iterator[Block]:
    """The blocks whose code a traceback goes through, outermost first."""
    while trace is not None:
        if trace.tb_frame.f_code.co_name in ("hybrid_forward", "forward"):
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, Block):
                yield owner
        trace = trace.tb_next


def _kinds(answer: Any) -> Any:
    """Where namedtuples stand in what a block returned, None where there are none."""
    if not isinstance(answer, (list, tuple)):
        return None
    inside = [_kinds(item) for item in answer]
    kind = type(answer) if hasattr(answer, "_fields") else None
    return (kind, inside) if kind or any(inside) else None


def _named(value: Any, kinds: Any) -> Any:
    """``value``, nested lists, with the namedtuples that ``kinds`` remembers."""
    if kinds is None:
        return value
    kind, inside = kinds
    items = [_named(item, each) for item, each in zip(value, inside)]
    return items if kind is None else kind(*items)
