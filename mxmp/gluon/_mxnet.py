"""What the Gluon door reaches behind MXNet's public interface. A test holds each against 1.9.1.

A subclass of MXNet's (``Trainer``, ``LowParameter``) also uses what it inherits; ``INHERITED`` lists that.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.ndarray import NDArray

__all__ = ["INHERITED", "Traced"]

INHERITED = {
    "Trainer": (
        "_allreduce_grads _contexts _distributed _init_kvstore _init_optimizer _init_params _kv_initialized "
        "_kvstore _optimizer _param2idx _params _params_to_init _scale _update _updaters"
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


def flatten(args: tuple) -> tuple[list, Any]:
    """The arrays in nested arguments, and the structure that held them."""
    return _flatten(args, "input")


def regroup(flat: Sequence, structure: Any) -> Any:
    """Nested lists of a graph's flat outputs."""
    return _regroup(flat, structure)


def copied(block: HybridBlock) -> HybridBlock:
    """Another block with the same children, Parameters and attributes, and no graph: to trace, or to run as Python."""
    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone._clear_cached_op()
    if not isinstance(block, SymbolBlock):
        clone._in_format = clone._out_format = None
    clone._active = False
    return clone


def trace(clone: HybridBlock, args: tuple) -> None:
    """Make the FP32 graph of what ``copied`` gave, for arguments of this structure; runs the user's code."""
    if not isinstance(clone, SymbolBlock):
        forward = clone.hybrid_forward

        def noting(*given: Any, **params: Any) -> Any:
            clone.__dict__["mxmp_answer"] = out = forward(*given, **params)
            return out

        clone.__dict__["hybrid_forward"] = noting
    clone._get_graph(*args)


def traced(clone: HybridBlock, args: tuple) -> Traced:
    """What ``trace`` made, with the parameters' shapes inferred."""
    clone._build_cache(*args)
    answer = clone.__dict__.get("mxmp_answer")
    return Traced(clone._cached_op_args, clone._cached_graph, clone._in_format, clone._out_format, answer)


def run_as_python(clone: HybridBlock, args: tuple) -> Any:
    """What a block that is not hybridized does."""
    return HybridBlock.forward(clone, *args)


def runs_python(block: Block) -> bool:
    """Whether its class has a ``forward`` of a user's, which need not ask for a graph."""
    return not type(block).forward.__module__.startswith("mxnet.gluon.")


def nested(arrays: Sequence[NDArray], structure: Any) -> Any:
    """The arguments that ``flatten`` made ``arrays`` and ``structure`` of, which leave out every None."""
    rest = iter(arrays)

    def walk(part: Any) -> Any:
        if isinstance(part, int):
            return None if part == -1 else next(rest)
        return [walk(inner) for inner in part]

    return walk(structure)


def stand_in(block: HybridBlock, op: Any, op_args: list, graph: tuple | None = None) -> None:
    """Put our own where MXNet keeps a block's cached op, what that is fed with, and the FP32 graph for files."""
    block._cached_op_args, block._cached_op = op_args, op
    if graph is not None:
        block._cached_graph = graph


def stands(block: HybridBlock, op: Any) -> bool:
    """Whether ``op`` is in place: nothing, such as ``hybridize`` or ``cast``, cleared the block's graph."""
    return op is not None and block._cached_op is op


def forget_graph(block: HybridBlock) -> None:
    """As ``hybridize`` does: the next call traces anew."""
    block._clear_cached_op()


def is_active(block: HybridBlock) -> Any:
    """Whether the block runs as a graph."""
    return block._active


def set_active(block: HybridBlock, active: Any) -> None:
    block._active = active


def flags(block: HybridBlock) -> list:
    """What ``hybridize`` was given, for a CachedOp."""
    return list(block._flags)


def backend(block: HybridBlock) -> str | None:
    """The subgraph backend that ``hybridize`` was given."""
    return block._backend


def formats(block: HybridBlock) -> tuple[Any, Any]:
    return block._in_format, block._out_format


def set_formats(block: HybridBlock, kept: tuple[Any, Any]) -> None:
    block._in_format, block._out_format = kept


def variant(block: HybridBlock) -> Any:
    """What a layer of MXNet's keeps on itself about its call: whether a recurrent one was given states."""
    return getattr(block, "skip_states", None)


def children(block: Block) -> list[Block]:
    return list(block._children.values())


class _Hooks(OrderedDict):
    """A block's forward pre-hooks, one of them ours: has ``quiet = True`` and ``follow(block)``.

    ``hybridize`` asks whether there are hooks, as the last thing that it does to a block, to warn that
    they are lost: ours is not (MXNet reads ``active and hooks or pre_hooks`` there, a precedence slip that
    ``hybridize(False)`` meets as well), and this is where it learns of the call. Hooks from before
    convert stay in their own dictionary, from which their handles detach them.
    """

    block: Any = None
    earlier: Any = None
    taken: frozenset = frozenset()

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.taken -= {key}
        super().__setitem__(key, hook)

    def values(self) -> Any:
        for key in [key for key in self.taken if key not in self.earlier]:
            del self[key]
            self.taken -= {key}
        return super().values()

    def __bool__(self) -> bool:
        found = list(self.values())
        for hook in found:
            if getattr(hook, "quiet", False):
                hook.follow(self.block)
        return not all(getattr(hook, "quiet", False) for hook in found)

    def __reduce__(self) -> Any:
        if any(getattr(hook, "quiet", False) for hook in self.values()):
            return super().__reduce__()
        return OrderedDict, (list(self.items()),)


def hooks(block: Block) -> list[Callable]:
    """The block's forward pre-hooks."""
    return list(block._forward_pre_hooks.values())


def add_hook(block: Block, hook: Callable) -> None:
    """Register a forward pre-hook, of which ``hybridize`` shall not warn but which it shall tell."""
    earlier = block._forward_pre_hooks
    if not isinstance(earlier, _Hooks):
        made = _Hooks(earlier)
        made.block, made.earlier, made.taken = block, earlier, frozenset(earlier)
        block._forward_pre_hooks = made
    block.register_forward_pre_hook(hook)


def remove_hook(block: Block, hook: Callable) -> None:
    """Take it out; the user's dictionary is put back unless handles of hooks point into ours."""
    found = block._forward_pre_hooks
    for key in [key for key, other in found.items() if other is hook]:
        del found[key]
    found.values()
    if isinstance(found, _Hooks) and found.keys() == found.taken:
        block._forward_pre_hooks = found.earlier


def is_summarized(block: Block) -> bool:
    """Whether ``summary`` is looking at what the block's children return."""
    return any(_has_summary_hook(child) or is_summarized(child) for child in children(block))


def _has_summary_hook(block: Block) -> bool:
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


def trainer_of(param: Parameter) -> Any:
    return param._trainer


def is_fresh(array: NDArray) -> bool:
    """Whether a backward has written its gradient since ``mark_stale``."""
    return array._fresh_grad


def mark_stale(array: NDArray) -> None:
    array._fresh_grad = False


def set_arrays(param: Parameter, arrays: list[NDArray]) -> None:
    """Make these FP32 arrays the parameter's, with new gradients."""
    param._data = arrays
    param._init_grad()
