"""MXNet's own oneDNN fusion, kept from fusing where the result would be wrong.

A fused operator of MXNet 1.9.1 has one output, that of the last operator in it. Another reader of an earlier one gets
this output too, which is wrong: for a convolution that feeds an activation and a skip connection
(src/operator/subgraph/build_subgraph.cc leaves the addition out, as it would close a cycle, and the selector no longer
sees a branch), a FullyConnected with two readers, a layer whose output is also the graph's. So barriers, identity
operators that MXNet does not fuse, stand behind such outputs while MXNet fuses. No right fusion is lost.
"""

from __future__ import annotations

from ..precision.graph import VARIABLE, Entry, Graph, Node
from .folding import copied

# The fused operators that MXNet's pass makes.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")
_LAYERS = ("Convolution", "FullyConnected")
_BARRIER = "__mxmp_barrier__"


def fuse(graph: Graph, *, quantizable: bool = False, apart: bool = False) -> Graph:
    """Return a copy in which MXNet's oneDNN pass has fused operators; each has the name of the last one in it.
    ``quantizable``: only what one INT8 kernel computes. ``apart``: each layer alone, so that MXNet cannot fuse it."""
    copy = copied(graph)
    _insert_barriers(copy, apart)
    backend = "MKLDNN_QUANTIZE" if quantizable else "MKLDNN"
    fused = Graph.from_symbol(copy.to_symbol().get_backend_symbol(backend))
    fused.numpy = graph.numpy
    for node in fused.nodes():  # a barrier reads no other one
        node.inputs = [entry.node.inputs[0] if _BARRIER in entry.node.attrs else entry for entry in node.inputs]
        if node.op in FUSED:
            node.name = inner_operators(node)[-1]
    return fused


def inner_operators(node: Node) -> list[str]:
    """Return the names of the operators of which ``node`` was fused, in graph order; its own if it is not fused."""
    if node.op not in FUSED or not node.subgraphs:
        return [node.name]
    return [item["name"] for item in node.subgraphs[0]["nodes"] if item["op"] != VARIABLE]


def _insert_barriers(graph: Graph, apart: bool) -> None:
    """Insert barriers, in place, between operators that MXNet must not fuse and their readers."""
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
            # A BatchNorm that fold_norms left in the graph is one that MXNet would fold wrongly.
            if keep or (position == 0 and user.op == "BatchNorm"):
                name = f"{user.name}_{position}_barrier"
                user.rewire(position, Entry(Node("BlockGrad", name, {_BARRIER: "1"}, [entry])))
