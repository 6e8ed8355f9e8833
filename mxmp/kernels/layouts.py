"""Memory layouts of arrays for which oneDNN's CPU kernels raise errors or are slow, and copies into other layouts.

oneDNN stores the arrays that it computes in blocks of channels ("blocked"), other operators of MXNet in row-major order
("plain"). A rewrite here inserts a copy where a blocked array meets a kernel that cannot read it, or the reverse.
"""

from __future__ import annotations

from typing import Iterator

from ..precision.casts import FULL, inserted, is_ours, source_of
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import spatial_axes
from .workaround import FittedGraph


def plain_copy(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return the output of a new node that copies the tensor ``entry`` into the plain (row-major) layout.

    The new node, named ``NAME_ROLE`` after ``node`` and ``role``, is a ``slice_axis`` over the whole array. MXNet
    computes it without oneDNN, so neither the copy nor the gradient that its backward returns has a layout of oneDNN's.
    """
    return inserted("slice_axis", f"{node.name}_{role}", [entry], axis=0, begin=0, end=None)


def _plain_copy_4d(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return the output of a new node that copies a tensor like ``plain_copy``, but with less memory.

    ``entry`` must have four axes. The new node is a ``slice`` over the whole array: oneDNN reorders a blocked array
    into the output. For the ``slice_axis`` of ``plain_copy`` MXNet first makes a plain array of its own from the input,
    and keeps this array in memory besides input and output.
    """
    return inserted("slice", f"{node.name}_{role}", [entry], begin="(None,)", end="(None,)")


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


def copy_inputs(fitted: FittedGraph) -> list[Node]:
    """Let each reshape that depends on a 3-D operator read a plain copy of its data, in place; return these reshapes.

    ``Flatten`` and ``expand_dims`` are reshapes too. 3-D operators are convolutions, deconvolutions and poolings of
    volumes; a reshape may depend on one through other operators. A bfloat16 reshape raises an error on the blocked
    layout that oneDNN gives the output of a 3-D convolution; the copy has the plain (row-major) layout.
    """
    operators = ("Reshape", "reshape", "Flatten", "flatten", "expand_dims")
    reshapes = [node for node in _after_volumes(fitted.graph) if node.op in operators]
    for node in reshapes:
        node.inputs[0] = plain_copy(node.inputs[0], node)
    return reshapes


def copy_reshaped(fitted: FittedGraph) -> list[Node]:
    """Insert a plain copy behind each bfloat16 reshape on which a bfloat16 convolution depends; return these reshapes.

    ``expand_dims`` is a reshape too; ``Flatten`` is left as it is. The gradient that the convolution sends back may
    have oneDNN's blocked layout, on which the backward of a reshape raises an error. The backward of the copy returns
    the gradient to the reshape in the plain (row-major) layout.
    """
    reshapes: list[Node] = []
    needed = {node for node in fitted.low if node.op == "Convolution"}
    for node in reversed(list(fitted.graph.nodes())):
        if node in needed:
            needed.update(entry.node for entry in node.inputs)
            if node in fitted.low and node.op in ("Reshape", "reshape", "expand_dims"):
                reshapes.insert(0, node)
    fitted.graph.insert_behind(reshapes, lambda node: plain_copy(Entry(node), node, "flat"))
    return reshapes


def copy_around_norms(fitted: FittedGraph) -> list[Node]:
    """Insert a plain copy in front of and behind each BatchNorm that depends on a 3-D operator; return these norms.

    With these copies, neither the BatchNorm's data nor the gradient of its output has oneDNN's blocked layout of five
    axes, on which the backward of BatchNorm raises an error; both have the plain (row-major) layout.
    """
    norms = [node for node in _after_volumes(fitted.graph) if node.op == "BatchNorm"]
    fitted.graph.insert_behind(norms, lambda norm: plain_copy(Entry(norm), norm))
    for norm in norms:
        norm.inputs[0] = plain_copy(norm.inputs[0], norm, "given")
    return norms


# -- Grouped convolutions ---------------------------------------------------------------------------


def copy_weights(fitted: FittedGraph) -> list[Node]:
    """Insert a copy between the weight of each grouped convolution and mxmp's cast of it; return these convolutions.

    Where FP32 inference has left the weight's array in a blocked layout, oneDNN's ``amp_cast`` raises an error; the
    copy has the plain (row-major) layout. MXNet's ``Cast`` would not need the copy, but truncates to bfloat16 instead
    of rounding.
    """
    convolutions = [node for node in _grouped(fitted.graph) if is_cast_of_variable(node.inputs[1].node)]
    for cast in dict.fromkeys(node.inputs[1].node for node in convolutions):
        weight = cast.inputs[0]
        cast.inputs[0] = inserted("_copy", f"{weight.node.name}_plain", [weight])
    return convolutions


def copy_around_convolutions(fitted: FittedGraph) -> list[Node]:
    """Copy the data and the output of each 2-D convolution with small blocks of channels; return these convolutions.

    oneDNN stores the arrays of a grouped convolution in blocks of 4 or 8 channels if a group has 4, 8, 12, 20, ... of
    them (a multiple of 4, but not of 16), and BatchNorm is slow on such arrays. The copy in front has the plain
    (row-major) layout. The copy behind has the blocks that oneDNN chooses for a depthwise convolution
    (``_blocked_copy``) if the number of output channels is a multiple of 16 (for an FP32 convolution: of 8), and the
    plain layout otherwise. A ResNeXt's block of 128 channels in 32 groups takes 17 ms instead of 280 (``scripts/dev.py
    bench layouts``).
    """
    convolutions = []
    for node in _grouped(fitted.graph):
        each = int(node.attrs["num_filter"]) // int(node.attrs["num_group"])
        if _is_2d(node) and each % 4 == 0 and each % 16 != 0:  # 4, 8, 12, 20, ... channels of a group
            convolutions.append(node)

    def copied(node: Node) -> Entry:
        low = node in fitted.low
        fits = int(node.attrs["num_filter"]) % (16 if low else 8) == 0
        dtype = fitted.casted.compute if low else FULL
        return _blocked_copy(Entry(node), node, node.name, dtype) if fits else _plain_copy_4d(Entry(node), node)

    fitted.graph.insert_behind(convolutions, copied)
    for node in convolutions:
        node.inputs[0] = _plain_copy_4d(node.inputs[0], node, "given")
    return convolutions


def _grouped(graph: Graph) -> list[Node]:
    """Return the ``Convolution`` nodes with more than one group, depthwise ones included."""
    return [n for n in graph.nodes() if n.op == "Convolution" and n.attrs.get("num_group", "1") != "1"]


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def block_inputs(fitted: FittedGraph) -> list[Node]:
    """Copy the data of each BatchNorm behind a 2-D convolution into blocks of channels; return the norms.

    A BatchNorm is changed if its axis is 1 and it reads the convolution's output through inserted nodes alone. In
    emulated float16 these are casts that round the output, and what adds the bias between them. They return the plain
    (row-major) layout, in which oneDNN's BatchNorm is slow; ``_blocked_copy`` makes the copy. With the copies, a
    training step of a ResNet-50 in emulated float16 took 1.93 times as long as in FP32; without them, 2.08 times.
    """
    norms = []
    for norm in fitted.graph.nodes():
        convolution = _convolution_before(norm) if norm.op == "BatchNorm" else None
        if convolution is not None and norm.attrs.get("axis", "1") == "1":
            norms.append((norm, convolution))
    for norm, convolution in norms:
        norm.inputs[0] = _blocked_copy(norm.inputs[0], convolution, norm.name)
    return [norm for norm, _ in norms]


def _convolution_before(norm: Node) -> Node | None:
    """Return the 2-D convolution whose output a BatchNorm reads through inserted nodes, such as casts, or None."""
    source = source_of(norm.inputs[0]).node if is_ours(norm.inputs[0].node) else None
    return source if source is not None and source.op == "Convolution" and _is_2d(source) else None


def _is_2d(convolution: Node) -> bool:
    """Return True if a convolution has two spatial axes and the layout NCHW, the default."""
    attrs = convolution.attrs
    return spatial_axes(attrs) == 2 and attrs.get("layout", "NCHW") in ("NCHW", "None")


def _blocked_copy(entry: Entry, convolution: Node, name: str, dtype: str = FULL) -> Entry:
    """Return the output of a new node that copies the tensor ``entry``, of ``dtype``, into oneDNN's blocks of channels.

    ``entry`` has as many channels as the output of ``convolution``. The new node, called ``name`` with ``_blocked``
    behind it, is a depthwise 1 x 1 convolution whose weight is all ones. (The ones cannot be made from the weight of
    ``convolution`` by ``slice`` and ``ones_like``: where FP32 inference left this weight in a blocked layout, ``slice``
    fails or ends the process.)
    """
    size = convolution.attrs["num_filter"]
    ones = inserted("_ones", f"{name}_ones", shape=f"({size}, 1, 1, 1)", dtype=FULL)
    if dtype != FULL:
        ones = inserted("amp_cast", f"{name}_ones_low", [ones], dtype=dtype)
    attrs = {"kernel": "(1, 1)", "num_filter": size, "num_group": size, "no_bias": "True"}
    return inserted("Convolution", f"{name}_blocked", [entry, ones], **attrs)
