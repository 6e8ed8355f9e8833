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
        """Return the FLOPs of all products; a multiply-add counts as two."""
        return 2 * self.times * self.m * self.n * self.k


class Size(NamedTuple):
    """A size that the user chose and that Tensor Core kernels want to be a multiple; ``what`` it is the size of.

    ``or_else``: another value that has kernels of its own, 0 for none.
    """

    what: str
    value: int
    or_else: int = 0


class Products(NamedTuple):
    """What an operator multiplies; ``sizes`` and ``layout`` as in ``MatrixReport``.

    Of a convolution the channels (per group) must be multiples, not the pixels or the patch.
    """

    gemms: tuple[Gemm, ...]
    sizes: tuple[Size, ...]
    layout: str

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms)


def is_matrix(op: str) -> bool:
    """Return whether an operator multiplies matrices."""
    return op in _PRODUCTS


def products(op: str, attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the products of a matrix operator's forward.

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
    """Return the function for convolutions: an implicit GEMM of pixels, output channels and patch for each group."""

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        weight = ins[weight_at]
        return _convolved(attrs, ins[0], out, lambda g, c, f: Gemm(g, prod(out) // weight[0], f, prod(weight[1:])))

    return found


def _deconvolution(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return a convolution's data gradient: pixels of the input, patch of the output, input channels."""
    data, weight = ins[:2]
    return _convolved(
        attrs, data, out, lambda g, c, f: Gemm(g, prod(data) // (c * g), prod(weight) // (c * g), c), upwards=True
    )


def _convolved(
    attrs: Mapping[str, str], data: Shape, out: Shape, gemm: Callable[[int, int, int], Gemm], *, upwards: bool = False
) -> Products:
    """Return products for ``gemm``, a function of the number of groups, and of input and output channels of each."""
    layout, groups = attrs.get("layout", "None"), int(attrs.get("num_group", 1))
    layout = _LAYOUTS[len(out) - 2] if layout == "None" else layout
    channels, filters = (shape[layout.index("C")] // groups for shape in (data, out))
    # NVIDIA, Convolutional Layers User's Guide: 4 channels do for a first layer of stride 2.
    first = channels <= 4 and groups == 1 and set(literal_eval(attrs.get("stride", "()"))) == {2} and not upwards
    each = " a group" if groups > 1 else ""
    sizes = Size(f"input channels{each}", channels, 4 if first else 0), Size(f"output channels{each}", filters)
    return Products((gemm(groups, channels, filters),), sizes, layout)


# -- Products ---------------------------------------------------------------------------------------


def _is_true(attrs: Mapping[str, str], key: str) -> bool:
    return attrs.get(key, "False") in ("True", "1")


def _product(gemm: Gemm, layout: str = "NN", names: Sequence[str] = "MNK") -> Products:
    """Return one product; ``names`` says what M, N and K are the sizes of."""
    return Products((gemm,), tuple(map(Size, names, gemm[1:])), layout)


def _fully_connected(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    outputs, inputs = ins[1]
    return _product(Gemm(1, prod(out) // outputs, outputs, inputs), "NT", ("rows (batch)", "outputs", "inputs"))


def _dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the product over one axis of each, or over those of ``tensordot``; none where one is a scalar."""
    a, b = ins[:2]
    if not a or not b:
        return Products((), (), "NN")
    axes = [0 if _is_true(attrs, "transpose_a") else len(a) - 1]
    if "a_axes_summed" in attrs:
        axes = literal_eval(attrs["a_axes_summed"])
    elif "axes" in attrs:
        axes = [*range(len(a) - int(attrs["axes"]), len(a))]
    k = prod(a[axis] for axis in axes)
    return _product(Gemm(1, prod(a) // k, prod(b) // k, k), _transposition(attrs))


def _batch_dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the products of batches; ``axis`` of ``linalg_gemm`` is that of the rows, the last that of columns."""
    row = int(attrs.get("axis", -2))
    a, b = (shape if len(shape) > 1 else (1, *shape) if left else (*shape, 1) for shape, left in zip(ins, (1, 0)))
    m, k = (a[-1], a[row]) if _is_true(attrs, "transpose_a") else (a[row], a[-1])
    n = b[row] if _is_true(attrs, "transpose_b") else b[-1]
    return _product(Gemm(prod(out) // (m * n), m, n, k), _transposition(attrs))


def _transposition(attrs: Mapping[str, str]) -> str:
    return "".join("T" if _is_true(attrs, key) else "N" for key in ("transpose_a", "transpose_b"))


def _attention(scores: bool, width_of: int, parts: int) -> Callable[..., Products]:
    """Return the function for attention: queries by keys by a head's width.

    ``width_of``: the input that the width is read from, which interleaves ``parts`` projections.
    """

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        times, queries, keys = out if scores else ins[1]
        width = ins[width_of][2] // int(attrs["heads"]) // parts
        m, n, k = (queries, keys, width) if scores else (queries, width, keys)
        sizes = Size("queries", queries), Size("keys", keys), Size("width of a head", width)
        return Products((Gemm(times, m, n, k),), sizes, "NT" if scores else "NN")

    return found


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _rnn(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return, for each layer and direction, one product of all steps' inputs, as cuDNN does, and one at each step."""
    steps, batch, inputs = ins[0]
    hidden, layers = int(attrs["state_size"]), int(attrs["num_layers"])
    directions = 2 if _is_true(attrs, "bidirectional") else 1
    projection = int(attrs.get("projection_size", "None").replace("None", "0"))
    outputs = projection or hidden
    wide = _GATES[attrs["mode"]] * hidden
    gemms = []
    for layer in range(layers):
        width = outputs * directions if layer else inputs
        gemms.append(Gemm(directions, steps * batch, wide, width))
        gemms.append(Gemm(directions * steps, batch, wide, outputs))
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
    "_np_dot": _dot,
    "_npi_tensordot": _dot,
    "_npi_tensordot_int_axes": _dot,
    "_npi_matmul": _batch_dot,
    "batch_dot": _batch_dot,
    "_linalg_gemm": _batch_dot,
    "_linalg_gemm2": _batch_dot,
    "_contrib_interleaved_matmul_selfatt_qk": _attention(True, 0, 3),
    "_contrib_interleaved_matmul_selfatt_valatt": _attention(False, 0, 3),
    "_contrib_interleaved_matmul_encdec_qk": _attention(True, 0, 1),
    "_contrib_interleaved_matmul_encdec_valatt": _attention(False, 0, 2),
    "RNN": _rnn,
}
