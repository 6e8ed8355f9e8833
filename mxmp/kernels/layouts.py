"""Memory layouts of arrays in which oneDNN's CPU kernels fail or are slow, and copies into other layouts.

oneDNN stores the arrays that it computes in blocks of channels ("blocked"), other operators of MXNet in row-major order
("plain"). A rewrite here inserts a copy where a blocked array meets a kernel that cannot read it, or the reverse.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from ..precision.casts import FULL, MARK, is_ours
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import spatial_axes
from .workaround import FittedGraph

__all__ = [
    *("block_inputs", "copy_around_convolutions", "copy_around_norms", "copy_inputs", "copy_reshaped", "copy_weights"),
    *("grouped_with_cast_weight", "is_cast_of_variable", "norms_after_volumes", "plain_copy"),
    *("reshapes_after_volumes", "reshapes_before_convolutions", "small_block_convolutions", "unblocked_norms"),
]

_RESHAPES = ("Reshape", "reshape", "Flatten", "flatten", "expand_dims")


def plain_copy(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return the output of a new node that copies the tensor ``entry`` into the plain (row-major) layout.

    The new node, named ``NAME_ROLE`` after ``node`` and ``role``, is a ``slice_axis`` over the whole array. MXNet
    computes it without oneDNN, so neither the copy nor the gradient that its backward returns has a layout of oneDNN's.
    """
    attrs = {"axis": "0", "begin": "0", "end": "None", MARK: "cast"}
    return Entry(Node("slice_axis", f"{node.name}_{role}", attrs, [entry]))


def is_cast_of_variable(node: Node) -> bool:
    """Return True for a node that mxmp inserted, such as a cast, whose first input is a variable, such as a weight."""
    return is_ours(node) and bool(node.inputs) and node.inputs[0].node.is_variable


# -- 3-D convolutions -------------------------------------------------------------------------------


def _after_volumes(graph: Graph) -> Iterator[Node]:
    """Yield the 3-D convolutions, deconvolutions and poolings, and every node whose inputs depend on one of them.

    Only the arrays of these nodes may have oneDNN's blocked layout of five axes, on which some kernels fail.
    """
    volumes: set[Node] = set()
    for node in list(graph.nodes()):
        if any(e.node in volumes for e in node.inputs) or spatial_axes(node.attrs) == 3:
            volumes.add(node)
            yield node


def reshapes_after_volumes(fitted: FittedGraph) -> list[Node]:
    """Return all ``Reshape``, ``Flatten`` and ``expand_dims`` whose inputs depend on a 3-D operator.

    That is a 3-D convolution, deconvolution or pooling. Reshapes in bfloat16 fail on oneDNN's blocked layout of five
    axes, which ``copy_inputs`` avoids; those in FP32 are returned too.
    """
    return [node for node in _after_volumes(fitted.graph) if node.op in _RESHAPES]


def copy_inputs(fitted: FittedGraph, reshapes: Sequence[Node]) -> None:
    """Let each operator in ``reshapes`` read a copy of its data in the plain (row-major) layout, in place.

    In bfloat16 a reshape fails on the blocked layout that oneDNN gives the output of a 3-D convolution.
    """
    for node in reshapes:
        node.inputs[0] = plain_copy(node.inputs[0], node)


def reshapes_before_convolutions(fitted: FittedGraph) -> list[Node]:
    """Return, in graph order, the bfloat16 ``Reshape`` and ``expand_dims`` on which a bfloat16 convolution depends.

    The gradient that the convolution sends back may have oneDNN's blocked layout, on which the backward of a reshape
    fails.
    """
    found: list[Node] = []
    needed = {node for node in fitted.low if node.op == "Convolution"}
    for node in reversed(list(fitted.graph.nodes())):
        if node in needed:
            needed.update(entry.node for entry in node.inputs)
            if node in fitted.low and node.op in ("Reshape", "reshape", "expand_dims"):
                found.append(node)
    return found[::-1]


def copy_reshaped(fitted: FittedGraph, reshapes: Sequence[Node]) -> None:
    """Insert a plain (row-major) copy behind each operator in ``reshapes``: its readers read the copy instead.

    In the backward, the reshape then gets its gradient from the copy, in the plain layout. It fails on a gradient in
    oneDNN's blocked layout.
    """
    fitted.graph.insert_behind(reshapes, lambda node: plain_copy(Entry(node), node, "flat"))


def norms_after_volumes(fitted: FittedGraph) -> list[Node]:
    """Return the ``BatchNorm`` operators that depend on a 3-D convolution, deconvolution or pooling.

    The backward of BatchNorm fails on oneDNN's blocked layout of five axes; ``copy_around_norms`` avoids it.
    """
    return [node for node in _after_volumes(fitted.graph) if node.op == "BatchNorm"]


def copy_around_norms(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Insert a copy in the plain (row-major) layout in front of and behind each BatchNorm in ``norms``.

    So neither the BatchNorm's data nor the gradient of its output has a blocked layout, on which its backward fails.
    """
    fitted.graph.insert_behind(norms, lambda norm: plain_copy(Entry(norm), norm))
    for norm in norms:
        norm.inputs[0] = plain_copy(norm.inputs[0], norm, "given")


# -- Grouped convolutions ---------------------------------------------------------------------------


def grouped_with_cast_weight(fitted: FittedGraph) -> list[Node]:
    """Return the convolutions with several groups, depthwise ones included, whose weight is mxmp's cast of a variable.

    If the same FP32 variable was used in FP32 inference, its array may have a blocked layout that the cast to bfloat16
    cannot read.
    """
    return [node for node in _grouped(fitted.graph) if is_cast_of_variable(node.inputs[1].node)]


def copy_weights(fitted: FittedGraph, convolutions: Sequence[Node]) -> None:
    """Insert a copy between the FP32 weight of each of ``convolutions`` and the cast of the weight to bfloat16.

    oneDNN's ``amp_cast`` fails on the blocked layout that a grouped weight may have; the copy has the plain (row-major)
    layout. MXNet's ``Cast`` would not need the copy, but truncates to bfloat16 instead of rounding.
    """
    for cast in dict.fromkeys(node.inputs[1].node for node in convolutions):
        weight = cast.inputs[0]
        cast.inputs[0] = Entry(Node("_copy", f"{weight.node.name}_plain", {MARK: "cast"}, [weight]))


def small_block_convolutions(fitted: FittedGraph) -> list[Node]:
    """Return the 2-D convolutions with several groups whose arrays oneDNN stores in blocks of 4 or 8 channels.

    These have 4, 8, 12, 20, ... (not 16, 32, ...) output channels per group. oneDNN's BatchNorm is slow on arrays in
    such small blocks.
    """
    return [node for node in _grouped(fitted.graph) if _is_2d(node) and _has_small_blocks(node)]


def copy_around_convolutions(fitted: FittedGraph, convolutions: Sequence[Node]) -> None:
    """Insert a copy in front of and behind each of ``convolutions``, into layouts in which BatchNorm is not slow.

    The copy in front has the plain (row-major) layout. The copy behind has the blocks that oneDNN chooses for a
    depthwise convolution (``_blocked_copy``) if the number of output channels is a multiple of 16 (for an FP32
    convolution: of 8), and the plain layout otherwise. A ResNeXt's block of 128 channels in 32 groups takes 17 ms
    instead of 280 (``scripts/dev.py bench layouts``).
    """

    def copied(node: Node) -> Entry:
        low = node in fitted.low
        fits = int(node.attrs["num_filter"]) % (16 if low else 8) == 0
        dtype = fitted.casted.compute if low else FULL
        return _blocked_copy(Entry(node), node, node.name, dtype) if fits else plain_copy(Entry(node), node)

    fitted.graph.insert_behind(convolutions, copied)
    for node in convolutions:
        node.inputs[0] = plain_copy(node.inputs[0], node, "given")


def _grouped(graph: Graph) -> list[Node]:
    """Return the ``Convolution`` nodes with more than one group, depthwise ones included."""
    return [n for n in graph.nodes() if n.op == "Convolution" and n.attrs.get("num_group", "1") != "1"]


def _has_small_blocks(node: Node) -> bool:
    """Return True if oneDNN stores the arrays of a convolution with several groups in blocks of 4 or 8 channels.

    It does so for 4, 8, 12, 20, ... (not 16, 32, ...) output channels per group. BatchNorm is slow on such arrays.
    """
    groups = int(node.attrs.get("num_group", "1"))
    each = int(node.attrs["num_filter"]) // groups
    return groups > 1 and each % 4 == 0 and each % 16 != 0


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def unblocked_norms(fitted: FittedGraph) -> list[Node]:
    """Return the ``BatchNorm`` operators over axis 1 whose data is a 2-D convolution's output in emulated float16.

    The cast that rounds this output to float16 returns the plain (row-major) layout, in which oneDNN's BatchNorm is
    slow.
    """
    norms = (n for n in fitted.graph.nodes() if n.op == "BatchNorm" and n.attrs.get("axis", "1") == "1")
    return [norm for norm in norms if _convolution_before(norm) is not None]


def block_inputs(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Insert, in front of each BatchNorm in ``norms``, a copy of its data in oneDNN's blocks of channels.

    BatchNorm is fast in that layout. With the copies, a training step of a ResNet-50 in emulated float16 took 1.93
    times as long as in FP32; without them, 2.08 times.
    """
    for norm in norms:
        convolution = _convolution_before(norm)
        if convolution is not None:
            norm.inputs[0] = _blocked_copy(norm.inputs[0], convolution, norm.name)


def _convolution_before(norm: Node) -> Node | None:
    """Return the 2-D convolution whose output a BatchNorm reads, rounded to float16; None if there is none.

    Two inserted casts must stand between the two: one to float16, and one back to FP32.
    """
    widened = norm.inputs[0]
    rounded = widened.node.inputs[0] if is_ours(widened.node) else widened
    source = rounded.node.inputs[0].node if is_ours(rounded.node) else None
    return source if source is not None and source.op == "Convolution" and _is_2d(source) else None


def _is_2d(convolution: Node) -> bool:
    """Return True if a convolution has two spatial axes and the layout NCHW, the default."""
    attrs = convolution.attrs
    return spatial_axes(attrs) == 2 and attrs.get("layout", "NCHW") in ("NCHW", "None")


def _blocked_copy(entry: Entry, convolution: Node, name: str, dtype: str = FULL) -> Entry:
    """Return the output of a new node that copies the tensor ``entry``, of ``dtype``, into oneDNN's blocks of channels.

    ``entry`` is the output of ``convolution``, or a cast of it, and has as many channels. The new node, named
    ``NAME_blocked`` after ``name``, is a depthwise 1 x 1 convolution whose weight is all ones. (They cannot be
    made from the weight of ``convolution`` by ``slice`` and ``ones_like``. Where FP32 inference left that weight in a
    blocked layout, ``slice`` fails, "dimensions are invalid", or ends the process.)
    """
    size = convolution.attrs["num_filter"]
    ones = Entry(Node("_ones", f"{name}_ones", {"shape": f"({size}, 1, 1, 1)", "dtype": FULL, MARK: "copy"}))
    if dtype != FULL:
        ones = Entry(Node("amp_cast", f"{name}_ones_low", {"dtype": dtype, MARK: "copy"}, [ones]))
    attrs = {"kernel": "(1, 1)", "num_filter": size, "num_group": size, "no_bias": "True", MARK: "copy"}
    return Entry(Node("Convolution", f"{name}_blocked", attrs, [entry, ones]))
