"""``Runner``, by which the user's process starts the process in which graphs run, and asks it for results."""

from __future__ import annotations

import os
import tempfile
from types import TracebackType
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..host.child import Child, ChildEndedError, code_of
from ..precision.graph import Graph
from ..serving.folding import Params

_START = code_of("mxmp.inference.worker")


class CandidateError(Exception):
    """A graph cannot run on this machine: MXNet raised an error or, if ``crashed``, the graph's process has ended."""

    def __init__(self, reason: str, crashed: bool = False) -> None:
        super().__init__(reason)
        self.crashed = crashed


class Runner:
    """Runs graphs in another process, where they may crash; the next request then starts a new one."""

    def __init__(self, batches: Sequence[Mapping[str, NDArray]]) -> None:
        self._batches = batches
        self._folder = tempfile.TemporaryDirectory(prefix="mxmp-")
        self._log = os.path.join(self._folder.name, "log")
        self._child: Child | None = None
        self._graphs: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}  # JSON; file and key of each parameter
        # By id, each array that is in a file, kept so that no other one gets its id.
        self._written: dict[int, tuple[NDArray, str]] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        self._folder.cleanup()

    def add(self, name: str, graph: Graph, params: Params) -> None:
        """Let ``ask`` know a graph; an array that was written to a file before is not written again."""
        fresh = {id(array): array for array in params.values() if id(array) not in self._written}
        if fresh:
            file = os.path.join(self._folder.name, f"{len(self._written)}.params")
            mx.nd.save(file, {str(key): array for key, array in fresh.items()})
            self._written.update({key: (array, file) for key, array in fresh.items()})
        files = {key: (self._written[id(array)][1], str(id(array))) for key, array in params.items()}
        self._graphs[name] = graph.to_symbol().tojson(remove_amp_cast=False), files
        if self._child is not None:
            self.ask("add", name, *self._graphs[name])

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return what this method of ``Worker`` returns; ``CandidateError`` if it fails."""
        if self._child is None:
            # Without this variable MXNet would fuse operators by oneDNN there.
            env = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
            with open(self._log, "wb") as log:
                self._child = Child(_START, stderr=log, env=env)
            self._child.send(self._batches)
            for name, graph in self._graphs.items():
                self.ask("add", name, *graph)
        self._child.send((what, arguments))
        try:
            found, error = self._child.receive()
        except ChildEndedError as ended:
            self._end()
            raise CandidateError(f"the process ended with {ended}{self._logged()}", crashed=True) from None
        if error:
            raise CandidateError(error)
        return found

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _logged(self) -> str:
        """Return the last error in the log of the process, to follow how it ended."""
        with open(self._log, encoding="utf-8", errors="replace") as log:
            lines = [line for line in log if "rror" in line or "terminate" in line]
        return f": {lines[-1].strip()[-300:]}" if lines else ""
