"""A module that trains, as diagnostics use it; and the exclusion of operators while it trains."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Collection, Iterator, Sequence

import mxnet as mx

from ..frontend import OTHER_WORKERS, GraphRun, Listener, Listeners, Note, in_training, unchanged
from ..policy import Policy
from ..step.gradients import Gradient
from ..step.masters import Weight
from ..step.step import ScaledStep
from . import _mxnet
from .bucketing import BucketingModule
from .module import Module

__all__ = ["TrainedModule"]


class TrainedModule:
    """A module in training as ``watch``, ``blame`` and ``guard`` see it; implements ``frontend.TrainedNetwork``.

    Of a ``BucketingModule`` it is always the current bucket's module, but where a method says otherwise. A *place*, of
    which several methods speak, is one executor: there is one per device.

    Raises
    ------
    ValueError
        The module has no optimizer yet, so it cannot make a training step.
    """

    def __init__(self, module: Module | BucketingModule) -> None:
        if not module.optimizer_initialized:
            raise ValueError("the module has no optimizer yet: bind, init_params and init_optimizer first")
        self._target = module
        self._listening: list[tuple] = []

    @property
    def _module(self) -> Module:
        """Return the ``Module`` that this object is made for; of a ``BucketingModule`` the current bucket's."""
        return _mxnet.current(self._target) if isinstance(self._target, BucketingModule) else self._target

    @property
    def step(self) -> ScaledStep:
        """Return the object that checks the module's gradients and has its scaler and its counters of steps."""
        return self._target.scaled_step

    @property
    def policy(self) -> Policy:
        """Return the policy of the module, or the policy that its Plan was made for."""
        return self._module.policy

    @property
    def is_planned(self) -> bool:
        """Return whether the dtypes come from a Plan that the user gave, and not from the rules alone."""
        return self._module.core.conversion.plan is not None

    @property
    def gradient_scale(self) -> float:
        """Return the loss scale of the last backward, by which the gradients in the executors are too large."""
        return self._module.core.scaled_by

    def weights(self) -> list[Weight]:
        """Return the parameters that have a gradient, with their arrays and master weights on every device."""
        arrays = self._module.arrays()
        gradients = _mxnet.group(self._module).grad_arrays
        trained = {name for name, grads in zip(arrays, gradients) if grads[0] is not None}
        return [weight for weight in self._module.core.weights(arrays) if weight.name in trained]

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each parameter on each device, still multiplied by ``gradient_scale``."""
        group = _mxnet.group(self._module)
        pairs = zip(group.param_names, group.grad_arrays)
        return [Gradient(name, array) for name, arrays in pairs for array in arrays if array is not None]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Set all gradients to zero for the ``with`` block; restore them and the auxiliary states after it.

        A diagnosis runs batches again in the block. Afterwards waits for the device.
        """
        executors = _mxnet.group(self._module).execs
        written = [array for each in executors for array in each.grad_arrays if array is not None]
        with unchanged(written, [array for each in executors for array in each.aux_arrays]):
            yield

    def prepare(self, batch: Sequence[Any]) -> None:
        """Switch a ``BucketingModule`` to the bucket of a batch; do nothing for a ``Module``.

        ``batch`` is a list of one ``DataBatch``. Call it before ``listen``, which is for the current bucket.
        """
        if isinstance(self._target, BucketingModule):
            (data,) = batch
            self._target.switch_bucket(data.bucket_key, data.provide_data, data.provide_label)

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run one forward and one backward of a batch on all devices, without an update.

        Parameters
        ----------
        batch : list of one DataBatch
        loss
            Is ignored: the loss of a module is in its Symbol.
        loss_scale : float
            Multiplies the gradients that loss heads write. All other outputs get it as their gradient.
        note : callable
            Called with the name and the array of each input and label.
        """
        (data,), module = batch, self._module
        for names, arrays in ((module.data_names, data.data), (module.label_names, data.label)):
            for name, array in zip(names, arrays or ()):
                note(name, array)
        module.forward(data, is_train=True)
        module.set_head_scale(loss_scale)
        _mxnet.group(module).backward([mx.nd.ones_like(out) * loss_scale for out in module.get_outputs()])

    def graphs(self, place: mx.executor.Executor) -> Iterator[GraphRun]:
        """Yield the one graph that an executor runs, with the plan that it follows and which variables have gradients.

        Yields nothing before ``bind``.
        """
        gradients, plan = place.grad_dict, self._module.plan
        if plan is not None:
            yield GraphRun(place, _mxnet.symbol_of(place), plan, lambda name: gradients.get(name) is not None)

    def count_graphs(self, place: mx.executor.Executor) -> int:
        """Return how many graphs run at a place: always 1, since an executor has one graph."""
        return 1

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Let each executor of the current bucket call a listener with the outputs and gradients of all operators.

        Not with those of an inference. ``listener_at(executor)`` returns the listener, ``listener(name, array)``. An
        executor that has no listener yet is replaced by one with a callback, which runs operator by operator, until
        ``stop_listening``.
        """
        module, execs = self._module, _mxnet.group(self._module).execs
        twins = module.core.listening_executors
        for i, executor in enumerate(execs):
            if executor not in twins:
                listeners = Listeners()
                execs[i] = _mxnet.copy_with_callback(executor, listeners)
                twins[execs[i]] = listeners, executor
            listener = in_training(listener_at(execs[i]), partial(_mxnet.is_training, execs[i]))
            twins[execs[i]][0].add(listener)
            self._listening.append((module, i, execs[i], listener))

    def stop_listening(self) -> None:
        """Remove the listeners that ``listen`` added, and put back the executors that have no other listener.

        An executor that is put back gets the outputs of the one that it replaces, since a metric may read them.
        """
        for module, i, each, listener in self._listening:
            (listeners, executor), execs = module.core.listening_executors[each], _mxnet.group(module).execs
            listeners.remove(listener)
            # After a batch of another size, or another bind, MXNet's new executor stays.
            if listeners.idle and execs[i] is each:
                for ours, theirs in zip(each.outputs, executor.outputs):
                    ours.copyto(theirs)
                execs[i] = executor
        self._listening = []

    @property
    def is_stale(self) -> bool:
        """Return whether executors that have the listeners of ``listen`` were replaced, so that tensors were missed.

        MXNet replaces them for a batch of another size, and when the module is bound again.
        """
        return any(_mxnet.group(module).execs[i] is not each for module, i, each, _ in self._listening)

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if several workers train the module: ``exclude`` would then change one of them alone."""
        if self._module.has_other_workers:
            raise ValueError(OTHER_WORKERS)

    def exclude(self, nodes: Collection[str]) -> None:
        """Keep these operators in FP32 from the next forward on, in all buckets. Call it between two steps.

        ``nodes`` are names of operators in the FP32 Symbol, which are added to the policy's ``exclude``. All buckets
        are bound again with that policy; parameters, master weights, auxiliary states, optimizer states and outputs
        keep their values. A ``mx.mon.Monitor`` of a ``Module`` must be installed again; a ``BucketingModule`` installs
        its own again.
        """
        target = self._target
        modules = list(target.modules.values()) if isinstance(target, BucketingModule) else [target]
        first, *others = bound = [module for module in modules if module.binded]
        core, low_names = first.core, first.core.low_names
        # Not the mean over devices, as for checkpoints: that of equal values can be off by a bit.
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
