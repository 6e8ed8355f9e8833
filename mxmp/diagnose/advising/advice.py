"""What ``advise`` finds: matrix operators, what would fit them better, a model of the gain; and its text."""

from dataclasses import dataclass
from math import prod
from typing import Dict, Iterator, List, Sequence, Tuple

from ..shared.report import Saved, some, table
from .gemm import Gemm, Size
from .gpus import MULTIPLES, Gpu, gpu_named

__all__ = ["Advice", "Joinable", "MatrixReport", "Padding"]

_ITEMSIZE = {"float16": 2, "int8": 1, "tf32": 4, "float32": 4}
_LONGEST = 20
_WORTH = 0.1  # of a matrix operator's FLOPs: padding that costs more is named, not advised


@dataclass(frozen=True)
class Padding:
    """A size that is no multiple. ``cost``: share of FLOPs that padding it adds; 0.001 is 0.1 %."""

    what: str
    value: int
    to: int

    @property
    def cost(self) -> float:
        return self.to / self.value - 1


# MXNet does not request them from cuDNN (src/operator/rnn-inl.h).
_NO_TENSOR_CORES = ("RNN", "_npx_rnn")


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
    gemms: Tuple[Gemm, ...]
    sizes: Tuple[Size, ...]
    times: float
    elements: int
    dtype: str
    reason: str
    depthwise: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(_ITEMSIZE)}, got {self.dtype!r}")
        if not (self.times and self.elements and all(size.value for size in self.sizes)):
            raise ValueError(f"{self.name!r}: times, elements and sizes must be positive")

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
    def paddings(self) -> Tuple[Padding, ...]:
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
        return self.dtype in gpu.tensor and not self.depthwise and self.op not in _NO_TENSOR_CORES

    def seconds(self, gpu: Gpu, dtype: str) -> float:
        """By the roofline of ``gpu``, in ``dtype``."""
        math = "float32" if self.depthwise else dtype
        return gpu.seconds(self.flops, self.elements * self.times * _ITEMSIZE[dtype], math)


@dataclass(frozen=True)
class Joinable:
    """Products of one input that could be a single one with ``outputs`` columns: gates, or Q, K and V."""

    names: Tuple[str, ...]
    op: str
    input: str
    outputs: int


@dataclass(frozen=True)
class Advice(Saved):
    """What ``advise`` found. ``print`` it, ``save`` it, or read the fields.

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

    FORMAT = "mxmp-advice-1"

    name: str
    policy: str
    device: str
    matrices: Tuple[MatrixReport, ...]
    joinable: Tuple[Joinable, ...]
    other_bytes: float
    unknown: Tuple[str, ...] = ()
    unmatched: Tuple[str, ...] = ()
    settings: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        gpu_named(self.device)

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
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu)])

    @property
    def fitting_share(self) -> float:
        """Share of the FLOPs that can, with all sizes multiples."""
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu) and not m.paddings])

    def share_of(self, matrices: Sequence[MatrixReport]) -> float:
        """What share of the FLOPs some operators have."""
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

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.policy}) on {self.gpu.name}",
            f"  {self.flops / 1e9:,.3f} GFLOPs of matrix products in one forward ({self.flops / 2e9:,.3f} GMACs), "
            "about three times that in a training step",
            f"  {self.tensor_share:.1%} of them can run on Tensor Cores, {self.fitting_share:.1%} with all sizes "
            "multiples",
            *self._gain(),
            "",
            *self._table(),
        ]
        joinable = (
            f"{', '.join(j.names)}: all read {j.input}; one {j.op} with {j.outputs:,} outputs" for j in self.joinable
        )
        for title, found in (
            ("Sizes", self._paddings()),
            ("Not on Tensor Cores", self._off()),
            ("Products of one input that could be one", joinable),
            ("Settings", self.settings),
            ("In no figure, because shapes or products are not known", self.unknown[:8]),
            ("exclude matched nothing", self.unmatched),
        ):
            entries = [f"    {entry}" for entry in found]
            lines += ["", f"  {title}", *entries] if entries else []
        return "\n".join(lines)

    def _gain(self) -> Iterator[str]:
        for baseline in dict.fromkeys(["float32", self.gpu.fp32_math]):
            called = "FP32" if baseline == "float32" else "TF32, which FP32 products use there"
            yield f"  Expected {self.speed_up(baseline):.2f} times as fast as {called}"
        yield (
            "  (a model, no measurement: Amdahl's law, every operator at the roofline, all but the products as in FP32)"
        )
        named = {"float16": "float16", "tf32": "TF32", "float32": "FP32"}
        ridges = ", ".join(f"{named[dtype]} {self.gpu.ridge(dtype):.0f}" for dtype in self.gpu.roofs)
        yield f"  Ridge points, FLOPs a byte from which on arithmetic is the limit: {ridges}"

    def _table(self) -> Iterator[str]:
        """One line per operator and shape, most FLOPs first."""
        kinds: Dict[tuple, List[MatrixReport]] = {}
        for m in self.matrices:
            kinds.setdefault((m.op, m.gemms, m.sizes, m.layout, m.dtype, m.times), []).append(m)
        order = sorted(kinds.values(), key=lambda like: -like[0].flops * len(like))
        rows = [("nodes", "operator", "M x N x K", "layout", "dtype", "FLOPs", "FLOPs/byte", "limit")]
        for like in order[:_LONGEST]:
            m = like[0]
            ridge = self.gpu.ridge(m.dtype if m.on_tensor_cores(self.gpu) else "float32")
            limit = "arithmetic" if m.intensity >= ridge else "memory"
            share = f"{self.share_of(like):.1%}"
            rows.append((str(len(like)), m.op, _shape(m.gemms), m.layout, m.dtype, share, f"{m.intensity:.0f}", limit))
        yield from table(rows, "<" * len(rows[0]))
        if len(order) > _LONGEST:
            yield f"  and {len(order) - _LONGEST} more"

    def _paddings(self) -> Iterator[str]:
        """The same size of many operators is one line."""
        found: Dict[tuple, List[str]] = {}
        for m in self.matrices:
            for padding in m.paddings if m.on_tensor_cores(self.gpu) else ():
                found.setdefault((padding, m.multiple), []).append(m.name)
        for (padding, multiple), names in found.items():
            dear = ", more than it is worth" if padding.cost > _WORTH and padding.value > multiple else ""
            cost = f"{padding.cost:.0%}" if padding.cost >= 0.1 else f"{100 * padding.cost:.2g}%"
            yield (f"{some(names, 1)}: {padding.what} {padding.value:,} -> {padding.to:,} (+{cost} of its FLOPs{dear})")

    def _off(self) -> Iterator[str]:
        reasons: Dict[str, List[MatrixReport]] = {}
        for m in self.matrices:
            if not m.on_tensor_cores(self.gpu):
                why = "one channel a group makes no matrix" if m.depthwise else m.reason
                why = f"{self.gpu.name} has no INT8 Tensor Cores" if m.dtype == "int8" else why
                reasons.setdefault(why, []).append(m)
        for why, matrices in reasons.items():
            yield f"{some([m.name for m in matrices], 3)} ({self.share_of(matrices):.1%} of the FLOPs): {why}"


def _shape(gemms: Sequence[Gemm]) -> str:
    first = max(gemms, key=lambda gemm: gemm.flops, default=None)
    if first is None:
        return "-"
    times = f"{first.times} of " if first.times > 1 else ""
    more = f" and {len(gemms) - 1} more" if len(gemms) > 1 else ""
    return f"{times}{first.m} x {first.n} x {first.k}{more}"
