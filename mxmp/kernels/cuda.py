"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import MARK, replace_heads, replace_operator
from ..precision.graph import Entry, Node
from .workaround import FittedGraph

__all__ = [
    *("global_averages", "norms_with_relu", "slices_without_step", "split_norms_with_relu", "use_global_pooling"),
    "write_steps",
]


def slices_without_step(fitted: FittedGraph) -> list[Node]:
    """Return the ``slice`` operators of the graph whose attribute ``step`` is not set.

    MXNet's pointwise fusion on a GPU joins only these with other operators in one generated kernel, which may not
    compile, or may read wrong elements.
    """
    return [node for node in fitted.graph.nodes() if node.op == "slice" and not _items(node.attrs.get("step", ""))]


def write_steps(fitted: FittedGraph, slices: Sequence[Node]) -> None:
    """Set the attribute ``step`` of these ``slice`` operators to 1 along each axis, which is its default, in place.

    The result stays the same, but MXNet's pointwise fusion leaves out a slice with a ``step``.
    """
    for node in slices:
        ones = ", ".join("1" for _ in _items(node.attrs["begin"]))
        replace_operator(node, "slice", **{**node.attrs, "step": f"({ones},)"})


def _items(text: str) -> list[str]:
    """Return the items of a tuple in Symbol JSON: ``["1", "None"]`` for ``"(1, None)"``, none for ``""``."""
    return re.findall(r"-?\d+|None", text)


def norms_with_relu(fitted: FittedGraph) -> list[Node]:
    """Return the ``_contrib_BatchNormWithReLU`` operators of the graph, which have no GPU kernel."""
    return [node for node in fitted.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]


def split_norms_with_relu(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Replace each ``BatchNormWithReLU`` in ``norms`` by a ``BatchNorm`` and a ``relu`` that reads its output."""

    def relu(node: Node) -> Entry:
        """Make ``node`` a BatchNorm, in place; return the output of a new relu that reads its output."""
        replace_operator(node, "BatchNorm", **node.attrs)
        return Entry(Node("relu", f"{node.name}_relu", {MARK: "copy"}, [Entry(node)]))

    replace_heads(fitted.graph, fitted.graph.insert_behind(norms, relu))


def global_averages(fitted: FittedGraph) -> list[Node]:
    """Return the ``AdaptiveAvgPooling2D`` operators of the graph that compute in float16.

    Each averages over the whole image (output size 1 x 1), as those with other output sizes stay in FP32. On a GPU
    their kernel sums in float16.
    """
    return [node for node in fitted.low if node.op == "_contrib_AdaptiveAvgPooling2D"]


def use_global_pooling(fitted: FittedGraph, poolings: Sequence[Node]) -> None:
    """Replace these ``AdaptiveAvgPooling2D``, of output size 1 x 1, by a global average ``Pooling``, in place.

    Both compute the average of each channel, but cuDNN's kernel of ``Pooling`` sums in FP32 instead of float16.
    """
    for node in poolings:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")
