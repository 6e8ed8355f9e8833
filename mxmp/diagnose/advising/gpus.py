"""Peak figures of GPUs that MXNet 1.9.1 runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The peak figures of one GPU, from its vendor's data sheets.

    Attributes
    ----------
    name : str
        Such as ``"V100 (SXM2)"``.
    bandwidth : float
        Memory bandwidth in bytes per second.
    tensor : dict of str to float
        Peak operations per second of the Tensor Cores, without sparsity, for each dtype that they can compute in:
        "float16", "tf32", "int8".
    fp32 : float
        Peak FLOP/s of the FP32 cores.
    """

    name: str
    bandwidth: float
    tensor: dict[str, float]
    fp32: float

    def peak(self, dtype: str) -> float:
        """Return the peak operations per second of the Tensor Cores or, if they lack ``dtype``, of the FP32 cores."""
        return self.tensor.get(dtype, self.fp32)

    def ridge(self, dtype: str) -> float:
        """Return the arithmetic intensity, in FLOPs per byte, at which memory and arithmetic limit a kernel equally.

        A kernel with a lower intensity is limited by memory bandwidth, one with a higher by arithmetic.
        """
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
    """Return the peak figures of the GPU with this name, in upper or lower case: ``"v100"``, ``"t4"`` or ``"a100"``.

    Raises ``ValueError`` for any other name.
    """
    if not isinstance(name, str) or name.lower() not in GPUS:
        raise ValueError(f"device must be one of {', '.join(map(repr, GPUS))}, got {name!r}")
    return GPUS[name.lower()]
