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


class TrainedModule:
    """A module in training, as ``watch``, ``blame`` and ``guard`` use it; implements ``frontend.TrainedNetwork``.

    For a ``BucketingModule``, methods act on the current bucket's module unless they say otherwise. The argument
    ``place`` is one of the module's executors, of which it has one per device.

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
        return _mxnet.current(self._target) if isinstance(self._target, BucketingModule) else self._target

    @property
    def step(self) -> ScaledStep:
        """Return the module's ``ScaledStep``: it applies or skips updates and keeps loss scale and counters."""
        return self._target.scaled_step

    @property
    def policy(self) -> Policy:
        """Return the policy of the module, or of its Plan; ``policy.exclude`` has what ``exclude()`` was given, too."""
        return self._module.policy

    @property
    def is_planned(self) -> bool:
        """Return True if a Plan that the user gave decides the dtypes, False if the rules do so under a policy."""
        return self._module.core.conversion.plan is not None

    @property
    def gradient_scale(self) -> float:
        """Return the loss scale of the last backward, which multiplied the executors' gradients; 1 before the first."""
        return self._module.core.scaled_by

    def weights(self, *, frozen: bool = False) -> list[Weight]:
        """Return a ``Weight`` for each trained parameter, with its arrays and master weights on all devices.

        With ``frozen=True``, return also those of parameters that have no gradient. Auxiliary states are left out.
        """
        arrays = self._module.arrays()
        gradients = _mxnet.group(self._module).grad_arrays
        trained = {name for name, grads in zip(arrays, gradients) if frozen or grads[0] is not None}
        return [weight for weight in self._module.core.weights(arrays) if weight.name in trained]

    def gradients(self) -> list[Gradient]:
        """Return one ``Gradient`` per trained parameter and device: the executor's array, as the backward wrote it.

        Their values are still multiplied by ``gradient_scale``, the loss scale of that backward.
        """
        group = _mxnet.group(self._module)
        pairs = zip(group.param_names, group.grad_arrays)
        return [Gradient(name, array) for name, arrays in pairs for array in arrays if array is not None]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Let the ``with`` block run batches, and restore gradients and auxiliary states when it ends.

        Sets all gradients to zero first, so that with ``grad_req="add"`` the batches do not add to the gradients of the
        training. Waits for the device when the block ends.
        """
        executors = _mxnet.group(self._module).execs
        written = [array for each in executors for array in each.grad_arrays if array is not None]
        with unchanged(written, [array for each in executors for array in each.aux_arrays]):
            yield

    def prepare(self, batch: Sequence[Any], loss: Callable | None) -> None:
        """Switch a ``BucketingModule`` to the bucket of a batch, and the module to its shapes, as ``forward`` would.

        ``batch`` is a list of one ``DataBatch``; ``loss`` is not used: a module's loss is in its Symbol. Call it before
        ``listen``, which acts on the current bucket and its executors only.
        """
        (data,) = batch
        if isinstance(self._target, BucketingModule):
            self._target.switch_bucket(data.bucket_key, data.provide_data, data.provide_label)
        if [desc.shape for desc in self._module.data_shapes] != [array.shape for array in data.data]:
            self._module.forward(data, is_train=False)  # MXNet makes the executors for other shapes there

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run one forward and one backward of a batch on all devices, without an update, to see the tensors of a step.

        Parameters
        ----------
        batch : list of one DataBatch
        loss
            Not used: the loss of a module is in its Symbol.
        loss_scale : float
            Multiplies the gradients that loss heads write. The backward of all other outputs starts from a gradient in
            which every element is this number.
        note : callable
            Called before the forward as ``note(name, array)``, once for each input and label. The array is that of the
            whole batch, not the part of one device.
        """
        (data,), module = batch, self._module
        for names, arrays in ((module.data_names, data.data), (module.label_names, data.label)):
            for name, array in zip(names, arrays or ()):
                note(name, array)
        module.forward(data, is_train=True)
        module.set_head_scale(loss_scale)
        _mxnet.group(module).backward([mx.nd.ones_like(out) * loss_scale for out in module.get_outputs()])

    def graphs(self, place: mx.executor.Executor) -> Iterator[GraphRun]:
        """Yield a ``GraphRun`` for the one graph of the executor ``place``.

        It has the Symbol with casts, the plan by which that Symbol was made, and which variables have a gradient.
        """
        gradients, plan = place.grad_dict, self._module.plan
        if plan is not None:
            yield GraphRun(place, _mxnet.symbol_of(place), plan, lambda name: gradients.get(name) is not None)

    def count_graphs(self, place: mx.executor.Executor) -> int:
        """Return how many graphs run at ``place``: always 1, since an executor has one graph."""
        return 1

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        """Call listeners with the outputs and gradients of all operators in training, until ``stop_listening``.

        Each executor of the current bucket that has no listener yet is first replaced by a second one, of the same
        graph and arrays, that has a callback and runs operator by operator. Then ``listener_at(executor)`` is called
        once for each device, with the executor that runs from now on. The listener that it returns is called as
        ``listener(name, array)`` with what MXNet's monitor reports of the Symbol with casts: tensors of casts too, in
        their own dtype, and gradients multiplied by the loss scale.
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
        """Remove the listeners that this object added, and use the original executors again where no listener is left.

        Copies the outputs of the last batch into the original executors, since a metric may read them there. An
        executor that MXNet has made since ``listen``, as for a batch of another size, stays in its place.
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
        """Return whether an executor with a listener of this object was replaced, so that its tensors are missed.

        MXNet makes new executors for a batch of another size, and when the module is bound again.
        """
        return any(_mxnet.group(module).execs[i] is not each for module, i, each, _ in self._listening)

    def check_excludable(self) -> None:
        """Raise ``ValueError`` if several workers train: ``exclude`` would change the dtypes in this worker alone."""
        if self._module.has_other_workers:
            raise ValueError(OTHER_WORKERS)

    def exclude(self, nodes: Collection[str]) -> None:
        exclude_operators(self._target, self._module, nodes)


def exclude_operators(target: Module | BucketingModule, current: Module, nodes: Collection[str]) -> None:
    """Keep operators in FP32 from the next forward on, in all buckets. Call it between two steps.

    ``nodes`` are the names of these operators in the FP32 Symbol; they are added to the policy's ``exclude``, which
    also overrules a Plan. ``current`` is the module of the current bucket of ``target``. All buckets are bound again
    with that policy, and so are all modules that share the parameters by ``shared_module``. Parameters, master weights,
    auxiliary states, optimizer states and outputs keep their values, gradients are lost. The user must install the
    ``mx.mon.Monitor`` of a ``Module`` again; that of a ``BucketingModule`` is installed again here.
    """
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
        _mxnet.mark_dirty(each)
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
