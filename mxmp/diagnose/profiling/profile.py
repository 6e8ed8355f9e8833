"""``profile``: reads what NVIDIA's profilers export, and what MXNet's own one dumps."""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, NamedTuple

from ...files import read_json
from .kernels import CAST, MATRIX, TENSOR, kind_of_kernel, kind_of_operator
from .report import KernelReport, Profile

if TYPE_CHECKING:
    import sqlite3

__all__ = ["profile"]

_KNOWN = (
    "Nsight Systems' SQLite (nsys export --type sqlite), Nsight Compute's CSV (ncu --csv --page raw) and the JSON of "
    "mx.profiler.dump() are known"
)
_HINTS = {
    ".nsys-rep": "export it: nsys export --type sqlite",
    ".qdrep": "export it: nsys export --type sqlite",
    ".ncu-rep": "export it: ncu --import FILE --csv --page raw",
}
_LATEST = 2**63  # no time that a profiler writes is as large


class _Event(NamedTuple):
    """One run of a kernel or an operator. ``operator``: of MXNet's that it belongs to, empty where unknown."""

    name: str
    operator: str
    kind: str
    seconds: float
    device: str


def profile(path: str) -> Profile:
    """Read a profiler's file: time on Tensor Cores, in casts and in everything else, by operator.

    Parameters
    ----------
    path : str
        What Nsight Systems exports as SQLite, Nsight Compute prints as CSV, or ``mx.profiler.dump()`` writes. Which
        it is follows from what is in it.

    Raises
    ------
    ValueError
        It is none of these, or damaged, or holds no kernels; says how to record them.
    OSError
        It cannot be read.
    """
    path = os.fspath(path)
    with open(path, "rb") as binary:
        start = binary.read(4096)
    try:
        if start.startswith(b"SQLite format 3\0"):
            return Profile("Nsight Systems", path, _gathered(_systems(path)), knows_kernels=True)
        if start.lstrip().startswith(b"{"):
            return Profile("MXNet", path, _gathered(_trace(path)), knows_kernels=False)
        return Profile("Nsight Compute", path, _gathered(_compute(path)), knows_kernels=True)
    except ValueError as error:
        raise ValueError(f"{path!r} {error}") from error


def _gathered(events: Iterable[_Event]) -> tuple[KernelReport, ...]:
    """Equal runs together, longest first."""
    seconds: dict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: Counter = Counter()
    for event in events:
        key = event.name, event.operator, event.kind, event.device
        seconds[key] += event.seconds
        calls[key] += 1
    found = [KernelReport(*key, calls=calls[key], seconds=total) for key, total in seconds.items()]
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


def _seconds(start: float, end: float, unit: float, name: str) -> float:
    if end < start:
        raise ValueError(f"is damaged: {name!r} ends at {end!r}, before it begins at {start!r}")
    return (end - start) * unit


# -- Nsight Systems: docs.nvidia.com/nsight-systems, nsys-exporter, "SQLite Export Schema Reference" -----------------


def _systems(path: str) -> Iterator[_Event]:
    """Every kernel of an export, with the operator whose NVTX range launched it.

    MXNet opens a range for each operator that its profiler records (src/profiler/nvtx.h).
    """
    import sqlite3  # which not every Python has

    try:
        with closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            found = list(_kernels(database))
    except sqlite3.Error as error:
        raise ValueError(f"is a damaged SQLite file, or of another schema: {error}") from error
    if not found:
        raise ValueError(
            "holds no kernels (table CUPTI_ACTIVITY_KIND_KERNEL with StringIds): record them with "
            "nsys profile --trace=cuda,nvtx, and export with nsys export --type sqlite"
        )
    yield from found


def _kernels(database: sqlite3.Connection) -> Iterator[_Event]:
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
        _check("CUPTI_ACTIVITY_KIND_KERNEL", int, start=start, end=end, deviceId=device)
        name = names.get(name_id, f"kernel {name_id}")
        _check("StringIds", str, value=name)
        operator = operators.get((process, correlation), "")
        kind = kind_of_kernel(name)
        if kind != TENSOR and kind_of_operator(operator) == CAST:
            kind = CAST
        yield _Event(name, operator, kind, _seconds(start, end, 1e-9, name), f"gpu/{device}")


def _launches(database: sqlite3.Connection, names: dict[Any, Any]) -> Iterator[tuple[tuple[int, Any], str]]:
    """For each launch, by process and correlation id, the innermost range of its thread that it stands in."""
    lanes: dict[int, list[tuple[int, int, int, Any]]] = defaultdict(list)  # start, 0 or 1 of a launch, -end, which
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
            lanes[thread].append((start, 0, -end, name))
    launches = database.execute("SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    for start, thread, correlation in launches:
        if thread in lanes:
            _check("CUPTI_ACTIVITY_KIND_RUNTIME", int, start=start)
            lanes[thread].append((start, 1, 0, correlation))
    for thread, lane in lanes.items():
        # "Serialized process and thread identifiers": the process is the upper part of a thread's.
        process = thread // 0x1000000 * 0x1000000
        ranges: list[tuple[int, str]] = []
        for moment, is_launch, minus_end, which in sorted(lane, key=lambda event: event[:3]):
            while ranges and ranges[-1][0] < moment:
                ranges.pop()
            if is_launch:
                yield (process, which), ranges[-1][1] if ranges else ""
            else:
                ranges.append((-minus_end, which))


def _check(table: str, kind: type, **columns: Any) -> None:
    """SQLite keeps any type in any column."""
    for column, value in columns.items():
        if not isinstance(value, kind):
            raise ValueError(f"is damaged: column {column} of {table} must hold {kind.__name__}, got {shorten(value)}")


# -- Nsight Compute: docs.nvidia.com/nsight-compute/NsightComputeCli, "--csv" and "--page" --------------------------

_KERNEL = "Kernel Name"
_DURATIONS = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS.update({"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0})


def _compute(path: str) -> Iterator[_Event]:
    """Every kernel of ``ncu --csv``, page raw (a column a metric) or details (a row a metric).

    Where a metric of the tensor pipe was collected it says what ran on Tensor Cores, not the name.
    """
    rows = _table(path)
    kernels: dict[Any, tuple[str, dict[str, tuple[str, str]], str]] = {}
    if rows and "Metric Name" in rows[0]:
        for row in rows:
            metric = {row["Metric Name"]: (row.get("Metric Value", ""), row.get("Metric Unit", ""))}
            kernels.setdefault(row["ID"], (row[_KERNEL], {}, row.get("Device", "")))[1].update(metric)
    else:  # units are in the first row
        for number, row in enumerate(rows[1:]):
            kernels[number] = row[_KERNEL], {k: (row[k], rows[0][k]) for k in row}, row.get("Device", "")
    if not kernels:
        raise ValueError("holds a table of Nsight Compute without kernels")
    for name, metrics, device in kernels.values():
        yield _event(name, metrics, device)


def _table(path: str) -> list[dict[str, str]]:
    """The rows of the table; what the program and ncu printed may stand before it."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        try:
            for line in file:
                header = next(csv.reader([line])) if _KERNEL in line else []
                if _KERNEL in header and "ID" in header:
                    rows = list(csv.reader(file))
                    if any("\0" in cell for row in rows for cell in row):
                        raise csv.Error("line contains NUL")  # as Python up to 3.10 says
                    return [dict(zip(header, row)) for row in rows if len(row) == len(header)]
        except csv.Error as error:
            raise ValueError(f"holds a table of Nsight Compute that is damaged: {error}") from error
    hint = _HINTS.get(os.path.splitext(path)[1], "")
    raise ValueError(f"is of no format that can be read{f' ({hint})' if hint else ''}: {_KNOWN}")


def _event(name: str, metrics: Mapping[str, tuple[str, str]], device: str) -> _Event:
    text, unit = next((metrics[key] for key in _DURATIONS if key in metrics), ("", None))
    if unit not in _UNITS:
        raise ValueError(
            f"has no duration of {name!r}{'' if unit is None else f' in a unit that is known: {unit!r}'}: "
            "collect it with ncu --section SpeedOfLight, or --metrics gpu__time_duration.sum"
        )
    kind = kind_of_kernel(name)
    pipe = [_number(value) for key, (value, _) in metrics.items() if "pipe_tensor" in key]
    measured = [value for value in pipe if value is not None]
    if measured:
        kind = TENSOR if any(measured) else MATRIX if kind == TENSOR else kind
    seconds = _number(text)
    if seconds is None or not 0 <= seconds < _LATEST:
        raise ValueError(f"is damaged: the duration of {name!r} must be a number, got {text!r}")
    return _Event(name, "", kind, seconds * _UNITS[unit], f"gpu/{device or 0}")


def _number(text: str) -> float | None:
    """With ncu's thousands separators; None for what was not measured (``n/a``)."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


# -- MXNet's own profiler: a Chrome trace of operators -------------------------------------------------

# The engine's own, between operators.
_ENGINE = {"WaitForVar", "DeleteVariable", "DeleteOperator"}


def _trace(path: str) -> Iterator[_Event]:
    """Every operator of a dump; the asynchronous twins of its events, and calls of MXNet's C interface, left out."""
    try:
        raw = read_json(path)
    except ValueError as error:
        raise ValueError(f"is damaged JSON, or was dumped while the profiler ran: {error}") from error
    events = raw.get("traceEvents")
    if not isinstance(events, list):
        raise ValueError(f"is JSON, but no Chrome trace (it has no list of 'traceEvents'): {_KNOWN}")
    found = list(_operators(events))
    if not found:
        raise ValueError(
            "holds no operators: record with mx.profiler.set_config(profile_all=True, "
            "aggregate_stats=True, ...), set_state('run'), and after mx.nd.waitall() set_state('stop') and dump()"
        )
    yield from found


def _operators(events: list[Any]) -> Iterator[_Event]:
    devices: dict[Any, str] = {}
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"is damaged: traceEvents[{number}] must be an object, got {shorten(event)}")
        if event.get("ph") == "M" and event.get("name") == "process_name":
            args = _field(event, "args", dict, number)
            devices[_field(event, "pid", (int, str), number)] = _field(args, "name", str, number)
    begun: dict[tuple, list[float]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.get("cat") != "operator" or event.get("ph") not in ("B", "E"):
            continue
        name, moment = _field(event, "name", str, number), _field(event, "ts", (int, float), number)
        place, thread = (_field(event, key, (int, str), number) for key in ("pid", "tid"))
        if name in _ENGINE:
            continue
        if event["ph"] == "B":
            begun[place, thread, name].append(moment)
        elif begun[place, thread, name]:
            seconds = _seconds(begun[place, thread, name].pop(), moment, 1e-6, name)
            yield _Event(name, name, kind_of_operator(name), seconds, devices.get(place, str(place)))


def _field(event: dict, key: str, kind: Any, number: int) -> Any:
    value = event.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (key == "ts" and not abs(value) < _LATEST):
        raise ValueError(f"is damaged: {key!r} of traceEvents[{number}] is not as MXNet writes it: {shorten(value)}")
    return value.encode(errors="replace").decode() if isinstance(value, str) else value  # lone surrogates cannot print
