"""What the Gluon door reaches behind MXNet's public interface. A test holds each against 1.9.1.

A subclass of MXNet's (``Trainer``, ``LowParameter``) also uses what it inherits; ``INHERITED`` lists that.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.gluon.block import _flatten
from mxnet.ndarray import NDArray

__all__ = ["INHERITED", "Traced"]

INHERITED = {
    "Trainer": (
        "_allreduce_grads _contexts _distributed _init_kvstore _init_optimizer _init_params _kv_initialized "
        "_kvstore _optimizer _params _params_to_init _scale _update _updaters"
    ),
    "LowParameter": "_check_and_get _data _init_grad _init_impl _reduce _set_trainer",
    "BatchProcessor": "_get_data_and_label",
}


class Traced(NamedTuple):
    """What a HybridBlock keeps of its graph, and calls."""

    op: Any
    op_args: list
    graph: tuple
    in_format: Any
    out_format: Any


def flatten(args: tuple) -> tuple[list, Any]:
    """The arrays in nested arguments, and the structure that held them."""
    return _flatten(args, "input")


def trace(block: HybridBlock, args: tuple) -> Traced:
    """Make the block's own FP32 graph for arguments of this structure."""
    block._clear_cached_op()
    block._build_cache(*args)
    return traced(block)


def traced(block: HybridBlock) -> Traced:
    """What a block with a graph runs now."""
    return Traced(block._cached_op, block._cached_op_args, block._cached_graph, block._in_format, block._out_format)


def run_as(block: HybridBlock, traced: Traced) -> None:
    """Make the block's next call run ``traced``."""
    block._cached_op, block._cached_op_args, block._cached_graph, block._in_format, block._out_format = traced
    block._active = True


def forget_graph(block: HybridBlock) -> None:
    """As ``hybridize`` does: the next call traces anew."""
    block._clear_cached_op()


def has_graph(block: HybridBlock) -> bool:
    """Whether nothing, such as ``hybridize`` or ``cast``, cleared the block's graph."""
    return block._cached_op is not None


def is_active(block: HybridBlock) -> bool:
    """Whether the block runs as a graph."""
    return block._active


def set_active(block: HybridBlock, active: bool) -> None:
    block._active = active


def flags(block: HybridBlock) -> list:
    """What ``hybridize`` was given, for a CachedOp."""
    return list(block._flags)


def backend(block: HybridBlock) -> str | None:
    """The subgraph backend that ``hybridize`` was given."""
    return block._backend


def children(block: Block) -> list[Block]:
    return list(block._children.values())


class _QuietHooks(OrderedDict):
    """Hooks of a block that has only ours: false, or ``hybridize`` warns that a hook is lost.

    MXNet reads ``active and hooks or pre_hooks`` there, a precedence slip that ``hybridize(False)``
    meets as well.
    """

    def __bool__(self) -> bool:
        return any(not getattr(hook, "quiet", False) for hook in self.values())


def hooks(block: Block) -> list[Callable]:
    """The block's forward pre-hooks."""
    return list(block._forward_pre_hooks.values())


def add_hook(block: Block, hook: Callable) -> None:
    """Register a forward pre-hook with an attribute ``quiet``, of which ``hybridize`` shall not warn."""
    if not block._forward_pre_hooks:
        block._forward_pre_hooks = _QuietHooks()
    block.register_forward_pre_hook(hook)


def remove_hook(block: Block, hook: Callable) -> None:
    found = block._forward_pre_hooks
    for key in [k for k, other in found.items() if other is hook]:
        del found[key]
    if isinstance(found, _QuietHooks):
        block._forward_pre_hooks = OrderedDict(found)


def block_being_traced() -> Block | None:
    """The block whose graph MXNet is making on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_graph":
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
