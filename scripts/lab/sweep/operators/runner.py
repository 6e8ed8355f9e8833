"""Measure operators in processes of their own, twice over differently poisoned memory, and join the records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, Iterator, Tuple

from support.processes import share_path

# MALLOC_PERTURB_ leaves the complement in every byte of fresh memory: 0x7f makes 3.4e38 and float16's NaN,
# 0xba about -0.001. What was read or handed out unwritten differs between the two.
POISONS = ("128", "69")
# Memory from the thread's cache is not poisoned.
SETTINGS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "1", "MXNET_SUBGRAPH_BACKEND": "NONE"}
_EMPTY = re.compile(r"(^|[ x])0x")

Pair = Tuple[str, str]  # name of the case, dtype


class Runner:
    """Two servers that fork a process for every operator. A context manager; ends them."""

    def __enter__(self) -> Runner:
        share_path()
        self._servers = []
        for poison in POISONS:
            command = [sys.executable, "-W", "ignore", "-m", "sweep.operators.measure"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            environment = {**os.environ, **SETTINGS, "MALLOC_PERTURB_": poison}
            self._servers.append(subprocess.Popen(command, env=environment, **pipes))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.communicate()

    def measured(self, op: str, wanted: list[Pair]) -> dict[Pair, dict[str, Any]]:
        """Return the records of the wanted cases of one operator."""
        # An empty tensor can leave MXNet's temporary space unusable for what follows: each in a process of its own.
        empty = [pair for pair in wanted if _EMPTY.search(pair[0])]
        groups = [[pair for pair in wanted if pair not in empty], *[[pair] for pair in empty]]
        found: dict[Pair, dict[str, Any]] = {}
        for group in groups:
            first, second = (self._over(server, op, group) for server in self._servers)
            found.update({pair: _joined(first[pair], second[pair]) for pair in group})
        return found

    def _over(self, server: subprocess.Popen, op: str, wanted: list[Pair]) -> dict[Pair, dict[str, Any]]:
        """Return records over memory poisoned in one way; a case whose process ends is at fault, the rest goes on."""
        records: dict[Pair, dict[str, Any]] = {}
        once = server is not self._servers[0]
        while len(records) < len(wanted):
            rest = [pair for pair in wanted if pair not in records]
            stage, started, end = "", None, ""
            for said in _answers(server, [op, rest, once]):
                stage, end = said.get("stage", stage), said.get("end", end)
                started = tuple(said["start"]) if "start" in said else started
                if "done" in said:
                    records[tuple(said["done"])] = said["record"]
            if len(records) < len(wanted):
                if started is None or started in records:
                    raise RuntimeError(f"the process that measures {op} ended between two cases ({end})")
                in_fp32 = stage == "reference"
                why = f"{'FP32: ' if in_fp32 else ''}{end} in {stage}"
                records[started] = {"verdict": "unmeasurable" if in_fp32 else "crash", "why": why}
        return records


def _answers(server: subprocess.Popen, request: Any) -> Iterator[dict[str, Any]]:
    """Yield what the server and its child say, up to the child's end."""
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    for line in server.stdout:
        if line.startswith("{") and line.endswith("}\n"):
            said = json.loads(line)
            yield said
            if "end" in said:
                return
    raise RuntimeError(f"the measuring server ended ({server.poll()})")


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
