"""The graphs of one block: traced, made in low precision, and run."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections import deque
from contextlib import contextmanager
from math import prod
from traceback import walk_tb
from typing import Any, Callable, Collection, Dict, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..callbacks import hold_interrupts
from ..kernels.memory import write_gradients_early
from ..kernels.padding import LargeInputs
from ..policy import is_policy_text
from ..precision.casts import inserted
from ..precision.graph import Graph, as_shape
from ..precision.heads import SCALE_NAME, has_loss_head, scale_heads
from ..precision.missing_kernels import FEW_ROWS
from ..precision.monitoring import GraphListener, NetworkView
from ..precision.plan import Plan
from ..precision.subgraphs import has_control_flow
from . import _mxnet
from .conversion import NetConversion, requested_gradient
from .known import Functions, Knowledge, asks_for_more, is_knowing, knowing, known
from .nesting import Constants, Nesting, is_plain, joined, nested, nesting_of, split
from .parameter import overridden
from .scaling import call_with_scale, needs_scale, remember_converted_call

# Global: one lock for building graphs, since nets of several conversions may share blocks and Parameters.
BUILDING = threading.RLock()
# Global: whether mxmp is tracing a block on this thread; see ``is_tracing``.
_local = threading.local()


class GraphKey(NamedTuple):
    """A kind of call of a converted block; the block has one graph for each kind of call.

    Attributes
    ----------
    training : bool
        True in training mode (``autograd.is_training()``).
    structure : str
        How the arguments are nested, as text: ``"[0, [0, -1]]"`` for an array and a list of an array and None.
    device : str
        ``"cpu"`` or ``"gpu"``.
    lacks_states : bool or None
        For a recurrent layer, True if the call passes no initial states, else False. None for other blocks.
    sparse : tuple of int
        The positions of the inputs that are sparse arrays, counted from 0 without None.
    dtypes : tuple of type, or None
        If the loss scale multiplies the gradients of loss heads in the graph (operators that write their own gradient,
        such as ``SoftmaxOutput``), the dtypes of its inputs, on which these products depend; else None.
    constants : tuple
        The Python values among the arguments, such as False in ``net(x, False)``, from ``nesting.key_of``.
    known : tuple
        What the block's code asks of its inputs in a trace, such as their shapes, for each input; see ``Graphs``.
    """

    training: bool
    structure: str
    device: str
    lacks_states: bool | None
    sparse: tuple[int, ...] = ()
    dtypes: tuple | None = None
    constants: tuple = ()
    known: tuple = ()


class Graphs(Dict[GraphKey, "BuiltGraph"]):
    """The low-precision graphs that were built for one block, by kind of call (``GraphKey``).

    ``hybridize``, ``cast`` and a new child of the block delete the dict. ``copy`` and ``pickle`` give an empty one, so
    that a copied block builds graphs of its own. Of the graphs that are right for one Python value among the arguments,
    or one shape, only the newest ``LIMIT`` are kept: a number that changes in each call would leave one in each.
    """

    LIMIT = 16

    def __init__(self) -> None:
        super().__init__()
        self._needs: frozenset[str] = frozenset()
        self._warned = False

    def __reduce__(self) -> tuple:
        return Graphs, ()

    def known_of(self, inputs: Sequence[NDArray]) -> tuple:
        """Return, for each input, what the block's code has asked for in any trace: shape, dtype or context."""
        names = sorted(self._needs)
        return tuple(tuple(getattr(array, name) for name in names) for array in inputs) if names else ()

    def add(self, name: str, key: GraphKey, built: BuiltGraph, inputs: Sequence[NDArray]) -> None:
        """Store the graph that was built for ``key`` and ``inputs``; drop the oldest of too many, and warn once.

        ``name`` is the block's, for the warning. The caller holds ``BUILDING``.
        """
        self._needs |= built.needs
        self[key._replace(dtypes=built.dtypes, known=self.known_of(inputs))] = built
        special = [each for each in self if each.constants or each.known]
        for oldest in special[: -self.LIMIT]:
            del self[oldest]
            if not self._warned:
                self._warned = True
                reason = "inputs of different shapes, which its code reads" if oldest.known else "different values"
                warnings.warn(
                    f"{name!r} was called with more than {self.LIMIT} {reason}. Each has a graph of its own, which is "
                    "traced at its first call, and only the last ones are kept. Pass a number that changes as an array "
                    "(mx.nd.array([0.3])), or leave the block as Python: mxmp.convert(net, exclude=...)",
                    stacklevel=7,
                )


class BuiltGraph(NamedTuple):
    """One graph of a block in low precision, ready to run, for one kind of call.

    ``GraphKey`` says what makes a kind: training mode, nesting of the arguments, device, initial states of a recurrent
    layer.

    Attributes
    ----------
    traced : TracedGraph
        The FP32 graph that it was made from.
    op : _LowPrecisionOp
        Runs the low-precision graph through MXNet's CachedOp.
    plan : Plan
        The dtype of every operator of the graph.
    shapes : dict of str to tuple
        The shapes of the inputs in the call for which the graph was built, by the names of the input variables
        (``{"data": (32, 3, 224, 224)}``).
    requested : list of (Parameter, str)
        Each parameter with what ``requested_gradient`` returned for it when the graph was built. Some workarounds
        depend on it.
    only_for : LargeInputs or None
        None: the graph is right for all shapes. Otherwise it lacks workarounds that a convolution needs whose input is
        small beside its padding, and is right only for shapes with which ``only_for.at(shapes)`` is True.
    has_few_rows : bool
        True if a large FullyConnected trains in FP32 because it reads few rows: bfloat16 may be faster for larger
        inputs than those in ``shapes``.
    adds_to_inputs : bool
        True: the graph is right if the gradient of an input is added to what its array holds, as after
        ``attach_grad("add")``. False: it lacks the workarounds for that, which take a copy of the input, and is right
        only for inputs that have no gradient array.
    dtypes : tuple of type, or None
        If the graph has loss heads that the loss scale multiplies, the dtypes of the inputs for which it was built;
        else None.
    nesting : Nesting or None
        How the arrays are nested in the block's output, and the Python values there; None for a SymbolBlock.
    needs : frozenset of str
        What the block's code has asked of its inputs: ``"shape"``, ``"dtype"``, ``"ctx"``.
    """

    traced: _mxnet.TracedGraph
    op: _LowPrecisionOp
    plan: Plan
    shapes: dict[str, tuple]
    requested: list[tuple[Parameter, str]]
    only_for: LargeInputs | None
    has_few_rows: bool
    adds_to_inputs: bool
    dtypes: tuple | None
    nesting: Nesting | None
    needs: frozenset[str]

    def serves(self, inputs: list) -> bool:
        """Return whether the graph is right for a call with ``inputs``; if not, the hook builds another in its place.

        A graph with an ``only_for`` lacks workarounds for inputs that are small beside the padding of a convolution,
        and is right only for shapes with which ``only_for.at`` returns True. A graph that ``has_few_rows`` is right
        only if no input has more elements than in the call for which it was built. While autograd records, a graph
        without ``adds_to_inputs`` is right only for inputs without gradient arrays. A graph with unscaled loss heads is
        right only for a call of which ``needs_scale`` returns False. In training mode, or while autograd records, no
        graph is right any more if a parameter's ``grad_req`` differs from what it requested when the graph was built.
        ``inputs`` are the call's arrays, without None; their dtypes are not compared.
        """
        if self.only_for is not None and not self.only_for.at([array.shape for array in inputs]):
            return False
        if self.has_few_rows and any(array.size > prod(shape) for array, shape in zip(inputs, self.shapes.values())):
            return False
        if not self.adds_to_inputs and autograd.is_recording() and _have_gradients(inputs):
            return False
        if self.op.has_unscaled_heads and needs_scale(self.plan.policy.compute):
            return False
        if not (autograd.is_training() or autograd.is_recording()):
            return True
        return all(param.grad_req == request for param, request in self.requested)

    def run(self, inputs: list, monitor: tuple | None) -> Any:
        """Run the graph on the arrays ``inputs`` and return the block's output, nested as ``hybrid_forward`` nests it.

        ``inputs`` is the flat list of the call's arrays, without None. ``monitor`` is the pair ``(callback,
        monitor_all)`` that ``register_op_hook`` was given, or None.
        """
        out = self.op(inputs, monitor)
        flat = [out] if isinstance(out, NDArray) else out
        return _as_nested(flat, self.nesting, self.traced)


def _as_nested(flat: list, nesting: Nesting | None, traced: _mxnet.TracedGraph) -> Any:
    """Return a graph's outputs as the block nests them; ``nesting`` is None for a SymbolBlock."""
    return _mxnet.regroup(flat, traced.out_format) if nesting is None else nested(nesting, flat)


class UntraceableError(Exception):
    """Says that a block's Python code cannot run on Symbols; ``args`` are the block and the exception it raised."""


def is_tracing() -> bool:
    """Return whether mxmp is tracing a block on this thread, and so calls the block's children with Symbols.

    The hook of a converted block calls this function if the block is called with Symbols. If the result is True, the
    hook runs the block's Python code on the Symbols. If it is False, MXNet may be tracing an unconverted block around
    this one. The casts would be lost in that trace, so the hook raises an error.
    """
    return getattr(_local, "tracing", False)


@contextmanager
def tracing() -> Iterator[None]:
    """Make ``is_tracing()`` True on this thread within the ``with`` block, and afterwards what it was before.

    mxmp traces a Gluon block within it. Hooks of converted blocks accept Symbols while ``is_tracing()`` is True.
    """
    before, _local.tracing = is_tracing(), True
    try:
        yield
    finally:
        _local.tracing = before


def _have_gradients(inputs: Collection[NDArray]) -> bool:
    """Return whether any of ``inputs`` has a gradient array, as after ``attach_grad``.

    An array that a recorded operator has computed has none.
    """
    return any(array.grad is not None for array in inputs)


def build(block: HybridBlock, args: tuple, constants: Constants, device: str, conversion: NetConversion) -> BuiltGraph:
    """Trace ``block`` for a call with ``args``, and return its low-precision graph, ready to run.

    The graph is for training or inference, as ``autograd.is_training()`` says now. Parameters that the conversion
    stores in float16 become ``LowParameter``; Parameters that wait for their shapes are initialized.

    Parameters
    ----------
    block : HybridBlock
        The block that was called. Nothing of it changes but its Parameters.
    args, constants
        The arguments of the call, as ``nesting.split`` returns them.
    device : str
        ``"cpu"`` or ``"gpu"``.
    conversion : NetConversion
        The call of ``convert`` whose policy or plan decides the dtypes.

    Raises
    ------
    UntraceableError
        The block's Python code fails on Symbols.
    ValueError
        A parameter is float16, bfloat16 or a float64 that is trained, or is stored in float16 for another net and
        needed in FP32 here; or the conversion's Plan is of another net.
    TypeError
        A parameter would be stored in float16, and MXNet's own Trainer holds it.
    RuntimeError
        ``amp.init()`` of ``mxnet.contrib.amp`` was called.
    """
    clone, nesting, needs = _trace(block, args, constants)
    _mxnet.infer_shapes(clone, args)
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    params = {param.name: param for is_data, param in traced.op_args if not is_data}
    requested = [(param, requested_gradient(param)) for param in params.values()]
    inputs = _named_inputs(data, args)
    shapes = {name: array.shape for name, array in inputs.items()}
    large = LargeInputs(Graph.from_symbol(symbol), list(shapes), conversion.policy.compute) if device == "cpu" else None
    # Restricted to large inputs only if a convolution would need a workaround for small ones, and these are large.
    only_for = large if large and large.at(list(shapes.values())) else None
    # In a body of control flow MXNet adds the gradients of the iterations, whatever array the input's gradient has.
    adds_to_inputs = _have_gradients(inputs.values()) or has_control_flow(Graph.from_symbol(symbol))
    graph, plan = conversion.build_graph(
        *(block, symbol, params, device),
        large_inputs=only_for is not None,
        shapes=shapes,
        adds_to_inputs=adds_to_inputs,
        sparse=[name for name, array in inputs.items() if isinstance(array, BaseSparseNDArray)],
    )
    dtypes = {name: array.dtype for name, array in inputs.items()}
    _copy_returned_inputs(graph)
    scales = needs_scale(conversion.policy.compute)
    has_scaled_heads = scales and scale_heads(graph, dtypes)
    if autograd.is_training() and device == "cpu":
        write_gradients_early(graph)
    flags = _mxnet.flags(block)
    if has_control_flow(graph):  # with static_shape, MXNet may run what reads a loop's outputs before the loop
        flags = [flag for flag in flags if flag[0] != "static_shape"]
    sources = dict(zip(symbol.list_inputs(), traced.op_args))
    has_unscaled_heads = not scales and has_loss_head(graph)
    op = _LowPrecisionOp(graph.to_symbol(), plan, sources, flags, has_unscaled_heads=has_unscaled_heads)
    built_for = tuple(dtypes.values()) if has_scaled_heads else None
    # A user's Plan stays, whatever the shapes are.
    few = conversion.plan is None and any(decision.reason == FEW_ROWS for decision in plan.decisions.values())
    return BuiltGraph(traced, op, plan, shapes, requested, only_for, few, adds_to_inputs, built_for, nesting, needs)


def _copy_returned_inputs(graph: Graph) -> None:
    """Let ``graph`` return copies where it returns inputs or Parameters as they are, in place.

    MXNet's CachedOp takes such an output and the variable for one array. So the gradient of the output is lost, and in
    a graph with control dependencies (``write_gradients_early``) the backward may fail. Python code has neither fault.
    """
    for position, head in enumerate(graph.heads):
        if head.node.is_variable:
            graph.heads[position] = inserted("_copy", f"{head.node.name}_returned", [head])


class TracedCall(NamedTuple):
    """The FP32 graph of one call of a block, traced without running an operator.

    Attributes
    ----------
    symbol : Symbol
        The graph.
    inputs : dict of str to NDArray
        The arrays of the call, by the names of the graph's variables.
    params : dict of str to Parameter
        Those that the graph reads.
    nested : callable
        Takes the flat list of the graph's outputs, and returns them as the block nests them.
    """

    symbol: mx.sym.Symbol
    inputs: dict[str, NDArray]
    params: dict[str, Parameter]
    nested: Callable[[list[NDArray]], Any]


def traced_call(block: HybridBlock, args: tuple) -> TracedCall:
    """Return the FP32 graph of ``block(*args)`` in autograd's present mode; ``block`` stays as it is.

    Raises ``ValueError`` if the block's Python code fails on Symbols.
    """
    args, constants = split(args)
    try:
        clone, nesting, _ = _trace(block, args, constants)
    except UntraceableError as error:
        culprit, reason = error.args
        policies = [each for each in constants.values() if isinstance(each, str) and is_policy_text(each)]
        hint = f"; a policy is given by name, policy={policies[0]!r}" if policies else ""
        raise ValueError(f"{culprit.name!r} cannot be traced, so it has no graph to plan: {reason}{hint}") from error
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    names = set(symbol.list_inputs())
    params = {param.name: param for param in block.collect_params().values() if param.name in names}
    inputs = {name: array for name, array in _named_inputs(data, args).items() if name in names}
    return TracedCall(symbol, inputs, params, lambda outs: _as_nested(outs, nesting, traced))


def traced_alone(
    block: HybridBlock, args: tuple, training: bool
) -> tuple[mx.sym.Symbol, dict[str, NDArray], dict[str, Parameter]]:
    """Trace ``block`` without converting it; return its FP32 graph, and the graph's inputs and Parameters by name.

    The trace is that of a call with ``args``, in training mode if ``training`` is True, else in inference mode. The
    trace leaves ``block`` as it is and runs no operator, so parameters may still wait for their shapes. Raises
    ``ValueError`` if the block's Python code fails on Symbols.
    """
    with autograd.train_mode() if training else autograd.predict_mode():
        call = traced_call(block, args)
    return call.symbol, call.inputs, call.params


def _named_inputs(data: Sequence[mx.sym.Symbol], args: tuple) -> dict[str, NDArray]:
    """Return a dict from the name of each input variable of a graph (``"data0"``) to its array in ``args``.

    ``data`` are these variables, in the order of the arrays in ``args``, which may also hold None.
    """
    arrays = [array for array in _mxnet.flatten(args)[0] if array is not None]
    return {variable.name: array for variable, array in zip(data, arrays)}


def _trace(block: HybridBlock, args: tuple, constants: Constants) -> tuple[HybridBlock, Nesting | None, frozenset[str]]:
    """Trace ``block`` for a call; return a copy of it, the nesting of its output, and what its code asked of Symbols.

    ``args`` and ``constants`` are what ``nesting.split`` returns. ``_mxnet.traced_graph`` returns the FP32 graph of the
    copy, which shares its Parameters with ``block``. The nesting of a SymbolBlock, which has a graph already, is None.
    Code that fails on plain Symbols is run again with Symbols that know their shape, dtype and context. Raises
    ``UntraceableError``, which names the innermost block whose Python code failed, and ``RuntimeError`` if
    ``amp.init()`` of ``mxnet.contrib.amp`` was called.
    """
    _mxnet.refuse_contrib_amp()
    try:
        return _trace_once(block, args, constants, None)
    except UntraceableError as error:
        first = error
    arrays = [array for array in _mxnet.flatten(args)[0] if array is not None]
    if not arrays:
        raise first
    named = dict(zip(["data"] if len(arrays) == 1 else [f"data{i}" for i in range(len(arrays))], arrays))
    knowledge = Knowledge({**block.collect_params(), **named}, arrays[0].ctx)
    try:
        with knowing(knowledge):
            return _trace_once(block, args, constants, knowledge)
    except UntraceableError as error:
        raise (error if asks_for_more(first.args[1]) else first) from None


def _trace_once(
    block: HybridBlock, args: tuple, constants: Constants, knowledge: Knowledge | None
) -> tuple[HybridBlock, Nesting | None, frozenset[str]]:
    """Do what ``_trace`` does, with Symbols that know what ``knowledge`` has, or plain ones if it is None."""
    clone = _mxnet.copied(block)
    nestings: list[Nesting] = []

    def called(forward: Callable, functions: Any, given: tuple, params: dict) -> Any:
        # In place of ``hybrid_forward``; returns what MXNet's own trace accepts.
        values = joined(given, constants)
        if knowledge is not None:
            functions, values, params = Functions(functions), known(values), known(params)
        answer = forward(functions, *values, **params)
        arrays: list[mx.sym.Symbol] = []
        nestings.append(nesting_of(answer, arrays))
        if not arrays:
            raise ValueError("it returns no array")
        return answer if is_plain(nestings[-1]) else arrays

    try:
        # A plan is by name: operators that the user's code does not name are numbered from 0 in every trace.
        with tracing(), mx.name.NameManager():
            is_traced = _mxnet.trace(clone, args, called)
        if constants and not is_traced:
            raise ValueError("a SymbolBlock takes arrays alone")
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        owners = [f.f_locals.get("self") for f in frames if f.f_code.co_name in ("hybrid_forward", "forward")]
        blocks = [block if each is clone else each for each in owners if isinstance(each, Block)]
        raise UntraceableError([block, *blocks][-1], error) from error
    return clone, nestings[-1] if is_traced else None, frozenset(knowledge.needs if knowledge else ())


def call_on_symbols(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class in a trace; the Symbols in its output know what mxmp's trace knows."""
    if not is_knowing():
        return _mxnet.forward(block, args)
    if type(block).forward is HybridBlock.forward:
        return known(_mxnet.hybrid_forward(block, Functions(mx.sym), args, known))
    return known(_mxnet.forward(block, args))


def read_inputs(inputs: Sequence[Any]) -> tuple[tuple, list[NDArray]]:
    """Return ``inputs`` as arguments of a call, with an array for each shape, and a list of these new arrays.

    ``inputs`` may hold arrays, shapes such as ``(1, 3, 224, 224)``, None, and lists of these; and beside them bools,
    strings and numbers, which stay as they are. The array for a shape is FP32, on the CPU and not initialized. Raises
    ``ValueError`` for anything else, and for numbers alone.
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
    beside = any(isinstance(each, _INPUTS[:-1]) for each in inputs)
    return tuple(each if beside and isinstance(each, (bool, int, float, str)) else read(each) for each in inputs), made


_INPUTS = (NDArray, list, tuple, type(None))
# Global: one lock for MXNet's engine, which is one for the process.
_engine = threading.RLock()
# Global: the functions that free the CachedOps which nobody uses any more; see ``_CachedOp``.
_unused: deque[Callable[[], None]] = deque()


@contextmanager
def engine_lock() -> Iterator[None]:
    """Let only one thread at a time pass operators to MXNet's engine in a ``with`` block; flush the bulk at the end.

    Without this lock two threads can deadlock whose operators read and write the same two arrays (weights, running
    statistics), because the engine registers the arrays of an operator one by one. (Threads that run nets without mxmp
    can deadlock for the same reason.) MXNet collects some operators to pass them together, as a bulk. The flush makes
    MXNet pass these operators while the lock is still locked.
    """
    try:
        with _engine:
            try:
                yield
            finally:
                with mx.engine.bulk(0):  # flushes
                    pass
    finally:
        _free_unused()


class _CachedOp(mx.nd.CachedOp):
    """A CachedOp that is freed by a thread that holds ``engine_lock``.

    To free one that ran with ``static_shape``, MXNet passes operators to its engine that write all arrays which the
    CachedOp has read. Without the lock these could deadlock with the operators of a thread that runs another CachedOp
    over the same Parameters. Python may call ``__del__`` at any time, so ``__del__`` does not wait for the lock: if
    another thread holds it, that thread frees the CachedOp when it unlocks.
    """

    def __del__(self) -> None:
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
    """Runs the low-precision graph of a block through MXNet's CachedOp.

    A CachedOp must not be used by several threads at once, and the backward of a recorded call may run at any time
    after the call. So each thread that records has a CachedOp of its own; a new thread takes over that of one that has
    ended. All calls that autograd does not record use one shared CachedOp, one call at a time.

    Parameters
    ----------
    symbol : Symbol
        The low-precision graph.
    plan : Plan
        The plan that the graph follows: the dtype of every operator.
    sources : dict of str to (bool, int or Parameter)
        Where the value of each variable of the FP32 graph comes from: ``(True, i)`` for the i-th input array, ``(False,
        parameter)`` for a Parameter.
    flags : list of (str, value)
        The flags that ``hybridize`` was given, such as ``("static_alloc", True)``.
    has_unscaled_heads : bool
        Whether the graph has loss heads whose gradients the loss scale does not multiply.
    """

    def __init__(
        self,
        symbol: mx.sym.Symbol,
        plan: Plan,
        sources: dict[str, tuple[bool, Any]],
        flags: list,
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
        indices: dict[bool, list[int]] = {True: [], False: []}
        for i, (is_input, _) in enumerate(self._sources):
            indices[is_input].append(i)
        self._flags = [("data_indices", indices[True]), ("param_indices", indices[False]), *flags]
        # MXNet fuses pointwise operators of a CachedOp on a GPU, and only with ``static_alloc``.
        self._is_fused = plan.device == "gpu" and bool(dict(flags).get("static_alloc"))
        self._shared: mx.nd.CachedOp | None = None
        self._recording: dict[int, mx.nd.CachedOp] = {}  # from a thread's number to its CachedOp
        # From a thread's number to its CachedOp with an op hook, and the monitor that the hook was registered with.
        self._monitored: dict[int, tuple[mx.nd.CachedOp, tuple]] = {}
        weakref.finalize(self, _remove_monitored, self._monitored).atexit = False

    def __call__(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        """Run the graph on the flat list ``inputs``; return its output, or the list of its outputs.

        If the graph has loss heads, they read the loss scale from one more input array, which this method passes.
        ``monitor`` is the pair ``(callback, monitor_all)`` that ``register_op_hook`` was given, or None.
        """
        if self._reads_scale:
            out = call_with_scale(lambda scale: self._run([*inputs, scale], monitor), inputs[0].ctx)
        else:
            out = self._run(inputs, monitor)
        if autograd.is_recording():
            first = out if isinstance(out, NDArray) else out[0]
            remember_converted_call(first, has_unscaled_heads=self.has_unscaled_heads)
        return out

    def _run(self, inputs: Sequence[NDArray], monitor: tuple | None) -> Any:
        """Run the right CachedOp on ``inputs`` and the Parameters; return its output, or the list of its outputs.

        The choice of CachedOp depends on the thread, on whether autograd records, and on the op hook ``monitor``, a
        pair ``(callback, monitor_all)`` or None. The last of ``inputs`` is the array of the loss scale if the graph has
        loss heads. An input such as ``x[1:2]`` may begin in the middle of another array, at an address from which a GPU
        cannot read two elements at a time. MXNet's fused kernels do so in float16, so they get a copy of it.
        """
        if self._is_fused:
            inputs = [array if _mxnet.is_aligned(array) else array.copy() for array in inputs]
        with engine_lock():
            values = [
                inputs[at] if is_input else at.data() if at in self._computed else _mxnet.data(at)
                for is_input, at in self._sources
            ]
            # Calls that autograd does not record belong to no training step: mxmp's own listeners do not get them.
            if monitor is not None and (autograd.is_recording() or not isinstance(monitor[0], GraphListener)):
                with hold_interrupts():
                    return self._monitored_op(monitor)(*values)
            if not autograd.is_recording():
                self._shared = self._shared or self._make(self._flags)
                return self._shared(*values)
            return self._op_of_this_thread()(*values)

    def _op_of_this_thread(self) -> mx.nd.CachedOp:
        """Return this thread's CachedOp for calls that autograd records; the caller holds ``engine_lock``.

        The CachedOps of ended threads are not freed, because what autograd recorded may still need them. Autograd would
        then be the one to free them, at a time when other threads pass operators to the engine.
        """
        thread = threading.get_ident()
        if thread not in self._recording:
            alive = {each.ident for each in threading.enumerate()}
            ended = next((each for each in self._recording if each not in alive), None)
            self._recording[thread] = self._make(self._flags) if ended is None else self._recording.pop(ended)
        return self._recording[thread]

    def _make(self, flags: list) -> mx.nd.CachedOp:
        return _CachedOp(copy.copy(self.symbol), flags)

    def _monitored_op(self, monitor: tuple) -> mx.nd.CachedOp:
        """Return this thread's CachedOp for calls with an op hook, with ``monitor`` as its only op hook.

        The CachedOp is made if this thread has none. ``monitor`` is a pair ``(callback, monitor_all)`` as for
        ``register_op_hook``; it replaces another op hook of the CachedOp. The callback is also called for what the
        backward of an earlier call computes, as in MXNet. The CachedOp ignores ``static_alloc`` and ``static_shape``,
        with which MXNet would call the callback for few outputs. A user's callback gets the names of the net before
        conversion, and values in FP32. A callback of mxmp's own (a GraphListener) gets the names and values of the
        low-precision graph.
        """
        thread, (callback, monitor_all) = threading.get_ident(), monitor
        op, registered = self._monitored.get(thread, (None, (None, False)))
        if op is None:
            _mxnet.silence_removed()
            op = self._make([flag for flag in self._flags if not flag[0].startswith("static_")])
        if callback is not registered[0] or monitor_all != registered[1]:
            self._monitored[thread] = op, monitor
            if not isinstance(callback, GraphListener):
                callback = NetworkView(self.symbol, self._plan).translated(callback)
            _mxnet.register_op_hook(op, callback, monitor_all)
        return op

    def forget(self, monitor: tuple) -> None:
        """Drop the CachedOps, of all threads, that have the op hook ``monitor``, which has no listener any more.

        ``monitor`` is a pair ``(callback, monitor_all)``.
        """
        _remove_monitored(self._monitored, monitor)
        _mxnet.silence_removed()


def _remove_monitored(monitored: dict[int, tuple[mx.nd.CachedOp, tuple]], monitor: tuple | None = None) -> None:
    """Remove from ``monitored`` the CachedOps with the callback of ``monitor``; all of them if ``monitor`` is None.

    ``monitored`` maps the number of a thread to the CachedOp that this thread runs with an op hook, and this op hook, a
    pair ``(callback, monitor_all)`` like ``monitor``. MXNet may still call the callbacks in a backward, until a later
    call of ``_mxnet.silence_removed`` replaces them.
    """
    for thread, (op, registered) in list(monitored.items()):
        if monitor is None or registered[0] is monitor[0]:
            del monitored[thread]
            _mxnet.remove_op_hook(op, thread=thread)
