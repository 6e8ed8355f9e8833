"""Which low-precision kernels MXNet 1.9.1 lacks on a device: a table with one row for operators with the same reason.

A rule of ``rule_table.py`` may allow a dtype for which the device has no kernel, or one that gives wrong numbers or is
slower than FP32's. Such operators compute in FP32.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from math import prod
from typing import Callable, Mapping, NamedTuple

from .rule import is_exact
from .rule_table import LINEAR_ALGEBRA


class Call(NamedTuple):
    """One operator of a graph, with what the conditions of the table may depend on."""

    op: str
    attrs: Mapping[str, str]
    channels: int | None  # of the first input, if ``num_filter`` of convolutions determines them
    # Of the data of one of ``SLOW_BY_SHAPE`` that trains in bfloat16; a size that is not known is 0.
    data_shape: tuple[int, ...] = ()


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class MissingKernel:
    """One row of the table: operators that stay in FP32 on a device, and why."""

    reason: str  # {op}, {channels} and parameters such as {act_type} stand for their values
    operators: frozenset[str]
    where: Callable[[Call], bool] = _always
    all_others: bool = False  # about all operators except ``operators``
    slow: bool = False  # right, but slower than FP32's with casts around it: only ``mxmp.tune`` may choose it

    def reason_for(self, call: Call) -> str:
        return self.reason.format_map({**call.attrs, "op": call.op, "channels": call.channels})


# -- Conditions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HasAttribute:
    """A condition: ``attr`` has one of ``values``, never its default, as Symbol JSON may leave that out."""

    attr: str
    values: tuple[str, ...]

    def __call__(self, call: Call) -> bool:
        return call.attrs.get(self.attr) in self.values


def is_true(text: str | None) -> bool:
    """Return whether a boolean parameter is true for MXNet; False for None. R writes ``"TRUE"``."""
    return text is not None and text.lower() in ("true", "1")


def numbers_in(text: str | None) -> tuple[int, ...]:
    """Return the numbers of a tuple parameter, without signs: (3, 3) for ``"(3, 3)"``; ``()`` for None."""
    # MXNet also reads "3", a tuple of one number, and the "(3L, 3L)" that Python 2 wrote.
    return tuple(map(int, re.findall("[0-9]+", text))) if text else ()


def spatial_axes(attrs: Mapping[str, str]) -> int:
    """Return how many axes the parameter ``kernel`` has, such as 2 for a 2-D convolution; 0 without it."""
    return len(numbers_in(attrs.get("kernel")))


def is_global_average(attrs: Mapping[str, str]) -> bool:
    """Return whether an AdaptiveAvgPooling2D averages each channel to one value."""
    return set(numbers_in(attrs.get("output_size"))) <= {1}


def _is_unmeasured_volume(call: Call) -> bool:
    # oneDNN's bfloat16 gradients of the other 3-D convolutions are right, at small inputs with kernels/padding.py.
    if spatial_axes(call.attrs) != 3:
        return False
    return bool(set(numbers_in(call.attrs.get("dilate"))) - {1}) or max(numbers_in(call.attrs["kernel"])) > 7


def _scales_inexactly(call: Call) -> bool:
    """Return whether a product with the constant of ``call`` needs rounding in bfloat16: MXNet's kernel truncates."""
    try:
        mantissa, exponent = math.frexp(abs(float(call.attrs.get("scalar", ""))))
    except ValueError:
        return True
    # A power of two changes the exponent only, and from 2**-17 to 2**15 that rarely leaves bfloat16's range.
    return mantissa != 0.5 or not -16 <= exponent <= 16


def _truncates_a_bound(call: Call) -> bool:
    """Return whether the clip ``call`` has a bound that bfloat16 cannot hold exactly (``a_max=0.1``)."""
    return not all(bound in call.attrs and is_exact(call.attrs[bound], "bfloat16") for bound in ("a_min", "a_max"))


def _doubles(attrs: Mapping[str, str]) -> bool:
    """Return whether an ``UpSampling`` can be computed in steps of scale 2 (``kernels.cuda.double_in_steps``)."""
    # Each gradient of a step is a float16 sum of 4 terms. Of several tensors, smaller ones are enlarged by more.
    scale, is_nearest = int(attrs["scale"]), attrs.get("sample_type") != "bilinear"
    return scale > 1 and scale & (scale - 1) == 0 and is_nearest and attrs.get("num_args", "1") == "1"


def _convolves_without_cudnn(call: Call) -> bool:
    """Return whether a GPU computes such a convolution by MXNet's own kernels instead of cuDNN's."""
    return is_true(call.attrs.get("cudnn_off")) or call.attrs.get("layout") in ("NWC", "NDHWC")


def _pools_often_without_cudnn(call: Call) -> bool:
    """Return whether MXNet's own kernel of Pooling adds more than two gradients to a value: fewer are rounded once."""
    axes = spatial_axes(call.attrs)
    if is_true(call.attrs.get("global_pool")) or (axes in (2, 3) and not is_true(call.attrs.get("cudnn_off"))):
        return False
    strides = numbers_in(call.attrs.get("stride")) or (1,) * axes
    return prod(-(-side // (step or 1)) for side, step in zip(numbers_in(call.attrs.get("kernel")), strides)) > 2


def _adds_many(call: Call) -> bool:
    # Its sum is rounded with each term.
    return int(call.attrs.get("num_args", "0")) > 8


def leaves_cudnn(attrs: Mapping[str, str]) -> bool:
    """Return whether a GPU computes such a BatchNorm by MXNet's own kernel instead of cuDNN's."""
    # In float16 MXNet's kernel sums in FP32 too, but rounds gamma, beta, the mean and the terms of gamma's gradient
    # (src/operator/nn/batch_norm.cu), which cuDNN's does not. So it reads float16 only by norm="compute" or low_ops.
    return any(is_true(attrs.get(attr)) for attr in ("use_global_stats", "cudnn_off"))


# How many channels a block of oneDNN's bfloat16 layouts has; FP32 has a layout with blocks of 8 too. In bfloat16 the
# block of MobileNet that has 72 channels runs at 0.23 of FP32's speed if all is in bfloat16, and at 0.85 with the rows
# for such channels below (scripts/dev.py bench layouts; one core of a Zen 5).
CHANNEL_BLOCK = 16


def _is_unblocked(call: Call) -> bool:
    return call.channels is not None and call.channels % CHANNEL_BLOCK != 0


def _is_unblocked_depthwise(call: Call) -> bool:
    filters = call.attrs["num_filter"]
    return call.attrs.get("num_group", "1") == filters != "1" and int(filters) % CHANNEL_BLOCK != 0


# From so many weights on, a FullyConnected that reads fewer than so many rows trains slower in bfloat16 than in FP32,
# and needs more memory (scripts/dev.py bench products): oneDNN sums the gradient of the weights in an FP32 array of
# their size, beside the copy of the weights and the gradient in bfloat16. From 2**23 weights on, that array has more
# than 32 MiB and is new at each call (glibc's largest M_MMAP_THRESHOLD), so the kernel clears every page of it.
_FEW_ROWS = ((1_000_000, 16), (1 << 23, 96))
# The reason in a plan. It does not hold for larger inputs, so a Gluon block builds another graph for these.
FEW_ROWS = (
    "with fewer than 16 rows for a million weights, or 96 rows for 8 million, a FullyConnected trains slower in "
    "bfloat16, and needs more memory"
)


def _has_few_rows(call: Call) -> bool:
    """Return whether the FullyConnected ``call`` trains with few rows for its weights; False if that is not known."""
    if not call.data_shape or not all(call.data_shape):
        return False
    flattens = is_true(call.attrs.get("flatten", "True"))
    rows = prod(call.data_shape[:1] if flattens else call.data_shape[:-1])
    weights = prod(call.data_shape) // rows * int(call.attrs["num_hidden"])
    return any(weights >= many and rows < few for many, few in _FEW_ROWS)


# -- Data -------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Those of ``_has_few_rows``.
SLOW_BY_SHAPE = _names("FullyConnected")
# Operators whose bfloat16 CPU kernel is right, forward and backward (docs/kernels.md; a test compares the two).
# Of the others many raise ("Unknown type enum 12"), sum gradients in bfloat16 (of a broadcast, tiled or repeated
# input: 2 % off over 3,000 values, 15 % over 50,000, with MXNET_SAFE_ACCUMULATION too), read the memory of another
# layout (transpose) or end the process (Deconvolution).
BFLOAT16_CPU = _names(
    """Convolution FullyConnected BatchNorm _contrib_BatchNormWithReLU Pooling Activation relu LeakyReLU softmax
    log_softmax sigmoid tanh abs negative elemwise_add elemwise_sub _maximum _minimum add_n _mul_scalar
    _div_scalar Reshape Flatten expand_dims squeeze reshape_like slice_like _copy BlockGrad Concat stack slice
    slice_axis SliceChannel _split_v2 reverse where depth_to_space space_to_depth"""
)
_CLIP = _names("clip")
# mshadow's kernels drop the lower half of the FP32 result (and of the constant), which loses half a unit in the last
# place on average; oneDNN's kernels round (docs/kernels.md).
_TRUNCATING = _names("softsign elemwise_mul _contrib_div_sqrt_dim _plus_scalar _minus_scalar _rminus_scalar")
# Where bfloat16 holds the bounds, clip rounds nothing and is right, but it takes three times FP32's time, and ten times
# that of the two operators by which the workaround ``clip_by_bounds`` replaces it.
_SLOW_CLIP = "the bfloat16 CPU kernel of {op} is three times slower than FP32's, and truncates its bounds"

# Operators, what their GPU kernel sums in float16, and the file of MXNet 1.9.1 that shows it. Sums belong in FP32
# ("Mixed Precision Training", ICLR 2018, 3.3).
_SUMS_ON_A_GPU = (
    ("take", "the gradients of equal indices", "3rdparty/mshadow/mshadow/cuda/tensor_gpu-inl.cuh"),
    ("gather_nd", "the gradients of equal indices", "src/operator/tensor/indexing_op.cu"),
    ("im2col", "the gradients of overlapping windows", "src/operator/nn/im2col.cuh"),
    ("_contrib_BilinearResize2D", "its gradient", "src/operator/contrib/bilinear_resize.cu"),
)

_FLOAT16_GPU = (
    MissingKernel(
        "its GPU kernel sums products in float16: cublasHgemmStridedBatched "
        "(3rdparty/mshadow/mshadow/dot_engine-inl.h)",
        _names("batch_dot _npi_matmul"),
    ),
    MissingKernel(
        "it has no float16 GPU kernel: 'Unsupported data type 2' at bind (src/operator/crop-inl.h)", _names("Crop")
    ),
    MissingKernel(
        "without cuDNN, as by cudnn_off=True, its GPU kernel sums gradients over images and windows in float16 "
        "(src/operator/nn/convolution-inl.h)",
        _names("Convolution Deconvolution"),
        _convolves_without_cudnn,
    ),
    MissingKernel(
        "without cuDNN, as over one axis or by cudnn_off=True, its GPU kernel sums gradients of overlapping windows in "
        "float16 (src/operator/nn/pool.cuh)",
        _names("Pooling"),
        _pools_often_without_cudnn,
    ),
    MissingKernel(
        "its GPU kernel adds more than a few terms in float16: 4,096 ones are 2048 "
        "(src/operator/tensor/elemwise_sum.h)",
        _names("add_n"),
        _adds_many,
    ),
    MissingKernel(
        "its GPU kernel sums the gradients of a value's copies in float16 "
        "(3rdparty/mshadow/mshadow/extension/spatial_pool.h)",
        _names("UpSampling"),
        lambda call: not _doubles(call.attrs),
    ),
    MissingKernel(
        "its GPU kernel sums each window in float16 where output_size is not 1 "
        "(src/operator/contrib/adaptive_avg_pooling.cu)",
        _names("_contrib_AdaptiveAvgPooling2D"),
        lambda call: not is_global_average(call.attrs),
    ),
    MissingKernel(
        "its GPU kernel sums the gradients of the copies of an edge in float16: 3,721 ones are 2048 "
        "(src/operator/pad.cu)",
        _names("Pad"),
        HasAttribute("mode", ("edge",)),
    ),
    *(
        MissingKernel(f"its GPU kernel sums {what} in float16 ({file})", _names(operators))
        for operators, what, file in _SUMS_ON_A_GPU
    ),
)

# From a device and a compute dtype to the rows; the first one that is about an operator and whose condition is true
# counts. float16 on a CPU is emulated with FP32 kernels: it shows what a GPU does, so it has the GPU's rows too.
TABLE: dict[tuple[str, str], tuple[MissingKernel, ...]] = {
    ("cpu", "float16"): (
        MissingKernel(
            "the backward of a 3-D deconvolution fails on a CPU where the graph computes its weight, as a cast does",
            _names("Deconvolution"),
            lambda call: spatial_axes(call.attrs) == 3,
        ),
        *_FLOAT16_GPU,
    ),
    ("gpu", "float16"): (
        *_FLOAT16_GPU,
        MissingKernel("MXNet registers float32 and float64 kernels of it only", _names(LINEAR_ALGEBRA)),
    ),
    ("cpu", "bfloat16"): (
        MissingKernel(_SLOW_CLIP, _CLIP, _truncates_a_bound),
        MissingKernel(_SLOW_CLIP, _CLIP, slow=True),
        MissingKernel(
            "the bfloat16 CPU kernel of {op} truncates instead of rounding: half a unit in the last place too small "
            "on average",
            _TRUNCATING,
        ),
        MissingKernel(
            "the bfloat16 CPU kernel of {op} truncates instead of rounding, its constant too",
            _names("_mul_scalar _div_scalar"),
            _scales_inexactly,
        ),
        MissingKernel("MXNet 1.9.1 has no sound bfloat16 CPU kernel for {op}", BFLOAT16_CPU | _CLIP, all_others=True),
        MissingKernel(
            "Activation has no bfloat16 kernel for softsign",
            _names("Activation"),
            HasAttribute("act_type", ("softsign",)),
        ),
        MissingKernel(
            "LeakyReLU has no bfloat16 kernel for {act_type}",
            _names("LeakyReLU"),
            HasAttribute("act_type", ("prelu", "selu", "rrelu")),
        ),
        MissingKernel(
            "Pooling has bfloat16 kernels for max and avg only",
            _names("Pooling"),
            HasAttribute("pool_type", ("sum", "lp")),
        ),
        MissingKernel(
            "the bfloat16 kernel of Pooling was not measured with pooling_convention='same'",
            _names("Pooling"),
            HasAttribute("pooling_convention", ("same",)),
        ),
        MissingKernel(
            "the bfloat16 gradient of a 3-D convolution was not measured with dilation or kernels longer than 7",
            _names("Convolution"),
            _is_unmeasured_volume,
        ),
        MissingKernel(
            FEW_ROWS,
            SLOW_BY_SHAPE,
            _has_few_rows,
            slow=True,
        ),
        MissingKernel(
            "the bfloat16 CPU kernel of {op} is slower than FP32's where {channels} channels make no blocks of 16",
            _names("BatchNorm _contrib_BatchNormWithReLU"),
            _is_unblocked,
            slow=True,
        ),
        MissingKernel(
            "the bfloat16 CPU kernel of a depthwise convolution is slower than FP32's where {num_filter} channels make "
            "no blocks of 16",
            _names("Convolution"),
            _is_unblocked_depthwise,
            slow=True,
        ),
    ),
}


def missing_kernel(
    op: str,
    attrs: Mapping[str, str],
    compute: str,
    device: str,
    *,
    channels: int | None = None,
    data_shape: tuple[int, ...] = (),
    slow_too: bool = False,
) -> str:
    """Return why an operator stays in FP32 on ``device`` although its rule allows ``compute``, or ``""``.
    ``channels`` and ``data_shape``, the shape in training, are of the first input; None and ``()`` if not known."""
    call = Call(op, attrs, channels, data_shape)
    for row in TABLE.get((device, compute), ()):
        if (op in row.operators) is not row.all_others and not (slow_too and row.slow) and row.where(call):
            return row.reason_for(call)
    return ""
