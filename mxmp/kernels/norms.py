"""BatchNorm between casts, which cuDNN computes in one kernel: it reads float16, computes in FP32 and rounds once."""

from __future__ import annotations

from typing import Sequence

from ..precision.casts import APART, FULL, MARK, is_ours
from ..precision.graph import Entry, Node
from ..precision.rules import RULES, Kind, missing_kernel
from .workaround import Fitting

__all__ = ["as_in_kernels", "between_casts", "into_kernels", "sharing_casts"]


def between_casts(fitting: Fitting) -> list[Node]:
    """Return the norms that read a cast of ours to FP32, and that one to float16 reads, where cuDNN has the kernel."""
    if fitting.casted.norm is not None:
        return []
    readers, heads = fitting.graph.consumers(), set(fitting.graph.heads)

    def is_between(node: Node) -> bool:
        if missing_kernel(node.op, node.attrs, "float16", "gpu") or Entry(node) in heads:
            return False
        users = (user for user, _ in readers.get(Entry(node), ()))
        return _casts_to(node.inputs[0].node, FULL) and any(_casts_to(user, "float16") for user in users)

    norms = (node for node in fitting.casted.source if node.op in RULES and RULES[node.op].kind is Kind.NORM)
    return [node for node in norms if is_between(node)]


def sharing_casts(fitting: Fitting) -> list[Node]:
    """Return those of them that share the cast in front with another operator, or that FP32 operators read too."""
    readers = fitting.graph.consumers()
    return [
        node
        for node in between_casts(fitting)
        if len(readers[node.inputs[0]]) > 1 or not all(_casts_to(user, "float16") for user, _ in readers[Entry(node)])
    ]


def as_in_kernels(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Give each norm a cast of its own, which rounds its gradient before sums, and all readers the rounded output."""
    readers = fitting.graph.consumers()
    for node in nodes:
        shared = node.inputs[0].node
        name = f"{shared.name}_for_{node.name}"
        node.inputs[0] = Entry(Node("Cast", name, {**shared.attrs, APART: name}, list(shared.inputs)))
        users = readers[Entry(node)]
        rounded = next(user for user, _ in users if _casts_to(user, "float16"))
        widened = Node("Cast", f"{node.name}_to_{FULL}", {"dtype": FULL, MARK: "cast"}, [Entry(rounded)])
        for user, position in users:
            if not _casts_to(user, "float16"):
                user.inputs[position] = Entry(widened)


def into_kernels(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Take out the casts around these norms."""
    as_in_kernels(fitting, nodes)
    readers = fitting.graph.consumers()
    for node in nodes:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        for cast, _ in readers[Entry(node)]:
            for user, position in readers[Entry(cast)]:
                user.inputs[position] = Entry(node)


def _casts_to(node: Node, dtype: str) -> bool:
    return is_ours(node) and node.op == "Cast" and node.attrs["dtype"] == dtype
