"""Rewrites of bfloat16 graphs on a CPU where MXNet's kernels truncate, lose gradients or sum them in bfloat16."""

from __future__ import annotations

import re

from ..precision.casts import APART, inserted, is_ours, replace_operator
from ..precision.graph import Entry, Node
from .layouts import is_cast_of_variable, plain_copy
from .workaround import FittedGraph


def use_amp_cast(fitted: FittedGraph) -> list[Node]:
    """Turn each ``Cast`` between FP32 and bfloat16 that mxmp inserted into an ``amp_cast``, in place; return the casts.

    oneDNN computes ``amp_cast``: it rounds to nearest, and is faster. ``Cast`` to bfloat16 truncates.
    """
    casts = [node for node in fitted.graph.nodes() if is_ours(node)]
    for node in casts:
        node.op = "amp_cast"
    return casts


def replace_truncating_operators(fitted: FittedGraph) -> list[Node]:
    """Turn each bfloat16 ``sigmoid``, ``tanh`` and ``elemwise_sub`` into an operator that rounds; return these nodes.

    ``sigmoid`` and ``tanh`` become an ``Activation``. ``elemwise_sub`` of ``a`` and ``b`` becomes ``elemwise_add`` of
    ``a`` and a new node, ``-b``, which is exact. oneDNN computes ``Activation`` and ``elemwise_add``, and rounds to
    nearest; MXNet's kernels of the former operators truncate.
    """
    operators = [node for node in fitted.low if node.op in ("sigmoid", "tanh", "elemwise_sub")]
    for node in operators:
        if node.op == "elemwise_sub":
            replace_operator(node, "elemwise_add")
            node.inputs[1] = inserted("negative", f"{node.name}_negated", [node.inputs[1]])
        else:
            replace_operator(node, "Activation", act_type=node.op)
    return operators


def clip_by_two_bounds(fitted: FittedGraph) -> list[Node]:
    """Compute each FP32 ``clip(x, a_min, a_max)`` as ``minimum(maximum(x, a_min), a_max)``; return the ``clip`` nodes.

    Each of these nodes becomes the minimum, in place. This is faster: the kernel of ``clip`` branches for every
    element, those of minimum and maximum do not. Values stay the same, except for the sign of a zero; finite gradients
    stay the same, at the bounds too. A ``clip`` is left as it is if its lower bound is above the upper one, or if
    ``_is_exact`` is False for a bound, which the three operators might then round differently. Forward and backward of
    4.8 million values, casts from and to bfloat16 included, take 57 ms with ``clip``, 16 ms after the rewrite, and 180
    ms with clip's own bfloat16 kernel (one core of a Zen 5).

    If ``x`` is not the output of a node that mxmp inserted, such as a cast, the maximum reads a copy of ``x`` in the
    plain (row-major) layout, and so sends back a plain gradient, as ``clip`` does. Without the copy, the gradient would
    keep the blocked layout of the operator that reads the clipped values, and a BatchNorm in front of the clip with
    other blocks would compute its backward by oneDNN's slow reference kernel (between a pointwise and a depthwise
    convolution: 100 ms instead of 0.5).
    """

    def is_bounded(node: Node) -> bool:
        low, high = (node.attrs.get(bound, "") for bound in ("a_min", "a_max"))
        return _is_exact(low) and _is_exact(high) and float(low) <= float(high)

    full = [node for node in fitted.casted.source if node not in fitted.low]
    clips = [node for node in full if node.op == "clip" and is_bounded(node)]
    for node in clips:
        source = node.inputs[0] if is_ours(node.inputs[0].node) else plain_copy(node.inputs[0], node)
        node.inputs[0] = inserted("_maximum_scalar", f"{node.name}_larger", [source], scalar=node.attrs["a_min"])
        replace_operator(node, "_minimum_scalar", scalar=node.attrs["a_max"])
    return clips


def _is_exact(number: str) -> bool:
    """Return True for a decimal number such as ``"6"`` or ``"-0.25"`` that FP32 holds exactly.

    The number must have 1 to 6 digits before the point, and behind it nothing, .0, .25, .5 or .75, perhaps with more
    zeros. Returns False for any other text, such as ``""``, even if FP32 holds the number.
    """
    return re.fullmatch(r"-?\d{1,6}(\.(0|5|25|75)0*)?", number) is not None


# How many gradients may be summed in bfloat16. 4 take at most 3 roundings; a sum of 1,000 gradients of 1 stops at 256.
_SUMMED_LOW = 4


def split_shared_casts(fitted: FittedGraph) -> list[Node]:
    """Let each cast of a variable have at most four readers, in place: any others read new casts equal to it.

    A new cast has at most four readers too. Returns the casts that had more. MXNet sums the gradients of a tensor's
    readers in the tensor's dtype. It sums those of one cast's readers in bfloat16, which loses small summands of a long
    sum, but those of several casts of one FP32 variable in FP32. A weight of an unrolled recurrent network has as many
    readers as the sequence has time steps.
    """
    readers = fitted.graph.consumers()
    shared = [e for e, users in readers.items() if len(users) > _SUMMED_LOW and is_cast_of_variable(e.node)]
    for entry in shared:
        cast = entry.node
        for number, (node, position) in enumerate(readers[entry][_SUMMED_LOW:]):
            if number % _SUMMED_LOW == 0:
                name = f"{cast.name}_{number // _SUMMED_LOW + 1}"
                another = Entry(Node(cast.op, name, {**cast.attrs, APART: name}, list(cast.inputs)))
            node.inputs[position] = another
    return [entry.node for entry in shared]


def copy_before_casts(fitted: FittedGraph) -> list[Node]:
    """Let each ``amp_cast`` of mxmp whose gradient MXNet may add to others read a copy of its input; return the casts.

    The backward of ``amp_cast`` in oneDNN cannot add to a gradient (``grad_req="add"``), and leaves it as it was; the
    backward of a copy adds. ``FittedGraph.may_be_added_to`` says when MXNet may add. Casts of the same tensor share one
    copy, but those that ``split_shared_casts`` made have one each. A copy costs about 0.4 ns per element, forward and
    backward together.
    """
    readers = fitted.graph.consumers()

    def loses(node: Node) -> bool:
        return fitted.may_be_added_to(node.inputs[0], len(readers[node.inputs[0]]))

    casts = [n for n in fitted.graph.nodes() if n.op == "amp_cast" and is_ours(n) and n.inputs and loses(n)]
    copies: dict[tuple[Entry, str], Entry] = {}
    for node in casts:
        entry = node.inputs[0]
        key = (entry, node.attrs.get(APART, ""))
        if key not in copies:
            apart = {name: value for name, value in node.attrs.items() if name == APART}
            suffix = f"_{entry.index}" if entry.index else ""
            copies[key] = inserted("_copy", f"{entry.node.name}{suffix}_accumulated", [entry], **apart)
        node.inputs[0] = copies[key]
    return casts
