"""The matrix products that one operator makes, from its attributes and the shapes of its tensors."""

from __future__ import annotations

from ast import literal_eval
from math import prod
from typing import Callable, Mapping, NamedTuple, Sequence

from ...precision.missing_kernels import is_true, numbers_in

Shape = Sequence[int]


class Gemm(NamedTuple):
    """Several matrix products of one shape: ``times`` products of an (m, k) matrix and a (k, n) matrix."""

    times: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of all ``times`` products; a multiply-add counts as two."""
        return 2 * self.times * self.m * self.n * self.k


class Size(NamedTuple):
    """One dimension of a matrix operator whose size should be a multiple of 8, or of 16 in INT8, for Tensor Cores.

    ``what`` says which dimension, such as ``"output channels"``, and ``value`` is its size. ``or_else`` is a smaller
    size for which there are fast kernels too: 4 for at most 4 input channels of an ungrouped convolution of stride 2,
    as in a first layer; otherwise 0, for none.
    """

    what: str
    value: int
    or_else: int = 0


class Products(NamedTuple):
    """The matrix products that one forward of an operator computes."""

    gemms: tuple[Gemm, ...]
    # Those that should be multiples of 8 or 16: of a convolution the channels of a group, not the pixels.
    sizes: tuple[Size, ...]
    # Of a convolution's tensors; "TNC" for a recurrent layer; else the operands that are transposed: "NT".
    layout: str

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms)


# -- Convolutions -----------------------------------------------------------------------------------

_LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def _convolution(weight_at: int) -> Callable[..., Products]:
    """Return the function of ``PRODUCTS`` for a convolution whose weight is the input ``weight_at``."""

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        weight = ins[weight_at]
        # M: output pixels of the batch; N: output channels; K: input channels times the kernel's size.
        return _convolved(attrs, ins[0], out, lambda g, c, f: Gemm(g, prod(out) // weight[0], f, prod(weight[1:])))

    return found


def _deconvolution(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    # The data gradient of a convolution. M: input pixels of the batch; N: output channels times the kernel's size; K:
    # input channels.
    data, weight = ins[:2]
    return _convolved(
        attrs, data, out, lambda g, c, f: Gemm(g, prod(data) // (c * g), prod(weight) // (c * g), c), upwards=True
    )


def _convolved(
    attrs: Mapping[str, str], data: Shape, out: Shape, gemm: Callable[[int, int, int], Gemm], *, upwards: bool = False
) -> Products:
    """Return the products; ``gemm`` takes the groups, and the input and the output channels of one group."""
    layout, groups = attrs.get("layout", "None"), int(attrs.get("num_group", 1))
    layout = _LAYOUTS[len(out) - 2] if layout == "None" else layout
    channels, filters = (shape[layout.index("C")] // groups for shape in (data, out))
    # NVIDIA, Convolutional Layers User's Guide: 4 channels do for a first layer of stride 2.
    # A Deconvolution (upwards) has no such kernels.
    first = channels <= 4 and groups == 1 and set(numbers_in(attrs.get("stride"))) == {2} and not upwards
    each = " a group" if groups > 1 else ""
    sizes = Size(f"input channels{each}", channels, 4 if first else 0), Size(f"output channels{each}", filters)
    return Products((gemm(groups, channels, filters),), sizes, layout)


# -- Products ---------------------------------------------------------------------------------------


def _product(gemm: Gemm, layout: str, names: Sequence[str] = "MNK") -> Products:
    """Return the Products of one Gemm, whose M, N and K, called ``names``, should all be multiples of 8 or 16."""
    return Products((gemm,), tuple(map(Size, names, gemm[1:])), layout)


def _fully_connected(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    # Rows are the first axis, with flatten=False all but the last.
    outputs, inputs = ins[1]
    return _product(Gemm(1, prod(out) // outputs, outputs, inputs), "NT", ("rows (batch)", "outputs", "inputs"))


def _dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    a, b = ins[:2]
    # An operand is a scalar.
    if not a or not b:
        return Products((), (), "NN")
    axes = [0 if is_true(attrs.get("transpose_a")) else len(a) - 1]
    if "a_axes_summed" in attrs:
        axes = literal_eval(attrs["a_axes_summed"])
    elif "axes" in attrs:
        axes = [*range(len(a) - int(attrs["axes"]), len(a))]
    k = prod(a[axis] for axis in axes)
    return _product(Gemm(1, prod(a) // k, prod(b) // k, k), _transposition(attrs))


def _batch_dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    row = int(attrs.get("axis", -2))
    # An operand with one axis is one row, or one column. Only linalg_gemm and linalg_gemm2 have the attribute axis.
    a, b = (shape if len(shape) > 1 else (1, *shape) if left else (*shape, 1) for shape, left in zip(ins, (1, 0)))
    m, k = (a[-1], a[row]) if is_true(attrs.get("transpose_a")) else (a[row], a[-1])
    n = b[row] if is_true(attrs.get("transpose_b")) else b[-1]
    return _product(Gemm(prod(out) // (m * n), m, n, k), _transposition(attrs))


def _transposition(attrs: Mapping[str, str]) -> str:
    """Return a letter for each operand, such as ``"NT"``: T if it is transposed."""
    return "".join("T" if is_true(attrs.get(key)) else "N" for key in ("transpose_a", "transpose_b"))


def _attention(scores: bool, width_of: int, parts: int) -> Callable[..., Products]:
    """Return the function of ``PRODUCTS`` for queries times keys (``scores``), or attention weights times values."""

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        times, queries, keys = out if scores else ins[1]
        # ``parts`` projections are interleaved, such as 3 for queries, keys and values.
        width = ins[width_of][2] // int(attrs["heads"]) // parts
        m, n, k = (queries, keys, width) if scores else (queries, width, keys)
        sizes = Size("queries", queries), Size("keys", keys), Size("width of a head", width)
        return Products((Gemm(times, m, n, k),), sizes, "NT" if scores else "NN")

    return found


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _rnn(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    steps, batch, inputs = ins[0]
    hidden, layers = int(attrs["state_size"]), int(attrs["num_layers"])
    directions = 2 if is_true(attrs.get("bidirectional")) else 1
    projection = int(attrs.get("projection_size", "None").replace("None", "0"))
    outputs = projection or hidden
    wide = _GATES[attrs["mode"]] * hidden
    gemms = []
    for layer in range(layers):
        width = outputs * directions if layer else inputs
        # The inputs of all time steps at once, as cuDNN does; then, at each, the hidden state.
        gemms.append(Gemm(directions, steps * batch, wide, width))
        gemms.append(Gemm(directions * steps, batch, wide, outputs))
        if projection:
            gemms.append(Gemm(directions * steps, batch, projection, hidden))
    sizes = [Size("batch", batch), Size("inputs", inputs), Size("hidden", hidden)]
    sizes += [Size("projection", projection)] if projection else []
    return Products(tuple(gemms), tuple(sizes), "TNC")


# Functions of the attributes as in Symbol JSON, the shapes of the inputs and that of the output: the products of one
# forward of each matrix operator.
PRODUCTS: dict[str, Callable[..., Products]] = {
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
