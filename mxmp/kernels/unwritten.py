"""Outputs and gradients that MXNet's kernels do not write, or write over too early, in FP32 too."""

from __future__ import annotations

from typing import Mapping, Sequence

from ..precision.casts import FULL, PASSED, LowGraph, inserted, is_ours, replace_heads, source_of
from ..precision.graph import Entry, Node
from ..precision.heads import zero_with_gradient
from .inserting import beside

# From an operator to the positions of two inputs. MXNet's CPU kernel writes the gradient of the second one only where
# that of the first one is requested.
_WRITTEN_TOGETHER = {
    "FullyConnected": (1, 2),
    "_contrib_interleaved_matmul_selfatt_valatt": (0, 1),
    "_contrib_interleaved_matmul_encdec_qk": (0, 1),
}
# From an operator to the positions of inputs whose gradient MXNet's kernel writes over what the array holds, or adds
# wrongly to it, though it is to add (it refuses to run ``_np_moveaxis``). Others add: see the operators that
# tests/kernels/test_unwritten.py tries.
_CANNOT_ADD: dict[str, Sequence[int]] = {
    **dict.fromkeys(
        ("clip", "mean", "moments", "reverse", "_split_v2", "_np_cumsum", "Crop", "_contrib_boolean_mask"), (0,)
    ),
    **dict.fromkeys(("_npi_mean", "_npi_flip", "_npi_rot90", "_npi_hsplit", "_npi_dsplit", "_npi_diff"), (0,)),
    **dict.fromkeys(("_np_moveaxis", "_np_trace", "_npi_tensorinv"), (0,)),
    **dict.fromkeys(("_linalg_inverse", "_linalg_gelqf", "_linalg_syevd", "_linalg_trmm"), (0,)),
    **dict.fromkeys(("SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput"), (0,)),
    **dict.fromkeys(("MAERegressionOutput", "SVMOutput"), (0,)),
    **dict.fromkeys(("_linalg_gemm2", "_linalg_trsm", "_npi_tensordot", "_npi_solve"), (0, 1)),
    **dict.fromkeys(("SpatialTransformer", "_contrib_DeformableConvolution"), (0, 1)),
    **dict.fromkeys(("_npi_where_lscalar", "_npi_where_rscalar"), (0, 1)),
    **dict.fromkeys(("_linalg_gemm", "_npi_where"), (0, 1, 2)),
}
# cuDNN's calls get a beta of 0 whatever is requested (src/operator/nn/cudnn/cudnn_activation-inl.h and others). RNN
# refuses to add to the gradients of its data and states. The constant Pad, Correlation and index_copy have kernels of
# their own (pad.cu, correlation.cu, index_copy.cu).
_CANNOT_ADD_ON_A_GPU: dict[str, Sequence[int]] = {
    **_CANNOT_ADD,
    **dict.fromkeys(("Activation", "Pooling", "LRN", "SoftmaxActivation", "Dropout", "Pad"), (0,)),
    "Correlation": (0, 1),
    "_contrib_index_copy": (0, 2),
    "RNN": (0, 2, 3),
}


def request_both_gradients(fitted: LowGraph) -> list[Node]:
    """Let MXNet request both gradients that a kernel writes together, if one is frozen; return the operators."""
    found = []
    for node in list(fitted.graph.nodes()):
        first, second = _WRITTEN_TOGETHER.get(node.op, (0, len(node.inputs)))
        if second >= len(node.inputs) or _requested(node.inputs[second], fitted.grad_req) == "null":
            continue
        # A first input that is computed, or not in grad_req, may be frozen.
        if _requested(node.inputs[first], fitted.grad_req) not in (None, "null"):
            continue
        found.append(node)
        # amp_multicast's own backward ignores grad_req="add", a copy's does not.
        read = [
            inserted("_copy", f"{e.node.name}_asked", [e]) if e.node.is_variable else e
            for e in (node.inputs[first], node.inputs[second])
        ]
        # Its backward needs the gradients of both outputs, so MXNet requests both from the operator.
        both = inserted("amp_multicast", f"{node.name}_asked", read, num_outputs=2).node
        both.attrs[PASSED] = "each"
        node.rewire(first, Entry(both, 0))
        node.rewire(second, Entry(both, 1))
    return found


def _requested(weight: Entry, grad_req: Mapping[str, str]) -> str | None:
    """Return the ``grad_req`` of a variable, or of the one that mxmp casts to ``weight``; None if it is not known."""
    variable = source_of(weight).node
    return grad_req.get(variable.name) if variable.is_variable else None


def copy_summands(fitted: LowGraph) -> list[Node]:
    """Copy the variables that an ``elemwise_add`` reads if MXNet may add to the gradient of one; return these sums."""

    def is_added_to(entry: Entry) -> bool:
        return entry.node.is_variable and fitted.grad_req.get(entry.node.name, "add") == "add"

    sums = [node for node in fitted.graph.nodes() if node.op == "elemwise_add" and any(map(is_added_to, node.inputs))]
    # Without a copy MXNet takes the array of the variable's gradient for that of the sum, too.
    variables = [(node, i) for node in sums for i, entry in enumerate(node.inputs) if entry.node.is_variable]
    return _copy_inputs(variables, "accumulated")


def copy_before_kernels_that_cannot_add(fitted: LowGraph) -> list[Node]:
    """Let operators whose kernels cannot add read copies where MXNet may add to a gradient; return these operators."""
    if not fitted.has_gradients:
        return []
    positions = _CANNOT_ADD_ON_A_GPU if fitted.planned.plan.device == "gpu" else _CANNOT_ADD
    readers = fitted.graph.consumers()
    added = [
        (node, position)
        for node in fitted.graph.nodes()
        for position, entry in enumerate(node.inputs)
        if position in positions.get(node.op, ()) and fitted.may_be_added_to(entry, len(readers[entry]))
    ]
    return _copy_inputs(added, "added")


def _copy_inputs(places: Sequence[tuple[Node, int]], role: str) -> list[Node]:
    """Let each of ``places``, an operator and the position of an input, read a copy; return the operators."""
    for node, position in places:
        node.rewire(position, beside(node)("_copy", f"in{position}_{role}", node.inputs[position]))
    return list(dict.fromkeys(node for node, _ in places))


def train_slopes_apart(fitted: LowGraph) -> list[Node]:
    """Let a second PReLU compute the slopes' gradient where they may be trained; return the first ones."""
    activations = [
        node for node in fitted.graph.nodes() if node.op == "LeakyReLU" and node.attrs.get("act_type") == "prelu"
    ]
    trained = [node for node in activations if _requested(node.inputs[1], fitted.grad_req) != "null"]
    if trained:
        replace_heads(fitted.graph, fitted.graph.insert_behind(trained, _with_slopes))
    return trained


def _with_slopes(node: Node) -> Entry:
    """Rewrite one PReLU in place; return its sum with the slopes' own PReLU, of which only the gradient counts."""
    op = beside(node)
    x, slopes = node.inputs
    # It reads x without a gradient, so its kernel writes nothing over the gradient that it reads.
    own = op(node.op, "trained", op("BlockGrad", "frozen_data", x), slopes, act_type="prelu")
    node.rewire(1, op("BlockGrad", "frozen_slopes", slopes))
    return op("elemwise_add", "sum", Entry(node), zero_with_gradient(own, op))


def keep_gradients_of_others(fitted: LowGraph) -> list[Node]:
    """Multiply each hard_sigmoid by 1 if others may read its gradient, over which its backward writes; return these."""
    if not fitted.has_gradients:
        return []
    readers = fitted.graph.consumers()

    def is_shared(node: Node) -> bool:
        # The backward of a cast to another dtype makes a gradient that no other operator reads.
        return not all(is_ours(user) and user.op in ("Cast", "amp_cast") for user, _ in readers.get(Entry(node), ()))

    nodes = [node for node in fitted.graph.nodes() if node.op == "hard_sigmoid" and is_shared(node)]
    if nodes:
        made = fitted.graph.insert_behind(nodes, lambda n: beside(n)("_mul_scalar", "alone", Entry(n), scalar=1))
        replace_heads(fitted.graph, made)
    return nodes


def zero_unassigned_regions(fitted: LowGraph) -> list[Node]:
    """Make the output of each ``ROIAlign`` 0 for regions with a negative batch index, in place; return these nodes."""
    aligns = [node for node in fitted.graph.nodes() if node.op == "_contrib_ROIAlign"]
    if aligns:
        replace_heads(fitted.graph, fitted.graph.insert_behind(aligns, _assigned_only))
    return aligns


def _assigned_only(node: Node) -> Entry:
    """Rewrite one ``ROIAlign`` in place; return its output, with 0 where a batch index is negative."""
    op = beside(node)
    rois = node.inputs[1]
    index = op("slice_axis", "index", rois, axis="1", begin="0", end="1")
    assigned = op("_greater_equal_scalar", "assigned", op("Reshape", "indices", index, shape="(-1,)"), scalar="0")
    # A valid box for each region of no image here; its output is replaced by zeros behind the node.
    box = op("_arange", "box", start="0", stop="5", dtype=FULL)  # of image 0, from (1, 2) to (3, 4)
    boxes = op("broadcast_add", "boxes", op("zeros_like", "none", rois), op("Reshape", "row", box, shape="(1, 5)"))
    node.rewire(1, op("where", "rois", assigned, rois, boxes))
    node.inputs[1].node.attrs[PASSED] = "1"
    aligned = Entry(node)
    written = op("where", "written", assigned, aligned, op("zeros_like", "zeros", aligned))
    written.node.attrs[PASSED] = "1"
    return written
