"""Operators that MXNet's CUDA build lacks or sums in float16, or that its pointwise fusion breaks.

``table.py`` says of each rewrite what is wrong without it.
"""

from __future__ import annotations

import os
import re
from typing import Iterable

from ..precision.casts import FULL, LowGraph, casts_to, replace_heads, replace_operator, skip_casts
from ..precision.graph import Entry, Node
from ..precision.missing_kernels import is_true
from ..precision.subgraphs import rows, set_bodies
from .inserting import beside


def write_steps(fitted: LowGraph) -> list[Node]:
    """Give each ``slice`` without ``step`` the default, 1 for each axis of ``begin``; return these slices."""
    slices = [node for node in fitted.graph.nodes() if node.op == "slice" and not _items(node, "step")]
    for node in slices:
        # MXNet's pointwise fusion does not fuse a slice whose step is set.
        replace_operator(node, "slice", **{**node.attrs, "step": _tuple("1" for _ in _items(node, "begin"))})
    return slices


# Parameters that MXNet's pointwise fusion looks up among the texts in a node's attributes, which lack those that the
# user did not set: by operator, the name and the default.
_LOOKED_UP = {"LeakyReLU": ("act_type", "leaky"), "smooth_l1": ("scalar", "1.0")}


def write_defaults(fitted: LowGraph) -> list[Node]:
    """Write out each attribute of ``_LOOKED_UP`` that an operator lacks; return these operators."""
    found = [n for n in fitted.graph.nodes() if n.op in _LOOKED_UP and _LOOKED_UP[n.op][0] not in n.attrs]
    for node in found:
        name, default = _LOOKED_UP[node.op]
        replace_operator(node, node.op, **{**node.attrs, name: default})
    return found


def _items(node: Node, attr: str) -> list[str]:
    """Return the items of a tuple in an attribute: ``["1", "None"]`` for ``"(1, None)"``; none if it is missing."""
    return re.findall(r"-?\d+|None", node.attrs.get(attr, ""))


def _tuple(items: Iterable[str]) -> str:
    return f"({', '.join(items)},)"


def split_norms_with_relu(fitted: LowGraph) -> list[Node]:
    """Turn each ``BatchNormWithReLU`` into a ``BatchNorm``, in place, with a ``relu`` behind it; return the norms."""

    def relu(node: Node) -> Entry:
        replace_operator(node, "BatchNorm", **node.attrs)
        return beside(node)("relu", "relu", Entry(node))

    norms = [node for node in fitted.graph.nodes() if node.op == "_contrib_BatchNormWithReLU"]
    replace_heads(fitted.graph, fitted.graph.insert_behind(norms, relu))
    return norms


def use_global_pooling(fitted: LowGraph) -> list[Node]:
    """Turn each float16 ``AdaptiveAvgPooling2D`` into a global average ``Pooling``, in place; return these nodes."""
    poolings = [node for node in fitted.low if node.op == "_contrib_AdaptiveAvgPooling2D"]
    for node in poolings:
        # The plan keeps nodes with another output than 1 x 1 in FP32. cuDNN's Pooling sums in FP32.
        replace_operator(node, "Pooling", kernel="(1, 1)", global_pool="True", pool_type="avg")
    return poolings


def double_in_steps(fitted: LowGraph) -> list[Node]:
    """Double the size step by step for each float16 ``UpSampling`` of scale 4, 8, 16, ...; return these operators."""
    upsamplings = [node for node in fitted.low if node.op == "UpSampling" and node.attrs["scale"] != "2"]
    for node in upsamplings:
        # In steps of 2 the backward sums 4 gradients at a time in float16, instead of 64 for scale 8. The result is the
        # same: bilinear operators, and those with other scales, stay in FP32.
        attrs = {**node.attrs, "scale": "2"}
        for step in range(int(node.attrs["scale"]).bit_length() - 2):
            node.rewire(0, beside(node)("UpSampling", f"step{step}", node.inputs[0], **attrs))
        replace_operator(node, "UpSampling", **attrs)
    return upsamplings


def sum_float16(fitted: LowGraph) -> list[Node]:
    """Let each ``sum`` behind mxmp's cast to FP32 read float16 and add in FP32, as ``_np_sum``; return these nodes."""
    sums = [
        node
        for node in fitted.graph.nodes()
        if node.op == "sum"
        and casts_to(node.inputs[0].node, FULL)
        # _np_sum has no such parameter.
        and not is_true(node.attrs.get("exclude"))
    ]
    squeezed = [node for node in sums if not is_true(node.attrs.get("keepdims"))]
    readers, heads = fitted.graph.consumers(), {entry.node for entry in fitted.graph.heads}
    for node in sums:
        node.rewire(0, node.inputs[0].node.inputs[0])
        # Where only casts to float16 read the sum, it returns float16. Its gradient is rounded once either way.
        is_rounded = node not in heads and all(casts_to(user, "float16") for user, _ in readers.get(Entry(node), ()))
        if is_rounded:
            skip_casts(node, readers)
        dtype = "float16" if is_rounded else FULL
        # Over all axes and without keepdims, its shape would be (), which MXNet's other operators do not know.
        replace_operator(node, "_np_sum", axis=_axes(node) or "None", keepdims="True", dtype=dtype)

    def shaped(node: Node) -> Entry:
        axes = _axes(node)
        kind, attrs = ("squeeze", {"axis": axes}) if axes else ("Reshape", {"shape": "(-1,)"})
        return beside(node)(kind, "squeezed", Entry(node), **attrs)

    replace_heads(fitted.graph, fitted.graph.insert_behind(squeezed, shaped))
    return sums


def _axes(node: Node) -> str:
    """Return the axes over which a ``sum`` adds: ``"(1,)"``, or ``""`` for all."""
    axes = [item for item in _items(node, "axis") if item != "None"]
    return _tuple(axes) if axes else ""


def copy_rows(fitted: LowGraph) -> list[Node]:
    """Copy each row of an array that a fused kernel in a loop's body might read or write; return these loops."""
    # A foreach reads rows of the arrays that it iterates over and writes rows of its outputs; a while_loop reads rows
    # of its outputs' gradients.
    loops = [node for node in fitted.graph.nodes() if node.op in ("_foreach", "_while_loop")]
    changed = []
    for loop in loops:
        bodies = fitted.bodies[fitted.source[loop]]
        body, low = bodies[-1]  # in front of it a while_loop has its condition
        # A loop within counts too: a row may be its state.
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
        set_bodies(loop, [each.graph for _, each in bodies])
        if in_rows or num_written:
            changed.append(loop)
    return changed


def _computes_low(graph: LowGraph) -> bool:
    """Return whether a graph, or a body of its control flow, has a cast or an operator in low precision."""
    inside = (each for bodies in graph.bodies.values() for _, each in bodies)
    return bool(graph.casts or graph.low) or any(map(_computes_low, inside))


_PRODUCTS = ("FullyConnected", "Convolution", "dot", "batch_dot", "RNN")


def _copy_of(node: Node, index: int = 0) -> Entry:
    # MXNet fuses neither this operator nor its backward.
    return beside(node)("_npi_concatenate", f"copy{index}", Entry(node, index), num_args="1", axis="0")


# MXNet adds up to four gradients of a tensor by one kernel, and five to seven by a kernel for each, which rounds each
# partial sum (src/operator/tensor/elemwise_sum.h). More are added inside cuDNN and cuBLAS.
_ADDED_ONE_BY_ONE = range(5, 8)


def sum_gradients_at_once(fitted: LowGraph) -> list[Node]:
    """Let the five to seven operators that read a trained float16 weight read a copy of it; return these weights."""
    readers, low = fitted.graph.consumers(), {node.name for node in fitted.planned.low_variables}
    shared = [
        node
        for node in fitted.graph.nodes()
        if node.name in low
        and fitted.grad_req.get(node.name, "null") != "null"
        and len(readers.get(Entry(node), ())) in _ADDED_ONE_BY_ONE
    ]
    # The fusion joins the sum with the copy's backward. A sum alone it leaves as it is.
    fitted.graph.insert_behind(shared, lambda node: beside(node)("_copy", "shared", Entry(node)))
    return shared


def fuses() -> bool:
    """Return whether MXNet's pointwise fusion is on, as it is by default."""
    return os.environ.get("MXNET_USE_FUSION", "1").lower() not in ("0", "false")
