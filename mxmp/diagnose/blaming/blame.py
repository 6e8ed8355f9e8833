"""``blame``: replay a batch, and name the first operator that made an inf or NaN."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ...callbacks import hold_interrupts
from ...gluon import Trainer, _mxnet
from ...precision.heads import SCALE_NAME, head_gradient, heads_scaled_by
from ...precision.record import Record
from ...step.step import ScaledStep
from ...symbolic import BucketingModule, Module
from ..watching.taps import tap_of
from .recording import Recording
from .report import Blame
from .verdict import verdict

__all__ = ["blame"]


def blame(
    target: Block | Module | BucketingModule,
    *given: Any,
    loss: Callable | None = None,
    loss_scale: float | None = None,
) -> Blame:
    """Replay a batch and name the first operator, in forward or backward order, that made an inf or NaN.

    ::

        trainer.step(batch_size)
        if trainer.last_step_skipped:
            print(mxmp.diagnose.blame(net, trainer, x, loss=lambda out: loss_fn(out, y)))

        module.update()
        if module.last_step_skipped:
            print(mxmp.diagnose.blame(module, batch))

    The replay runs the graph that trains, in training mode, at the loss scale of the last step where that was skipped,
    with today's weights, which a skipped step has not changed. Afterwards gradients, running statistics, loss scale
    and counters are what they were; dropout has drawn. Synchronizes.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer.
    *given
        For a net its Trainer and its inputs, on one device; for a module the DataBatch.
    loss : callable
        For a net: from what it returns to the loss, an NDArray or a list of them. What it does is not looked
        into; a net that contains its loss is.
    loss_scale : float, optional
        Replay at another scale.

    Returns
    -------
    Blame
        ``reproduced`` is False, and says what may be the reason, where everything was finite.

    Raises
    ------
    TypeError, ValueError
        Says what was expected.
    """
    if isinstance(target, Block):
        trainer, *inputs = given or (None,)
        if not callable(loss) or not inputs:
            raise TypeError(
                "of a net, blame takes the trainer, the inputs, and the loss as a function of what the net returns: "
                "blame(net, trainer, x, loss=lambda out: loss_fn(out, y))"
            )
        replay = _Replay(target, trainer, loss_scale)
        replay.run(lambda: _run_net(replay, target, inputs, loss))
    else:
        if len(given) != 1 or not hasattr(given[0], "data") or loss is not None:
            raise TypeError("of a module, blame takes the DataBatch that the step was given: blame(module, batch)")
        if isinstance(target, BucketingModule) and target.binded:
            target.switch_bucket(given[0].bucket_key, given[0].provide_data, given[0].provide_label)
        replay = _Replay(target, None, loss_scale)
        replay.run(lambda: _run_module(replay, given[0]))
    return verdict(replay.recording.met(), replay.tap.wirings, replay.params, replay.loss_scale)


class _Replay:
    """One forward and backward with a tap, and all that went by, in that order."""

    def __init__(self, target: Any, trainer: Trainer | None, loss_scale: float | None) -> None:
        self.recording = Recording()
        self.tap = tap_of(target, trainer, lambda seen, array: self.recording.note(seen.label, array, seen))
        self.loss_scale = _scale_of_last(self.tap.door.step) if loss_scale is None else float(loss_scale)
        self.params = [weight.name for weight in self.tap.door.weights()]

    def run(self, forward_and_backward: Callable[[], None]) -> None:
        self.recording.note_weights(self.tap.door.weights())
        with self.tap.door.undone(), autograd.pause():
            try:
                self.tap.arm()
                forward_and_backward()
            finally:
                self.tap.disarm()
            self.recording.note_gradients(self.tap.door.gradients())
        if not self.recording.of_operators:
            raise ValueError("no operator ran: the batch must have the shapes that the module is bound to")


def _run_net(replay: _Replay, net: Block, inputs: Sequence[Any], loss: Callable) -> None:
    """Forward, the loss apart from it, and both backwards: so the gradient that the loss sends back can be seen."""
    flat, structure = _mxnet.flatten(tuple(inputs))
    flat = [array if array is None else array.detach() for array in flat]
    for i, array in enumerate(flat):
        if array is not None:
            replay.recording.note(f"input {i}" if len(flat) > 1 else "the input", array)
    with autograd.record():
        out = net(*_mxnet.regroup(flat, structure))
    outs, made = _mxnet.flatten((out,))
    apart = [array.detach() for array in outs]
    for array in apart:
        array.attach_grad()
    with autograd.record():
        found = loss(_mxnet.regroup(apart, made)[0])
    losses = list(found) if isinstance(found, (list, tuple)) else [found]
    for each in losses:
        replay.recording.note("the loss", each)
    _backward(losses, [head_gradient(each, replay.loss_scale) for each in losses], replay.loss_scale)
    for array in apart:
        replay.recording.note("the gradient of the loss", array.grad)
    _backward(outs, [array.grad for array in apart], replay.loss_scale)


def _backward(heads: Sequence[NDArray], gradients: Sequence[NDArray], loss_scale: float) -> None:
    """With the graph retained: MXNet would forget of labels and others that the user's own recorded graph reads too."""
    with heads_scaled_by(loss_scale, Record(heads)), hold_interrupts():
        autograd.backward(heads, gradients, retain_graph=True)


def _run_module(replay: _Replay, batch: Any) -> None:
    module: Module = replay.tap.door.module  # type: ignore[union-attr]
    for names, arrays in ((module.data_names, batch.data), (module.label_names, batch.label)):
        for name, array in zip(names, arrays or ()):
            replay.recording.note(name, array)
    module.forward(batch, is_train=True)
    group = module._exec_group
    for executor in group.execs:
        if SCALE_NAME in executor.arg_dict:
            executor.arg_dict[SCALE_NAME][:] = replay.loss_scale
    group.backward([mx.nd.ones_like(out) * replay.loss_scale for out in module.get_outputs()])


def _scale_of_last(step: ScaledStep) -> float:
    """The scale of the last step where it was skipped, of the next one otherwise."""
    if not step.last_step_skipped:
        return step.loss_scale
    return [event.loss_scale for event in step.history if event.step <= step.steps][-1]
