"""Layouts of arrays that oneDNN's CPU kernels fail on or are slow in, and copies that keep those layouts apart."""

from __future__ import annotations

from typing import Iterator, Sequence

from ..precision.casts import FULL, MARK, is_ours
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import is_volume
from .workaround import Fitting

__all__ = [
    *("blocked_inputs", "copied_outputs", "copied_reshapes", "copied_weights", "copies_around", "grouped_low_weights"),
    *("plain", "plain_inputs", "reshaped_volumes", "reshapes_before_convolutions", "small_block_convolutions"),
    *("unblocked_norms", "volume_norms"),
]

_RESHAPES = ("Reshape", "reshape", "Flatten", "flatten", "expand_dims")


def plain(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """Return a copy of ``entry`` in the plain layout, named after ``node``."""
    attrs = {"axis": "0", "begin": "0", "end": "None", MARK: "cast"}
    return Entry(Node("slice_axis", f"{node.name}_{role}", attrs, [entry]))


# -- 3-D convolutions -------------------------------------------------------------------------------


def _after_volumes(graph: Graph) -> Iterator[Node]:
    """Yield the 3-D convolutions and poolings, and all that depends on one."""
    volumes: set[Node] = set()
    for node in list(graph.nodes()):
        if any(e.node in volumes for e in node.inputs) or is_volume(node.attrs):
            volumes.add(node)
            yield node


def reshaped_volumes(fitting: Fitting) -> list[Node]:
    """Return the reshapes after a 3-D convolution."""
    return [node for node in _after_volumes(fitting.graph) if node.op in _RESHAPES]


def plain_inputs(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy what these nodes read. A slice of everything copies by MXNet's own means."""
    for node in nodes:
        node.inputs[0] = plain(node.inputs[0], node)


def reshapes_before_convolutions(fitting: Fitting) -> list[Node]:
    """Return the low reshapes that a low convolution depends on."""
    found: list[Node] = []
    needed = {node for node in fitting.low if node.op == "Convolution"}
    for node in reversed(list(fitting.graph.nodes())):
        if node in needed:
            needed.update(entry.node for entry in node.inputs)
            if node in fitting.low and node.op in ("Reshape", "reshape", "expand_dims"):
                found.append(node)
    return found[::-1]


def copied_reshapes(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy what these reshapes return: backward, the copy hands them a gradient in the plain layout."""
    fitting.graph.insert_behind(nodes, lambda node: plain(Entry(node), node, "flat"))


def volume_norms(fitting: Fitting) -> list[Node]:
    """Return the BatchNorms after a 3-D convolution."""
    return [node for node in _after_volumes(fitting.graph) if node.op == "BatchNorm"]


def copies_around(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy what these nodes read and what they return. A cast in between is a copy too."""
    fitting.graph.insert_behind(nodes, lambda norm: plain(Entry(norm), norm))
    for norm in nodes:
        norm.inputs[0] = plain(norm.inputs[0], norm, "given")


# -- Grouped convolutions ---------------------------------------------------------------------------


def grouped_low_weights(fitting: Fitting) -> list[Node]:
    """Return the grouped convolutions that read a cast of a variable."""

    def is_cast(node: Node) -> bool:
        return is_ours(node) and bool(node.inputs) and node.inputs[0].node.is_variable

    return [n for n in _grouped(fitting.graph) if is_cast(n.inputs[1].node)]


def copied_weights(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy the weight in front of its cast; the copy is plain. (``Cast`` would do too, but it truncates.)"""
    for cast in dict.fromkeys(node.inputs[1].node for node in nodes):
        weight = cast.inputs[0]
        cast.inputs[0] = Entry(Node("_copy", f"{weight.node.name}_plain", {MARK: "cast"}, [weight]))


def small_block_convolutions(fitting: Fitting) -> list[Node]:
    """Return the grouped convolutions with 4, 8, 12, 20... channels a group, which oneDNN computes in small blocks."""
    return [node for node in _grouped(fitting.graph) if _is_2d(node) and _has_small_blocks(node)]


def copied_outputs(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy what these convolutions read and what they return, the latter into the blocks that BatchNorm wants.

    A ResNeXt's block of 128 channels in 32 groups takes 17 ms instead of 280 (``scripts/dev.py bench layouts``).
    """

    def copied(node: Node) -> Entry:
        low = node in fitting.low
        fits = int(node.attrs["num_filter"]) % (16 if low else 8) == 0
        dtype = fitting.casted.compute if low else FULL
        return _in_blocks(Entry(node), node, node.name, dtype) if fits else plain(Entry(node), node)

    fitting.graph.insert_behind(nodes, copied)
    for node in nodes:
        node.inputs[0] = plain(node.inputs[0], node, "given")


def _grouped(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.op == "Convolution" and n.attrs.get("num_group", "1") != "1"]


def _has_small_blocks(node: Node) -> bool:
    groups = int(node.attrs.get("num_group", "1"))
    each = int(node.attrs["num_filter"]) // groups
    return groups > 1 and each % 4 == 0 and each % 16 != 0


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def unblocked_norms(fitting: Fitting) -> list[Node]:
    """Return the BatchNorms that read the rounded output of a convolution: casts leave the plain layout."""
    norms = (n for n in fitting.graph.nodes() if n.op == "BatchNorm" and n.attrs.get("axis", "1") == "1")
    return [norm for norm in norms if _convolution_before(norm) is not None]


def blocked_inputs(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Copy what a BatchNorm reads into oneDNN's blocked layout: a ResNet-50 step took 1.93 times FP32's, not 2.08."""
    for norm in nodes:
        convolution = _convolution_before(norm)
        if convolution is not None:
            norm.inputs[0] = _in_blocks(norm.inputs[0], convolution, norm.name)


def _convolution_before(norm: Node) -> Node | None:
    widened = norm.inputs[0]
    rounded = widened.node.inputs[0] if is_ours(widened.node) else widened
    source = rounded.node.inputs[0].node if is_ours(rounded.node) else None
    return source if source is not None and source.op == "Convolution" and _is_2d(source) else None


def _is_2d(convolution: Node) -> bool:
    attrs = convolution.attrs
    return attrs["kernel"].count(",") == 1 and attrs.get("layout", "NCHW") in ("NCHW", "None")


def _in_blocks(entry: Entry, convolution: Node, name: str, dtype: str = FULL) -> Entry:
    """Return a copy of a convolution's output in blocks of channels: a depthwise convolution with ones of ``dtype``.

    The ones have a shape of their own. Read off the convolution's weight, they would meet the layout in which FP32
    inference leaves a grouped weight: MXNet's ``slice`` then fails ("dimensions are invalid") or ends the process.
    """
    size = convolution.attrs["num_filter"]
    ones = Entry(Node("_ones", f"{name}_ones", {"shape": f"({size}, 1, 1, 1)", "dtype": FULL, MARK: "copy"}))
    if dtype != FULL:
        ones = Entry(Node("amp_cast", f"{name}_ones_low", {"dtype": dtype, MARK: "copy"}, [ones]))
    attrs = {"kernel": "(1, 1)", "num_filter": size, "num_group": size, "no_bias": "True", MARK: "copy"}
    return Entry(Node("Convolution", f"{name}_blocked", attrs, [entry, ones]))
