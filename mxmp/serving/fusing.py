"""MXNet's own oneDNN fusion, kept from fusing where the result would be wrong.

A fused operator of MXNet 1.9.1 has one output, that of the last operator in it. Another reader of an earlier one gets
this output too, which is wrong: for a convolution that feeds an activation and a skip connection
(src/operator/subgraph/build_subgraph.cc leaves the addition out, as it would close a cycle, and the selector no longer
sees a branch), a FullyConnected with two readers, a layer whose output is also the graph's. So barriers, identity
operators that MXNet does not fuse, stand behind such outputs while MXNet fuses. No right fusion is lost.
"""

from __future__ import annotations

from ..precision.graph import VARIABLE, Entry, Graph, Node
from ..precision.missing_kernels import is_true
from .folding import copied

# The fused operators that MXNet's pass makes.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")
_LAYERS = ("Convolution", "FullyConnected")
_CASTS = ("amp_cast", "Cast")
_BARRIER = "__mxmp_barrier__"
# Operators whose result MXNet always stores row by row; any other may store it as oneDNN likes it, in some runs only.
_BY_ROWS = frozenset(
    ["Embedding", "FullyConnected", "Flatten", "LayerNorm", "Reshape", "batch_dot", "transpose", FUSED[1]]
)
# Operators that keep how their input is stored; the first stores four axes in another way.
_KEEPS, _FLAT = ("_contrib_quantize_v2", "_copy", "BlockGrad"), frozenset(["FullyConnected", "Flatten", FUSED[1]])


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
            if _reads_states(node):
                layer = node.subgraphs[0]["nodes"][-1]  # type: ignore[index]
                node.op, node.attrs, node.subgraphs = layer["op"], layer["attrs"], None
    if not quantizable:
        store_by_rows(fused)
    return fused


def _reads_states(node: Node) -> bool:
    """Return whether ``node`` is a dense layer of an array for any batch, such as the first state of a recurrent cell.
    MXNet infers its batch from what the layer returns, but not where that is fused."""
    if node.op not in ("FullyConnected", FUSED[1]):
        return False
    data = node.inputs[0].node
    while data.op in _CASTS:
        data = data.inputs[0].node
    return not data.inputs and data.attrs.get("shape", "").startswith("(0,")


def store_by_rows(graph: Graph) -> None:
    """Insert, in place, what stores the data of fused dense layers row by row, where they might be stored otherwise."""
    # The fused operator decides in its first run whether data must be reordered, and fails in a later run in which they
    # are stored otherwise ("We can't generate TBlob for MKLDNN data", src/operator/subgraph/mkldnn/mkldnn_fc.cc).
    for node in list(graph.nodes()):
        if node.op == FUSED[1] and not _is_by_rows(node.inputs[0].node):
            layer = next(item for item in node.subgraphs[0]["nodes"] if item["op"] == "FullyConnected")  # type: ignore[index]
            flat = is_true(layer.get("attrs", {}).get("flatten", "True"))
            op, attrs = ("Flatten", {}) if flat else ("Reshape", {"shape": "(-2,)"})
            node.rewire(0, Entry(Node(op, f"{node.name}_data", attrs, [node.inputs[0]])))


def _is_by_rows(node: Node) -> bool:
    if node.op not in _KEEPS:
        return node.is_variable or node.op in _BY_ROWS
    while node.op in _KEEPS:
        node = node.inputs[0].node
    return node.op in _FLAT


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
        keep = reads[entry.node] > 1 or (apart and entry.node.op in _LAYERS) or _reads_states(entry.node)
        for user, position in users:
            # A BatchNorm that fold_norms left in the graph is one that MXNet would fold wrongly.
            if keep or (position == 0 and user.op == "BatchNorm"):
                name = f"{user.name}_{position}_barrier"
                user.rewire(position, Entry(Node("BlockGrad", name, {_BARRIER: "1"}, [entry])))
