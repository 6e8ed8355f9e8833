"""What ``advise`` returns: matrix operators, and the sizes that would fit Tensor Cores better, as data and text."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Iterator, Sequence

from ...kernels.channels_last import WHY_SLOW
from ..text import grouped, section, some, table
from .gemm import Gemm, Size
from .gpus import Gpu, gpu_named

_ITEMSIZE = {"float16": 2, "int8": 1, "tf32": 4, "float32": 4}
_LONGEST = 20
# NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC".
_TRANSPOSED = "NCHW: cuDNN's Tensor Core kernels read NHWC, and transpose around each convolution; "
_NHWC = "layout='NHWC' saves that in this network, which has no BatchNorm"
_NCHW = "keep it nevertheless: this network has BatchNorm, which is slow with axis=3"
_WORTH = 0.1  # of a matrix operator's FLOPs: padding that costs more is named, not advised


@dataclass(frozen=True)
class Padding:
    """A dimension of a matrix operator whose size does not suit Tensor Cores, with the size to pad it to.

    Sizes should be multiples of 8, or of 16 in INT8. Made by ``MatrixReport.paddings``.

    Attributes
    ----------
    what : str
        Which dimension, such as ``"output channels"``.
    value, to : int
        The size that the dimension has, and the next larger size that suits: 30 and 32.
    """

    what: str
    value: int
    to: int

    @property
    def cost(self) -> float:
        """Return by which share padding this dimension raises the operator's FLOPs: 0.067 for a padding of 30 to 32."""
        return self.to / self.value - 1


@dataclass(frozen=True)
class MatrixReport:
    """One operator of a network that multiplies matrices, such as a convolution, and how it suits Tensor Cores.

    Made by ``advise`` for every such operator.

    Attributes
    ----------
    name, op : str
        Name and type, such as ``"fc1"`` and ``"FullyConnected"``.
    layout : str
        The layout of a convolution's tensors, such as ``"NCHW"``; ``"TNC"`` for a recurrent layer; otherwise which of
        the two operands are transposed: ``"NN"``, ``"NT"``, ``"TN"`` or ``"TT"``.
    gemms : tuple of Gemm
        The sizes M, N and K of the matrix products in one run of the operator; a Gemm stands for all products of one
        shape. A convolution has one Gemm (implicit GEMM), a recurrent layer two for each layer of its stack, or three
        if it has a projection.
    sizes : tuple of Size
        The dimensions whose sizes should be multiples of ``multiple`` (8, or 16 in INT8) for Tensor Cores.
    times : float
        How often the operator runs in one forward: the number of iterations of the loops around it (of ``while_loop``
        the maximum), times 0.5 for each branch of ``cond`` that it is in. 1 outside of control flow.
    elements : int
        How many elements one run of the operator reads and writes: all inputs and outputs, each once. A recurrent layer
        reads its weights again at each time step; its number is the sum over the operands and results of all products.
    dtype : str
        What the operator computes in: ``"float16"`` or ``"float32"``, as the policy says, or ``"int8"`` for an operator
        of a quantized network.
    reason : str
        Why the operator computes in this dtype (also in ``"int8"``), in one line.
    depthwise : bool
        True for a convolution of several groups with one input channel each, which is no matrix for a Tensor Core.
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
        """Return the operator's arithmetic intensity in its own dtype: FLOPs per byte that it reads or writes."""
        return self.intensity_in(self.dtype)

    def intensity_in(self, dtype: str) -> float:
        """Return the arithmetic intensity, in FLOPs per byte, that the operator would have in ``dtype``.

        ``dtype`` is ``"float16"``, ``"int8"``, ``"tf32"`` (which has 4 bytes) or ``"float32"``.
        """
        return self.flops / (self.elements * self.times * _ITEMSIZE[dtype])

    @property
    def multiple(self) -> int:
        """Return the number of which the operator's ``sizes`` should be multiples: 16 in INT8, 8 in any other dtype."""
        # Elements in 16 bytes, what Tensor Core kernels load at once: NVIDIA, Matrix Multiplication Background User's
        # Guide, 2.2 "Tensor Core Requirements". Since cuBLAS 11 and cuDNN 7.6.3 other sizes run too, at a loss.
        return 16 if self.dtype == "int8" else 8

    @property
    def paddings(self) -> tuple[Padding, ...]:
        """Return the dimensions whose sizes are no multiples of ``multiple``, each with the size to pad it to.

        Ungrouped convolutions of stride 2, as in a first layer, have fast kernels for 4 input channels: fewer than 4
        are padded to 4, and 4 need no padding. Empty for a depthwise convolution and a recurrent layer, which no
        padding brings to Tensor Cores.
        """
        if self.depthwise or self.op == "RNN":
            return ()
        padded = [
            Padding(s.what, s.value, s.or_else or -(-s.value // self.multiple) * self.multiple) for s in self.sizes
        ]
        return tuple(padding for padding in padded if padding.to != padding.value)

    @property
    def padding_cost(self) -> float:
        """Return by which share the operator's FLOPs rise if all ``paddings`` are done; 0.1 is 10 %.

        A padding enlarges one dimension, for example 30 output channels to 32, the next multiple of 8.
        """
        return prod(1 + padding.cost for padding in self.paddings) - 1

    def on_tensor_cores(self, gpu: Gpu) -> bool:
        """Return whether Tensor Cores of ``gpu`` can compute the operator in its ``dtype``.

        False in FP32 (TF32 does not count), in INT8 if the GPU has none for it, for a depthwise convolution, and for a
        recurrent layer, for which MXNet does not request Tensor Cores from cuDNN.
        """
        return self.dtype in gpu.tensor and not self.depthwise and self.op != "RNN"  # src/operator/rnn-inl.h


@dataclass(frozen=True)
class Joinable:
    """Several matrix operators that read the same tensor and could be one larger operator, which is usually faster.

    For example the projections to Q, K and V in attention.

    Attributes
    ----------
    names : tuple of str
        The names of the operators.
    op : {"FullyConnected", "Convolution", "dot"}
        Their type.
    input : str
        The name of the operator or variable that they all read.
    outputs : int
        How many outputs (of a FullyConnected), channels or columns (of ``dot``) the larger operator would have.
    """

    names: tuple[str, ...]
    op: str
    input: str
    outputs: int

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: all read {self.input}; one {self.op} with {self.outputs:,} outputs"


@dataclass(frozen=True)
class Advice:
    """The result of ``advise``: how the matrix operators of a network suit the Tensor Cores of a GPU.

    ``print`` it, or read the fields. Plain data.

    Attributes
    ----------
    name, policy, device : str
        The name of the network, the policy as a string, and the GPU as a key of ``GPUS``, such as ``"v100"``.
    matrices : tuple of MatrixReport
        A report on every matrix operator of one forward, in graph order.
    joinable : tuple of Joinable
        Groups of matrix operators that read the same tensor and could be one operator.
    unknown : tuple of str
        Names of operators that no figure counts: matrix operators whose products mxmp does not count, and operators of
        every type for which the shape of an input or of the first output cannot be inferred.
    unmatched : tuple of str
        Patterns in the policy's ``exclude`` or in the argument ``exclude`` of ``advise`` that match no node and no
        block in any of the network's graphs.
    slowed_by : tuple of str
        Sentences on settings of this process that slow down what MXNet computes on a CPU, and what to set instead.
    has_norm : bool
        Whether the network has a BatchNorm, with which ``layout="NHWC"`` does not pay in MXNet 1.9.1.
    slow_norms : tuple of str
        The names of each BatchNorm whose axis is not 1, for which cuDNN has slow kernels.
    """

    name: str
    policy: str
    device: str
    matrices: tuple[MatrixReport, ...]
    joinable: tuple[Joinable, ...]
    unknown: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    slowed_by: tuple[str, ...] = ()
    has_norm: bool = False
    slow_norms: tuple[str, ...] = ()

    @property
    def gpu(self) -> Gpu:
        """Return the GPU that ``device`` names, with its memory bandwidth and its peak operations per second."""
        return gpu_named(self.device)

    @property
    def flops(self) -> float:
        """Return the FLOPs of all matrix operators in one forward. A training step has about three times as many."""
        return sum(matrix.flops for matrix in self.matrices)

    @property
    def tensor_share(self) -> float:
        """Return the share of all matrix FLOPs, 0 to 1, in operators that can run on Tensor Cores of the GPU.

        ``MatrixReport.on_tensor_cores`` says which can, by dtype and kind of operator. Operators with sizes that
        ``MatrixReport.paddings`` would pad count too; ``fitting_share`` leaves them out.
        """
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu)])

    @property
    def fitting_share(self) -> float:
        """Return the share of all matrix FLOPs, 0 to 1, in operators that can run on Tensor Cores and need no padding.

        ``MatrixReport.on_tensor_cores`` is True for these, and ``MatrixReport.paddings`` is empty.
        """
        return self.share_of([m for m in self.matrices if m.on_tensor_cores(self.gpu) and not m.paddings])

    def share_of(self, matrices: Sequence[MatrixReport]) -> float:
        """Return the share of the network's matrix FLOPs, 0 to 1, that ``matrices`` have; 0 if the network has none."""
        return sum(m.flops for m in matrices) / self.flops if self.flops else 0.0

    def __str__(self) -> str:
        names = {"float16": "float16", "tf32": "TF32", "float32": "FP32"}
        dtypes = [dtype for dtype in names if dtype == "float32" or dtype in self.gpu.tensor]
        ridges = ", ".join(f"{self.gpu.ridge(dtype):.0f} ({names[dtype]})" for dtype in dtypes)
        return "\n".join(
            [
                f"{self.name} ({self.policy}) on {self.gpu.name}",
                f"  {self.flops / 1e9:,.3f} GFLOPs of matrix products in one forward ({self.flops / 2e9:,.3f} GMACs), "
                "about three times that in a training step",
                f"  {self.tensor_share:.1%} of them can run on Tensor Cores, {self.fitting_share:.1%} with all sizes "
                "multiples",
                f"  Arithmetic is the limit from {ridges} FLOPs a byte on",
                "",
                *self._table(),
                *section("Sizes", self._paddings()),
                *section("Layout", self._layout()),
                *section("Not on Tensor Cores", self._off_tensor_cores()),
                *section("Products of one input that could be one", map(str, self.joinable)),
                *section("In no figure, because shapes or products are not known", self.unknown[:8]),
                *section("exclude matched nothing", self.unmatched),
                *section("What MXNet computes on this CPU is slowed down", self.slowed_by),
            ]
        )

    def _table(self) -> Iterator[str]:
        """Yield a table of the matrix operators, alike ones in one row, the row with most FLOPs first."""
        kinds = grouped(self.matrices, lambda m: (m.op, m.gemms, m.sizes, m.layout, m.dtype, m.times))
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

    def _layout(self) -> Iterator[str]:
        if any(m.layout in ("NCHW", "NCDHW") and m.on_tensor_cores(self.gpu) for m in self.matrices):
            yield _TRANSPOSED + (_NCHW if self.has_norm else _NHWC)
        if self.slow_norms:
            yield f"BatchNorm with another axis than 1: {some(self.slow_norms, 3)}. {WHY_SLOW}"

    def _paddings(self) -> Iterator[str]:
        """Yield a line for each Padding of operators that Tensor Cores can compute; equal ones share a line."""
        padded = [(m, padding) for m in self.matrices if m.on_tensor_cores(self.gpu) for padding in m.paddings]
        for (padding, multiple), found in grouped(padded, lambda pair: (pair[1], pair[0].multiple)).items():
            names = [m.name for m, _ in found]
            dear = ", more than it is worth" if padding.cost > _WORTH and padding.value > multiple else ""
            cost = f"{padding.cost:.0%}" if padding.cost >= 0.1 else f"{100 * padding.cost:.2g}%"
            yield f"{some(names, 1)}: {padding.what} {padding.value:,} -> {padding.to:,} (+{cost} of its FLOPs{dear})"

    def _off_tensor_cores(self) -> Iterator[str]:
        """Yield a line for each reason for which operators cannot run on Tensor Cores."""

        def reason(m: MatrixReport) -> str:
            if m.dtype == "int8":
                return f"{self.gpu.name} has no INT8 Tensor Cores"
            return "one channel a group makes no matrix" if m.depthwise else m.reason

        missed = [m for m in self.matrices if not m.on_tensor_cores(self.gpu)]
        for why, matrices in grouped(missed, reason).items():
            yield f"{some([m.name for m in matrices], 3)} ({self.share_of(matrices):.1%} of the FLOPs): {why}"


def _shape(gemms: Sequence[Gemm]) -> str:
    """Return the Gemm with most FLOPs, and how many others there are: ``"96 of 128 x 128 x 64 and 1 more"``."""
    first = max(gemms, key=lambda gemm: gemm.flops)
    times = f"{first.times} of " if first.times > 1 else ""
    more = f" and {len(gemms) - 1} more" if len(gemms) > 1 else ""
    return f"{times}{first.m} x {first.n} x {first.k}{more}"
