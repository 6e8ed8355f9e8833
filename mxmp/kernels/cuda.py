"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import MARK, replace_heads, replace_operator
from ..precision.graph import Entry, Node
from .workaround import Fitting

__all__ = [
    *("fused_slices", "global_averages", "into_global_poolings", "into_norm_and_relu", "norms_with_relu", "with_steps"),
]


def fused_slices(fitting: Fitting) -> list[Node]:
    """Return the ``slice`` operators that MXNet's pointwise fusion may take: those whose ``step`` is not set."""
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


def global_averages(fitting: Fitting) -> list[Node]:
    """Return the float16 adaptive poolings, of which each is an average of everything."""
    return [node for node in fitting.low if node.op == "_contrib_AdaptiveAvgPooling2D"]


def into_global_poolings(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Compute the average by cuDNN, which sums in FP32."""
    for node in nodes:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")
