"""Peak figures of GPUs that MXNet 1.9.1 runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The peak figures of one GPU, from its vendor's data sheets: operations or bytes per second, without sparsity."""

    name: str
    bandwidth: float
    tensor: dict[str, float]  # by the dtypes that the Tensor Cores can compute in: "float16", "tf32", "int8"
    fp32: float

    def peak(self, dtype: str) -> float:
        """Return the peak operations per second of the Tensor Cores or, if they lack ``dtype``, of the FP32 cores."""
        return self.tensor.get(dtype, self.fp32)

    def ridge(self, dtype: str) -> float:
        """Return the arithmetic intensity, in FLOPs per byte, at which memory and arithmetic limit a kernel equally."""
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
    """Return the GPU ``"v100"``, ``"t4"`` or ``"a100"``, in upper or lower case."""
    if not isinstance(name, str) or name.lower() not in GPUS:
        raise ValueError(f"device must be one of {', '.join(map(repr, GPUS))}, got {name!r}")
    return GPUS[name.lower()]
