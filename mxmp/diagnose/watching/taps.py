"""Taps: what a converted net or a module computes, operator by operator, in the steps that they are armed for.

No step is run a second time. MXNet's monitor reports each operator's outputs, forward and backward, while the
very step of the training runs: by an operator (Gluon) or executor (Module) of its own, on the same graph and
arrays, so that all other steps run as ever, and the values, the dropout masks among them, are those that train.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...callbacks import KeptError, hold_interrupts
from ...frontend import Listener, TrainedNetwork
from .wiring import Seen, Wiring

__all__ = ["See", "Tap", "values_of"]

# Called with what an operator made; inside its forward or backward.
See = Callable[[Seen, NDArray], None]


class Tap:
    """Calls ``see`` with every tensor that an operator of the user's, or a cast of ours, makes while it is armed.

    ``see`` runs inside the operator's call, where nothing is recorded; what it raises is raised by ``disarm``.
    Inference is left out.
    """

    def __init__(self, network: TrainedNetwork, see: See) -> None:
        self.network = network
        self.wirings: list[Wiring] = []
        self._see = see
        self._known: dict[int, list[tuple[Any, Wiring]]] = {}
        self._failed = KeptError()
        self.armed = False

    def arm(self) -> None:
        with hold_interrupts():
            self.network.listen(self._listener_at)
            self.armed = True

    def disarm(self) -> None:
        """Leave nothing of it on the net or module.

        Raises
        ------
        BaseException
            What ``see`` raised meanwhile.
        """
        with hold_interrupts():
            self.armed = False
            self.network.stop_listening()
            self._known = {}
        self._failed.raise_it()

    def _listener_at(self, where: Any) -> Listener:
        """Return what is called with a tensor's name and the tensor; it outlives the tap and holds nothing of it."""
        report, place = weakref.WeakMethod(self._report), weakref.ref(where)

        def listener(name: str, array: NDArray) -> None:
            found, at = report(), place()
            if found is not None and at is not None:
                found(at, name, array)

        return listener

    def _report(self, where: Any, name: str, array: NDArray) -> None:
        if not self.armed:
            return
        with self._failed:
            seen = self._read(where, name)
            if seen is not None:
                with autograd.pause(train_mode=True):
                    self._see(seen, array)

    def _read(self, where: Any, name: str) -> Seen | None:
        """By the wirings of this place, read once for each graph that it has meanwhile."""
        known = self._known.setdefault(id(where), [])
        for _, wiring in reversed(known):
            seen = wiring.read(name)
            if seen is not None:
                return seen
        if len(known) < self.network.count_graphs(where):
            ready = [key for key, _ in known]
            runs = [run for run in self.network.graphs(where) if not any(run.key is each for each in ready)]
            known += [(run.key, Wiring(run.symbol, run.plan, run.has_gradient)) for run in runs]
            self.wirings = [wiring for each in self._known.values() for _, wiring in each]
            return next((seen for _, wiring in reversed(known) if (seen := wiring.read(name)) is not None), None)
        return None


def values_of(array: NDArray, *, magnitude: bool = False) -> NDArray | None:
    """Its values in FP32, dense, as they are now: a copy. None for integers, and for an empty array.

    ``magnitude``: their absolute values, in no more time.
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
