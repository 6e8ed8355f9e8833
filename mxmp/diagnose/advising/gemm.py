"""The matrix products that one operator makes, from its attributes and the shapes of its tensors."""

from __future__ import annotations

from ast import literal_eval
from math import prod
from typing import Callable, Mapping, NamedTuple, Sequence

from ...precision.rule import is_true, numbers_in

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
    """The matrix products that one forward of an operator computes.

    ``gemms`` has the sizes M, N and K of the products. ``sizes`` are the dimensions that should be multiples of 8 or 16
    for Tensor Cores: of a convolution the channels of a group, not the pixels or the kernel's size. ``layout`` is that
    of a convolution's tensors, such as ``"NCHW"``; ``"TNC"`` for a recurrent layer; and for all others says which
    of the two operands are transposed: ``"NN"``, ``"NT"``, ``"TN"`` or ``"TT"``.
    """

    gemms: tuple[Gemm, ...]
    sizes: tuple[Size, ...]
    layout: str

    @property
    def flops(self) -> int:
        """Return the FLOPs of all products in ``gemms``; a multiply-add counts as two."""
        return sum(gemm.flops for gemm in self.gemms)


def is_matrix(op: str) -> bool:
    """Return whether ``op``, such as ``"Convolution"``, is a key of ``_PRODUCTS``; ``products`` takes no other type."""
    return op in _PRODUCTS


def products(op: str, attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the matrix products of one forward of an operator of type ``op``; ``is_matrix(op)`` must be True.

    ``attrs`` are its attributes as in Symbol JSON, ``{"num_filter": "64"}``; ``ins`` are the shapes of all inputs, and
    ``out`` is that of the first output.
    """
    return _PRODUCTS[op](attrs, ins, out)


# -- Convolutions -----------------------------------------------------------------------------------

_LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def _convolution(weight_at: int) -> Callable[..., Products]:
    """Return the function that ``products`` calls for one type of convolution.

    ``weight_at`` is the position of the weight among the inputs, from 0. There is one matrix product for each group: M
    is the number of output pixels of the batch, N the output channels of the group, and K the input channels of the
    group times the kernel's size.
    """

    def found(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
        weight = ins[weight_at]
        return _convolved(attrs, ins[0], out, lambda g, c, f: Gemm(g, prod(out) // weight[0], f, prod(weight[1:])))

    return found


def _deconvolution(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the matrix products of a Deconvolution, which computes the same as the data gradient of a convolution.

    There is one for each group: M is the number of input pixels of the batch, N the output channels of the group times
    the kernel's size, and K the input channels of the group.
    """
    data, weight = ins[:2]
    return _convolved(
        attrs, data, out, lambda g, c, f: Gemm(g, prod(data) // (c * g), prod(weight) // (c * g), c), upwards=True
    )


def _convolved(
    attrs: Mapping[str, str], data: Shape, out: Shape, gemm: Callable[[int, int, int], Gemm], *, upwards: bool = False
) -> Products:
    """Return the matrix products of a convolution or Deconvolution; its Sizes are the input and output channels.

    ``gemm`` is called with three numbers: the groups, and the input and the output channels of one group. ``upwards``
    is True for a Deconvolution, which has no fast kernels for 4 input channels.
    """
    layout, groups = attrs.get("layout", "None"), int(attrs.get("num_group", 1))
    layout = _LAYOUTS[len(out) - 2] if layout == "None" else layout
    channels, filters = (shape[layout.index("C")] // groups for shape in (data, out))
    # NVIDIA, Convolutional Layers User's Guide: 4 channels do for a first layer of stride 2.
    first = channels <= 4 and groups == 1 and set(numbers_in(attrs.get("stride"))) == {2} and not upwards
    each = " a group" if groups > 1 else ""
    sizes = Size(f"input channels{each}", channels, 4 if first else 0), Size(f"output channels{each}", filters)
    return Products((gemm(groups, channels, filters),), sizes, layout)


# -- Products ---------------------------------------------------------------------------------------


def _product(gemm: Gemm, layout: str, names: Sequence[str] = "MNK") -> Products:
    """Return the Products of an operator with one Gemm, whose M, N and K should all be multiples of 8 or 16.

    ``names`` says what M, N and K are in this operator, for example ``("rows (batch)", "outputs", "inputs")``.
    """
    return Products((gemm,), tuple(map(Size, names, gemm[1:])), layout)


def _fully_connected(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the matrix product of a FullyConnected: by default the first axis of the data is the rows.

    With ``flatten=False``, all axes but the last are.
    """
    outputs, inputs = ins[1]
    return _product(Gemm(1, prod(out) // outputs, outputs, inputs), "NT", ("rows (batch)", "outputs", "inputs"))


def _dot(attrs: Mapping[str, str], ins: Sequence[Shape], out: Shape) -> Products:
    """Return the matrix product of ``dot`` or ``tensordot``; there is no Gemm if an operand is a scalar.

    ``dot`` sums over one axis of each operand, ``tensordot`` over one or several; K is the size of these axes together.
    """
    a, b = ins[:2]
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
    """Return the matrix products of ``batch_dot``, ``np.matmul``, ``linalg_gemm`` or ``linalg_gemm2``.

    A matrix's columns are the last axis of its array, and its rows the last but one, or the axis that the attribute
    ``axis`` of ``linalg_gemm`` and ``linalg_gemm2`` names. An operand with one axis is one row if it is the first, one
    column if it is the second.
    """
    row = int(attrs.get("axis", -2))
    a, b = (shape if len(shape) > 1 else (1, *shape) if left else (*shape, 1) for shape, left in zip(ins, (1, 0)))
    m, k = (a[-1], a[row]) if is_true(attrs.get("transpose_a")) else (a[row], a[-1])
    n = b[row] if is_true(attrs.get("transpose_b")) else b[-1]
    return _product(Gemm(prod(out) // (m * n), m, n, k), _transposition(attrs))


def _transposition(attrs: Mapping[str, str]) -> str:
    """Return a letter for each of an operator's two operands, T if it is transposed, otherwise N, such as ``"NT"``."""
    return "".join("T" if is_true(attrs.get(key)) else "N" for key in ("transpose_a", "transpose_b"))


def _attention(scores: bool, width_of: int, parts: int) -> Callable[..., Products]:
    """Return the function that ``products`` calls for one of MXNet's ``interleaved_matmul`` attention operators.

    ``scores`` is True for an operator that multiplies queries and keys, False for one that multiplies attention weights
    and values. The last axis of the input at position ``width_of`` is ``parts`` times the heads times the width of a
    head, as ``parts`` projections are interleaved (3 for queries, keys and values).
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
    """Return the matrix products of a recurrent operator (``RNN``).

    Each layer in each direction multiplies the inputs of all time steps at once, as cuDNN does. Then, at each time
    step, it multiplies the hidden state by the weights of the gates. An LSTM with a projection has one more product at
    each time step.
    """
    steps, batch, inputs = ins[0]
    hidden, layers = int(attrs["state_size"]), int(attrs["num_layers"])
    directions = 2 if is_true(attrs.get("bidirectional")) else 1
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
