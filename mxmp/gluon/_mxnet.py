"""What the Gluon door reaches behind MXNet's public interface. A test holds each against 1.9.1.

A subclass of MXNet's (``Trainer``, ``LowParameter``) also uses what it inherits; ``INHERITED`` lists that.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, deque
from types import FrameType
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call, py_str
from mxnet.contrib.amp import amp as contrib_amp
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock, Trainer, nn
from mxnet.gluon.block import _flatten, _gather_type_ctx_info, _regroup
from mxnet.ndarray import NDArray

__all__ = ["INHERITED", "Traced"]

INHERITED = {
    "Trainer": (
        "_allreduce_grads _contexts _distributed _init_kvstore _init_optimizer _init_params _kv_initialized "
        "_kvstore _kvstore_params _optimizer _params _params_to_init _reset_kvstore _scale _update _updaters"
    ),
    "LowParameter": "_check_and_get _data _init_grad _init_impl _reduce _set_trainer",
    "BatchProcessor": "_get_data_and_label",
}


class Traced(NamedTuple):
    """What MXNet keeps of a block's graph, and the types of what it returned."""

    op_args: list
    graph: tuple
    in_format: Any
    out_format: Any
    answer: Any


def is_amp_initialized() -> bool:
    """Whether ``amp.init()`` of ``mxnet.contrib.amp`` was called in this process."""
    return contrib_amp._amp_initialized


def flatten(args: tuple) -> tuple[list, Any]:
    """The arrays in nested arguments, and the structure that held them."""
    return _flatten(args, "input")


def kinds(args: tuple) -> tuple[bool, bool, set, Any]:
    """Whether there are Symbols, and arrays, in nested arguments; the arrays' contexts; the first one's."""
    return _gather_type_ctx_info(args)


def regroup(flat: Sequence, structure: Any) -> Any:
    """Nested lists of a graph's flat outputs."""
    return _regroup(flat, structure)


def copied(block: HybridBlock) -> HybridBlock:
    """Another block with the same children, Parameters and attributes, without a graph: to be traced."""
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._active = False
    give_back(clone)
    return clone


def graph_arguments(block: HybridBlock, args: tuple) -> tuple | None:
    """What a call of the block's class hands on to the block's graph, None where it asks for none."""
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


def trace(clone: HybridBlock, args: tuple) -> None:
    """Make the FP32 graph of what ``copied`` gave, for arguments of this structure; runs the user's code."""
    if isinstance(clone, SymbolBlock):
        return
    forward = clone.hybrid_forward

    def noting(*given: Any, **params: Any) -> Any:
        clone.__dict__["mxmp_answer"] = out = forward(*given, **params)
        return out

    clone._in_format = clone._out_format = None
    clone.__dict__["hybrid_forward"] = noting
    try:
        clone._get_graph(*args)
    finally:
        del clone.__dict__["hybrid_forward"]


def built(clone: HybridBlock, args: tuple) -> Traced:
    """What ``trace`` made, with the parameters' shapes inferred, and what the user's code returned."""
    clone._build_cache(*args)
    return traced(clone)._replace(answer=clone.__dict__.get("mxmp_answer"))


def traced(block: HybridBlock) -> Traced:
    """What a block keeps of its graph."""
    return Traced(block._cached_op_args, block._cached_graph, block._in_format, block._out_format, None)


def show(block: HybridBlock, traced: Traced) -> None:
    """Leave a graph where ``export`` and ``save`` look for it; calls of a converted block do not."""
    block._cached_op_args, block._cached_graph, block._in_format, block._out_format, _ = traced


def undo_load(block: Block) -> None:
    """Give a block the names again that it had before ``load(prefix)``: those that its Parameters still have.

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


def take_over(block: HybridBlock, forward: Callable, call_graph: Callable) -> None:
    """Let every call of ``block`` go through ``forward``, and MXNet's call of the block's graph through ``call_graph``.

    Attributes of this one block, in front of its class's methods.
    """
    block.__dict__.update(forward=forward, _call_cached_op=call_graph)
    block._clear_cached_op()


def give_back(block: HybridBlock) -> None:
    """Undo ``take_over``; the block has no graph."""
    block.__dict__.pop("forward", None)
    block.__dict__.pop("_call_cached_op", None)
    block._clear_cached_op()


def forward(block: HybridBlock, args: tuple) -> Any:
    """What a call of the block does by its class."""
    return type(block).forward(block, *args)


def overrides_forward(block: Block) -> bool:
    """Whether its class has a ``forward`` of its own, which need not ask for a graph, or may for other arguments."""
    return type(block).forward not in (HybridBlock.forward, SymbolBlock.forward)


def monitor(block: HybridBlock) -> tuple | None:
    """What ``register_op_hook`` was given."""
    return (block._callback, block._monitor_all) if block._callback else None


def set_monitor(block: HybridBlock, monitor: tuple | None) -> None:
    """As ``register_op_hook``, for this block alone; None undoes it."""
    block._callback, block._monitor_all = monitor or (None, False)


def register_op_hook(op: mx.nd.CachedOp, callback: Callable, monitor_all: bool) -> None:
    """Let an operator of this thread's call ``callback``; ``remove_op_hook`` before letting go of the operator."""
    op._register_op_hook(callback, monitor_all)


def remove_op_hook(op: mx.nd.CachedOp, thread: int) -> None:
    """Keep an operator, of the thread of this number, until ``silence_removed`` lets it call nobody any more.

    What was recorded outlives the operator, and its backward calls the hook, which must exist.
    """
    _hooked.append((thread, op))


def silence_removed() -> None:
    """Give operators whose hooks were removed one that does nothing: MXNet takes no None.

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


def cached_op(block: HybridBlock) -> Any:
    """What stands where MXNet keeps the operator of a block's graph, until ``hybridize``, ``cast`` or a new child."""
    return block._cached_op


def set_cached_op(block: HybridBlock, op: Any) -> None:
    block._cached_op = op


def is_active(block: HybridBlock) -> bool:
    """Whether the block runs as a graph."""
    return block._active


def set_active(block: HybridBlock, active: bool) -> None:
    block._active = active


def flags(block: HybridBlock) -> list:
    """What ``hybridize`` was given, for a cached op."""
    return block._flags


def backend(block: HybridBlock) -> str | None:
    """What ``hybridize(backend=...)`` was given."""
    return block._backend


def variant(block: HybridBlock) -> Any:
    """What a layer of MXNet's keeps on itself about its call: whether a recurrent one was given states."""
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    return list(block._children.values())


def is_summarized(block: Block) -> bool:
    """Whether ``summary`` wants to see what is inside the block; it looks at all blocks but containers."""
    while isinstance(block, (nn.Sequential, nn.HybridSequential)) and block._children:
        block = children(block)[0]
    return any(getattr(hook, "__name__", "") == "_summary_hook" for hook in block._forward_hooks.values())


def block_being_traced() -> Block | None:
    """The block whose graph MXNet is making on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_graph":
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def plain_reader() -> Block | None:
    """The block that asks the caller for a parameter's array to compute with, outside any graph of ours."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(2):  # a comprehension may have a frame of its own
        if frame is None or frame.f_globals.get("__name__") != "mxnet.gluon.block":
            return None
        if frame.f_code.co_name in ("forward", "_call_cached_op"):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def is_initialized(param: Parameter) -> bool:
    return param._data is not None


def is_deferred(param: Parameter) -> bool:
    """Whether it waits for its shape."""
    return bool(param._deferred_init)


def arrays(param: Parameter) -> list[NDArray]:
    """What computes, one array per context, of any storage; none before initialization."""
    return list(param._data or ())


def with_gradients(param: Parameter) -> list[tuple[NDArray, NDArray]]:
    """What computes beside its gradient, by context; none where no gradient is asked for.

    Raises
    ------
    RuntimeError, DeferredInitializationError
        It is not initialized yet.
    """
    if param._grad is None:
        return list(zip(param._data or (), param.list_grad())) if param.grad_req != "null" else []
    return list(zip(param._data, param._grad))


def data(param: Parameter) -> NDArray:
    """As ``param.data()`` for a call of MXNet's own: on the current context, in the dtype that computes."""
    return param._check_and_get(param._data, None)


def contexts(param: Parameter) -> Sequence[mx.Context]:
    """Where it is, or will be once its shape is known."""
    return param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())


def is_differentiable(param: Parameter) -> bool:
    """False for a running statistic, and for a Constant."""
    return param._differentiable


def storage(param: Parameter) -> str:
    """``"default"`` for dense weights."""
    return param._stype


def parameters_of(trainer: Trainer) -> list[Parameter]:
    """Return the parameters that a trainer updates, in the order of their numbers."""
    return trainer._params


def trainer_of(param: Parameter) -> Any:
    """The last ``gluon.Trainer`` that was made over the parameter."""
    return param._trainer


def fresh(params: Iterable[Parameter], *, clear: bool = False) -> list[tuple[Parameter, NDArray]]:
    """The arrays for which ``is_fresh`` holds, with their parameters; one loop, since it runs in every backward."""
    found = [(p, array) for p in params if p._grad is not None for array in p._data if array._fresh_grad]
    for _, array in found if clear else ():
        array._fresh_grad = False
    return found


def is_fresh(array: NDArray) -> bool:
    """Whether a backward has written its gradient since it was marked as stale."""
    return array._fresh_grad


def mark(array: NDArray, *, fresh: bool) -> None:
    """Let MXNet believe that a backward has written the array's gradient, or that none has."""
    array._fresh_grad = fresh


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make these FP32 arrays the parameter's, with new gradients."""
    param._data = arrays
    param._init_grad()


# -- what autograd recorded --------------------------------------------------------------------------


def hidden_outputs(recorded: mx.sym.Symbol, nodes: Sequence[str]) -> dict[str, dict[str, bool]]:
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
    given = block.get_children()
    times = Counter(given.list_outputs())
    once = [given[i] for i, name in enumerate(given.list_outputs()) if times[name] == 1]
    if not once:
        return {}
    above = {name: f"{name}_gradient" for name in outputs}
    backward = _gradients(block, mx.sym.Group(once), mx.sym.Group([mx.sym.var(name) for name in above.values()]))
    read = backward.get_children()
    names = set() if read is None else set(read.list_outputs())  # None: all are running statistics
    return {name: variable in names for name, variable in above.items()} if names else {}


def _cut_off_inputs(block: mx.sym.Symbol) -> None:
    """Replace what the node behind ``block`` reads by variables; the node has an attribute ``__subgraph_name__``."""
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
