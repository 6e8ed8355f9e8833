"""A converted net and its trainer, for what listens to them, replays a step or guards them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ..callbacks import hold_interrupts
from ..frontend import OTHER_WORKERS, GraphRun, Listener, Listeners, Note, unchanged
from ..policy import Policy
from ..step.gradients import Gradient
from ..step.masters import Weight
from ..step.step import ScaledStep
from . import _mxnet
from .hook import Hook, conversions_in, exclude_more, hook_of, hooks
from .parameter import weight_of
from .scaling import Record, head_gradient, heads_scaled_by
from .trainer import Trainer

__all__ = ["TrainedNet"]


class TrainedNet:
    """The converted blocks of a net, and the trainer that steps it: a ``TrainedNetwork``.

    Raises ``TypeError`` where ``trainer`` is no mxmp.Trainer, and ``ValueError`` where the net is not converted.
    """

    def __init__(self, net: Block, trainer: Any) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"pass the net's mxmp.Trainer, got {type(trainer).__module__}.{type(trainer).__name__}")
        self._net = net
        self._trainer = trainer
        if not self._hooks:
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first")
        self._listening: list[tuple] = []

    @property
    def _hooks(self) -> list[tuple[HybridBlock, Hook]]:
        return [(block, hook) for block, hook in hooks(self._net) if not hook.runs_as_python]

    @property
    def step(self) -> ScaledStep:
        return self._trainer.scaled_step

    @property
    def policy(self) -> Policy:
        return self._hooks[0][1].conversion.policy

    @property
    def is_planned(self) -> bool:
        return any(hook.conversion.plan is not None for _, hook in self._hooks)

    @property
    def gradient_scale(self) -> float:
        return 1.0 if self._trainer.progress.unscaled else self._trainer.loss_scale

    def weights(self) -> list[Weight]:
        return [weight_of(param) for param in _mxnet.parameters_of(self._trainer) if param.grad_req != "null"]

    def gradients(self) -> list[Gradient]:
        trained = [param for param in self._params() if param.grad_req != "null"]
        return [Gradient(param.name, grad) for param in trained for grad in param.list_grad()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        trained = [array for p in self._params() if p.grad_req != "null" for array in _mxnet.arrays(p)]
        running = [array for p in self._params() if p.grad_req == "null" for array in _mxnet.arrays(p)]
        stale = [array for array in trained if not _mxnet.is_fresh(array)]
        try:
            with unchanged([array for _, array in self.gradients()], running):
                yield
        finally:
            for array in stale:
                _mxnet.set_fresh(array, fresh=False)

    def _params(self) -> list[Parameter]:
        found = {id(p): p for p in [*_mxnet.parameters_of(self._trainer), *self._net.collect_params().values()]}
        return [param for param in found.values() if _mxnet.is_initialized(param)]

    def prepare(self, batch: Sequence[Any]) -> None:
        pass  # every block finds the graph for a call by itself

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run the net and then the loss by itself, and both backwards, to note the gradient that the loss returns."""
        flat, structure = _mxnet.flatten(tuple(batch))
        flat = [array if array is None else array.detach() for array in flat]
        for i, array in enumerate(flat):
            if array is not None:
                note(f"input {i}" if len(flat) > 1 else "the input", array)
        with autograd.record():
            out = self._net(*_mxnet.regroup(flat, structure))
        outs, made = _mxnet.flatten((out,))
        apart = [array.detach() for array in outs]
        for array in apart:
            array.attach_grad()
        with autograd.record():
            found = loss(_mxnet.regroup(apart, made)[0])  # type: ignore[misc]
        losses = list(found) if isinstance(found, (list, tuple)) else [found]
        for each in losses:
            note("the loss", each)
        _backward(losses, [head_gradient(each, loss_scale) for each in losses], loss_scale)
        for array in apart:
            note("the gradient of the loss", array.grad)
        _backward(outs, [array.grad for array in apart], loss_scale)

    def graphs(self, place: Hook) -> Iterator[GraphRun]:
        for key, built in list(place.graphs.items()):
            if key.training:
                yield GraphRun(built, built.op.symbol, built.plan)

    def count_graphs(self, place: Hook) -> int:
        return sum(key.training for key in place.graphs)

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        for block, hook in self._hooks:
            monitor = _mxnet.monitor(block) or (Listeners(), False)
            if not isinstance(monitor[0], Listeners):
                raise ValueError(f"{block.name!r} has an op hook (register_op_hook), and MXNet calls one callback only")
            listener = _in_training(listener_at(hook))
            monitor[0].add(listener)
            self._listening.append((block, hook, monitor, listener))
            _mxnet.set_monitor(block, monitor)

    def stop_listening(self) -> None:
        for block, hook, monitor, listener in self._listening:
            monitor[0].remove(listener)
            if monitor[0].idle:
                if _mxnet.monitor(block) == monitor:
                    _mxnet.set_monitor(block, None)
                for built in hook.graphs.values():
                    built.op.forget(monitor)
        self._listening = []

    @property
    def is_stale(self) -> bool:
        return any(hook_of(block) is not hook for block, hook, _, _ in self._listening)

    def check_excludable(self) -> None:
        if self._trainer.has_other_workers:
            raise ValueError(OTHER_WORKERS)
        if conversions_in(self._net)[1]:
            raise ValueError(f"{self._net.name!r} is a part of a net that was converted as a whole: pass that net")

    def exclude(self, nodes: Collection[str]) -> None:
        exclude_more(self._net, nodes)
        trainers = [_mxnet.trainer_of(param) for param in self._params()]
        for trainer in {id(each): each for each in trainers if isinstance(each, Trainer)}.values():
            trainer.renew_store()


def _in_training(listener: Listener) -> Listener:
    def called(name: str, array: NDArray) -> None:
        if autograd.is_training():
            listener(name, array)

    return called


def _backward(heads: Sequence[mx.nd.NDArray], gradients: Sequence[NDArray], loss_scale: float) -> None:
    """Run backward and keep the graph: freeing it would free labels that the user's own recorded graph reads too."""
    with heads_scaled_by(loss_scale, Record(heads)), hold_interrupts():
        autograd.backward(heads, gradients, retain_graph=True)
