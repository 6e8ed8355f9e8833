"""The graphs of one block: traced, made in low precision, and run."""

from __future__ import annotations

import copy
import threading
import weakref
from contextlib import contextmanager
from traceback import walk_tb
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
from .conversion import NetConversion
from .scaling import call_with_scale, remember_converted_call

__all__ = [
    "BUILDING",
    "BuiltGraph",
    "GraphKey",
    "Graphs",
    "UntraceableError",
    "build",
    "engine_lock",
    "is_tracing",
    "read_inputs",
    "traced_alone",
    "tracing",
]

# Global: one lock while a graph is made, for nets of several conversions may share blocks and Parameters.
BUILDING = threading.RLock()
# Global: whether this thread traces. Children that are called with Symbols lead to no conversion.
_local = threading.local()


class GraphKey(NamedTuple):
    """Tells the graphs of one block apart. ``variant``: see ``_mxnet.variant``."""

    training: bool
    structure: str
    device: str
    variant: Any


class Graphs(Dict[GraphKey, "BuiltGraph"]):
    """The graphs of one block since it was last hybridized; a copy of the block makes its own."""

    def __reduce__(self) -> tuple:
        return Graphs, ()


class BuiltGraph(NamedTuple):
    """One graph of a block: the operator that it runs, and the plan that it follows.

    ``shapes``: of the inputs of the first call. ``requested``: the parameters, with the ``grad_req`` for which it was
    made. ``only_for``: the shapes that it is right for, None for all. ``types``: see ``_types_of_tuples``.
    """

    traced: _mxnet.TracedGraph
    op: _LowPrecisionOp
    plan: Plan
    shapes: dict[str, tuple]
    requested: list[tuple[Parameter, str]]
    only_for: LargeInputs | None
    types: Any

    def serves(self, inputs: list) -> bool:
        """Return whether it is right for the shapes of ``inputs``, and for the gradients that are requested now."""
        if self.only_for is not None and not self.only_for.at([array.shape for array in inputs]):
            return False
        return all(param.grad_req == request for param, request in self.requested)

    def run(self, inputs: list, monitor: tuple | None) -> Any:
        """Run the graph for flat inputs; return the block's output. ``monitor`` is called with operators' outputs."""
        out = self.op(inputs, monitor)
        flat = [out] if isinstance(out, NDArray) else out
        return _with_tuples(_mxnet.regroup(flat, self.traced.out_format), self.types)


class UntraceableError(Exception):
    """A block's Python code cannot run on Symbols. ``args``: the block that failed, and its error."""


def is_tracing() -> bool:
    """Return whether this thread makes the graph of a converted block, whose children may be called with Symbols."""
    return getattr(_local, "tracing", False)


@contextmanager
def tracing() -> Iterator[None]:
    """Let children of a block that mxmp traces within this block of code be called with Symbols, converted or not."""
    before, _local.tracing = is_tracing(), True
    try:
        yield
    finally:
        _local.tracing = before


def build(block: HybridBlock, args: tuple, device: str, conversion: NetConversion) -> BuiltGraph:
    """Trace the block as MXNet does, then make the operator from the low-precision graph.

    Raises ``UntraceableError`` where the user's code fails on Symbols.
    """
    clone, answer = _trace(block, args)
    _mxnet.infer_shapes(clone, args)
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    params = {param.name: param for is_data, param in traced.op_args if not is_data}
    requested = [(param, param.grad_req) for param in params.values()]
    shapes = {name: array.shape for name, array in _named_inputs(data, args).items()}
    large = LargeInputs(Graph.from_symbol(symbol), list(shapes), conversion.policy.compute) if device == "cpu" else None
    # It matters only where some convolution's input could be too small at other shapes, and here none is.
    only_for = large if large and large.at(list(shapes.values())) else None
    graph, plan = conversion.build_graph(block, symbol, params, device, large_inputs=only_for is not None)
    scale_heads(graph)
    op = _LowPrecisionOp(graph.to_symbol(), plan, dict(zip(symbol.list_inputs(), traced.op_args)), _mxnet.flags(block))
    return BuiltGraph(traced, op, plan, shapes, requested, only_for, _types_of_tuples(answer))


def traced_alone(
    block: HybridBlock, args: tuple, training: bool
) -> tuple[mx.sym.Symbol, dict[str, NDArray], dict[str, Parameter]]:
    """Return the FP32 graph of a block, its inputs and its parameters by name; the block stays as it is.

    Parameters may have unknown shapes. Raises ``ValueError`` where the user's code fails on Symbols.
    """
    try:
        with autograd.train_mode() if training else autograd.predict_mode():
            data, symbol = _mxnet.traced_graph(_trace(block, args)[0]).graph
    except UntraceableError as error:
        culprit, reason = error.args
        raise ValueError(f"{culprit.name!r} cannot be traced, so it has no graph to plan: {reason}") from error
    names = set(symbol.list_inputs())
    params = {param.name: param for param in block.collect_params().values() if param.name in names}
    return symbol, {name: array for name, array in _named_inputs(data, args).items() if name in names}, params


def _named_inputs(data: Sequence[mx.sym.Symbol], args: tuple) -> dict[str, NDArray]:
    arrays = [array for array in _mxnet.flatten(args)[0] if array is not None]
    return {variable.name: array for variable, array in zip(data, arrays)}


def _trace(block: HybridBlock, args: tuple) -> tuple[HybridBlock, Any]:
    """Return a copy of the block with its FP32 graph, and what the user's code returned."""
    _mxnet.refuse_contrib_amp()
    clone = _mxnet.copied(block)
    try:
        # A plan is by name: operators that the user's code does not name are numbered from 0 in every trace.
        with tracing(), mx.name.NameManager():
            return clone, _mxnet.trace(clone, args)
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        owners = [f.f_locals.get("self") for f in frames if f.f_code.co_name in ("hybrid_forward", "forward")]
        blocks = [block if each is clone else each for each in owners if isinstance(each, Block)]
        raise UntraceableError([block, *blocks][-1], error) from error


def read_inputs(inputs: Sequence[Any]) -> tuple[tuple, list[NDArray]]:
    """Return the arguments for a call of a block, empty FP32 arrays on the CPU in place of shapes; and these arrays.

    ``inputs``: arrays, shapes, None, and lists of them. Raises ``ValueError`` where one is none of these.
    """
    made: list[NDArray] = []
    empty = mx.np.empty if mx.util.is_np_array() else mx.nd.empty  # no operator runs, so no thread starts

    def read(value: Any) -> Any:
        if value is None or isinstance(value, NDArray):
            return value
        # A list of anything else is a shape, right or wrong.
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, _INPUTS) for each in value):
            return [read(each) for each in value]
        made.append(empty(as_shape(value), ctx=mx.cpu()))
        return made[-1]

    if inputs and all(isinstance(each, int) for each in inputs):
        raise ValueError(f"got the numbers {', '.join(map(str, inputs))}: give a shape as one tuple, {tuple(inputs)}")
    return tuple(map(read, inputs)), made


_INPUTS = (NDArray, list, tuple, type(None))
# Global: one lock for MXNet's engine, which is one for the process.
_engine = threading.RLock()


@contextmanager
def engine_lock() -> Iterator[None]:
    """Let one thread at a time hand operators to MXNet's engine, and flush those that MXNet holds back in bulk.

    The engine notes each array of an operator by itself: of two threads whose operators read and write the same
    two arrays (weights, running statistics), each may wait for the other for ever. This holds for MXNet's own nets too.
    """
    with _engine:
        try:
            yield
        finally:
            with mx.engine.bulk(0):  # flushes
                pass


class _LowPrecisionOp:
    """MXNet's CachedOp on the low-precision graph, called with a block's inputs.

    ``sources``: for each variable of the FP32 graph whether it is an input, and the input's number or the Parameter.

    A CachedOp is not made for several threads (src/imperative/cached_op_threadsafe.h is, and cannot record). Nothing
    tells when the backward of a recorded call has ended: each thread records with an operator of its own. All other
    calls share one.
    """

    def __init__(self, low: mx.sym.Symbol, plan: Plan, sources: dict[str, tuple[bool, Any]], flags: list) -> None:
        names = low.list_inputs()
        self.symbol = low
        self._plan = plan
        self._reads_scale = SCALE_NAME in names
        self._sources = [sources.get(name, (True, -1)) for name in names]  # the loss scale is the last input
        indices: dict[bool, list[int]] = {True: [], False: []}
        for i, (is_input, _) in enumerate(self._sources):
            indices[is_input].append(i)
        self._flags = [("data_indices", indices[True]), ("param_indices", indices[False]), *flags]
        self._shared: mx.nd.CachedOp | None = None
        self._own = threading.local()
        # By the thread's number and the monitor.
        self._monitored_ops: dict[tuple, mx.nd.CachedOp] = {}
        weakref.finalize(self, _remove_monitored, self._monitored_ops).atexit = False

    def __call__(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        if self._reads_scale:
            out = call_with_scale(lambda scale: self._run([*inputs, scale], monitor), inputs[0].ctx)
        else:
            out = self._run(inputs, monitor)
        if autograd.is_recording():
            remember_converted_call(out if isinstance(out, NDArray) else out[0])
        return out

    def _run(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        values = [inputs[at] if is_input else _mxnet.data(at) for is_input, at in self._sources]
        with engine_lock():
            if monitor is not None:
                with hold_interrupts():
                    return self._monitored_op(monitor)(*values)
            if not autograd.is_recording():
                self._shared = self._shared or self._make(self._flags)
                return self._shared(*values)
            if not hasattr(self._own, "op"):
                self._own.op = self._make(self._flags)
            return self._own.op(*values)

    def _make(self, flags: list) -> mx.nd.CachedOp:
        return mx.nd.CachedOp(copy.copy(self.symbol), flags)

    def _monitored_op(self, monitor: tuple) -> mx.nd.CachedOp:
        """Return an operator that calls ``monitor``; with static memory MXNet would call it for few outputs."""
        key = (threading.get_ident(), monitor)
        if key not in self._monitored_ops:
            _mxnet.silence_removed()
            op = self._make([flag for flag in self._flags if not flag[0].startswith("static_")])
            self._monitored_ops[key] = op
            callback, monitor_all = monitor
            if not isinstance(callback, GraphListener):
                callback = NetworkView(self.symbol, self._plan).translated(callback)
            _mxnet.register_op_hook(op, callback, monitor_all)
        return self._monitored_ops[key]

    def forget(self, monitor: tuple) -> None:
        """Delete the cached operators that were created for ``monitor``."""
        _remove_monitored(self._monitored_ops, monitor)
        _mxnet.silence_removed()


def _remove_monitored(monitored: dict[tuple, mx.nd.CachedOp], monitor: tuple | None = None) -> None:
    """Remove the operators that call ``monitor``, or all of them."""
    for key in list(monitored):
        op = monitored.pop(key, None) if monitor in (None, key[1]) else None
        if op is not None:
            _mxnet.remove_op_hook(op, thread=key[0])


def _types_of_tuples(answer: Any) -> Any:
    """Return the types of the namedtuples in what a block returned, nested as they are; None where there are none."""
    if not isinstance(answer, (list, tuple)):
        return None
    inside = [_types_of_tuples(item) for item in answer]
    own = type(answer) if hasattr(answer, "_fields") else None
    return (own, inside) if own or any(inside) else None


def _with_tuples(value: Any, types: Any) -> Any:
    """Return ``value``, nested lists, with namedtuples of these types."""
    if types is None:
        return value
    own, inside = types
    items = [_with_tuples(item, each) for item, each in zip(value, inside)]
    return items if own is None else own(*items)
