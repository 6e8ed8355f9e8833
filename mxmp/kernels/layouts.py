"""Memory layouts of arrays for which oneDNN's CPU kernels raise errors or are slow, and copies into other layouts.

oneDNN stores the arrays that it computes in blocks of channels ("blocked"), other operators of MXNet in row-major order
("plain"). A rewrite here inserts a copy where a blocked array meets a kernel that cannot read it, or the reverse.
"""

from __future__ import annotations

from typing import Iterator

from ..precision.casts import FULL, LowGraph, inserted, is_ours, source_of
from ..precision.graph import Entry, Graph, Node
from ..precision.missing_kernels import spatial_axes
from .inserting import beside

_RESHAPES = ("Reshape", "expand_dims", "reshape_like", "_np_reshape", "_npx_reshape")


def plain_copy(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return a copy in the row-major layout, whose backward returns a gradient in that layout too."""
    # MXNet computes this operator without oneDNN.
    return beside(node)("slice_axis", role, entry, axis=0, begin=0, end=None)


def _plain_copy_4d(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return such a copy of a tensor with four axes, with less memory."""
    # oneDNN reorders a blocked array into the output. For slice_axis MXNet makes a plain array of its own first.
    return beside(node)("slice", role, entry, begin="(None,)", end="(None,)")


def is_cast_of_variable(node: Node) -> bool:
    return is_ours(node) and bool(node.inputs) and node.inputs[0].node.is_variable


# -- 3-D convolutions -------------------------------------------------------------------------------


def _after_volumes(graph: Graph) -> Iterator[Node]:
    """Yield the 3-D operators and what depends on them: only their arrays may have oneDNN's blocks of five axes."""
    volumes: set[Node] = set()
    for node in list(graph.nodes()):
        if spatial_axes(node.attrs) == 3 or (volumes and any(e.node in volumes for e in node.inputs)):
            volumes.add(node)
            yield node


def copy_inputs(fitted: LowGraph) -> list[Node]:
    """Let each reshape that depends on a 3-D operator read a plain copy of its data; return these reshapes."""
    operators = ("Reshape", "Flatten", "expand_dims")
    reshapes = [node for node in _after_volumes(fitted.graph) if node.op in operators]
    for node in reshapes:
        node.rewire(0, plain_copy(node.inputs[0], node))
    return reshapes


def copy_reshaped(fitted: LowGraph) -> list[Node]:
    """Insert a plain copy behind each reshape on which a convolution of its dtype depends; return these reshapes."""
    # A convolution sends back a gradient in a blocked layout, on which the backward of a bfloat16 reshape raises
    # an error, and that of a cast in front of an FP32 one. The backward of the copy makes it plain.
    reshapes: list[Node] = []
    nodes = list(fitted.graph.nodes())
    behind_casts: set[Node] = set()
    for node in nodes:
        if is_ours(node) or any(entry.node in behind_casts for entry in node.inputs):
            behind_casts.add(node)
    needed = {node for node in fitted.low if node.op == "Convolution"}
    needed_in_full = {node for node in nodes if node.op == "Convolution"} - needed
    for node in reversed(nodes):
        is_reshape = node.op in _RESHAPES and not is_ours(node)
        if node in needed:
            needed.update(entry.node for entry in node.inputs)
        if node in needed_in_full and not is_ours(node):  # a cast's own gradient is plain
            needed_in_full.update(entry.node for entry in node.inputs)
        if is_reshape and node in (needed if node in fitted.low else needed_in_full & behind_casts):
            reshapes.insert(0, node)
    fitted.graph.insert_behind(reshapes, lambda node: plain_copy(Entry(node), node, "flat"))
    return reshapes


def copy_around_norms(fitted: LowGraph) -> list[Node]:
    """Insert a plain copy in front of and behind each BatchNorm that depends on a 3-D operator; return these norms."""
    norms = [node for node in _after_volumes(fitted.graph) if node.op == "BatchNorm"]
    fitted.graph.insert_behind(norms, lambda norm: plain_copy(Entry(norm), norm))
    for norm in norms:
        norm.rewire(0, plain_copy(norm.inputs[0], norm, "given"))
    return norms


# -- Grouped convolutions ---------------------------------------------------------------------------


def copy_weights(fitted: LowGraph) -> list[Node]:
    """Insert a copy between the weight of each grouped convolution and mxmp's cast of it; return the convolutions."""
    convolutions = [node for node in _grouped(fitted.graph) if is_cast_of_variable(node.inputs[1].node)]
    for cast in dict.fromkeys(node.inputs[1].node for node in convolutions):
        weight = cast.inputs[0]
        # MXNet's Cast would not need the copy, but truncates to bfloat16.
        cast.rewire(0, inserted("_copy", f"{weight.node.name}_plain", [weight]))
    return convolutions


def copy_around_convolutions(fitted: LowGraph) -> list[Node]:
    """Copy data and output of each 2-D convolution with small blocks of channels; return these convolutions."""

    def has_small_blocks(node: Node) -> bool:
        # oneDNN stores these in blocks of 4 or 8 channels, on which BatchNorm is slow: a ResNeXt's block of 128
        # channels in 32 groups takes 280 ms, and 17 with the copies (scripts/dev.py bench layouts).
        each = int(node.attrs["num_filter"]) // int(node.attrs["num_group"])
        return _is_2d(node) and each % 4 == 0 and each % 16 != 0  # 4, 8, 12, 20, ... channels of a group

    def copied(node: Node) -> Entry:
        low = node in fitted.low
        # The blocks of a depthwise convolution, where the channels fill them.
        if int(node.attrs["num_filter"]) % (16 if low else 8):
            return _plain_copy_4d(Entry(node), node)
        return _blocked_copy(Entry(node), node, node.name, fitted.compute if low else FULL)

    convolutions = list(filter(has_small_blocks, _grouped(fitted.graph)))
    fitted.graph.insert_behind(convolutions, copied)
    for node in convolutions:
        node.rewire(0, _plain_copy_4d(node.inputs[0], node, "given"))
    return convolutions


def _grouped(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.op == "Convolution" and n.attrs.get("num_group", "1") != "1"]


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def block_inputs(fitted: LowGraph) -> list[Node]:
    """Copy the data of each BatchNorm behind a rounded 2-D convolution into blocks of channels; return the norms."""
    norms = []
    for norm in list(fitted.graph.nodes()):
        # The emulation's casts return the plain layout, in which BatchNorm is slow. A training step of a ResNet-50 took
        # 1.93 times as long as in FP32; without the copies, 2.08 times.
        convolution = _convolution_before(norm) if norm.op == "BatchNorm" else None
        if convolution is not None and norm.attrs.get("axis", "1") == "1":
            norms.append((norm, convolution))
    for norm, convolution in norms:
        norm.rewire(0, _blocked_copy(norm.inputs[0], convolution, norm.name))
    return [norm for norm, _ in norms]


def _convolution_before(norm: Node) -> Node | None:
    """Return the 2-D convolution whose output a BatchNorm reads through inserted nodes alone, or None."""
    source = source_of(norm.inputs[0]).node if is_ours(norm.inputs[0].node) else None
    return source if source is not None and source.op == "Convolution" and _is_2d(source) else None


def _is_2d(convolution: Node) -> bool:
    attrs = convolution.attrs
    return spatial_axes(attrs) == 2 and attrs.get("layout", "NCHW") in ("NCHW", "None")


def _blocked_copy(entry: Entry, convolution: Node, name: str, dtype: str = FULL) -> Entry:
    """Return a copy in oneDNN's blocks of channels: a depthwise 1 x 1 convolution whose weight is all ones."""
    size = convolution.attrs["num_filter"]
    # Not ones_like a slice of the convolution's weight: slice fails, or ends the process, where FP32 inference left the
    # weight in a blocked layout.
    ones = inserted("_ones", f"{name}_ones", shape=f"({size}, 1, 1, 1)", dtype=FULL)
    if dtype != FULL:
        ones = inserted("amp_cast", f"{name}_ones_low", [ones], dtype=dtype)
    attrs = {"kernel": "(1, 1)", "num_filter": size, "num_group": size, "no_bias": "True"}
    return inserted("Convolution", f"{name}_blocked", [entry, ones], **attrs)
