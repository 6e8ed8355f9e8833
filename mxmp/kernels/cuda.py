"""What MXNet's CUDA build computes inside a kernel, what it lacks, and what its pointwise fusion breaks."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import FULL, MARK, is_ours, replace_heads, replace_operator
from ..precision.graph import Entry, Node
from ..precision.rules import RULES, Kind, missing_kernel
from .workaround import Fitting

__all__ = [
    *("fused_slices", "global_averages", "into_global_poolings", "into_norm_and_relu", "into_norms"),
    *("norms_between_casts", "norms_with_relu", "with_steps"),
]


def fused_slices(fitting: Fitting) -> list[Node]:
    """Return the ``slice`` operators that MXNet may fuse: those without a step."""
    return [node for node in fitting.graph.nodes() if node.op == "slice" and not _sizes(node.attrs.get("step", ""))]


def with_steps(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Write the step of 1 out: the fusion leaves such a slice to its own kernel."""
    for node in nodes:
        ones = ", ".join("1" for _ in _sizes(node.attrs["begin"]))
        replace_operator(node, "slice", **{**node.attrs, "step": f"({ones},)"})


def _sizes(text: str) -> list[str]:
    return re.findall(r"-?\d+|None", text)


def norms_with_relu(fitting: Fitting) -> list[Node]:
    """Return the ``BatchNormWithReLU`` operators."""
    return [node for node in fitting.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]


def into_norm_and_relu(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute BatchNorm, then relu."""

    def relu(node: Node) -> Entry:
        replace_operator(node, "BatchNorm", **node.attrs)
        return Entry(Node("relu", f"{node.name}_relu", {MARK: "copy"}, [Entry(node)]))

    replace_heads(fitting.graph, fitting.graph.insert_behind(nodes, relu))


def norms_between_casts(fitting: Fitting) -> list[Node]:
    """Return the batch normalisations between two casts of ours that cuDNN computes: it casts inside its kernel."""
    if fitting.casted.policy.norm is not None:
        return []
    readers, heads = fitting.graph.consumers(), set(fitting.graph.heads)

    def is_between(node: Node) -> bool:
        if RULES[node.op].kind is not Kind.NORM or missing_kernel(node.op, node.attrs, "float16", "gpu"):
            return False
        users = [user for user, _ in readers.get(Entry(node), ())]
        return (
            _casts_to(node.inputs[0].node, FULL)
            and bool(users)
            and Entry(node) not in heads
            and all(_casts_to(user, "float16") for user in users)
        )

    return [node for node in fitting.casted.source if node.op in RULES and is_between(node)]


def into_norms(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Take out the casts around these: cuDNN reads float16, computes in FP32 and rounds once."""
    readers = fitting.graph.consumers()
    for node in nodes:
        casts = [node.inputs[0].node, *(user for user, _ in readers[Entry(node)])]
        node.inputs[0] = casts[0].inputs[0]
        for cast in casts[1:]:
            for user, position in readers[Entry(cast)]:
                user.inputs[position] = Entry(node)


def global_averages(fitting: Fitting) -> list[Node]:
    """Return the float16 adaptive poolings, of which each is an average of everything."""
    return [node for node in fitting.low if node.op == "_contrib_AdaptiveAvgPooling2D"]


def into_global_poolings(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute the average by cuDNN, which sums in FP32."""
    for node in nodes:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")


def _casts_to(node: Node, dtype: str) -> bool:
    return is_ours(node) and node.op == "Cast" and node.attrs["dtype"] == dtype
