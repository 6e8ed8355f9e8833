"""What ``advise`` finds, as plain data: matrix operators, what would fit them better, and a model of the gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeVar

from .gemm import Gemm, Size
from .gpus import MULTIPLES, Gpu, gpu_named

__all__ = ["AdviceReport", "Joinable", "MatrixReport", "Padding"]

_Report = TypeVar("_Report", bound="AdviceReport")
_ITEMSIZE = {"float16": 2, "int8": 1, "tf32": 4, "float32": 4}


@dataclass(frozen=True)
class Padding:
    """A size that is no multiple. ``cost``: share of FLOPs that padding it adds; 0.001 is 0.1 %."""

    what: str
    value: int
    to: int

    @property
    def cost(self) -> float:
        return self.to / self.value - 1


@dataclass(frozen=True)
class MatrixReport:
    """One matrix operator of the forward.

    Attributes
    ----------
    name, op : str
    layout : str
        Of a convolution's tensors, or which operands are transposed: NN, NT, TN or TT.
    gemms : tuple of Gemm
        The products; of a convolution the implicit GEMM, of a recurrent layer two per layer.
    sizes : tuple of Size
        Those that Tensor Core kernels want to be multiples.
    times : float
        Rounds of the loops that it stands in.
    elements : int
        Of all inputs and outputs, each once; of a recurrent layer, of its products at each step.
    dtype : str
        What it computes in under the policy: ``"float16"``, ``"int8"`` or ``"float32"``.
    reason : str
    depthwise : bool
        One channel a group: there is no matrix for a Tensor Core.
    """

    name: str
    op: str
    layout: str
    gemms: tuple[Gemm, ...]
    sizes: tuple[Size, ...]
    times: float
    elements: int
    dtype: str
    reason: str
    depthwise: bool = False

    @property
    def flops(self) -> float:
        """In one forward; a multiply-add counts as two."""
        return sum(gemm.flops for gemm in self.gemms) * self.times

    @property
    def intensity(self) -> float:
        """FLOPs a byte, where each input is read and each output written once, in its dtype."""
        return self.intensity_in(self.dtype)

    def intensity_in(self, dtype: str) -> float:
        """The same in ``"float16"``, ``"int8"``, ``"tf32"`` or ``"float32"``."""
        return self.flops / (self.elements * self.times * _ITEMSIZE[dtype])

    @property
    def multiple(self) -> int:
        """What its sizes should be multiples of: 8, in INT8 16."""
        return MULTIPLES["int8" if self.dtype == "int8" else "float16"]

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """The sizes that are no multiples; none where no padding would make a matrix."""
        if self.depthwise:
            return ()
        padded = [
            Padding(s.what, s.value, s.or_else or -(-s.value // self.multiple) * self.multiple) for s in self.sizes
        ]
        return tuple(padding for padding in padded if padding.to != padding.value)

    @property
    def padding_cost(self) -> float:
        """Share of its FLOPs that all of them would add."""
        return prod(1 + padding.cost for padding in self.paddings) - 1

    def on_tensor_cores(self, gpu: Gpu) -> bool:
        """Whether a kernel for Tensor Cores can do it, in the dtype of the policy."""
        return self.dtype in gpu.tensor and not self.depthwise

    def seconds(self, gpu: Gpu, dtype: str) -> float:
        """By the roofline of ``gpu``, in ``dtype``."""
        math = "float32" if self.depthwise else dtype
        return gpu.seconds(self.flops, self.elements * self.times * _ITEMSIZE[dtype], math)


@dataclass(frozen=True)
class Joinable:
    """Products of one input that could be a single one with ``outputs`` columns: gates, or Q, K and V."""

    names: tuple[str, ...]
    op: str
    input: str
    outputs: int


@dataclass(frozen=True)
class AdviceReport:
    """What ``advise`` found.

    Attributes
    ----------
    name, policy, device : str
        What it is about; ``device`` is a key of ``GPUS``.
    matrices : tuple of MatrixReport
        Every matrix operator of one forward, in graph order.
    joinable : tuple of Joinable
    other_bytes : float
        What all other operators read and write in FP32, once each.
    unknown : tuple of str
        Operators that are in no figure: their shapes do not follow from the inputs, or what they multiply is not
        known.
    unmatched : tuple of str
        Patterns of ``exclude`` that matched nothing.
    settings : tuple of str
        What MXNet's environment variables and TF32 do here.
    """

    name: str
    policy: str
    device: str
    matrices: tuple[MatrixReport, ...]
    joinable: tuple[Joinable, ...]
    other_bytes: float
    unknown: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu:
        return gpu_named(self.device)

    @property
    def flops(self) -> float:
        """Of the matrix operators in one forward; a training step has about three times as many."""
        return sum(matrix.flops for matrix in self.matrices)

    @property
    def tensor_share(self) -> float:
        """Share of the FLOPs that can run on Tensor Cores."""
        return self._share([m for m in self.matrices if m.on_tensor_cores(self.gpu)])

    @property
    def fitting_share(self) -> float:
        """Share of the FLOPs that can, with all sizes multiples."""
        return self._share([m for m in self.matrices if m.on_tensor_cores(self.gpu) and not m.paddings])

    def _share(self, matrices: list[MatrixReport]) -> float:
        return sum(m.flops for m in matrices) / self.flops if self.flops else 0.0

    def speed_up(self, baseline: str = "float32") -> float:
        """A model, no measurement: Amdahl's law over roofline times.

        Every operator takes the longer of its arithmetic at the peak and its bytes at full bandwidth; those on
        Tensor Cores become faster, everything else stays as it is in FP32. Real kernels reach neither peak.

        Parameters
        ----------
        baseline : {"float32", "tf32"}
            What FP32 products compute in.
        """
        if baseline not in ("float32", "tf32"):
            raise ValueError(f"baseline must be 'float32' or 'tf32', got {baseline!r}")
        gpu = self.gpu
        rest = self.other_bytes / gpu.bandwidth
        before = rest + sum(m.seconds(gpu, baseline) for m in self.matrices)
        after = rest + sum(m.seconds(gpu, m.dtype if m.on_tensor_cores(gpu) else baseline) for m in self.matrices)
        return before / after if after else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[_Report], raw: dict[str, Any]) -> _Report:
        """The inverse of ``to_dict``."""
        matrices = tuple(
            MatrixReport(
                **{
                    **matrix,
                    "gemms": tuple(Gemm(*gemm) for gemm in matrix["gemms"]),
                    "sizes": tuple(Size(*size) for size in matrix["sizes"]),
                }
            )
            for matrix in raw["matrices"]
        )
        joinable = tuple(Joinable(**{**each, "names": tuple(each["names"])}) for each in raw["joinable"])
        texts = {key: tuple(raw[key]) for key in ("unknown", "unmatched", "settings")}
        return cls(**{**raw, **texts, "matrices": matrices, "joinable": joinable})
