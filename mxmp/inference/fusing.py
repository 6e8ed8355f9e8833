"""MXNet's own oneDNN fusion, kept from fusing where the result would be wrong.

MXNet 1.9.1 gives every reader of a fused operator its one output. Where the graph also reads a value from the middle
of what was fused, that reader gets the wrong one: a convolution that feeds an activation and a skip connection
(``src/operator/subgraph/build_subgraph.cc`` leaves the addition out, since it would close a cycle, and the selector
no longer sees a branch), a FullyConnected with two readers, a layer whose value is also an output. A barrier stands on
every edge from such a value while MXNet fuses, and is taken out again: it costs nothing, and no right fusion is lost.
"""

from __future__ import annotations

from typing import Collection

from ..precision.graph import VARIABLE, Entry, Graph, Node
from .folding import copied

__all__ = ["FUSED", "fuse", "inner_operators"]

# What MXNet's pass makes.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")
_LAYERS = ("Convolution", "FullyConnected")
_BARRIER = "__mxmp_barrier__"


def fuse(graph: Graph, *, quantizable: bool = False, apart: bool = False) -> Graph:
    """Return the graph as MXNet fuses it; a fused operator has the name of the last one in it.

    Parameters
    ----------
    quantizable : bool
        Fuse what INT8 kernels can compute.
    apart : bool
        Fuse nothing, so that whoever binds the graph finds nothing left to fuse.
    """
    copy = copied(graph)
    _insert_barriers(copy, apart)
    backend = "MKLDNN_QUANTIZE" if quantizable else "MKLDNN"
    fused = Graph.from_symbol(copy.to_symbol().get_backend_symbol(backend))
    fused.numpy = graph.numpy
    _remove_barriers(fused)
    for node in fused.nodes():
        if node.op in FUSED:
            node.name = inner_operators(node)[-1]
    return fused


def inner_operators(node: Node) -> list[str]:
    """Return the names of the operators that a fused one is made of, in order; of another one its own name."""
    if node.op not in FUSED or not node.subgraphs:
        return [node.name]
    return [item["name"] for item in node.subgraphs[0]["nodes"] if item["op"] != VARIABLE]


def _insert_barriers(graph: Graph, apart: bool) -> None:
    readers = graph.consumers()
    reads: dict[Node, int] = {}
    for entry, users in readers.items():
        reads[entry.node] = reads.get(entry.node, 0) + len(users)
    for head in graph.heads:
        reads[head.node] = reads.get(head.node, 0) + 1
    for entry, users in readers.items():
        if entry.node.is_variable:
            continue
        keep = reads[entry.node] > 1 or (apart and entry.node.op in _LAYERS)
        for user, position in users:
            # A norm that could not be folded into its layer is one that MXNet would fold wrongly.
            if keep or (position == 0 and user.op == "BatchNorm"):
                name = f"{user.name}_{position}_barrier"
                user.inputs[position] = Entry(Node("BlockGrad", name, {_BARRIER: "1"}, [entry]))


def _remove_barriers(graph: Graph) -> None:
    def source(entry: Entry) -> Entry:
        while _BARRIER in entry.node.attrs:
            entry = entry.node.inputs[0]
        return entry

    nodes: Collection[Node] = list(graph.nodes())
    for node in nodes:
        node.inputs = [source(entry) for entry in node.inputs]
