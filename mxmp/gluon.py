"""The Gluon door: nets converted in place, and back.

A converted block keeps its class, tree, hooks and Parameters. Each HybridBlock of the tree gets one
forward pre-hook that hands MXNet a cached op made from the low-precision graph and leaves the FP32
graph in ``_cached_graph``, so that exports and checkpoints stay FP32.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Iterable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Constant, HybridBlock, Parameter
from mxnet.gluon.block import _flatten
from mxnet.ndarray import NDArray

from .block import LowOp, QuietHooks
from .graph import Graph
from .heads import HeadScale, scale_heads
from .lower import device_of, low_graph
from .masters import LowParameter, store_full, store_low
from .plan import Plan, check_policy
from .policy import Policy, as_policy

__all__ = ["Conversion", "conversion_of", "convert", "restore"]


def convert(net: Block, policy: str | Policy = "float16", *, exclude: Iterable[str] = ()) -> Block:
    """Make ``net`` compute in low precision where that is safe, in place; returns ``net``.

    Needs no prior ``hybridize`` or forward. Parameters, their names, sharing, ``lr_mult``,
    ``wd_mult`` and ``grad_req`` stay, ``hybridize(...)`` may follow with any flags, and outputs are
    FP32. A converted net always runs as a graph. Converting again replaces the policy.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A HybridBlock, a SymbolBlock, or a Block whose outermost hybrid children are converted.
    policy : str or Policy
        ``"float16"``, ``"bfloat16"``, a policy string or a Policy.
    exclude : iterable of str
        Patterns of nodes or blocks to keep in FP32, added to the policy's.

    Raises
    ------
    TypeError
        ``net`` is no Block.
    ValueError
        The policy cannot hold, there is nothing to convert, or parameters are not FP32. The net
        stays as it was.
    """
    policy = as_policy(policy, exclude)
    if not isinstance(net, Block):
        hint = ": for a Symbol use mxmp.cast_symbol" if isinstance(net, mx.sym.Symbol) else ""
        raise TypeError(f"convert takes a gluon Block, got {type(net).__name__}{hint}")
    blocks = _hybrid_blocks(net)
    if not blocks:
        raise ValueError(
            f"nothing to convert: {type(net).__name__} {net.name!r} holds no HybridBlock, and only those "
            "have a graph to rewrite"
        )
    params = list(net.collect_params().values())
    _check_parameters(params, policy)
    old = {door.conversion for door in map(_door_of, blocks) if door is not None}
    if len(old) == 1 and all(_door_of(b) for b in blocks) and next(iter(old)).policy == policy:
        return net
    restore(net)
    conversion = Conversion(policy)
    for block in blocks:
        _attach(block, _Door(conversion, is_root=block is net))
    for param in params:
        param._mxmp = conversion
    return net


def restore(net: Block) -> Block:
    """Undo ``convert`` in place; returns ``net`` in FP32, with the masters' values where there are masters.

    A net that is not converted is left alone.
    """
    if not isinstance(net, Block):
        raise TypeError(f"restore takes a gluon Block, got {type(net).__name__}")
    for block in _hybrid_blocks(net):
        door = _door_of(block)
        if door is not None:
            door.detach(block)
    for param in net.collect_params().values():
        if conversion_of(param) is not None:
            store_full(param)
            del param._mxmp
    return net


def conversion_of(param: Parameter) -> Conversion | None:
    """The conversion that a parameter's net went through, None without one."""
    return getattr(param, "_mxmp", None)


def doors(net: Block) -> Iterator[tuple[HybridBlock, _Door]]:
    """The converted blocks of a tree with what stands in front of them, outermost first."""
    for block in _hybrid_blocks(net):
        door = _door_of(block)
        if door is not None:
            yield block, door


class Conversion:
    """What one call of ``convert`` decided, shared by all blocks of the net."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.head_scale = HeadScale()
        self.statistics: dict[str, Parameter] = {}
        self.lock = threading.RLock()
        self._stored: dict[str, bool] = {}
        self._local = threading.local()

    @property
    def tracing(self) -> bool:
        return getattr(self._local, "tracing", False)

    @contextmanager
    def trace(self) -> Iterator[None]:
        """While a block of this net is being traced, its children may be called with Symbols."""
        before, self._local.tracing = self.tracing, True
        try:
            yield
        finally:
            self._local.tracing = before

    def build(self, symbol: mx.sym.Symbol, params: dict[str, Parameter], device: str) -> tuple[Graph, Plan]:
        """The graph that runs, and parameters stored as it wants them. The first graph decides."""
        self.statistics.update({name: p for name, p in params.items() if not p._differentiable})
        graph, plan = low_graph(
            Graph.from_symbol(symbol),
            self.policy,
            device,
            parameters={n for n, p in params.items() if n not in self._stored and not isinstance(p, Constant)},
            stored_low={n for n in params if self._stored.get(n)},
        )
        if plan.stores_low:
            low = {variable.name for variable in plan.low_variables}
            for name, param in params.items():
                if self._stored.setdefault(name, name in low):
                    store_low(param, self.policy.compute)
        return graph, plan


@dataclass
class _Built:
    """One block's graph for one training mode and input structure, as MXNet's block wants it."""

    cached_op: LowOp
    cached_op_args: list
    cached_graph: tuple
    in_format: Any
    out_format: Any
    plan: Plan
    shapes: dict[str, tuple]


class _Key(NamedTuple):
    training: bool
    structure: str
    device: str


class _Door:
    """The forward pre-hook of one block: puts the right low-precision graph in place for the call."""

    quiet = True  # for QuietHooks

    def __init__(self, conversion: Conversion, is_root: bool) -> None:
        self.conversion = conversion
        self.is_root = is_root
        self.graphs: dict[_Key, _Built] = {}
        self._user_active: bool | None = None
        self._flags: list | None = None

    def __call__(self, block: HybridBlock, args: tuple) -> None:
        flat, structure = _flatten(args, "input")
        if any(isinstance(a, mx.sym.Symbol) for a in flat):
            self._check_trace(block)
            return
        ctx = next((a.ctx for a in flat if isinstance(a, NDArray)), None)
        if ctx is None:
            return
        key = _Key(autograd.is_training(), repr(structure), device_of(ctx))
        with self.conversion.lock:
            self._notice(block)
            if key not in self.graphs:
                self.graphs[key] = self._build(block, args, key.device)
            built = self.graphs[key]
            block._cached_op = built.cached_op
            block._cached_op_args = built.cached_op_args
            block._cached_graph = built.cached_graph
            block._in_format = built.in_format
            block._out_format = built.out_format

    def detach(self, block: HybridBlock) -> None:
        """Leave ``block`` as if it had never been converted."""
        hooks = block._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if hook is self]:
            del hooks[key]
        if isinstance(hooks, QuietHooks):
            block._forward_pre_hooks = OrderedDict(hooks)
        if self._user_active is not None:
            block._active = self._user_active
        block._clear_cached_op()

    def _notice(self, block: HybridBlock) -> None:
        """Follow the user's ``hybridize``: MXNet clears the cache there, and so do we."""
        if block._backend:
            raise ValueError(
                f"{block.name}: hybridize(backend={block._backend!r}) partitions the FP32 graph, and a "
                "converted net runs its own: drop the backend, or call mxmp.restore(net) first"
            )
        first = self._user_active is None
        if first or not block._active or block._cached_op is None:
            self._user_active = block._active
        if block._cached_op is None or self._flags != block._flags:
            self.graphs.clear()
            self._flags = list(block._flags)
        block._active = True

    def _build(self, block: HybridBlock, args: tuple, device: str) -> _Built:
        """Trace the block as MXNet does, then make the cached op from the low-precision graph."""
        block._clear_cached_op()
        with self.conversion.trace():
            block._build_cache(*args)
        data, symbol = block._cached_graph
        params = {param.name: param for is_data, param in block._cached_op_args if not is_data}
        graph, plan = self.conversion.build(symbol, params, device)
        if self.is_root and not plan.num_low:
            warnings.warn(
                f"nothing in {block.name!r} computes in {plan.policy.compute}: it has no matrix operator that may; "
                "print(mxmp.explain(net)) says why",
                stacklevel=4,
            )
        scaled = scale_heads(graph)
        low = graph.to_symbol()
        names = low.list_inputs()
        op = LowOp(low, names, symbol.list_inputs(), [d.name for d in data], block._flags)
        if scaled:
            op.head_scale = self.conversion.head_scale
        flat = [a for a in _flatten(args, "input")[0] if a is not None]
        return _Built(
            op,
            block._cached_op_args,
            block._cached_graph,
            block._in_format,
            block._out_format,
            plan,
            {variable.name: array.shape for variable, array in zip(data, flat)},
        )

    def _check_trace(self, block: HybridBlock) -> None:
        """Inside another block's graph our casts would be lost: say so."""
        if self.conversion.tracing:
            return
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "_get_graph":
                outer = frame.f_locals["self"]
                raise ValueError(
                    f"{block.name!r} was converted by mxmp and is now part of {outer.name!r}, which was not: "
                    f"its casts would be lost. Convert the outermost block: mxmp.convert({outer.name})"
                )
            frame = frame.f_back


def _attach(block: HybridBlock, door: _Door) -> None:
    if not block._forward_pre_hooks:
        block._forward_pre_hooks = QuietHooks()
    block.register_forward_pre_hook(door)
    block._clear_cached_op()


def _door_of(block: Block) -> _Door | None:
    return next((h for h in block._forward_pre_hooks.values() if isinstance(h, _Door)), None)


def _hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Every HybridBlock of the tree once, outermost first."""
    found: dict[int, HybridBlock] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        if isinstance(block, HybridBlock):
            found.setdefault(id(block), block)
        stack.extend(reversed(list(block._children.values())))
    return list(found.values())


def _check_parameters(params: list[Parameter], policy: Policy) -> None:
    for param in params:
        if isinstance(param, LowParameter):
            continue
        if np.dtype(param.dtype) in (np.float16, _BFLOAT16):
            raise ValueError(
                f"Parameter {param.name!r} is stored in {param.dtype}: convert takes an FP32 net and casts by "
                "itself; call net.cast('float32') first"
            )
        contexts = param._ctx_list or (param._deferred_init[1] if param._deferred_init else ())
        for ctx in contexts:
            check_policy(policy, device_of(ctx))
    check_policy(policy, "cpu")


_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
