"""The user's end of the process in which candidates run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from types import TracebackType
from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from ..child import code_of, start_python
from ..precision.graph import Graph
from .folding import Params

__all__ = ["CandidateError", "Runner"]

_TAIL = 300
_START = code_of("mxmp.inference.worker")


class CandidateError(Exception):
    """A candidate cannot run here. ``crashed``: it ended its process."""

    def __init__(self, reason: str, crashed: bool = False) -> None:
        super().__init__(reason)
        self.crashed = crashed


class Runner:
    """Runs graphs on batches in a process of its own, which is started again after a crash.

    Parameters
    ----------
    batches : sequence of mapping of str to NDArray
    """

    def __init__(self, batches: Sequence[Mapping[str, NDArray]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mxmp-")
        self._process: subprocess.Popen | None = None
        self._graphs: dict[str, dict[str, Any]] = {}
        # By its id an array, which is kept so that no other one takes the id, its file and its key in it.
        self._saved: dict[int, tuple[NDArray, str, str]] = {}
        data = {f"{i}:{name}": array for i, batch in enumerate(batches) for name, array in batch.items()}
        mx.nd.save(self._path("data.params"), data)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._folder.cleanup()

    def add(self, name: str, graph: Graph, params: Params) -> None:
        """Make a graph known by a name. Arrays that another graph has too are written once."""
        number = str(len(self._graphs))
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
        """Return the outputs of a graph for each batch, in FP32. Raises ``CandidateError``."""
        out = self._path("out.params")
        self._ask("run", graph=self._graphs[name], batches=list(batches), out=out)
        found: dict[int, list[np.ndarray]] = {number: [] for number in batches}
        for key, array in mx.nd.load(out).items():
            found[int(key.partition(":")[0])].append(array.asnumpy())
        os.unlink(out)
        return [found[number] for number in batches]

    def ranges(
        self, name: str, batches: Sequence[int], tensors: Sequence[str]
    ) -> dict[str, dict[str, Sequence[float]]]:
        """Return the ranges of a graph's tensors, by calibrator and name. Raises ``CandidateError``."""
        return self._ask("collect", graph=self._graphs[name], batches=list(batches), tensors=list(tensors))

    def times(self, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Return the seconds of a first batch in each round, by graph. Raises ``CandidateError``."""
        return self._ask("time", graphs=[self._graphs[name] for name in names], rounds=rounds)

    def profile(self, name: str, rounds: int = 3) -> dict[str, tuple[float, str]]:
        """Return the milliseconds and the dtype of each operator, by ``NAME_output``. Raises ``CandidateError``."""
        return self._ask("profile", graph=self._graphs[name], rounds=rounds)

    def forget(self, *names: str) -> None:
        """Free what these graphs hold in the process."""
        self._ask("forget", names=list(names))

    def _ask(self, what: str, **arguments: Any) -> Any:
        if self._process is None:
            self._start()
            self._ask("data", path=self._path("data.params"))
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise CandidateError(self._last_words(), crashed=True)
        found = json.loads(line)
        if "error" in found:
            raise CandidateError(found["error"])
        return found["answer"]

    def _start(self) -> None:
        with open(self._path("log"), "wb") as log:
            env = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
            self._process = start_python(_START, stderr=log, text=True, env=env)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _last_words(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._stop()
        with open(self._path("log"), encoding="utf-8", errors="replace") as log:
            lines = [line.strip() for line in log if "rror" in line or "terminate" in line]
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the process ended with {how}" + (f": {lines[-1][-_TAIL:]}" if lines else "")

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.name, name)
