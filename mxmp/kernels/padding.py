"""Padding around small inputs, with which oneDNN's weight gradients of convolutions are wrong."""

from __future__ import annotations

from ast import literal_eval
from math import prod
from operator import ge
from typing import Sequence

import mxnet as mx

from ..precision.casts import FULL, MARK, PASSED, is_ours, replace_heads, replace_operator
from ..precision.graph import Entry, Graph, Node, output_shapes
from ..precision.rules import is_volume
from .workaround import Fitting

__all__ = ["LargeInputs", "least_inputs", "pad_apart", "padded_volumes", "select_used_taps", "unused_taps"]

_DTYPE = {"dtype": "bfloat16", MARK: "cast"}


def unused_taps(fitting: Fitting) -> list[Node]:
    """Return the bfloat16 convolutions in which a tap of the kernel may read nothing but padding.

    The sizes of a call are not known here. Where they are, and are large enough, there are none: see ``LargeInputs``.
    """
    return [] if fitting.large_inputs else [node for node in _may_read_padding(fitting.graph) if _is_bfloat16(node)]


def select_used_taps(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Let through the gradients of the taps that read the input, by a select in front of the weight.

    The graph reads the sizes of the call; forward no value changes. About 2 ns per weight and step.
    """
    for node in nodes:
        _select(node, [least_inputs(*axis) for axis in _axes(node)])


def padded_volumes(fitting: Fitting) -> list[Node]:
    """Return the padded 3-D convolutions and deconvolutions whose padding in front and behind may meet."""
    return [] if fitting.large_inputs else _around_both_ends(fitting.graph)


def pad_apart(fitting: Fitting, nodes: Sequence[Node]) -> None:
    """Pad in front of convolutions and crop after deconvolutions: without padding of their own they are right.

    ``Pad`` has no bfloat16 kernel, so it stands in front of the cast.
    """
    for node in nodes:
        if node.op == "Convolution":
            _pad(node)
    deconvolutions = [node for node in nodes if node.op == "Deconvolution"]
    replace_heads(fitting.graph, fitting.graph.insert_behind(deconvolutions, _crop))


def _is_bfloat16(node: Node) -> bool:
    return node.inputs[1].node.attrs.get("dtype") == "bfloat16"


class LargeInputs:
    """Say of an FP32 graph whether padding is small beside what its convolutions read, by the shapes of a call.

    Each tap reads some of the input then, and no 3-D kernel the padding on both sides: a graph without the workarounds
    for ``unused_taps`` and ``padded_volumes`` is right. ``names``: the graph's inputs, in the order of shapes.
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
        """Return whether any shape matters."""
        return bool(self._least)

    def at(self, shapes: Sequence[tuple]) -> bool:
        """Return whether the inputs are large enough at these shapes; False where the shapes do not say."""
        if not self:
            return True
        key = tuple(shapes)
        if key not in self._known:
            try:
                found = output_shapes(self._read, dict(zip(self._names, shapes)))
            except mx.MXNetError:  # they do not fit the graph, and its call will say so
                return False
            pairs = ((shape[2:], least) for shape, least in zip(found, self._least))
            self._known[key] = all(len(own) == len(least) and all(map(ge, own, least)) for own, least in pairs)
        return self._known[key]


def _may_read_padding(graph: Graph) -> list[Node]:
    """Return the 1-D and 2-D convolutions in which a tap may read nothing but padding."""
    flat = (node for node in graph.nodes() if node.op == "Convolution" and not is_volume(node.attrs))
    return [node for node in flat if not all(_is_written(*axis) for axis in _axes(node))]


def _around_both_ends(graph: Graph) -> list[Node]:
    """Padded 3-D operators that may see padding on both sides at once, but for small kernels: one count is right."""

    def is_right(kernel: int, stride: int, pad: int, dilate: int) -> bool:
        return kernel <= 3 and stride == 1 and pad <= 1

    found = []
    for node in graph.nodes():
        if node.op in ("Convolution", "Deconvolution") and is_volume(node.attrs):
            padded = any(pad for _, _, pad, _ in _axes(node)) and not _read(node, "target_shape", 0)[0]
            if padded and not all(is_right(*axis) for axis in _axes(node)):
                found.append(node)
    return found


def _least_sizes(node: Node) -> list[int]:
    """Along each axis, from which size on the gradient of a convolution is right."""
    seen = [max(least_inputs(*axis)) for axis in _axes(node)]
    if not is_volume(node.attrs):
        return seen
    # With a stride of 1 the count is right wherever each tap sees something.
    apart = [kernel - 1 + stride if pad and stride > 1 else 1 for kernel, stride, pad, _ in _axes(node)]
    return list(map(max, seen, apart))


def least_inputs(kernel: int, stride: int, pad: int, dilate: int) -> list[int]:
    """Return, for each position of the kernel along one axis, the least size of an input that it overlaps.

    Tap t at output p reads input ``p * stride - pad + t * dilate``. The first p that is not in front of the
    input is ``first``; it must exist, and read within.
    """
    least = []
    for tap in range(kernel):
        first = max(0, -(-(pad - tap * dilate) // stride))
        exists = first * stride + dilate * (kernel - 1) + 1 - 2 * pad
        least.append(max(1, exists, first * stride - pad + tap * dilate + 1))
    return least


def _is_written(kernel: int, stride: int, pad: int, dilate: int) -> bool:
    """Return whether every position of the kernel gets a gradient.

    Those of stride 1 and at most 3 taps did, in 10,800 random 1-D and 2-D convolutions, of which 100 others were wrong.
    """
    return pad == 0 or (stride == 1 and kernel <= 3)


def _axes(node: Node) -> list[tuple[int, int, int, int]]:
    """Kernel, stride, padding and dilation along each axis."""
    names = {"kernel": 1, "stride": 1, "pad": 0, "dilate": 1}
    return list(zip(*(_read(node, name, default) for name, default in names.items())))


def _read(node: Node, name: str, default: int) -> Sequence[int]:
    return literal_eval(node.attrs.get(name, "()")) or (default,) * (node.attrs["kernel"].count(",") + 1)


def _pad(node: Node) -> None:
    given, low = node.inputs[0], _is_bfloat16(node)
    if low and is_ours(given.node):
        given = given.node.inputs[0]
    elif low:
        given = Entry(Node("amp_cast", f"{node.name}_given", {"dtype": FULL, MARK: "cast"}, [given]))
    width = [0, 0, 0, 0] + [pad for _, _, pad, _ in _axes(node) for _ in ("front", "behind")]
    attrs = {"mode": "constant", "pad_width": str(tuple(width)), MARK: "cast"}
    node.inputs[0] = Entry(Node("Pad", f"{node.name}_padded", attrs, [given]))
    if low:
        node.inputs[0] = Entry(Node("amp_cast", f"{node.name}_padded_low", dict(_DTYPE), [node.inputs[0]]))
    _drop_padding(node)


def _crop(node: Node) -> Entry:
    front = [pad or None for _, _, pad, _ in _axes(node)]
    ends = {"begin": (None, None, *front), "end": (None, None, *(pad and -pad for pad in front))}
    attrs = {name: str(value) for name, value in ends.items()}
    _drop_padding(node)
    return Entry(Node("slice", f"{node.name}_cropped", {**attrs, MARK: "cast"}, [Entry(node)]))


def _drop_padding(volume: Node) -> None:
    replace_operator(volume, volume.op, **{**volume.attrs, "pad": "(0, 0, 0)"})


def _select(node: Node, least: list[list[int]]) -> None:
    def op(kind: str, role: str, inputs: Sequence[Entry], **attrs: object) -> Entry:
        text = {name: str(value) for name, value in attrs.items()}
        return Entry(Node(kind, f"{node.name}_{role}", {**text, MARK: "cast"}, list(inputs)))

    sizes = op("shape_array", "shape", [node.inputs[0]])  # int64
    seen = op("_ones", "one", [], shape=(1, 1), dtype=FULL)
    for axis, limits in enumerate(least):
        size = op("slice_axis", f"size{axis}", [sizes], axis=0, begin=axis + 2, end=axis + 3)
        taps = [op("_greater_equal_scalar", f"sees{axis}_{tap}", [size], scalar=n) for tap, n in enumerate(limits)]
        joined = op("Concat", f"joined{axis}", taps, dim=0, num_args=len(taps))
        choices = [op(f"_{name}", f"{name}{axis}", [], shape=(len(limits),), dtype=FULL) for name in ("ones", "zeros")]
        row = op("where", f"full{axis}", [joined, *choices])
        both = op("dot", f"both{axis}", [seen, op("Reshape", f"row{axis}", [row], shape=(1, -1))])
        seen = op("Reshape", f"seen{axis}", [both], shape=(-1, 1))
    seen = op("Reshape", "seen", [seen], shape=(1, -1))
    cast = node.inputs[1]
    weight = cast.node.inputs[0] if is_ours(cast.node) else op("amp_cast", "weight", [cast], dtype=FULL)
    # The same taps for each pair of channels: a product with ones, twice as fast as a broadcast.
    pairs = op("Reshape", "pairs", [weight], shape=(-1, prod(map(len, least))))
    shape = (int(node.attrs["num_filter"]), -1, *map(len, least))
    ones = op("ones_like", "ones", [op("slice_axis", "first", [pairs], axis=1, begin=0, end=1)])
    everywhere = op("Reshape", "mask", [op("dot", "product", [ones, seen])], shape=shape)
    fixed = op("BlockGrad", "weight_fixed", [weight])
    selected = op("where", "weight_seen", [everywhere, weight, fixed])
    selected.node.attrs[PASSED] = "1"
    # "where" tells its inputs no shape, and this identity does.
    selected = op("_identity_with_attr_like_rhs", "weight_told", [selected, fixed])
    node.inputs[1] = Entry(Node("amp_cast", f"{node.name}_weight_low", dict(_DTYPE), [selected]))
