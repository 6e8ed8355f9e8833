"""BatchNorm between a cast to FP32 and one to float16, for which cuDNN has one kernel.

It reads float16, computes in FP32 with FP32 parameters, and rounds its output once. On a GPU ``drop_casts`` takes the
casts out; on a CPU ``separate_casts`` lets them round as that kernel does.
"""

from __future__ import annotations

from ..policy import Policy
from ..precision.casts import APART, FULL, LowGraph, casts_to, inserted, skip_casts
from ..precision.graph import Entry, Graph, Node
from ..precision.missing_kernels import leaves_cudnn
from ..precision.rule import Kind
from ..precision.rules import RULES


def _norms_between_casts(fitted: LowGraph) -> list[Node]:
    """Return the BatchNorms that read a cast to FP32 and are read by one to float16."""
    # The user's policy says whether there are casts.
    if fitted.planned.policy.norm is not None:
        return []
    readers = fitted.graph.consumers()
    return [
        node
        for node in fitted.source
        if _may_be_between(node, fitted.graph)
        and casts_to(node.inputs[0].node, FULL)
        and any(casts_to(user, "float16") for user, _ in readers.get(Entry(node), ()))
    ]


def casts_inside(graph: Graph, policy: Policy, device: str) -> list[Node]:
    """Return the BatchNorms of an FP32 graph around which ``drop_casts`` takes casts out, unless it is switched off."""
    if device != "gpu" or policy.compute != "float16" or policy.norm is not None:
        return []
    return [node for node in graph.nodes() if _may_be_between(node, graph)]


def _may_be_between(node: Node, graph: Graph) -> bool:
    """Return whether ``node`` is a BatchNorm that cuDNN computes on a GPU, and its output is none of the graph."""
    is_norm = node.op in RULES and RULES[node.op].kind is Kind.NORM
    return is_norm and not leaves_cudnn(node.attrs) and Entry(node) not in graph.heads


def separate_casts(fitted: LowGraph) -> list[Node]:
    """Let the casts around each BatchNorm round as cuDNN's kernel does; return the norms that were changed."""
    readers = fitted.graph.consumers()
    norms = [
        node
        for node in _norms_between_casts(fitted)
        if len(readers[node.inputs[0]]) > 1 or not all(casts_to(user, "float16") for user, _ in readers[Entry(node)])
    ]
    for node in norms:
        # The gradients of a shared cast's readers would be summed before they are rounded.
        shared = node.inputs[0].node
        name = f"{shared.name}_for_{node.name}"
        node.rewire(0, inserted("Cast", name, shared.inputs, dtype=FULL, **{APART: name}))
        users = readers[Entry(node)]
        rounded = next(user for user, _ in users if casts_to(user, "float16"))
        # FP32 readers read what the kernel has rounded.
        widened = inserted("Cast", f"{node.name}_to_{FULL}", [Entry(rounded)], dtype=FULL)
        for user, position in users:
            if not casts_to(user, "float16"):
                user.rewire(position, widened)
    return norms


def drop_casts(fitted: LowGraph) -> list[Node]:
    """Take out the casts around each BatchNorm that ``_norms_between_casts`` returns, in place; return these norms."""
    norms = _norms_between_casts(fitted)
    separate_casts(fitted)
    readers = fitted.graph.consumers()
    for node in norms:
        node.rewire(0, node.inputs[0].node.inputs[0])
        skip_casts(node, readers)
    return norms
