"""Variants that take turns, one step each, so that a machine whose speed drifts favours none."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence, TextIO

__all__ = ["Worker", "WorkerError", "call_in_turns", "gain", "peak_bytes", "quartiles", "serve", "spread", "take_turns"]


class WorkerError(Exception):
    """What a worker ended with."""


class Worker:
    """A process of its own for one variant: ``contrib.amp`` cannot be undone, and peak memory is a process's.

    It gets its configuration as an argument, and answers each line that it reads with a line of JSON.
    """

    def __init__(self, script: Path, config: dict[str, Any], *, python: str, threads: int, seconds: float) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        self._seconds = seconds
        self._process = subprocess.Popen(
            [python, str(script), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.ready = self._read()

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to a command. Raises ``WorkerError`` where there is none, or it is an error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the process ended with {self._process.wait()}") from None
        return self._read()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], self._seconds)[0]:
            self.stop()
            raise WorkerError(f"took longer than {self._seconds:.0f} s")
        line = output.readline()
        if not line:
            raise WorkerError(f"the process ended with {self._process.wait()}")
        found = json.loads(line)
        if "error" in found:
            self.stop()
            raise WorkerError(found["error"])
        return found


def take_turns(workers: dict[str, Worker], warmup: int, rounds: int) -> tuple[dict[str, list], dict[str, str]]:
    """Seconds of each step of each worker, in an order that alternates, and what went wrong.

    A machine whose speed drifts favours none. A step that the loss scaler skipped is None: it took less time for
    it. A worker that fails takes part no more.
    """
    times: dict[str, list] = {name: [] for name in workers}
    failed: dict[str, str] = {}
    for number in range(warmup + rounds):
        for name in list(times)[:: -1 if number % 2 else 1]:
            try:
                found = workers[name].ask("step")
            except WorkerError as error:
                failed[name] = str(error)
                del times[name]
                continue
            if number >= warmup:
                times[name].append(None if found.get("skipped") else found["seconds"])
    return times, failed


def call_in_turns(calls: Sequence[Callable[[], Any]], rounds: int, warmup: int = 2) -> list[list[float]]:
    """Seconds of each call of each function, in one process; the first ones make states and fill caches."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(warmup + rounds):
        for call, times in list(zip(calls, taken))[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            call()
            if number >= warmup:
                times.append(time.perf_counter() - start)
    return taken


def gain(before: Sequence[float], after: Sequence[float]) -> str:
    """The median of before / after, round by round, with its quartiles."""
    return spread([a / b for a, b in zip(before, after)])


def spread(values: Sequence[float]) -> str:
    """The median with the quartiles, as a cell of a table."""
    if not values:
        return "-"
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def quartiles(values: Sequence[float]) -> list[float]:
    """The first, the median and the third; of a single value, that."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3


# -- In the worker ----------------------------------------------------------------------------------


def serve(run: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> None:
    """Be a worker: answer with what ``run(config)`` yields. What else writes to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for found in run(json.loads(sys.argv[1])):
            _answer(answers, **found)
    except Exception as error:  # whatever a variant cannot do is its result
        lines = str(error).strip().splitlines() or [""]
        _answer(answers, error=f"{type(error).__name__}: {lines[-1][:200]}")


def _answer(answers: TextIO, **found: Any) -> None:
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def peak_bytes() -> int:
    """The largest resident set of this process so far (Linux; getrusage would count the parent's before exec)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
