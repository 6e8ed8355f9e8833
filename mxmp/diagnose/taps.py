"""Taps: what a converted net or a module computes, operator by operator, in the steps that they are armed for.

No step is run a second time. MXNet's monitor tells of each operator's outputs, forward and backward, while the
very step of the training runs: by an operator (Gluon) or executor (Module) of its own, on the same graph and
arrays, so that all other steps run as ever, and the values, the dropout masks among them, are those that train.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import NDArrayHandle
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ..gluon import Trainer, _mxnet
from ..gluon.hook import Hook, hooks
from ..gluon.parameter import weight_of
from ..step.masters import Weight
from ..step.step import ScaledStep
from ..symbolic import BucketingModule, Module
from ..symbolic._mxnet import symbol_of, twin
from .wiring import Seen, Wiring

__all__ = ["See", "Tap", "tap_of", "values_of"]

# Called with what an operator made; inside its forward or backward.
See = Callable[[Seen, NDArray], None]


class _Gluon:
    """The converted blocks of a net."""

    def __init__(self, net: Block, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"pass the net's mxmp.Trainer, got {type(trainer).__module__}.{type(trainer).__name__}")
        self._hooks = [(block, hook) for block, hook in hooks(net) if not hook.python]
        if not self._hooks:
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first")
        self._trainer = trainer
        self._told: list[tuple] = []

    @property
    def step(self) -> ScaledStep:
        return self._trainer._state

    @property
    def compute(self) -> str:
        return self._hooks[0][1].conversion.policy.compute

    @property
    def scaled_by(self) -> float:
        """What the gradients before the update are multiplied by."""
        return 1.0 if self._trainer._progress.unscaled else self._trainer.loss_scale

    def weights(self) -> list[Weight]:
        return [weight_of(param) for param in self._trainer._params if param.grad_req != "null"]

    def wirings(self, where: Hook) -> Iterator[tuple[Any, Wiring]]:
        for key, built in list(where.graphs.items()):
            if key.training:
                yield built, Wiring(built.op.symbol, built.plan)

    def arm(self, tell: Callable[[Any], Callable]) -> None:
        for block, hook in self._hooks:
            if _mxnet.monitor(block) is not None:
                raise ValueError(f"{block.name!r} has an op hook (register_op_hook), and MXNet tells one listener only")
            monitor = (tell(hook), False)
            self._told.append((block, hook, monitor))
            _mxnet.set_monitor(block, monitor)

    def disarm(self) -> None:
        for block, hook, monitor in self._told:
            if _mxnet.monitor(block) == monitor:
                _mxnet.set_monitor(block, None)
            for built in hook.graphs.values():
                built.op.forget(monitor)
        self._told = []


class _Module:
    """The executors of a module, of the current bucket where there are several."""

    def __init__(self, module: Module | BucketingModule) -> None:
        if not module.optimizer_initialized:
            raise ValueError("the module has no optimizer yet: bind, init_params and init_optimizer first")
        self._target = module
        self._swapped: list[tuple] = []

    @property
    def module(self) -> Module:
        return self._target._curr_module if isinstance(self._target, BucketingModule) else self._target

    @property
    def step(self) -> ScaledStep:
        return self._target._state

    @property
    def compute(self) -> str:
        return self.module.policy.compute

    @property
    def scaled_by(self) -> float:
        return self.module._core.scaled_by

    def weights(self) -> list[Weight]:
        arrays = self.module._arrays()
        trained = {name for name, grads in zip(arrays, self.module._exec_group.grad_arrays) if grads[0] is not None}
        return [weight for weight in self.module._core.weights(arrays) if weight.name in trained]

    def wirings(self, where: mx.executor.Executor) -> Iterator[tuple[Any, Wiring]]:
        grads, plan = where.grad_dict, self.module.plan
        if plan is not None:
            yield where, Wiring(symbol_of(where), plan, lambda name: grads.get(name) is not None)

    def arm(self, tell: Callable[[Any], Callable]) -> None:
        group = self.module._exec_group
        twins = [twin(executor) for executor in group.execs]
        for each in twins:
            told = tell(each)
            each.set_monitor_callback(lambda name, handle, told=told: told(name, None, handle))
        self._swapped = [(group.execs, i, executor, each) for i, (executor, each) in enumerate(zip(group.execs, twins))]
        group.execs[:] = twins

    def disarm(self) -> None:
        for execs, i, executor, each in self._swapped:
            if execs[i] is each:  # a batch of another size has put another there
                for ours, theirs in zip(each.outputs, executor.outputs):
                    ours.copyto(theirs)
                execs[i] = executor
        self._swapped = []


class Tap:
    """Tells ``see`` of every tensor that an operator of the user's, or a cast of ours, makes while it is armed.

    ``see`` runs inside the operator's call, where nothing is recorded; what it raises is raised by ``disarm``.
    Inference is not told of.
    """

    def __init__(self, door: _Gluon | _Module, see: See) -> None:
        self.door = door
        self.wirings: list[Wiring] = []
        self._see = see
        self._known: dict[int, list[tuple[Any, Wiring]]] = {}
        self._error: BaseException | None = None
        self.armed = False

    def arm(self) -> None:
        self.door.arm(self._teller)
        self.armed = True

    def disarm(self) -> None:
        """Leave nothing of it on the net or module.

        Raises
        ------
        Exception
            What ``see`` raised meanwhile.
        """
        self.armed = False
        self.door.disarm()
        self._known = {}
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _teller(self, where: Any) -> Callable:
        """What MXNet calls with name, operator and handle; it outlives the tap and holds nothing of it."""
        tap, place = weakref.ref(self), weakref.ref(where)

        def told(name: Any, _: Any, handle: Any) -> None:
            found, at = tap(), place()
            array = NDArray(NDArrayHandle(handle), writable=False)  # frees the handle
            if found is not None and at is not None and found.armed:
                found._tell(at, name.decode() if isinstance(name, bytes) else name, array)

        return told

    def _tell(self, where: Any, name: str, array: NDArray) -> None:
        if isinstance(self.door, _Gluon) and not autograd.is_training():
            return
        try:
            seen = self._read(where, name)
            if seen is not None:
                with autograd.pause(train_mode=True):
                    self._see(seen, array)
        except Exception as error:  # MXNet's C code calls this, and drops what it raises
            self._error = self._error or error

    def _read(self, where: Any, name: str) -> Seen | None:
        """By the wirings of this place, read once for each graph that it has meanwhile."""
        known = self._known.setdefault(id(where), [])
        for _, wiring in reversed(known):
            seen = wiring.read(name)
            if seen is not None:
                return seen
        if len(known) < _graphs_at(where):
            ready = [built for built, _ in known]
            known += [(b, w) for b, w in self.door.wirings(where) if not any(b is each for each in ready)]
            self.wirings = [wiring for each in self._known.values() for _, wiring in each]
            return next((seen for _, wiring in reversed(known) if (seen := wiring.read(name)) is not None), None)
        return None


def _graphs_at(where: Any) -> int:
    return sum(key.training for key in where.graphs) if isinstance(where, Hook) else 1


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
        return Tap(_Module(target), see)
    if not isinstance(target, Block):
        raise TypeError(
            "expected a converted gluon Block and its mxmp.Trainer, or an mxmp.Module or BucketingModule, got "
            f"{type(target).__module__}.{type(target).__name__}"
        )
    return Tap(_Gluon(target, trainer), see)  # type: ignore[arg-type]


def values_of(array: NDArray) -> NDArray | None:
    """Its values in FP32, dense, as they are now: a copy. None for integers, and for an empty array."""
    if not array.size:
        return None
    dense = array.as_nd_ndarray() if array.stype == "default" else array.data
    if dense.dtype == np.float32:
        return dense.copy()
    if dense.dtype in (np.float16, np.float64):
        return dense.astype("float32")
    if np.dtype(dense.dtype).names == ("bfloat16",):
        return mx.nd.amp_cast(dense, dtype="float32")
    return None
