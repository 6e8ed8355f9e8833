"""BatchNorm between a cast to FP32 and one to float16: cuDNN has one kernel for the three, and emulation rounds as it.

cuDNN's BatchNorm reads float16, computes in FP32 with FP32 parameters, and rounds its output once.
"""

from __future__ import annotations

from ..precision.casts import APART, FULL, casts_to, inserted
from ..precision.graph import Entry, Node
from ..precision.rules import RULES, Kind, missing_kernel
from .workaround import FittedGraph


def _norms_between_casts(fitted: FittedGraph) -> list[Node]:
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


def separate_casts(fitted: FittedGraph) -> list[Node]:
    """Let the casts around each BatchNorm round all that cuDNN's kernel rounds; return the norms that needed it.

    Of the norms between casts (``_norms_between_casts``), each that needs it gets its own cast to FP32, in place: where
    another operator reads the same cast, the gradients of both would be summed before they are rounded. FP32 operators
    that read its output directly now read it rounded to float16 and cast back to FP32. The emulation on a CPU then
    gives a GPU's numbers; on a GPU, the kernel can then replace the casts (``drop_casts``).
    """
    readers = fitted.graph.consumers()
    norms = [
        node
        for node in _norms_between_casts(fitted)
        if len(readers[node.inputs[0]]) > 1 or not all(casts_to(user, "float16") for user, _ in readers[Entry(node)])
    ]
    for node in norms:
        shared = node.inputs[0].node
        name = f"{shared.name}_for_{node.name}"
        node.inputs[0] = inserted("Cast", name, shared.inputs, dtype=FULL, **{APART: name})
        users = readers[Entry(node)]
        rounded = next(user for user, _ in users if casts_to(user, "float16"))
        widened = inserted("Cast", f"{node.name}_to_{FULL}", [Entry(rounded)], dtype=FULL)
        for user, position in users:
            if not casts_to(user, "float16"):
                user.inputs[position] = widened
    return norms


def drop_casts(fitted: FittedGraph) -> list[Node]:
    """Take out the casts before and after each BatchNorm, so that it reads and returns float16; return these norms.

    They are those of ``_norms_between_casts``. FP32 readers of the output keep a cast. This is for a GPU, where cuDNN's
    float16 kernel itself computes in FP32; gamma, beta and the running statistics stay FP32.
    """
    norms = _norms_between_casts(fitted)
    separate_casts(fitted)
    readers = fitted.graph.consumers()
    for node in norms:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        for cast, _ in readers[Entry(node)]:
            for user, position in readers[Entry(cast)]:
                user.inputs[position] = Entry(node)
    return norms
