"""Probes: report every tensor that a network computes in a training step, operator by operator.

No step runs twice: MXNet's monitor reports the outputs in the step that trains, with its dropout masks. For such a step
the network runs a cached operator (Gluon) or an executor (Module) of its own on the same graph and arrays.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Callable, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...host.callbacks import KeptError, hold_interrupts
from ...observed import Observed, ObservedGraph
from ...precision.monitoring import Listener
from ...step.step import Observer
from .protocol import TrainedNetwork

_Observer = TypeVar("_Observer", bound="StepObserver")


class Probe:
    """Calls a function with every tensor that a network computes in training, between ``start`` and ``stop``.
    The tensors are outputs of operators and gradients with respect to their inputs, also those of inserted casts."""

    def __init__(self, network: TrainedNetwork, callback: Callable[[Observed, NDArray], None]) -> None:
        """Prepare a probe for ``callback(observed, array)``, which is called right after each operator.
        It must copy what it keeps, as MXNet may use the memory again. ``stop`` raises its first exception."""
        self.network = network
        # The training graphs of all places that have reported a tensor since ``start``; kept after ``stop``.
        self.graphs: list[ObservedGraph] = []
        self.listens = False
        self._callback = callback
        # By the id of a hook or executor: the graphs read there, each with the key of its GraphRun.
        self._known: dict[int, list[tuple[Any, ObservedGraph]]] = {}
        self._failed = KeptError()

    def start(self) -> None:
        with hold_interrupts():
            self.network.listen(self._listener_at)
            self.listens = True

    def stop(self) -> None:
        """Remove all that ``start`` added; raise the callback's first exception, which MXNet does not pass on."""
        with hold_interrupts():
            self.listens = False
            self.network.stop_listening()
            self._known = {}
        self._failed.raise_it()

    def _listener_at(self, where: Any) -> Listener:
        """Return a listener for what ``where``, a hook or executor, computes; it does not keep ``where`` alive."""
        # MXNet may hold the function longer than these exist.
        report, place = weakref.WeakMethod(self._report), weakref.ref(where)

        def listener(name: str, array: NDArray) -> None:
            found, at = report(), place()
            if found is not None and at is not None:
                found(at, name, array)

        return listener

    def _report(self, where: Any, name: str, array: NDArray) -> None:
        if not self.listens:
            return
        with self._failed:
            observed = self._observe(where, name)
            if observed is not None:
                with autograd.pause(train_mode=True):
                    self._callback(observed, array)

    def _observe(self, where: Any, name: str) -> Observed | None:
        """Describe the tensor that the monitor calls ``name``, from the newest graph at ``where``, or None."""

        def newest() -> Observed | None:
            return next((found for _, graph in reversed(known) if (found := graph.observe(name)) is not None), None)

        known = self._known.setdefault(id(where), [])
        found = newest()
        # A hook may build more graphs while the probe listens.
        if found is None and len(known) < self.network.count_graphs(where):
            keys = [key for key, _ in known]
            runs = [run for run in self.network.graphs(where) if not any(run.key is key for key in keys)]
            known += [(run.key, ObservedGraph(run.symbol, run.plan, run.has_gradient)) for run in runs]
            self.graphs = [graph for each in self._known.values() for _, graph in each]
            found = newest()
        return found


class StepObserver(Observer):
    """Base class of ``Watch`` and ``Guard``: records the tensors of some training steps of a network by a Probe.

    The network's ScaledStep calls ``before_update`` and ``after_step`` in every step. A subclass implements these two,
    to start and stop the probe and to use the tensors, and ``_observe`` and ``_forget``. An observer works until
    ``close``, or until its ``with`` block ends.
    """

    def __init__(self, network: TrainedNetwork) -> None:
        """Start the probe, so that it listens from the next forward on, and register with the network's ScaledStep."""
        self._network = network
        self._step = network.step
        self._probe = Probe(network, self._observe)
        self._start()
        self._step.observers.append(self)

    def close(self) -> None:
        """Stop observing, and remove this object's listeners from the network; the results so far stay in this object.

        If ``_observe`` has raised exceptions since the probe was started, raises the first of them.
        """
        if self in self._step.observers:
            self._step.observers.remove(self)
        self._stop()

    def __enter__(self: _Observer) -> _Observer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _observe(self, observed: Observed, array: NDArray) -> None:
        """Record one tensor that the probe reports; copy what is kept of it, as MXNet may use the memory again."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop the tensors recorded in the current step."""
        raise NotImplementedError

    def _start(self) -> None:
        self._forget()
        self._probe.start()

    def _stop(self) -> None:
        self._forget()
        if self._probe.listens:
            self._probe.stop()


def values_of(array: NDArray, *, magnitude: bool = False) -> NDArray | None:
    """Return a dense FP32 copy of a float array (of float16, bfloat16 or float64 too), or its absolute values.
    None for an integer or empty array. Of a row-sparse one it has the stored rows; only for a sparse one it waits."""
    # detach returns an array of the right class: MXNet's monitor passes a row-sparse array as a plain NDArray
    dense = array.as_nd_ndarray() if array.stype == "default" else array.detach().data
    if not dense.size:
        return None
    if dense.dtype in (np.float16, np.float64):
        dense = dense.astype("float32")
    elif np.dtype(dense.dtype).names == ("bfloat16",):
        dense = mx.nd.amp_cast(dense, dtype="float32")
    elif dense.dtype != np.float32:
        return None
    elif not magnitude:
        return dense.copy()
    return dense.abs() if magnitude else dense
