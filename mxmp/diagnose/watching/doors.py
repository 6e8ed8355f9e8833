"""What a tap and a replay need of each door: to listen to what runs, and what the step works on.

The two have the same methods. ``arm(tell)`` makes every place where a graph runs (a block's hook, an executor) call
``tell(place)(name, array)`` for each output of an operator; ``disarm`` undoes it.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ...gluon import Trainer, _mxnet
from ...gluon.convert import exclude_more, is_whole
from ...gluon.hook import Hook, hook_of, hooks
from ...gluon.parameter import weight_of
from ...gluon.workers import has_other_workers, renew_store
from ...policy import Policy
from ...precision.plan import Plan
from ...step.gradients import Gradient
from ...step.masters import Weight
from ...step.step import ScaledStep
from ...step.stores import is_distributed
from ...symbolic import BucketingModule, Module, rebind
from ...symbolic._mxnet import symbol_of, twin
from .listeners import Listeners, Tell
from .wiring import Wiring

__all__ = ["GluonDoor", "ModuleDoor"]


_WORKERS = (
    "each worker sees batches of its own, and would move layers of its own: guard a run with one worker, and give "
    "its policy to all"
)


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
        self._net = net
        self._trainer = trainer
        if not self._hooks:
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first")
        self._told: list[tuple] = []

    @property
    def _hooks(self) -> list[tuple[HybridBlock, Hook]]:
        return [(block, hook) for block, hook in hooks(self._net) if not hook.python]

    def check_excludable(self) -> None:
        """Raise ``ValueError`` where the policy cannot be changed from here."""
        if has_other_workers(self._trainer):
            raise ValueError(_WORKERS)
        if not is_whole(self._net):
            raise ValueError(f"{self._net.name!r} is a part of a net that was converted as a whole: pass that net")

    @property
    def step(self) -> ScaledStep:
        return self._trainer._state

    @property
    def policy(self) -> Policy:
        return self._hooks[0][1].conversion.policy

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
        try:
            with _kept([array for _, array in self.gradients()], running):
                yield
        finally:
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

    def arm(self, tell: Callable[[Any], Tell]) -> None:
        for block, hook in self._hooks:
            monitor = _mxnet.monitor(block) or (Listeners(), False)
            if not isinstance(monitor[0], Listeners):
                raise ValueError(f"{block.name!r} has an op hook (register_op_hook), and MXNet tells one listener only")
            told = tell(hook)
            monitor[0].add(told)
            self._told.append((block, hook, monitor, told))
            _mxnet.set_monitor(block, monitor)

    def is_stale(self) -> bool:
        """Whether the net was converted again since ``arm``: what runs now tells nobody."""
        return any(hook_of(block) is not hook for block, hook, _, _ in self._told)

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these operators in FP32 from the next forward on. Between two steps."""
        exclude_more(self._net, nodes)
        for trainer in {id(t): t for p in self._params() if (t := _mxnet.trainer_of(p))}.values():
            renew_store(trainer)

    @property
    def planned(self) -> bool:
        """Whether a Plan decides, and not the rules alone."""
        return any(hook.conversion.plan is not None for _, hook in self._hooks)

    def disarm(self) -> None:
        for block, hook, monitor, told in self._told:
            monitor[0].remove(told)
            if monitor[0].idle:
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
        self._armed: list[tuple] = []

    @property
    def module(self) -> Module:
        return self._target._curr_module if isinstance(self._target, BucketingModule) else self._target

    def check_excludable(self) -> None:
        """Raise ``ValueError`` where the policy cannot be changed from here."""
        if is_distributed(self.module._kvstore):
            raise ValueError(_WORKERS)

    @property
    def step(self) -> ScaledStep:
        return self._target._state

    @property
    def policy(self) -> Policy:
        return self.module.policy

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

    def arm(self, tell: Callable[[Any], Tell]) -> None:
        module, execs = self.module, self.module._exec_group.execs
        for i, executor in enumerate(execs):
            if executor not in _twins:
                listeners = Listeners()
                execs[i] = twin(executor, listeners)
                _twins[execs[i]] = listeners, executor
            told = tell(execs[i])
            _twins[execs[i]][0].add(told)
            self._armed.append((module, i, execs[i], told))

    def is_stale(self) -> bool:
        """Whether others run since ``arm``: it was bound again, or for batches of another size."""
        return any(module._exec_group.execs[i] is not each for module, i, each, _ in self._armed)

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these operators in FP32 from the next forward on. Between two steps."""
        rebind.exclude_more(self._target, nodes)

    @property
    def planned(self) -> bool:
        """Whether a Plan decides, and not the rules alone."""
        return isinstance(self.module._how, Plan)

    def disarm(self) -> None:
        for module, i, each, told in self._armed:
            (listeners, executor), execs = _twins[each], module._exec_group.execs
            listeners.remove(told)
            # A batch of another size has put another there, or the module was bound again.
            if listeners.idle and execs[i] is each:
                for ours, theirs in zip(each.outputs, executor.outputs):
                    ours.copyto(theirs)
                execs[i] = executor
        self._armed = []


# Executors that tell, each with whom it tells and the one in whose place it stands.
_twins: weakref.WeakKeyDictionary[mx.executor.Executor, tuple[Listeners, mx.executor.Executor]]
_twins = weakref.WeakKeyDictionary()


@contextmanager
def _kept(gradients: Sequence[NDArray], states: Sequence[NDArray]) -> Iterator[None]:
    with autograd.pause():
        before = [(array, array.copy()) for array in [*gradients, *states]]
    try:
        with autograd.pause():
            for array in gradients:
                array[:] = 0
        yield
    finally:
        mx.nd.waitall()  # a net with static memory writes statistics without telling MXNet's engine
        with autograd.pause():
            for array, copy in before:
                copy.copyto(array)
