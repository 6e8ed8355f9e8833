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

__all__ = ["Probe", "StepObserver", "values_of"]

_Observer = TypeVar("_Observer", bound="StepObserver")


class Probe:
    """Calls a function with every tensor that a network computes in training, between ``start`` and ``stop``.

    The tensors are the outputs of operators and the gradients with respect to their inputs, those of the casts and
    other nodes that mxmp inserted included. A net's calls in inference are not reported; a module's are.

    Attributes
    ----------
    network : TrainedNetwork
        The net with its trainer, or the module, whose tensors are reported.
    graphs : list of ObservedGraph
        The training graphs of all blocks or executors that have reported a tensor since ``start``.
    listens : bool
        True from ``start`` to ``stop``.
    """

    def __init__(self, network: TrainedNetwork, callback: Callable[[Observed, NDArray], None]) -> None:
        """Prepare a probe; it listens only from ``start`` on.

        ``callback`` is called with an Observed, which says what the tensor is, and the NDArray, while MXNet runs the
        operator and autograd does not record. The callback must copy what it keeps of the array, because MXNet may use
        the memory for another tensor. An exception that the callback raises is kept, and raised by ``stop``.
        """
        self.network = network
        self.graphs: list[ObservedGraph] = []
        self.listens = False
        self._callback = callback
        # By the id of a hook or executor: the graphs read there, each with the key of its GraphRun.
        self._known: dict[int, list[tuple[Any, ObservedGraph]]] = {}
        self._failed = KeptError()

    def start(self) -> None:
        """Report the tensors of every forward and backward from now on."""
        with hold_interrupts():
            self.network.listen(self._listener_at)
            self.listens = True

    def stop(self) -> None:
        """Stop reporting, and remove everything that ``start`` added to the network.

        Raises
        ------
        BaseException
            The first exception that ``callback`` raised since ``start``. MXNet cannot pass on an exception itself.
        """
        with hold_interrupts():
            self.listens = False
            self.network.stop_listening()
            self._known = {}
        self._failed.raise_it()

    def _listener_at(self, where: Any) -> Listener:
        """Return the function that MXNet's monitor calls with name and array of each tensor computed at ``where``.

        ``where`` is the hook of a converted block, or an executor. MXNet may hold the function longer than the probe
        exists, so the function refers to the probe and to ``where`` only weakly, and does nothing where one of them is
        gone.
        """
        report, place = weakref.WeakMethod(self._report), weakref.ref(where)

        def listener(name: str, array: NDArray) -> None:
            """Report a tensor to the probe, if the probe and the hook or executor still exist."""
            found, at = report(), place()
            if found is not None and at is not None:
                found(at, name, array)

        return listener

    def _report(self, where: Any, name: str, array: NDArray) -> None:
        """Call the callback with a tensor that MXNet's monitor reported, if the tensor belongs to a known graph.

        ``where`` is the hook or executor that computed it, ``name`` the monitor's name, such as ``"fc1_output"``.
        Exceptions are kept for ``stop``.
        """
        if not self.listens:
            return
        with self._failed:
            observed = self._observe(where, name)
            if observed is not None:
                with autograd.pause(train_mode=True):
                    self._callback(observed, array)

    def _observe(self, where: Any, name: str) -> Observed | None:
        """Return what the tensor that the monitor calls ``name`` is, in the newest graph at ``where`` that has it.

        ``where`` is a hook or an executor. None means that no graph there has such a tensor. A hook may build more
        graphs while the probe listens: if ``name`` is not found, the graphs that are new since the last call are read
        into ObservedGraphs.
        """
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
    """Return what the tensor ``name`` is, by the last graph in ``known`` that has such a tensor; None if none has.

    ``name`` is the monitor's, such as ``"fc1_output"``. ``known`` belongs to one hook or executor: it holds a pair of
    GraphRun key and ObservedGraph for each graph, oldest first.
    """
    return next((found for _, graph in reversed(known) if (found := graph.observe(name)) is not None), None)


class StepObserver(Observer):
    """Base class of ``Watch`` and ``Guard``: observes some of the steps in which a network trains, by a probe.

    A StepObserver is registered with the network's ScaledStep, which calls ``before_update`` and ``after_step`` in
    every step. A subclass implements these two, to decide in which steps the probe listens and what is done with the
    tensors; ``_observe``, which gets each tensor; and ``_forget``. An observer works until ``close``, or until its
    ``with`` block ends.
    """

    def __init__(self, network: TrainedNetwork) -> None:
        """Register with the network's training steps, and let the probe listen from the next forward on."""
        self._network = network
        self._step = network.step
        self._probe = Probe(network, self._observe)
        self._start()
        self._step.observers.append(self)

    def close(self) -> None:
        """Stop observing, and remove everything from the net, trainer or module. What was found so far remains here."""
        if self in self._step.observers:
            self._step.observers.remove(self)
        self._stop()

    def __enter__(self: _Observer) -> _Observer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _observe(self, observed: Observed, array: NDArray) -> None:
        """Record one tensor that the probe reports, as the subclass needs it; copy what is to be kept of ``array``."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop the tensors recorded in the current step, so that the next observed step starts with none."""
        raise NotImplementedError

    def _start(self) -> None:
        """Let the probe listen from the next forward on, with no tensor recorded yet."""
        self._forget()
        self._probe.start()

    def _stop(self) -> None:
        """Stop the probe if it listens, and drop the tensors recorded in the current step."""
        self._forget()
        if self._probe.listens:
            self._probe.stop()


def values_of(array: NDArray, *, magnitude: bool = False) -> NDArray | None:
    """Return an FP32 copy of the values of a float array, on its device; None for an integer array and an empty one.

    The copy is dense: of a row-sparse array it has the rows that are stored. ``magnitude`` returns absolute values,
    which takes no more time. Does not wait for the device.
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
