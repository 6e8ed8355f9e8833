"""Outputs and gradients that MXNet's CPU kernels leave unwritten, in FP32 too: they are what was in memory."""

from __future__ import annotations

from typing import Mapping, Sequence

from ..precision.casts import FULL, MARK, PASSED, is_ours, replace_heads
from ..precision.graph import Entry, Node
from .workaround import Fitting

__all__ = ["regions_of_interest", "request_both_gradients", "untrained_weights", "zero_unassigned_regions"]

# Of these inputs MXNet's CPU kernel writes the second's gradient only where the first's is requested.
_WRITTEN_TOGETHER = {
    "FullyConnected": (1, 2),
    "_npx_fully_connected": (1, 2),
    "_contrib_interleaved_matmul_selfatt_valatt": (0, 1),
    "_contrib_interleaved_matmul_encdec_qk": (0, 1),
}


def untrained_weights(fitting: Fitting) -> list[Node]:
    """Return the operators of which MXNet may not compute the first gradient although it computes the second.

    A weight that is known to be trained needs nothing.
    """

    def needs(node: Node) -> bool:
        first, second = _WRITTEN_TOGETHER.get(node.op, (0, 0))
        return first < second < len(node.inputs) and not _is_trained(node.inputs[first], fitting.grad_req)

    return [node for node in fitting.graph.nodes() if needs(node)]


def request_both_gradients(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Read both inputs through one operator of two outputs: it requests both gradients, and copies."""
    for node in nodes:
        first, second = _WRITTEN_TOGETHER[node.op]
        # amp_multicast's own backward ignores grad_req="add", a copy's does not.
        read = [
            Entry(Node("_copy", f"{e.node.name}_asked", {MARK: "cast"}, [e])) if e.node.is_variable else e
            for e in (node.inputs[first], node.inputs[second])
        ]
        attrs = {"num_outputs": "2", MARK: "cast", PASSED: "each"}
        both = Node("amp_multicast", f"{node.name}_asked", attrs, read)
        node.inputs[first], node.inputs[second] = Entry(both, 0), Entry(both, 1)


def _is_trained(weight: Entry, grad_req: Mapping[str, str]) -> bool:
    """Return whether it is a variable, perhaps after casts, that is known to take a gradient."""
    while is_ours(weight.node):
        weight = weight.node.inputs[0]
    return weight.node.is_variable and grad_req.get(weight.node.name, "null") != "null"


def regions_of_interest(fitting: Fitting) -> list[Node]:
    """Return the ``ROIAlign`` operators."""
    return [node for node in fitting.graph.nodes() if node.op == "_contrib_ROIAlign"]


def zero_unassigned_regions(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Write zeros where ``ROIAlign`` skips a region."""
    replace_heads(fitting.graph, fitting.graph.insert_behind(nodes, _assigned_only))


def _assigned_only(node: Node) -> Entry:
    """Return an ``ROIAlign`` that reads a valid box in place of each one without a picture, and gives zeros there."""

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
