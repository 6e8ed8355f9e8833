"""Rewrites of bfloat16 graphs on a CPU where MXNet's kernels truncate, lose gradients or sum them in bfloat16."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import APART, MARK, is_ours, replace_operator
from ..precision.graph import Entry, Node
from .layouts import is_cast_of_variable, plain_copy
from .workaround import FittedGraph

__all__ = [
    *("casts_losing_gradients", "clip_by_two_bounds", "copy_before_casts", "inserted_casts"),
    *("replace_truncating_operators", "shared_casts", "slow_clips", "split_shared_casts", "truncating_operators"),
    "use_amp_cast",
]


def inserted_casts(fitted: FittedGraph) -> list[Node]:
    """Return the casts between FP32 and bfloat16 that mxmp inserted into the converted graph of ``fitted``.

    They are ``Cast`` operators, which truncate to bfloat16; ``use_amp_cast`` changes them.
    """
    return [node for node in fitted.graph.nodes() if is_ours(node)]


def use_amp_cast(fitted: FittedGraph, casts: Sequence[Node]) -> None:
    """Make each operator in ``casts``, a ``Cast`` to or from bfloat16, an ``amp_cast``, in place.

    oneDNN computes ``amp_cast``: it rounds to nearest, and is faster. ``Cast`` to bfloat16 truncates.
    """
    for node in casts:
        node.op = "amp_cast"


def truncating_operators(fitted: FittedGraph) -> list[Node]:
    """Return the ``sigmoid``, ``tanh`` and ``elemwise_sub`` operators that compute in bfloat16.

    MXNet's kernels for them truncate results to bfloat16 instead of rounding to nearest, so magnitudes shrink.
    """
    return [node for node in fitted.low if node.op in ("sigmoid", "tanh", "elemwise_sub")]


def replace_truncating_operators(fitted: FittedGraph, operators: Sequence[Node]) -> None:
    """Replace each of ``operators``, in place, by one of the same function whose oneDNN kernel rounds to nearest.

    They compute in bfloat16, by kernels that truncate. ``sigmoid`` and ``tanh`` become an ``Activation``; ``a - b``
    becomes ``a + (-b)``, where the negation is exact.
    """
    for node in operators:
        if node.op == "elemwise_sub":
            right = Node("negative", f"{node.name}_negated", {MARK: "copy"}, [node.inputs[1]])
            replace_operator(node, "elemwise_add")
            node.inputs[1] = Entry(right)
        else:
            replace_operator(node, "Activation", act_type=node.op)


def slow_clips(fitted: FittedGraph) -> list[Node]:
    """Return the ``clip`` operators (such as ReLU6) that compute in FP32 and can be split into a maximum and a minimum.

    The CPU kernel of ``clip`` is slow, as it branches for each element. A clip can be split if both bounds are decimal
    numbers such as ``"6"`` and ``"-0.25"``, which FP32 holds exactly (``_is_exact``), so that clip, maximum and minimum
    read them alike. The lower bound must not be above the upper one.
    """

    def is_bounded(node: Node) -> bool:
        low, high = (node.attrs.get(bound, "") for bound in ("a_min", "a_max"))
        return _is_exact(low) and _is_exact(high) and float(low) <= float(high)

    full = [node for node in fitted.casted.source if node not in fitted.low]
    return [node for node in full if node.op == "clip" and is_bounded(node)]


def clip_by_two_bounds(fitted: FittedGraph, clips: Sequence[Node]) -> None:
    """Replace each ``clip(x, a_min, a_max)`` by ``minimum(maximum(x, a_min), a_max)``, in place, which is faster.

    Values are the same, except for the sign of a zero. Finite gradients are the same, at the bounds too. The kernel of
    ``clip`` branches for every element; those of minimum and maximum do not. Forward and backward of 4.8 million
    values, casts from and to bfloat16 included, take 57 ms with ``clip``, 16 ms after the rewrite, and 180 ms with
    clip's own bfloat16 kernel (one core of a Zen 5).

    If ``x`` is not the output of a node that mxmp inserted, such as a cast, the maximum reads a copy of ``x`` in the
    plain (row-major) layout, and so sends back a plain gradient, as ``clip`` does. Without the copy, the gradient would
    keep the blocked layout of the operator that reads the clipped values, and a BatchNorm in front of the clip with
    other blocks would compute its backward by oneDNN's slow reference kernel (between a pointwise and a depthwise
    convolution: 100 ms instead of 0.5).
    """
    for node in clips:
        source = node.inputs[0] if is_ours(node.inputs[0].node) else plain_copy(node.inputs[0], node)
        lower = {"scalar": node.attrs["a_min"], MARK: "copy"}
        larger = Node("_maximum_scalar", f"{node.name}_larger", lower, [source])
        replace_operator(node, "_minimum_scalar", scalar=node.attrs["a_max"])
        node.inputs[0] = Entry(larger)


def _is_exact(number: str) -> bool:
    """Return True for a decimal number such as ``"6"`` or ``"-0.25"`` that FP32 holds exactly.

    It has 1 to 6 digits before the point, and behind it nothing, .0, .25, .5 or .75, perhaps with more zeros. False for
    ``""``.
    """
    return re.fullmatch(r"-?\d{1,6}(\.(0|5|25|75)0*)?", number) is not None


# How many gradients may be summed in bfloat16. 4 take at most 3 roundings; a sum of 1,000 gradients of 1 stops at 256.
_SUMMED_LOW = 4
# MXNet adds the gradients of a tensor's readers in place if there are MXNET_EXEC_INPLACE_GRAD_SUM_CAP (8) or more. This
# is half of it.
_ADDED_IN_PLACE = 4


def shared_casts(fitted: FittedGraph) -> list[Node]:
    """Return mxmp's casts of variables, such as weights, whose output more than four operators read.

    MXNet sums the gradients of a cast's readers in bfloat16, and so long a sum loses small summands.
    """
    return [
        entry.node
        for entry, users in fitted.graph.consumers().items()
        if len(users) > _SUMMED_LOW and is_cast_of_variable(entry.node)
    ]


def split_shared_casts(fitted: FittedGraph, casts: Sequence[Node]) -> None:
    """Add casts beside each of ``casts``, of the same variable, until each cast has at most four readers, in place.

    MXNet sums the gradients of a tensor's readers in the tensor's dtype: those of the readers of one cast in bfloat16,
    those of several casts of one FP32 variable in FP32. A weight of an unrolled recurrent network has as many readers
    as the sequence has time steps.
    """
    readers = fitted.graph.consumers()
    for cast in casts:
        entry = Entry(cast)
        for number, (node, position) in enumerate(readers[Entry(cast)][_SUMMED_LOW:]):
            if number % _SUMMED_LOW == 0:
                name = f"{cast.name}_{number // _SUMMED_LOW + 1}"
                entry = Entry(Node(cast.op, name, {**cast.attrs, APART: name}, list(cast.inputs)))
            node.inputs[position] = entry


def casts_losing_gradients(fitted: FittedGraph) -> list[Node]:
    """Return mxmp's ``amp_cast`` nodes whose gradient may be lost, because MXNet may add it to other gradients.

    The backward of ``amp_cast`` cannot add to a gradient array (``grad_req="add"``): it leaves the array as it was.
    Returned are the casts of variables whose ``grad_req`` is "add" or not known, and of tensors, variables too, with
    four or more readers, whose gradients MXNet may add in place, one after another.
    """
    readers = fitted.graph.consumers()

    def loses(node: Node) -> bool:
        entry = node.inputs[0]
        requested = fitted.grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
        return requested == "add" or len(readers[entry]) >= _ADDED_IN_PLACE

    return [n for n in fitted.graph.nodes() if n.op == "amp_cast" and is_ours(n) and n.inputs and loses(n)]


def copy_before_casts(fitted: FittedGraph, casts: Sequence[Node]) -> None:
    """Let each of ``casts`` read a copy of its input, in place; casts of the same tensor share one copy.

    The backward of ``amp_cast`` in oneDNN ignores ``grad_req="add"`` and leaves the gradient as it was; the backward of
    a copy adds. A copy costs about 0.4 ns per element, forward and backward together.
    """
    copies: dict[tuple[Entry, str], Entry] = {}
    for node in casts:
        entry = node.inputs[0]
        key = (entry, node.attrs.get(APART, ""))
        if key not in copies:
            attrs = {name: value for name, value in node.attrs.items() if name == APART}
            suffix = f"_{entry.index}" if entry.index else ""
            name = f"{entry.node.name}{suffix}_accumulated"
            copies[key] = Entry(Node("_copy", name, {**attrs, MARK: "cast"}, [entry]))
        node.inputs[0] = copies[key]
