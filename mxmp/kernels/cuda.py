"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks."""

from __future__ import annotations

import re
from typing import Sequence

from ..precision.casts import FULL, MARK, casts_to, replace_heads, replace_operator
from ..precision.graph import Entry, Node
from ..precision.rule import is_true
from .workaround import FittedGraph

__all__ = [
    *("double_in_steps", "global_averages", "large_upsamplings", "norms_with_relu", "slices_without_step"),
    *("split_norms_with_relu", "sum_float16", "sums_of_casts", "use_global_pooling", "write_steps"),
]


def slices_without_step(fitted: FittedGraph) -> list[Node]:
    """Return the ``slice`` operators of the converted graph in ``fitted`` whose attribute ``step`` is missing or empty.

    On a GPU, MXNet's pointwise fusion joins such a slice, but no other, with neighbouring operators in one generated
    kernel, which may not compile, or may read wrong elements. ``write_steps`` avoids it.
    """
    return [node for node in fitted.graph.nodes() if node.op == "slice" and not _items(node.attrs.get("step", ""))]


def write_steps(fitted: FittedGraph, slices: Sequence[Node]) -> None:
    """Set the attribute ``step`` of each operator in ``slices`` to 1 for each axis of ``begin``, in place.

    1 is the default, so the result stays the same. But MXNet's pointwise fusion on a GPU, which is wrong for some
    slices, leaves out a slice whose ``step`` is set.
    """
    for node in slices:
        ones = ", ".join("1" for _ in _items(node.attrs["begin"]))
        replace_operator(node, "slice", **{**node.attrs, "step": f"({ones},)"})


def _items(text: str) -> list[str]:
    """Return the items of a tuple in Symbol JSON as texts: ``["1", "None"]`` for ``"(1, None)"``, none for ``""``."""
    return re.findall(r"-?\d+|None", text)


def norms_with_relu(fitted: FittedGraph) -> list[Node]:
    """Return the ``_contrib_BatchNormWithReLU`` operators of the converted graph in ``fitted``.

    MXNet has no GPU kernel for them, so ``split_norms_with_relu`` replaces them.
    """
    return [node for node in fitted.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]


def split_norms_with_relu(fitted: FittedGraph, norms: Sequence[Node]) -> None:
    """Replace each ``BatchNormWithReLU`` in ``norms``, in place, by a ``BatchNorm`` and a ``relu`` behind it.

    MXNet has GPU kernels for these two, but none for ``BatchNormWithReLU``.
    """

    def relu(node: Node) -> Entry:
        replace_operator(node, "BatchNorm", **node.attrs)
        return Entry(Node("relu", f"{node.name}_relu", {MARK: "copy"}, [Entry(node)]))

    replace_heads(fitted.graph, fitted.graph.insert_behind(norms, relu))


def global_averages(fitted: FittedGraph) -> list[Node]:
    """Return the ``AdaptiveAvgPooling2D`` operators that compute in float16 in the converted graph of ``fitted``.

    Their GPU kernel sums in float16, which is not accurate enough. Each of them averages over the whole image (output
    size 1 x 1), because those with other output sizes stay in FP32.
    """
    return [node for node in fitted.low if node.op == "_contrib_AdaptiveAvgPooling2D"]


def use_global_pooling(fitted: FittedGraph, poolings: Sequence[Node]) -> None:
    """Replace each ``AdaptiveAvgPooling2D`` in ``poolings`` by a global average ``Pooling``, in place.

    Their output size is 1 x 1, so both compute the average of each channel. But cuDNN's kernel of ``Pooling`` sums in
    FP32 instead of float16.
    """
    for node in poolings:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")


def large_upsamplings(fitted: FittedGraph) -> list[Node]:
    """Return the ``UpSampling`` operators of scale 4, 8, 16, ... that compute in float16 in the graph of ``fitted``.

    They copy the nearest value. The gradient of a value is the sum over its copies, which their GPU kernel takes in
    float16: of 64 terms where the scale is 8. Scale 2, with 4 terms, needs no rewrite. Those with all other scales, and
    bilinear ones of scale 2 too, stay in FP32.
    """
    return [node for node in fitted.low if node.op == "UpSampling" and node.attrs["scale"] != "2"]


def double_in_steps(fitted: FittedGraph, upsamplings: Sequence[Node]) -> None:
    """Replace each ``UpSampling`` in ``upsamplings`` by twofold ones in a row, in place; the last keeps its name.

    Its scale is 4, 8, 16, ..., and all copy the nearest value, so the result is the same. But a float16 sum in the
    backward, as of 64 gradients where the scale is 8, loses small terms; each sum now has 4 terms.
    """
    for node in upsamplings:
        attrs = {**node.attrs, "scale": "2"}
        for step in range(int(node.attrs["scale"]).bit_length() - 2):
            node.inputs[0] = Entry(
                Node("UpSampling", f"{node.name}_step{step}", {**attrs, MARK: "copy"}, [node.inputs[0]])
            )
        replace_operator(node, "UpSampling", **attrs)


def sums_of_casts(fitted: FittedGraph) -> list[Node]:
    """Return the ``sum`` operators of the graph in ``fitted`` that read a cast to FP32 which mxmp has inserted.

    They add FP32 numbers that were float16. One kernel of MXNet's NumPy interface does the same from float16. It has no
    parameter ``exclude``, so operators with ``exclude=True`` are left out.
    """
    return [
        node
        for node in fitted.graph.nodes()
        if node.op in ("sum", "sum_axis")
        and casts_to(node.inputs[0].node, FULL)
        and not is_true(node.attrs.get("exclude"))
    ]


def sum_float16(fitted: FittedGraph, sums: Sequence[Node]) -> None:
    """Have each ``sum`` in ``sums`` read the float16 tensor instead of its cast to FP32, in place, as an ``_np_sum``.

    This saves the cast's FP32 copy. With ``dtype="float32"`` it adds in FP32 and returns FP32, and its gradient is
    rounded once, like that of the cast. It keeps the axes, and a new ``squeeze`` (for a
    sum over all axes, a ``Reshape`` to ``(1,)``) removes them, unless ``sum`` keeps them too: without ``keepdims``,
    ``_np_sum`` over all axes has the shape ``()``, which MXNet's other operators do not know.
    """
    squeezed = [node for node in sums if not is_true(node.attrs.get("keepdims"))]
    for node in sums:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        replace_operator(node, "_np_sum", axis=_axes(node) or "None", keepdims="True", dtype=FULL)

    def shaped(node: Node) -> Entry:
        axes = _axes(node)
        op, attrs = ("squeeze", {"axis": axes}) if axes else ("Reshape", {"shape": "(-1,)"})
        return Entry(Node(op, f"{node.name}_squeezed", {**attrs, MARK: "copy"}, [Entry(node)]))

    replace_heads(fitted.graph, fitted.graph.insert_behind(squeezed, shaped))


def _axes(node: Node) -> str:
    """Return the axes over which a ``sum`` adds as the text of a tuple, ``"(1,)"``; ``""`` if it adds over all."""
    axes = re.findall(r"-?\d+", node.attrs.get("axis", "()"))
    return f"({', '.join(axes)},)" if axes else ""
