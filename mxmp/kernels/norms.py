"""BatchNorm between a cast to FP32 and one to float16: cuDNN has one kernel for the three, and emulation rounds as it.

cuDNN's BatchNorm reads float16, computes in FP32 with FP32 parameters, and rounds its output once.
"""

from __future__ import annotations

from typing import Sequence

from ..precision.casts import APART, FULL, MARK, is_ours
from ..precision.graph import Entry, Node
from ..precision.rules import RULES, Kind, missing_kernel
from .workaround import Fitting

__all__ = ["drop_casts", "norms_between_casts", "norms_sharing_casts", "separate_casts"]


def norms_between_casts(fitting: Fitting) -> list[Node]:
    """Return the BatchNorms that one cuDNN kernel can compute together with the casts around them.

    The data of such a BatchNorm comes through a cast to FP32 that mxmp inserted, and at least one reader of its output
    is a cast to float16. BatchNorms for which cuDNN has no such kernel are left out, and those whose output is an
    output of the graph. None are returned where the user's policy sets ``norm``.
    """
    if fitting.casted.norm is not None:
        return []
    readers, heads = fitting.graph.consumers(), set(fitting.graph.heads)

    def is_between(node: Node) -> bool:
        """Return True for a BatchNorm between such casts for which a GPU has a float16 kernel."""
        if missing_kernel(node.op, node.attrs, "float16", "gpu") or Entry(node) in heads:
            return False
        users = (user for user, _ in readers.get(Entry(node), ()))
        return _casts_to(node.inputs[0].node, FULL) and any(_casts_to(user, "float16") for user in users)

    norms = (node for node in fitting.casted.source if node.op in RULES and RULES[node.op].kind is Kind.NORM)
    return [node for node in norms if is_between(node)]


def norms_sharing_casts(fitting: Fitting) -> list[Node]:
    """Return the BatchNorms of ``norms_between_casts`` that FP32 operators use too.

    Either another operator reads the same cast to FP32 as the BatchNorm, or something else than a cast to float16
    reads its output.
    """
    readers = fitting.graph.consumers()
    return [
        node
        for node in norms_between_casts(fitting)
        if len(readers[node.inputs[0]]) > 1 or not all(_casts_to(user, "float16") for user, _ in readers[Entry(node)])
    ]


def separate_casts(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Give each BatchNorm in ``nodes`` casts that round what cuDNN's kernel rounds, in place.

    Each BatchNorm reads a new cast to FP32 that no other operator reads, so its gradient is rounded to float16 before
    MXNet sums it with other gradients. Readers of its FP32 output read the float16 output, cast to FP32, instead.
    """
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


def drop_casts(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let each BatchNorm in ``nodes`` read and return float16: take out the casts before and after it, in place.

    On a GPU, cuDNN's kernel then casts. gamma, beta and the running statistics stay FP32.
    """
    separate_casts(fitting, nodes)
    readers = fitting.graph.consumers()
    for node in nodes:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        for cast, _ in readers[Entry(node)]:
            for user, position in readers[Entry(cast)]:
                user.inputs[position] = Entry(node)


def _casts_to(node: Node, dtype: str) -> bool:
    """Return True for a ``Cast`` to ``dtype`` that mxmp inserted."""
    return is_ours(node) and node.op == "Cast" and node.attrs["dtype"] == dtype
