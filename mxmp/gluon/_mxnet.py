"""The private parts of MXNet that the Gluon frontend uses. A test holds each against 1.9.1.

A subclass of MXNet's (``Trainer``, ``LowParameter``) also uses what it inherits; ``INHERITED`` lists that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, deque
from operator import attrgetter
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call, py_str
from mxnet.contrib.amp import amp as contrib_amp
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock, nn
from mxnet.gluon.block import _flatten, _gather_type_ctx_info, _regroup
from mxnet.ndarray import NDArray

__all__ = ["INHERITED", "TracedGraph"]

INHERITED = {
    "Trainer": (
        "_allreduce_grads _contexts _distributed _init_kvstore _init_optimizer _init_params _kv_initialized "
        "_kvstore _kvstore_params _optimizer _params _params_to_init _reset_kvstore _scale _update _updaters"
    ),
    "LowParameter": "_check_and_get _data _init_grad _init_impl _reduce _set_trainer",
    "BatchProcessor": "_get_data_and_label",
}

# -- attributes that are only read -------------------------------------------------------------------

# Of a HybridBlock: its CachedOp, or what mxmp stores in its place, which ``hybridize``, ``cast`` and a new child set to
# None; whether MXNet runs it as a graph; and the flags and the backend that ``hybridize`` was given.
cached_op, is_active = attrgetter("_cached_op"), attrgetter("_active")
flags, backend = attrgetter("_flags"), attrgetter("_backend")
# Of a Parameter: the last ``gluon.Trainer`` that was made over it; False for a running statistic, and for a Constant;
# ``"default"`` for dense weights.
trainer_of, is_differentiable, storage = attrgetter("_trainer"), attrgetter("_differentiable"), attrgetter("_stype")
# Of a Trainer: the parameters that it updates, in the order of their indices.
parameters_of = attrgetter("_params")
# Of a weight array: whether a backward has written its gradient since ``set_fresh`` or ``fresh_weights`` cleared this.
is_fresh = attrgetter("_fresh_grad")


def refuse_contrib_amp() -> None:
    """Raise ``RuntimeError`` if ``amp.init()`` of ``mxnet.contrib.amp`` was called in this process.

    ``amp.init()`` makes MXNet insert casts of its own into every graph, and mxmp's casts would come on top of them.
    """
    if contrib_amp._amp_initialized:
        raise RuntimeError(
            "amp.init() of mxnet.contrib.amp was called in this process, and its casts would stand in every graph "
            "beside mxmp's. It cannot be undone: remove the call, and start Python again. mxmp.convert(net) needs none"
        )


# -- a block's graph and its arguments ---------------------------------------------------------------

# From nested arguments: whether there are Symbols, whether there are arrays, the arrays' contexts, and the first one's.
kinds = _gather_type_ctx_info
# From a graph's flat outputs and their structure: nested lists.
regroup = _regroup


class TracedGraph(NamedTuple):
    """The FP32 graph of a HybridBlock, as MXNet stores it on the block after a trace.

    Attributes
    ----------
    op_args : list of (bool, int or Parameter)
        For each input of the graph's Symbol, in its order: ``(True, i)`` for the i-th array that is passed to the
        block, ``(False, parameter)`` for a Parameter.
    graph : (list of Symbol, Symbol)
        The variables that stand for the block's inputs, and the Symbol of its outputs.
    in_format, out_format : int or nested list of int
        How inputs and outputs are nested; see ``flatten``.
    """

    op_args: list
    graph: tuple
    in_format: Any
    out_format: Any


def flatten(args: tuple) -> tuple[list, Any]:
    """Return all arrays in the arguments of a block's call as one list, and how they were nested.

    ``args`` may hold arrays, None, and nested lists or tuples of them. None stays in the list. The nesting is MXNet's:
    0 for an array, -1 for None, a list for a list or tuple. ``regroup`` needs it to nest arrays again. Raises
    ``ValueError`` for an argument of another type.
    """
    return _flatten(args, "input")


def copied(block: HybridBlock) -> HybridBlock:
    """Return a shallow copy of ``block`` that can be traced without changing ``block``.

    The copy has the same children, Parameters and attributes, but no graph, no hook of mxmp, and is not hybridized.
    """
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._active = False
    restore_calls(clone)
    return clone


def graph_arguments(block: HybridBlock, args: tuple) -> tuple | None:
    """Return the arguments with which ``block(*args)`` calls the block's graph; None where the call runs no graph.

    They are ``args`` unless the block's class has a ``forward`` of its own, which may change them. Such a ``forward``
    runs up to its call of the graph, on a copy of the block.
    """
    if not overrides_forward(block):
        return args
    clone = copied(block)

    def note(*given: Any) -> None:
        """Raise ``_GraphCalledError`` with the arguments that the graph of the block would be called with."""
        raise _GraphCalledError(given)

    clone._active = True
    clone.__dict__["_call_cached_op"] = note
    try:
        forward(clone, args)
    except _GraphCalledError as call:
        return call.args[0]
    return None


class _GraphCalledError(Exception):
    """Ends a ``forward`` that ``graph_arguments`` runs, when it calls the graph; holds the call's arguments."""


def trace(clone: HybridBlock, args: tuple) -> Any:
    """Trace the FP32 graph of ``clone`` for a call with ``args``, store it on ``clone``, and return the user's outputs.

    ``clone`` is a block from ``copied``. The outputs are what ``hybrid_forward`` returned: Symbols, nested as the user
    nested them. MXNet keeps the nesting too, but not the types of namedtuples. None for a SymbolBlock, which has its
    graph already.
    """
    if isinstance(clone, SymbolBlock):
        return None
    forward, answers = clone.hybrid_forward, []

    def noting(*given: Any, **params: Any) -> Any:
        """Run the block's ``hybrid_forward`` and keep what it returns."""
        answers.append(forward(*given, **params))
        return answers[-1]

    clone._in_format = clone._out_format = None
    clone.__dict__["hybrid_forward"] = noting
    try:
        clone._get_graph(*args)
    finally:
        del clone.__dict__["hybrid_forward"]
    return answers[-1]


def infer_shapes(clone: HybridBlock, args: tuple) -> None:
    """Infer the shapes of the Parameters of ``clone`` from ``args``, and initialize those that wait for their shape.

    ``clone`` is a block that ``trace`` has traced for a call with ``args``. It has its Parameters in common with the
    block that it was copied from.
    """
    clone._build_cache(*args)


def traced_graph(block: HybridBlock) -> TracedGraph:
    """Return the FP32 graph that MXNet has stored on ``block``; its fields are empty before the first trace."""
    return TracedGraph(block._cached_op_args, block._cached_graph, block._in_format, block._out_format)


def set_traced_graph(block: HybridBlock, traced: TracedGraph) -> None:
    """Store an FP32 graph on ``block``, where MXNet's ``export`` and ``save`` read it.

    A converted block does not run this graph: its hook runs one in low precision.
    """
    block._cached_op_args, block._cached_graph, block._in_format, block._out_format = traced


def undo_load(block: Block) -> None:
    """Give ``block`` and the keys of its Parameters the names that they had before ``block.load(prefix)``.

    MXNet's ``load`` renames the block and these keys after the file, but leaves ``Parameter.name``. A graph that is
    traced afterwards would not find its Parameters ("Unknown input to HybridBlock"). Does nothing if nothing was
    renamed.
    """
    name, params = block.prefix[:-1] if block.prefix.endswith("_") else block.prefix, block.params._params
    keys = [param.name for param in params.values()]
    if block.name == name and keys == list(params):
        return
    block._name = name
    renamed = list(zip(keys, params.values()))
    params.clear()
    params.update(renamed)
    if isinstance(block, HybridBlock) and not isinstance(block, SymbolBlock):
        block._cached_graph = ()  # the file's, with the file's names


# -- calls of a block --------------------------------------------------------------------------------


def redirect_calls(block: HybridBlock, forward: Callable, call_graph: Callable) -> None:
    """Make ``block(...)`` call ``forward``, and MXNet's own ``HybridBlock.forward`` call ``call_graph`` to run a graph.

    Both functions are set as attributes of this one block, which Python finds before the methods of the class. The
    block loses the graph that it has.
    """
    block.__dict__.update(forward=forward, _call_cached_op=call_graph)
    block._clear_cached_op()


def restore_calls(block: HybridBlock) -> None:
    """Undo ``redirect_calls``. The block loses the graph that it has."""
    block.__dict__.pop("forward", None)
    block.__dict__.pop("_call_cached_op", None)
    block._clear_cached_op()


def set_cached_op(block: HybridBlock, op: Any) -> None:
    """Store ``op`` where MXNet keeps the CachedOp of a hybridized block; ``hybridize`` and ``cast`` set it to None."""
    block._cached_op = op


def set_active(block: HybridBlock, active: bool) -> None:
    """Set whether MXNet's ``HybridBlock.forward`` runs the block's graph (True) or its Python code (False)."""
    block._active = active


def forward(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class, not the one that ``redirect_calls`` has set; return its output."""
    return type(block).forward(block, *args)


def overrides_forward(block: Block) -> bool:
    """Return whether the block's class defines a ``forward`` of its own instead of MXNet's.

    Such a ``forward`` may run no graph, or run it with other arguments than the block was called with.
    """
    return type(block).forward not in (HybridBlock.forward, SymbolBlock.forward)


def lacks_states(block: HybridBlock) -> bool | None:
    """Return whether the current call of a recurrent layer passes no initial states; None for other blocks.

    The graph of a recurrent layer depends on it. MXNet stores it in ``skip_states`` of the layer before it calls
    ``forward``.
    """
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    """Return the direct children of a block, in the order in which they were registered."""
    return list(block._children.values())


def is_summarized(block: Block) -> bool:
    """Return whether MXNet's ``summary`` is running on ``block`` or on a net that contains it.

    ``summary`` lists what each child is called with, so the block must then run as Python and not as one graph. MXNet
    puts a hook on every block but the Sequential containers; for these, their first child is examined.
    """
    while isinstance(block, (nn.Sequential, nn.HybridSequential)) and block._children:
        block = children(block)[0]
    return any(getattr(hook, "__name__", "") == "_summary_hook" for hook in block._forward_hooks.values())


def block_being_traced() -> Block | None:
    """Return the block whose graph MXNet is tracing on this thread, the innermost one; None outside a trace."""
    return next((frame.f_locals["self"] for frame in _frames() if frame.f_code.co_name == "_get_graph"), None)


def unconverted_reader() -> Block | None:
    """Return the unconverted HybridBlock whose forward has called ``LowParameter.data``; None if other code called it.

    Only ``LowParameter.data`` may call this, which looks for MXNet's forward on the call stack.
    """
    frames = _frames()
    next(frames)  # of the caller
    for _, frame in zip(range(2), frames):  # a comprehension may have a frame of its own
        if frame.f_globals.get("__name__") != "mxnet.gluon.block":
            return None
        if frame.f_code.co_name in ("forward", "_call_cached_op"):
            return frame.f_locals["self"]
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames of this thread's call stack, innermost first, without that of the function that iterates."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- callbacks for every operator --------------------------------------------------------------------


def monitor(block: HybridBlock) -> tuple | None:
    """Return ``(callback, monitor_all)`` as passed to ``block.register_op_hook``; None where it was not called."""
    return (block._callback, block._monitor_all) if block._callback else None


def set_monitor(block: HybridBlock, monitor: tuple | None) -> None:
    """Register a monitor as ``block.register_op_hook`` does, but not on the block's children.

    ``monitor``: the pair ``(callback, monitor_all)``, or None to remove the block's callback.
    """
    block._callback, block._monitor_all = monitor or (None, False)


def register_op_hook(op: mx.nd.CachedOp, callback: Callable, monitor_all: bool) -> None:
    """Make MXNet call ``callback(name, operator, array handle)`` for each output of each node that ``op`` runs.

    ``monitor_all``: for the nodes' inputs too. Only this thread may run ``op``. Call ``remove_op_hook`` before ``op``
    is deleted.
    """
    op._register_op_hook(callback, monitor_all)


def remove_op_hook(op: mx.nd.CachedOp, thread: int) -> None:
    """Ask for the removal of the callback of ``op``; ``silence_removed`` replaces it by one that does nothing.

    ``thread`` is the number (``threading.get_ident()``) of the thread that runs ``op``. ``op`` is kept alive until its
    callback is replaced. What autograd recorded outlives ``op``, and its backward still calls the callback, which must
    exist then.
    """
    _hooked.append((thread, op))


def silence_removed() -> None:
    """Replace the callbacks of the operators passed to ``remove_op_hook`` by one that does nothing.

    MXNet does not accept None as a callback. Only operators of this thread and of threads that have ended are changed.
    Another thread may be running its callback, so its operators wait until that thread calls this function.
    """
    others = {each.ident for each in threading.enumerate()} - {threading.get_ident()}
    for _ in range(len(_hooked)):
        try:
            thread, op = _hooked.popleft()
        except IndexError:  # another thread was here
            return
        if thread in others:
            _hooked.append((thread, op))
        else:
            op._monitor_callback = _silent
            op._register_op_hook(None)  # registers what is in the attribute


def _free(name: bytes, op_name: bytes, handle: int, _: Any) -> None:
    """Free the array that MXNet hands to a monitor's callback: the callback that does nothing else."""
    NDArray(NDArrayHandle(handle), writable=False)  # ours to free


_silent = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, NDArrayHandle, ctypes.c_void_p)(_free)
# Global: operators whose hooks are to be removed, each with the number of the thread that runs it. They outlive their
# nets.
_hooked: deque[tuple[int, mx.nd.CachedOp]] = deque()

# -- parameters and their gradients ------------------------------------------------------------------


def is_initialized(param: Parameter) -> bool:
    """Return whether a Parameter has its arrays: it was initialized, and its shape is known."""
    return param._data is not None


def is_deferred(param: Parameter) -> bool:
    """Return whether a Parameter was initialized without a shape and gets its arrays at the first forward."""
    return bool(param._deferred_init)


def arrays(param: Parameter) -> list[NDArray]:
    """Return a Parameter's weight arrays, one per context, dense or sparse; empty before it is initialized.

    Those of a ``LowParameter`` are float16. Unlike ``list_data`` this never raises.
    """
    return list(param._data or ())


def with_gradients(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """Return a Parameter's pairs ``(weight, gradient)``, one per context; empty where ``grad_req`` is ``"null"``.

    Raises ``RuntimeError`` or ``DeferredInitializationError`` if the Parameter needs a gradient and has no arrays yet.
    """
    if param._grad is None:
        return list(zip(param._data or (), param.list_grad())) if param.grad_req != "null" else []
    return list(zip(param._data, param._grad))


def data(param: Parameter) -> NDArray:
    """Return a Parameter's weight array on the current context, float16 for a ``LowParameter``.

    Unlike ``LowParameter.data`` this does not record that a user may have written into the array. Raises as MXNet does
    where the Parameter is not initialized, or not on this context.
    """
    return param._check_and_get(param._data, None)


def contexts(param: Parameter) -> Sequence[mx.Context]:
    """Return the contexts of a Parameter, also while it waits for its shape; empty before ``initialize``."""
    return param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make FP32 ``arrays``, one per context, the weight arrays of ``param``, with new gradients of zero."""
    param._data = arrays
    param._init_grad()


def fresh_weights(params: Iterable[Parameter], *, clear: bool = False) -> list[tuple[Parameter, NDArray]]:
    """Return ``(parameter, weight array)`` for each weight array that MXNet marks as fresh, on all contexts.

    Fresh means that a backward has written the gradient of the array since the mark was last removed. ``clear=True``
    removes the marks. This runs in every backward, so it must be fast.
    """
    found = [(p, array) for p in params if p._grad is not None for array in p._data if array._fresh_grad]
    for _, array in found if clear else ():
        array._fresh_grad = False
    return found


def set_fresh(array: NDArray, *, fresh: bool) -> None:
    """Set (True) or remove (False) MXNet's mark that a backward has written the gradient of the weight ``array``."""
    array._fresh_grad = fresh


# -- what autograd recorded --------------------------------------------------------------------------


def outputs_of_cached_ops(recorded: mx.sym.Symbol, nodes: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return for each output of some hybridized blocks whether the block's backward reads the output's head gradient.

    ``recorded`` is a graph as ``mx.autograd.get_symbol`` returns it, ``nodes`` the names of ``_CachedOp`` nodes in it,
    one for each call of a hybridized block. The result maps the name of a node to a dict, which maps the names of the
    node's outputs (``<node>_<name inside the block>``) to the answer. False hints at a loss head. Python cannot see the
    operators inside such a node; MXNet's gradient pass tells what its backward reads.

    The pass fails for some graphs, such as those with an output that has no gradient. Then, in a copy of the graph, the
    node is separated from what computes its inputs, and the pass runs again. A node is left out of the result if it
    reads no array exactly once, or if all arrays that it reads once are running statistics.
    """
    found: dict[str, dict[str, bool]] = {}
    for node in nodes:
        try:
            found[node] = _reads_head_gradients(recorded, node)
        except mx.MXNetError:
            found[node] = _reads_head_gradients(recorded.__copy__(), node, cut=True)
    return {node: outputs for node, outputs in found.items() if outputs}


def _reads_head_gradients(recorded: mx.sym.Symbol, node: str, cut: bool = False) -> dict[str, bool]:
    """Return, for each output of one ``_CachedOp`` node, by name, whether the node's backward reads its head gradient.

    ``cut``: separate the node from the rest of ``recorded`` first, which changes ``recorded``. Empty where this cannot
    be found out. Raises ``MXNetError`` where MXNet's gradient pass fails.
    """
    inner = recorded.get_internals()
    outputs = {name: i for i, name in enumerate(inner.list_outputs()) if name.startswith(f"{node}_")}
    block = mx.sym.Group([inner[i] for i in outputs.values()])
    if cut:
        block[0]._set_attr(__subgraph_name__=node)
        _cut_off_inputs(block)
    inputs = block.get_children()
    times = Counter(inputs.list_outputs())
    once = [inputs[i] for i, name in enumerate(inputs.list_outputs()) if times[name] == 1]
    if not once:
        return {}
    variables = {name: f"{name}_gradient" for name in outputs}
    heads = mx.sym.Group([mx.sym.var(name) for name in variables.values()])
    backward = _gradients(block, mx.sym.Group(once), heads)
    read = backward.get_children()
    names = set() if read is None else set(read.list_outputs())  # None: all are running statistics
    return {name: variable in names for name, variable in variables.items()} if names else {}


def _cut_off_inputs(block: mx.sym.Symbol) -> None:
    """Replace all inputs of one node by new variables, in place, so that the node is a graph of its own.

    ``block`` is the Symbol of the node's outputs; the node must have the attribute ``__subgraph_name__``.
    """
    inputs, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
    check_call(_LIB.MXSymbolCutSubgraph(block.handle, ctypes.byref(inputs), ctypes.byref(count)))
    for i in range(count.value):
        check_call(_LIB.NNSymbolFree(ctypes.c_void_p(inputs[i])))


def _gradients(outputs: mx.sym.Symbol, inputs: mx.sym.Symbol, head_gradients: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the graph that computes the gradients of ``inputs`` given the head gradients of ``outputs``.

    All three are Symbols with one or more outputs. Runs ``MXGradient``, the pass that autograd runs too.
    """
    graph, made, symbol = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check_nnvm(_LIB.NNGraphCreate(outputs.handle, ctypes.byref(graph)))
    try:
        for key, entries in ((b"grad_ys", outputs), (b"grad_xs", inputs), (b"grad_ys_out_grad", head_gradients)):
            _check_nnvm(_LIB.NNGraphSetNodeEntryListAttr_(graph, key, entries.handle))
        passes = (ctypes.c_char_p * 1)(b"MXGradient")
        _check_nnvm(_LIB.NNGraphApplyPasses(graph, 1, passes, ctypes.byref(made)))
        _check_nnvm(_LIB.NNGraphGetSymbol(made, ctypes.byref(symbol)))
    finally:
        for handle in (graph, made):
            _LIB.NNGraphFree(handle)
    return mx.sym.Symbol(symbol)


def _check_nnvm(status: int) -> None:
    """Raise ``MXNetError`` with NNVM's message unless ``status`` is 0; ``check_call`` reads messages of MXNet only."""
    if status != 0:
        _LIB.NNGetLastError.restype = ctypes.c_char_p
        raise mx.MXNetError(py_str(_LIB.NNGetLastError()))
