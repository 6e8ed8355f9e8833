"""A module that trains, as diagnostics use it; and the exclusion of operators while it trains."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Collection, Iterator, Sequence

import mxnet as mx

from ....policy import Policy
from ....precision.monitoring import Listener, Listeners
from ....step.gradients import Gradient
from ....step.masters import Weight
from ....step.python_operators import true_gradients
from ....step.step import ScaledStep
from ....symbolic import _mxnet
from ....symbolic.bucketing import BucketingModule
from ....symbolic.module import Module
from ..protocol import OTHER_WORKERS, GraphRun, Note, in_training, restored, unchanged
from ._mxnet import copy_with_callback, is_training, mark_dirty


class TrainedModule:
    """A module in training, as ``watch``, ``blame`` and ``guard`` use it; implements ``protocol.TrainedNetwork``.
    Methods act on the current bucket's module. ``place`` is one of its executors, one per device."""

    def __init__(self, module: Module | BucketingModule) -> None:
        if not module.optimizer_initialized:
            raise ValueError("the module has no optimizer yet: bind, init_params and init_optimizer first")
        self._target = module
        self._listening: list[tuple] = []
        self._waiting: Callable[[], None] | None = None  # what ``listen`` does, perhaps at the next forward

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
        return self.step.ledger.scale  # 1 before the first backward

    def weights(self, *, frozen: bool = False) -> list[Weight]:
        arrays = self._module.arrays()
        gradients = _mxnet.group(self._module).grad_arrays
        trained = {name for name, grads in zip(arrays, gradients) if frozen or grads[0] is not None}
        return [weight for weight in self._module.core.weights(arrays) if weight.name in trained]

    def gradients(self) -> list[Gradient]:
        group = _mxnet.group(self._module)
        pairs = zip(group.param_names, group.grad_arrays)
        return [Gradient(name, array) for name, arrays in pairs for array in arrays if array is not None]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """As of the protocol; also restore inputs and outputs, and repeat a forward that awaits its backward."""
        group, awaits = _mxnet.group(self._module), self._module.awaits_backward
        parameters, executors = {*group.param_names}, list(group.execs)
        written = [array for each in executors for array in each.grad_arrays if array is not None]
        states = [array for each in executors for array in each.aux_arrays]
        read = [a for each in executors for name, a in each.arg_dict.items() if name not in parameters]
        outputs = [array for each in executors for array in each.outputs]
        try:
            with restored(outputs if not awaits else states):
                with unchanged(written, [*states, *read]):
                    yield
                for executor in executors if awaits else ():
                    executor.forward(is_train=True)
                mx.nd.waitall()
        finally:
            self._module.awaits_backward = awaits
            if not awaits:
                self._module.call_before_forward()

    def prepare(self, batch: Sequence[Any], loss: Callable | None) -> None:
        """Switch to the bucket of a batch, and to its shapes, as ``forward`` would; call it before ``listen``."""
        (data,) = batch
        if isinstance(self._target, BucketingModule):
            self._target.switch_bucket(data.bucket_key, data.provide_data, data.provide_label)
        if [desc.shape for desc in self._module.data_shapes] != [array.shape for array in data.data]:
            self._module.forward(data, is_train=False)  # MXNet makes the executors for other shapes there

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        (data,), module = batch, self._module
        for names, arrays in ((module.data_names, data.data), (module.label_names, data.label)):
            for name, array in zip(names, arrays or ()):
                note(name, array)
        module.forward(data, is_train=True)
        # Of the outputs that are no loss heads, the backward starts from the loss scale in every element.
        module.set_head_scale(loss_scale)
        with true_gradients(loss_scale):
            for executor in _mxnet.group(module).execs:
                executor.backward([mx.nd.ones_like(out) * loss_scale for out in executor.outputs])
        module.awaits_backward = False

    def graphs(self, place: mx.executor.Executor) -> Iterator[GraphRun]:
        gradients, plan = place.grad_dict, self._module.plan
        if plan is not None:
            yield GraphRun(place, _mxnet.symbol_of(place), plan, lambda name: gradients.get(name) is not None)

    def count_graphs(self, place: mx.executor.Executor) -> int:
        return 1

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Call ``listener(name, array)`` with all tensors of the Symbol with casts in training.
        Until ``stop_listening``, executors are replaced by copies that have a callback and run operator by operator."""
        if self._module.is_monitored:
            raise ValueError(
                "the module has a mx.mon.Monitor, and MXNet calls one callback only: take it off by "
                "bind(..., force_rebind=True)"
            )
        self._waiting = partial(self._install, self._module, listener_at)
        _when_backward_is_done(self._module, self._waiting)

    def _install(self, module: Module, listener_at: Callable[[Any], Listener]) -> None:
        execs, twins = _mxnet.group(module).execs, module.core.listening_executors
        for i, executor in enumerate(execs):
            if executor not in twins:
                listeners = Listeners()
                execs[i] = copy_with_callback(executor, listeners)
                for ours, theirs in zip(executor.outputs, execs[i].outputs):  # of the last batch
                    ours.copyto(theirs)
                twins[execs[i]] = listeners, executor
            listener = in_training(listener_at(execs[i]), partial(is_training, execs[i]))
            twins[execs[i]][0].add(listener)
            self._listening.append((module, i, execs[i], listener))

    def stop_listening(self) -> None:
        for module in self._module.core.modules:
            module.before_forward[:] = [each for each in module.before_forward if each is not self._waiting]
        for module, i, each, listener in self._listening:
            module.core.listening_executors[each][0].remove(listener)
            _when_backward_is_done(module, partial(_put_back, module, i, each))
        self._listening = []

    @property
    def is_stale(self) -> bool:
        return any(_mxnet.group(module).execs[i] is not each for module, i, each, _ in self._listening)

    def check_excludable(self) -> None:
        if self._module.has_other_workers:
            raise ValueError(OTHER_WORKERS)

    def exclude(self, nodes: Collection[str]) -> None:
        exclude_operators(self._target, self._module, nodes)


def _when_backward_is_done(module: Module, call: Callable[[], None]) -> None:
    """Call now, or at the next forward where a backward is to come: masks and states of Dropout and RNN belong to the
    executor that has run the forward, and another one crashes or has wrong gradients."""
    if module.awaits_backward:
        module.before_forward.append(call)
    else:
        call()


def _put_back(module: Module, position: int, twin: mx.executor.Executor) -> None:
    """Put the fast executor back in place of one that nobody listens to any more."""
    (listeners, executor), execs = module.core.listening_executors[twin], _mxnet.group(module).execs
    # After a batch of another size, or another bind, MXNet's new executor stays.
    if listeners.idle and execs[position] is twin:
        for ours, theirs in zip(twin.outputs, executor.outputs):  # a metric may read those of the last batch
            ours.copyto(theirs)
        execs[position] = executor


def exclude_operators(target: Module | BucketingModule, current: Module, nodes: Collection[str]) -> None:
    """Keep operators, by their names in the FP32 Symbol, in FP32 from the next forward on, in all buckets.
    All values but gradients stay. The user must install the ``mx.mon.Monitor`` of a ``Module`` again."""
    core = current.core
    # Modules that share parameters, and so running statistics, have one list of these.
    first, *others = bound = [each for each in core.modules if each.running is current.running]
    trained, low_names = [each for each in bound if each.optimizer_initialized], core.low_names
    # Not the mean over devices, as for checkpoints: that of equal values can be off by a bit.
    weights = {weight.name: list(weight.masters or weight.arrays) for weight in core.weights(first.arrays())}
    core.conversion.exclude(nodes)
    first.rebind(None)
    for module in others:
        module.rebind(first)
    first.remake_masters(weights)
    for each in (target, *trained):
        mark_dirty(each)
    if core.low_names != low_names:
        for k, module in enumerate(trained):
            owner = next((each for each in trained[:k] if module.has_optimizer_of(each)), None)
            if owner is None:
                module.renew_store()
            else:
                module.borrow_optimizer(owner)
    monitor = _mxnet.monitor_of(target) if isinstance(target, BucketingModule) else None
    for module in bound if monitor is not None else ():
        module.install_monitor(monitor)
