"""What a GPU kernel or an operator of MXNet's is, by its name."""

from __future__ import annotations

import re

from ..advising.gemm import is_matrix

__all__ = ["BULK", "CAST", "KINDS", "MATRIX", "OTHER", "TENSOR", "kind_of_kernel", "kind_of_operator", "reads_low"]

TENSOR, MATRIX, CAST, OTHER, BULK = KINDS = "tensor", "matrix", "cast", "other", "bulk"

# Parts of the names of Tensor Core kernels, by source. A number is the shape of the mma instruction, the letter
# in front of it what it adds in: h884 is 8x8x4 in float16, s1688 16x8x8 in FP32, i8816 8x8x16 in INT32.
_PYPROF = "NVIDIA/PyProf, pyprof/prof/tc.py; the same in TensorFlow's kernel_stats_utils.cc and Kineto's tensor_core.py"
TENSOR_NAMES = {
    **dict.fromkeys(("h884", "s884", "h1688", "s1688", "c1688", "hmma", "i8816", "16816"), _PYPROF),
    **dict.fromkeys(("xmma_gemm", "xmma_implicit_gemm", "xmma_sparse_conv", "xmma_sparse_gemm"), _PYPROF),
    **dict.fromkeys(("xmma_warp_specialized_implicit_gemm", "dgrad_1x1_stride_2x2"), _PYPROF),
    **dict.fromkeys(("first_layer_wgrad_kernel", "conv1x1", "conv2d_c1_k1", "direct_group"), _PYPROF),
    "i16832": "TensorFlow, tensorflow/core/profiler/utils/kernel_stats_utils.cc",
    "tensorop": "NVIDIA/CUTLASS, media/docs/profiler.md: cutlass_tensorop_..., beside cutlass_simt_...",
    "tensor16x8": "cuDNN 8: sm80_xmma_..._tensor16x8x8_..., beside ..._ffma_...",
}
# Such names of kernels that do without.
_PLAIN = re.compile(r"simt|ffma|xmma(?!.*tensor).*_f32f32_f32f32_f32")
_TENSOR = re.compile("|".join(map(re.escape, TENSOR_NAMES)))
_MATRIX = re.compile(
    r"gemm|gemv|convolve|scudnn|hcudnn|winograd|(?<![a-z])[wd]grad|fprop|fft[12]d|rnn_blockpersist|persistrnn|dot_"
)
_LOW = re.compile(r"fp16|half|bf16|(?<![a-z])f16|(?<![a-z])h(?:gemm|gemv|cudnn|884|1688|16816)")
# MXNet's Cast, amp_cast and amp_multicast assign mshadow's tcast (src/operator/tensor/amp_cast.h, v1.x).
_CAST = re.compile(r"plan<\s*(?:mshadow::)?(?:expr::)?typecastexp|identity_with_cast")
_CAST_OPERATORS = {"cast", "amp_cast", "amp_multicast"}


def kind_of_kernel(name: str) -> str:
    """``"tensor"`` for a kernel on Tensor Cores, ``"matrix"`` for products without, ``"cast"`` or ``"other"``.

    ``name``: demangled where it can be had.
    """
    name = name.lower()
    if _TENSOR.search(name) and not _PLAIN.search(name):
        return TENSOR
    if _CAST.search(name):
        return CAST
    return MATRIX if _MATRIX.search(name) or _TENSOR.search(name) else OTHER


def reads_low(name: str) -> bool:
    """Whether a kernel's name says that it reads float16 or bfloat16."""
    return _LOW.search(name.lower()) is not None


def kind_of_operator(name: str) -> str:
    """``"matrix"``, ``"cast"`` or ``"other"`` for an operator as MXNet's profiler calls it.

    ``"bulk"`` for several that MXNet ran as one.
    """
    if name == "ImperativeBulk" or "," in name:
        return BULK
    forward = name[len("_backward_") :] if name.startswith("_backward_") else name
    if forward.lower() in _CAST_OPERATORS:
        return CAST
    return MATRIX if is_matrix(forward) or is_matrix(f"_contrib_{forward}") else OTHER
