"""What ``advise`` returns: matrix operators, and the sizes that would fit Tensor Cores better, as data and text."""

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


@dataclass(frozen=True)
class Padding:
    """A dimension of a matrix operator whose size does not suit Tensor Cores, with the size to pad it to.

    In float16 sizes should be multiples of 8, in INT8 of 16.

    Attributes
    ----------
    what : str
        Which dimension, such as ``"output channels"``.
    value, to : int
        The size that the dimension has, and the next larger size that suits.
    """

    what: str
    value: int
    to: int

    @property
    def cost(self) -> float:
        """Return the share of the operator's FLOPs that padding this dimension adds; 0.001 is 0.1 %."""
        return self.to / self.value - 1


@dataclass(frozen=True)
class MatrixReport:
    """One operator of a network that multiplies matrices, such as a convolution, with its products. Made by ``advise``.

    Attributes
    ----------
    name, op : str
        Name and type, such as ``"fc1"`` and ``"FullyConnected"``.
    layout : str
        The layout of a convolution's tensors, such as ``"NCHW"``; ``"TNC"`` for a recurrent layer; otherwise which of
        the two operands are transposed: ``"NN"``, ``"NT"``, ``"TN"`` or ``"TT"``.
    gemms : tuple of Gemm
        The matrix products: of a convolution the implicit GEMM, of a recurrent layer two for each layer, or three if it
        has a projection.
    sizes : tuple of Size
        The dimensions whose sizes should be multiples of ``multiple`` for Tensor Cores.
    times : float
        How often the operator runs in one forward: the number of iterations of the loops around it, times 0.5 for each
        branch of ``cond`` that it is in.
    elements : int
        The number of elements of all inputs and outputs, each once. A recurrent layer reads its weights again at each
        time step, so there it is the sum over all products.
    dtype : str
        What the operator computes in under the policy: ``"float16"``, ``"int8"`` or ``"float32"``.
    reason : str
        Why it computes in this dtype.
    depthwise : bool
        True if every group of the convolution has one channel, so that there is no matrix for a Tensor Core.
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
        """Return the FLOPs of this operator in one forward of the network; a multiply-add counts as two."""
        return sum(gemm.flops for gemm in self.gemms) * self.times

    @property
    def intensity(self) -> float:
        """Return the arithmetic intensity of the operator in its own dtype, in FLOPs per byte.

        The bytes are those of all inputs, read once, and all outputs, written once.
        """
        return self.intensity_in(self.dtype)

    def intensity_in(self, dtype: str) -> float:
        """Return the arithmetic intensity that the operator has in ``dtype``, in FLOPs per byte.

        ``dtype`` is ``"float16"``, ``"int8"``, ``"tf32"`` or ``"float32"``.
        """
        return self.flops / (self.elements * self.times * _ITEMSIZE[dtype])

    @property
    def multiple(self) -> int:
        """Return the number that the operator's sizes should be multiples of for Tensor Cores: 16 in INT8, or 8."""
        return MULTIPLES["int8" if self.dtype == "int8" else "float16"]

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """Return the dimensions whose sizes are no multiples of ``multiple``, each with the size to pad it to.

        Empty for a depthwise convolution, which padding does not help.
        """
        if self.depthwise:
            return ()
        padded = [
            Padding(s.what, s.value, s.or_else or -(-s.value // self.multiple) * self.multiple) for s in self.sizes
        ]
        return tuple(padding for padding in padded if padding.to != padding.value)

    @property
    def padding_cost(self) -> float:
        """Return the share of FLOPs that padding every dimension in ``paddings`` adds to the operator; 0.1 is 10 %."""
        return prod(1 + padding.cost for padding in self.paddings) - 1

    def on_tensor_cores(self, gpu: Gpu) -> bool:
        """Return whether Tensor Cores of ``gpu`` can compute the operator, in the dtype that the policy gives it.

        They cannot for depthwise convolutions, and for recurrent layers, for which MXNet does not request them from
        cuDNN.
        """
        return self.dtype in gpu.tensor and not self.depthwise and self.op != "RNN"  # src/operator/rnn-inl.h


@dataclass(frozen=True)
class Joinable:
    """Matrix operators that read the same tensor and could be one operator, such as the projections to Q, K and V.

    Attributes
    ----------
    names : tuple of str
        The names of the operators.
    op : str
        Their type, such as ``"FullyConnected"``.
    input : str
        The name of the operator or variable that they all read.
    outputs : int
        How many outputs or channels the one operator would have.
    """

    names: tuple[str, ...]
    op: str
    input: str
    outputs: int

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: all read {self.input}; one {self.op} with {self.outputs:,} outputs"


@dataclass(frozen=True)
class Advice:
    """What ``advise`` found for a network on a GPU. ``print`` it, or read the fields. Plain data.

    Attributes
    ----------
    name, policy, device : str
        The name of the network, the policy as a string, and the GPU as a key of ``GPUS``, such as ``"v100"``.
    matrices : tuple of MatrixReport
        Every matrix operator of one forward, in graph order.
    joinable : tuple of Joinable
        Matrix operators that could be one.
    unknown : tuple of str
        Names of operators that are counted nowhere, because their shapes do not follow from those of the inputs, or
        because mxmp does not know what they multiply.
    unmatched : tuple of str
        Patterns of ``exclude`` that match no operator.
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
        """Return the peak figures of the GPU that ``device`` names."""
        return gpu_named(self.device)

    @property
    def flops(self) -> float:
        """Return the FLOPs of all matrix operators in one forward. A training step has about three times as many."""
        return sum(matrix.flops for matrix in self.matrices)

    @property
    def tensor_share(self) -> float:
        """Return the share of the FLOPs, from 0 to 1, of the operators that can run on Tensor Cores."""
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu)])

    @property
    def fitting_share(self) -> float:
        """Return the share of the FLOPs, from 0 to 1, of the operators that can run on Tensor Cores without padding."""
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu) and not m.paddings])

    def share_of(self, matrices: Sequence[MatrixReport]) -> float:
        """Return the share of the network's FLOPs, from 0 to 1, that the operators ``matrices`` have."""
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
        """Return a text with the FLOPs per byte from which on arithmetic limits an operator, for each dtype."""
        names = {"float16": "float16", "tf32": "TF32", "float32": "FP32"}
        dtypes = [dtype for dtype in names if dtype == "float32" or dtype in self.gpu.tensor]
        return ", ".join(f"{self.gpu.ridge(dtype):.0f} ({names[dtype]})" for dtype in dtypes)

    def _table(self) -> Iterator[str]:
        """Yield the lines of a table with a row for all operators of the same type and shape, most FLOPs first."""
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
        """Yield a line for each dimension to pad, with its cost; operators with the same dimension share a line."""
        found: dict[tuple, list[str]] = {}
        for m in self.matrices:
            for padding in m.paddings if m.on_tensor_cores(self.gpu) else ():
                found.setdefault((padding, m.multiple), []).append(m.name)
        for (padding, multiple), names in found.items():
            dear = ", more than it is worth" if padding.cost > _WORTH and padding.value > multiple else ""
            cost = f"{padding.cost:.0%}" if padding.cost >= 0.1 else f"{100 * padding.cost:.2g}%"
            yield f"{some(names, 1)}: {padding.what} {padding.value:,} -> {padding.to:,} (+{cost} of its FLOPs{dear})"

    def _layouts(self) -> Iterator[str]:
        """Yield a line on what the layout NCHW costs, if a convolution that can run on Tensor Cores has it."""
        if any(m.layout in ("NCHW", "NCDHW") and m.on_tensor_cores(self.gpu) for m in self.matrices):
            # NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
            yield "NCHW: cuDNN's Tensor Core kernels read NHWC, and transpose around each convolution"

    def _off_tensor_cores(self) -> Iterator[str]:
        """Yield a line for each reason not to run on Tensor Cores: the operators concerned and their share of FLOPs."""
        reasons: dict[str, list[MatrixReport]] = {}
        for m in self.matrices:
            if not m.on_tensor_cores(self.gpu):
                why = "one channel a group makes no matrix" if m.depthwise else m.reason
                why = f"{self.gpu.name} has no INT8 Tensor Cores" if m.dtype == "int8" else why
                reasons.setdefault(why, []).append(m)
        for why, matrices in reasons.items():
            yield f"{some([m.name for m in matrices], 3)} ({self.share_of(matrices):.1%} of the FLOPs): {why}"


def _shape(gemms: Sequence[Gemm]) -> str:
    """Return a text on the largest product, how often it occurs and how many others there are.

    For example ``"96 of 128 x 128 x 64 and 1 more"``: 96 products with these M, N and K, and another Gemm.
    """
    first = max(gemms, key=lambda gemm: gemm.flops, default=None)
    if first is None:
        return "-"
    times = f"{first.times} of " if first.times > 1 else ""
    more = f" and {len(gemms) - 1} more" if len(gemms) > 1 else ""
    return f"{times}{first.m} x {first.n} x {first.k}{more}"
