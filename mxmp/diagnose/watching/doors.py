"""What a tap and a replay need of each door: to listen to what runs, and what the step works on.

The two have the same methods. ``arm(tell)`` makes every place where a graph runs (a block's hook, an executor) call
``tell(place)(name, operator, handle)`` for each output of an operator; ``disarm`` undoes it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, Parameter
from mxnet.ndarray import NDArray

from ...gluon import Trainer, _mxnet
from ...gluon.hook import Hook, hooks
from ...gluon.parameter import weight_of
from ...step.gradients import Gradient
from ...step.masters import Weight
from ...step.step import ScaledStep
from ...symbolic import BucketingModule, Module
from ...symbolic._mxnet import symbol_of, twin
from .wiring import Wiring

__all__ = ["GluonDoor", "ModuleDoor"]


class GluonDoor:
    """The converted blocks of a net, and the trainer that steps it.

    Raises
    ------
    TypeError, ValueError
        It is no trainer of ours, or the net is not converted.
    """

    def __init__(self, net: Block, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"pass the net's mxmp.Trainer, got {type(trainer).__module__}.{type(trainer).__name__}")
        self._hooks = [(block, hook) for block, hook in hooks(net) if not hook.python]
        if not self._hooks:
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first")
        self._net = net
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

    def gradients(self) -> list[Gradient]:
        return [
            Gradient(param.name, grad)
            for param in self._params()
            if param.grad_req != "null"
            for grad in param.list_grad()
        ]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Backwards in this block start from gradients of zero; these, running statistics and marks come back."""
        trained = [array for p in self._params() if p.grad_req != "null" for array in _mxnet.arrays(p)]
        running = [array for p in self._params() if p.grad_req == "null" for array in _mxnet.arrays(p)]
        stale = [array for array in trained if not _mxnet.is_fresh(array)]
        with _kept([array for _, array in self.gradients()], running):
            yield
        for array in stale:
            _mxnet.mark_stale(array)

    def _params(self) -> list[Parameter]:
        found = {id(p): p for p in [*self._trainer._params, *self._net.collect_params().values()]}
        return [param for param in found.values() if _mxnet.is_initialized(param)]

    def wirings(self, where: Hook) -> Iterator[tuple[Any, Wiring]]:
        for key, built in list(where.graphs.items()):
            if key.training:
                yield built, Wiring(built.op.symbol, built.plan)

    def graphs_at(self, where: Hook) -> int:
        return sum(key.training for key in where.graphs)

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


class ModuleDoor:
    """The executors of a module, of the current bucket where there are several.

    Raises
    ------
    ValueError
        It cannot step yet.
    """

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

    def gradients(self) -> list[Gradient]:
        group = self.module._exec_group
        pairs = zip(group.param_names, group.grad_arrays)
        return [Gradient(name, array) for name, arrays in pairs for array in arrays if array is not None]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Backwards in this block start from gradients of zero; these and running statistics come back."""
        executors = self.module._exec_group.execs
        written = [array for each in executors for array in each.grad_arrays if array is not None]
        with _kept(written, [array for each in executors for array in each.aux_arrays]):
            yield

    def wirings(self, where: mx.executor.Executor) -> Iterator[tuple[Any, Wiring]]:
        grads, plan = where.grad_dict, self.module.plan
        if plan is not None:
            yield where, Wiring(symbol_of(where), plan, lambda name: grads.get(name) is not None)

    def graphs_at(self, where: mx.executor.Executor) -> int:
        return 1

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


@contextmanager
def _kept(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    with autograd.pause():
        before = [(array, array.copy()) for array in [*gradients, *states]]
        for array in gradients:
            array[:] = 0
    try:
        yield
    finally:
        mx.nd.waitall()  # a net with static memory writes statistics without telling MXNet's engine
        with autograd.pause():
            for array, copy in before:
                copy.copyto(array)
