"""The matrix products that one operator makes, from its attributes and the shapes of its tensors."""

from __future__ import annotations

from ast import literal_eval
from math import prod
from typing import Callable, Mapping, NamedTuple, Sequence

__all__ = ["Gemm", "Products", "Size", "is_matrix", "products"]

Shape = Sequence[int]


class Gemm(NamedTuple):
    """``times`` products of an (m, k) with a (k, n) matrix."""

    times: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """A multiply-add counts as two."""
        return 2 * self.times * self.m * self.n * self.k


class Size(NamedTuple):
    """A size that the user chose and a Tensor Core kernel wants to be a multiple, and what it is the size of.

    ``or_else``: one more value that has kernels of its own, 0 for none.
    """

    what: str
    value: int
    or_else: int = 0


class Products(NamedTuple):
    """What an operator multiplies.

    Attributes
    ----------
    gemms : tuple of Gemm
    sizes : tuple of Size
        Those that must be multiples: of a convolution its channels (per group), not the pixels or the patch.
    layout : str
        Of a convolution that of its tensors, otherwise which operands are transposed: NN, NT, TN or TT.
    """

    gemms: tuple[Gemm, ...]
    sizes: tuple[Size, ...]
    layout: str

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms)


def is_matrix(op: str) -> bool:
    """Whether an operator multiplies matrices."""
    return op in _PRODUCTS


def products(op: str, attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """The products of a matrix operator's forward.

    Parameters
    ----------
    op : str
        One that ``is_matrix``.
    attrs : mapping of str to str
        As in Symbol JSON.
    ins, out
        Shapes of all inputs, and of the first output.
    """
    return _PRODUCTS[op](attrs, ins, out)


# -- Convolutions -----------------------------------------------------------------------------------

_LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def _convolution(weight_at: int) -> Callable[..., Products]:
    """As an implicit GEMM, cuDNN's way: pixels by output channels by patch, each group apart."""

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        weight, groups = ins[weight_at], int(attrs.get("num_group", 1))
        layout = _layout(attrs, len(out) - 2)
        channels, filters = ins[0][layout.index("C")] // groups, weight[0] // groups
        gemm = Gemm(groups, prod(out) // weight[0], filters, prod(weight[1:]))
        # NVIDIA, Convolutional Layers User's Guide: 4 channels do for a first layer of stride 2.
        first = channels <= 4 and groups == 1 and set(literal_eval(attrs.get("stride", "()"))) == {2}
        return Products((gemm,), _channels(channels, filters, groups, 4 if first else 0), layout)

    return found


def _deconvolution(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """The data gradient of a convolution: pixels of the input by patch of the output by input channels."""
    data, weight = ins[:2]
    groups = int(attrs.get("num_group", 1))
    layout = _layout(attrs, len(out) - 2)
    at = layout.index("C")
    channels, filters = data[at] // groups, out[at] // groups
    gemm = Gemm(groups, prod(data) // data[at], prod(weight) // data[at], channels)
    return Products((gemm,), _channels(channels, filters, groups), layout)


def _layout(attrs: Mapping[str, str], axes: int) -> str:
    given = attrs.get("layout", "None")
    return _LAYOUTS[axes] if given == "None" else given


def _channels(channels: int, filters: int, groups: int, or_else: int = 0) -> tuple[Size, ...]:
    each = " a group" if groups > 1 else ""
    return Size(f"input channels{each}", channels, or_else), Size(f"output channels{each}", filters)


# -- Products ---------------------------------------------------------------------------------------


def _is(attrs: Mapping[str, str], key: str) -> bool:
    return attrs.get(key, "False") in ("True", "1")


def _letters(attrs: Mapping[str, str]) -> str:
    return "".join("T" if _is(attrs, key) else "N" for key in ("transpose_a", "transpose_b"))


def _plain(times: int, m: int, n: int, k: int, layout: str = "NN") -> Products:
    return Products((Gemm(times, m, n, k),), (Size("M", m), Size("N", n), Size("K", k)), layout)


def _fully_connected(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    outputs, inputs = ins[1]
    rows = prod(out) // outputs
    sizes = Size("rows (batch)", rows), Size("outputs", outputs), Size("inputs", inputs)
    return Products((Gemm(1, rows, outputs, inputs),), sizes, "NT")


def _dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    a, b = ins[:2]
    k = a[0] if _is(attrs, "transpose_a") else a[-1]
    return _plain(1, prod(a) // k, prod(b) // k, k, _letters(attrs))


def _np_dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    a, b = ins[:2]
    if not a or not b:  # by a scalar
        return Products((), (), "NN")
    return _plain(1, prod(a) // a[-1], prod(b) // a[-1], a[-1])


def _tensordot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    a, b = ins[:2]
    if "axes" in attrs:
        axes = range(len(a) - int(attrs["axes"]), len(a))
        k = prod(a[axis] for axis in axes)
    else:
        k = prod(a[axis] for axis in literal_eval(attrs["a_axes_summed"]))
    return _plain(1, prod(a) // k, prod(b) // k, k)


def _matmul(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    a, b = ins[:2]
    m, n = a[-2] if len(a) > 1 else 1, b[-1] if len(b) > 1 else 1
    return _plain(prod(out) // (m * n), m, n, a[-1])


def _batch_dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    row = int(attrs.get("axis", -2))  # of linalg_gemm: the matrices' other axis is the last one
    (m, k), (k2, n) = ((each[row], each[-1]) for each in ins[:2])
    if _is(attrs, "transpose_a"):
        m, k = k, m
    if _is(attrs, "transpose_b"):
        n = k2
    return _plain(prod(out) // (m * n), m, n, k, _letters(attrs))


def _attention(scores: bool, width_of: int, parts: int) -> Callable[..., Products]:
    """Queries by keys by a head's width, whatever is read interleaved; ``parts``: projections in that input."""

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        times, queries, keys = out if scores else ins[1]
        width = ins[width_of][2] // int(attrs["heads"]) // parts
        m, n, k = (queries, keys, width) if scores else (queries, width, keys)
        sizes = Size("queries", queries), Size("keys", keys), Size("width of a head", width)
        return Products((Gemm(times, m, n, k),), sizes, "NT" if scores else "NN")

    return found


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _rnn(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Per layer and direction: all steps' inputs in one product, as cuDNN does, then one product a step."""
    steps, batch, inputs = ins[0]
    hidden, layers = int(attrs["state_size"]), int(attrs["num_layers"])
    directions = 2 if _is(attrs, "bidirectional") else 1
    projection = int(attrs.get("projection_size", "None").replace("None", "0"))
    handed_on = projection or hidden
    wide = _GATES[attrs["mode"]] * hidden
    gemms = []
    for layer in range(layers):
        width = handed_on * directions if layer else inputs
        gemms.append(Gemm(directions, steps * batch, wide, width))
        gemms.append(Gemm(directions * steps, batch, wide, handed_on))
        if projection:
            gemms.append(Gemm(directions * steps, batch, projection, hidden))
    sizes = [Size("batch", batch), Size("inputs", inputs), Size("hidden", hidden)]
    sizes += [Size("projection", projection)] if projection else []
    return Products(tuple(gemms), tuple(sizes), "TNC")


_PRODUCTS: dict[str, Callable[..., Products]] = {
    "Convolution": _convolution(1),
    "_contrib_DeformableConvolution": _convolution(2),
    "_contrib_ModulatedDeformableConvolution": _convolution(3),
    "_contrib_quantized_conv": _convolution(1),
    "Deconvolution": _deconvolution,
    "FullyConnected": _fully_connected,
    "_contrib_quantized_fully_connected": _fully_connected,
    "dot": _dot,
    "_np_dot": _np_dot,
    "_npi_tensordot": _tensordot,
    "_npi_tensordot_int_axes": _tensordot,
    "_npi_matmul": _matmul,
    "batch_dot": _batch_dot,
    "_linalg_gemm": _batch_dot,
    "_linalg_gemm2": _batch_dot,
    "_contrib_interleaved_matmul_selfatt_qk": _attention(True, 0, 3),
    "_contrib_interleaved_matmul_selfatt_valatt": _attention(False, 0, 3),
    "_contrib_interleaved_matmul_encdec_qk": _attention(True, 0, 1),
    "_contrib_interleaved_matmul_encdec_valatt": _attention(False, 0, 2),
    "RNN": _rnn,
}
