"""``profile``: reads the SQLite export of Nsight Systems.

Schema: docs.nvidia.com/nsight-systems, nsys-exporter, "SQLite Export Schema Reference".
"""

from __future__ import annotations

import errno
import os
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, Iterator

from ...files import kind_of, near_name
from .report import CAST, TENSOR, KernelReport, Profile, is_cast, kind_of_kernel

if TYPE_CHECKING:
    import sqlite3


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
