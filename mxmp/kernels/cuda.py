"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks.

Each public function is the rewrite of a row of ``table.py``, which says what is wrong.
"""

from __future__ import annotations

import re

from ..precision.casts import FULL, casts_to, inserted, replace_heads, replace_operator
from ..precision.graph import Entry, Node
from ..precision.rule import is_true
from .workaround import FittedGraph


def write_steps(fitted: FittedGraph) -> list[Node]:
    """Set the attribute ``step`` of each ``slice`` without one to 1 for each axis of ``begin``; return these slices.

    1 is the default, so the result stays the same. But MXNet's pointwise fusion on a GPU, which is wrong for some
    slices, leaves out a slice whose ``step`` is set.
    """
    slices = [node for node in fitted.graph.nodes() if node.op == "slice" and not _items(node.attrs.get("step", ""))]
    for node in slices:
        ones = ", ".join("1" for _ in _items(node.attrs["begin"]))
        replace_operator(node, "slice", **{**node.attrs, "step": f"({ones},)"})
    return slices


def _items(text: str) -> list[str]:
    """Return the items of a tuple in Symbol JSON as texts: ``["1", "None"]`` for ``"(1, None)"``, none for ``""``."""
    return re.findall(r"-?\d+|None", text)


def split_norms_with_relu(fitted: FittedGraph) -> list[Node]:
    """Replace each ``BatchNormWithReLU`` by a ``BatchNorm`` and a ``relu`` behind it; return the former."""

    def relu(node: Node) -> Entry:
        replace_operator(node, "BatchNorm", **node.attrs)
        return inserted("relu", f"{node.name}_relu", [Entry(node)])

    norms = [node for node in fitted.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]
    replace_heads(fitted.graph, fitted.graph.insert_behind(norms, relu))
    return norms


def use_global_pooling(fitted: FittedGraph) -> list[Node]:
    """Replace each float16 ``AdaptiveAvgPooling2D`` by a global average ``Pooling``, in place; return them.

    Their output size is 1 x 1 (those with other sizes stay in FP32), so both compute the average of each channel. But
    cuDNN's kernel of ``Pooling`` sums in FP32 instead of float16.
    """
    poolings = [node for node in fitted.low if node.op == "_contrib_AdaptiveAvgPooling2D"]
    for node in poolings:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")
    return poolings


def double_in_steps(fitted: FittedGraph) -> list[Node]:
    """Replace each float16 ``UpSampling`` of scale 4, 8, 16, ... by twofold ones in a row, in place; return them.

    The last of the row keeps the name. All copy the nearest value (those with other scales, and bilinear ones, stay in
    FP32), so the result is the same. But a float16 sum in the backward, as of 64 gradients where the scale is 8, loses
    small terms; each sum now has 4 terms.
    """
    upsamplings = [node for node in fitted.low if node.op == "UpSampling" and node.attrs["scale"] != "2"]
    for node in upsamplings:
        attrs = {**node.attrs, "scale": "2"}
        for step in range(int(node.attrs["scale"]).bit_length() - 2):
            node.inputs[0] = inserted("UpSampling", f"{node.name}_step{step}", [node.inputs[0]], **attrs)
        replace_operator(node, "UpSampling", **attrs)
    return upsamplings


def sum_float16(fitted: FittedGraph) -> list[Node]:
    """Have each ``sum`` that reads mxmp's cast to FP32 read the float16 tensor instead, as an ``_np_sum``; return them.

    This saves the cast's FP32 copy. With ``dtype="float32"`` it adds in FP32 and returns FP32, and its gradient is
    rounded once, like that of the cast. It keeps the axes, and a new ``squeeze`` (for a
    sum over all axes, a ``Reshape`` to ``(1,)``) removes them, unless ``sum`` keeps them too: without ``keepdims``,
    ``_np_sum`` over all axes has the shape ``()``, which MXNet's other operators do not know. It has no parameter
    ``exclude``, so a ``sum`` with ``exclude=True`` stays.
    """
    sums = [
        node
        for node in fitted.graph.nodes()
        if node.op in ("sum", "sum_axis")
        and casts_to(node.inputs[0].node, FULL)
        and not is_true(node.attrs.get("exclude"))
    ]
    squeezed = [node for node in sums if not is_true(node.attrs.get("keepdims"))]
    for node in sums:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        replace_operator(node, "_np_sum", axis=_axes(node) or "None", keepdims="True", dtype=FULL)

    def shaped(node: Node) -> Entry:
        axes = _axes(node)
        op, attrs = ("squeeze", {"axis": axes}) if axes else ("Reshape", {"shape": "(-1,)"})
        return inserted(op, f"{node.name}_squeezed", [Entry(node)], **attrs)

    replace_heads(fitted.graph, fitted.graph.insert_behind(squeezed, shaped))
    return sums


def _axes(node: Node) -> str:
    """Return the axes over which a ``sum`` adds as the text of a tuple, ``"(1,)"``; ``""`` if it adds over all."""
    axes = re.findall(r"-?\d+", node.attrs.get("axis", "()"))
    return f"({', '.join(axes)},)" if axes else ""
