"""Low precision on a CPU without kernels for it: float16 as a Tensor Core computes, bfloat16 as oneDNN does.

Each emulated operator reads low precision, computes in FP32 and rounds its result once, forward and backward. The
tensors between operators are in low precision, and so are the sums of several readers' gradients, as on a GPU.
"""

from __future__ import annotations

from typing import Mapping

import numpy as np

from ..precision._mxnet import exact_text
from ..precision.casts import APART, FULL, MARK, LowGraph, casts_to, inserted, is_ours, replace_operator
from ..precision.graph import Entry, Node
from ..precision.heads import zero_with_gradient
from ..precision.missing_kernels import spatial_axes
from ..precision.rule import Rule, is_exact
from ..precision.rules import rule_of
from .inserting import beside
from .rounding import copy_before_casts


def round_every_node(fitted: LowGraph) -> list[Node]:
    """Cast the inputs of each float16 operator to FP32 and its outputs to float16, in place; return these operators."""
    _compute_in_fp32(fitted, {node: rule for node, rule in fitted.low.items() if not _is_native(node)})
    return list(fitted.low)


def round_onednns_operators(fitted: LowGraph) -> list[Node]:
    """Do the same for the bfloat16 operators that oneDNN computes, workarounds' ones too; return these operators."""
    low: set[Node] = set()
    for node in fitted.graph.nodes():
        if node in fitted.low or (is_ours(node) and node.inputs and node.inputs[0].node in low):
            low.add(node)
        if is_ours(node) and "dtype" in node.attrs:
            (low.add if node.attrs["dtype"] == fitted.compute else low.discard)(node)
    found = {node: rule_of(node.op) for node in fitted.graph.nodes() if node in low and node.op in ONEDNNS}
    _compute_in_fp32(fitted, found)
    copy_before_casts(fitted)
    return list(found)


# MXNet's own kernels, which any CPU runs, compute the other operators that have a sound bfloat16 kernel.
ONEDNNS = frozenset(
    ["Activation", "BatchNorm", "Convolution", "FullyConnected", "LeakyReLU", "Pooling", "_contrib_BatchNormWithReLU"]
)


def _compute_in_fp32(fitted: LowGraph, rules: Mapping[Node, Rule]) -> None:
    graph = fitted.graph
    heads = set(graph.heads)
    outputs: dict[Node, list[Entry]] = {}
    for entry in dict.fromkeys([*graph.consumers(), *graph.heads]):
        outputs.setdefault(entry.node, []).append(entry)
    half: dict[Entry, Entry] = {}
    for node in list(graph.nodes()):
        rule = rules.get(node)
        for position, entry in enumerate(node.inputs):
            read = half.get(entry, entry)
            widen = rule is not None and position not in rule.keep
            node.rewire(position, _widen(fitted, read, f"{node.name}_in{position}_to_{FULL}") if widen else read)
        for entry in outputs.get(node, ()) if rule is not None else ():
            if entry.index not in rule.keep_outputs:  # type: ignore[union-attr]
                half[entry] = _round(fitted, entry, is_head=entry in heads)
    graph.heads = [half.get(entry, entry) for entry in graph.heads]


def _is_native(node: Node) -> bool:
    """Return whether MXNet's float16 kernel on a CPU is to compute it: a sum that rounds between its terms."""
    return node.op in _SUMS and len(node.inputs) > _ADDED_AT_ONCE


_SUMS = frozenset(["add_n"])
_ADDED_AT_ONCE = 4  # so many terms the kernel adds in FP32


def differentiate_rounded_outputs(fitted: LowGraph) -> list[Node]:
    """Give each float16 tanh and sigmoid, in place, the gradient of its rounded output; return these operators."""
    # What is added to the output is zero, with a gradient that corrects the operator's own: by y² - r² for tanh, and by
    # r(1 - r) - y(1 - y) for sigmoid, where r is the rounded y.
    found = [node for node in fitted.low if _saturation(node)]
    for node in found:
        op, (rounding,) = beside(node), fitted.roundings[node]
        y = Entry(node)
        low = op("Cast", "low", y, dtype=fitted.compute)
        rounded = op("Cast", "low_to_float32", low, dtype=FULL)
        total = op("elemwise_add", "total", y, rounded)
        if _saturation(node) == "sigmoid":
            total = op("_minus_scalar", "total_less_1", total, scalar=1)
        slope = op("elemwise_mul", "slope", op("elemwise_sub", "lost", y, rounded), total)
        zero = op("elemwise_mul", "no_value", zero_with_gradient(node.inputs[0], op), op("BlockGrad", "fixed", slope))
        rounding.rewire(0, op("elemwise_add", "with_slope", y, zero))
    return found


def _saturation(node: Node) -> str:
    """Return ``"tanh"`` or ``"sigmoid"`` for an operator that computes it, else ``""``."""
    if node.op == "Activation":
        act = node.attrs.get("act_type", "")
        return act if act in ("tanh", "sigmoid") else ""
    name = node.op.rpartition("_")[2]
    return name if name in ("tanh", "sigmoid") and "hard" not in node.op else ""


def round_constants(fitted: LowGraph) -> list[Node]:
    """Round the constants that a GPU's kernel reads in float16, such as 0.3 in ``x * 0.3``; return these operators."""
    found = []
    for node, rule in fitted.low.items():
        names = _SLOPES.get(node.op, () if node.op in _FULL_CONSTANTS else rule.scalars)
        given = {name: node.attrs.get(name, "") for name in names}
        rounded = {name: _in_float16(text) for name, text in given.items() if _is_inexact(text)}
        if rounded:
            replace_operator(node, node.op, **{**node.attrs, **rounded})
            found.append(node)
    return found


_SLOPES = {"LeakyReLU": ("slope",)}
# Their kernels have FP32 constants. A slope of 0.19995 would not make hard_sigmoid 1 at 2.5.
_FULL_CONSTANTS = frozenset(["clip", "hard_sigmoid"])


def _is_inexact(text: str) -> bool:
    """Return whether ``text`` is a number in float16's range that float16 does not hold."""
    return not is_exact(text, "float16") and abs(float(text)) < 65520


def _in_float16(text: str) -> str:
    """Return the number in ``text`` rounded to float16."""
    return exact_text(np.float32(np.float16(float(text))))


def _cast(fitted: LowGraph) -> str:
    """Return the operator that casts to nearest: ``Cast`` truncates to bfloat16."""
    return "amp_cast" if fitted.compute == "bfloat16" else "Cast"


def _widen(fitted: LowGraph, entry: Entry, name: str) -> Entry:
    # A cast for each input: MXNet would sum the gradients of a shared cast's readers in FP32, where a GPU rounds each.
    cast = inserted(_cast(fitted), name, [entry], dtype=FULL)
    cast.node.attrs[APART] = name
    fitted.widenings.add(cast.node)
    return cast


def _round(fitted: LowGraph, entry: Entry, *, is_head: bool) -> Entry:
    """Return ``entry`` cast to low precision; a cast of the graph's output takes the name of its operator."""
    node, dtype = entry.node, fitted.compute
    suffix = f"_{entry.index}" if entry.index else ""
    cast = inserted(_cast(fitted), f"{node.name}{suffix}_rounded", [entry], dtype=dtype).node
    if is_head and entry.index == 0:
        cast.attrs[MARK] = "head"
        cast.name, node.name = node.name, f"{node.name}_{FULL}"
    fitted.roundings.setdefault(node, []).append(cast)
    return Entry(cast)


_WITH_BIAS = frozenset(["FullyConnected", "Convolution", "Deconvolution"])


def round_before_biases(fitted: LowGraph) -> list[Node]:
    """Let each float16 operator with a bias add it to the rounded product, in place; return these operators."""
    # The operator reads zeros for its bias, whose gradient is the bias's: it keeps its parameters and all gradients.
    biased = [node for node in fitted.low if node.op in _WITH_BIAS and len(node.inputs) == 3]
    for node in biased:
        op, (rounding,) = beside(node), fitted.roundings[node]
        read = node.inputs[2]
        node.rewire(2, zero_with_gradient(read, op))
        bias = op("BlockGrad", "bias", _widen(fitted, read.node.inputs[0], f"{node.name}_bias_to_{FULL}"))
        axes = 0 if node.attrs.get("layout", "").endswith("C") else spatial_axes(node.attrs)
        if axes:
            bias = op("Reshape", "bias_of_images", bias, shape=f"({', '.join(['-1', *'1' * axes])})")
        product = op("Cast", "product", Entry(node), dtype=fitted.compute)
        product = _widen(fitted, product, f"{node.name}_product_to_{FULL}")
        # MXNet infers the bias's shape after that of the product, and some loss heads do not wait for it.
        total, fixed = op("broadcast_add", "biased", product, bias), op("BlockGrad", "fixed", product)
        rounding.rewire(0, op("_identity_with_attr_like_rhs", "shaped", total, fixed))
    return biased


def compute_in_float64(fitted: LowGraph) -> list[Node]:
    """Let each float16 deconvolution compute in float64 instead of FP32; return the deconvolutions."""
    # The backward of oneDNN's FP32 kernel fails if the weight is the output of a cast; float64 is MXNet's own kernel.
    # The plan keeps 3-D ones in FP32.
    deconvolutions = [node for node in fitted.low if node.op == "Deconvolution" and spatial_axes(node.attrs) != 3]
    for node in deconvolutions:
        for cast in (entry.node for entry in node.inputs if entry.node in fitted.widenings):
            name = f"{cast.name[: -len(FULL)]}float64"
            cast.name, cast.attrs["dtype"], cast.attrs[APART] = name, "float64", name
    return deconvolutions


def clamp_to_lowest(fitted: LowGraph) -> list[Node]:
    """Raise the output of max poolings that may have windows in padding alone to -65504; return these poolings."""

    def may_cover_padding(node: Node) -> bool:
        is_max = node.op == "Pooling" and node.attrs.get("pool_type", "max") == "max"
        # Only this convention rounds the number of windows up.
        return is_max and node.attrs.get("pooling_convention") == "full"

    poolings = [node for node in fitted.low if may_cover_padding(node)]
    for node in poolings:
        for cast in fitted.roundings.get(node, ()):
            name = cast.name if cast.attrs[MARK] == "head" else node.name
            name = f"{name}_of_{fitted.compute}"
            # The kernel returns FP32's lowest value there, which would be -inf in float16; -65504 is float16's lowest.
            cast.rewire(0, inserted("_maximum_scalar", name, cast.inputs, scalar=-65504.0))
    return poolings


def skip_needless_roundings(fitted: LowGraph) -> list[Node]:
    """Skip the casts behind operators that only select values; return these operators, also where casts stay."""
    # They read float16, so their FP32 outputs are float16 numbers too. The casts in front round their gradients.
    nodes = [node for node in fitted.roundings if fitted.low[node].exact]
    readers = fitted.graph.consumers()
    heads = set(fitted.graph.heads)
    for node in nodes:
        for rounding in fitted.roundings[node]:
            users = readers.get(Entry(rounding), [])
            if len(users) == 1 and Entry(rounding) not in heads and casts_to(users[0][0], FULL):
                widening = users[0][0]
                for user, position in readers[Entry(widening)] if widening in fitted.widenings else users:
                    user.rewire(position, rounding.inputs[0])
    return nodes
