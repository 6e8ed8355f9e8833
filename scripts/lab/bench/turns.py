"""Variants that take turns, one step each, so that a machine whose speed drifts favours none."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from support.pages import show
from support.results import SCRIPTS


def timed(
    call: Callable[[], Any], wait: Callable[[], Any] = lambda: None, clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Return the seconds of one call, or None where it returns True: it skipped its work.

    ``wait``: ends when the device is idle, before and in what is timed.
    """
    wait()
    start = clock()
    skipped = call()
    wait()
    return None if skipped is True else clock() - start


def take_turns(
    steps: Mapping[str, Callable[[], Any]], warmup: int, rounds: int
) -> tuple[dict[str, list], dict[str, str]]:
    """Return what each step gives in each round, in an order that alternates, and what went wrong, by name.

    A machine whose speed drifts favours none. A worker that fails takes part no more.
    """
    found: dict[str, list] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    for number in range(warmup + rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            try:
                figure = steps[name]()
            except WorkerError as error:
                failed[name] = str(error)
                del found[name]
                continue
            if number >= warmup:
                found[name].append(figure)
    return found, failed


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each call of each function, MXNet's work included, in this process."""
    return take_turns({name: partial(timed, call, mx.nd.waitall) for name, call in calls.items()}, warmup, rounds)[0]


def bench(head: str, rows: Iterable[tuple[Sequence[Any], Mapping[str, Callable[[], Any]]]], rounds: int) -> None:
    """Print a table whose rows are cells and calls: the first one's time, and how many times as fast the others are."""
    rows = iter(rows)
    first = next(rows)

    def measured() -> Iterator[list[Any]]:
        for cells, calls in chain([first], rows):
            plain, *others = in_turns(calls, rounds).values()
            gains = (f"{milliseconds(each):.1f} ms: {gain(plain, each)}" for each in others)
            yield [*cells, f"{milliseconds(plain):.1f} ms", *gains]

    show(" | ".join([head, *first[1]]), measured())


def milliseconds(taken: Iterable[float | None]) -> float:
    """Return the median of the seconds that are known."""
    return 1e3 * statistics.median(each for each in taken if each is not None)


def gain(before: Sequence[float | None], after: Sequence[float | None]) -> str:
    """Return the median of before / after, round by round, with its quartiles."""
    return spread([a / b for a, b in zip(before, after) if a is not None and b is not None])


def spread(values: Sequence[float]) -> str:
    """Return the median with the quartiles, as a cell of a table."""
    if not values:
        return "-"
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first, the median and the third; of a single value, that."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3


class WorkerError(Exception):
    """What a worker ended with."""


class Worker:
    """A process of its own for one variant: ``contrib.amp`` cannot be undone, and peak memory is a process's.

    It gets its configuration as an argument, and answers each line that it reads with a line of JSON.
    """

    def __init__(self, script: Path, config: dict[str, Any], *, threads: int, seconds: float) -> None:
        path = os.pathsep.join(filter(None, [*map(str, SCRIPTS), os.environ.get("PYTHONPATH")]))
        settings = {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **settings},
        )
        self.ready = self._read()

    def ask(self, command: str) -> dict[str, Any]:
        """Return the answer to a command. Raises ``WorkerError`` where there is none, or it is an error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the process ended with {self._process.wait()}") from None
        return self._read()

    def __call__(self) -> float | None:
        """Return the seconds of one step; None of one that the loss scaler skipped, which took less time for it."""
        found = self.ask("step")
        return None if found.get("skipped") else found["seconds"]

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


def serve(run: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> None:
    """Be a worker: answer with what ``run(config)`` yields. What else writes to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for found in run(json.loads(sys.argv[1])):
            print(json.dumps(found), file=answers, flush=True)
    except Exception as error:  # whatever a variant cannot do is its result
        lines = str(error).strip().splitlines() or [""]
        print(json.dumps({"error": f"{type(error).__name__}: {lines[-1][:200]}"}), file=answers, flush=True)


# Of a short step that follows another process's, a fifth is filling the caches: one goes before it, untimed.
_SHORT = 0.3  # seconds


def answers(
    make: Callable[[], tuple[Callable[[], Any], Callable[[], dict]]], peak: Callable[[], int]
) -> Iterator[dict[str, Any]]:
    """Yield that the step is prepared, then an answer to each command; ``make`` returns the step and its profile."""
    before, started = peak(), time.perf_counter()
    step, profile = make()
    seconds = timed(step, mx.nd.waitall)
    yield {"prepared": time.perf_counter() - started}
    for command in map(str.strip, sys.stdin):
        if command == "step":
            if seconds is not None and seconds < _SHORT:
                step()
            seconds = timed(step, mx.nd.waitall)
            yield {"seconds": seconds}
        elif command == "memory":
            yield {"peak": peak(), "before": before}
        elif command == "profile":
            yield profile()


def peak_bytes() -> int:
    """Return the largest resident set of this process so far (Linux; getrusage would count the parent's)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
