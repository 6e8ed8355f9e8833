"""BatchNorm between a cast to FP32 and one to float16: cuDNN has one kernel for the three, and emulation rounds alike.

cuDNN's BatchNorm reads float16, computes in FP32 with FP32 parameters, and rounds its output once.
"""

from __future__ import annotations

from ..policy import Policy
from ..precision.casts import APART, FULL, casts_to, inserted, skip_casts
from ..precision.graph import Entry, Graph, Node
from ..precision.rules import RULES, Kind, leaves_cudnn
from .workaround import FittedGraph


def _norms_between_casts(fitted: FittedGraph) -> list[Node]:
    """Return the BatchNorms between casts by mxmp: they read a cast to FP32, and a cast to float16 reads their output.

    One float16 kernel of cuDNN does the same as the cast, the BatchNorm and the other cast together. Further operators
    may read the output too. Left out are BatchNorms with ``use_global_stats`` or ``cudnn_off``, which a GPU computes
    without cuDNN, and those whose output is an output of the graph. The list is empty if the user's policy sets
    ``norm``, as then the user has decided whether there are casts.
    """
    if fitted.casted.norm is not None:
        return []
    readers = fitted.graph.consumers()

    def is_between(node: Node) -> bool:
        if not _may_be_between(node, fitted.graph):
            return False
        users = (user for user, _ in readers.get(Entry(node), ()))
        return casts_to(node.inputs[0].node, FULL) and any(casts_to(user, "float16") for user in users)

    return [node for node in fitted.casted.source if _is_norm(node) and is_between(node)]


def casts_inside(graph: Graph, policy: Policy, device: str) -> list[Node]:
    """Return the BatchNorms of an FP32 graph around which ``drop_casts`` takes the casts out, if a plan has them there.

    It does not if the environment leaves this workaround out.
    """
    if device != "gpu" or policy.compute != "float16" or policy.norm is not None:
        return []
    return [node for node in graph.nodes() if _is_norm(node) and _may_be_between(node, graph)]


def _is_norm(node: Node) -> bool:
    return node.op in RULES and RULES[node.op].kind is Kind.NORM


def _may_be_between(node: Node, graph: Graph) -> bool:
    """Return whether cuDNN computes a BatchNorm on a GPU, and its output is none of the graph."""
    return not leaves_cudnn(node.attrs) and Entry(node) not in graph.heads


def separate_casts(fitted: FittedGraph) -> list[Node]:
    """Let the casts around each BatchNorm round as cuDNN's kernel does, in place; return the norms that were changed.

    A norm of ``_norms_between_casts`` is changed if its cast to FP32 has other readers, or if FP32 operators read its
    output directly. It gets a cast to FP32 of its own, because the gradients of all readers of a shared cast would be
    summed before they are rounded. Its FP32 readers now read the output rounded to float16 and cast back to FP32. The
    emulation on a CPU then gives a GPU's numbers; on a GPU, the kernel can then replace the casts (``drop_casts``).
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
    """Take out the casts around each BatchNorm that ``_norms_between_casts`` returns, in place; return these norms.

    The norms then read and return float16; FP32 readers of the output read it through a cast to FP32. This is for a
    GPU, where cuDNN's float16 kernel itself computes in FP32; gamma, beta and the running statistics stay FP32.
    """
    norms = _norms_between_casts(fitted)
    separate_casts(fitted)
    readers = fitted.graph.consumers()
    for node in norms:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        skip_casts(node, readers)
    return norms
