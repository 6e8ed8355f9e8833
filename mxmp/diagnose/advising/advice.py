"""The result of ``advise``: matrix operators, the sizes that would fit them better; and its text."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Iterator, Sequence

from ..shared.report import section, some, table
from .gemm import Gemm, Size
from .gpus import MULTIPLES, Gpu, gpu_named

__all__ = ["Advice", "Joinable", "MatrixReport", "Padding"]

_ITEMSIZE = {"float16": 2, "int8": 1, "tf32": 4, "float32": 4}
_LONGEST = 20
_WORTH = 0.1  # of a matrix operator's FLOPs: padding that costs more is named, not advised
# MXNet does not request Tensor Cores from cuDNN for these (src/operator/rnn-inl.h).
_NO_TENSOR_CORES = ("RNN", "_npx_rnn")


@dataclass(frozen=True)
class Padding:
    """A size that is no multiple: what it is the size of, its value, and the value that would fit."""

    what: str
    value: int
    to: int

    @property
    def cost(self) -> float:
        """Return the share of FLOPs that padding it adds; 0.001 is 0.1 %."""
        return self.to / self.value - 1


@dataclass(frozen=True)
class MatrixReport:
    """One matrix operator of the forward.

    Attributes
    ----------
    name, op : str
    layout : str
        The layout of a convolution's tensors, or which operands are transposed: NN, NT, TN or TT.
    gemms : tuple of Gemm
        The products: of a convolution the implicit GEMM, of a recurrent layer two for each layer.
    sizes : tuple of Size
        The sizes that Tensor Core kernels want to be multiples.
    times : float
        Rounds of the loops that contain it.
    elements : int
        Elements of all inputs and outputs, each once; of a recurrent layer, of its products at each step.
    dtype : str
        What it computes in under the policy: ``"float16"``, ``"int8"`` or ``"float32"``.
    reason : str
        Why.
    depthwise : bool
        Whether it has one channel a group: then there is no matrix for a Tensor Core.
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
        """Return the FLOPs of one forward; a multiply-add counts as two."""
        return sum(gemm.flops for gemm in self.gemms) * self.times

    @property
    def intensity(self) -> float:
        """Return the FLOPs a byte, where each input is read and each output written once, in its dtype."""
        return self.intensity_in(self.dtype)

    def intensity_in(self, dtype: str) -> float:
        """Return the FLOPs a byte in ``"float16"``, ``"int8"``, ``"tf32"`` or ``"float32"``."""
        return self.flops / (self.elements * self.times * _ITEMSIZE[dtype])

    @property
    def multiple(self) -> int:
        """Return the number that its sizes should be multiples of: 8, in INT8 16."""
        return MULTIPLES["int8" if self.dtype == "int8" else "float16"]

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """Return the sizes that are no multiples; none where no padding would make a matrix."""
        if self.depthwise:
            return ()
        padded = [
            Padding(s.what, s.value, s.or_else or -(-s.value // self.multiple) * self.multiple) for s in self.sizes
        ]
        return tuple(padding for padding in padded if padding.to != padding.value)

    @property
    def padding_cost(self) -> float:
        """Return the fraction of additional FLOPs if every size in ``paddings`` were padded."""
        return prod(1 + padding.cost for padding in self.paddings) - 1

    def on_tensor_cores(self, gpu: Gpu) -> bool:
        """Return whether a kernel for Tensor Cores can compute it, in the dtype of the policy."""
        return self.dtype in gpu.tensor and not self.depthwise and self.op not in _NO_TENSOR_CORES


@dataclass(frozen=True)
class Joinable:
    """Products of one input that could be a single one with ``outputs`` columns: gates, or Q, K and V."""

    names: tuple[str, ...]
    op: str
    input: str
    outputs: int

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: all read {self.input}; one {self.op} with {self.outputs:,} outputs"


@dataclass(frozen=True)
class Advice:
    """What ``advise`` found. ``print`` it, or read the fields.

    Attributes
    ----------
    name, policy, device : str
        The network, the policy, and a key of ``GPUS``.
    matrices : tuple of MatrixReport
        Every matrix operator of one forward, in graph order.
    joinable : tuple of Joinable
    unknown : tuple of str
        Operators that are in no figure: their shapes do not follow from the inputs, or what they multiply is not
        known.
    unmatched : tuple of str
        Patterns of ``exclude`` that matched nothing.
    """

    name: str
    policy: str
    device: str
    matrices: tuple[MatrixReport, ...]
    joinable: tuple[Joinable, ...]
    unknown: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu:
        """Return the GPU that ``device`` names."""
        return gpu_named(self.device)

    @property
    def flops(self) -> float:
        """Return the FLOPs of the matrix operators in one forward; a training step has about three times as many."""
        return sum(matrix.flops for matrix in self.matrices)

    @property
    def tensor_share(self) -> float:
        """Return the share of the FLOPs that can run on Tensor Cores."""
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu)])

    @property
    def fitting_share(self) -> float:
        """Return the share of the FLOPs that can run on Tensor Cores, and whose sizes are all multiples."""
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu) and not m.paddings])

    def share_of(self, matrices: Sequence[MatrixReport]) -> float:
        """Return the share of the FLOPs that some operators have."""
        return sum(m.flops for m in matrices) / self.flops if self.flops else 0.0

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.name} ({self.policy}) on {self.gpu.name}",
                f"  {self.flops / 1e9:,.3f} GFLOPs of matrix products in one forward ({self.flops / 2e9:,.3f} GMACs), "
                "about three times that in a training step",
                f"  {self.tensor_share:.1%} of them can run on Tensor Cores, {self.fitting_share:.1%} with all sizes "
                "multiples",
                f"  Arithmetic is the limit from {self._ridges()} FLOPs a byte on",
                "",
                *self._table(),
                *section("Sizes", self._paddings()),
                *section("Layout", self._layouts()),
                *section("Not on Tensor Cores", self._off_tensor_cores()),
                *section("Products of one input that could be one", map(str, self.joinable)),
                *section("In no figure, because shapes or products are not known", self.unknown[:8]),
                *section("exclude matched nothing", self.unmatched),
            ]
        )

    def _ridges(self) -> str:
        names = {"float16": "float16", "tf32": "TF32", "float32": "FP32"}
        dtypes = [dtype for dtype in names if dtype == "float32" or dtype in self.gpu.tensor]
        return ", ".join(f"{self.gpu.ridge(dtype):.0f} ({names[dtype]})" for dtype in dtypes)

    def _table(self) -> Iterator[str]:
        """Yield one line per operator and shape, most FLOPs first."""
        kinds: dict[tuple, list[MatrixReport]] = {}
        for m in self.matrices:
            kinds.setdefault((m.op, m.gemms, m.sizes, m.layout, m.dtype, m.times), []).append(m)
        order = sorted(kinds.values(), key=lambda alike: -alike[0].flops * len(alike))
        rows = [("nodes", "operator", "M x N x K", "layout", "dtype", "FLOPs", "FLOPs/byte", "limit")]
        for alike in order[:_LONGEST]:
            m = alike[0]
            ridge = self.gpu.ridge(m.dtype if m.on_tensor_cores(self.gpu) else "float32")
            limit = "arithmetic" if m.intensity >= ridge else "memory"
            share = f"{self.share_of(alike):.1%}"
            rows.append((str(len(alike)), m.op, _shape(m.gemms), m.layout, m.dtype, share, f"{m.intensity:.0f}", limit))
        yield from table(rows, "<" * len(rows[0]))
        if len(order) > _LONGEST:
            yield f"  and {len(order) - _LONGEST} more"

    def _paddings(self) -> Iterator[str]:
        """Yield one line for each size that is no multiple, however many operators have it."""
        found: dict[tuple, list[str]] = {}
        for m in self.matrices:
            for padding in m.paddings if m.on_tensor_cores(self.gpu) else ():
                found.setdefault((padding, m.multiple), []).append(m.name)
        for (padding, multiple), names in found.items():
            dear = ", more than it is worth" if padding.cost > _WORTH and padding.value > multiple else ""
            cost = f"{padding.cost:.0%}" if padding.cost >= 0.1 else f"{100 * padding.cost:.2g}%"
            yield f"{some(names, 1)}: {padding.what} {padding.value:,} -> {padding.to:,} (+{cost} of its FLOPs{dear})"

    def _layouts(self) -> Iterator[str]:
        if any(m.layout in ("NCHW", "NCDHW") and m.on_tensor_cores(self.gpu) for m in self.matrices):
            # NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
            yield "NCHW: cuDNN's Tensor Core kernels read NHWC, and transpose around each convolution"

    def _off_tensor_cores(self) -> Iterator[str]:
        reasons: dict[str, list[MatrixReport]] = {}
        for m in self.matrices:
            if not m.on_tensor_cores(self.gpu):
                why = "one channel a group makes no matrix" if m.depthwise else m.reason
                why = f"{self.gpu.name} has no INT8 Tensor Cores" if m.dtype == "int8" else why
                reasons.setdefault(why, []).append(m)
        for why, matrices in reasons.items():
            yield f"{some([m.name for m in matrices], 3)} ({self.share_of(matrices):.1%} of the FLOPs): {why}"


def _shape(gemms: Sequence[Gemm]) -> str:
    """Return the sizes of the largest product, and how many more there are."""
    first = max(gemms, key=lambda gemm: gemm.flops, default=None)
    if first is None:
        return "-"
    times = f"{first.times} of " if first.times > 1 else ""
    more = f" and {len(gemms) - 1} more" if len(gemms) > 1 else ""
    return f"{times}{first.m} x {first.n} x {first.k}{more}"
