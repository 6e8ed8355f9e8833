"""The private parts of MXNet that the Gluon frontend uses. A test compares each with MXNet 1.9.1.

A class of mxmp that is derived from one of MXNet's (``Trainer``, ``LowParameter``) also uses private attributes that it
inherits; ``INHERITED`` lists these.
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

INHERITED = {
    "Trainer": (
        "_allreduce_grads _check_and_rescale_grad _contexts _distributed _init_kvstore _init_optimizer _init_params "
        "_kv_initialized _kvstore _kvstore_params _optimizer _params _params_to_init _reset_kvstore _scale _update "
        "_updaters"
    ),
    "LowParameter": "_check_and_get _data _init_grad _init_impl _reduce _set_trainer",
    "BatchProcessor": "_get_data_and_label",
}

# -- attributes that are only read -------------------------------------------------------------------

# Of a HybridBlock: its CachedOp, or what mxmp stores in place of the CachedOp (``hybridize``, ``cast`` and a new child
# set it to None); whether MXNet runs the block as a graph; and the flags and the backend passed to ``hybridize``.
cached_op, is_active = attrgetter("_cached_op"), attrgetter("_active")
flags, backend = attrgetter("_flags"), attrgetter("_backend")
# Of a Parameter: the last ``gluon.Trainer`` that was made over it; False for a running statistic, and for a Constant;
# ``"default"`` for dense weights; ``"default"`` for dense gradients.
trainer_of, is_differentiable, storage = attrgetter("_trainer"), attrgetter("_differentiable"), attrgetter("_stype")
gradient_storage = attrgetter("_grad_stype")
# Of a Trainer: the parameters that it updates, in the order of their indices.
parameters_of = attrgetter("_params")
# Of a weight array: MXNet's fresh mark, whether a backward has written the gradient since the mark was last removed.
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


# -- an array ---------------------------------------------------------------------------------------

# Where an NDArray object of MXNet 1.9.1 has its attribute ``byte_offset_`` (include/mxnet/ndarray.h): how many bytes
# behind the beginning of its memory the array begins. MXNet has no function that tells it.
_BYTE_OFFSET = 64
# A vector of four float64, the largest that a fused kernel loads at once.
_ALIGNMENT = 32


def is_aligned(array: NDArray) -> bool:
    """Return whether an array begins at an address from which a kernel may load a vector of elements at once.

    Arrays of their own do; one that is a part of another (``x[1:2]``) may not. The call neither waits for the array to
    be computed nor asks for its address: MXNet would allocate the memory for that (MXNDArrayGetData), and if the engine
    does so at the same time, the array's values are lost.
    """
    return ctypes.c_size_t.from_address(array.handle.value + _BYTE_OFFSET).value % _ALIGNMENT == 0


# -- a block's graph and its arguments ---------------------------------------------------------------

# From nested arguments: whether there are Symbols, whether there are arrays, the set of the arrays' contexts, and the
# context of the first array.
kinds = _gather_type_ctx_info
# Takes the flat list of a graph's outputs and the description of their nesting (``flatten``); returns nested lists.
regroup = _regroup


class TracedGraph(NamedTuple):
    """The FP32 graph of a HybridBlock, as MXNet stores it in private attributes of the block after a trace.

    Attributes
    ----------
    op_args : list of (bool, int or Parameter)
        Where the value of each input of the Symbol comes from, in the order of ``list_inputs()``: ``(True, i)`` for
        array i, counted from 0, of those passed to the block, where None does not count; ``(False, parameter)`` for a
        Parameter. Empty until ``infer_shapes`` has run.
    graph : (list of Symbol, Symbol)
        The variables that stand for the arrays passed to the block, and the Symbol of its outputs.
    in_format, out_format : int or nested list of int
        How the block's arguments and outputs are nested (see ``flatten``).
    """

    op_args: list
    graph: tuple
    in_format: Any
    out_format: Any


def flatten(args: tuple) -> tuple[list, Any]:
    """Return the arrays in the arguments of a block's call as one flat list, None included, and how they were nested.

    ``(x, [y, None])`` gives ``[x, y, None]`` and MXNet's description ``[0, [0, -1]]``: 0 for an array, -1 for None, a
    list for a list or tuple. A Symbol is described by 0, or by n if it has n > 1 outputs. This module's
    ``regroup(flat, description)`` returns the nested lists. Raises ``ValueError`` for an argument of another type.
    """
    return _flatten(args, "input")


def copied(block: HybridBlock) -> HybridBlock:
    """Return a shallow copy of ``block`` that can be traced without changing ``block``.

    The copy shares children and Parameters with ``block``. The copy is not hybridized and has no hook of mxmp; the
    children keep their hooks. It has no traced graph, unless it is a SymbolBlock, which has no Python code to trace.
    """
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._active = False
    restore_calls(clone)
    return clone


def graph_arguments(block: HybridBlock, args: tuple) -> tuple | None:
    """Return the arguments that the graph of ``block`` would get in ``block(*args)``; None if no graph would run.

    The block need not be hybridized. The result is ``args`` unless the block's class overrides ``forward``. An
    overriding ``forward`` may call ``HybridBlock.forward``, which runs the graph, with other arguments. To find these,
    the overriding ``forward`` is called on a copy of the block and stopped where it would run the graph. The operators
    and child blocks that it calls before that really run.
    """
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
    """Stops the ``forward`` that ``graph_arguments`` runs, where it calls the graph.

    ``args[0]`` is the tuple of arguments that the graph would get.
    """


def trace(clone: HybridBlock, args: tuple, called: Callable) -> bool:
    """Trace the FP32 graph of ``clone`` for a call with ``args``, and store it on ``clone``; return whether it did.

    ``clone`` is a block that ``copied`` returned. MXNet calls ``called(hybrid_forward, F, args, params)`` in place of
    ``hybrid_forward(F, *args, **params)``, with Symbols in ``args`` and ``params``. A SymbolBlock, which has a graph
    already, is not traced: False is returned.
    """
    if isinstance(clone, SymbolBlock):
        return False
    forward = clone.hybrid_forward

    def replaced(functions: Any, *given: Any, **params: Any) -> Any:
        return called(forward, functions, given, params)

    clone._in_format = clone._out_format = None
    clone.__dict__["hybrid_forward"] = replaced
    try:
        clone._get_graph(*args)
    finally:
        del clone.__dict__["hybrid_forward"]
    return True


def hybrid_forward(block: HybridBlock, functions: Any, args: tuple, prepare: Callable) -> Any:
    """Call ``hybrid_forward`` on Symbols as ``HybridBlock.forward`` does, with ``functions`` as ``F``.

    ``prepare`` is applied to the dict of the block's own Parameters as Symbols.
    """
    with block.name_scope():
        return block.hybrid_forward(functions, *args, **prepare({n: p.var() for n, p in block._reg_params.items()}))


def infer_shapes(clone: HybridBlock, args: tuple) -> None:
    """Infer the shapes of the Parameters of ``clone``, traced with ``args``; initialize those that wait for a shape.

    ``clone`` is a block that ``copied`` and ``trace`` have made; it shares the Parameters with the original block.
    After this call ``traced_graph(clone).op_args`` says where the value of each input of the graph comes from. Raises
    ``ValueError`` if the graph and the inputs do not tell a shape.
    """
    try:
        clone._build_cache(*args)
    except ValueError as error:
        if "Deferred initialization failed" not in str(error):
            raise
        raise ValueError(
            f"{error}. A graph does not call infer_shape of blocks inside: call the net once before mxmp.convert, or "
            "make its layers with in_units or in_channels"
        ) from error


def traced_graph(block: HybridBlock) -> TracedGraph:
    """Return the FP32 graph that MXNet has stored on ``block``; before a trace the fields are empty or None."""
    return TracedGraph(block._cached_op_args, block._cached_graph, block._in_format, block._out_format)


def set_traced_graph(block: HybridBlock, traced: TracedGraph) -> None:
    """Store an FP32 graph in the attributes of ``block`` that MXNet's ``export`` and ``save`` write to files."""
    block._cached_op_args, block._cached_graph, block._in_format, block._out_format = traced


def undo_load(block: Block) -> None:
    """Restore the names that MXNet's ``block.load(prefix)`` changed, and delete the graph that it stored on ``block``.

    ``load`` renames the block, and the keys of ``block.params``, to the names in the file, but leaves each
    ``Parameter.name``. A graph that is traced afterwards would not find its Parameters ("Unknown input to
    HybridBlock"). The values that ``load`` has set stay. Does nothing if block and keys have the names from before
    ``load``. A SymbolBlock keeps its graph. Blocks inside ``block`` keep the names that ``load`` gave them.
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


def redirect_calls(block: HybridBlock, forward: Callable, call_graph: Callable, **methods: Callable) -> None:
    """Set ``forward`` and ``call_graph`` in place of ``block.forward`` and of MXNet's ``block._call_cached_op``.

    ``methods`` take the place of other methods, by name. ``forward`` gets the arguments of the block's call, and
    ``call_graph`` those of ``HybridBlock.forward``, which calls it if the block is active (see ``set_active``). None of
    them gets the block. The graph and the CachedOp that are stored on the block are deleted (a SymbolBlock keeps its
    graph).
    """
    block.__dict__.update(forward=forward, _call_cached_op=call_graph, **methods)
    block._clear_cached_op()


def restore_calls(block: HybridBlock) -> None:
    """Undo ``redirect_calls``, so that MXNet runs calls of ``block`` again. Deletes the same graph and CachedOp."""
    for name in ("forward", "_call_cached_op", "hybridize", "cast", "optimize_for"):
        block.__dict__.pop(name, None)
    block._clear_cached_op()


def set_cached_op(block: HybridBlock, op: Any) -> None:
    """Store ``op``, the dict of a converted block's graphs, where MXNet keeps the CachedOp of a hybridized block.

    ``hybridize``, ``cast`` and a new child set that attribute to None. So they delete the graphs of a converted block
    as they delete the CachedOp of an unconverted one.
    """
    block._cached_op = op


def set_active(block: HybridBlock, active: bool) -> None:
    """Set whether MXNet's ``HybridBlock.forward`` runs the block as a graph (True) or as Python code (False)."""
    block._active = active


def forward(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class, not the one that ``redirect_calls`` has set; return its output."""
    return type(block).forward(block, *args)


def overrides_forward(block: Block) -> bool:
    """Return whether the block's class has another ``forward`` than that of HybridBlock or SymbolBlock.

    Such a ``forward`` may run no graph, or call ``HybridBlock.forward`` with other arguments than the block got.
    """
    return type(block).forward not in (HybridBlock.forward, SymbolBlock.forward)


def overrides_graph_calls(block: HybridBlock) -> bool:
    """Return whether the block's class overrides ``_call_cached_op``, which ``redirect_calls`` replaces."""
    return type(block)._call_cached_op is not HybridBlock._call_cached_op


def lacks_states(block: HybridBlock) -> bool | None:
    """Return whether the present call of a recurrent layer passes no initial states; None for other blocks.

    The layer's graph then returns the output alone. MXNet stores this in ``skip_states`` before it calls ``forward``.
    """
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    return list(block._children.values())


def is_summarized(block: Block) -> bool:
    """Return whether MXNet's ``summary`` is running on ``block`` or on a net that contains it.

    ``summary`` lists what each child returns, so the block must then run its children one by one and not as one graph.
    It is recognized by the forward hook that ``summary`` puts on every block but Sequential containers; of these the
    first child is examined instead.
    """
    while isinstance(block, (nn.Sequential, nn.HybridSequential)) and block._children:
        block = children(block)[0]
    return any(getattr(hook, "__name__", "") == "_summary_hook" for hook in block._forward_hooks.values())


def block_being_traced() -> Block | None:
    """Return the block whose ``_get_graph`` (MXNet's trace) runs on this thread; None if no trace is running.

    Of nested traces, the innermost one counts. In a trace of mxmp's own it is a copy of the block (``copied``).
    """
    return next((frame.f_locals["self"] for frame in _frames() if frame.f_code.co_name == "_get_graph"), None)


def unconverted_reader() -> Block | None:
    """Return the unconverted HybridBlock whose forward has called ``LowParameter.data``; None if other code called it.

    Such a block shares a Parameter that a converted net stores in float16. The block is found on the call stack, so
    only ``LowParameter.data`` may call this function.
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
    """Yield the frames of this thread's call stack, innermost first, but neither this function's nor its caller's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- callbacks for every operator --------------------------------------------------------------------


def monitor(block: HybridBlock) -> tuple | None:
    """Return the arguments ``(callback, monitor_all)`` of ``register_op_hook``; None if the block has no op hook."""
    return (block._callback, block._monitor_all) if block._callback else None


def set_monitor(block: HybridBlock, monitor: tuple | None) -> None:
    """Set the op hook ``(callback, monitor_all)`` of ``block``, not of its children; None removes the op hook."""
    block._callback, block._monitor_all = monitor or (None, False)


def register_op_hook(op: mx.nd.CachedOp, callback: Callable, monitor_all: bool) -> None:
    """Make MXNet call ``callback(name, operator, handle)`` for each output of each node that ``op`` runs.

    ``name`` and ``operator`` are bytes, ``handle`` is that of an array. ``callback`` must free the array:
    ``NDArray(NDArrayHandle(handle))`` does. With ``monitor_all=True`` the callback is called for the nodes' inputs too.
    From then on only the calling thread may run ``op``: ``silence_removed`` relies on this, as it must not replace a
    callback that is running. Call ``remove_op_hook`` before the last reference to ``op`` is dropped.
    """
    op._register_op_hook(callback, monitor_all)


def remove_op_hook(op: mx.nd.CachedOp, thread: int) -> None:
    """Queue ``op``; a later ``silence_removed`` replaces its callback by one that does nothing.

    ``thread`` is the ``threading.get_ident()`` of the thread that runs ``op``. A backward of what autograd recorded may
    run after the last other reference to ``op`` is dropped. It calls the callback, which must still exist then. So the
    queue keeps ``op`` alive until its callback is replaced.
    """
    _hooked.append((thread, op))


def silence_removed() -> None:
    """Give the CachedOps that ``remove_op_hook`` queued a callback that does nothing, and take them out of the queue.

    (MXNet does not accept None as a callback.) Only CachedOps of this thread and of threads that have ended are taken.
    The callback of another live thread may be running at this moment. The CachedOps of that thread stay queued until
    the thread itself calls this function, or until any thread calls it after that thread has ended.
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
    """Free the array ``handle``; the op hook's callback for CachedOps whose real callback was removed.

    MXNet calls it with the arguments of every op hook; the callback owns the array that it gets.
    """
    NDArray(NDArrayHandle(handle), writable=False)  # ours to free


_silent = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, NDArrayHandle, ctypes.c_void_p)(_free)
# Global: operators whose hooks are to be removed, each with the number of the thread that runs it. They outlive their
# nets.
_hooked: deque[tuple[int, mx.nd.CachedOp]] = deque()

# -- parameters and their gradients ------------------------------------------------------------------


def is_initialized(param: Parameter) -> bool:
    """Return whether a Parameter has its arrays: ``initialize`` was called, and its shape is known."""
    return param._data is not None


def is_deferred(param: Parameter) -> bool:
    """Return whether a Parameter waits for its shape: it was initialized, and a forward has yet to make its arrays."""
    return bool(param._deferred_init)


def arrays(param: Parameter) -> list[NDArray]:
    """Return a Parameter's weight arrays, one per context, dense or sparse; an empty list before it is initialized."""
    return list(param._data or ())


def with_gradients(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """Return a Parameter's pairs ``(weight, gradient)``, one per context; an empty list if ``grad_req`` is ``"null"``.

    Raises ``RuntimeError`` or ``DeferredInitializationError`` if the Parameter needs a gradient and has no arrays yet.
    """
    if param._grad is None:
        return list(zip(param._data or (), param.list_grad())) if param.grad_req != "null" else []
    return list(zip(param._data, param._grad))


def data(param: Parameter) -> NDArray:
    """Return a Parameter's weight array on the current context; float16 for a ``LowParameter``.

    ``LowParameter.data`` would record that a user has the array; this function does not. Raises ``RuntimeError`` or
    ``DeferredInitializationError``, as ``Parameter.data`` does, if the Parameter has no array on this context.
    """
    return param._check_and_get(param._data, None)


def contexts(param: Parameter) -> Sequence[mx.Context]:
    """Return the contexts of a Parameter, also while it waits for its shape; none before ``initialize``."""
    return param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())


def structural_names(block: Block) -> dict[str, Parameter]:
    """Return all Parameters of a block by the names that ``save_parameters`` writes (``"0.weight"``)."""
    return block._collect_params_with_prefix()


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make the FP32 ``arrays``, one per context, the weight arrays of ``param``.

    Unless ``grad_req`` is ``"null"``, ``param`` also gets new gradient arrays, filled with 0.
    """
    param._data = arrays
    param._init_grad()


def fresh_weights(params: Iterable[Parameter], *, clear: bool = False) -> list[tuple[Parameter, NDArray]]:
    """Return ``(parameter, weight array)`` for each weight array, on all contexts, that MXNet has marked as fresh.

    The mark says that a backward has written the gradient of this array. MXNet's Trainer removes the mark in each step;
    ``clear=True`` removes it in this call. Runs in every backward, so it must be fast.
    """
    found = [(p, array) for p in params if p._grad is not None for array in p._data if array._fresh_grad]
    for _, array in found if clear else ():
        array._fresh_grad = False
    return found


def set_fresh(array: NDArray, *, fresh: bool) -> None:
    """Set (True) or remove (False) MXNet's mark that a backward has written the gradient of the weight ``array``."""
    array._fresh_grad = fresh


# -- what autograd recorded --------------------------------------------------------------------------


def recorded_node(recorded: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    """Return the node ``name`` of ``recorded``, a graph that autograd recorded: the node itself, not a copy."""
    return recorded.get_internals()[f"{name}_output"]


def set_attribute(node: mx.sym.Symbol, name: str, text: str) -> None:
    """Set an attribute of the operator ``node``, in place; a ``recorded_node`` has it in the next backward."""
    node._set_attr(**{name: text})


def outputs_of_cached_ops(recorded: mx.sym.Symbol, nodes: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Return, for each output of calls of hybridized blocks, whether the backward of the call reads its head gradient.

    A loss head writes its own gradient, so a block that ends in one does not read the head gradient of that output.

    The call of a hybridized block is one ``_CachedOp`` node of ``recorded``, a graph that autograd recorded; ``nodes``
    are the names of such nodes. Python cannot see the operators inside a node, but MXNet's gradient pass
    (``MXGradient``) tells which arrays the node's backward reads. If the pass fails, as for a graph with an output that
    has no gradient, it runs again on a copy of the graph that is cut off at the node's inputs. Raises ``MXNetError`` if
    it fails on the copy too.

    The result maps the name of each node to a dict. This dict maps the name of each output of the node (``<node>_<name
    inside the block>``) to True (the head gradient is read) or False. A node is missing if this cannot be found out,
    because each of its inputs is passed to it more than once or is a running statistic.
    """
    found: dict[str, dict[str, bool]] = {}
    for node in nodes:
        try:
            found[node] = _reads_head_gradients(recorded, node)
        except mx.MXNetError:
            found[node] = _reads_head_gradients(recorded.__copy__(), node, cut=True)
    return {node: outputs for node, outputs in found.items() if outputs}


def _reads_head_gradients(recorded: mx.sym.Symbol, node: str, cut: bool = False) -> dict[str, bool]:
    """Return for each output of the ``_CachedOp`` node ``node`` whether the node's backward reads its head gradient.

    The result maps output names to True or False, as in ``outputs_of_cached_ops``; it is empty if this cannot be found
    out. ``cut=False`` does not change ``recorded``. With ``cut=True``, it must be a copy: the node's inputs in it are
    replaced by variables, so that MXNet's gradient pass sees this node only. Raises ``MXNetError`` if the pass fails.
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
    """Replace all inputs of one node of a graph by new variables, in place, so that the node is a graph of its own.

    ``block`` is the Symbol of the node's outputs. The caller has set the node's attribute ``__subgraph_name__`` to a
    value that no other node has; MXNet cuts around it.
    """
    inputs, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
    check_call(_LIB.MXSymbolCutSubgraph(block.handle, ctypes.byref(inputs), ctypes.byref(count)))
    for i in range(count.value):
        check_call(_LIB.NNSymbolFree(ctypes.c_void_p(inputs[i])))


def _gradients(outputs: mx.sym.Symbol, inputs: mx.sym.Symbol, head_gradients: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the graph that computes the gradients of ``inputs`` from ``head_gradients``, those of ``outputs``.

    It has one output for each of ``inputs``; ``head_gradients`` has one for each of ``outputs``; both in their order.
    Runs ``MXGradient``, the pass with which autograd makes its backward graph; raises ``MXNetError`` if it fails.
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
    """Raise ``MXNetError`` with NNVM's message, which MXNet's ``check_call`` does not read, unless ``status`` is 0."""
    if status != 0:
        _LIB.NNGetLastError.restype = ctypes.c_char_p
        raise mx.MXNetError(py_str(_LIB.NNGetLastError()))
