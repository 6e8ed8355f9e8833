"""The forward pre-hook of one block: puts the right low-precision graph in place for the call.

MXNet calls what stands in the block's cached op; the FP32 graph stays beside it, so exports and
checkpoints stay FP32.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, NamedTuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..precision.devices import device_of
from ..precision.heads import SCALE_NAME, head_scale, scale_heads
from ..precision.plan import Plan
from . import _mxnet
from .conversion import Conversion

__all__ = ["BuiltGraph", "GraphKey", "Hook", "hook_of", "hooks", "hybrid_blocks"]


class GraphKey(NamedTuple):
    """What tells the graphs of one block apart."""

    training: bool
    structure: str
    device: str


class BuiltGraph(NamedTuple):
    """One graph of a block: what it runs, the plan behind it, and the shapes that it was first called with."""

    traced: _mxnet.Traced
    plan: Plan
    shapes: dict[str, tuple]
    params: list[Parameter]
    grad_req: dict[str, str]

    def is_current(self) -> bool:
        """Whether the same is asked of the parameters' gradients as when it was built."""
        return self.grad_req == grad_requests(self.params)


class Hook:
    """Builds the graphs of one block on demand and keeps them apart by training mode, structure and device."""

    quiet = True  # for _mxnet.add_hook

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.graphs: dict[GraphKey, BuiltGraph] = {}
        self._user_active: bool | None = None
        self._flags: list | None = None

    def __call__(self, block: HybridBlock, args: tuple) -> None:
        flat, structure = _mxnet.flatten(args)
        if any(isinstance(a, mx.sym.Symbol) for a in flat):
            self._check_trace(block)
            return
        ctx = next((a.ctx for a in flat if isinstance(a, NDArray)), None)
        if ctx is None:
            return
        _refuse_loader_memory(block, flat)
        key = GraphKey(autograd.is_training(), repr(structure), device_of(ctx))
        if key.training:
            self.conversion.note_training()
        with self.conversion.lock:
            self._follow_hybridize(block)
            if key not in self.graphs or not self.graphs[key].is_current():
                self.graphs[key] = self._build(block, args, key.device)
            _mxnet.run_as(block, self.graphs[key].traced)

    def detach(self, block: HybridBlock) -> None:
        """Leave ``block`` as if it had never been converted."""
        _mxnet.remove_hook(block, self)
        if self._user_active is not None:
            _mxnet.set_active(block, self._user_active)
        _mxnet.forget_graph(block)

    def _follow_hybridize(self, block: HybridBlock) -> None:
        """MXNet clears the graph there, and so do we."""
        if _mxnet.backend(block):
            raise ValueError(
                f"{block.name}: hybridize(backend={_mxnet.backend(block)!r}) partitions the FP32 graph, and a "
                "converted net runs its own: drop the backend, or call mxmp.restore(net) first"
            )
        active, kept = _mxnet.is_active(block), _mxnet.has_graph(block)
        if self._user_active is None or not active or not kept:
            self._user_active = active
        if not kept or self._flags != _mxnet.flags(block):
            self.graphs.clear()
            self._flags = _mxnet.flags(block)

    def _build(self, block: HybridBlock, args: tuple, device: str) -> BuiltGraph:
        """Trace the block as MXNet does, then make the cached op from the low-precision graph."""
        with self.conversion.trace():
            traced = _mxnet.trace(block, args)
        data, symbol = traced.graph
        params = {param.name: param for is_data, param in traced.op_args if not is_data}
        asked = grad_requests(params.values())
        graph, plan = self.conversion.build(symbol, params, device, asked)
        self.conversion.expected.note(block, plan)
        scale_heads(graph)
        op = _LowOp(graph.to_symbol(), symbol.list_inputs(), [d.name for d in data], _mxnet.flags(block))
        flat = [a for a in _mxnet.flatten(args)[0] if a is not None]
        shapes = {variable.name: array.shape for variable, array in zip(data, flat)}
        return BuiltGraph(traced._replace(op=op), plan, shapes, list(params.values()), asked)

    def _check_trace(self, block: HybridBlock) -> None:
        """Inside another block's graph our casts would be lost: say so."""
        outer = None if self.conversion.tracing else _mxnet.block_being_traced()
        if outer is not None:
            raise ValueError(
                f"{block.name!r} was converted by mxmp and is now part of {outer.name!r}, which was not: "
                f"its casts would be lost. Convert the outermost block: mxmp.convert({outer.name})"
            )


_LOADER_MEMORY = ("cpu_shared", "cpu_pinned")


def _refuse_loader_memory(block: HybridBlock, arrays: list) -> None:
    """A graph wants its inputs where its parameters are, and MXNet's own error does not say how that is done."""
    for array in arrays:
        if isinstance(array, NDArray) and array.ctx.device_type in _LOADER_MEMORY and block.collect_params().keys():
            raise ValueError(
                f"{block.name}: the batch is in {array.ctx}, where a DataLoader with workers or pin_memory leaves it, "
                "and a converted net runs as a graph, which like any hybridized net takes inputs from its own device "
                "only: call x.as_in_context(mx.cpu()), or gluon.utils.split_and_load(x, contexts)"
            )


class _LowOp:
    """MXNet's CachedOp on the low graph, called with the FP32 graph's inputs."""

    def __init__(self, low: mx.sym.Symbol, given: list, data: list, flags: list) -> None:
        names = low.list_inputs()
        position = {name: i for i, name in enumerate(given)}
        fed = [*data, SCALE_NAME]
        self._order = [position.get(name) for name in names]
        self._op = mx.nd.CachedOp(
            low,
            [
                ("data_indices", [i for i, name in enumerate(names) if name in fed]),
                ("param_indices", [i for i, name in enumerate(names) if name not in fed]),
                *flags,
            ],
        )

    def __call__(self, *inputs: NDArray) -> Any:
        ctx = inputs[0].ctx
        return self._op(*(head_scale(ctx) if i is None else inputs[i] for i in self._order))

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._op._register_op_hook(callback, monitor_all)


def grad_requests(params: Iterable[Parameter]) -> dict[str, str]:
    """What is asked of the gradient of each parameter: "write", "add" or "null"."""
    return {param.name: param.grad_req for param in params}


def hook_of(block: Block) -> Hook | None:
    """The block's hook, None where it is not converted."""
    return next((hook for hook in _mxnet.hooks(block) if isinstance(hook, Hook)), None)


def hooks(net: Block) -> Iterator[tuple[HybridBlock, Hook]]:
    """The converted blocks of a tree with their hooks, outermost first."""
    for block in hybrid_blocks(net):
        hook = hook_of(block)
        if hook is not None:
            yield block, hook


def hybrid_blocks(net: Block) -> list[HybridBlock]:
    """Every HybridBlock of the tree once, outermost first."""
    found: dict[int, HybridBlock] = {}
    stack: list[Block] = [net]
    while stack:
        block = stack.pop()
        if isinstance(block, HybridBlock):
            found.setdefault(id(block), block)
        stack.extend(reversed(_mxnet.children(block)))
    return list(found.values())
