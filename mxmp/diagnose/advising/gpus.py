"""Peak figures of GPUs that MXNet 1.9.1 runs on, and what their Tensor Cores want."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPUS", "MULTIPLES", "Gpu", "gpu_named"]

# Elements in 16 bytes, what Tensor Core kernels load at once: NVIDIA, Matrix Multiplication Background User's Guide,
# 2.2 "Tensor Core Requirements". Since cuBLAS 11 and cuDNN 7.6.3 other sizes run too, at a loss.
MULTIPLES = {"float16": 8, "int8": 16, "tf32": 4}


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes
    ----------
    name : str
    bandwidth : float
        Of its memory, bytes a second.
    tensor : dict of str to float
        Peak of its Tensor Cores by dtype, dense, in operations a second.
    fp32 : float
        Peak of its FP32 cores, FLOP/s.
    """

    name: str
    bandwidth: float
    tensor: dict[str, float]
    fp32: float

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products in ``"float16"``, ``"tf32"``, ``"int8"`` or ``"float32"``."""
        return self.tensor.get(dtype, self.fp32)

    def ridge(self, dtype: str) -> float:
        """Return the ridge point: from so many FLOPs a byte on, arithmetic limits a kernel and not memory."""
        return self.peak(dtype) / self.bandwidth


GPUS = {
    # NVIDIA Tesla V100 datasheet (volta-v100-datasheet-update-us-1165301-r5); whitepaper WP-08608, table 1
    "v100": Gpu("V100 (SXM2)", 900e9, {"float16": 125e12}, 15.7e12),
    # NVIDIA Turing GPU Architecture whitepaper WP-09183, Tesla T4; T4 datasheet (t4-tensor-core-datasheet-951643)
    "t4": Gpu("T4", 320e9, {"float16": 65e12, "int8": 130e12}, 8.1e12),
    # NVIDIA A100 Tensor Core GPU Architecture whitepaper, table 1; A100 datasheet (1758950-r4)
    "a100": Gpu("A100 (SXM4, 40 GB)", 1555e9, {"float16": 312e12, "tf32": 156e12, "int8": 624e12}, 19.5e12),
}


def gpu_named(name: str) -> Gpu:
    """Return one of ``GPUS``. Raises ``ValueError`` for any other name."""
    if not isinstance(name, str) or name.lower() not in GPUS:
        raise ValueError(f"device must be one of {', '.join(map(repr, GPUS))}, got {name!r}")
    return GPUS[name.lower()]
