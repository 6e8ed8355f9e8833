"""The graphs of a net, for tools that read them without training: those that the net runs, or that a call would run."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from ....gluon import _mxnet
from ....gluon.blocks import hybrid_blocks
from ....gluon.hook import hook_of, hooks
from ....gluon.symbols import read_inputs, traced_call
from ....policy import Policy
from ..protocol import CalledGraph, ConvertedGraph
from ._mxnet import graph_arguments
from .undoing import undone, without_trace


def converted_graphs(net: Block, inputs: Sequence[Any]) -> list[ConvertedGraph]:
    """Return each FP32 graph that a converted net runs, and its plan: one per block that Python calls and kind of call.
    A net without a graph is first called with ``inputs``. Raises ``ValueError`` if there is still none."""
    if not any(hooks(net)):
        raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first, or explain a Symbol")
    found = list(_built_graphs(net))
    if not found and inputs:
        with without_trace(net):
            net(*inputs)
        found = list(_built_graphs(net))
    if not found:
        raise ValueError(f"{net.name!r} has no graph yet: call it once, or pass inputs to explain(net, x)")
    return found


def _built_graphs(net: Block) -> Iterator[ConvertedGraph]:
    for block, hook in hooks(net):
        newest = {(key.call, key.dtypes): built for key, built in hook.graphs.items()}
        for (call, _), built in newest.items():
            requested = {param.name: request for param, request in built.requested}
            large = built.conditions.large is not None
            yield ConvertedGraph(_title(block), call.training, built.symbol, built.plan, built.shapes, requested, large)


def unconverted_blocks(net: Block) -> list[str]:
    """Return the names of the blocks of a converted net that are part of no low-precision graph.
    The operators that their own code calls compute in FP32. The net need not have been called."""
    converted = {id(block) for block, hook in hooks(net) if not hook.runs_as_python}
    found, stack = [], [net]
    while stack:
        block = stack.pop()
        if id(block) not in converted:
            found.append(block.name)
            stack.extend(_mxnet.children(block))
    return found


def policy_of(net: Block) -> Policy | None:
    """Return the policy of the newest conversion of the first converted block in ``net``; None if there is none."""
    return next((hook.conversion.policy for _, hook in hooks(net)), None)


def called_graphs(net: Block, inputs: Sequence[Any]) -> list[CalledGraph]:
    """Return the FP32 graphs that ``net(*inputs)`` runs in inference, with shapes and dtypes (``read_inputs``).
    A net that is one graph is only traced; any other is called once, and each outermost HybridBlock call gives a graph.
    Raises ``ValueError`` if no HybridBlock ran, or one cannot be traced."""
    args, _ = read_inputs(inputs)
    if isinstance(net, HybridBlock) and _is_graph(net) and not _mxnet.overrides_forward(net):
        return [_called_graph(net, args)]
    found: list[CalledGraph] = []
    inside: list[HybridBlock] = []

    def enter(block: HybridBlock, args: tuple) -> None:
        # A forward pre-hook. A block is traced, hybridized or not, unless it is excluded, overrides ``forward``, or is
        # inside a block that was traced.
        if inside or not _is_graph(block):
            return
        inside.append(block)  # also while a copy of the block runs, for its arguments
        arguments = graph_arguments(block, args)
        if arguments is None:  # it runs as Python
            inside.clear()
        else:
            found.append(_called_graph(block, arguments))

    def leave(block: HybridBlock, args: tuple, out: Any) -> None:
        if inside and inside[0] is block:
            inside.clear()

    handles = []
    try:
        for block in hybrid_blocks(net):
            handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        with undone(net), autograd.pause():
            net(*args)
    finally:
        for handle in handles:
            handle.detach()
    if not found:
        raise ValueError(f"{net.name!r}: nothing in it ran as a HybridBlock, and only those have a graph to count")
    return found


def _called_graph(block: HybridBlock, args: tuple) -> CalledGraph:
    """Trace the FP32 inference graph of one call; shapes that are not known yet are left out."""
    symbol, arrays, params, _ = traced_call(block, args, training=False)
    known = {name: (tuple(p.shape), _mxnet.dtype_of(p)) for name, p in params.items() if _is_known(p.shape)}
    known.update({name: (array.shape, array.dtype) for name, array in arrays.items()})
    return CalledGraph(_title(block), symbol, known, frozenset(params))


def _title(block: HybridBlock) -> str:
    """Return the name of ``block``, or its class where that is empty, as with ``prefix=""``."""
    return block.name or type(block).__name__


def _is_graph(block: HybridBlock) -> bool:
    """Return whether ``block`` may run as a graph: True, unless a conversion excludes it or a block inside it."""
    hook = hook_of(block)
    return hook is None or not hook.runs_as_python


def _is_known(shape: Any) -> bool:
    """Return whether all sizes are known; MXNet writes 0 or None for one that is not."""
    return isinstance(shape, tuple) and bool(shape) and all(isinstance(size, int) and size > 0 for size in shape)
