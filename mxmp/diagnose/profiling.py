"""``profile``: reads the SQLite export of Nsight Systems.

Schema: docs.nvidia.com/nsight-systems, nsys-exporter, "SQLite Export Schema Reference".
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, Iterator

from ..wrong_files import kind_of, near_name
from .text import section

if TYPE_CHECKING:
    import sqlite3


TENSOR, MATRIX, CAST, OTHER = KINDS = "tensor", "matrix", "cast", "other"

# Parts of the names of Tensor Core kernels, by source. A number is the shape of the mma instruction, the letter
# before it the dtype of its sums: h884 is 8x8x4 in float16, s1688 16x8x8 in FP32, i8816 8x8x16 in INT32.
_PYPROF = "NVIDIA/PyProf, pyprof/prof/tc.py; the same in TensorFlow's kernel_stats_utils.cc and Kineto's tensor_core.py"
TENSOR_NAMES = {
    **dict.fromkeys(("h884", "s884", "h1688", "s1688", "c1688", "hmma", "i8816", "16816"), _PYPROF),
    **dict.fromkeys(("xmma_gemm", "xmma_implicit_gemm", "xmma_sparse_conv", "xmma_sparse_gemm"), _PYPROF),
    **dict.fromkeys(("xmma_warp_specialized_implicit_gemm", "dgrad_1x1_stride_2x2"), _PYPROF),
    **dict.fromkeys(("first_layer_wgrad_kernel", "conv1x1", "conv2d_c1_k1", "direct_group"), _PYPROF),
    "i16832": "TensorFlow, tensorflow/core/profiler/utils/kernel_stats_utils.cc",
    "tensorop": "NVIDIA/CUTLASS, media/docs/profiler.md: cutlass_tensorop_..., beside cutlass_simt_...",
    "tensor16x8": "cuDNN 8: sm80_xmma_..._tensor16x8x8_..., beside ..._ffma_...",
}
_TENSOR = re.compile("|".join(map(re.escape, TENSOR_NAMES)))
# Kernels with such a name that do not use the Tensor Cores.
_NOT_TENSOR = re.compile(r"simt|ffma|xmma(?!.*tensor).*_f32f32_f32f32_f32")
_MATRIX = re.compile(
    r"gemm|gemv|convolve|scudnn|hcudnn|winograd|(?<![a-z])[wd]grad|fprop|fft[12]d|rnn_blockpersist|persistrnn|dot_"
)
_LOW = re.compile(r"fp16|half|bf16|(?<![a-z])f16|(?<![a-z])h(?:gemm|gemv|cudnn|884|1688|16816)")
# MXNet's Cast, amp_cast and amp_multicast assign mshadow's tcast (src/operator/tensor/amp_cast.h, v1.x).
_CAST = re.compile(r"plan<\s*(?:mshadow::)?(?:expr::)?typecastexp|identity_with_cast")
_CAST_OPERATOR = re.compile(r"(?:_backward_)?(?:cast|amp_cast|amp_multicast)")
_NAMES = {TENSOR: "on Tensor Cores", MATRIX: "products without", CAST: "casts", OTHER: "everything else"}
_LONGEST = 15
_WIDTH = 72


def kind_of_kernel(name: str) -> str:
    """Return the kind of a GPU kernel by its demangled name, as in KernelReport."""
    name = name.lower()
    if _TENSOR.search(name) and not _NOT_TENSOR.search(name):
        return TENSOR
    if _CAST.search(name):
        return CAST
    return MATRIX if _MATRIX.search(name) or _TENSOR.search(name) else OTHER


def reads_low_precision(name: str) -> bool:
    return _LOW.search(name.lower()) is not None


def is_cast(operator: str) -> bool:
    """Return whether an operator is a cast, by its type in MXNet's profiler, such as ``"_backward_cast"``."""
    return _CAST_OPERATOR.fullmatch(operator.lower()) is not None


@dataclass(frozen=True)
class KernelReport:
    """All runs of one GPU kernel for operators of one type on one device.

    Attributes
    ----------
    name : str
        The name of the kernel.
    operator : str
        The type of the operator that launched the kernel, as MXNet's profiler names it: ``"Convolution"``,
        ``"_backward_cast"``. Empty where none is recorded.
    kind : {"tensor", "matrix", "cast", "other"}
        A matrix product or convolution on Tensor Cores, one without them, a cast, or anything else.
    device : str
        ``"gpu/0"`` and so on.
    calls : int
        How often the kernel ran.
    seconds : float
        The time of all these runs together.
    """

    name: str
    operator: str
    kind: str
    device: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The GPU kernels that Nsight Systems recorded, read by ``profile``. ``print`` it, or read the fields. Plain data.

    Attributes
    ----------
    path : str
        The file that ``nsys export --type sqlite`` wrote.
    kernels : tuple of KernelReport
        One report for each kernel, operator and device; longest total time first.
    """

    path: str
    kernels: tuple[KernelReport, ...]

    @property
    def seconds(self) -> float:
        """Return the sum of the times of all kernels in seconds; times in which several ran at once count for each."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the GPUs that ran the kernels, such as ``("gpu/0", "gpu/1")``."""
        return tuple(sorted({kernel.device for kernel in self.kernels}))

    def share(self, kind: str) -> float:
        """Return the share of the kernels' time, from 0 to 1, that kernels of one kind took; 0 if all times are 0.

        ``kind`` is ``"tensor"``, ``"matrix"``, ``"cast"`` or ``"other"``, as in KernelReport.

        Raises
        ------
        ValueError
            There is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        return self._share_of(sum(k.seconds for k in self.kernels if k.kind == kind))

    def _share_of(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def missed(self) -> tuple[KernelReport, ...]:
        """Return the kernels of kind ``"matrix"`` whose names say that they read low precision, longest time first.

        They use no Tensor Cores, and could be faster on them.
        """
        return tuple(kernel for kernel in self.kernels if kernel.kind == MATRIX and reads_low_precision(kernel.name))

    def __str__(self) -> str:
        calls = sum(kernel.calls for kernel in self.kernels)
        missed = (
            f"{self._share_of(kernel.seconds):>5.1%}  {_short(kernel.name)}"
            + (f"  of {kernel.operator}" if kernel.operator else "")
            for kernel in self.missed[:_LONGEST]
        )
        return "\n".join(
            [
                f"{self.path} ({', '.join(self.devices)}): {self.seconds * 1e3:,.3f} ms in {calls:,} kernels",
                *(f"  {self.share(kind):>6.1%} {name}" for kind, name in _NAMES.items()),
                *section("Low precision, not on Tensor Cores (see advise for the shapes)", missed),
            ]
        )


def _short(name: str) -> str:
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."


def profile(path: str) -> Profile:
    """Read a recording of Nsight Systems: the time of GPU kernels on Tensor Cores, in casts and in everything else.

    Where the recording says which MXNet operator launched a kernel, the times of the kernel are given by operator.

    Parameters
    ----------
    path : str
        The file that ``nsys export --type sqlite`` writes. It is only read.

    Returns
    -------
    Profile
        ``print`` it, or read its ``kernels``.

    Raises
    ------
    ValueError
        The file is no such export, is damaged, or holds no kernels; the message says how to record them.
    OSError
        The file cannot be read.
    ImportError
        This Python was built without ``sqlite3``.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        what = f"{os.strerror(errno.ENOENT)}; expected what nsys export --type sqlite wrote{near_name(path, '.sqlite')}"
        raise FileNotFoundError(errno.ENOENT, what, path)
    with open(path, "rb") as binary:
        is_database = binary.read(16) == b"SQLite format 3\0"
    try:
        if not is_database:
            raise ValueError(
                "is no SQLite export of Nsight Systems: nsys export --type sqlite -o report.sqlite report.nsys-rep; "
                f"{kind_of(path) or 'it holds something else'}"
            )
        return Profile(path, _read(path))
    except ValueError as error:
        raise ValueError(f"{path!r} {error}") from error


def _read(path: str) -> tuple[KernelReport, ...]:
    """Return a report for each kernel, operator and device, longest time first; ``profile`` adds the path to errors."""
    import sqlite3  # which not every Python has

    seconds: dict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: Counter = Counter()
    try:
        with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            for key, duration in _runs(database):
                seconds[key] += duration
                calls[key] += 1
    except sqlite3.Error as error:
        raise ValueError(f"is a damaged SQLite file, or of another schema: {error}") from error
    if not seconds:
        raise ValueError(
            "holds no kernels (table CUPTI_ACTIVITY_KIND_KERNEL with StringIds): record them with "
            "nsys profile --trace=cuda,nvtx, and export with nsys export --type sqlite"
        )
    found = [KernelReport(*key, calls=calls[key], seconds=total) for key, total in seconds.items()]
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


def _runs(database: sqlite3.Connection) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    """Yield (name, operator, kind, device) and the seconds of each run of a kernel; nothing if tables are missing."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"} <= tables:
        return
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    columns = {row[1] for row in database.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
    operators = {}
    if {"CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"} <= tables and {"correlationId", "globalPid"} <= columns:
        # MXNet opens a range for each operator that its profiler records (src/profiler/nvtx.h).
        operators = dict(_launches(database, names))
    links = "globalPid, correlationId" if operators else "NULL, NULL"
    rows = database.execute(
        f'SELECT start, "end", deviceId, demangledName, {links} FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY start'
    )
    for start, end, device, name_id, process, correlation in rows:
        _check("CUPTI_ACTIVITY_KIND_KERNEL", int, start=start, end=end, deviceId=device)
        name = names.get(name_id, f"kernel {name_id}")
        _check("StringIds", str, value=name)
        if end < start:
            raise ValueError(f"is damaged: {name!r} ends at {end!r}, before it begins at {start!r}")
        operator, kind = operators.get((process, correlation), ""), kind_of_kernel(name)
        if kind != TENSOR and is_cast(operator):
            kind = CAST
        yield (name, operator, kind, f"gpu/{device}"), (end - start) * 1e-9


def _launches(database: sqlite3.Connection, names: dict[Any, Any]) -> Iterator[tuple[tuple[int, Any], str]]:
    """Yield (process id, correlation id) of each CUDA call, and the innermost NVTX range that was open, or ``""``."""
    events: dict[int, list[tuple[int, bool, int, Any]]] = defaultdict(list)  # by thread: start, is a launch, -end, ...
    columns = {row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")}
    text_id = "textId" if "textId" in columns else "NULL"
    # 59 is a push/pop range, 60 a start/end range, which is MXNet's. One without an end was still open.
    for start, end, text, number, thread in database.execute(
        f'SELECT start, "end", text, {text_id}, globalTid FROM NVTX_EVENTS WHERE eventType IN (59, 60)'
    ):
        if end is not None and thread is not None:
            name = text if text is not None else names.get(number, "")
            _check("NVTX_EVENTS", str, text=name)
            _check("NVTX_EVENTS", int, start=start, end=end, globalTid=thread)
            events[thread].append((start, False, -end, name))
    launches = database.execute("SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    for start, thread, correlation in launches:
        if thread in events:
            _check("CUPTI_ACTIVITY_KIND_RUNTIME", int, start=start)
            events[thread].append((start, True, 0, correlation))
    for thread, of_thread in events.items():
        # "Serialized process and thread identifiers": the process is the upper part of a thread's.
        process = thread // 0x1000000 * 0x1000000
        open_ranges: list[tuple[int, str]] = []
        for moment, is_launch, minus_end, which in sorted(of_thread, key=lambda event: event[:3]):
            while open_ranges and open_ranges[-1][0] < moment:
                open_ranges.pop()
            if is_launch:
                yield (process, which), open_ranges[-1][1] if open_ranges else ""
            else:
                open_ranges.append((-minus_end, which))


def _check(table: str, kind: type, **columns: Any) -> None:
    # SQLite keeps any type in any column.
    for column, value in columns.items():
        if not isinstance(value, kind):
            raise ValueError(f"is damaged: column {column} of {table} must hold {kind.__name__}, got {shorten(value)}")
