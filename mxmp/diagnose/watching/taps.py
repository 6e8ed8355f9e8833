"""Taps: what a converted net or a module computes, operator by operator, in the steps that they are armed for.

No step is run a second time. MXNet's monitor tells of each operator's outputs, forward and backward, while the
very step of the training runs: by an operator (Gluon) or executor (Module) of its own, on the same graph and
arrays, so that all other steps run as ever, and the values, the dropout masks among them, are those that train.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ...callbacks import KeptError, hold_interrupts
from ...gluon import Trainer
from ...symbolic import BucketingModule, Module
from .doors import GluonDoor, ModuleDoor
from .listeners import Tell
from .wiring import Seen, Wiring

__all__ = ["See", "Tap", "tap_of", "values_of"]

# Called with what an operator made; inside its forward or backward.
See = Callable[[Seen, NDArray], None]


class Tap:
    """Tells ``see`` of every tensor that an operator of the user's, or a cast of ours, makes while it is armed.

    ``see`` runs inside the operator's call, where nothing is recorded; what it raises is raised by ``disarm``.
    Inference is not told of.
    """

    def __init__(self, door: GluonDoor | ModuleDoor, see: See) -> None:
        self.door = door
        self.wirings: list[Wiring] = []
        self._see = see
        self._known: dict[int, list[tuple[Any, Wiring]]] = {}
        self._failed = KeptError()
        self.armed = False

    def arm(self) -> None:
        with hold_interrupts():
            self.door.arm(self._teller)
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
            self.door.disarm()
            self._known = {}
        self._failed.raise_it()

    def _teller(self, where: Any) -> Tell:
        """What is called with a tensor's name and the tensor; it outlives the tap and holds nothing of it."""
        tap, place = weakref.ref(self), weakref.ref(where)

        def told(name: str, array: NDArray) -> None:
            found, at = tap(), place()
            if found is not None and at is not None and found.armed:
                with found._failed:
                    found._tell(at, name, array)

        return told

    def _tell(self, where: Any, name: str, array: NDArray) -> None:
        if isinstance(self.door, GluonDoor) and not autograd.is_training():
            return
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
        if len(known) < self.door.graphs_at(where):
            ready = [built for built, _ in known]
            known += [(b, w) for b, w in self.door.wirings(where) if not any(b is each for each in ready)]
            self.wirings = [wiring for each in self._known.values() for _, wiring in each]
            return next((seen for _, wiring in reversed(known) if (seen := wiring.read(name)) is not None), None)
        return None


def tap_of(target: Block | Module | BucketingModule, trainer: Trainer | None, see: See) -> Tap:
    """A tap of a converted net and its trainer, or of a module that has an optimizer.

    Raises
    ------
    TypeError, ValueError
        Says what was expected, and what to call first.
    """
    if isinstance(target, (Module, BucketingModule)):
        if trainer is not None:
            raise TypeError("a module steps by itself: pass no trainer with it")
        return Tap(ModuleDoor(target), see)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a converted gluon Block and its mxmp.Trainer, or an mxmp.Module or BucketingModule, got "
            f"{type(target).__module__}.{type(target).__name__}"
        )
    return Tap(GluonDoor(target, trainer), see)  # type: ignore[arg-type]


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
