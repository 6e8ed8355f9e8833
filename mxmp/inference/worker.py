"""The process in which candidates run: a kernel that crashes ends it, and not the user's.

It reads a command of JSON a line, and answers with a line. MXNet's own fusion at bind
is off in it (``MXNET_SUBGRAPH_BACKEND=NONE``), so a graph runs as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any, Callable, Iterator, Mapping

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..callbacks import KeptError
from ..child import prepare_to_crash
from .calibration import CALIBRATORS, Statistics

__all__ = ["Bound", "Worker", "main"]

_KEPT_SHAPES = 2


class Bound:
    """A graph with its parameters, bound for the shapes that it is called with."""

    def __init__(self, symbol: str, params: Mapping[str, tuple[str, str]]) -> None:
        self._symbol = mx.sym.load(symbol)
        files = {path: mx.nd.load(path) for path in {path for path, _ in params.values()}}
        self._params = {name: files[path][key] for name, (path, key) in params.items()}
        self._executors: dict[tuple, mx.executor.Executor] = {}

    def at(self, batch: Mapping[str, NDArray]) -> mx.executor.Executor:
        """Return an executor that holds ``batch``; inputs that are neither there nor parameters (labels) are 0."""
        key = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if key not in self._executors:
            if len(self._executors) >= _KEPT_SHAPES:
                self._executors.clear()
            names = self._symbol.list_arguments()
            sizes, _, _ = self._symbol.infer_shape(**{k: v.shape for k, v in batch.items() if k in names})
            known = {**self._params, **{name: array.copy() for name, array in batch.items()}}
            arguments = {n: known[n] if n in known else mx.nd.zeros(size) for n, size in zip(names, sizes)}
            states = {name: self._params[name] for name in self._symbol.list_auxiliary_states()}
            self._executors[key] = self._symbol.bind(mx.cpu(), arguments, grad_req="null", aux_states=states)
        executor = self._executors[key]
        for name, array in batch.items():
            if name in executor.arg_dict:
                array.copyto(executor.arg_dict[name])
        return executor


class Worker:
    """What commands do. ``graphs``: those that were called, by name."""

    def __init__(self) -> None:
        self._batches: list[dict[str, NDArray]] = []
        self._graphs: dict[str, Bound] = {}

    def data(self, path: str) -> None:
        """Take the batches of a file, whose arrays are ``NUMBER:INPUT``."""
        found: dict[int, dict[str, NDArray]] = {}
        for key, array in mx.nd.load(path).items():
            number, _, name = key.partition(":")
            found.setdefault(int(number), {})[name] = array
        self._batches = [found[number] for number in sorted(found)]

    def run(self, graph: Mapping[str, Any], batches: list[int], out: str) -> None:
        """Write the outputs of each batch, in FP32."""
        arrays = {}
        for number in batches:
            outputs = self._bound(graph).at(self._batches[number]).forward(is_train=False)
            arrays.update({f"{number}:{i}": value.astype("float32") for i, value in enumerate(outputs)})
        mx.nd.waitall()
        mx.nd.save(out, arrays)

    def collect(
        self, graph: Mapping[str, Any], batches: list[int], tensors: list[str]
    ) -> dict[str, dict[str, tuple[float, float]]]:
        """Return the ranges of these tensors, by calibrator and name."""
        statistics = Statistics()
        wanted = set(tensors)

        def note(name: str, array: NDArray) -> None:
            if name in wanted:
                statistics.add(name, array.asnumpy())

        for number in batches:
            for name, array in self._batches[number].items():
                note(name, array)
            self._listen(self._bound(graph, anew=True).at(self._batches[number]), note)
        return {calibrator: statistics.ranges(calibrator) for calibrator in CALIBRATORS}

    def time(self, graphs: list[Mapping[str, Any]], rounds: int) -> dict[str, list[float]]:
        """Return the seconds of the first batch in each round, by graph; they take turns, in alternating order."""
        bound = {graph["name"]: self._bound(graph).at(self._batches[0]) for graph in graphs}
        seconds: dict[str, list[float]] = {name: [] for name in bound}
        for number in range(-2, rounds):
            for name in list(bound)[:: -1 if number % 2 else 1]:
                taken = _seconds(bound[name])
                if number >= 0:
                    seconds[name].append(taken)
        return seconds

    def profile(self, graph: Mapping[str, Any], rounds: int) -> dict[str, tuple[float, str]]:
        """Return the milliseconds of each operator in the first batch, the least of some rounds, and its dtype."""
        executor = self._bound(graph, anew=True).at(self._batches[0])
        least: dict[str, float] = {}
        dtypes: dict[str, str] = {}
        for _ in range(rounds):
            last = [time.perf_counter()]

            def note(name: str, array: NDArray, last: list[float] = last) -> None:
                mx.nd.waitall()
                now = time.perf_counter()
                least[name] = min(least.get(name, 1e9), 1e3 * (now - last[0]))
                dtypes[name] = "bfloat16" if np.dtype(array.dtype).names else np.dtype(array.dtype).name
                last[0] = time.perf_counter()

            self._listen(executor, note)
        return {name: (milliseconds, dtypes[name]) for name, milliseconds in least.items()}

    def forget(self, names: list[str]) -> None:
        """Free these graphs."""
        for name in names:
            self._graphs.pop(name, None)

    def _bound(self, graph: Mapping[str, Any], anew: bool = False) -> Bound:
        if anew:
            return Bound(graph["symbol"], graph["params"])
        if graph["name"] not in self._graphs:
            self._graphs[graph["name"]] = Bound(graph["symbol"], graph["params"])
        return self._graphs[graph["name"]]

    def _listen(self, executor: mx.executor.Executor, note: Callable[[str, NDArray], None]) -> None:
        failed = KeptError()

        def call(name: bytes | str, handle: Any) -> None:
            with failed:
                array = NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)
                note(name.decode() if isinstance(name, bytes) else name, array)

        executor.set_monitor_callback(call)
        executor.forward(is_train=False)
        mx.nd.waitall()
        failed.raise_it()


def _seconds(executor: mx.executor.Executor) -> float:
    mx.nd.waitall()
    start = time.perf_counter()
    executor.forward(is_train=False)
    mx.nd.waitall()
    return time.perf_counter() - start


def _answers(commands: Iterator[str]) -> Iterator[dict[str, Any]]:
    worker = Worker()
    for line in commands:
        command = json.loads(line)
        try:
            yield {"answer": getattr(worker, command.pop("do"))(**command)}
        except (mx.MXNetError, ValueError, MemoryError) as error:
            lines = [text for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
            yield {"error": next((text for text in reversed(lines) if "rror" in text), lines[-1])[-300:]}


def main() -> None:
    """Answer the commands on stdin; what else writes to stdout goes to stderr."""
    np.seterr(all="ignore")
    prepare_to_crash()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for found in _answers(iter(sys.stdin.readline, "")):
        answers.write(json.dumps(found) + "\n")
        answers.flush()
