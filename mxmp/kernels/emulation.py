"""float16 on a CPU, where MXNet has no float16 kernels for matrix operators: emulation of a Tensor Core.

Each low-precision operator reads float16, computes in FP32 and rounds its result once, forward and backward. The
tensors between operators are real float16. So where a tensor has several readers, their gradients are rounded and then
summed in float16, as on a GPU. Afterwards casts that change no value are skipped, to save time.
"""

from __future__ import annotations

import numpy as np

from ..precision.casts import APART, FULL, MARK, casts_to, inserted, replace_operator
from ..precision.graph import Entry, Node
from ..precision.heads import zero_with_gradient
from ..precision.rules import spatial_axes
from .workaround import FittedGraph


def round_every_node(fitted: FittedGraph) -> list[Node]:
    """Emulate each float16 operator: cast its inputs to FP32, its outputs to float16, in place; return these operators.

    The operator then computes in FP32 and rounds its result once, as a Tensor Core does. Inputs and outputs that its
    rule does not take in float16 (``Rule.keep``, ``Rule.keep_outputs``) get no cast. The outputs of the graph keep
    their names, except those of an operator with several outputs. The new casts to FP32 are added to
    ``fitted.widenings``, those to float16 to ``fitted.roundings``.
    """
    graph, low = fitted.graph, fitted.low
    heads = set(graph.heads)
    outputs: dict[Node, list[Entry]] = {}
    for entry in dict.fromkeys([*graph.consumers(), *graph.heads]):
        outputs.setdefault(entry.node, []).append(entry)
    half: dict[Entry, Entry] = {}
    for node in list(graph.nodes()):
        rule = None if _is_native(node) else low.get(node)
        for position, entry in enumerate(node.inputs):
            read = half.get(entry, entry)
            widen = rule is not None and position not in rule.keep
            node.inputs[position] = _widen(fitted, read, f"{node.name}_in{position}_to_{FULL}") if widen else read
        for entry in outputs.get(node, ()) if rule is not None else ():
            if entry.index not in rule.keep_outputs:  # type: ignore[union-attr]
                half[entry] = _round(fitted, entry, is_head=entry in heads)
    graph.heads = [half.get(entry, entry) for entry in graph.heads]
    return list(low)


def _is_native(node: Node) -> bool:
    """Return whether MXNet's float16 kernel on a CPU is to compute it: a sum that rounds between its terms."""
    return node.op in _SUMS and len(node.inputs) > _ADDED_AT_ONCE


_SUMS = frozenset(["add_n", "ElementWiseSum", "_sparse_add_n", "_sparse_ElementWiseSum"])
_ADDED_AT_ONCE = 4  # so many terms the kernel adds in FP32


def differentiate_rounded_outputs(fitted: FittedGraph) -> list[Node]:
    """Give each float16 tanh and sigmoid, in place, the gradient of its rounded output; return these operators.

    What is added to the output is zero, with a gradient that corrects the operator's own: by y² - r² for tanh, where r
    is the rounded y, and by r(1 - r) - y(1 - y) for sigmoid.
    """
    found = [node for node in fitted.low if _saturation(node)]
    for node in found:
        (rounding,) = fitted.roundings[node]

        def op(kind: str, role: str, *inputs: Entry, node: Node = node, **attrs: object) -> Entry:
            return inserted(kind, f"{node.name}_{role}", inputs, **attrs)

        y = Entry(node)
        low = op("Cast", "low", y, dtype=fitted.casted.compute)
        rounded = op("Cast", "low_to_float32", low, dtype=FULL)
        total = op("elemwise_add", "total", y, rounded)
        if _saturation(node) == "sigmoid":
            total = op("_minus_scalar", "total_less_1", total, scalar=1)
        slope = op("elemwise_mul", "slope", op("elemwise_sub", "lost", y, rounded), total)
        zero = op("elemwise_mul", "no_value", zero_with_gradient(node.inputs[0], op), op("BlockGrad", "fixed", slope))
        rounding.inputs[0] = op("elemwise_add", "with_slope", y, zero)
    return found


def _saturation(node: Node) -> str:
    """Return ``"tanh"`` or ``"sigmoid"`` for an operator that computes it, else ``""``."""
    if node.op in ("Activation", "_npx_activation"):
        act = node.attrs.get("act_type", "")
        return act if act in ("tanh", "sigmoid") else ""
    name = node.op.rpartition("_")[2]
    return name if name in ("tanh", "sigmoid") and "hard" not in node.op else ""


def round_constants(fitted: FittedGraph) -> list[Node]:
    """Round the constants that a GPU's kernel reads in float16, such as 0.3 in ``x * 0.3``; return these operators."""
    found = []
    for node, rule in fitted.low.items():
        names = _SLOPES.get(node.op, () if node.op in _BOUNDED else rule.scalars)
        given = {name: node.attrs.get(name, _DEFAULTS.get((node.op, name), "")) for name in names}
        rounded = {name: _in_float16(text) for name, text in given.items() if _is_inexact(text)}
        if rounded:
            replace_operator(node, node.op, **{**node.attrs, **rounded})
            found.append(node)
    return found


_DEFAULTS = {("hard_sigmoid", "alpha"): "0.2"}
_SLOPES = {"LeakyReLU": ("slope",), "_npx_leaky_relu": ("slope",)}
_BOUNDED = frozenset(["clip", "_sparse_clip", "_npi_clip"])  # whose kernel compares with FP32 bounds


def _is_inexact(text: str) -> bool:
    """Return whether ``text`` is a number in float16's range that float16 does not hold."""
    try:
        value = float(text)
    except ValueError:
        return False
    return abs(value) < 65520 and float(np.float16(value)) != value


def _in_float16(text: str) -> str:
    """Return the number in ``text`` rounded to float16, without an exponent, which MXNet reads inexactly."""
    return np.format_float_positional(np.float32(np.float16(float(text))), trim="-")


def _widen(fitted: FittedGraph, entry: Entry, name: str) -> Entry:
    """Return the output of a new cast, called ``name``, of the float16 tensor ``entry`` to FP32.

    The cast is added to ``fitted.widenings``. Each input of an operator gets its own cast: if several operators read
    one cast, MXNet would sum the gradients of these operators in FP32 and round the sum, where a GPU rounds each
    gradient.
    """
    cast = inserted("Cast", name, [entry], dtype=FULL)
    cast.node.attrs[APART] = name
    fitted.widenings.add(cast.node)
    return cast


def _round(fitted: FittedGraph, entry: Entry, *, is_head: bool) -> Entry:
    """Return the output of a new cast of ``entry``, an operator's output, to float16, recorded in ``fitted.roundings``.

    The cast is called ``"fc_rounded"``, that of an operator's second output ``"split_1_rounded"``. But if ``entry`` is
    an output of the graph (``is_head``) and the first of its operator, the cast takes the operator's name, ``"fc"``,
    and the operator is renamed ``"fc_float32"``.
    """
    node, dtype = entry.node, fitted.casted.compute
    suffix = f"_{entry.index}" if entry.index else ""
    cast = inserted("Cast", f"{node.name}{suffix}_rounded", [entry], dtype=dtype).node
    if is_head and entry.index == 0:
        cast.attrs[MARK] = "head"
        cast.name, node.name = node.name, f"{node.name}_{FULL}"
    fitted.roundings.setdefault(node, []).append(cast)
    return Entry(cast)


_WITH_BIAS = frozenset(
    ["FullyConnected", "_npx_fully_connected", "Convolution", "_npx_convolution", "Deconvolution", "_npx_deconvolution"]
)


def round_before_biases(fitted: FittedGraph) -> list[Node]:
    """Let each float16 operator with a bias add it to the rounded product, in place; return these operators.

    The operator itself reads zeros for its bias, whose gradient is the bias's, so that it keeps its parameters and all
    its gradients. The bias is added behind it, and the sum is rounded again.
    """
    biased = [node for node in fitted.low if node.op in _WITH_BIAS and len(node.inputs) == 3]
    for node in biased:

        def op(kind: str, role: str, *inputs: Entry, node: Node = node, **attrs: object) -> Entry:
            return inserted(kind, f"{node.name}_{role}", inputs, **attrs)

        (rounding,) = fitted.roundings[node]
        read = node.inputs[2]
        node.inputs[2] = zero_with_gradient(read, op)
        bias = op("BlockGrad", "bias", _widen(fitted, read.node.inputs[0], f"{node.name}_bias_to_{FULL}"))
        axes = 0 if node.attrs.get("layout", "").endswith("C") else spatial_axes(node.attrs)
        if axes:
            bias = op("Reshape", "bias_of_images", bias, shape=f"({', '.join(['-1', *'1' * axes])})")
        product = op("Cast", "product", Entry(node), dtype=fitted.casted.compute)
        product = _widen(fitted, product, f"{node.name}_product_to_{FULL}")
        rounding.inputs[0] = op("broadcast_add", "biased", product, bias)
    return biased


def compute_in_float64(fitted: FittedGraph) -> list[Node]:
    """Change the casts to FP32 in front of each float16 deconvolution to casts to float64; return the deconvolutions.

    MXNet then computes the deconvolutions by its own float64 kernel: the backward of oneDNN's FP32 kernel raises an
    error if the weight is the output of a cast. The casts behind the deconvolutions round to float16 as before. 3-D
    deconvolutions are not changed, since the plan keeps them in FP32.
    """
    operators = ("Deconvolution", "_npx_deconvolution")
    deconvolutions = [node for node in fitted.low if node.op in operators and spatial_axes(node.attrs) != 3]
    for node in deconvolutions:
        for cast in (entry.node for entry in node.inputs if entry.node in fitted.widenings):
            name = f"{cast.name[: -len(FULL)]}float64"
            cast.name, cast.attrs["dtype"], cast.attrs[APART] = name, "float64", name
    return deconvolutions


def clamp_to_lowest(fitted: FittedGraph) -> list[Node]:
    """Raise the output of each max pooling that may have windows in padding alone to at least -65504; return the nodes.

    Only ``pooling_convention="full"``, which rounds the number of windows up, may have such windows. For such a window
    the FP32 kernel returns FP32's lowest value, which a cast to float16 would turn into -inf; -65504 is float16's
    lowest value.
    """

    def may_cover_padding(node: Node) -> bool:
        is_max = node.op in ("Pooling", "_npx_pooling") and node.attrs.get("pool_type", "max") == "max"
        return is_max and node.attrs.get("pooling_convention") == "full"

    poolings = [node for node in fitted.low if may_cover_padding(node)]
    for node in poolings:
        for cast in fitted.roundings.get(node, ()):
            name = cast.name if cast.attrs[MARK] == "head" else node.name
            name = f"{name}_of_{fitted.casted.compute}"
            cast.inputs[0] = inserted("_maximum_scalar", name, cast.inputs, scalar=-65504.0)
    return poolings


def skip_needless_roundings(fitted: FittedGraph) -> list[Node]:
    """Skip the cast to float16 behind each operator that only selects values, and the cast back to FP32 behind that.

    These operators (``Rule.exact``), such as relu, reshape and concat, read float16 numbers, so their FP32 outputs are
    float16 numbers too; in the backward, the casts in front of the operators round their gradients. So no number
    changes. Both casts stay if the output is one of the graph, or if anything but a single cast to FP32 reads it. A
    cast back that ``insert_casts`` inserted stays, too, but reads the operator's FP32 output. Returns all operators
    that only select values, also those whose casts stay.
    """
    nodes = [node for node in fitted.roundings if fitted.low[node].exact]
    readers = fitted.graph.consumers()
    heads = set(fitted.graph.heads)
    for node in nodes:
        for rounding in fitted.roundings[node]:
            users = readers.get(Entry(rounding), [])
            if len(users) == 1 and Entry(rounding) not in heads and casts_to(users[0][0], FULL):
                widening = users[0][0]
                for user, position in readers[Entry(widening)] if widening in fitted.widenings else users:
                    user.inputs[position] = rounding.inputs[0]
    return nodes
