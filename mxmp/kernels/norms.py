"""BatchNorm between a cast to FP32 and one to float16: cuDNN has one kernel for the three, and emulation rounds as it.

cuDNN's BatchNorm reads float16, computes in FP32 with FP32 parameters, and rounds its output once.
"""

from __future__ import annotations

from typing import Sequence

from ..precision.casts import APART, FULL, MARK, casts_to
from ..precision.graph import Entry, Node
from ..precision.rules import RULES, Kind, missing_kernel
from .workaround import FittedGraph

__all__ = ["drop_casts", "norms_between_casts", "norms_sharing_casts", "separate_casts"]


def norms_between_casts(fitted: FittedGraph) -> list[Node]:
    """Return the BatchNorms between casts by mxmp: they read a cast to FP32, and a cast to float16 reads their output.

    One float16 kernel of cuDNN does the same as such a cast, BatchNorm and cast together. Other operators may read the
    output too. Left out are BatchNorms for which a GPU has no such kernel, and those whose output is an output of the
    graph. The list is empty if the user's policy sets ``norm``, as then the user has decided whether there are casts.
    """
    if fitted.casted.norm is not None:
        return []
    readers, heads = fitted.graph.consumers(), set(fitted.graph.heads)

    def is_between(node: Node) -> bool:
        if missing_kernel(node.op, node.attrs, "float16", "gpu") or Entry(node) in heads:
            return False
        users = (user for user, _ in readers.get(Entry(node), ()))
        return casts_to(node.inputs[0].node, FULL) and any(casts_to(user, "float16") for user in users)

    norms = (node for node in fitted.casted.source if node.op in RULES and RULES[node.op].kind is Kind.NORM)
    return [node for node in norms if is_between(node)]


def norms_sharing_casts(fitted: FittedGraph) -> list[Node]:
    """Return those BatchNorms of ``norms_between_casts`` whose casts do not round all that cuDNN's kernel rounds.

    The emulation of float16 on a CPU must round as that kernel does: the BatchNorm's output for every reader, and the
    gradient of its data before MXNet sums it with others. The casts do not, where another operator reads the same cast
    to FP32, so that the gradients of both are summed before they are rounded; or where an FP32 operator reads the
    BatchNorm's output directly.
    """
    readers = fitted.graph.consumers()
    return [
        node
        for node in norms_between_casts(fitted)
        if len(readers[node.inputs[0]]) > 1 or not all(casts_to(user, "float16") for user, _ in readers[Entry(node)])
    ]


def separate_casts(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Rewrite the casts around each BatchNorm in ``norms``, in place, so that they round what cuDNN's kernel rounds.

    The emulation on a CPU then gives a GPU's numbers; on a GPU, the kernel can then replace them (``drop_casts``). Each
    BatchNorm gets its own cast to FP32, so the gradient of its data is rounded to float16 before MXNet sums it with
    others. FP32 operators that read its output now read it rounded to float16 and cast back to FP32.
    """
    readers = fitted.graph.consumers()
    for node in norms:
        shared = node.inputs[0].node
        name = f"{shared.name}_for_{node.name}"
        node.inputs[0] = Entry(Node("Cast", name, {**shared.attrs, APART: name}, list(shared.inputs)))
        users = readers[Entry(node)]
        rounded = next(user for user, _ in users if casts_to(user, "float16"))
        widened = Node("Cast", f"{node.name}_to_{FULL}", {"dtype": FULL, MARK: "cast"}, [Entry(rounded)])
        for user, position in users:
            if not casts_to(user, "float16"):
                user.inputs[position] = Entry(widened)


def drop_casts(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Take out the casts before and after each BatchNorm in ``norms``, in place, so that it reads and returns float16.

    FP32 readers of the output keep a cast. This is for a GPU, where cuDNN's float16 kernel itself computes in FP32;
    gamma, beta and the running statistics stay FP32.
    """
    separate_casts(fitted, norms)
    readers = fitted.graph.consumers()
    for node in norms:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        for cast, _ in readers[Entry(node)]:
            for user, position in readers[Entry(cast)]:
                user.inputs[position] = Entry(node)
