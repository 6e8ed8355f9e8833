"""What MXNet calls in CUDA's libraries, as the null GPU records it.

with recording() as record:
    net(x).wait_to_read()
record.launches, record.matrix_calls, record.bytes_cast
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from typing import Any, Iterator, NamedTuple

LIBRARY = "libnullgpu.so"
MATRIX = re.compile(r"cublas[SDH]?[Gg]emm|cudnnConvolution(Forward|BackwardData|BackwardFilter)$|cudnnRNN")
# MXNet's kernels of identity from one dtype to another: Cast and amp_cast, a copy between dtypes, amp_multicast.
CASTS = (
    re.compile(
        r"op_with_req<mxnet::op::mshadow_op::identity, \d>, (?P<to>[^,>]+)\*, (?P<source>[^,>]+?)(?: const)?\*>"
    ),
    re.compile(r"TypecastExp<(?P<to>[^,]+), (?P<source>[^,]+),"),
)
BYTES = {"float": 4, "double": 8, "mshadow::half::half_t": 2, "int": 4, "long": 8, "bool": 1}
BYTES.update({"signed char": 1, "unsigned char": 1})
# A kernel that the fusion compiled and that only copies from one dtype to another, whatever it reshapes on the way.
FUSED_CAST = re.compile(r"FusedKernel(?:_(?:Cast|amp_cast|_copy|Reshape|expand_dims|Flatten|squeeze))+_\(")
FUSED_BYTES = {"float": 4, "double": 8, "__half": 2, "int": 4, "long": 8, "signed char": 1, "unsigned char": 1}
TENSOR = re.compile(r"(?P<dtype>f16|f32|f64)\[(?P<shape>[\d,]+)\]")
ITEMSIZE = {"f16": 2, "f32": 4, "f64": 8}


class Event(NamedTuple):
    """One launch or call.

    Attributes
    ----------
    device : int
    kind : str
        ``launch``: a kernel of MXNet's; ``fused``: one that its pointwise fusion compiled; ``call``: a function of
        cuDNN, cuBLAS and the like; ``copy``, ``fill``, ``alloc``; ``compile``: a module of fused kernels is loaded;
        ``refused``: a launch that no GPU takes; ``unknown``: a question to which the null GPU has no answer.
    name : str
        The kernel's demangled name, or the function's.
    details : dict of str
        Launches: ``grid``, ``block``, ``elements``. Matrix products: ``x``, ``w``, ``y`` (dtype and shape),
        ``compute`` (the dtype of the sums), ``math``. ``bytes`` of copies and allocations.
    """

    device: int
    kind: str
    name: str
    details: dict[str, str]

    @property
    def is_matrix(self) -> bool:
        return self.kind == "call" and bool(MATRIX.match(self.name))

    @property
    def dtypes(self) -> set[str]:
        """Those of the tensors that a library call reads and writes: ``f16``, ``f32``, ``f64``."""
        return {self.details[key].split("[")[0] for key in "xwy" if key in self.details}

    @property
    def bytes_cast(self) -> int:
        """Return the bytes read and written by a kernel that only casts from one dtype to another; else 0."""
        for pattern in CASTS if self.kind == "launch" else ():
            found = pattern.search(self.name)
            if found and found["to"] != found["source"]:
                return int(self.details["elements"]) * (BYTES[found["to"]] + BYTES[found["source"]])
        if self.kind == "fused" and FUSED_CAST.match(self.name) and "ast_" in self.name:
            sizes = [FUSED_BYTES.get(name, 0) for name in re.findall(r"(\w[\w ]*)\*", self.name)]
            together = max(1, 4 // min(filter(None, sizes), default=4))  # elements a thread: MXNet's fused_op.cu
            return int(self.details["elements"]) * together * sum(sizes)
        return 0

    @property
    def flops(self) -> float:
        """Return the floating-point operations of a convolution or a matrix product: two for a product and its sum.

        Recurrent layers, whose gates are not recorded, and all else count 0.
        """
        if "m" in self.details:
            return 2.0 * math.prod(int(self.details[key]) for key in ("m", "n", "k", "batch"))
        if not self.name.startswith("cudnnConvolution") or not self.is_matrix:
            return 0.0
        x, w, y = (self._shape(key) for key in "xwy")
        # The tensor with the network's outputs, and the weight: each output sums over one of the weight's kernels.
        out, weight = {"Forward": (y, w), "BackwardData": (x, w), "BackwardFilter": (w, y)}[self.name[16:]]
        return 2.0 * math.prod(out) * math.prod(weight[1:])

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of the three tensors of a convolution or a matrix product, each read or written once."""
        if "m" in self.details:
            m, n, k, batch = (int(self.details[key]) for key in ("m", "n", "k", "batch"))
            sizes = {"x": m * k * batch, "w": k * n * batch, "y": m * n * batch}
            return sum(size * ITEMSIZE.get(self.details[key], 4) for key, size in sizes.items())
        found = [TENSOR.match(self.details.get(key, "")) for key in "xwy"]
        return sum(math.prod(map(int, each["shape"].split(","))) * ITEMSIZE[each["dtype"]] for each in found if each)

    def _shape(self, key: str) -> list[int]:
        found = TENSOR.match(self.details[key])
        return [int(size) for size in found["shape"].split(",")] if found else []


class Record:
    """All events, in order. Empty until the ``with`` block ends."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def launches(self) -> list[Event]:
        """Kernels, fused ones included; without those inside library calls."""
        return self.of("launch", "fused")

    @property
    def calls(self) -> list[Event]:
        """Library calls that compute; searches for an algorithm are not counted."""
        return [event for event in self.of("call") if not re.match(r"cudnn(Find|Get)", event.name)]

    @property
    def matrix_calls(self) -> list[Event]:
        """Convolutions, matrix products and recurrent networks."""
        return [event for event in self.calls if event.is_matrix]

    @property
    def casts(self) -> list[Event]:
        """Kernels that only cast."""
        return [event for event in self.events if event.bytes_cast]

    @property
    def bytes_cast(self) -> int:
        return sum(event.bytes_cast for event in self.events)

    @property
    def impossible(self) -> list[Event]:
        """What a real GPU would refuse."""
        return self.of("refused", "unknown")

    def named(self, *parts: str) -> list[Event]:
        """The launches and calls whose names contain one of ``parts``."""
        return [event for event in self.of("launch", "fused", "call") if any(part in event.name for part in parts)]


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record what is done within, up to its end: waits for all work before and after."""
    import mxnet as mx

    library, record = _library(), Record()
    mx.nd.waitall()
    library.ng_clear()
    library.ng_record(1)
    try:
        yield record
        mx.nd.waitall()
    finally:
        library.ng_record(0)
        record.events = [_event(line) for line in library.ng_text().decode().splitlines()]


@contextlib.contextmanager
def devices(count: int) -> Iterator[None]:
    """Within the ``with`` block the machine has ``count`` GPUs, after it one."""
    _library().ng_devices(count)
    try:
        yield
    finally:
        _library().ng_devices(1)


@contextlib.contextmanager
def overflow(device: int = 0) -> Iterator[None]:
    """Within it, sums of squares on ``device`` are infinite and checks find an array that is not finite."""
    library = _library()
    library.ng_set_norm(device, float("inf"))
    library.ng_set_finite(device, 0)
    try:
        yield
    finally:
        library.ng_set_norm(device, 0.0)
        library.ng_set_finite(device, 1)


def peak_bytes(device: int = 0) -> int:
    """The most memory of a device that this process has held at a time, MXNet's pool included."""
    return _library().ng_peak_bytes(device)


def is_present() -> bool:
    """Whether this process runs on the null GPU."""
    try:
        return bool(_library())
    except OSError:
        return False


def _library() -> Any:
    library = ctypes.CDLL(LIBRARY)
    library.ng_text.restype = ctypes.c_char_p
    library.ng_peak_bytes.restype = ctypes.c_size_t
    library.ng_set_norm.argtypes = [ctypes.c_int, ctypes.c_double]
    return library


def _event(line: str) -> Event:
    device, kind, name, details = line.split("\t")
    return Event(int(device), kind, name, dict(pair.split("=", 1) for pair in details.split()))
