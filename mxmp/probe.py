"""Probes: report every tensor that a network computes in a training step, operator by operator.

No step is run a second time. While a probe listens, MXNet's monitor reports the outputs of each operator, forward and
backward, in the step that trains. The values, dropout masks included, are therefore those that train. The network runs
this step through a cached operator (Gluon) or an executor (Module) made for the purpose, on the same graph and arrays;
steps in which no probe listens run as always.
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

_Observer = TypeVar("_Observer", bound="StepObserver")


class Probe:
    """Calls a function with every tensor that a network computes in training, between ``start`` and ``stop``.

    The tensors are the outputs of operators and the gradients with respect to their inputs; also those of casts and
    other nodes that mxmp inserted. Nothing is reported in inference.

    Attributes
    ----------
    network : TrainedNetwork
        The net with its trainer, or the module, whose tensors are reported.
    graphs : list of ObservedGraph
        The training graphs of all blocks or executors that have reported a tensor since ``start``. They stay here after
        ``stop``, and after the next ``start`` until the first tensor is reported.
    listens : bool
        True from ``start`` to ``stop``.
    """

    def __init__(self, network: TrainedNetwork, callback: Callable[[Observed, NDArray], None]) -> None:
        """Prepare a probe; it listens only from ``start`` on.

        ``callback(observed, array)`` is called for each tensor right after its operator, while autograd does not
        record. ``observed`` says which operator made the tensor and whether it is a gradient. The callback must copy
        what it keeps of ``array``, because MXNet may use the memory for another tensor. The first exception that the
        callback raises is kept, and raised by ``stop``.
        """
        self.network = network
        self.graphs: list[ObservedGraph] = []
        self.listens = False
        self._callback = callback
        # By the id of a hook or executor: the graphs read there, each with the key of its GraphRun.
        self._known: dict[int, list[tuple[Any, ObservedGraph]]] = {}
        self._failed = KeptError()

    def start(self) -> None:
        """Call the callback for the tensors of every forward and backward in training, from the next forward on."""
        with hold_interrupts():
            self.network.listen(self._listener_at)
            self.listens = True

    def stop(self) -> None:
        """Stop reporting, and remove everything that ``start`` added to the network.

        Raises the first exception that ``callback`` raised since ``start``, which MXNet itself would not pass on. Does
        nothing if the probe does not listen.
        """
        with hold_interrupts():
            self.listens = False
            self.network.stop_listening()
            self._known = {}
        self._failed.raise_it()

    def _listener_at(self, where: Any) -> Listener:
        """Return the function that is to be called with the name and array of each tensor that ``where`` computes.

        ``where`` is the hook of a Gluon block or the executor of a Module. The function does not keep it alive.
        """
        # MXNet may hold the function longer than these exist.
        report, place = weakref.WeakMethod(self._report), weakref.ref(where)

        def listener(name: str, array: NDArray) -> None:
            found, at = report(), place()
            if found is not None and at is not None:
                found(at, name, array)

        return listener

    def _report(self, where: Any, name: str, array: NDArray) -> None:
        """Call the callback with ``array``, which MXNet's monitor reported under ``name`` for ``where``.

        Does nothing if the probe does not listen, or if ``_observe`` returns None for the name. Keeps the first
        exception, for ``stop`` to raise.
        """
        if not self.listens:
            return
        with self._failed:
            observed = self._observe(where, name)
            if observed is not None:
                with autograd.pause(train_mode=True):
                    self._callback(observed, array)

    def _observe(self, where: Any, name: str) -> Observed | None:
        """Return a description of the tensor that the monitor calls ``name``, from the newest graph that has it.

        Only training graphs of ``where``, a Gluon hook or an executor, are searched. A hook may build more graphs while
        the probe listens: if the graphs known so far do not have ``name``, the new ones are read too. Returns None if
        no graph has the tensor, if it is an operator's input, or if it is a gradient that backward never computes.
        """

        def newest() -> Observed | None:
            return next((found for _, graph in reversed(known) if (found := graph.observe(name)) is not None), None)

        known = self._known.setdefault(id(where), [])
        found = newest()
        if found is None and len(known) < self.network.count_graphs(where):
            keys = [key for key, _ in known]
            runs = [run for run in self.network.graphs(where) if not any(run.key is key for key in keys)]
            known += [(run.key, ObservedGraph(run.symbol, run.plan, run.has_gradient)) for run in runs]
            self.graphs = [graph for each in self._known.values() for _, graph in each]
            found = newest()
        return found


class StepObserver(Observer):
    """Base class of ``Watch`` and ``Guard``: records the tensors of some training steps of a network by a Probe.

    It is registered with the network's ScaledStep (the object that checks the gradients and applies or skips the
    update), which calls ``before_update`` and ``after_step`` in every step. A subclass implements these two, to start
    and stop the probe and to use the tensors; ``_observe``, which records one tensor; and ``_forget``, which drops the
    recorded ones. An observer works until ``close``, or until its ``with`` block ends.
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
        """Record one tensor that the probe reports, as the subclass needs it.

        An implementation must copy what it keeps of ``array``, because MXNet may use the memory for another tensor.
        """
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop the tensors recorded in the current step, so that the next observed step starts with none."""
        raise NotImplementedError

    def _start(self) -> None:
        """Drop the tensors recorded so far, and let the probe listen from the next forward on."""
        self._forget()
        self._probe.start()

    def _stop(self) -> None:
        """Drop the tensors recorded in the current step, and stop the probe if it listens.

        Raises the first exception that ``_observe`` has raised since the probe was started.
        """
        self._forget()
        if self._probe.listens:
            self._probe.stop()


def values_of(array: NDArray, *, magnitude: bool = False) -> NDArray | None:
    """Return an FP32 copy of the values of a float array, on its device; None for an integer array and an empty one.

    Float is float16, bfloat16, float32 or float64. The copy is dense: of a row-sparse array it has the rows that are
    stored. With ``magnitude=True`` it has the absolute values. Waits for a sparse array, and not for a dense one.
    """
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
