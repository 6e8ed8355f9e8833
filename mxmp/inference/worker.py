"""The program of the process in which graphs run: a kernel that crashes ends this process, not the user's.

It answers each line of stdin, a JSON object, by one of stdout. MXNet's own fusion is off (MXNET_SUBGRAPH_BACKEND=NONE).
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
import time
from typing import Any, Callable, Mapping

import mxnet as mx
import numpy as np
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from ..callbacks import KeptError
from ..child import prepare_to_crash
from ..serving.sums import register
from .calibration import Statistics

_KEPT_SHAPES = 2


class Bound:
    """A graph read from files, with an executor for each of its last shapes; ``params`` has file and key by name."""

    def __init__(self, symbol: str, params: Mapping[str, tuple[str, str]]) -> None:
        self.file = symbol
        self._symbol = mx.sym.load(symbol)
        files = {path: mx.nd.load(path) for path in {path for path, _ in params.values()}}
        self._params = {name: files[path][key] for name, (path, key) in params.items()}
        self._executors: dict[tuple, mx.executor.Executor] = {}

    def at(self, batch: Mapping[str, NDArray]) -> mx.executor.Executor:
        """Return an executor whose inputs hold ``batch``; those without an array, such as labels, are zeros."""
        key = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if key not in self._executors:
            if len(self._executors) >= _KEPT_SHAPES:
                self._executors.clear()
            names = self._symbol.list_arguments()
            known = {**self._params, **{name: array.copy() for name, array in batch.items()}}
            if any(name not in known for name in names):
                sizes, _, _ = self._symbol.infer_shape(**{k: v.shape for k, v in known.items() if k in names})
                known = {**{name: mx.nd.zeros(size) for name, size in zip(names, sizes) if name not in known}, **known}
            arguments = {name: known[name] for name in names}
            states = {name: self._params[name] for name in self._symbol.list_auxiliary_states()}
            self._executors[key] = self._symbol.bind(mx.cpu(), arguments, grad_req="null", aux_states=states)
        executor = self._executors[key]
        for name, array in batch.items():
            if name in executor.arg_dict:
                array.copyto(executor.arg_dict[name])
        return executor


class Worker:
    """Answers a ``Runner``: ``graph`` is a dict as ``Runner.add`` makes it, a number the position of a batch."""

    def __init__(self) -> None:
        self._batches: list[dict[str, NDArray]] = []
        self._graphs: dict[str, Bound] = {}

    def data(self, path: str) -> None:
        """Keep the batches of all later requests; names are such as ``"0:data"``, position and input."""
        found: dict[int, dict[str, NDArray]] = {}
        for key, array in mx.nd.load(path).items():
            number, _, name = key.partition(":")
            found.setdefault(int(number), {})[name] = array
        self._batches = [found[number] for number in sorted(found)]

    def run(self, graph: Mapping[str, Any], batches: list[int], out: str) -> None:
        """Write the outputs in FP32 to ``out``, by names such as ``"2:0"``: position of the batch, of the output."""
        arrays = {}
        for number in batches:
            outputs = self._bound(graph).at(self._batches[number]).forward(is_train=False)
            arrays.update({f"{number}:{i}": value.astype("float32") for i, value in enumerate(outputs)})
        mx.nd.waitall()
        mx.nd.save(out, arrays)

    def collect(self, graph: Mapping[str, Any], batches: list[int], tensors: list[str], out: str) -> dict[str, str]:
        """Write the ``Statistics`` of ``tensors`` to ``out``; return those unfit for INT8, and why."""
        statistics = Statistics()
        wanted = set(tensors)

        def note(name: str, array: NDArray) -> None:
            if name in wanted:
                statistics.add(name, array.asnumpy())

        for number in batches:
            for name, array in self._batches[number].items():
                note(name, array)
            self._run_observed(self._bound(graph, anew=True).at(self._batches[number]), note)
        with open(out, "wb") as file:
            pickle.dump(statistics, file)
        return statistics.unusable(tensors)

    def ranges(self, file: str, calibrator: str) -> dict[str, tuple[float, float]]:
        with open(file, "rb") as opened:
            statistics: Statistics = pickle.load(opened)
        return statistics.ranges(calibrator)

    def time(self, graphs: list[Mapping[str, Any]], rounds: int) -> dict[str, list[float]]:
        """Return, by graph, the seconds of the first batch in each round; two rounds before are not counted."""
        bound = {graph["name"]: self._bound(graph).at(self._batches[0]) for graph in graphs}
        seconds: dict[str, list[float]] = {name: [] for name in bound}
        for number in range(-2, rounds):
            # Every other round is reversed, so that a slow phase of the machine slows all graphs alike.
            for name in list(bound)[:: -1 if number % 2 else 1]:
                mx.nd.waitall()
                start = time.perf_counter()
                bound[name].forward(is_train=False)
                mx.nd.waitall()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
        return seconds

    def profile(self, graph: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
        executor = self._bound(graph, anew=True).at(self._batches[0])
        least: dict[str, float] = {}
        dtypes: dict[str, str] = {}
        for _ in range(3):
            last = [time.perf_counter()]

            def note(name: str, array: NDArray, last: list[float] = last) -> None:
                mx.nd.waitall()
                now = time.perf_counter()
                least[name] = min(least.get(name, 1e9), 1e3 * (now - last[0]))
                dtypes[name] = "bfloat16" if np.dtype(array.dtype).names else np.dtype(array.dtype).name
                last[0] = time.perf_counter()

            self._run_observed(executor, note)
        return {name: (milliseconds, dtypes[name]) for name, milliseconds in least.items()}

    def forget(self, names: list[str]) -> None:
        for name in names:
            self._graphs.pop(name, None)

    def _bound(self, graph: Mapping[str, Any], anew: bool = False) -> Bound:
        """Return the ``Bound`` that is kept for ``graph``, or with ``anew`` a new one that is not kept."""
        if anew:  # for a monitor callback, which MXNet cannot remove from an executor
            return Bound(graph["symbol"], graph["params"])
        bound = self._graphs.get(graph["name"])
        if bound is None or bound.file != graph["symbol"]:
            bound = self._graphs[graph["name"]] = Bound(graph["symbol"], graph["params"])
        return bound

    def _run_observed(self, executor: mx.executor.Executor, note: Callable[[str, NDArray], None]) -> None:
        """Run a forward; call ``note`` with name and array of each operator's output, and raise its first error."""
        failed = KeptError()

        def call(name: bytes | str, handle: Any) -> None:
            with failed:
                array = NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)
                note(name.decode() if isinstance(name, bytes) else name, array)

        executor.set_monitor_callback(call)
        executor.forward(is_train=False)
        mx.nd.waitall()
        failed.raise_it()


def main() -> None:
    """Answer lines such as ``{"do": "forget", "names": ["int8"]}``, with a method of ``Worker``, until stdin ends.
    An answer is ``{"answer": RESULT}`` or ``{"error": LINE}``; an exception of another type ends the process."""
    np.seterr(all="ignore")
    prepare_to_crash()
    register()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what other libraries write to stdout goes to stderr
    worker = Worker()
    for line in iter(sys.stdin.readline, ""):
        command = json.loads(line)
        try:
            found = {"answer": getattr(worker, command.pop("do"))(**command)}
        except (mx.MXNetError, ValueError, MemoryError) as error:
            lines = [text for text in str(error).splitlines() if text.strip()] or [type(error).__name__]
            found = {"error": next((text for text in reversed(lines) if "rror" in text), lines[-1])[-300:]}
        answers.write(json.dumps(found) + "\n")
        answers.flush()
