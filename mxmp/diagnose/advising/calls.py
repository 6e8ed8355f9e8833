"""The FP32 graphs that a call of a net or Symbol runs, with the shapes and dtypes that it is called with."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Iterator, NamedTuple, Sequence

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from ...gluon import _mxnet
from ...gluon.blocks import hybrid_blocks
from ...gluon.conversion import tracing
from ...gluon.graphs import read_inputs
from ...gluon.hook import hook_of
from ...precision.casts import strip
from ...precision.graph import Graph
from .flops import Tensor, dtype_name

__all__ = ["Called", "calls_of"]


class Called(NamedTuple):
    """One graph. ``known``: of its inputs, by name; ``parameters``: which of them are no data."""

    name: str
    graph: Graph
    known: dict[str, Tensor]
    parameters: frozenset[str]


def calls_of(net: Block, inputs: Sequence[Any]) -> list[Called]:
    """The graphs of one forward of a net, converted or not, as it is; ``inputs``: arrays, or shapes of FP32 ones.

    A net that is one graph is only traced. Around blocks that run as Python, the net is called once, in
    inference, and the outermost blocks that can be graphs are traced with what they are called with.

    Raises
    ------
    ValueError
        No part of the net can be traced.
    """
    args, _ = read_inputs(inputs)
    if isinstance(net, HybridBlock) and _runs_as_a_graph(net) and not _mxnet.overrides_forward(net):
        return [_trace(net, args)]
    found = _Outermost()
    with found.watching(net), autograd.pause():
        net(*args)
    if not found.calls:
        raise ValueError(f"{net.name!r}: nothing in it ran as a HybridBlock, and only those have a graph to count")
    return found.calls


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(size, int) and size > 0 for size in value)


def _runs_as_a_graph(block: HybridBlock) -> bool:
    hook = hook_of(block)
    return hook is None or not hook.python


class _Outermost:
    """Notes the calls of blocks that are graphs, or could be, and stand in no other one."""

    def __init__(self) -> None:
        self.calls: list[Called] = []
        self._inside: HybridBlock | None = None

    @contextmanager
    def watching(self, net: Block) -> Iterator[None]:
        handles = []
        for block in hybrid_blocks(net):
            handles += [block.register_forward_pre_hook(self._enter), block.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.detach()

    def _enter(self, block: HybridBlock, args: tuple) -> None:
        if self._inside is not None or not _runs_as_a_graph(block):
            return
        self._inside = block
        given = _mxnet.graph_arguments(block, args)
        if given is None:  # it runs as Python: look at its children
            self._inside = None
        else:
            self.calls.append(_trace(block, given))

    def _leave(self, block: HybridBlock, args: tuple, out: Any) -> None:
        if self._inside is block:
            self._inside = None


def _trace(block: HybridBlock, args: tuple) -> Called:
    """A copy is traced: the block keeps its own graph, or none."""
    clone = _mxnet.copied(block)
    with tracing() if hook_of(block) else nullcontext():
        _mxnet.trace(clone, args)
    data, symbol = _mxnet.traced(clone).graph
    params = {param.name: param for param in block.collect_params().values()}
    known = {name: Tensor(tuple(p.shape), dtype_name(p.dtype)) for name, p in params.items() if _is_shape(p.shape)}
    arrays = [array for array in _mxnet.flatten(args)[0] if array is not None]
    known.update({v.name: Tensor(a.shape, dtype_name(a.dtype)) for v, a in zip(data, arrays)})
    return Called(block.name, strip(Graph.from_symbol(symbol)), known, frozenset(params.keys()))
