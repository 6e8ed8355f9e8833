"""Measures operators in processes of their own, twice over differently poisoned memory, and joins what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["POISONS", "Pair", "measured"]

SCRIPTS = Path(__file__).resolve().parent.parent
# MALLOC_PERTURB_ leaves the complement in every byte of fresh memory: 0x7f makes 3.4e38 and float16's NaN,
# 0xba about -0.001. What was read or handed out unwritten differs between the two.
POISONS = ("128", "69")
_SECONDS = 300  # for one case

Pair = "tuple[str, str]"


def measured(op: str, wanted: list[Pair]) -> dict[Pair, dict[str, Any]]:
    """The records of the wanted cases of one operator."""
    first, second = (_over(op, wanted, poison) for poison in POISONS)
    return {pair: _joined(first[pair], second[pair]) for pair in wanted}


def _over(op: str, wanted: list[Pair], poison: str) -> dict[Pair, dict[str, Any]]:
    """Records over memory poisoned in one way; a process that ends is blamed on its case, and the rest goes on."""
    records: dict[Pair, dict[str, Any]] = {}
    while len(records) < len(wanted):
        rest = [pair for pair in wanted if pair not in records]
        lines, end = _process(op, rest, poison)
        stage = ""
        for line in lines:
            stage = line.get("stage", stage)
            if "done" in line:
                records[tuple(line["done"])] = line["record"]
        left = [pair for pair in rest if pair not in records]
        if left:
            if not any(line.get("start") == list(left[0]) for line in lines):
                raise RuntimeError(f"the process that measures {op} ended before its first case ({end})")
            in_fp32 = stage == "reference"
            verdict = "unmeasurable" if in_fp32 else "crash"
            records[left[0]] = {"verdict": verdict, "why": f"{'FP32: ' if in_fp32 else ''}{end} in {stage}"}
    return records


def _process(op: str, wanted: list[Pair], poison: str) -> tuple[list[dict[str, Any]], str]:
    """What a process said before its end, and how it ended."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]),
        "MALLOC_PERTURB_": poison,
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",  # memory from the thread's cache is not poisoned
        "OMP_NUM_THREADS": "1",
        "MXNET_SUBGRAPH_BACKEND": "NONE",
    }
    command = [sys.executable, "-W", "ignore", "-m", "sweep.measure", op, *(["once"] if poison != POISONS[0] else [])]
    try:
        run = subprocess.run(
            command,
            input=json.dumps(wanted),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=_SECONDS + 5 * len(wanted),
        )
        text, code = run.stdout, run.returncode
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        code = -signal.SIGXCPU
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return lines, signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One record of two: what differs between them came from uninitialised memory."""
    kept = {key: value for key, value in first.items() if key not in ("bits", "fp32")}
    if first["verdict"] == "crash" or second["verdict"] == "crash":
        return first if first["verdict"] == "crash" else second
    if first.get("fp32") != second.get("fp32"):
        return {"verdict": "unmeasurable", "why": "FP32: depends on uninitialised memory"}
    if first.get("bits") != second.get("bits"):
        worse = first if first["verdict"] != "sound" else second
        why = worse.get("why") or (f"then {worse['verdict']}" if worse["verdict"] != "sound" else "")
        return {**kept, "verdict": "uninitialised", **({"why": why} if why else {})}
    return kept
