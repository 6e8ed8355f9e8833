"""What ``profile`` returns: GPU kernels, and of which kind they are by their names, as data and as text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..shared.report import section

TENSOR, MATRIX, CAST, OTHER = KINDS = "tensor", "matrix", "cast", "other"

# Parts of the names of Tensor Core kernels, by source. A number is the shape of the mma instruction, the letter
# before it the dtype of its sums: h884 is 8x8x4 in float16, s1688 16x8x8 in FP32, i8816 8x8x16 in INT32.
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
_TENSOR = re.compile("|".join(map(re.escape, TENSOR_NAMES)))
# Kernels with such a name that do not use the Tensor Cores.
_NOT_TENSOR = re.compile(r"simt|ffma|xmma(?!.*tensor).*_f32f32_f32f32_f32")
_MATRIX = re.compile(
    r"gemm|gemv|convolve|scudnn|hcudnn|winograd|(?<![a-z])[wd]grad|fprop|fft[12]d|rnn_blockpersist|persistrnn|dot_"
)
_LOW = re.compile(r"fp16|half|bf16|(?<![a-z])f16|(?<![a-z])h(?:gemm|gemv|cudnn|884|1688|16816)")
# MXNet's Cast, amp_cast and amp_multicast assign mshadow's tcast (src/operator/tensor/amp_cast.h, v1.x).
_CAST = re.compile(r"plan<\s*(?:mshadow::)?(?:expr::)?typecastexp|identity_with_cast")
_CAST_OPERATOR = re.compile(r"(?:_backward_)?(?:cast|amp_cast|amp_multicast)")
_NAMES = {TENSOR: "on Tensor Cores", MATRIX: "products without", CAST: "casts", OTHER: "everything else"}
_LONGEST = 15
_WIDTH = 72


def kind_of_kernel(name: str) -> str:
    """Return the kind of a GPU kernel by its demangled name, as in KernelReport."""
    name = name.lower()
    if _TENSOR.search(name) and not _NOT_TENSOR.search(name):
        return TENSOR
    if _CAST.search(name):
        return CAST
    return MATRIX if _MATRIX.search(name) or _TENSOR.search(name) else OTHER


def reads_low_precision(name: str) -> bool:
    return _LOW.search(name.lower()) is not None


def is_cast(operator: str) -> bool:
    """Return whether an operator is a cast, by its type in MXNet's profiler, such as ``"_backward_cast"``."""
    return _CAST_OPERATOR.fullmatch(operator.lower()) is not None


@dataclass(frozen=True)
class KernelReport:
    """All runs of one GPU kernel for operators of one type on one device.

    Attributes
    ----------
    name : str
        The name of the kernel.
    operator : str
        The type of the operator that launched the kernel, as MXNet's profiler names it: ``"Convolution"``,
        ``"_backward_cast"``. Empty where none is recorded.
    kind : {"tensor", "matrix", "cast", "other"}
        A matrix product or convolution on Tensor Cores, one without them, a cast, or anything else.
    device : str
        ``"gpu/0"`` and so on.
    calls : int
        How often the kernel ran.
    seconds : float
        The time of all these runs together.
    """

    name: str
    operator: str
    kind: str
    device: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The GPU kernels that Nsight Systems recorded, read by ``profile``. ``print`` it, or read the fields. Plain data.

    Attributes
    ----------
    path : str
        The file that ``nsys export --type sqlite`` wrote.
    kernels : tuple of KernelReport
        One report for each kernel, operator and device; longest total time first.
    """

    path: str
    kernels: tuple[KernelReport, ...]

    @property
    def seconds(self) -> float:
        """Return the sum of the times of all kernels in seconds; times in which several ran at once count for each."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the GPUs that ran the kernels, such as ``("gpu/0", "gpu/1")``."""
        return tuple(sorted({kernel.device for kernel in self.kernels}))

    def share(self, kind: str) -> float:
        """Return the share of the kernels' time, from 0 to 1, that kernels of one kind took; 0 if all times are 0.

        ``kind`` is ``"tensor"``, ``"matrix"``, ``"cast"`` or ``"other"``, as in KernelReport.

        Raises
        ------
        ValueError
            There is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        return self._share_of(sum(k.seconds for k in self.kernels if k.kind == kind))

    def _share_of(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def missed(self) -> tuple[KernelReport, ...]:
        """Return the kernels of kind ``"matrix"`` whose names say that they read low precision, longest time first.

        They use no Tensor Cores, and could be faster on them.
        """
        return tuple(kernel for kernel in self.kernels if kernel.kind == MATRIX and reads_low_precision(kernel.name))

    def __str__(self) -> str:
        calls = sum(kernel.calls for kernel in self.kernels)
        missed = (
            f"{self._share_of(kernel.seconds):>5.1%}  {_short(kernel.name)}"
            + (f"  of {kernel.operator}" if kernel.operator else "")
            for kernel in self.missed[:_LONGEST]
        )
        return "\n".join(
            [
                f"{self.path} ({', '.join(self.devices)}): {self.seconds * 1e3:,.3f} ms in {calls:,} kernels",
                *(f"  {self.share(kind):>6.1%} {name}" for kind, name in _NAMES.items()),
                *section("Low precision, not on Tensor Cores (see advise for the shapes)", missed),
            ]
        )


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."
