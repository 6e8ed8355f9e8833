"""``profile``: what a profiler's file says of Tensor Cores and casts."""

from __future__ import annotations

import csv
import json
import os
from itertools import islice

from ..shared.saved import read_report, write_report
from .mxnet_trace import read_trace
from .nsight import is_compute_header, read_compute, read_systems
from .profiled import ProfileReport, gather
from .text import render_profile

__all__ = ["Profile", "profile"]
_KNOWN = (
    "Nsight Systems' SQLite (nsys export --type sqlite), Nsight Compute's CSV (ncu --csv --page raw) and the JSON of "
    "mx.profiler.dump() are known"
)
_HINTS = {
    ".nsys-rep": "export it: nsys export --type sqlite",
    ".qdrep": "export it: nsys export --type sqlite",
    ".ncu-rep": "export it: ncu --import FILE --csv --page raw",
}


class Profile(ProfileReport):
    """What ``profile`` read. ``print`` it, ``save`` it, or read the fields."""

    FORMAT = "mxmp-profile-1"  # of the file

    def __str__(self) -> str:
        return render_profile(self)

    def save(self, path: str) -> None:
        """Write JSON; the file appears whole or not at all."""
        write_report(path, self.FORMAT, self.to_dict())

    @classmethod
    def load(cls, path: str) -> Profile:
        """Read what ``save`` wrote. Raises ``ValueError`` for any other file."""
        return read_report(path, {cls.FORMAT: cls.from_dict})


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
    if start.startswith(b"SQLite format 3\0"):
        return Profile("Nsight Systems", path, gather(read_systems(path)), knows_kernels=True)
    if start.lstrip().startswith(b"{"):
        return Profile("MXNet", path, gather(read_trace(_trace(path), path)), knows_kernels=False)
    if _is_compute(path):
        return Profile("Nsight Compute", path, gather(read_compute(path)), knows_kernels=True)
    hint = _HINTS.get(os.path.splitext(path)[1], "")
    raise ValueError(f"{path!r} is of no format that can be read{f' ({hint})' if hint else ''}: {_KNOWN}")


def _trace(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path!r} is damaged JSON, or was dumped while the profiler ran: {error}") from error
    if not isinstance(raw.get("traceEvents"), list):
        raise ValueError(f"{path!r} is JSON, but no Chrome trace (it has no 'traceEvents'): {_KNOWN}")
    return raw


def _is_compute(path: str) -> bool:
    """The program's own output, and ncu's, may stand before the table."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        try:
            return any(is_compute_header(row) for row in islice(csv.reader(file), 100_000))
        except csv.Error:  # binary
            return False
