"""Rewrites of bfloat16 graphs on a CPU where MXNet's kernels truncate, lose gradients or sum them in bfloat16."""

from __future__ import annotations

import re

from ..precision.casts import APART, LowGraph, inserted, is_ours, replace_operator
from ..precision.graph import Entry, Node
from .layouts import is_cast_of_variable, plain_copy


def use_amp_cast(fitted: LowGraph) -> list[Node]:
    """Turn each ``Cast`` by mxmp into an ``amp_cast``, which rounds to nearest, in place; return the casts."""
    casts = [node for node in fitted.graph.nodes() if is_ours(node)]
    for node in casts:
        node.op = "amp_cast"
    return casts


def replace_truncating_operators(fitted: LowGraph) -> list[Node]:
    """Turn bfloat16 ``sigmoid``, ``tanh`` and ``elemwise_sub`` into operators that round; return these nodes."""
    operators = [node for node in fitted.low if node.op in ("sigmoid", "tanh", "elemwise_sub")]
    for node in operators:
        if node.op == "elemwise_sub":
            replace_operator(node, "elemwise_add")
            node.rewire(1, inserted("negative", f"{node.name}_negated", [node.inputs[1]]))
        else:
            replace_operator(node, "Activation", act_type=node.op)
    return operators


def clip_by_two_bounds(fitted: LowGraph) -> list[Node]:
    """Compute each FP32 ``clip`` as a minimum of a maximum, which is faster; return the ``clip`` nodes."""

    def is_bounded(node: Node) -> bool:
        low, high = (node.attrs.get(bound, "") for bound in ("a_min", "a_max"))
        # The three operators might round other bounds differently.
        return _is_exact(low) and _is_exact(high) and float(low) <= float(high)

    # Values and finite gradients stay the same, but for the sign of a zero. Forward and backward of 4.8 million values
    # with casts: 57 ms with clip, 16 after the rewrite, 180 with clip's bfloat16 kernel (one core of a Zen 5).
    full = [node for node in fitted.source if node not in fitted.low]
    clips = [node for node in full if node.op == "clip" and is_bounded(node)]
    for node in clips:
        # The copy sends back a plain gradient, as clip does. In the blocks of the clip's reader, a BatchNorm in front
        # would need oneDNN's reference kernel (between a pointwise and a depthwise convolution: 100 ms instead of 0.5).
        source = node.inputs[0] if is_ours(node.inputs[0].node) else plain_copy(node.inputs[0], node)
        node.rewire(0, inserted("_maximum_scalar", f"{node.name}_larger", [source], scalar=node.attrs["a_min"]))
        replace_operator(node, "_minimum_scalar", scalar=node.attrs["a_max"])
    return clips


def _is_exact(number: str) -> bool:
    """Return True for decimal digits with at most quarters behind the point, such as ``"-0.25"``: FP32 holds these."""
    return re.fullmatch(r"-?\d{1,6}(\.(0|5|25|75)0*)?", number) is not None


# How many gradients may be summed in bfloat16. 4 take at most 3 roundings; a sum of 1,000 gradients of 1 stops at 256.
# MXNet sums the gradients of several casts of an FP32 variable in FP32. An unrolled weight has a reader per time step.
_SUMMED_LOW = 4


def split_shared_casts(fitted: LowGraph) -> list[Node]:
    """Let each cast of a variable have at most four readers, and others read new casts; return those that had more."""
    readers = fitted.graph.consumers()
    shared = [e for e, users in readers.items() if len(users) > _SUMMED_LOW and is_cast_of_variable(e.node)]
    for entry in shared:
        cast = entry.node
        for number, (node, position) in enumerate(readers[entry][_SUMMED_LOW:]):
            if number % _SUMMED_LOW == 0:
                name = f"{cast.name}_{number // _SUMMED_LOW + 1}"
                another = Entry(Node(cast.op, name, {**cast.attrs, APART: name}, list(cast.inputs)))
            node.rewire(position, another)
    return [entry.node for entry in shared]


def copy_before_casts(fitted: LowGraph) -> list[Node]:
    """Let each ``amp_cast`` whose gradient MXNet may add to others read a copy of its input; return the casts."""
    readers = fitted.graph.consumers()

    def loses(node: Node) -> bool:
        return fitted.may_be_added_to(node.inputs[0], len(readers[node.inputs[0]]))

    casts = [n for n in fitted.graph.nodes() if n.op == "amp_cast" and is_ours(n) and n.inputs and loses(n)]
    copies: dict[tuple[Entry, str], Entry] = {}
    for node in casts:
        entry = node.inputs[0]
        key = (entry, node.attrs.get(APART, ""))
        if key not in copies:
            # Casts of a tensor share a copy, but not those of split_shared_casts. A copy takes about 0.4 ns per
            # element.
            apart = {name: value for name, value in node.attrs.items() if name == APART}
            suffix = f"_{entry.index}" if entry.index else ""
            copies[key] = inserted("_copy", f"{entry.node.name}{suffix}_accumulated", [entry], **apart)
        node.rewire(0, copies[key])
    return casts
