"""``blame``: replay a batch, and name the first operator that made an inf or NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from mxnet import autograd
from mxnet.gluon import Block

from ...observed import ObservedGraph
from ..networks.frontends import Network, replayed_network, trained_network
from ..networks.probe import Probe
from .cure import tried
from .recording import Recording
from .report import Blame
from .verdict import verdict


def blame(target: Network, *args: Any, loss: Callable | None = None, loss_scale: float | None = None) -> Blame:
    """Replay a training step and name the first operator, in forward or backward order, that made an inf or NaN.

    ::

        trainer.step(batch_size)
        if trainer.last_step_skipped:
            print(mxmp.diagnose.blame(net, trainer, x, loss=lambda out: loss_fn(out, y)))

        module.update()
        if module.last_step_skipped:
            print(mxmp.diagnose.blame(module, batch))

    The replay is one forward and backward of the batch in training mode; where a gradient overflows, there is another
    one at a loss scale of 2**-14, which shows whether a lower scale avoids that. It runs the same converted graphs as a
    training step, with the weights as they are now; a skipped step has not changed them. Gradients, running statistics,
    loss scale and counters are the same afterwards, also those of other nets with an mxmp.Trainer that ``loss`` calls,
    such as the discriminator of a GAN; but if ``loss`` calls a net without an mxmp.Trainer, BatchNorm's running
    statistics in it change. So is what Python code of net and ``loss`` changes: attributes, arrays, lists, globals, and
    Python's and NumPy's random state. A module stays bound to the shapes of the batch, as after a forward of it.
    Dropout draws new random numbers from MXNet. Waits for the device.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer.
    *args
        For a net: its Trainer, and then the inputs of the net, on one device. For a module: the DataBatch.
    loss : callable, optional
        For a net, where it is required: takes what the net returns, and returns the loss, an NDArray or a list of them.
        The operators of this function are not examined, only the loss and its gradients: those with respect to the
        net's outputs, and to trained parameters that the function itself reads, as for a penalty. Operators of the net
        that compute a loss are examined like all others. Blocks of the net that run as Python are not examined.
    loss_scale : float, optional
        The loss scale of the replay. By default that of the last step if it was skipped, otherwise that of the next
        step.

    Returns
    -------
    Blame
        ``cure`` has the operators that have to be in FP32: where no loss scale avoids the inf or NaN, that is tried, by
        replays with copies and with dropout masks of blame's own. If all values were finite, ``reproduced`` is False,
        and ``cause`` says what may be the reason.

    Raises
    ------
    TypeError
        The arguments do not fit a net or a module; the message says what is expected.
    ValueError
        The net is not converted, is a copy whose arrays have no gradients, or has an op hook (``register_op_hook``) on
        a block; the module has no optimizer.
    """
    if isinstance(target, Block):
        trainer, *batch = args or (None,)
        if not callable(loss) or not batch:
            raise TypeError(
                "of a net, blame takes the trainer, the inputs, and the loss as a function of what the net returns: "
                "blame(net, trainer, x, loss=lambda out: loss_fn(out, y))"
            )
        network = trained_network(target, trainer)
    else:
        if len(args) != 1 or not hasattr(args[0], "data") or loss is not None:
            raise TypeError("of a module, blame takes the DataBatch of the step: blame(module, batch)")
        network, batch = trained_network(target), list(args)
    step = network.step
    scale = step.loss_scale if loss_scale is None else float(loss_scale)
    if loss_scale is None and step.last_step_skipped:  # its loss scale may have been higher
        scale = [event.loss_scale for event in step.history if event.step <= step.steps][-1]
    network.prepare(batch, loss)
    weights = network.weights(frozen=True)

    def replayed(scale: float) -> tuple[Recording, list[ObservedGraph]]:
        recording = Recording()
        probe = Probe(network, lambda observed, array: recording.note(observed.label, array, observed))
        recording.note_weights(weights)
        with network.unchanged(), autograd.pause():
            try:
                probe.start()
                network.replay(batch, loss, scale, recording.note)
            finally:
                probe.stop()
            recording.note_gradients(network.gradients())
        return recording, probe.graphs

    recording, graphs = replayed(scale)
    if not recording.has_operators:
        raise ValueError("no operator ran: the batch must have the shapes that the module is bound to")
    names = [weight.name for weight in weights]
    found = verdict(recording.records(), graphs, names, scale, lambda scale: replayed(scale)[0].records())
    if not found.reproduced or (found.where == "input" and not found.inputs):
        return found
    trial = tried(lambda: replayed_network(target, loss, (batch, []) if loss else batch[0], None, None), scale)
    why = f"exclude={[*trial.cure]} cures it: tried, the batch is finite then" if trial.cure else trial.why
    cause = ". ".join(filter(None, [found.cause, why]))
    return replace(found, cause=cause, cure=trial.cure)
