"""A module that trains, as what listens, replays or guards knows it; and the exclusion of operators while it trains."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from ..frontend import OTHER_WORKERS, GraphRun, Listener, Listeners, Note, unchanged
from ..policy import Policy
from ..precision.heads import SCALE_NAME
from ..step.gradients import Gradient
from ..step.masters import Weight, assign
from ..step.step import ScaledStep
from ..step.stores import is_distributed
from . import _mxnet
from .bucketing import BucketingModule
from .core import Core
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
        group = _mxnet.group(module)
        for executor in group.execs:
            if SCALE_NAME in executor.arg_dict:
                executor.arg_dict[SCALE_NAME][:] = loss_scale
        group.backward([mx.nd.ones_like(out) * loss_scale for out in module.get_outputs()])

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
        if is_distributed(_mxnet.kvstore(self._module)):
            raise ValueError(OTHER_WORKERS)

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these nodes in FP32 too, in all buckets: executors of another policy, with the same values and outputs.

        A Monitor that was installed in a Module must be installed again.
        """
        target = self._target
        modules = list(target.modules.values()) if isinstance(target, BucketingModule) else [target]
        first, *others = bound = [module for module in modules if module.binded]
        core, before = first.core, first.core.low_names
        # On each device of its own: running statistics differ there, and a mean of equals can be off by a bit.
        weights = {weight.name: list(weight.masters or weight.arrays) for weight in core.weights(first.arrays())}
        core.conversion.exclude(nodes)
        _bind(first, None)
        for module in others:
            _bind(module, first)
        core.make_masters(_mxnet.arg_params(first), first.arrays())
        _set_weights(core, weights, first.arrays())
        for each in (target, first):
            _mxnet.mark_dirty(each)
        if _mxnet.kvstore(first) is not None and core.low_names != before:
            _renew_store(bound)
        monitor = _mxnet.monitor_of(target) if isinstance(target, BucketingModule) else None
        for module in bound if monitor is not None else ():
            module.install_monitor(monitor)


def _set_weights(core: Core, weights: Mapping[str, list[NDArray]], arrays: Mapping[str, Sequence[NDArray]]) -> None:
    for name, copies in arrays.items():
        for k, (value, array) in enumerate(zip(weights[name], copies)):
            if name in core.masters:
                assign(value, [core.masters[name][k]], [array])
            else:
                value.copyto(array)


def _bind(module: Module, shared: Module | None) -> None:
    before = list(_mxnet.group(module).execs)
    training, inputs, request = module.for_training, module.inputs_need_grad, _mxnet.grad_request(module)
    module.bind(module.data_shapes, module.label_shapes, training, inputs, True, shared, request)
    for old, new in zip(before, _mxnet.group(module).execs):
        _go_on(old, new)


def _go_on(old: mx.executor.Executor, new: mx.executor.Executor) -> None:
    """Copy arguments, running statistics and outputs: a metric may read these after the step."""
    pairs: list[tuple[Mapping[str, NDArray], Mapping[str, NDArray]]] = [
        (old.arg_dict, new.arg_dict),
        (old.aux_dict, new.aux_dict),
    ]
    for values, arrays in pairs:
        for name in values.keys() & arrays.keys():
            values[name].copyto(arrays[name])
    for value, array in zip(old.outputs, new.outputs):
        value.copyto(array)


def _renew_store(modules: list[Module]) -> None:
    """Open another kvstore: a key keeps the dtype of its first array, which is the gradient's."""
    first = modules[0]
    store: Any = mx.kv.create(_mxnet.kvstore(first).type)
    with first.keys_as_gradients():
        for name in _mxnet.group(first).param_names:
            store.init(name, _mxnet.arg_params(first)[name])
    for module in modules:
        _mxnet.set_kvstore(module, store)
