"""Measure operators in processes of their own, twice over differently poisoned memory, and join the records."""

from __future__ import annotations

import os
import re
from typing import Any, Tuple

from support.processes import in_a_process, prepare_processes

from .measure import work

# glibc leaves the complement in every byte of fresh memory: 0x7f makes 3.4e38 and float16's NaN, 0xba about -0.001.
# What was read or handed out unwritten differs between the two.
POISONS = (0x80, 0x45)
# Memory from the thread's cache is not poisoned.
SETTINGS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "1"}
_SECONDS = 60  # for a stage of a case
_EMPTY = re.compile(r"(^|[ x])0x")

Pair = Tuple[str, str]  # name of the case, dtype


def prepare() -> None:
    """Set the environment of the processes; before the first of them starts."""
    os.environ.update(SETTINGS)
    prepare_processes()


def measured(op: str, wanted: list[Pair]) -> dict[Pair, dict[str, Any]]:
    """Return the records of the wanted cases of one operator."""
    # An empty tensor can leave MXNet's temporary space unusable for what follows: each in a process of its own.
    empty = [pair for pair in wanted if _EMPTY.search(pair[0])]
    groups = [[pair for pair in wanted if pair not in empty], *[[pair] for pair in empty]]
    found: dict[Pair, dict[str, Any]] = {}
    for group in groups:
        first, second = (_over(poison, op, group) for poison in POISONS)
        found.update({pair: _joined(first[pair], second[pair]) for pair in group})
    return found


def _over(poison: int, op: str, wanted: list[Pair]) -> dict[Pair, dict[str, Any]]:
    """Return records over memory poisoned in one way; a case whose process ends is at fault, the rest goes on."""
    records: dict[Any, dict[str, Any]] = {}
    while rest := [pair for pair in wanted if pair not in records]:
        said, ended = in_a_process(_SECONDS, work, op, rest, poison, poison != POISONS[0])
        started, stage = said.pop("start", None), said.pop("stage", "")
        records.update(said)
        if len(records) < len(wanted):
            if started is None or started in records:
                raise RuntimeError(f"{ended} between two cases of {op}")
            in_fp32 = stage == "reference"
            why = f"{'FP32: ' if in_fp32 else ''}{ended} in {stage}"
            records[started] = {"verdict": "unmeasurable" if in_fp32 else "crash", "why": why}
    return records


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Make one record of two: what differs between them came from uninitialised memory."""
    kept = {key: value for key, value in first.items() if key not in ("sums", "fp32")}
    if first["verdict"] == "crash" or second["verdict"] == "crash":
        return first if first["verdict"] == "crash" else second
    if not _agree(first.get("fp32"), second.get("fp32")):
        return {**kept, "verdict": "unmeasurable", "why": "FP32: depends on uninitialised memory"}
    if not _agree(first.get("sums"), second.get("sums")):
        worse = first if first["verdict"] != "sound" else second
        why = worse.get("why") or (f"then {worse['verdict']}" if worse["verdict"] != "sound" else "")
        return {**kept, "verdict": "uninitialised", **({"why": why} if why else {})}
    return kept


def _agree(one: list[float] | None, other: list[float] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one == other
    return all(a == b or abs(a - b) <= 1e-3 * max(abs(a), abs(b)) + 1e-6 for a, b in zip(one, other))
