"""Memory layouts of arrays in which oneDNN's CPU kernels fail or are slow, and copies into other layouts.

oneDNN stores the arrays that it computes in blocks of channels ("blocked"), other operators of MXNet in row-major order
("plain"). A rewrite here inserts a copy where a blocked array meets a kernel that cannot read it, or the reverse.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from ..precision.casts import FULL, MARK, is_ours
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import is_volume
from .workaround import Fitting

__all__ = [
    *("block_inputs", "casts_variable", "copy_around_convolutions", "copy_around_norms", "copy_inputs"),
    *("copy_reshaped", "copy_weights", "grouped_with_cast_weight", "norms_after_volumes", "plain_copy"),
    *("reshapes_after_volumes", "reshapes_before_convolutions", "small_block_convolutions", "unblocked_norms"),
]

_RESHAPES = ("Reshape", "reshape", "Flatten", "flatten", "expand_dims")


def plain_copy(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return the output of a new node that copies ``entry`` into the plain layout, named ``NAME_ROLE`` after ``node``.

    The new node is a ``slice_axis`` over the whole array, which MXNet computes without oneDNN. Its gradient is plain
    too.
    """
    attrs = {"axis": "0", "begin": "0", "end": "None", MARK: "cast"}
    return Entry(Node("slice_axis", f"{node.name}_{role}", attrs, [entry]))


def casts_variable(node: Node) -> bool:
    """Return True for a cast that mxmp inserted behind a variable, such as a weight."""
    return is_ours(node) and bool(node.inputs) and node.inputs[0].node.is_variable


# -- 3-D convolutions -------------------------------------------------------------------------------


def _after_volumes(graph: Graph) -> Iterator[Node]:
    """Yield the 3-D convolutions, deconvolutions and poolings, and every node whose inputs depend on one of them.

    The arrays of these nodes may have a blocked layout of five axes.
    """
    volumes: set[Node] = set()
    for node in list(graph.nodes()):
        if any(e.node in volumes for e in node.inputs) or is_volume(node.attrs):
            volumes.add(node)
            yield node


def reshapes_after_volumes(fitting: Fitting) -> list[Node]:
    """Return the ``Reshape``, ``Flatten`` and ``expand_dims`` operators that depend on a 3-D convolution or pooling."""
    return [node for node in _after_volumes(fitting.graph) if node.op in _RESHAPES]


def copy_inputs(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let each of these nodes read a copy, in the plain layout, of its first input; changes the nodes in place."""
    for node in nodes:
        node.inputs[0] = plain_copy(node.inputs[0], node)


def reshapes_before_convolutions(fitting: Fitting) -> list[Node]:
    """Return, in graph order, the bfloat16 reshapes and ``expand_dims`` on which a bfloat16 convolution depends."""
    found: list[Node] = []
    needed = {node for node in fitting.low if node.op == "Convolution"}
    for node in reversed(list(fitting.graph.nodes())):
        if node in needed:
            needed.update(entry.node for entry in node.inputs)
            if node in fitting.low and node.op in ("Reshape", "reshape", "expand_dims"):
                found.append(node)
    return found[::-1]


def copy_reshaped(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let all readers of these reshapes read a copy of their output.

    In the backward, the copy gives the reshape a gradient in the plain layout.
    """
    fitting.graph.insert_behind(nodes, lambda node: plain_copy(Entry(node), node, "flat"))


def norms_after_volumes(fitting: Fitting) -> list[Node]:
    """Return the ``BatchNorm`` operators that depend on a 3-D convolution or pooling."""
    return [node for node in _after_volumes(fitting.graph) if node.op == "BatchNorm"]


def copy_around_norms(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let each BatchNorm in ``nodes`` read a plain copy of its data, and its readers a plain copy of its output.

    So neither its input nor the gradient of its output has a blocked 3-D layout, on which its backward fails.
    """
    fitting.graph.insert_behind(nodes, lambda norm: plain_copy(Entry(norm), norm))
    for norm in nodes:
        norm.inputs[0] = plain_copy(norm.inputs[0], norm, "given")


# -- Grouped convolutions ---------------------------------------------------------------------------


def grouped_with_cast_weight(fitting: Fitting) -> list[Node]:
    """Return the grouped convolutions whose weight is a cast of a variable."""
    return [node for node in _grouped(fitting.graph) if casts_variable(node.inputs[1].node)]


def copy_weights(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let the cast of each of these convolutions' weights read a copy of the weight, which has the plain layout.

    MXNet's ``Cast`` instead of ``amp_cast`` would not need the copy, but truncates to bfloat16 instead of rounding.
    """
    for cast in dict.fromkeys(node.inputs[1].node for node in nodes):
        weight = cast.inputs[0]
        cast.inputs[0] = Entry(Node("_copy", f"{weight.node.name}_plain", {MARK: "cast"}, [weight]))


def small_block_convolutions(fitting: Fitting) -> list[Node]:
    """Return the grouped 2-D convolutions whose output oneDNN stores in blocks of 4 or 8 channels.

    Their number of output channels per group is a multiple of 4 but not of 16.
    """
    return [node for node in _grouped(fitting.graph) if _is_2d(node) and _has_small_blocks(node)]


def copy_around_convolutions(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let each of these convolutions read a plain copy of its data, and its readers a copy of its output.

    Where the number of channels is a multiple of 16 (in FP32: of 8), the copy of the output is in blocks of channels
    in which BatchNorm is fast; otherwise it is plain. A ResNeXt's block of 128 channels in 32 groups takes 17 ms
    instead of 280 (``scripts/dev.py bench layouts``).
    """

    def copied(node: Node) -> Entry:
        """Return the output of a new node that copies the output of the convolution ``node``."""
        low = node in fitting.low
        fits = int(node.attrs["num_filter"]) % (16 if low else 8) == 0
        dtype = fitting.casted.compute if low else FULL
        return _blocked_copy(Entry(node), node, node.name, dtype) if fits else plain_copy(Entry(node), node)

    fitting.graph.insert_behind(nodes, copied)
    for node in nodes:
        node.inputs[0] = plain_copy(node.inputs[0], node, "given")


def _grouped(graph: Graph) -> list[Node]:
    """Return the convolutions with more than one group, depthwise ones included."""
    return [n for n in graph.nodes() if n.op == "Convolution" and n.attrs.get("num_group", "1") != "1"]


def _has_small_blocks(node: Node) -> bool:
    """Return True for a grouped convolution with 4, 8, 12, 20, ... output channels per group."""
    groups = int(node.attrs.get("num_group", "1"))
    each = int(node.attrs["num_filter"]) // groups
    return groups > 1 and each % 4 == 0 and each % 16 != 0


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def unblocked_norms(fitting: Fitting) -> list[Node]:
    """Return the ``BatchNorm`` operators over axis 1 that read a convolution's output through the emulation's casts.

    The output of a cast has the plain layout, in which oneDNN's BatchNorm is slow.
    """
    norms = (n for n in fitting.graph.nodes() if n.op == "BatchNorm" and n.attrs.get("axis", "1") == "1")
    return [norm for norm in norms if _convolution_before(norm) is not None]


def block_inputs(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let each BatchNorm in ``nodes`` read a copy of its data in oneDNN's blocked layout.

    With it, a training step of a ResNet-50 in emulated float16 took 1.93 times as long as in FP32, without it 2.08.
    """
    for norm in nodes:
        convolution = _convolution_before(norm)
        if convolution is not None:
            norm.inputs[0] = _blocked_copy(norm.inputs[0], convolution, norm.name)


def _convolution_before(norm: Node) -> Node | None:
    """Return the 2-D convolution whose output ``norm`` reads through a rounding cast, with or without a cast to FP32.

    None where ``norm`` reads anything else.
    """
    widened = norm.inputs[0]
    rounded = widened.node.inputs[0] if is_ours(widened.node) else widened
    source = rounded.node.inputs[0].node if is_ours(rounded.node) else None
    return source if source is not None and source.op == "Convolution" and _is_2d(source) else None


def _is_2d(convolution: Node) -> bool:
    """Return True for a convolution with two spatial axes in the layout NCHW."""
    attrs = convolution.attrs
    return attrs["kernel"].count(",") == 1 and attrs.get("layout", "NCHW") in ("NCHW", "None")


def _blocked_copy(entry: Entry, convolution: Node, name: str, dtype: str = FULL) -> Entry:
    """Return the output of a new node that copies ``entry``, of ``dtype``, into oneDNN's blocks of channels.

    ``entry`` is the output of ``convolution``, or a cast of it, and has as many channels. The new node, named
    ``NAME_blocked`` after ``name``, is a depthwise 1 x 1 convolution whose weight is all ones.

    These ones are made from the number of channels. ``ones_like`` of a slice of the convolution's weight would fail
    ("dimensions are invalid") or end the process where FP32 inference left the weight in a blocked layout.
    """
    size = convolution.attrs["num_filter"]
    ones = Entry(Node("_ones", f"{name}_ones", {"shape": f"({size}, 1, 1, 1)", "dtype": FULL, MARK: "copy"}))
    if dtype != FULL:
        ones = Entry(Node("amp_cast", f"{name}_ones_low", {"dtype": dtype, MARK: "copy"}, [ones]))
    attrs = {"kernel": "(1, 1)", "num_filter": size, "num_group": size, "no_bias": "True", MARK: "copy"}
    return Entry(Node("Convolution", f"{name}_blocked", attrs, [entry, ones]))
