"""``Runner``, by which the user's process starts the process in which graphs run, and asks it for results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from types import TracebackType
from typing import IO, Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..child import code_of, start_python
from ..precision.graph import Graph
from ..serving.folding import Params

_TAIL = 300
_START = code_of("mxmp.inference.worker")


class CandidateError(Exception):
    """A graph cannot run on this machine: MXNet raised an error or, if ``crashed``, the graph's process has ended."""

    def __init__(self, reason: str, crashed: bool = False) -> None:
        super().__init__(reason)
        self.crashed = crashed


class Runner:
    """Runs graphs in another process, where they may crash; the next request then starts a new one.
    Every method but ``add`` waits for the answer or raises ``CandidateError``; a number is the position of a batch."""

    def __init__(self, batches: Sequence[Mapping[str, NDArray]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mxmp-")
        self._process: subprocess.Popen | None = None
        self._graphs: dict[str, dict[str, Any]] = {}
        self._added = 0
        # From the id of each array that was written to the array, the file, and its name in the file. The array is kept
        # so that no other one gets its id.
        self._saved: dict[int, tuple[NDArray, str, str]] = {}
        data = {f"{i}:{name}": array for i, batch in enumerate(batches) for name, array in batch.items()}
        mx.nd.save(self._path("data.params"), data)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._folder.cleanup()

    def add(self, name: str, graph: Graph, params: Params) -> None:
        """Write a graph to files for the other methods; an array that was written before is not written again."""
        number = str(self._added)
        self._added += 1
        fresh = [array for array in params.values() if id(array) not in self._saved]
        file = self._path(f"{number}.params")
        for place, array in enumerate(fresh):
            self._saved[id(array)] = array, file, f"{number}:{place}"
        if fresh:
            mx.nd.save(file, {self._saved[id(array)][2]: array for array in fresh})
        found = {key: self._saved[id(array)][1:] for key, array in params.items()}
        symbol = self._path(f"{number}.json")
        graph.to_symbol().save(symbol, remove_amp_cast=False)
        self._graphs[name] = {"name": name, "symbol": symbol, "params": found}

    def outputs(self, name: str, batches: Sequence[int]) -> list[list[np.ndarray]]:
        """Run a graph on these batches; return, for each, its outputs in FP32."""
        out = self._path("out.params")
        self._ask("run", graph=self._graphs[name], batches=list(batches), out=out)
        found: dict[int, list[np.ndarray]] = {number: [] for number in batches}
        for key, array in mx.nd.load(out).items():
            found[int(key.partition(":")[0])].append(array.asnumpy())
        return [found[number] for number in batches]

    def collect(self, name: str, batches: Sequence[int], tensors: Sequence[str]) -> dict[str, str]:
        """Run a graph for later ``ranges`` of ``tensors``; return those unfit for INT8, and why."""
        where = {"batches": list(batches), "tensors": list(tensors), "out": self._path("statistics")}
        return self._ask("collect", graph=self._graphs[name], **where)

    def ranges(self, calibrator: str) -> dict[str, Sequence[float]]:
        """Return the range for INT8 of each tensor that ``collect`` saw last, by one of ``CALIBRATORS``."""
        return self._ask("ranges", file=self._path("statistics"), calibrator=calibrator)

    def times(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Return, by graph, the seconds of the first batch in each round, in which every graph runs once."""
        return self._ask("time", graphs=[self._graphs[name] for name in names], rounds=rounds)

    def profile(self, name: str) -> dict[str, tuple[float, str]]:
        """Return ms, the least of three runs, and output dtype of each operator, by names such as ``"fc1_output"``."""
        return self._ask("profile", graph=self._graphs[name])

    def forget(self, *names: str) -> None:
        """Free parameters and executors of these graphs there; a later request reads them again."""
        self._ask("forget", names=list(names))

    def _ask(self, what: str, **arguments: Any) -> Any:
        """Return what the ``Worker`` method ``what`` returns; by way of JSON, so tuples become lists."""
        if self._process is None:
            # Without this variable MXNet would fuse operators by oneDNN there.
            env = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
            with open(self._path("log"), "wb") as log:
                self._process = start_python(_START, stderr=log, text=True, env=env)
            self._ask("data", path=self._path("data.params"))
        process = self._process
        to_it: IO[str] = process.stdin  # type: ignore[assignment]
        from_it: IO[str] = process.stdout  # type: ignore[assignment]
        try:
            to_it.write(json.dumps({"do": what, **arguments}) + "\n")
            to_it.flush()
            line = from_it.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise CandidateError(self._how_it_ended(process), crashed=True)
        found = json.loads(line)
        if "error" in found:
            raise CandidateError(found["error"])
        return found["answer"]

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _how_it_ended(self, process: subprocess.Popen) -> str:
        """Return how the process ended, and the last error in its log."""
        status = process.wait()
        self._stop()
        with open(self._path("log"), encoding="utf-8", errors="replace") as log:
            lines = [line.strip() for line in log if "rror" in line or "terminate" in line]
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the process ended with {how}" + (f": {lines[-1][-_TAIL:]}" if lines else "")

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.name, name)
