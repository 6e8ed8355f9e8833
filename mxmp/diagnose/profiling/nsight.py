"""Reads what NVIDIA's profilers export: Nsight Systems' SQLite and Nsight Compute's CSV."""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator

from .kernels import CAST, MATRIX, TENSOR, kind_of_kernel, kind_of_operator
from .profiled import Event

if TYPE_CHECKING:
    import sqlite3

__all__ = ["is_compute_header", "read_compute", "read_systems"]

# -- Nsight Systems: docs.nvidia.com/nsight-systems, nsys-exporter, "SQLite Export Schema Reference" -----------------


def read_systems(path: str) -> list[Event]:
    """Every kernel of an export, with the operator whose NVTX range launched it.

    MXNet opens a range for each operator that its profiler records (src/profiler/nvtx.h).

    Raises
    ------
    ValueError
        No database, or one without kernels.
    """
    import sqlite3  # which not every Python has

    try:
        with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as database:
            found = list(_kernels(database))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path!r} is a damaged SQLite file, or of another schema: {error}") from error
    if not found:
        raise ValueError(
            f"{path!r} holds no kernels (table CUPTI_ACTIVITY_KIND_KERNEL with StringIds): record them with "
            "nsys profile --trace=cuda,nvtx, and export with nsys export --type sqlite"
        )
    return found


def _kernels(database: sqlite3.Connection) -> Iterator[Event]:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"} <= tables:
        return
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    columns = {row[1] for row in database.execute("PRAGMA table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
    operators = {}
    if {"CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"} <= tables and {"correlationId", "globalPid"} <= columns:
        operators = dict(_launches(database, names))
    links = "globalPid, correlationId" if operators else "NULL, NULL"
    rows = database.execute(
        f'SELECT start, "end", deviceId, demangledName, {links} FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY start'
    )
    for start, end, device, name_id, process, correlation in rows:
        name = names.get(name_id, f"kernel {name_id}")
        operator = operators.get((process, correlation), "")
        kind = kind_of_kernel(name)
        if kind != TENSOR and kind_of_operator(operator) == CAST:
            kind = CAST
        yield Event(name, operator, kind, (end - start) / 1e9, f"gpu/{device}")


def _launches(database: sqlite3.Connection, names: dict[int, str]) -> Iterator[tuple[tuple[int, int], str]]:
    """For each launch, by process and correlation id, the innermost range of its thread that it stands in."""
    ranges: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    columns = {row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")}
    text_id = "textId" if "textId" in columns else "NULL"
    # 59 is a push/pop range, 60 a start/end range, which is MXNet's.
    for start, end, text, number, thread in database.execute(
        f'SELECT start, "end", text, {text_id}, globalTid FROM NVTX_EVENTS WHERE eventType IN (59, 60)'
    ):
        if end is not None:
            ranges[thread].append((start, end, text if text is not None else names.get(number, "")))
    nested = {thread: _Ranges(found) for thread, found in ranges.items()}
    launches = database.execute("SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    for start, thread, correlation in launches:
        # "Serialized process and thread identifiers": the process is the upper part of a thread's.
        process = thread // 0x1000000 * 0x1000000
        if thread in nested:
            yield (process, correlation), nested[thread].innermost(start)


class _Ranges:
    """Ranges of one thread, nested or one after the other."""

    def __init__(self, ranges: list[tuple[int, int, str]]) -> None:
        self._ranges = sorted(ranges, key=lambda each: (each[0], -each[1]))
        self._starts = [each[0] for each in self._ranges]
        self._outer: list[int | None] = []
        stack: list[int] = []
        for number, (start, _, _) in enumerate(self._ranges):
            while stack and self._ranges[stack[-1]][1] <= start:
                stack.pop()
            self._outer.append(stack[-1] if stack else None)
            stack.append(number)

    def innermost(self, moment: int) -> str:
        """The name of the innermost range at a moment, empty outside all."""
        place: int | None = bisect_right(self._starts, moment) - 1
        if place == -1:
            return ""
        while place is not None and self._ranges[place][1] < moment:
            place = self._outer[place]
        return "" if place is None else self._ranges[place][2]


# -- Nsight Compute: docs.nvidia.com/nsight-compute/NsightComputeCli, "--csv" and "--page" --------------------------

_KERNEL = "Kernel Name"
_DURATIONS = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS.update({"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0})


def is_compute_header(row: list[str]) -> bool:
    """Whether a CSV row is the header of an Nsight Compute table."""
    return _KERNEL in row and "ID" in row


def read_compute(path: str) -> list[Event]:
    """Every kernel of ``ncu --csv``, page raw (a column a metric) or details (a row a metric).

    Where a metric of the tensor pipe was collected it says what ran on Tensor Cores, not the name.

    Raises
    ------
    ValueError
        No such table, or one without durations.
    """
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.reader(file))
    start = next((i for i, row in enumerate(rows) if is_compute_header(row)), None)
    if start is None:
        raise ValueError(f"{path!r} holds no table of Nsight Compute: no header with 'ID' and 'Kernel Name'")
    header = rows[start]
    table = [row for row in rows[start + 1 :] if len(row) == len(header)]
    found = _details(header, table) if "Metric Name" in header else _raw(header, table)
    events = [_event(name, metrics, device, path) for name, metrics, device in found]
    if not events:
        raise ValueError(f"{path!r} holds a table of Nsight Compute without kernels")
    return events


def _raw(header: list[str], rows: list[list[str]]) -> Iterator[Any]:
    """Units are in the first row."""
    at, device = header.index(_KERNEL), _place(header, "Device")
    units = rows[0] if rows else []
    for row in rows[1:]:
        yield row[at], {name: (row[i], units[i]) for i, name in enumerate(header)}, _cell(row, device)


def _details(header: list[str], rows: list[list[str]]) -> Iterable[Any]:
    places = [header.index(name) for name in ("ID", _KERNEL, "Metric Name", "Metric Value")]
    unit, device = _place(header, "Metric Unit"), _place(header, "Device")
    kernels: dict[str, tuple] = {}
    for row in rows:
        number, name, metric, value = (row[place] for place in places)
        kernels.setdefault(number, (name, {}, _cell(row, device)))[1][metric] = (value, _cell(row, unit))
    return kernels.values()


def _place(header: list[str], name: str) -> int | None:
    return header.index(name) if name in header else None


def _cell(row: list[str], place: int | None) -> str:
    return "" if place is None else row[place]


def _event(name: str, metrics: dict[str, tuple[str, str]], device: str, path: str) -> Event:
    duration = next((metrics[key] for key in _DURATIONS if key in metrics), None)
    if duration is None or duration[1] not in _UNITS:
        raise ValueError(
            f"{path!r} has no duration of {name!r}{f' in a unit that is known: {duration[1]!r}' if duration else ''}: "
            "collect it with ncu --section SpeedOfLight, or --metrics gpu__time_duration.sum"
        )
    kind = kind_of_kernel(name)
    pipe = [_number(value) for key, (value, _) in metrics.items() if "pipe_tensor" in key]
    measured = [value for value in pipe if value is not None]
    if measured:
        kind = TENSOR if any(measured) else MATRIX if kind == TENSOR else kind
    seconds = _number(duration[0])
    if seconds is None:
        raise ValueError(f"{path!r}: the duration of {name!r} is no number: {duration[0]!r}")
    return Event(name, "", kind, seconds * _UNITS[duration[1]], f"gpu/{device or 0}")


def _number(text: str) -> float | None:
    """With ncu's thousands separators; None for what was not measured (``n/a``)."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
