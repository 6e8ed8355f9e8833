"""The graphs of one block: traced, made in low precision, and run."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Callable, Dict, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..host.callbacks import hold_interrupts
from ..kernels.fit import device_of
from ..kernels.memory import write_gradients_early
from ..kernels.padding import LargeInputs
from ..messages.callers import warn_user
from ..precision.casts import copy_returned_inputs, widen_inputs
from ..precision.graph import Graph
from ..precision.heads import SCALE_NAME, has_loss_head, scale_heads
from ..precision.missing_kernels import FEW_ROWS
from ..precision.operators import kind_of
from ..precision.plan import Plan
from ..precision.subgraphs import has_control_flow
from . import _mxnet
from .as_arrays import reading_as_arrays
from .blocks import blocks_of
from .conversion import NetConversion, requested_gradient
from .nesting import Constants, Nesting, is_plain, joined, nested, nesting_of
from .parameter import overridden
from .reads import ANY, Reads
from .remembered import Left, Trace, apart
from .scaling import call_with_scale, needs_scale, remember_converted_call
from .scopes import Scopes, marks_now
from .static_shape import RecordedCalls
from .tracing import present_knowledge, tracing

# Global: one lock for building graphs, since nets of several conversions may share blocks and Parameters.
BUILDING = threading.RLock()


class Call(NamedTuple):
    """A kind of call of a converted block: all such calls have one FP32 graph."""

    training: bool
    # Whether autograd records, of which code may ask, and which ``pause`` in it ends.
    recording: bool
    # The nesting of the arguments (``_mxnet.flatten``): ``"[0, [0, -1]]"`` for ``(x, [y, None])``.
    structure: str
    device: str
    # ``_mxnet.lacks_states``; None for a block that is no recurrent layer.
    lacks_states: bool | None
    # ``kind_of`` each input, without None.
    kinds: tuple[str, ...]
    # The Python values among the arguments, such as False in ``net(x, False)``, from ``nesting.key_of``.
    constants: tuple
    # What the block's code asks of each input in a trace, such as its shape (``Graphs.needs``).
    known: tuple


class Conditions(NamedTuple):
    """What the low-precision graph of a kind of call depends on besides: ``Graphs.key_of`` checks it in each call."""

    # The graph has the workarounds (copies of inputs) for gradients that are added to what the array holds, as after
    # ``attach_grad("add")``. It is right for all inputs; a graph without them only for inputs without gradient arrays.
    adds_to_inputs: bool = False
    # If not None: the graph lacks workarounds of convolutions for inputs that are small beside the padding.
    large: LargeInputs | None = None
    # If not empty: a large FullyConnected trains in FP32 because it reads few rows. bfloat16 may be faster for inputs
    # with more elements than these.
    few: tuple[int, ...] = ()
    # The graph has loss heads. To multiply their gradients by the loss scale, it needs the dtypes of the inputs.
    has_heads: bool = False


class GraphKey(NamedTuple):
    """What identifies a low-precision graph of a block: the kind of call, and which of its Conditions hold."""

    call: Call
    # ``grad_req`` of all parameters of the block, on which some workarounds depend; empty where there is no backward.
    requested: tuple
    adds_to_inputs: bool
    large_inputs: bool
    few_rows: bool
    # Of the inputs, if loss heads multiply their gradients by the loss scale.
    dtypes: tuple | None
    # What the trace has read of Python: equal to itself alone. ``ANY`` in ``Graphs.key_of``.
    reads: Reads


class Graphs(Dict[GraphKey, "BuiltGraph"]):
    """The low-precision graphs of one block; a copy of the block has none.
    Of the graphs for one Python value, one shape, or one state of what code reads, the newest ``LIMIT`` are kept."""

    # A number that changes in each call would leave a graph in each.
    LIMIT = 16

    def __init__(self, block: HybridBlock, compute: str) -> None:
        super().__init__()
        self.conditions: dict[Call, Conditions] = {}
        self._block, self._compute = block, compute
        self._params = list(block.collect_params().values())
        # The keys of graphs that differ in ``reads`` alone, newest first, by their key without it.
        self._alike: dict[GraphKey, list[GraphKey]] = {}
        # What the block's code has asked for in any trace: ``"shape"``, ``"dtype"``, ``"ctx"``.
        self._needs: tuple[str, ...] = ()
        self._warned = False

    def __reduce__(self) -> tuple:
        return type(None), ()

    def find(self, structure: str, device: str, constants: tuple, inputs: Sequence[NDArray]) -> BuiltGraph | None:
        """Return the graph for a call with these arguments, None being left out of ``inputs``, or None."""
        key = self.key_of(self.call_of(structure, device, constants, inputs), inputs)
        return next((self.get(each) for each in self._alike.get(key, ()) if each.reads.hold()), None)

    def call_of(self, structure: str, device: str, constants: tuple, inputs: Sequence[NDArray]) -> Call:
        return Call(
            autograd.is_training(),
            autograd.is_recording(),
            structure,
            device,
            _mxnet.lacks_states(self._block),
            tuple([kind_of(array) for array in inputs]),
            constants,
            tuple([tuple(getattr(array, name) for name in self._needs) for array in inputs]) if self._needs else (),
        )

    def key_of(self, call: Call, inputs: Sequence[NDArray]) -> GraphKey:
        its = self.conditions.get(call, Conditions())
        return GraphKey(
            call,
            tuple([param.grad_req for param in self._params]) if call.training or call.recording else (),
            its.adds_to_inputs or (call.recording and any(array.grad is not None for array in inputs)),
            its.large is not None and its.large.at([array.shape for array in inputs]),
            bool(its.few) and all(array.size <= most for array, most in zip(inputs, its.few)),
            tuple([array.dtype for array in inputs]) if its.has_heads and needs_scale(self._compute) else None,
            ANY,
        )

    def add(self, built: BuiltGraph, structure: str, device: str, constants: tuple, inputs: Sequence[NDArray]) -> None:
        """Store a graph, drop those that it replaces, and the oldest of too many; the caller holds ``BUILDING``."""
        self._needs = tuple(sorted({*self._needs, *built.needs}))
        self._params = list(self._block.collect_params().values())  # a child may be new
        call = self.call_of(structure, device, constants, inputs)
        self.conditions[call] = built.conditions
        key = self.key_of(call, inputs)
        alike = [each for each in self if each.call == call and each.dtypes == key.dtypes]
        same = [each for each in alike if each._replace(reads=ANY) == key and not each.reads.always_anew]
        # A graph with other conditions is never found again. With other requests the last one stays: a GAN has two.
        other = [
            each for each in alike if each._replace(requested=key.requested, reads=ANY) == key and each not in same
        ]
        kept = [*same[1 - self.LIMIT :], *[each for each in other if each.requested != key.requested][-1:]]
        for each in [each for each in alike if each not in kept]:
            del self[each]
        if built.reads.always_anew:
            self._warn("always anew", built.reads.always_anew)
        elif len(same) >= self.LIMIT:
            self._warn("many values", same[-1].reads.changed())
        self[key._replace(reads=built.reads)] = built
        self._drop_special()
        self._alike = {}
        for each in self:
            self._alike.setdefault(each._replace(reads=ANY), []).insert(0, each)

    def _drop_special(self) -> None:
        """Drop the graphs of the oldest kinds of call with Python values or shapes, if there are too many."""
        special = list(dict.fromkeys(each.call for each in self if each.call.constants or each.call.known))
        for oldest in special[: -self.LIMIT]:
            del self.conditions[oldest]
            for each in [each for each in self if each.call == oldest]:
                del self[each]
            self._warn("many shapes" if oldest.known else "many arguments")

    def _warn(self, why: str, what: str | None = None) -> None:
        if not self._warned:
            self._warned = True
            from ..messages.retraced import slow  # what is said is loaded where it is needed

            warn_user(slow(why, self._block.name, what, self.LIMIT))


class BuiltGraph(NamedTuple):
    """One graph of a block in low precision, ready to run."""

    # Without the outputs of ``left``, which the FP32 graph ``symbol`` and the plan have.
    traced: _mxnet.TracedGraph
    symbol: mx.sym.Symbol
    op: _LowPrecisionOp
    plan: Plan
    # The shapes of the inputs for which the graph was built, by the names of the input variables.
    shapes: dict[str, tuple]
    # Each parameter with its ``requested_gradient`` at the build.
    requested: list[tuple[Parameter, str]]
    nesting: Nesting | None
    # What the block's code has asked of its inputs.
    needs: frozenset[str]
    conditions: Conditions
    reads: Reads
    left: Left

    def run(self, inputs: list, monitor: tuple | None) -> Any:
        """Run the graph on the call's arrays, without None; return the output, nested as the block nests it.
        Sets the attributes that the block's code sets, and runs the hooks of blocks inside."""
        out = self.op(inputs, monitor)
        return answered([out] if isinstance(out, NDArray) else out, self.nesting, self.left, self.traced)


def answered(flat: list, nesting: Nesting | None, left: Left, traced: _mxnet.TracedGraph) -> Any:
    """Return what the code returns, of a graph's outputs; sets the attributes that it sets, and runs hooks inside."""
    if nesting is None:
        return _mxnet.regroup(flat, traced.out_format)
    answer, *values = nested(Nesting(list, [nesting, *left.nestings]), flat)
    left.repeat(values)
    return answer


class UntraceableError(Exception):
    """Says that a block's Python code cannot run on Symbols; ``args`` are the block and the exception it raised."""


def build(block: HybridBlock, args: tuple, constants: Constants, conversion: NetConversion) -> BuiltGraph:
    """Trace ``block`` for a call, and return its low-precision graph, for training or inference as autograd is set now.
    ``args`` and ``constants`` are as ``nesting.split`` returns them. Parameters become ``LowParameter``, or get their
    shape. Raises ``UntraceableError``, and what ``NetConversion.build_graph`` and ``refuse_contrib_amp`` raise."""
    clone, nesting, needs, reads, left, paused = trace_block(block, args, constants)
    _mxnet.infer_shapes(clone, args)
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    original, compute = Graph.from_symbol(symbol), conversion.policy.compute
    inputs = named_inputs(data, args)
    shapes = {name: array.shape for name, array in inputs.items()}
    device = device_of(next(iter(inputs.values())).ctx)
    large = LargeInputs(original, list(shapes), compute) if device == "cpu" else None
    # Restricted to large inputs only if a convolution would need a workaround for small ones, and these are large.
    large = large if large and large.at(list(shapes.values())) else None
    has_loops = has_control_flow(original)
    # In a body of control flow MXNet adds the gradients of the iterations, whatever array the input's gradient has.
    adds_to_inputs = has_loops or any(array.grad is not None for array in inputs.values())
    params = {param.name: param for is_data, param in traced.op_args if not is_data}
    requested = [(param, requested_gradient(param)) for param in params.values()]
    graph, plan = conversion.build_graph(
        *(block, original, params, inputs, device),
        statistics=symbol.list_auxiliary_states(),
        large_inputs=large is not None,
        adds_to_inputs=adds_to_inputs,
    )
    if half := {name for name, array in inputs.items() if kind_of(array) == "float16"}:
        widen_inputs(graph, half)
    copy_returned_inputs(graph)
    is_scaled = needs_scale(compute)
    dtypes = {name: array.dtype for name, array in inputs.items()}
    has_heads = scale_heads(graph, dtypes) if is_scaled else has_loss_head(graph)
    if autograd.is_training() and device == "cpu":
        write_gradients_early(graph)
    # With static_shape, MXNet may run what reads a loop's outputs before the loop.
    flags = [flag for flag in _mxnet.flags(block) if not (has_loops and flag[0] == "static_shape")]
    sources = dict(zip(symbol.list_inputs(), traced.op_args))
    is_unscaled = has_heads and not is_scaled
    op = _LowPrecisionOp(graph.to_symbol(), plan, sources, flags, paused, has_unscaled_heads=is_unscaled)
    # A user's Plan stays, whatever the shapes are.
    has_few_rows = conversion.plan is None and any(each.reason == FEW_ROWS for each in plan.decisions.values())
    few = tuple(array.size for array in inputs.values()) if has_few_rows else ()
    conditions = Conditions(adds_to_inputs, large, few, has_heads)
    kept = without_last_outputs(symbol, left.outputs)
    # ``export`` takes the Parameters from here.
    shown = traced._replace(graph=(data, kept), op_args=[sources[name] for name in kept.list_inputs()])
    shown = shown if left.outputs else traced
    return BuiltGraph(shown, symbol, op, plan, shapes, requested, nesting, needs, conditions, reads, left)


def without_last_outputs(symbol: mx.sym.Symbol, count: int) -> mx.sym.Symbol:
    outputs = len(symbol.list_outputs()) - count
    return mx.sym.Group([symbol[i] for i in range(outputs)]) if count else symbol


def named_inputs(data: Sequence[mx.sym.Symbol], args: tuple) -> dict[str, NDArray]:
    """Return the arrays in ``args`` by the names of the variables ``data`` (``"data0"``) that stand for them."""
    return {variable.name: array for variable, array in zip(data, _mxnet.arrays_in(args))}


class _Traced(NamedTuple):
    clone: HybridBlock
    nesting: Nesting | None
    # What the code asked of Symbols.
    needs: frozenset[str]
    reads: Reads
    # What it left behind; its arrays are the last outputs of the clone's graph.
    left: Left
    # The names of variables that the code reads in ``pause`` alone.
    paused: frozenset[str]


def trace_block(block: HybridBlock, args: tuple, constants: Constants, *, undone: bool = False) -> _Traced:
    """Trace a copy of ``block``; return it, and what is known of its output and its code.
    The nesting is None for a SymbolBlock, which has a graph already. Raises ``UntraceableError``, which names the
    innermost block that failed. With ``undone``, what the code has changed in place is as before."""
    _mxnet.refuse_contrib_amp()
    with BUILDING:  # what a trace changes in MXNet, such as ``Symbol.reshape``, all threads see
        try:
            return _trace_once(block, args, constants, None, undone)
        except UntraceableError as error:
            first = error
        arrays = _mxnet.arrays_in(args)
        if not arrays:
            raise first
        from .known import Knowledge, asks_for_more

        named = dict(zip(["data"] if len(arrays) == 1 else [f"data{i}" for i in range(len(arrays))], arrays))
        knowledge = Knowledge({**block.collect_params(), **named}, arrays[0].ctx)
        try:
            return _trace_once(block, args, constants, knowledge, undone)
        except UntraceableError as error:
            raise (error if asks_for_more(first.args[1]) else first) from None


def _trace_once(block: HybridBlock, args: tuple, constants: Constants, knowledge: Any, undone: bool) -> _Traced:
    """Do what ``trace_block`` does, with Symbols that know what ``knowledge`` has, or plain ones if it is None."""
    clone = _mxnet.copied(block)
    trace = Trace(block, clone, blocks_of(block))
    nestings: list[Nesting] = []
    lefts = [Left([], [], [])]

    def called(forward: Callable, functions: Any, given: tuple, params: dict) -> Any:
        # In place of ``hybrid_forward``; returns what MXNet's own trace accepts.
        values = joined(given, constants)
        if knowledge is not None:
            functions, values, params = knowledge.arguments(functions, values, params)
        answer = forward(functions, *values, **params)
        arrays: list[mx.sym.Symbol] = []
        nestings.append(nesting_of(answer, arrays))
        if not arrays:
            raise ValueError("it returns no array")
        lefts.append(trace.left(given))
        arrays.extend(apart(lefts[-1].arrays, arrays))
        numpy = _mxnet.is_numpy(arrays[0])
        if is_plain(nestings[-1]) and not lefts[-1].arrays and all(_mxnet.is_numpy(each) is numpy for each in arrays):
            return answer
        return [_mxnet.of_kind(each, numpy) for each in arrays]

    try:
        for param in block.collect_params().values():
            param.var()  # one that is made in a scope would keep its marks
        scopes = Scopes()
        # A plan is by name: operators that the user's code does not name are numbered from 0 in every trace.
        with tracing(knowledge), trace.noting(), reading_as_arrays(), mx.name.NameManager(), scopes:
            is_traced = _mxnet.trace(clone, args, called)
        paused: frozenset[str] = frozenset()
        if scopes.has_marked:
            from .following import follow  # loaded where a scope was met

            paused = follow(clone, scopes.recording)
        if is_traced and not _mxnet.shapes_fit(clone, args):
            from .broadcasting import broadcast

            broadcast(clone, args)
        if constants and not is_traced:
            raise ValueError("a SymbolBlock takes arrays alone")
    except Exception as error:
        trace.undo()
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        owners = [f.f_locals.get("self") for f in frames if f.f_code.co_name in ("hybrid_forward", "forward")]
        blocks = [block if each is clone else each for each in owners if isinstance(each, Block)]
        raise UntraceableError([block, *blocks][-1], error) from error
    if undone:
        trace.undo_changes()
    needs = frozenset(knowledge.needs if knowledge else ())
    return _Traced(clone, nestings[-1] if is_traced else None, needs, trace.reads, lefts[-1], paused)


def call_on_symbols(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class in a trace; the Symbols in its output know what mxmp's trace knows."""
    if _mxnet.own_symbol(block) is not None and (marks := marks_now()):
        from .following import marked

        block = marked(block, marks)
    if present_knowledge() is None:
        return _mxnet.forward(block, args)
    from .known import called_with_symbols

    return called_with_symbols(block, args)


# Global: one lock for MXNet's engine, which is one for the process.
_engine = threading.RLock()
# Global: the functions that free the CachedOps which nobody uses any more; see ``_CachedOp``.
_unused: deque[Callable[[], None]] = deque()


@contextmanager
def engine_lock() -> Iterator[None]:
    """Let only one thread at a time pass operators to MXNet's engine in a ``with`` block; flush the bulk at the end."""
    try:
        # Two threads can deadlock whose operators read and write the same two arrays (weights, running statistics), as
        # the engine registers the arrays of an operator one by one; so can threads that run nets without mxmp.
        with _engine:
            try:
                yield
            finally:
                # MXNet collects operators to pass them as a bulk; this passes them under the lock.
                with mx.engine.bulk(0):  # flushes
                    pass
    finally:
        _free_unused()


class _CachedOp(mx.nd.CachedOp):
    """A CachedOp that is freed by a thread that holds ``engine_lock``."""

    def __del__(self) -> None:
        # To free one with ``static_shape``, MXNet passes operators to its engine that write all arrays that it has
        # read; without the lock these could deadlock with another CachedOp over the same Parameters. ``__del__`` may
        # run at any time, so it does not wait: if another thread holds the lock, that thread frees the CachedOp.
        if _unused is not None:  # as it is at the end of the interpreter
            _unused.append(super().__del__)
            _free_unused()


def _free_unused() -> None:
    """Free the CachedOps of ``_unused``, unless another thread holds the engine's lock and so will do it."""
    while _unused and _engine.acquire(blocking=False):
        try:
            if _unused:
                _unused.popleft()()
        finally:
            _engine.release()


class _LowPrecisionOp:
    """Runs the low-precision graph of a block through MXNet's CachedOp, which no two threads may use at once.
    Each thread that records has one, or that of a thread that has ended, as the backward may run at any time after the
    call; all calls that autograd does not record share one."""

    def __init__(
        self,
        symbol: mx.sym.Symbol,
        plan: Plan,
        sources: dict[str, tuple[bool, Any]],
        flags: list,
        paused: frozenset[str],
        *,
        has_unscaled_heads: bool,
    ) -> None:
        names = symbol.list_inputs()
        self.symbol = symbol
        self._plan = plan
        self.has_unscaled_heads = has_unscaled_heads
        self._reads_scale = SCALE_NAME in names
        self._sources = [sources.get(name, (True, -1)) for name in names]  # the loss scale is the last array
        # The ``data`` of a user's own class may compute what the net reads, such as a weight with dropout.
        self._computed = frozenset(at for is_input, at in self._sources if not is_input and "data" in overridden(at))
        # No gradient is written of these: the Trainer leaves them as they are, without weight decay.
        self._paused = [i for i, name in enumerate(names) if name in paused]
        data = [i for i, (is_input, _) in enumerate(self._sources) if is_input]
        params = [i for i, (is_input, _) in enumerate(self._sources) if not is_input]
        self._flags = [("data_indices", data), ("param_indices", params), *flags]
        # MXNet fuses pointwise operators of a CachedOp on a GPU, and only with ``static_alloc``.
        self._is_fused = plan.device == "gpu" and bool(dict(flags).get("static_alloc"))
        # Where the arrays are weights that a CachedOp with ``static_shape`` remembers.
        is_static = bool(dict(flags).get("static_shape"))
        remembered = [i for i in params if self._sources[i][1] not in self._computed and i not in self._paused]
        self._static = remembered if is_static else []
        self._shared: mx.nd.CachedOp | None = None
        self._recording: dict[int, RecordedCalls] = {}  # by a thread's number
        self._monitored: Any = None  # MonitoredOps, from the first call with an op hook on

    def __call__(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        """Run the graph, with the array of the loss scale if it has loss heads; return its output or outputs."""
        if self._reads_scale:
            out = call_with_scale(lambda scale: self._run([*inputs, scale], monitor), inputs[0].ctx)
        else:
            out = self._run(inputs, monitor)
        if autograd.is_recording():
            first = out if isinstance(out, NDArray) else out[0]
            remember_converted_call(first, has_unscaled_heads=self.has_unscaled_heads)
        return out

    def _run(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        """Run the right CachedOp on ``inputs``, with the loss scale last if the graph reads it."""
        # An input such as ``x[1:2]`` may begin where a GPU cannot read two elements at once, as MXNet's fused kernels
        # do.
        if self._is_fused:
            inputs = [array if _mxnet.is_aligned(array) else array.copy() for array in inputs]
        with engine_lock():
            values = [
                inputs[at] if is_input else at.data() if at in self._computed else _mxnet.data(at)
                for is_input, at in self._sources
            ]
            for at in self._paused:
                values[at] = values[at].detach()
            monitored = None if monitor is None else self._monitored_op(monitor)
            if monitored is not None:
                with hold_interrupts():
                    return monitored(*values)
            if not autograd.is_recording():
                self._shared = self._shared or self._make(self._flags)
                return self._shared(*values)
            return self._of_this_thread().run(values, [values[i] for i in self._static])

    def _of_this_thread(self) -> RecordedCalls:
        """Return what runs the calls of this thread that autograd records; the caller holds ``engine_lock``."""
        # Those of ended threads are not freed: autograd's record may still need them, and would then free them at a
        # time when other threads pass operators to the engine.
        thread = threading.get_ident()
        if thread not in self._recording:
            alive = {each.ident for each in threading.enumerate()}
            ended = next((each for each in self._recording if each not in alive), None)
            made = RecordedCalls(self._make, self._flags) if ended is None else self._recording.pop(ended)
            self._recording[thread] = made
        return self._recording[thread]

    def _make(self, flags: list) -> mx.nd.CachedOp:
        return _CachedOp(copy.copy(self.symbol), flags)

    def _monitored_op(self, monitor: tuple) -> mx.nd.CachedOp | None:
        """Return this thread's CachedOp for calls with the op hook ``monitor``, or None if it does not get this one."""
        if self._monitored is None:
            from .monitored import MonitoredOps

            self._monitored = MonitoredOps(self.symbol, self._plan, self._flags, _CachedOp)
            weakref.finalize(self, self._monitored.remove).atexit = False
        return self._monitored.op(monitor)

    def forget(self, monitor: tuple) -> None:
        """Drop the CachedOps of all threads with the op hook ``monitor``, which has no listener any more."""
        if self._monitored is not None:
            self._monitored.forget(monitor)
