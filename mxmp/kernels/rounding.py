"""bfloat16 that rounds to nearest, where MXNet's own kernels truncate, lose gradients or sum them in bfloat16."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import APART, MARK, is_ours, replace_operator
from ..precision.graph import Entry, Node
from .layouts import plain
from .workaround import Fitting

__all__ = [
    *("copy_before_casts", "inserted_casts", "into_amp_casts", "into_bounds", "into_rounding_operators"),
    *("losing_casts", "shared_casts", "slow_clips", "split_shared_casts", "truncating_operators"),
]


def inserted_casts(fitting: Fitting) -> list[Node]:
    """Return the casts that mxmp inserted."""
    return [node for node in fitting.graph.nodes() if is_ours(node)]


def into_amp_casts(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Cast by ``amp_cast``, which oneDNN computes: it rounds, and is faster."""
    for node in nodes:
        node.op = "amp_cast"


def truncating_operators(fitting: Fitting) -> list[Node]:
    """Return the bfloat16 operators whose own kernel truncates and that one of oneDNN's can replace."""
    return [node for node in fitting.low if node.op in ("sigmoid", "tanh", "elemwise_sub")]


def into_rounding_operators(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute the same function by a kernel that rounds, forward and backward.

    ``sigmoid`` and ``tanh`` become ``Activation``; ``a - b`` becomes ``a + (-b)``, of which the negation is exact.
    """
    for node in nodes:
        if node.op == "elemwise_sub":
            right = Node("negative", f"{node.name}_negated", {MARK: "copy"}, [node.inputs[1]])
            replace_operator(node, "elemwise_add")
            node.inputs[1] = Entry(right)
        else:
            replace_operator(node, "Activation", act_type=node.op)


def slow_clips(fitting: Fitting) -> list[Node]:
    """Return the FP32 ``clip`` (ReLU6) whose bounds every parser reads as the same FP32 values."""

    def is_bounded(node: Node) -> bool:
        low, high = (node.attrs.get(bound, "") for bound in ("a_min", "a_max"))
        return _is_exact(low) and _is_exact(high) and float(low) <= float(high)

    full = [node for node in fitting.casted.source if node not in fitting.low]
    return [node for node in full if node.op == "clip" and is_bounded(node)]


def into_bounds(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute ``clip`` as the smaller of the larger.

    The values are the same (but for the sign of a zero) and, of finite gradients, the gradients too, at the bounds as
    well. ``clip``'s own kernel branches for every element, these two do not. Forward and backward of 4.8 million
    values, casts from and to bfloat16 included: 57 ms before, 16 after, and 180 for clip's bfloat16 kernel (one core of
    a Zen 5).

    Where the input is no cast, a plain copy comes first, as clip makes one. Otherwise the gradient keeps the layout of
    what reads the clipped values, and BatchNorm's backward falls back to oneDNN's reference kernel where that is not
    its own (a depthwise convolution after a pointwise one: 100 ms instead of 0.5).
    """
    for node in nodes:
        source = node.inputs[0] if is_ours(node.inputs[0].node) else plain(node.inputs[0], node)
        lower = {"scalar": node.attrs["a_min"], MARK: "copy"}
        larger = Node("_maximum_scalar", f"{node.name}_larger", lower, [source])
        replace_operator(node, "_minimum_scalar", scalar=node.attrs["a_max"])
        node.inputs[0] = Entry(larger)


def _is_exact(number: str) -> bool:
    return re.fullmatch(r"-?\d{1,6}(\.(0|5|25|75)0*)?", number) is not None


# A sum of 4 bfloat16 gradients is off by at most 3 roundings; one of 1,000 equal ones stops at 256.
_SUMMED_LOW = 4
# Half of MXNET_EXEC_INPLACE_GRAD_SUM_CAP, from which on MXNet adds gradients in place.
_ADDED_IN_PLACE = 4


def shared_casts(fitting: Fitting) -> list[Node]:
    """Return the casts of variables that more than four operators read."""
    return [
        entry.node
        for entry, users in fitting.graph.consumers().items()
        if len(users) > _SUMMED_LOW and _casts_a_variable(entry.node)
    ]


def split_shared_casts(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Add another cast of a variable for every fourth of its readers.

    MXNet sums the gradients of a tensor's readers in its dtype: those of one cast in bfloat16, those of several casts
    in FP32. A weight of an unrolled recurrent network has as many readers as there are steps.
    """
    readers = fitting.graph.consumers()
    for cast in nodes:
        entry = Entry(cast)
        for number, (node, position) in enumerate(readers[Entry(cast)][_SUMMED_LOW:]):
            if number % _SUMMED_LOW == 0:
                name = f"{cast.name}_{number // _SUMMED_LOW + 1}"
                entry = Entry(Node(cast.op, name, {**cast.attrs, APART: name}, list(cast.inputs)))
            node.inputs[position] = entry


def _casts_a_variable(node: Node) -> bool:
    return is_ours(node) and bool(node.inputs) and node.inputs[0].node.is_variable


def losing_casts(fitting: Fitting) -> list[Node]:
    """Return the ``amp_cast`` whose gradient MXNet may add to what is there.

    Those are casts of variables with ``grad_req="add"``, and of what many operators read, where MXNet adds the
    gradients one by one in place.
    """
    readers = fitting.graph.consumers()

    def loses(node: Node) -> bool:
        entry = node.inputs[0]
        requested = fitting.grad_req.get(entry.node.name, "add") if entry.node.is_variable else "write"
        return requested == "add" or len(readers[entry]) >= _ADDED_IN_PLACE

    return [n for n in fitting.graph.nodes() if n.op == "amp_cast" and is_ours(n) and n.inputs and loses(n)]


def copy_before_casts(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Put a copy between a tensor and its casts.

    oneDNN's backward of ``amp_cast`` ignores "add" and leaves the gradient as it was. The copy's does not; it costs
    about 0.4 ns per element, forward and backward, so only casts that need it get one.
    """
    copies: dict[tuple[Entry, str], Entry] = {}
    for node in nodes:
        entry = node.inputs[0]
        key = (entry, node.attrs.get(APART, ""))
        if key not in copies:
            attrs = {name: value for name, value in node.attrs.items() if name == APART}
            suffix = f"_{entry.index}" if entry.index else ""
            name = f"{entry.node.name}{suffix}_accumulated"
            copies[key] = Entry(Node("_copy", name, {**attrs, MARK: "cast"}, [entry]))
        node.inputs[0] = copies[key]
