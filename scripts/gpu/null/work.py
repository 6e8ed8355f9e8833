"""What the kernels of a training step compute and move: the part of a model of its time that no GPU is needed for.

MXNet's kernels and cuDNN's move the arrays that they read and write, each once. Where a reduction comes before the
results and its input outgrows a cache (batch normalization), the input is read twice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Callable, Iterable, Iterator, List, NamedTuple

from .record import BYTES, ITEMSIZE, TENSOR, Event

SIZES = {**BYTES, "__half": 2, "mshadow::half::half2_t": 4, "long long": 8, "unsigned int": 4, "unsigned long": 8}
Numbers = List[int]


class Work(NamedTuple):
    """One launch or call.

    Attributes
    ----------
    kind : str
        What limits the arithmetic: ``float16``, Tensor Cores; ``tf32``, FP32 that Tensor Cores may do in TF32, all of
        cuDNN's and products that ask for it; ``float32``, neither; ``memory``, no arithmetic that counts; ``layout``,
        the transposes around a Tensor Core's convolution of NCHW; ``bound``, ``memory`` of a kernel without a rule,
        whose bytes are those of its blocks of memory, at most.
    flops, bytes : int
    """

    kind: str
    flops: int
    bytes: int


# By the start of a name: the bytes of a kernel whose first argument or plan does not say how many elements there are.
# By reading MXNet 1.9.1's sources; n: whole numbers, s: sizes of what is pointed to, in the order of the arguments;
# g: the grid's sides.
RULES: dict[str, Callable[[Numbers, Numbers, Numbers], int]] = {
    "add_bias_kernel": lambda n, s, g: 2 * n[0] * n[1] * s[0],
    "AddBiasGradKernelPhase1": lambda n, s, g: n[0] * n[1] * s[1],
    "AddBiasGradKernelPhase2": lambda n, s, g: n[0] * n[1] * s[0],
    "softmax_stride1_compute_kernel": lambda n, s, g: n[0] * n[-1] * (s[0] + s[1]),
    "softmax_stride1_grad_kernel": lambda n, s, g: n[0] * n[-1] * (s[0] + s[1] + s[2]),
    "reduce_kernel_M1": lambda n, s, g: n[0] * sum(s),
    "reduce_kernel": lambda n, s, g: n[0] * (n[1] * sum(s[:-1]) + s[-1]),
    "reduce_lines_kernel": lambda n, s, g: n[0] * (n[1] * sum(s[:-1]) + s[-1]),
    "LayerNormFusedForwardKernelContig": lambda n, s, g: 2 * n[0] * n[1] * s[0],
    "LayerNormFusedBackwardKernel_PartGammaBeta": lambda n, s, g: 2 * n[0] * n[1] * s[0],
    "LayerNormFusedBackwardKernel_GammaBeta": lambda n, s, g: 2 * n[1] * n[2] * s[0],
    "LayerNormFusedBackwardKernel_Data": lambda n, s, g: 3 * n[0] * n[1] * s[0],
    "transpose_pseudo2D": lambda n, s, g: 2 * n[0] * n[1] * g[2] * n[3] * s[0],
    "adaptiveaverage": lambda n, s, g: g[0] * (n[0] * n[1] + n[2] * n[3]) * s[0],  # a block for each plane
    "atomicadaptiveaverage": lambda n, s, g: g[0] * (2 * n[0] * n[1] + n[2] * n[3]) * s[0],
    "DeviceRadixSort": lambda n, s, g: 4 * n[0] * s[0],
    "RadixSortScanBins": lambda n, s, g: 2 * n[0] * s[0],
    "EmbeddingFindBounds": lambda n, s, g: (n[0] + 2 * n[1]) * s[0],
    "AllFiniteGPUKernel": lambda n, s, g: n[0] * s[0],
    "GlobalReductionKernel": lambda n, s, g: 0,  # a number for each array
}
# Of cuDNN's calls: how many times the first tensor that is recorded is read or written.
PASSES = {
    "cudnnBatchNormalizationForwardTraining": 3,
    "cudnnBatchNormalizationForwardInference": 2,
    "cudnnBatchNormalizationBackward": 5,
    "cudnnActivationForward": 2,
    "cudnnActivationBackward": 3,  # of results, gradients of results, gradients
    "cudnnSoftmaxForward": 2,
    "cudnnSoftmaxBackward": 3,
    "cudnnConvolutionBackwardBias": 1,
    "cudnnAddTensor": 2,
    "cudnnDropoutForward": 2,
    "cudnnDropoutBackward": 2,
}
POOLING = {"cudnnPoolingForward": 1, "cudnnPoolingBackward": 2}  # the same, of both tensors


def work(events: Iterable[Event]) -> list[list]:
    """Return the kind, FLOPs, bytes and number of all distinct work of a record, the largest first."""
    found = Counter(each for event in events for each in works(event))
    return [[*each, number] for each, number in sorted(found.items(), key=lambda of: (of[0][2], of[0]), reverse=True)]


def works(event: Event) -> Iterator[Work]:
    if event.kind == "fill":
        yield Work("memory", 0, int(event.details["bytes"]))
    elif event.kind == "copy" and event.name == "on device":
        yield Work("memory", 0, 2 * int(event.details["bytes"]))
    elif event.kind in ("launch", "fused"):
        yield launched(event)
    elif event.is_matrix:
        yield from of_matrices(event)
    elif event.kind == "call" and not re.match(r"cudnn(Find|Get)", event.name):
        x, y = (size(event.details.get(key, "")) for key in "xy")
        passes, both = PASSES.get(event.name, 0), POOLING.get(event.name, 0)
        yield Work("memory" if passes or both else "bound", 0, passes * x + both * (x + y))


def of_matrices(event: Event) -> Iterator[Work]:
    """A convolution, a product, or the steps of a recurrent layer."""
    kind = "float32"
    if event.details["math"] == "TENSOR_OP" and event.dtypes == {"f16"}:
        kind = "float16"
    elif event.dtypes == {"f32"} and (event.name.startswith("cudnn") or event.details["math"] == "TF32"):
        kind = "tf32"
    if event.name.startswith("cudnnRNN"):
        yield from of_recurrent(event, kind)
        return
    yield Work(kind, round(event.flops), event.bytes_moved)
    if event.name.startswith("cudnnConvolution") and kind == "float16" and "NHWC" not in event.details["x"]:
        yield Work("layout", 0, 2 * event.bytes_moved)


def of_recurrent(event: Event, kind: str) -> Iterator[Work]:
    """Each step of each layer reads its weights; the weights' gradients are one product of each layer."""
    read = TENSOR.match(event.details["x"])
    assert read, event
    steps, batch, inputs = map(int, read["shape"].split(","))
    hidden, layers, directions, gates = (int(event.details[key]) for key in ("hidden", "layers", "directions", "gates"))
    for layer in range(layers):
        width = (directions * hidden if layer else inputs) + hidden
        flops, weights = 2 * batch * gates * hidden * width, gates * hidden * width
        moved = ITEMSIZE[read["dtype"]] * (weights + batch * (width + gates * hidden))
        for _ in range(directions):
            if "BackwardWeights" in event.name:
                yield Work(kind, steps * flops, moved)
            else:
                yield from [Work(kind, flops, moved)] * steps


def launched(event: Event) -> Work:
    """A kernel of MXNet's: by its rule, or each array whole as far as its block of memory reaches."""
    types, count = parameters(event.name), int(event.details["elements"])
    numbers = [int(word) for word in event.details["arguments"].split(",") if word.lstrip("-").isdigit()]
    rooms = [int(word[1:]) for word in event.details["arguments"].split(",") if word.startswith("p")]
    sizes = [SIZES.get(word[:-1].replace("const", "").strip(), 1) for word in types if word.endswith("*")]
    if event.kind == "fused":
        together = max(1, 4 // min(sizes))  # elements of a thread: fused_op.cu of MXNet
        return Work("memory", 0, sum(min(count * together * each, room) for each, room in zip(sizes, rooms)))
    if "MapPlanKernel" in event.name:
        arrays = [SIZES.get(name, 1) for name in re.findall(r"Tensor<mshadow::gpu, \d, ([\w: ]+)>", ",".join(types))]
        again = arrays[:1] * ("sv::saveto" not in event.name)
        return Work("memory", 0, count * sum(arrays + again))
    dtype = re.search(r"(?:MultiSGDKernelParam|MultiSumSqKernel|MultiAllFiniteGPUKernel)<([\w:]+)", event.name)
    if dtype:
        return Work("memory", 0, of_step(event, SIZES[dtype[1]], count, numbers))
    if count:
        return Work("memory", 0, sum(min(count * each, room) for each, room in zip(sizes, rooms)))
    name = re.match(r"(?:void )?(?:\w+::)*(\w+)", event.name)
    rule = next((rule for start, rule in RULES.items() if name and name[1].startswith(start)), None)
    grid = [int(side) for side in event.details["grid"].split("x")]
    return Work("memory", 0, rule(numbers, sizes, grid)) if rule else Work("bound", 0, sum(rooms))


def of_step(event: Event, size: int, count: int, numbers: list[int]) -> int:
    """The bytes of a kernel of the optimizer or of its check, which has its arrays by value."""
    if "MultiSumSq" in event.name:
        return int(event.details["grid"].split("x")[0]) * numbers[0] * size  # a block for each part of an array
    if "MultiAllFinite" in event.name:
        return count * size
    momentum, masters = (word == "true" for word in re.findall(r"true|false", event.name)[:2])
    # The weight, its gradient and its new value, or masters for the first; momentum is FP32, as masters are.
    return count * ((3 - masters) * size + 8 * momentum + 8 * masters)


def parameters(name: str) -> list[str]:
    """Return the types in the parameter list at the end of a demangled name."""
    words: list[str] = []
    depth, start = 0, len(name) - 1
    for start in range(len(name) - 1, -1, -1):
        depth += (name[start] == ")") - (name[start] == "(")
        if not depth:
            break
    for part in re.split(r",\s*", name[start + 1 : -1]):
        inside = bool(words) and sum(map(words[-1].count, "<(")) > sum(map(words[-1].count, ">)"))
        words[-1:] = [f"{words[-1]}, {part}"] if inside else [*words[-1:], part]
    return words


def size(tensor: str) -> int:
    """Return the bytes of "f16[2,3,4,4]"; 0 for anything else."""
    found = TENSOR.match(tensor)
    return math.prod(map(int, found["shape"].split(","))) * ITEMSIZE[found["dtype"]] if found else 0
