"""A module that trains, as diagnostics use it; and the exclusion of operators while it trains."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Sequence

import mxnet as mx

from ..frontend import OTHER_WORKERS, GraphRun, Listener, Listeners, Note, unchanged
from ..policy import Policy
from ..step.gradients import Gradient
from ..step.masters import Weight
from ..step.step import ScaledStep
from . import _mxnet
from .bucketing import BucketingModule
from .module import Module

__all__ = ["TrainedModule"]


class TrainedModule:
    """The executors of a module, of the current bucket where there are several: a ``TrainedNetwork``.

    Raises
    ------
    ValueError
        It cannot step yet.
    """

    def __init__(self, module: Module | BucketingModule) -> None:
        if not module.optimizer_initialized:
            raise ValueError("the module has no optimizer yet: bind, init_params and init_optimizer first")
        self._target = module
        self._listening: list[tuple] = []

    @property
    def _module(self) -> Module:
        return _mxnet.current(self._target) if isinstance(self._target, BucketingModule) else self._target

    @property
    def step(self) -> ScaledStep:
        return self._target.scaled_step

    @property
    def policy(self) -> Policy:
        return self._module.policy

    @property
    def is_planned(self) -> bool:
        return self._module.core.conversion.plan is not None

    @property
    def gradient_scale(self) -> float:
        return self._module.core.scaled_by

    def weights(self) -> list[Weight]:
        arrays = self._module.arrays()
        gradients = _mxnet.group(self._module).grad_arrays
        trained = {name for name, grads in zip(arrays, gradients) if grads[0] is not None}
        return [weight for weight in self._module.core.weights(arrays) if weight.name in trained]

    def gradients(self) -> list[Gradient]:
        group = _mxnet.group(self._module)
        pairs = zip(group.param_names, group.grad_arrays)
        return [Gradient(name, array) for name, arrays in pairs for array in arrays if array is not None]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        executors = _mxnet.group(self._module).execs
        written = [array for each in executors for array in each.grad_arrays if array is not None]
        with unchanged(written, [array for each in executors for array in each.aux_arrays]):
            yield

    def prepare(self, batch: Sequence[Any]) -> None:
        if isinstance(self._target, BucketingModule):
            (data,) = batch
            self._target.switch_bucket(data.bucket_key, data.provide_data, data.provide_label)

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run one DataBatch."""
        (data,), module = batch, self._module
        for names, arrays in ((module.data_names, data.data), (module.label_names, data.label)):
            for name, array in zip(names, arrays or ()):
                note(name, array)
        module.forward(data, is_train=True)
        module.set_head_scale(loss_scale)
        _mxnet.group(module).backward([mx.nd.ones_like(out) * loss_scale for out in module.get_outputs()])

    def graphs(self, place: mx.executor.Executor) -> Iterator[GraphRun]:
        gradients, plan = place.grad_dict, self._module.plan
        if plan is not None:
            yield GraphRun(place, _mxnet.symbol_of(place), plan, lambda name: gradients.get(name) is not None)

    def count_graphs(self, place: mx.executor.Executor) -> int:
        return 1

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        module, execs = self._module, _mxnet.group(self._module).execs
        twins = module.core.twins
        for i, executor in enumerate(execs):
            if executor not in twins:
                listeners = Listeners()
                execs[i] = _mxnet.twin(executor, listeners)
                twins[execs[i]] = listeners, executor
            listener = listener_at(execs[i])
            twins[execs[i]][0].add(listener)
            self._listening.append((module, i, execs[i], listener))

    def stop_listening(self) -> None:
        for module, i, each, listener in self._listening:
            (listeners, executor), execs = module.core.twins[each], _mxnet.group(module).execs
            listeners.remove(listener)
            # A batch of another size has put another there, or the module was bound again.
            if listeners.idle and execs[i] is each:
                for ours, theirs in zip(each.outputs, executor.outputs):
                    ours.copyto(theirs)
                execs[i] = executor
        self._listening = []

    @property
    def is_stale(self) -> bool:
        return any(_mxnet.group(module).execs[i] is not each for module, i, each, _ in self._listening)

    def check_excludable(self) -> None:
        if self._module.has_other_workers:
            raise ValueError(OTHER_WORKERS)

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these nodes in FP32 too, in all buckets: bind again by another policy, with the same values and outputs.

        A Monitor that was installed in a Module must be installed again.
        """
        target = self._target
        modules = list(target.modules.values()) if isinstance(target, BucketingModule) else [target]
        first, *others = bound = [module for module in modules if module.binded]
        core, low_names = first.core, first.core.low_names
        # On each device of its own: running statistics differ there, and a mean of equals can be off by a bit.
        weights = {weight.name: list(weight.masters or weight.arrays) for weight in core.weights(first.arrays())}
        core.conversion.exclude(nodes)
        first.rebind(None)
        for module in others:
            module.rebind(first)
        first.remake_masters(weights)
        _mxnet.mark_dirty(target)
        if core.low_names != low_names:
            first.renew_store()
            for module in others:
                module.borrow_optimizer(first)
        monitor = _mxnet.monitor_of(target) if isinstance(target, BucketingModule) else None
        for module in bound if monitor is not None else ():
            module.install_monitor(monitor)
