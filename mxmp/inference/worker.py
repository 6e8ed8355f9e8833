"""The program of the process in which graphs run: a kernel that crashes ends this process, not the user's.

It answers each message, the name of a method of ``Worker`` and its arguments. MXNet's own fusion is off
(MXNET_SUBGRAPH_BACKEND=NONE).
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cached_property
from typing import Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..host.callbacks import last_line
from ..host.child import from_parent, to_parent
from ..precision._mxnet import dtype_name
from ..serving.folding import Params
from ..serving.sums import register
from ..tuning.clock import listening
from .calibration import Statistics

_KEPT_SHAPES = 2


class Bound:
    """A graph with an executor for each of its last shapes; ``files`` has file and key of each parameter."""

    def __init__(self, symbol: str, files: Mapping[str, tuple[str, str]]) -> None:
        self._text, self._files = symbol, files
        self._executors: dict[tuple, mx.executor.Executor] = {}

    def anew(self) -> Bound:
        """Return one to monitor: MXNet cannot remove a monitor callback from an executor."""
        return Bound(self._text, self._files)

    @cached_property
    def _symbol(self) -> mx.sym.Symbol:
        return mx.sym.load_json(self._text)

    @cached_property
    def _params(self) -> Params:
        files = {path: mx.nd.load(path) for path in {path for path, _ in self._files.values()}}
        return {name: files[path][key] for name, (path, key) in self._files.items()}

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
    """Answers ``Runner.ask``: a graph is given by its name, a batch by its position."""

    def __init__(self, batches: Sequence[Mapping[str, NDArray]]) -> None:
        self._batches = batches
        self._graphs: dict[str, Bound] = {}

    def add(self, name: str, symbol: str, files: Mapping[str, tuple[str, str]]) -> None:
        self._graphs[name] = Bound(symbol, files)

    def outputs(self, name: str, batches: Sequence[int]) -> list[list[np.ndarray]]:
        """Return the outputs in FP32 for each batch."""
        for number in batches[:1]:  # a kernel may fail in its second run alone
            self._graphs[name].at(self._batches[number]).forward(is_train=False)
        executors = (self._graphs[name].at(self._batches[number]) for number in batches)
        return [[v.astype("float32").asnumpy() for v in each.forward(is_train=False)] for each in executors]

    def statistics(self, name: str, batches: Sequence[int], tensors: Sequence[str]) -> Statistics:
        statistics, wanted = Statistics(), set(tensors)

        def note(tensor: str, array: NDArray) -> None:
            if tensor in wanted:
                statistics.add(tensor, array.asnumpy())

        for number in batches:
            for tensor, array in self._batches[number].items():
                note(tensor, array)
            _run_observed(self._graphs[name].anew().at(self._batches[number]), note)
        return statistics

    def ranges(self, statistics: Statistics, calibrator: str) -> dict[str, tuple[float, float]]:
        return statistics.ranges(calibrator)

    def times(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Return, by graph, the seconds of the first batch in each round; two rounds before are not counted."""
        bound = {name: self._graphs[name].at(self._batches[0]) for name in names}
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

    def profile(self, name: str) -> dict[str, tuple[float, str]]:
        """Return ms, the least of three runs, and output dtype of each operator, by names such as ``"fc1_output"``."""
        executor = self._graphs[name].anew().at(self._batches[0])
        found: dict[str, tuple[float, str]] = {}
        for _ in range(3):
            last = time.perf_counter()

            def note(tensor: str, array: NDArray) -> None:
                nonlocal last
                mx.nd.waitall()
                milliseconds = 1e3 * (time.perf_counter() - last)
                found[tensor] = min(found.get(tensor, (1e9, "")), (milliseconds, dtype_name(array.dtype)))
                last = time.perf_counter()

            _run_observed(executor, note)
        return found


def _run_observed(executor: mx.executor.Executor, note: Callable[[str, NDArray], None]) -> None:
    """Run a forward; call ``note`` with name and array of each operator's output."""
    with listening(executor, note):
        executor.forward(is_train=False)
        mx.nd.waitall()


def main() -> None:
    """Answer each message by a pair: what the method of ``Worker`` returned, and the line of its error, or ``""``.
    An exception of another type ends the process."""
    np.seterr(all="ignore")
    register()
    answer = to_parent()
    worker = Worker(from_parent())
    with suppress(EOFError):
        while True:
            what, arguments = from_parent()
            try:
                answer((getattr(worker, what)(*arguments), ""))
            except (mx.MXNetError, ValueError, MemoryError) as error:
                answer((None, last_line(error)[-300:]))
