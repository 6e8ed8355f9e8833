"""The private parts of MXNet that the Gluon frontend uses. A test compares each with MXNet 1.9.1.

A class of mxmp that is derived from one of MXNet's (``Trainer``, ``LowParameter``) also uses private attributes that it
inherits; ``INHERITED`` lists these.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from functools import cached_property, partial
from operator import attrgetter, is_
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, py_str
from mxnet.contrib.amp import amp as contrib_amp
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock, nn
from mxnet.gluon.block import _flatten, _gather_type_ctx_info, _regroup
from mxnet.gluon.rnn import rnn_layer
from mxnet.ndarray import NDArray

from ..host import versions
from ..precision._mxnet import NumpySymbol

INHERITED = {
    "Trainer": (
        "_allreduce_grads _check_and_rescale_grad _contexts _distributed _init_kvstore _init_optimizer _init_params "
        "_kv_initialized _kvstore _kvstore_params _optimizer _params _params_to_init _reset_kvstore _scale _update "
        "_updaters"
    ),
    "LowParameter": "_check_and_get _data _init_grad _init_impl _reduce _set_trainer",
    "BatchProcessor": "_get_data_and_label",
    "Scopes": "_attr",
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
    # MXNet then inserts casts into every graph, and mxmp's would come on top of them.
    if contrib_amp._amp_initialized:
        from ..messages.converted import no_contrib_amp

        raise no_contrib_amp()


# -- an array ---------------------------------------------------------------------------------------

# Where an NDArray object of MXNet 1.9.1 has its attribute ``byte_offset_`` (include/mxnet/ndarray.h): how many bytes
# behind the beginning of its memory the array begins. MXNet has no function that tells it.
_BYTE_OFFSET = 64
# A vector of four float64, the largest that a fused kernel loads at once.
_ALIGNMENT = 32


def is_aligned(array: NDArray) -> bool:
    """Return whether a kernel may load a vector of elements at once from where the array begins; does not wait."""
    # Not by the address: for it MXNet would allocate memory (MXNDArrayGetData), and if the engine does so at the same
    # time, the array's values are lost.
    return ctypes.c_size_t.from_address(array.handle.value + _BYTE_OFFSET).value % _ALIGNMENT == 0


# Where it has its attribute ``autograd_entry_``: a pointer to a node, a new one each time that the array is marked with
# a gradient array (``attach_grad``, ``grad_req``, ``reset_ctx``, ``initialize(force_reinit=True)``).
_AUTOGRAD_NODE = 88


class Marks:
    """Weights and the gradient arrays that they are marked with, compared with those of a later call; does not wait."""

    def __init__(self, weights: Sequence[NDArray]) -> None:
        self._weights = weights
        # Without a gradient array, as running statistics are, an array gets a node for each backward.
        marked: list[NDArray] = []
        self._unmarked: list[NDArray] = []
        for weight in weights:
            (marked if _has_gradient(weight) else self._unmarked).append(weight)
        # Copies of MXNet's objects keep the nodes alive, so that no new node gets an old one's address.
        self._kept = [_shallow_copy(weight) for weight in marked]
        self._pointers = [ctypes.c_size_t.from_address(weight.handle.value + _AUTOGRAD_NODE) for weight in marked]
        self._nodes = [pointer.value for pointer in self._pointers]

    @cached_property
    def names(self) -> list[str | None]:
        """Return the names that autograd's recorded graph has for the weights."""
        return [recorded_name(array) for array in self._kept]

    def hold(self, weights: Sequence[NDArray]) -> bool:
        """Return whether ``weights`` are the same objects, with the same gradient arrays and ``grad_req``."""
        same = len(weights) == len(self._weights) and all(map(is_, weights, self._weights))
        same = same and [pointer.value for pointer in self._pointers] == self._nodes
        return same and not any(map(_has_gradient, self._unmarked))


class Recorded:
    """A call that autograd has recorded, by an output of it; keeps the output's memory, and the record if it waits."""

    def __init__(self, out: NDArray) -> None:
        self._out = _shallow_copy(out)
        # A backward clears what MXNet keeps of the call, with this flag; MXNet itself sets it on leaves only.
        self._has_flag = _LIB.MXNDArraySetGradState(self._out.handle, 1) == 0  # -1: nothing of it asks for a gradient

    def is_waiting(self) -> bool:
        """Return whether no backward has used the call's record up."""
        return self._has_flag and bool(self._out._fresh_grad)

    def is_held(self) -> bool:
        """Return whether an output of the call or what was computed from one, such as a loss, is still there."""
        # A pointer to a C++ object that counts its owners stands behind that to the node (libstdc++'s shared_ptr).
        counts = ctypes.c_size_t.from_address(self._out.handle.value + _AUTOGRAD_NODE + 8).value
        return ctypes.c_int.from_address(counts + 8).value > 1

    @property
    def name(self) -> str | None:
        """Return the name of the call's node in autograd's recorded graph."""
        return recorded_name(self._out)


def _has_gradient(array: NDArray) -> bool:
    # As ``array.grad is not None``, in half the time: static graphs ask it of all running statistics in each call.
    handle = NDArrayHandle()
    call_library("MXNDArrayGetGrad", array.handle, ctypes.byref(handle))
    if handle.value is None:
        return False
    call_library("MXNDArrayFree", handle)
    return True


def _shallow_copy(array: NDArray) -> NDArray:
    handle = NDArrayHandle()
    call_library("MXShallowCopyNDArray", array.handle, ctypes.byref(handle))
    return NDArray(handle)


# -- a block's graph and its arguments ---------------------------------------------------------------

# From nested arguments: whether there are Symbols, whether there are arrays, the set of the arrays' contexts, and the
# context of the first array.
kinds = _gather_type_ctx_info
# Takes the flat list of a graph's outputs and the description of their nesting (``flatten``); returns nested lists.
regroup = _regroup


class TracedGraph(NamedTuple):
    """The FP32 graph of a HybridBlock, as MXNet stores it in private attributes of the block after a trace."""

    # Where the value of each input of the Symbol comes from, in the order of ``list_inputs()``: ``(True, i)`` for array
    # i of those passed to the block, without None; ``(False, parameter)``. Empty until ``infer_shapes`` has run.
    op_args: list
    # The variables that stand for the arrays passed to the block, and the Symbol of its outputs.
    graph: tuple
    # How arguments and outputs are nested (``flatten``).
    in_format: Any
    out_format: Any


# The class of recurrent layers (LSTM, GRU, RNN).
RecurrentLayer: Any = rnn_layer._RNNLayer


def copy_of(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the Symbol of a copy, of the same kind: one of ``mx.sym`` or ``mx.sym.np``."""
    return mx.sym.np.copy(symbol) if is_numpy(symbol) else mx.sym.identity(symbol)


def is_numpy(value: mx.sym.Symbol | NDArray) -> bool:
    """Return whether an array or Symbol is one of MXNet's NumPy interface."""
    return isinstance(value, (mx.np.ndarray, NumpySymbol))


def of_kind(value: Any, numpy: bool) -> Any:
    """Return an array or Symbol in MXNet's NumPy interface, or out of it."""
    return value.as_np_ndarray() if numpy else value.as_nd_ndarray()


# The dicts of a block's forward hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes of blocks that the code of no ``hybrid_forward`` reads for its own sake: MXNet's own (names, graphs, flags;
# counters of recurrent cells, which number operators), and what ``redirect_calls`` sets. Not children and Parameters.
BOOKKEEPING = (vars(HybridBlock(prefix="")).keys() - {"_children", "_reg_params", *HOOKS}) | {
    *("forward", "hybrid_forward", "hybridize", "cast", "optimize_for", "_call_cached_op", "mxmp_conversion"),
    *("skip_states", "_counter", "_init_counter"),
}


def flatten(args: tuple) -> tuple[list, Any]:
    """Return the arrays and None in a call's arguments as one flat list, and how they were nested.
    ``(x, [y, None])`` gives ``[x, y, None]`` and ``[0, [0, -1]]``: 0 for an array, -1 for None, n for a Symbol of n > 1
    outputs. Raises ``ValueError`` for an argument of another type."""
    return _flatten(args, "input")


def arrays_in(args: tuple) -> list[NDArray]:
    """Return the arrays in a call's arguments, or a call's output in a tuple, as one flat list without None."""
    return [array for array in flatten(args)[0] if array is not None]


def copied(block: HybridBlock) -> HybridBlock:
    """Return a shallow copy of ``block`` to trace, without hook and graph; it shares children and Parameters."""
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._active = False
    restore_calls(clone)
    return clone


def own_symbol(block: HybridBlock) -> mx.sym.Symbol | None:
    """Return the graph of a SymbolBlock, which it has before any call; None for another block."""
    return block._cached_graph[1] if isinstance(block, SymbolBlock) else None


def trace(clone: HybridBlock, args: tuple, called: Callable) -> bool:
    """Trace a block that ``copied`` returned, and store the FP32 graph on it; False for a SymbolBlock, which has one.
    ``called(hybrid_forward, F, args, params)`` is called in place of ``hybrid_forward(F, *args, **params)``."""
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
    ``prepare`` is applied to the dict of the block's own Parameters as Symbols."""
    with block.name_scope():
        return block.hybrid_forward(functions, *args, **prepare({n: p.var() for n, p in block._reg_params.items()}))


def known_shapes(clone: HybridBlock, args: tuple) -> dict[str, tuple]:
    """Return the shapes of the variables in the graph of a traced copy, of Parameters as far as they are known."""
    data, symbol = clone._cached_graph
    shapes = {name: tuple(param.shape) for name, param in clone.collect_params().items() if param.shape}
    shapes.update({each.name: array.shape for each, array in zip(data, arrays_in(args))})
    return {name: shapes[name] for name in symbol.list_inputs() if name in shapes}


def shapes_fit(clone: HybridBlock, args: tuple) -> bool:
    """Return whether no operator in the graph of a traced copy refuses the shapes of a call."""
    try:
        clone._cached_graph[1].infer_shape_partial(**known_shapes(clone, args))
    except mx.MXNetError:
        return False
    return True


def infer_shapes(clone: HybridBlock, args: tuple) -> None:
    """Fill in ``op_args`` of a traced copy, and initialize the Parameters that wait for their shape.
    Raises ``ValueError`` if the graph and the inputs do not tell a shape."""
    if not overrides(clone, "infer_shape"):
        clone.__dict__["infer_shape"] = partial(_infer_shapes_of_used, clone)
    try:
        clone._build_cache(*args)
    except AssertionError as error:
        if "Unknown input to HybridBlock: " not in str(error):
            raise
        from ..messages.converted import no_part_without_child  # what is said is loaded where it is needed

        raise no_part_without_child(clone.name, str(error).rpartition(" ")[2]) from error
    except ValueError as error:
        if "Deferred initialization failed" not in str(error):
            raise
        from ..messages.inputs import of_deferred_shapes  # what is said is loaded where it is needed

        raise of_deferred_shapes(error) from error


def _infer_shapes_of_used(clone: HybridBlock, *args: Any) -> None:
    # MXNet's own fails if an input or a Parameter is not used, which Python code may leave out.
    data, symbol = clone._get_graph(*args)
    inputs, params = set(symbol.list_inputs()), dict(clone.collect_params().items())
    shapes = {each.name: array.shape for each, array in zip(data, arrays_in(args)) if each.name in inputs}
    found, _, states = symbol.infer_shape(**shapes)
    if found is None:
        raise ValueError("it does not follow from the inputs")
    for name, shape in zip([*symbol.list_arguments(), *symbol.list_auxiliary_states()], [*found, *states]):
        if name in params:
            params[name].shape = shape


def traced_graph(block: HybridBlock) -> TracedGraph:
    """Return the FP32 graph that MXNet has stored on ``block``; before a trace the fields are empty or None."""
    return TracedGraph(getattr(block, "_cached_op_args", []), block._cached_graph, block._in_format, block._out_format)


def set_traced_graph(block: HybridBlock, traced: TracedGraph) -> None:
    """Store the FP32 graph that ``export`` and ``save`` write to files."""
    block._cached_op_args, block._cached_graph, block._in_format, block._out_format = traced


def undo_load(block: Block) -> None:
    """Restore the names that ``block.load(prefix)`` changed, not inside the block; delete the graph that it stored."""
    # ``load`` renames block and keys, but not ``Parameter.name``, so that a later trace would not find its Parameters
    # ("Unknown input to HybridBlock").
    name, params = block.prefix[:-1] if block.prefix.endswith("_") else block.prefix, block.params._params
    if isinstance(block, SymbolBlock):
        name = name or block.name  # MXNet takes its prefix away, and leaves it its name
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
    """Replace ``block.forward``, MXNet's ``block._call_cached_op``, and ``methods`` by name; none gets the block.
    ``HybridBlock.forward`` calls ``call_graph`` if the block is active. Deletes the graph, but not a SymbolBlock's."""
    block.__dict__.update(forward=forward, _call_cached_op=call_graph, **methods)
    _delete_graph(block)


def restore_calls(block: HybridBlock) -> None:
    """Undo ``redirect_calls``; delete the same graph and CachedOp."""
    for name in ("forward", "_call_cached_op", "hybridize", "cast", "optimize_for"):
        block.__dict__.pop(name, None)
    _delete_graph(block)


def is_redirected(block: Block) -> bool:
    return "forward" in vars(block)


def _delete_graph(block: HybridBlock) -> None:
    block._clear_cached_op()
    if not versions.NOW.clears_graph_arguments:
        block.__dict__.pop("_cached_op_args", None)


def set_cached_op(block: HybridBlock, op: Any) -> None:
    """Store ``op``, the dict of a converted block's graphs, where MXNet keeps the CachedOp of a hybridized block."""
    # ``hybridize``, ``cast`` and a new child set this to None, and so delete these graphs as they delete a CachedOp.
    block._cached_op = op


def set_active(block: HybridBlock, active: bool) -> None:
    block._active = active


def forward(block: HybridBlock, args: tuple) -> Any:
    """Call the ``forward`` of the block's class, not the one that ``redirect_calls`` has set."""
    return type(block).forward(block, *args)


def overrides_forward(block: Block) -> bool:
    """Return whether the class has a ``forward`` of its own, which may run no graph, or one on other arguments."""
    return overrides(block, "forward", HybridBlock, SymbolBlock)


def overrides_graph_calls(block: HybridBlock) -> bool:
    return overrides(block, "_call_cached_op")


def overrides(block: Block, name: str, *of: type) -> bool:
    """Return whether the class has another method than each of the classes ``of``; if none, than HybridBlock."""
    method = getattr(type(block), name)
    while getattr(method, "__globals__", None) is vars(mx.util):  # ``use_np`` wraps what a class inherits, too
        method = method.__wrapped__
    return all(method is not getattr(each, name) for each in of or (HybridBlock,))


def lacks_states(block: HybridBlock) -> bool | None:
    """Return whether the present call of a recurrent layer passes no initial states; None for other blocks.
    The layer's graph then returns the output alone."""
    # MXNet sets it before it calls ``forward``.
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    return list(block._children.values())


def is_summarized(block: Block) -> bool:
    """Return whether ``summary``, which lists what each child returns, runs on ``block`` or a net around it."""
    # ``summary`` puts its forward hook on every block but Sequential containers.
    while isinstance(block, (nn.Sequential, nn.HybridSequential)) and block._children:
        block = children(block)[0]
    return any(getattr(hook, "__name__", "") == "_summary_hook" for hook in block._forward_hooks.values())


def block_being_traced() -> Block | None:
    """Return the block whose ``_get_graph`` (MXNet's trace) runs innermost on this thread, or None."""
    return next((frame.f_locals["self"] for frame in _frames() if frame.f_code.co_name == "_get_graph"), None)


def reader_in_python() -> Block | None:
    """Return the HybridBlock whose forward, as Python, has called ``LowParameter.data``; None if other code did.
    Reads the call stack, so only ``LowParameter.data`` may call this."""
    frames = _frames()
    next(frames)  # of the caller
    for _, frame in zip(range(2), frames):  # a comprehension may have a frame of its own
        if frame.f_globals.get("__name__") != "mxnet.gluon.block":
            return None
        if frame.f_code.co_name in ("forward", "_call_cached_op"):
            return frame.f_locals["self"]
    return None


def _frames() -> Iterator[FrameType]:
    """Yield this thread's frames, innermost first, from the caller of the caller on."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- callbacks for every operator --------------------------------------------------------------------


def monitor(block: HybridBlock) -> tuple | None:
    """Return the arguments ``(callback, monitor_all)`` of ``register_op_hook``; None if the block has no op hook."""
    return (block._callback, block._monitor_all) if block._callback else None


def register_op_hook(op: mx.nd.CachedOp, callback: Callable, monitor_all: bool) -> None:
    """Make MXNet call ``callback(name: bytes, operator: bytes, handle)``, which must free the array of ``handle``.
    From then on only the calling thread may run ``op``. Call ``remove_op_hook`` before the last reference goes."""
    op._register_op_hook(callback, monitor_all)


def remove_op_hook(op: mx.nd.CachedOp, thread: int) -> None:
    """Queue ``op``, which the thread numbered ``thread`` runs, until ``silence_removed`` replaces its callback."""
    # A later backward of what autograd recorded calls the callback. So the queue keeps ``op`` and callback alive.
    _hooked.append((thread, op))


def silence_removed() -> None:
    """Replace the callbacks of queued CachedOps that this thread, or one that has ended, ran."""
    # The callback of another live thread may be running now, and MXNet takes no None as callback.
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
    """Return whether the Parameter has its arrays: ``initialize`` was called, and its shape is known."""
    return param._data is not None


def is_deferred(param: Parameter) -> bool:
    """Return whether the Parameter was initialized and still waits for its shape."""
    return bool(param._deferred_init)


def dtype_of(held: Parameter | NDArray) -> Any:
    """Return the dtype of a Parameter or an array; MXNet takes None for float32."""
    return "float32" if held.dtype is None else held.dtype


def arrays(param: Parameter) -> list[NDArray]:
    """Return the weight arrays, one per context, dense or sparse; an empty list before the Parameter is initialized."""
    return list(param._data or ())


def with_gradients(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """Return ``(weight, gradient)`` per context; an empty list if ``grad_req`` is ``"null"``.
    Raises ``RuntimeError`` or ``DeferredInitializationError`` if it needs a gradient and has no arrays yet."""
    if param._grad is None:
        return list(zip(param._data or (), param.list_grad())) if param.grad_req != "null" else []
    return list(zip(param._data, param._grad))


def gradients_so_far(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """As ``with_gradients``; an empty list, too, if the Parameter has no arrays yet."""
    return list(zip(param._data or (), param._grad or ()))


def data(param: Parameter) -> NDArray:
    """Return the weight array on the current context, without ``LowParameter.data``, which notes that a user has it."""
    return param._check_and_get(param._data, None)


def contexts(param: Parameter) -> Sequence[mx.Context]:
    """Return the contexts of a Parameter, also while it waits for its shape; none before ``initialize``."""
    return param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())


def structural_names(block: Block) -> dict[str, Parameter]:
    """Return all Parameters by the names that ``save_parameters`` writes (``"0.weight"``)."""
    return block._collect_params_with_prefix()


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make ``arrays`` the weights, one per context, with new gradients of zeros unless ``grad_req`` is ``"null"``."""
    param._data = arrays
    param._init_grad()


def fresh_weights(params: Iterable[Parameter], *, clear: bool = False) -> list[tuple[Parameter, NDArray, NDArray]]:
    """Return ``(parameter, weight, gradient)`` for each weight with MXNet's fresh mark; ``clear`` removes the marks."""
    # Runs in every backward, so it must be fast.
    found = [(p, *pair) for p in params if p._grad is not None for pair in zip(p._data, p._grad) if pair[0]._fresh_grad]
    for _, array, _ in found if clear else ():
        array._fresh_grad = False
    return found


def set_fresh(array: NDArray, *, fresh: bool) -> None:
    array._fresh_grad = fresh


# -- what autograd recorded --------------------------------------------------------------------------


def recorded_node(recorded: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    """Return the node ``name`` of a graph that autograd recorded: the node itself, not a copy."""
    return recorded.get_internals()[f"{name}_output"]


def set_attribute(node: mx.sym.Symbol, name: str, text: str) -> None:
    """Set an attribute of the operator in place; a ``recorded_node`` has it in the next backward."""
    node._set_attr(**{name: text})


def call_library(function: str, *args: Any) -> None:
    """Call a function of MXNet's C library; raise ``MXNetError`` with its message if it fails."""
    if getattr(_LIB, function)(*args) != 0:
        message = _LIB.NNGetLastError if function.startswith("NN") else _LIB.MXGetLastError
        message.restype = ctypes.c_char_p
        raise mx.MXNetError(py_str(message()))


def recorded_name(array: NDArray) -> str | None:
    """Return the name that autograd's recorded graph has for the node of ``array``; None if it was not recorded."""
    try:
        return autograd.get_symbol(array).name
    except mx.MXNetError:
        return None
