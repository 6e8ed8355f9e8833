"""What MXNet's CPU kernels leave unwritten, in FP32 too: outputs and gradients that are what was in memory."""

from __future__ import annotations

from typing import Mapping

from .casts import FULL, MARK, PASSED, is_ours, replace_heads
from .graph import Entry, Graph, Node

__all__ = ["ask_for_weight_gradients", "zero_unassigned_rois"]

# Of these inputs MXNet's CPU kernel writes the second's gradient only where the first's is asked for.
_WRITTEN_TOGETHER = {
    "FullyConnected": (1, 2),
    "_npx_fully_connected": (1, 2),
    "_contrib_interleaved_matmul_selfatt_valatt": (0, 1),
    "_contrib_interleaved_matmul_encdec_qk": (0, 1),
}


def ask_for_weight_gradients(graph: Graph, grad_req: Mapping[str, str]) -> None:
    """Have the gradient of a dense layer's weight computed wherever that of its bias is, in place.

    MXNet's CPU kernel does not write the bias's where the weight's is not asked for (a frozen weight,
    ``grad_req="null"``), and attention's products have the like. An operator of two inputs and two outputs asks
    for both. It copies, so it stands only where the weight is not known to be trained.
    """
    for node in list(graph.nodes()):
        first, second = _WRITTEN_TOGETHER.get(node.op, (0, 0))
        if not first < second < len(node.inputs) or _is_trained(node.inputs[first], grad_req):
            continue
        # amp_multicast's own backward ignores grad_req="add", a copy's does not.
        given = [
            Entry(Node("_copy", f"{e.node.name}_asked", {MARK: "cast"}, [e])) if e.node.is_variable else e
            for e in (node.inputs[first], node.inputs[second])
        ]
        attrs = {"num_outputs": "2", MARK: "cast", PASSED: "each"}
        both = Node("amp_multicast", f"{node.name}_asked", attrs, given)
        node.inputs[first], node.inputs[second] = Entry(both, 0), Entry(both, 1)


def _is_trained(weight: Entry, grad_req: Mapping[str, str]) -> bool:
    """Whether it is a variable, behind casts, that is known to take a gradient."""
    while is_ours(weight.node):
        weight = weight.node.inputs[0]
    return weight.node.is_variable and grad_req.get(weight.node.name, "null") != "null"


def zero_unassigned_rois(graph: Graph) -> None:
    """Zeros where ``ROIAlign`` skips a region of interest, in place.

    Feature pyramids give each level all regions, with a batch index of -1 where they belong to another, and add the
    levels up. For region n of these MXNet's CPU kernel should write zeros; it writes one, over value n of the whole
    output, and leaves the region's own unwritten (``roi_align.cc``, ``top_data[n] = 0``).
    """
    rois = [node for node in graph.nodes() if node.op == "_contrib_ROIAlign"]
    replace_heads(graph, graph.insert_behind(rois, _assigned_only))


def _assigned_only(node: Node) -> Entry:
    """Align some box of the first picture in place of a skipped one, and hide what comes of it."""

    def op(kind: str, role: str, *inputs: Entry, **attrs: str) -> Entry:
        return Entry(Node(kind, f"{node.name}_{role}", {**attrs, MARK: "cast"}, list(inputs)))

    rois = node.inputs[1]
    index = op("slice_axis", "index", rois, axis="1", begin="0", end="1")
    assigned = op("_greater_equal_scalar", "assigned", op("Reshape", "indices", index, shape="(-1,)"), scalar="0")
    box = op("_arange", "box", start="0", stop="5", dtype=FULL)  # of picture 0, from (1, 2) to (3, 4)
    boxes = op("broadcast_add", "boxes", op("zeros_like", "none", rois), op("Reshape", "row", box, shape="(1, 5)"))
    node.inputs[1] = op("where", "rois", assigned, rois, boxes)
    node.inputs[1].node.attrs[PASSED] = "1"
    aligned = Entry(node)
    written = op("where", "written", assigned, aligned, op("zeros_like", "zeros", aligned))
    written.node.attrs[PASSED] = "1"
    return written
