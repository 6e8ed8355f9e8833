"""Weight gradients of convolutions that oneDNN computes wrongly where padding is not small beside the input.

A *tap* is one position of a convolution's kernel; a 3x3 kernel has nine. In 1-D and 2-D bfloat16 convolutions the
weight gradient of a tap that reads nothing but padding is not written. In 3-D ones the taps are counted wrongly.
"""

from __future__ import annotations

from math import prod
from operator import ge
from typing import Sequence

import mxnet as mx

from ..precision.casts import FULL, PASSED, LowGraph, is_ours, replace_heads, replace_operator
from ..precision.graph import Entry, Graph, Node, output_shapes
from ..precision.missing_kernels import numbers_in, spatial_axes
from .inserting import beside


def select_used_taps(fitted: LowGraph) -> list[Node]:
    """Make the weight gradient 0 for taps that read only padding; return the bfloat16 convolutions with such taps."""
    convolutions = [node for node in _may_read_padding(fitted.graph) if node in fitted.low and not fitted.large_inputs]
    for node in convolutions:
        # The graph compares these with the size of the data at each run: about 2 ns per weight and training step.
        _select(node, [least_inputs(*axis) for axis in _axes(node)])
    return convolutions


def pad_separately(fitted: LowGraph) -> list[Node]:
    """Let new nodes pad or crop instead of 3-D convolutions and deconvolutions; return the changed ones."""
    volumes = [] if fitted.large_inputs else _around_both_ends(fitted.graph)
    for node in volumes:
        if node.op == "Convolution":
            _pad(node, node in fitted.low and fitted.compute == "bfloat16")
    deconvolutions = [node for node in volumes if node.op == "Deconvolution"]
    if deconvolutions:
        replace_heads(fitted.graph, fitted.graph.insert_behind(deconvolutions, _crop))
    return volumes


class LargeInputs:
    """A check whether a network's inputs are so large that oneDNN's faults around padding do not occur.
    ``graph`` is in FP32, without casts; ``names`` has the inputs in the order of the shapes that ``at`` gets.
    """

    def __init__(self, graph: Graph, names: Sequence[str], compute: str) -> None:
        self._names = tuple(names)
        nodes = _around_both_ends(graph) + (_may_read_padding(graph) if compute == "bfloat16" else [])
        # The gradient of a deconvolution's weight is that of a convolution which reads what it writes.
        read = [node.inputs[0] if node.op == "Convolution" else Entry(node) for node in nodes]
        self._read = Graph(read, graph.attrs, numpy=graph.numpy).to_symbol() if nodes else None
        self._least = [_least_sizes(node) for node in nodes]
        self._known: dict[tuple, bool] = {}

    def __bool__(self) -> bool:
        # False: no input can be too small.
        return bool(self._least)

    def at(self, shapes: Sequence[tuple]) -> bool:
        """Return True if the graph needs no workaround around padding at these shapes; False if that is not known."""
        if not self:
            return True
        key = tuple(shapes)
        # Kept, as a block asks at every call.
        if key not in self._known:
            try:
                found = output_shapes(self._read, dict(zip(self._names, shapes)))
            except mx.MXNetError:  # they do not fit the graph, and its call will say so
                return False
            pairs = ((shape[2:], least) for shape, least in zip(found, self._least))
            self._known[key] = all(len(own) == len(least) and all(map(ge, own, least)) for own, least in pairs)
        return self._known[key]


def _may_read_padding(graph: Graph) -> list[Node]:
    """Return the 1-D and 2-D convolutions, of any dtype, in which a tap may read only padding at some input size."""
    flat = (node for node in graph.nodes() if node.op == "Convolution" and spatial_axes(node.attrs) != 3)
    # With a stride of 1 and a kernel of 3 oneDNN writes the bfloat16 weight gradient of every tap at any input size.
    # Measured: of 10,800 random convolutions 100 were wrong, none of them of this kind.
    return [n for n in flat if any(pad and (stride > 1 or kernel > 3) for kernel, stride, pad, _ in _axes(n))]


def _around_both_ends(graph: Graph) -> list[Node]:
    """Return the 3-D convolutions and deconvolutions whose kernel may cover padding at both ends of an axis at once."""

    def may(node: Node) -> bool:
        axes = _axes(node)
        # With a target_shape MXNet ignores pad.
        padded = any(pad for _, _, pad, _ in axes) and not _read(node, "target_shape", 0)[0]
        # Measured, with dilation in FP32 alone: a dilated 3-D convolution stays in FP32 beside bfloat16.
        return padded and any(kernel > 3 or stride > 1 or pad > 1 for kernel, stride, pad, _ in axes)

    volumes = (n for n in graph.nodes() if n.op in ("Convolution", "Deconvolution") and spatial_axes(n.attrs) == 3)
    return list(filter(may, volumes))


def _least_sizes(node: Node) -> list[int]:
    """Return, for each spatial axis, the least input size (a deconvolution's output) with a right weight gradient."""
    seen = [max(least_inputs(*axis)) for axis in _axes(node)]
    if spatial_axes(node.attrs) != 3:
        return seen
    # With a stride of 1, oneDNN counts the taps rightly if each reads some of the input.
    # With another, the kernel must not reach both ends at once.
    apart = [kernel - 1 + stride if pad and stride > 1 else 1 for kernel, stride, pad, _ in _axes(node)]
    return list(map(max, seen, apart))


def least_inputs(kernel: int, stride: int, pad: int, dilate: int) -> list[int]:
    """Return, for each tap along one axis, the least input size at which it reads some of the input."""
    # Tap t reads, for output p, input p * stride - pad + t * dilate. ``first`` is the first p for which that is not
    # in front of the input: such an output must exist, and what it reads must not be behind the input.
    least = []
    for tap in range(kernel):
        first = max(0, -(-(pad - tap * dilate) // stride))
        exists = first * stride + dilate * (kernel - 1) + 1 - 2 * pad
        least.append(max(1, exists, first * stride - pad + tap * dilate + 1))
    return least


def _axes(node: Node) -> list[tuple[int, int, int, int]]:
    """Return (kernel, stride, pad, dilate) of a convolution for each spatial axis, such as ``(3, 1, 1, 1)``."""
    names = {"kernel": 1, "stride": 1, "pad": 0, "dilate": 1}
    return list(zip(*(_read(node, name, default) for name, default in names.items())))


def _read(node: Node, name: str, default: int) -> Sequence[int]:
    return numbers_in(node.attrs.get(name)) or (default,) * spatial_axes(node.attrs)


def _pad(node: Node, low: bool) -> None:
    """Let a 3-D convolution read data that a new ``Pad`` has padded, and set its own padding to 0, in place."""
    op = beside(node)
    # Pad has no bfloat16 kernel, so it pads in FP32.
    given = _uncast(node, 0, "given") if low else node.inputs[0]
    width = [0, 0, 0, 0] + [pad for _, _, pad, _ in _axes(node) for _ in ("front", "behind")]
    padded = op("Pad", "padded", given, mode="constant", pad_width=tuple(width))
    node.rewire(0, op("amp_cast", "padded_low", padded, dtype="bfloat16") if low else padded)
    _drop_padding(node)


def _uncast(node: Node, position: int, role: str) -> Entry:
    """Return the FP32 tensor of which mxmp has cast the input at ``position``, or else a cast of it to FP32."""
    read = node.inputs[position]
    return read.node.inputs[0] if is_ours(read.node) else beside(node)("amp_cast", role, read, dtype=FULL)


def _crop(node: Node) -> Entry:
    """Set a deconvolution's ``pad`` to 0; return the output of a new ``slice`` that cuts ``pad`` off each end."""
    front = [pad or None for _, _, pad, _ in _axes(node)]
    begin, end = (None, None, *front), (None, None, *(pad and -pad for pad in front))
    _drop_padding(node)
    return beside(node)("slice", "cropped", Entry(node), begin=begin, end=end)


def _drop_padding(volume: Node) -> None:
    # The node keeps its former attributes, from which strip restores the padding.
    replace_operator(volume, volume.op, **{**volume.attrs, "pad": "(0, 0, 0)"})


def _select(node: Node, least: list[list[int]]) -> None:
    """Take the taps that read only padding from a copy of the weight that passes no gradient on, in place.
    ``least``: for each axis and tap, the least size of the data at which the tap reads some of it.
    """
    op = beside(node)
    sizes = op("shape_array", "shape", node.inputs[0])  # int64
    seen = op("_ones", "one", shape=(1, 1), dtype=FULL)
    for axis, limits in enumerate(least):
        size = op("slice_axis", f"size{axis}", sizes, axis=0, begin=axis + 2, end=axis + 3)
        taps = [op("_greater_equal_scalar", f"sees{axis}_{tap}", size, scalar=n) for tap, n in enumerate(limits)]
        joined = op("Concat", f"joined{axis}", *taps, dim=0, num_args=len(taps))
        choices = [op(f"_{name}", f"{name}{axis}", shape=(len(limits),), dtype=FULL) for name in ("ones", "zeros")]
        row = op("where", f"full{axis}", joined, *choices)
        both = op("dot", f"both{axis}", seen, op("Reshape", f"row{axis}", row, shape=(1, -1)))
        seen = op("Reshape", f"seen{axis}", both, shape=(-1, 1))
    seen = op("Reshape", "seen", seen, shape=(1, -1))
    weight = _uncast(node, 1, "weight")
    # The same taps for each pair of channels: a product with ones, twice as fast as a broadcast.
    pairs = op("Reshape", "pairs", weight, shape=(-1, prod(map(len, least))))
    shape = (int(node.attrs["num_filter"]), -1, *map(len, least))
    ones = op("ones_like", "ones", op("slice_axis", "first", pairs, axis=1, begin=0, end=1))
    everywhere = op("Reshape", "mask", op("dot", "product", ones, seen), shape=shape)
    fixed = op("BlockGrad", "weight_fixed", weight)
    selected = op("where", "weight_seen", everywhere, weight, fixed)
    selected.node.attrs[PASSED] = "1"
    # MXNet infers no shapes of inputs through "where"; through this identity it does.
    selected = op("_identity_with_attr_like_rhs", "weight_told", selected, fixed)
    node.rewire(1, op("amp_cast", "weight_low", selected, dtype="bfloat16"))
