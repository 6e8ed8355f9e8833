"""Probes: what a net or a module computes, operator by operator, in the steps in which they listen.

No step is run a second time. MXNet's monitor reports each operator's outputs, forward and backward, while the
very step of the training runs: by an operator (Gluon) or executor (Module) of its own, on the same graph and
arrays, so that all other steps run as ever, and the values, the dropout masks among them, are those that train.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Callable, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from .callbacks import KeptError, hold_interrupts
from .frontend import Listener, TrainedNetwork
from .observed import Observed, ObservedGraph
from .step.step import Observer

__all__ = ["Probe", "StepObserver", "values_of"]

_Observer = TypeVar("_Observer", bound="StepObserver")


class Probe:
    """Calls ``callback`` with every tensor that an operator of the user's or an inserted cast makes, while it listens.

    ``callback`` takes an Observed and the NDArray. It runs inside the operator's call, where nothing is recorded; what
    it raises is raised by ``stop``. Inference is left out.
    """

    def __init__(self, network: TrainedNetwork, callback: Callable[[Observed, NDArray], None]) -> None:
        self.network = network
        self.graphs: list[ObservedGraph] = []
        self.listens = False
        self._callback = callback
        self._known: dict[int, list[tuple[Any, ObservedGraph]]] = {}  # by place: each graph with its key
        self._failed = KeptError()

    def start(self) -> None:
        """Listen from the next forward on."""
        with hold_interrupts():
            self.network.listen(self._listener_at)
            self.listens = True

    def stop(self) -> None:
        """Remove all listeners from the network.

        Raises
        ------
        BaseException
            What ``callback`` raised meanwhile.
        """
        with hold_interrupts():
            self.listens = False
            self.network.stop_listening()
            self._known = {}
        self._failed.raise_it()

    def _listener_at(self, where: Any) -> Listener:
        """Return a listener for the graphs at one place; it may outlive the probe, and keeps nothing of it alive."""
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
        """Return what ``name`` stands for at a place; each graph that the place has meanwhile is read once."""
        known = self._known.setdefault(id(where), [])
        found = _observe_newest(known, name)
        if found is None and len(known) < self.network.count_graphs(where):
            keys = [key for key, _ in known]
            runs = [run for run in self.network.graphs(where) if not any(run.key is key for key in keys)]
            known += [(run.key, ObservedGraph(run.symbol, run.plan, run.has_gradient)) for run in runs]
            self.graphs = [graph for each in self._known.values() for _, graph in each]
            found = _observe_newest(known, name)
        return found


def _observe_newest(known: list[tuple[Any, ObservedGraph]], name: str) -> Observed | None:
    return next((found for _, graph in reversed(known) if (found := graph.observe(name)) is not None), None)


class StepObserver(Observer):
    """Looks at some of the steps in which a network trains; ``close`` it, or use it as a context manager.

    A subclass has ``before_update`` and ``after_step``; ``_observe``, which is called with what operators make while
    the probe listens; and ``_forget``, which drops it.
    """

    def __init__(self, network: TrainedNetwork) -> None:
        self._network = network
        self._step = network.step
        self._probe = Probe(network, self._observe)
        self._start()
        self._step.observers.append(self)

    def close(self) -> None:
        """Stop looking. Nothing of it stays on the net, trainer or module; what was found stays here."""
        if self in self._step.observers:
            self._step.observers.remove(self)
        self._stop()

    def __enter__(self: _Observer) -> _Observer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _observe(self, observed: Observed, array: NDArray) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        self._forget()
        self._probe.start()

    def _stop(self) -> None:
        self._forget()
        if self._probe.listens:
            self._probe.stop()


def values_of(array: NDArray, *, magnitude: bool = False) -> NDArray | None:
    """Return a dense copy in FP32 of an array's values as they are now; None of integers, and of an empty array.

    ``magnitude``: return their absolute values, in no more time.
    """
    if not array.size:
        return None
    dense = array.as_nd_ndarray() if array.stype == "default" else array.data
    if dense.dtype in (np.float16, np.float64):
        dense = dense.astype("float32")
    elif np.dtype(dense.dtype).names == ("bfloat16",):
        dense = mx.nd.amp_cast(dense, dtype="float32")
    elif dense.dtype != np.float32:
        return None
    elif not magnitude:
        return dense.copy()
    return dense.abs() if magnitude else dense
