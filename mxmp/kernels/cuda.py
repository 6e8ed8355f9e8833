"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks.

Each public function is the rewrite of a row of ``table.py``, which says what is wrong.
"""

from __future__ import annotations

import re

from ..precision.casts import FULL, CastGraph, casts_to, inserted, replace_heads, replace_operator, skip_casts
from ..precision.graph import Entry, Node
from ..precision.rule import is_true
from ..precision.subgraphs import rows, set_bodies
from .workaround import FittedGraph


def write_steps(fitted: FittedGraph) -> list[Node]:
    """Give each ``slice`` that has no attribute ``step`` a step of 1 for each axis of ``begin``; return these slices.

    1 is the default, so the result stays the same. But MXNet's pointwise fusion on a GPU, which fails to compile or
    is wrong for some slices, does not fuse a slice whose ``step`` is set.
    """
    slices = [node for node in fitted.graph.nodes() if node.op == "slice" and not _items(node.attrs.get("step", ""))]
    for node in slices:
        ones = ", ".join("1" for _ in _items(node.attrs["begin"]))
        replace_operator(node, "slice", **{**node.attrs, "step": f"({ones},)"})
    return slices


# Parameters that MXNet's pointwise fusion looks up among the texts in a node's attributes, which lack those that the
# user did not set: by operator, the name and the default.
_LOOKED_UP = {"LeakyReLU": ("act_type", "leaky"), "smooth_l1": ("scalar", "1.0")}


def write_defaults(fitted: FittedGraph) -> list[Node]:
    """Write the default of ``act_type`` into each ``LeakyReLU`` without it, and of ``scalar`` into each ``smooth_l1``.

    Returns these operators. MXNet's pointwise fusion on a GPU fails where it does not find them.
    """
    found = [n for n in fitted.graph.nodes() if n.op in _LOOKED_UP and _LOOKED_UP[n.op][0] not in n.attrs]
    for node in found:
        name, default = _LOOKED_UP[node.op]
        replace_operator(node, node.op, **{**node.attrs, name: default})
    return found


def _items(text: str) -> list[str]:
    """Return the items of a tuple in Symbol JSON as texts: ``["1", "None"]`` for ``"(1, None)"``, ``[]`` for ``""``."""
    return re.findall(r"-?\d+|None", text)


def split_norms_with_relu(fitted: FittedGraph) -> list[Node]:
    """Turn each ``BatchNormWithReLU`` into a ``BatchNorm``, in place, with a ``relu`` behind it; return the norms."""

    def relu(node: Node) -> Entry:
        replace_operator(node, "BatchNorm", **node.attrs)
        return inserted("relu", f"{node.name}_relu", [Entry(node)])

    norms = [node for node in fitted.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]
    replace_heads(fitted.graph, fitted.graph.insert_behind(norms, relu))
    return norms


def use_global_pooling(fitted: FittedGraph) -> list[Node]:
    """Turn each float16 ``AdaptiveAvgPooling2D`` into a global average ``Pooling``, in place; return these nodes.

    The output size of these nodes is 1 x 1 (nodes with other sizes stay in FP32), so both operators compute the average
    of each channel. But cuDNN's kernel of ``Pooling`` sums in FP32 instead of float16.
    """
    poolings = [node for node in fitted.low if node.op == "_contrib_AdaptiveAvgPooling2D"]
    for node in poolings:
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")
    return poolings


def double_in_steps(fitted: FittedGraph) -> list[Node]:
    """Double the size step by step for each float16 ``UpSampling`` of scale 4, 8, 16, ...; return these operators.

    The operator itself becomes the last step, with scale 2; the steps before it are new ``UpSampling`` nodes. The
    result is the same, since each step copies the nearest value (a bilinear operator, or one with another scale above
    2, stays in FP32). But the backward sums the gradients of a value's copies in float16, which loses small terms if
    there are many, such as 64 for scale 8; in steps, each sum has 4 terms.
    """
    upsamplings = [node for node in fitted.low if node.op == "UpSampling" and node.attrs["scale"] != "2"]
    for node in upsamplings:
        attrs = {**node.attrs, "scale": "2"}
        for step in range(int(node.attrs["scale"]).bit_length() - 2):
            node.inputs[0] = inserted("UpSampling", f"{node.name}_step{step}", [node.inputs[0]], **attrs)
        replace_operator(node, "UpSampling", **attrs)
    return upsamplings


def sum_float16(fitted: FittedGraph) -> list[Node]:
    """Let each ``sum`` that reads mxmp's cast to FP32 read the float16 input of the cast; return these ``sum`` nodes.

    This saves the FP32 copy that the cast writes. Each of these nodes becomes an ``_np_sum``, which adds in FP32 and,
    by its parameter ``dtype``, returns FP32. But if only casts to float16 read the node, and it is no output of the
    graph, it returns float16, and the readers of these casts read it directly. The gradient that it sends back is
    rounded to float16 once, like the gradient that the cast would send back.

    Without ``keepdims``, ``_np_sum`` over all axes has the shape ``()``, which MXNet's other operators do not know. So
    the node gets ``keepdims="True"``. If the ``sum`` did not have it, a new ``squeeze`` removes the summed axes (for a
    sum over all axes, a ``Reshape`` to ``(1,)``). A ``sum`` with ``exclude=True`` stays as it is, since ``_np_sum`` has
    no such parameter.
    """
    sums = [
        node
        for node in fitted.graph.nodes()
        if node.op in ("sum", "sum_axis")
        and casts_to(node.inputs[0].node, FULL)
        and not is_true(node.attrs.get("exclude"))
    ]
    squeezed = [node for node in sums if not is_true(node.attrs.get("keepdims"))]
    readers, heads = fitted.graph.consumers(), {entry.node for entry in fitted.graph.heads}
    for node in sums:
        node.inputs[0] = node.inputs[0].node.inputs[0]
        is_rounded = node not in heads and all(casts_to(user, "float16") for user, _ in readers.get(Entry(node), ()))
        if is_rounded:
            skip_casts(node, readers)
        dtype = "float16" if is_rounded else FULL
        replace_operator(node, "_np_sum", axis=_axes(node) or "None", keepdims="True", dtype=dtype)

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


def copy_rows(fitted: FittedGraph) -> list[Node]:
    """Copy each row of an array that a fused kernel in the body of a loop might read or write; return these loops.

    A ``foreach`` passes its body one row of each array that it iterates over, and the body writes its outputs into rows
    of the loop's outputs; a ``while_loop`` reads rows of its outputs' gradients. Rows that matrix products alone read
    are not copied, nor those of a body that computes nothing in low precision, not even in a loop within it, of which a
    row may be the state. The copy is a ``concatenate`` of one tensor: MXNet fuses neither this operator nor its
    backward.
    """
    loops = [node for node in fitted.graph.nodes() if node.op in ("_foreach", "_while_loop")]
    changed = []
    for loop in loops:
        bodies = fitted.casted.bodies[fitted.casted.source[loop]]
        body, _, low = bodies[-1]  # in front of it a while_loop has its condition
        if not _computes_low(low):
            continue
        graph, (read, num_written) = low.graph, rows(loop, body)
        readers = graph.consumers()
        in_rows = [
            node
            for node in graph.nodes()
            if node.name in read and any(user.op not in _PRODUCTS for user, _ in readers.get(Entry(node), ()))
        ]
        graph.insert_behind(in_rows, _copy_of)
        graph.heads[:num_written] = [_copy_of(head.node, head.index) for head in graph.heads[:num_written]]
        set_bodies(loop, [each.graph for *_, each in bodies])
        if in_rows or num_written:
            changed.append(loop)
    return changed


def _computes_low(casted: CastGraph) -> bool:
    """Return whether a graph has a cast or an operator in low precision, also in a body of its control flow."""
    inside = (each for bodies in casted.bodies.values() for *_, each in bodies)
    return bool(casted.casts or casted.low) or any(map(_computes_low, inside))


_PRODUCTS = ("FullyConnected", "Convolution", "dot", "batch_dot", "RNN")


def _copy_of(node: Node, index: int = 0) -> Entry:
    """Return a copy of an output of ``node`` by an operator that MXNet never fuses."""
    return inserted("_npi_concatenate", f"{node.name}_copy{index}", [Entry(node, index)], num_args="1", axis="0")
