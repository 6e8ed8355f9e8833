"""Which kernels MXNet 1.9.1 lacks on a device: data, one row for operators with the same reason.

A rule of ``rule_table.py`` may allow a dtype that the device has no kernel for, or a kernel that gives wrong numbers
or is slower than FP32. Such operators compute in FP32.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Callable, Mapping, NamedTuple

__all__ = [
    *("BFLOAT16_CPU", "CHANNEL_BLOCK", "TABLE", "Call", "HasAttribute", "MissingKernel", "is_global_average"),
    "is_volume",
]


class Call(NamedTuple):
    """An operator in a graph.

    Attributes
    ----------
    op : str
    attrs : mapping of str to str
        As in Symbol JSON.
    channels : int or None
        How many channels its data has; None where this is not known.
    """

    op: str
    attrs: Mapping[str, str]
    channels: int | None


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class MissingKernel:
    """One row of the table.

    Attributes
    ----------
    reason : str
        Why, in one line; ``explain`` shows it to the user. ``{op}``, ``{channels}`` and names of attributes in braces
        stand for their values.
    operators : frozenset of str
        Names in Symbol JSON, with their aliases.
    where : callable
        Returns whether a ``Call`` of such an operator lacks its kernel.
    all_others : bool
        The row is about all operators but these.
    slow : bool
        There is a kernel, and it is right, but slower than FP32 with casts around it.
    """

    reason: str
    operators: frozenset[str]
    where: Callable[[Call], bool] = _always
    all_others: bool = False
    slow: bool = False

    def reason_for(self, call: Call) -> str:
        """Return the reason with the values of this call."""
        return self.reason.format_map({**call.attrs, "op": call.op, "channels": call.channels})


# -- Conditions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HasAttribute:
    """The condition that an attribute has one of ``values``, none of which is its default."""

    attr: str
    values: tuple[str, ...]

    def __call__(self, call: Call) -> bool:
        return call.attrs.get(self.attr) in self.values


def is_volume(attrs: Mapping[str, str]) -> bool:
    """Return whether a convolution, deconvolution or pooling is 3-D."""
    return attrs.get("kernel", "").count(",") == 2


def is_global_average(attrs: Mapping[str, str]) -> bool:
    """Return whether an adaptive average pooling has one value a channel."""
    return set(re.findall(r"\d+", attrs.get("output_size", ""))) <= {"1"}


def _is_unmeasured_volume(call: Call) -> bool:
    """Return whether the oneDNN 2.4 gradients of such a 3-D convolution were not compared with exact sums.

    Around small inputs those that were are right by ``kernels/padding.py`` only.
    """
    dilated = set(re.findall(r"\d+", call.attrs.get("dilate", ""))) - {"1"}
    return is_volume(call.attrs) and (bool(dilated) or max(map(int, re.findall(r"\d+", call.attrs["kernel"]))) > 7)


def _scales_inexactly(call: Call) -> bool:
    """Return whether a product or quotient with the constant rounds: it is no modest power of two, of either sign."""
    try:
        mantissa, exponent = math.frexp(abs(float(call.attrs.get("scalar", ""))))
    except ValueError:
        return True
    return mantissa != 0.5 or not -16 <= exponent <= 16


def _truncates_a_bound(call: Call) -> bool:
    return not all(_is_bfloat16(call.attrs.get(bound, "nan")) for bound in ("a_min", "a_max"))


def _is_bfloat16(text: str) -> bool:
    """Return whether bfloat16 holds the number exactly: FP32 with nothing in its lower half."""
    try:
        return struct.pack("<f", float(text))[:2] == b"\0\0" and float(text) == float(text)
    except (OverflowError, ValueError):
        return False


def _leaves_cudnn(call: Call) -> bool:
    """Return whether a BatchNorm on a GPU is computed by MXNet's own kernel."""
    return any(call.attrs.get(attr) in ("True", "true", "1") for attr in ("use_global_stats", "cudnn_off"))


# Channels of a block of oneDNN's bfloat16 layouts; FP32 has one of 8 too. MobileNet's block of 72 channels runs at 0.23
# of FP32's speed where both are low, and at 0.85 as they are here (scripts/dev.py bench layouts; one core of a Zen 5).
CHANNEL_BLOCK = 16


def _is_unblocked(call: Call) -> bool:
    return call.channels is not None and call.channels % CHANNEL_BLOCK != 0


def _is_unblocked_depthwise(call: Call) -> bool:
    filters = call.attrs["num_filter"]
    return call.attrs.get("num_group", "1") == filters != "1" and int(filters) % CHANNEL_BLOCK != 0


# -- Data -------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators whose bfloat16 CPU kernel holds, forward and backward (docs/kernels.md; a test keeps the two together).
# Of the others many raise ("Unknown type enum 12"), sum gradients in bfloat16 (of a broadcast, tiled or repeated
# input: 2 % off over 3,000 values, 15 % over 50,000, with MXNET_SAFE_ACCUMULATION too), or give numbers of
# another layout (transpose) or end the process (Deconvolution).
BFLOAT16_CPU = _names(
    """Convolution FullyConnected BatchNorm _contrib_BatchNormWithReLU Pooling
    Activation relu _sparse_relu LeakyReLU softmax log_softmax
    sigmoid _sparse_sigmoid tanh _sparse_tanh
    abs _sparse_abs negative _sparse_negative
    elemwise_add _Plus _plus _add _sparse_elemwise_add elemwise_sub _Minus _minus _sub _sparse_elemwise_sub
    _maximum _Maximum _minimum _Minimum
    add_n ElementWiseSum _sparse_ElementWiseSum _sparse_add_n
    _mul_scalar _MulScalar _div_scalar _DivScalar
    Reshape reshape Flatten flatten expand_dims squeeze reshape_like slice_like _copy identity
    BlockGrad stop_gradient _sparse_stop_gradient Concat concat _sparse_concat stack
    slice crop _sparse_slice slice_axis SliceChannel split _split_v2 reverse flip where _sparse_where
    depth_to_space space_to_depth"""
)
_CLIP = _names("clip _sparse_clip")
# Kernels of mshadow drop the low half of the FP32 result (and of the constant): half a unit in the last place towards
# zero, on average and every time, where oneDNN's round (docs/kernels.md).
_TRUNCATING = _names(
    "softsign elemwise_mul _Mul _mul _sparse_elemwise_mul _contrib_div_sqrt_dim _plus_scalar _PlusScalar "
    "_minus_scalar _MinusScalar _rminus_scalar _RMinusScalar"
)
# A selection, so it is right where bfloat16 holds its bounds, but it takes three times FP32's time, and ten times that
# of the two operators that the workaround ``clip_by_bounds`` makes of it.
_SLOW_CLIP = "the bfloat16 CPU kernel of {op} is three times slower, and truncates its bounds"

# What a GPU's kernel sums in float16, with the file of MXNet 1.9.1 that shows it. Sums belong in FP32 ("Mixed Precision
# Training", ICLR 2018, 3.3).
_SUMS_ON_A_GPU = (
    ("take _npi_take", "the gradient of equal indices", "3rdparty/mshadow/mshadow/cuda/tensor_gpu-inl.cuh"),
    ("gather_nd _npi_gather_nd _npx_gather_nd", "the gradient of equal indices", "src/operator/tensor/indexing_op.cu"),
    ("im2col", "the gradient of overlapping windows", "src/operator/nn/im2col.cuh"),
    ("_contrib_BilinearResize2D", "its gradient", "src/operator/contrib/bilinear_resize.cu"),
)

_FLOAT16_GPU = (
    MissingKernel(
        "its products sum in float16 on a GPU: cublasHgemmStridedBatched (3rdparty/mshadow/mshadow/dot_engine-inl.h)",
        _names("batch_dot _npx_batch_dot _npi_matmul"),
    ),
    MissingKernel(
        "it has no float16 GPU kernel: 'Unsupported data type 2' at bind (src/operator/crop-inl.h)", _names("Crop")
    ),
    MissingKernel(
        "the gradient of a copied value is summed in float16 on a GPU "
        "(3rdparty/mshadow/mshadow/extension/spatial_pool.h)",
        _names("UpSampling"),
        lambda call: call.attrs.get("scale") != "2",  # 4 terms: as exact as a sum of 4 branches
    ),
    MissingKernel(
        "without cuDNN, its GPU kernel rounds gamma, beta and products of the gradient to float16 "
        "(src/operator/nn/batch_norm.cu)",
        _names("BatchNorm _npx_batch_norm _contrib_BatchNormWithReLU"),
        _leaves_cudnn,
    ),
    MissingKernel(
        "a window is summed in float16 on a GPU (src/operator/contrib/adaptive_avg_pooling.cu); cuDNN computes an "
        "average of everything",
        _names("_contrib_AdaptiveAvgPooling2D"),
        lambda call: not is_global_average(call.attrs),
    ),
    *(
        MissingKernel(f"{what} is summed in float16 on a GPU ({file})", _names(operators))
        for operators, what, file in _SUMS_ON_A_GPU
    ),
)

# By device and compute dtype; the first row that holds counts. float16 on a CPU is emulated, with FP32 kernels: it
# shows what a GPU does, and so keeps in FP32 what a GPU keeps.
TABLE: dict[tuple[str, str], tuple[MissingKernel, ...]] = {
    ("cpu", "float16"): (
        MissingKernel(
            "the gradient of a 3-D deconvolution fails on a CPU where its weight is computed, as a cast computes it",
            _names("Deconvolution _npx_deconvolution"),
            lambda call: is_volume(call.attrs),
        ),
        *_FLOAT16_GPU,
    ),
    ("gpu", "float16"): _FLOAT16_GPU,
    ("cpu", "bfloat16"): (
        MissingKernel(_SLOW_CLIP, _CLIP, _truncates_a_bound),
        MissingKernel(_SLOW_CLIP, _CLIP, slow=True),
        MissingKernel(
            "the bfloat16 CPU kernel of {op} truncates where FP32 rounds: biased by half a unit in the last place",
            _TRUNCATING,
        ),
        MissingKernel(
            "the bfloat16 CPU kernel of {op} truncates, its constant too, where FP32 rounds",
            _names("_mul_scalar _MulScalar _div_scalar _DivScalar"),
            _scales_inexactly,
        ),
        MissingKernel("MXNet 1.9.1 has no sound bfloat16 CPU kernel for {op}", BFLOAT16_CPU | _CLIP, all_others=True),
        MissingKernel(
            "Activation has no bfloat16 softsign", _names("Activation"), HasAttribute("act_type", ("softsign",))
        ),
        MissingKernel(
            "LeakyReLU has no bfloat16 kernel for it",
            _names("LeakyReLU"),
            HasAttribute("act_type", ("prelu", "selu", "rrelu")),
        ),
        MissingKernel(
            "Pooling has bfloat16 max and avg only", _names("Pooling"), HasAttribute("pool_type", ("sum", "lp"))
        ),
        MissingKernel(
            "pooling 'same' was not seen to hold", _names("Pooling"), HasAttribute("pooling_convention", ("same",))
        ),
        MissingKernel(
            "the bfloat16 gradient of a 3-D convolution was not measured with dilation or kernels beyond 7 taps",
            _names("Convolution"),
            _is_unmeasured_volume,
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
