"""Operators of two arrays broadcast, and those of two Symbols do not: where shapes differ, a graph gets the former."""

from __future__ import annotations

from typing import Mapping

import mxnet as mx
from mxnet.gluon import HybridBlock

from ..messages.inputs import unequal
from ..precision.graph import Graph
from ..precision.subgraphs import bodies, set_bodies
from . import _mxnet

_BROADCASTING = {
    **{f"elemwise_{name}": f"broadcast_{name}" for name in ("add", "sub", "mul", "div")},
    **{f"_{name}": f"broadcast_{name}" for name in ("mod", "power", "maximum", "minimum", "hypot")},
    **{f"_{name}": f"broadcast_{name}" for name in ("equal", "not_equal", "greater", "greater_equal")},
    **{f"_{name}": f"broadcast_{name}" for name in ("lesser", "lesser_equal")},
    **{f"_logical_{name}": f"broadcast_logical_{name}" for name in ("and", "or", "xor")},
}


def broadcast(clone: HybridBlock, args: tuple) -> None:
    """Let operators of two Symbols broadcast in the graph of a traced block where their shapes in this call differ."""
    traced = _mxnet.traced_graph(clone)
    data, symbol = traced.graph
    broadcasting = with_broadcasting(symbol, _mxnet.known_shapes(clone, args))
    _mxnet.set_traced_graph(clone, traced._replace(graph=(data, broadcasting)))


def with_broadcasting(symbol: mx.sym.Symbol, shapes: Mapping[str, tuple]) -> mx.sym.Symbol:
    """Return a Symbol whose operators broadcast where their shapes differ, as far as they follow from ``shapes``."""
    known = {name: shapes[name] for name in symbol.list_inputs() if name in shapes}
    graph = None
    while True:
        try:
            symbol.infer_shape_partial(**known)
        except mx.MXNetError as error:
            found = unequal(str(error))
            graph = graph or Graph.from_symbol(symbol)
            if found is not None and _replaced(graph, found.operator):
                symbol = graph.to_symbol()
                continue
        return symbol  # MXNet says again what no operator can mend


def _replaced(graph: Graph, name: str) -> bool:
    """Replace the operator ``name`` by one that broadcasts, in place; return whether there was one."""
    for node in graph.nodes():
        if node.name == name and node.op in _BROADCASTING:
            node.op = _BROADCASTING[node.op]
            return True
        inner = [body.graph for body in bodies(node)]
        if any(_replaced(each, name) for each in inner):
            set_bodies(node, inner)
            return True
    return False
