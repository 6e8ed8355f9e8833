"""The kernels of oneDNN that round, and tensors in the memory layouts that its CPU kernels want."""

from __future__ import annotations

from typing import Iterable

from .casts import FULL, MARK, is_ours, replace_operator
from .graph import Entry, Graph, Node

__all__ = ["blocked_batch_norms", "plain_grouped_weights", "round_bfloat16"]


def round_bfloat16(nodes: Iterable[Node]) -> None:
    """Compute bfloat16 operators whose own kernel truncates by one of oneDNN's that rounds, in place.

    The same function, forward and backward: ``sigmoid`` and ``tanh`` by ``Activation``, ``a - b`` by
    ``a + (-b)``, of which the negation is exact.
    """
    for node in nodes:
        if node.op in ("sigmoid", "tanh"):
            replace_operator(node, "Activation", act_type=node.op)
        elif node.op == "elemwise_sub":
            right = Node("negative", f"{node.name}_negated", {MARK: "copy"}, [node.inputs[1]])
            replace_operator(node, "elemwise_add")
            node.inputs[1] = Entry(right)


def plain_grouped_weights(graph: Graph) -> None:
    """Copy a grouped convolution's weight in front of its bfloat16 cast, in place.

    MXNet's FP32 inference leaves weights in oneDNN's blocked layout, and oneDNN has no reorder from
    the grouped one to bfloat16 ("could not create a primitive descriptor for a reorder primitive").
    The copy is plain. (``Cast`` would do, but it truncates to bfloat16 instead of rounding.)
    """
    for node in list(graph.nodes()):
        if node.op != "Convolution" or node.attrs.get("num_group", "1") == "1":
            continue
        cast = node.inputs[1].node
        if is_ours(cast) and cast.inputs[0].node.is_variable:
            weight = cast.inputs[0]
            cast.inputs[0] = Entry(Node("_copy", f"{weight.node.name}_plain", {MARK: "cast"}, [weight]))


def blocked_batch_norms(graph: Graph) -> None:
    """Give a BatchNorm behind a rounded convolution its input in oneDNN's blocked layout again, in place.

    Casts leave the plain layout, in which BatchNorm is five times slower. A depthwise convolution with
    ones copies every value as it is, forward and backward, into the blocked one: a ResNet-50 step took
    1.93 times FP32's instead of 2.08 (on noise).
    """
    for node in list(graph.nodes()):
        if node.op == "BatchNorm" and node.attrs.get("axis", "1") == "1":
            _block(node)


def _block(norm: Node) -> None:
    widened = norm.inputs[0]
    rounded = widened.node.inputs[0] if is_ours(widened.node) else widened
    source = rounded.node.inputs[0].node if is_ours(rounded.node) else None
    if source is None or source.op != "Convolution" or source.attrs["kernel"].count(",") != 1:
        return
    if source.attrs.get("layout", "NCHW") not in ("NCHW", "None"):
        return
    channels = source.attrs["num_filter"]
    ones = Node("_ones", f"{norm.name}_ones", {"shape": f"({channels}, 1, 1, 1)", "dtype": FULL, MARK: "copy"})
    attrs = {"kernel": "(1, 1)", "num_filter": channels, "num_group": channels, "no_bias": "True", MARK: "copy"}
    norm.inputs[0] = Entry(Node("Convolution", f"{norm.name}_blocked", attrs, [widened, Entry(ones)]))
