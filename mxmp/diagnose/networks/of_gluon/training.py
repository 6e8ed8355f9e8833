"""A converted net and its trainer, as the diagnostics ``watch``, ``blame`` and ``guard`` use them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter
from mxnet.ndarray import NDArray

from ....gluon import _mxnet
from ....gluon.backward import head_gradient
from ....gluon.blocks import blocks_of
from ....gluon.conversion import NetConversion
from ....gluon.hook import Hook, conversions_in, exclude_more, hooks
from ....gluon.nesting import joined, nested, nesting_of, split
from ....gluon.parameter import conversions_of, weight_of
from ....gluon.record import IS_A_COPY, Record
from ....gluon.scaled_heads import heads_scaled_by
from ....gluon.scaling import living_trainers
from ....gluon.trainer import Trainer
from ....host.callbacks import hold_interrupts
from ....messages.text import class_of
from ....observed import with_gradients_of_outputs
from ....policy import Policy
from ....precision.monitoring import Listener, Listeners
from ....step.gradients import Gradient, listed
from ....step.masters import Weight
from ....step.step import ScaledStep
from ..protocol import OTHER_WORKERS, GraphRun, Note, in_training, restored, unchanged
from ._mxnet import set_monitor
from .undoing import undone


class TrainedNet:
    """A converted net and the mxmp.Trainer that updates it; implements ``protocol.TrainedNetwork``.
    A place, an object that runs graphs, is the hook of a converted block."""

    def __init__(self, net: Block, trainer: Any) -> None:
        if not isinstance(trainer, Trainer):
            got = "" if trainer is None else f", got {class_of(trainer)}"
            raise TypeError(
                f"pass the net's mxmp.Trainer too{got}: the net comes first, then the "
                "trainer, as in watch(net, trainer)"
            )
        self._net = net
        self._trainer = trainer
        if not self._hooks:
            raise ValueError(f"{net.name!r} is not converted: call mxmp.convert(net) first")
        self._listening: list[tuple] = []
        self._loss: Callable | None = None  # that of the replays
        self._read: Collection[str] = ()  # what the loss of the last replay read, by the names that autograd gave it

    @property
    def _hooks(self) -> list[tuple[HybridBlock, Hook]]:
        """Return ``(block, hook)`` for each converted block of the net, but not for those that run as Python code."""
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
        return 1.0 if self._trainer.ledger.unscaled else self._trainer.loss_scale

    def weights(self, *, frozen: bool = False) -> list[Weight]:
        found = [param for param in _mxnet.parameters_of(self._trainer) if param.grad_req != "null"]
        if frozen:
            found += [p for p in self._params() if p.grad_req == "null" and _mxnet.is_differentiable(p)]
        return [weight_of(param) for param in found]

    def gradients(self) -> list[Gradient]:
        trained = [param for param in self._params() if param.grad_req != "null"]
        return [Gradient(param.name, grad) for param in trained for grad in param.list_grad()]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Set all gradients to zero; after the block restore them, MXNet's fresh marks, the other parameters and what
        the net's code sets. Waits for the device before and after the block."""
        trained = [array for p in self._params() if p.grad_req != "null" for array in _mxnet.arrays(p)]
        running = [array for p in self._params() if p.grad_req == "null" for array in _mxnet.arrays(p)]
        stale = [array for array in trained if not _mxnet.is_fresh(array)]
        self._read = ()
        of_others = [array for p in _all_trained() if p.grad_req == "null" for array in _mxnet.arrays(p)]
        gradients = [array for _, array in self.gradients()]

        def is_read(array: NDArray) -> bool:  # by the loss; another thread may train the others
            return _mxnet.recorded_name(array) in self._read

        try:
            with undone(self._net, self._loss), restored(of_others, is_read), unchanged(gradients, running):
                yield
        finally:
            for array in stale:
                _mxnet.set_fresh(array, fresh=False)

    def _params(self) -> list[Parameter]:
        """Return the initialized parameters of the trainer and of the net, each once."""
        found = {id(p): p for p in [*_mxnet.parameters_of(self._trainer), *self._net.collect_params().values()]}
        return [param for param in found.values() if _mxnet.is_initialized(param)]

    def prepare(self, batch: Sequence[Any], loss: Callable | None) -> None:
        self._loss = loss
        for param in self._params():
            if param.grad_req != "null" and any(array.grad is None for array in _mxnet.arrays(param)):
                raise ValueError(f"{param.name!r} has no gradients: {IS_A_COPY}")
        # Makes graphs, and so the float16 arrays that ``unchanged`` is to restore.
        if not any(hook.graphs for _, hook in self._hooks):
            with undone(self._net), autograd.pause(train_mode=False):
                self._net(*batch)
        if any(map(_mxnet.is_deferred, _all_trained())):
            # In training mode, where the output may be nested in another way; recorded, since a loss may need that.
            with self.unchanged(), autograd.record():
                out = self._net(*batch)
                with autograd.predict_mode():
                    loss(out)  # type: ignore[misc]

    def replay(self, batch: Sequence[Any], loss: Callable | None, loss_scale: float, note: Note) -> None:
        """Run one forward and backward of ``batch``; gradients, noted ones too, are multiplied by ``loss_scale``.
        The names for ``note``: ``"the input"`` or ``"input 0"``; ``"the loss"``; ``"the gradient of the loss"``, also
        ``"... with respect to fc_weight"`` for a parameter that ``loss`` itself reads."""
        args, constants = split(batch)
        flat, structure = _mxnet.flatten(args)
        flat = [array if array is None else array.detach() for array in flat]
        for i, array in enumerate(flat):
            if array is not None:
                note(f"input {i}" if len(flat) > 1 else "the input", array)
        with autograd.record():
            out = self._net(*joined(_mxnet.regroup(flat, structure), constants))
        outs: list[NDArray] = []
        nesting = nesting_of(out, outs)
        apart = [array.detach() for array in outs]
        for array in apart:
            array.attach_grad()
        # A backward each for net and loss: the gradient with respect to the net's output cannot be read otherwise.
        with autograd.record():
            found = loss(nested(nesting, apart))  # type: ignore[misc]
        losses = listed(found)
        for each in losses:
            note("the loss", each)
        record = Record(losses)
        self._read = record.leaves
        # Not a backward, which would also write the gradients of other nets that the loss calls.
        own = {id(a): (p.name, a) for p in self._params() if p.grad_req != "null" for a in _mxnet.arrays(p)}
        read = [a for a in [*apart, *(a for _, a in own.values())] if _mxnet.recorded_name(a) in self._read]
        heads = [head_gradient(each, loss_scale) for each in losses]
        with heads_scaled_by(loss_scale, record), hold_interrupts():
            sent = dict(zip(map(id, read), autograd.grad(losses, read, heads, retain_graph=True))) if read else {}
        gradients = [sent.pop(id(array), array.grad) for array in apart]
        for gradient in gradients:
            note("the gradient of the loss", gradient)
        for key, gradient in sent.items():  # the loss itself reads the parameter, as a penalty does
            note(f"the gradient of the loss with respect to {own[key][0]}", gradient)
        sources = [*zip(outs, gradients), *((own[key][1], gradient) for key, gradient in sent.items())]
        sources = [(array, gradient) for array, gradient in sources if _mxnet.recorded_name(array) is not None]
        record = Record([array for array, _ in sources])
        if not any(_mxnet.recorded_name(array) in record.leaves for _, array in own.values()):
            return  # all that the net computes with is frozen
        with heads_scaled_by(loss_scale, record), hold_interrupts():
            # Without retain_graph MXNet would free labels that a graph which the user has recorded still reads.
            autograd.backward(*map(list, zip(*sources)), retain_graph=True)

    def graphs(self, place: Hook) -> Iterator[GraphRun]:
        for key, built in list(place.graphs.items()):
            if key.call.training:
                yield GraphRun(built, with_gradients_of_outputs(built.op.symbol), built.plan)

    def count_graphs(self, place: Hook) -> int:
        return sum(key.call.training for key in place.graphs)

    def listen(self, listener_at: Callable[[Any], Listener]) -> None:
        monitors = [_mxnet.monitor(block) or (Listeners(), False) for block, _ in self._hooks]
        for (block, _), monitor in zip(self._hooks, monitors):
            if not isinstance(monitor[0], Listeners):
                raise ValueError(f"{block.name!r} has an op hook (register_op_hook), and MXNet calls one callback only")
        for (block, hook), monitor in zip(self._hooks, monitors):
            listener = in_training(listener_at(hook), autograd.is_training)
            monitor[0].add(listener)
            self._listening.append((block, hook, monitor, listener))
            set_monitor(block, monitor)

    def stop_listening(self) -> None:
        for block, hook, monitor, listener in self._listening:
            monitor[0].remove(listener)
            if monitor[0].idle:
                if _mxnet.monitor(block) == monitor:
                    set_monitor(block, None)
                for built in hook.graphs.values():
                    built.op.forget(monitor)
        self._listening = []

    @property
    def is_stale(self) -> bool:
        return [hook for _, hook in self._hooks] != [hook for _, hook, _, _ in self._listening]

    def check_excludable(self) -> None:
        complete = check_exclusion(self._net, [self._trainer])
        for param in self._net.collect_params().values():
            # Such a parameter may be stored anew; another net's graphs would not know of it, and another trainer may
            # have gradients to apply.
            if not any(self.policy.stores_low(ctx.device_type) for ctx in _mxnet.contexts(param)):
                continue
            if param.grad_req != "null" and _mxnet.trainer_of(param) not in (self._trainer, None):
                other = "is updated by another trainer than the one given"
            elif any(conversion not in complete for conversion in conversions_of([param])):
                other = "is shared with another converted net"
            else:
                continue
            raise ValueError(
                f"{param.name!r} may be stored in float16, and {other}: a layer that moves to FP32 would be stored "
                "anew between its steps. Convert with params='float32', or guard a net whose parameters are its own"
            )

    def exclude(self, nodes: Collection[str]) -> None:
        exclude_operators(self._net, nodes)


def _all_trained() -> list[Parameter]:
    """Return the parameters of all living trainers, which a loss may read."""
    return [param for trainer in list(living_trainers) for param in _mxnet.parameters_of(trainer)]


def trainers_of(net: Block) -> list[Trainer]:
    """Return the mxmp.Trainers that update parameters of ``net``, each once."""
    found = [_mxnet.trainer_of(param) for param in net.collect_params().values()]
    return list({id(each): each for each in found if isinstance(each, Trainer)}.values())


def check_exclusion(net: Block, trainers: Iterable[Trainer]) -> list[NetConversion]:
    """Return the conversions of a net to which ``exclude_operators`` applies; raise ``ValueError`` if it cannot."""
    if any(trainer.has_other_workers for trainer in trainers):
        raise ValueError(OTHER_WORKERS)
    complete, partial = conversions_in(blocks_of(net))
    if partial:
        raise ValueError(
            f"{net.name!r} is a part of a net that was converted as a whole, or shares a block with one: pass that net"
        )
    return complete


def exclude_operators(net: Block, nodes: Collection[str]) -> None:
    """Keep ``nodes`` of ``net`` in FP32 too, from the next forward on. Call this between two steps."""
    exclude_more(net, nodes)
    # A kvstore accepts the gradient of a parameter only in the dtype of the first gradient.
    for trainer in trainers_of(net):
        trainer.renew_store()
