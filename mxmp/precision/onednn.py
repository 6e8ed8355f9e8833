"""Graphs as oneDNN's CPU kernels want them, in layout and rounded."""

from __future__ import annotations

import re
from typing import Collection, Iterable, Iterator

from .casts import FULL, MARK, is_ours, replace_operator
from .graph import Entry, Graph, Node
from .rules import is_volume

__all__ = [
    "blocked_batch_norms",
    "blocked_grouped_convolutions",
    "bound_in_two",
    "plain_grouped_weights",
    "plain_volume_norms",
    "plain_volumes",
    "round_bfloat16",
]

_RESHAPES = ("Reshape", "reshape", "Flatten", "flatten", "expand_dims")


def plain_volumes(graph: Graph) -> None:
    """A plain copy of what a 3-D convolution made in front of its bfloat16 reshapes, in place.

    MXNet's oneDNN reshape has no reorder from the blocked 3-D layout in bfloat16 ("could not create a
    primitive descriptor for a reorder primitive"). A slice of everything copies by MXNet's own means.
    """
    for node in _behind_volumes(graph):
        if node.op in _RESHAPES:
            node.inputs[0] = _plain(node.inputs[0], node)


def plain_volume_norms(graph: Graph) -> None:
    """Plain copies around a BatchNorm behind a 3-D convolution, in place.

    Its backward takes no blocked 3-D layout, of its input or of its gradient: MXNet's own FP32 fails on such networks
    in training ("Check failed: !is_view"). A cast in between is a copy too.
    """
    norms = [node for node in _behind_volumes(graph) if node.op == "BatchNorm"]
    graph.insert_behind(norms, lambda norm: _plain(Entry(norm), norm))
    for norm in norms:
        norm.inputs[0] = _plain(norm.inputs[0], norm, "given")


def _behind_volumes(graph: Graph) -> Iterator[Node]:
    """Three-dimensional convolutions and poolings, and all that depends on one."""
    volumes: set[Node] = set()
    for node in list(graph.nodes()):
        if any(e.node in volumes for e in node.inputs) or is_volume(node.attrs):
            volumes.add(node)
            yield node


def _plain(entry: Entry, node: Node, role: str = "plain") -> Entry:
    """A copy in the plain layout."""
    attrs = {"axis": "0", "begin": "0", "end": "None", MARK: "cast"}
    return Entry(Node("slice_axis", f"{node.name}_{role}", attrs, [entry]))


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


def bound_in_two(nodes: Iterable[Node]) -> None:
    """Compute FP32 ``clip`` (ReLU6) as the smaller of the larger, in place.

    The same values (but for the sign of a zero) and, of finite gradients, the same gradients, bounds included:
    clip's own kernel branches for every element, these two do not. Forward and backward of 4.8 million values, casts
    from and to bfloat16 included: 57 ms before, 16 after, and 180 for clip's bfloat16 kernel (one core of a Zen 5).

    Not behind a cast, a plain copy comes first, as clip makes one: the gradient would keep the layout of what reads
    the clipped values, and BatchNorm's backward falls back to oneDNN's reference kernel where that is not its own
    (a depthwise convolution behind a pointwise one: 100 ms instead of 0.5).
    """
    for node in nodes:
        low, high = (node.attrs.get(bound, "") for bound in ("a_min", "a_max"))
        if node.op == "clip" and _is_plain(low) and _is_plain(high) and float(low) <= float(high):
            given = node.inputs[0] if is_ours(node.inputs[0].node) else _plain(node.inputs[0], node)
            larger = Node("_maximum_scalar", f"{node.name}_larger", {"scalar": low, MARK: "copy"}, [given])
            replace_operator(node, "_minimum_scalar", scalar=high)
            node.inputs[0] = Entry(larger)


def _is_plain(number: str) -> bool:
    """Whether every parser reads the same FP32 value."""
    return re.fullmatch(r"-?\d{1,6}(\.(0|5|25|75)0*)?", number) is not None


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


def blocked_grouped_convolutions(graph: Graph, low: Collection[Node]) -> None:
    """Keep the layout of grouped convolutions to themselves, in place; ``low``: those that compute in bfloat16.

    With 4, 8, 12, 20... channels a group oneDNN computes in blocks of 4 or 8 channels, for which BatchNorm has its
    reference kernel only: the one before them backward, the one behind them both ways. A ResNeXt's block of 128
    channels in 32 groups takes 17 ms instead of 280 (``scripts/bench_layouts.py``).
    """

    def copied(node: Node) -> Entry:
        channels = int(node.attrs["num_filter"])
        whole = channels % (16 if node in low else 8) == 0
        dtype = "bfloat16" if node in low else FULL
        return _in_blocks(Entry(node), node, node.name, dtype) if whole else _plain(Entry(node), node)

    convolutions = [n for n in graph.nodes() if n.op == "Convolution" and _is_2d(n) and _has_small_blocks(n)]
    graph.insert_behind(convolutions, copied)
    for node in convolutions:
        node.inputs[0] = _plain(node.inputs[0], node, "given")


def _has_small_blocks(node: Node) -> bool:
    groups = int(node.attrs.get("num_group", "1"))
    each = int(node.attrs["num_filter"]) // groups
    return groups > 1 and each % 4 == 0 and each % 16 != 0


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
    if source is not None and source.op == "Convolution" and _is_2d(source):
        norm.inputs[0] = _in_blocks(widened, source, norm.name)


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
