"""Outputs and gradients that MXNet's CPU kernels do not write, in FP32 too: they hold whatever was in memory."""

from __future__ import annotations

from typing import Mapping, Sequence

from ..precision.casts import FULL, MARK, PASSED, is_ours, replace_heads
from ..precision.graph import Entry, Node
from .workaround import FittedGraph

__all__ = [
    *("copy_summands", "operators_with_frozen_input", "regions_of_interest", "request_both_gradients"),
    *("sums_of_variables", "zero_unassigned_regions"),
]

# From an operator to the positions of two inputs. MXNet's CPU kernel writes the gradient of the second one only where
# that of the first one is requested.
_WRITTEN_TOGETHER = {
    "FullyConnected": (1, 2),
    "_npx_fully_connected": (1, 2),
    "_contrib_interleaved_matmul_selfatt_valatt": (0, 1),
    "_contrib_interleaved_matmul_encdec_qk": (0, 1),
}


def operators_with_frozen_input(fitted: FittedGraph) -> list[Node]:
    """Return the operators whose CPU kernel may leave the gradient of one input unwritten, as another input is frozen.

    A frozen input gets no gradient (``grad_req="null"``). For example, FullyConnected does not write the gradient of
    its bias if its weight is frozen. It is left out if it has no bias, or if its weight is a variable that gets a
    gradient by ``fitted.grad_req``; a weight that is computed, or not in ``grad_req``, may be frozen.
    """

    def may_lose_gradient(node: Node) -> bool:
        # The kernel writes it together with the gradient of a first input, such as the weight, and only if MXNet
        # requests that one, which it does not where the first input has ``grad_req="null"``.
        first, second = _WRITTEN_TOGETHER.get(node.op, (0, 0))
        return first < second < len(node.inputs) and not _is_trained(node.inputs[first], fitted.grad_req)

    return [node for node in fitted.graph.nodes() if may_lose_gradient(node)]


def request_both_gradients(fitted: FittedGraph, operators: Sequence[Node]) -> None:
    """Let each of ``operators`` read the two inputs whose gradients its kernel writes together through one new node.

    The two are, for example, weight and bias of a FullyConnected. The new node is an ``amp_multicast``, which copies
    both. Its backward needs the gradients of both its outputs, so MXNet requests both from the operator, even if one of
    the inputs is frozen, and the kernel writes both.
    """
    for node in operators:
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
    """Return True if ``weight`` is a variable, or mxmp's cast of one, with another ``grad_req`` than "null".

    False for a variable whose name ``grad_req`` does not have.
    """
    while is_ours(weight.node):
        weight = weight.node.inputs[0]
    return weight.node.is_variable and grad_req.get(weight.node.name, "null") != "null"


def sums_of_variables(fitted: FittedGraph) -> list[Node]:
    """Return the ``elemwise_add`` operators that read a variable whose ``grad_req`` is "add" or not known.

    MXNet takes the array that holds the variable's gradient for the gradient of the sum, too.
    """

    def is_added_to(entry: Entry) -> bool:
        return entry.node.is_variable and fitted.grad_req.get(entry.node.name, "add") == "add"

    return [node for node in fitted.graph.nodes() if node.op == "elemwise_add" and any(map(is_added_to, node.inputs))]


def copy_summands(fitted: FittedGraph, sums: Sequence[Node]) -> None:
    """Let each ``elemwise_add`` in ``sums`` read copies of its variables, in place.

    The gradient of the sum then has an array of its own, and the backward of a copy adds it to the variable's.
    """
    for node in sums:
        for position, entry in enumerate(node.inputs):
            if entry.node.is_variable:
                name = f"{node.name}_in{position}_accumulated"
                node.inputs[position] = Entry(Node("_copy", name, {MARK: "cast"}, [entry]))


def regions_of_interest(fitted: FittedGraph) -> list[Node]:
    """Return the ``ROIAlign`` operators of the graph.

    MXNet's CPU kernel does not write the output for regions whose batch index is negative.
    """
    return [node for node in fitted.graph.nodes() if node.op == "_contrib_ROIAlign"]


def zero_unassigned_regions(fitted: FittedGraph, aligns: Sequence[Node]) -> None:
    """Make the output of each ``ROIAlign`` in ``aligns`` 0 for regions whose batch index is negative, in place.

    A negative batch index marks a region that belongs to no image here, but for example to another level of a feature
    pyramid. MXNet's kernel does not write its output.
    """
    replace_heads(fitted.graph, fitted.graph.insert_behind(aligns, _assigned_only))


def _assigned_only(node: Node) -> Entry:
    """Rewrite one ``ROIAlign`` in place; return a tensor with its output, but 0 where a batch index is negative.

    A region with a negative batch index belongs to no image. ``node`` then reads a valid box in the place of each such
    region (for region ``n``, the kernel would set value ``n`` of the flattened output to 0 and write nothing else), and
    new nodes behind ``node`` replace by zeros what it computes from that box.
    """

    def op(kind: str, role: str, *inputs: Entry, **attrs: str) -> Entry:
        return Entry(Node(kind, f"{node.name}_{role}", {**attrs, MARK: "cast"}, list(inputs)))

    rois = node.inputs[1]
    index = op("slice_axis", "index", rois, axis="1", begin="0", end="1")
    assigned = op("_greater_equal_scalar", "assigned", op("Reshape", "indices", index, shape="(-1,)"), scalar="0")
    box = op("_arange", "box", start="0", stop="5", dtype=FULL)  # of image 0, from (1, 2) to (3, 4)
    boxes = op("broadcast_add", "boxes", op("zeros_like", "none", rois), op("Reshape", "row", box, shape="(1, 5)"))
    node.inputs[1] = op("where", "rois", assigned, rois, boxes)
    node.inputs[1].node.attrs[PASSED] = "1"
    aligned = Entry(node)
    written = op("where", "written", assigned, aligned, op("zeros_like", "zeros", aligned))
    written.node.attrs[PASSED] = "1"
    return written
