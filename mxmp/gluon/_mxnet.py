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

# Of a HybridBlock: what stands where MXNet keeps the operator of its graph, until ``hybridize``, ``cast`` or a new
# child; whether it runs as a graph; and what ``hybridize`` was given.
cached_op, is_active = attrgetter("_cached_op"), attrgetter("_active")
flags, backend = attrgetter("_flags"), attrgetter("_backend")
# Of a Parameter: the last ``gluon.Trainer`` that was made over it; False for a running statistic, and for a Constant;
# ``"default"`` for dense weights.
trainer_of, is_differentiable, storage = attrgetter("_trainer"), attrgetter("_differentiable"), attrgetter("_stype")
# Of a Trainer: the parameters that it updates, in the order of their numbers.
parameters_of = attrgetter("_params")
# Of an array with a gradient: whether a backward has written that since the array was marked as stale.
is_fresh = attrgetter("_fresh_grad")


def refuse_contrib_amp() -> None:
    """Raise ``RuntimeError`` after ``amp.init()``: every graph would have the casts of both."""
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
    """A block's graph, as MXNet keeps it."""

    op_args: list
    graph: tuple
    in_format: Any
    out_format: Any


def flatten(args: tuple) -> tuple[list, Any]:
    """Return the arrays in nested arguments, and the structure that held them."""
    return _flatten(args, "input")


def copied(block: HybridBlock) -> HybridBlock:
    """Return another block with the same children, Parameters and attributes, without a graph: to be traced."""
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._active = False
    restore_calls(clone)
    return clone


def graph_arguments(block: HybridBlock, args: tuple) -> tuple | None:
    """Return the arguments that a call of the block passes on to its graph, None where it calls none."""
    if not overrides_forward(block):
        return args
    clone = copied(block)

    def note(*given: Any) -> None:
        raise _GraphCalledError(given)

    clone._active = True
    clone.__dict__["_call_cached_op"] = note
    try:
        forward(clone, args)
    except _GraphCalledError as call:
        return call.args[0]
    return None


class _GraphCalledError(Exception):
    """A block's graph is called, with these arguments."""


def trace(clone: HybridBlock, args: tuple) -> Any:
    """Make the FP32 graph of a ``copied`` block for these arguments; return what the user's code returns."""
    if isinstance(clone, SymbolBlock):
        return None
    forward, answers = clone.hybrid_forward, []

    def noting(*given: Any, **params: Any) -> Any:
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
    """Give the parameters of a traced block their shapes."""
    clone._build_cache(*args)


def traced_graph(block: HybridBlock) -> TracedGraph:
    """Return the graph that a block keeps."""
    return TracedGraph(block._cached_op_args, block._cached_graph, block._in_format, block._out_format)


def set_traced_graph(block: HybridBlock, traced: TracedGraph) -> None:
    """Store a graph on the block for ``export`` and ``save``; calls of a converted block do not use it."""
    block._cached_op_args, block._cached_graph, block._in_format, block._out_format = traced


def undo_load(block: Block) -> None:
    """Rename a block as it was before ``load(prefix)``, after its Parameters, which keep their names.

    MXNet renames the block and the keys of its Parameters after the file, but no Parameter, so a graph that is traced
    afterwards does not find them ("Unknown input to HybridBlock").
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
    """Let every call of ``block`` go through ``forward``, and MXNet's call of the block's graph through ``call_graph``.

    Both are attributes of this one block, which Python finds before its class's methods.
    """
    block.__dict__.update(forward=forward, _call_cached_op=call_graph)
    block._clear_cached_op()


def restore_calls(block: HybridBlock) -> None:
    """Undo ``redirect_calls``; the block has no graph then."""
    block.__dict__.pop("forward", None)
    block.__dict__.pop("_call_cached_op", None)
    block._clear_cached_op()


def set_cached_op(block: HybridBlock, op: Any) -> None:
    block._cached_op = op


def set_active(block: HybridBlock, active: bool) -> None:
    block._active = active


def forward(block: HybridBlock, args: tuple) -> Any:
    """Call ``forward`` of the block's class."""
    return type(block).forward(block, *args)


def overrides_forward(block: Block) -> bool:
    """Return whether its class has its own ``forward``, which may call no graph, or call it with other arguments."""
    return type(block).forward not in (HybridBlock.forward, SymbolBlock.forward)


def variant(block: HybridBlock) -> Any:
    """Return what MXNet stores on a layer about its last call: for a recurrent layer, whether states were passed."""
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    return list(block._children.values())


def is_summarized(block: Block) -> bool:
    """Return whether ``summary`` wants to see what is inside the block; it looks at all blocks but containers."""
    while isinstance(block, (nn.Sequential, nn.HybridSequential)) and block._children:
        block = children(block)[0]
    return any(getattr(hook, "__name__", "") == "_summary_hook" for hook in block._forward_hooks.values())


def block_being_traced() -> Block | None:
    """Return the block whose graph MXNet is making on this thread."""
    return next((frame.f_locals["self"] for frame in _frames() if frame.f_code.co_name == "_get_graph"), None)


def unconverted_reader() -> Block | None:
    """Return the unconverted block that computes with a parameter's array and for that called our caller, or None."""
    frames = _frames()
    next(frames)  # of the caller
    for _, frame in zip(range(2), frames):  # a comprehension may have a frame of its own
        if frame.f_globals.get("__name__") != "mxnet.gluon.block":
            return None
        if frame.f_code.co_name in ("forward", "_call_cached_op"):
            return frame.f_locals["self"]
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames of what called the caller, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- callbacks for every operator --------------------------------------------------------------------


def monitor(block: HybridBlock) -> tuple | None:
    """Return the arguments of the block's ``register_op_hook``, None where it was not called."""
    return (block._callback, block._monitor_all) if block._callback else None


def set_monitor(block: HybridBlock, monitor: tuple | None) -> None:
    """Do what ``register_op_hook`` does, but not for the block's children; None undoes it."""
    block._callback, block._monitor_all = monitor or (None, False)


def register_op_hook(op: mx.nd.CachedOp, callback: Callable, monitor_all: bool) -> None:
    """Let an operator of this thread call ``callback``; call ``remove_op_hook`` before the operator is deleted."""
    op._register_op_hook(callback, monitor_all)


def remove_op_hook(op: mx.nd.CachedOp, thread: int) -> None:
    """Keep an operator of the thread with this number alive until ``silence_removed`` has replaced its callback.

    What was recorded outlives the operator, and its backward calls the hook, which must exist.
    """
    _hooked.append((thread, op))


def silence_removed() -> None:
    """Replace the callbacks of removed operators by one that does nothing: MXNet does not accept None.

    Those of another thread wait until this is called there, or it has ended: it may be running them.
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
    NDArray(NDArrayHandle(handle), writable=False)  # ours to free


_silent = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, NDArrayHandle, ctypes.c_void_p)(_free)
# Global: operators whose hooks are to be removed, each with the number of the thread that runs it. They outlive their
# nets.
_hooked: deque[tuple[int, mx.nd.CachedOp]] = deque()

# -- parameters and their gradients ------------------------------------------------------------------


def is_initialized(param: Parameter) -> bool:
    return param._data is not None


def is_deferred(param: Parameter) -> bool:
    """Return whether a parameter waits for its shape."""
    return bool(param._deferred_init)


def arrays(param: Parameter) -> list[NDArray]:
    """Return the arrays that compute, one per context, of any storage; none before initialization."""
    return list(param._data or ())


def with_gradients(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """Return the arrays that compute with their gradients, by context; none where no gradient is requested.

    Raises ``RuntimeError`` or ``DeferredInitializationError`` where it is not initialized yet.
    """
    if param._grad is None:
        return list(zip(param._data or (), param.list_grad())) if param.grad_req != "null" else []
    return list(zip(param._data, param._grad))


def data(param: Parameter) -> NDArray:
    """Return the array on the current context, in the dtype that computes, as MXNet's own calls read it."""
    return param._check_and_get(param._data, None)


def contexts(param: Parameter) -> Sequence[mx.Context]:
    """Return the contexts of a parameter, also where its shape is not known yet."""
    return param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make these FP32 arrays the parameter's, with new gradients."""
    param._data = arrays
    param._init_grad()


def fresh_weights(params: Iterable[Parameter], *, clear: bool = False) -> list[tuple[Parameter, NDArray]]:
    """Return the arrays for which ``is_fresh`` holds, with their parameters. Runs in every backward."""
    found = [(p, array) for p in params if p._grad is not None for array in p._data if array._fresh_grad]
    for _, array in found if clear else ():
        array._fresh_grad = False
    return found


def set_fresh(array: NDArray, *, fresh: bool) -> None:
    """Set whether MXNet takes the array's gradient for one that a backward has written."""
    array._fresh_grad = fresh


# -- what autograd recorded --------------------------------------------------------------------------


def outputs_of_cached_ops(recorded: mx.sym.Symbol, nodes: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return, for each of these ``_CachedOp`` nodes, its outputs and whether its backward reads their gradients.

    The names of outputs are ``<node>_<name inside the block>``. Nothing in Python leads from a recorded node to what is
    in it, but MXNet's gradient pass knows its backward. The pass lacks operators where an output has no gradient or an
    array has several: there the node is cut out of a copy of the graph first. A node that reads every array more than
    once is left out.
    """
    found: dict[str, dict[str, bool]] = {}
    for node in nodes:
        try:
            found[node] = _read_gradients(recorded, node)
        except mx.MXNetError:
            found[node] = _read_gradients(recorded.__copy__(), node, cut=True)
    return {node: outputs for node, outputs in found.items() if outputs}


def _read_gradients(recorded: mx.sym.Symbol, node: str, cut: bool = False) -> dict[str, bool]:
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
    above = {name: f"{name}_gradient" for name in outputs}
    backward = _gradients(block, mx.sym.Group(once), mx.sym.Group([mx.sym.var(name) for name in above.values()]))
    read = backward.get_children()
    names = set() if read is None else set(read.list_outputs())  # None: all are running statistics
    return {name: variable in names for name, variable in above.items()} if names else {}


def _cut_off_inputs(block: mx.sym.Symbol) -> None:
    """Let the node that makes ``block``, which has an attribute ``__subgraph_name__``, read variables instead."""
    inputs, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
    check_call(_LIB.MXSymbolCutSubgraph(block.handle, ctypes.byref(inputs), ctypes.byref(count)))
    for i in range(count.value):
        check_call(_LIB.NNSymbolFree(ctypes.c_void_p(inputs[i])))


def _gradients(outputs: mx.sym.Symbol, inputs: mx.sym.Symbol, above: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the gradients of ``inputs`` from the ones ``above`` of ``outputs``, as autograd would compute them."""
    graph, made, symbol = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check_nnvm(_LIB.NNGraphCreate(outputs.handle, ctypes.byref(graph)))
    try:
        for key, entries in ((b"grad_ys", outputs), (b"grad_xs", inputs), (b"grad_ys_out_grad", above)):
            _check_nnvm(_LIB.NNGraphSetNodeEntryListAttr_(graph, key, entries.handle))
        passes = (ctypes.c_char_p * 1)(b"MXGradient")
        _check_nnvm(_LIB.NNGraphApplyPasses(graph, 1, passes, ctypes.byref(made)))
        _check_nnvm(_LIB.NNGraphGetSymbol(made, ctypes.byref(symbol)))
    finally:
        for handle in (graph, made):
            _LIB.NNGraphFree(handle)
    return mx.sym.Symbol(symbol)


def _check_nnvm(status: int) -> None:
    """Raise the error of NNVM where there is one; ``check_call`` reads those of MXNet only."""
    if status != 0:
        _LIB.NNGetLastError.restype = ctypes.c_char_p
        raise mx.MXNetError(py_str(_LIB.NNGetLastError()))
