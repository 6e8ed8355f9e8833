"""``watch``: every N steps, how activations, gradients, weights and updates lie in the range of the compute dtype."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...messages.text import class_of
from ...observed import Observed
from ...step.gradients import Gradient
from ...step.masters import Weight
from ..networks.frontends import Network, Trainer, check_positive, trained_network
from ..networks.probe import StepObserver, values_of
from ..networks.protocol import TrainedNetwork
from .histogram import FORMATS, Histogram
from .snapshot import Snapshot, TensorReport, merged, with_lost


class Watch(StepObserver):
    """Records a histogram of each tensor's values in some training steps of a net or module; ``watch`` makes it.

    It records the first step after the call of ``watch``, and each step whose number is a multiple of ``every``, an
    argument of that call. It works until ``close``, or until its ``with`` block ends.

    Attributes
    ----------
    snapshots : sequence of Snapshot
        The last watched steps, oldest first; at most ``keep`` (an argument of ``watch``) of them.
    """

    def __init__(self, network: TrainedNetwork, every: int, sample: int, keep: int, callback: Callable | None) -> None:
        self.snapshots: deque[Snapshot] = deque(maxlen=keep)
        self._every = every
        self._sample = sample
        self._callback = callback
        super().__init__(network)

    def _forget(self) -> None:
        self._reported = False
        self._pending: list[Callable[[], TensorReport]] = []
        self._before: list[tuple[Weight, list[NDArray]]] = []

    @property
    def latest(self) -> Snapshot:
        """Return the Snapshot of the last watched step; raises ``ValueError`` if no step was watched yet."""
        if not self.snapshots:
            raise ValueError("no step was watched yet: take one, with forward, backward and step")
        return self.snapshots[-1]

    def __str__(self) -> str:
        return str(self.snapshots[-1]) if self.snapshots else "no step was watched yet"

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Record the gradients of the parameters, and copy the weights, if this is a watched step."""
        if not self._reported:  # another bucket ran, or a batch of another size
            return
        low = self._low_variables()
        self._scale = self._step.loss_scale
        # ``trainer.unscale()`` divides the gradients of parameters only; those between operators keep the loss scale.
        again = self._scale / self._network.gradient_scale
        for name, array in gradients:
            scaled = array if again == 1 else array.astype("float32") * again
            self._note_tensor("parameter gradient", name, "", name in low, scaled)
        for weight in self._network.weights():
            before = [copy for array in weight.masters or weight.arrays if (copy := values_of(array)) is not None]
            self._before.append((weight, before))
            for array in before:
                self._note_tensor("weight", weight.name, "", weight.name in low, array)

    def after_step(self) -> None:
        """Make the Snapshot of a watched step, and start the probe if the next step is to be watched."""
        if self._reported:
            self._finish(self._low_variables())
        due = (self._step.steps + 1) % self._every == 0
        # The net was converted again, or the module got a batch of another size.
        if self._probe.listens and self._network.is_stale:
            self._stop()
            due = True
        if due and not self._probe.listens and self in self._step.observers:  # a callback may have closed it
            self._start()

    def _low_variables(self) -> set[str]:
        """Return the variables that operators in low precision read, in the graphs that have reported tensors."""
        return {name for graph in self._probe.graphs for name in graph.low_variables}

    def _finish(self, low: set[str]) -> None:
        """Record the updates, append the Snapshot of the step and call the callback. Waits for the device."""
        self._probe.stop()
        if not self._step.last_step_skipped:
            with autograd.pause():
                for weight, before in self._before:
                    for old, array in zip(before, weight.masters or weight.arrays):
                        new = values_of(array)
                        if new is not None:
                            self._note_tensor("update", weight.name, "", weight.name in low, new - old)
        compute = self._probe.graphs[0].plan.policy.compute  # the net may be restored by now
        reports = with_lost(merged(report() for report in self._pending), FORMATS[compute])
        self._forget()
        snapshot = Snapshot(self._step.steps, self._scale, self._step.last_step_skipped, compute, reports)
        self.snapshots.append(snapshot)
        if self._callback is not None:
            self._callback(snapshot)

    def _observe(self, observed: Observed, array: NDArray) -> None:
        self._reported = True
        # Not of casts, nor sums of gradients. But where a graph output is cast, only inserted operators compute its
        # gradient: what they are to round.
        if not observed.inserted or (observed.of_output and not observed.rounded):
            kind = "gradient" if observed.backward else "activation"
            self._note_tensor(kind, observed.label, observed.op, observed.low, array)

    def _note_tensor(self, kind: str, name: str, op: str, low: bool, array: NDArray) -> None:
        """Keep at most ``sample`` values of a float tensor, evenly spaced. Does not wait for the device."""
        with autograd.pause():
            values = values_of(array, magnitude=True)
            if values is None:
                return
            flat = values.reshape((-1,))
            stride = _stride(array.shape, -(-flat.size // self._sample))
            picked = flat if stride == 1 else mx.nd.slice(flat, begin=(0,), end=(flat.size,), step=(stride,))
            size, largest, squares = flat.size, _largest(flat), mx.nd.dot(flat, flat)

        def report() -> TensorReport:
            # At the end of the step: until then the arrays stay on their device. A NaN shows in the sum of squares.
            most = math.nan if math.isnan(squares.asscalar()) else float(largest.asscalar())
            return TensorReport(kind, name, op, low, Histogram.of(picked.asnumpy(), size, most))

        self._pending.append(report)


def _largest(flat: NDArray) -> NDArray:
    """Return the largest of a vector's values, none of them negative, in shape (1,). A NaN may be missed."""
    if flat.ctx.device_type == "gpu":
        return flat.max()
    # MXNet's max takes five times as long on a CPU.
    return mx.nd.Pooling(flat.reshape((1, 1, 1, -1)), global_pool=True, pool_type="max", kernel=(1, 1)).reshape((1,))


def _stride(shape: Sequence[int], at_least: int) -> int:
    """Return the smallest stride, not below ``at_least``, without a factor in common with the length of an axis."""
    # So that a sample has values of all rows and channels.
    stride = at_least
    while stride > 1 and any(math.gcd(stride, size) > 1 for size in shape):
        stride += 1
    return stride


def watch(
    target: Network,
    trainer: Trainer | None = None,
    *,
    every: int = 100,
    sample: int = 1 << 14,
    keep: int = 100,
    callback: Callable[[Snapshot], Any] | None = None,
) -> Watch:
    """Watch the exponents of all tensors in the next step and in every step whose number is a multiple of ``every``.

    ::

        with mxmp.diagnose.watch(net, trainer, every=100) as watched:
            train()
        print(watched)                        # the last watched step
        mxmp.diagnose.plot_histograms(watched.latest, "step.png")

    A Snapshot of each watched step says for each tensor which share of its values rounds to zero in the compute dtype,
    becomes subnormal, or overflows. The tensors are activations (the outputs of operators), the gradients that
    operators send back to their inputs, and the gradients, weights and updates of parameters. The Snapshot also says
    how far the loss scale could still be raised.

    Training is not changed by a bit: no step runs twice, and no random numbers are drawn. A watched step runs operator
    by operator, copies what it records, and waits for the device once more, at its end. In all other steps nothing
    additional runs. Operators within the bodies of control flow, and operators that a GPU fuses, are not reported one
    by one. MXNet's monitor reports operators of one name alike, such as those of a layer that is called twice: they are
    one tensor of the Snapshot, with the precision of the first.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer. Of a BucketingModule, the bucket that is current when a step
        becomes due is watched; if the next steps run other buckets, the watch waits until this bucket runs.
    trainer : Trainer, optional
        The mxmp.Trainer that updates the parameters of a net. Required for a net, not allowed for a module.
    every : int
        Steps whose number, counted by the Trainer or module from 1, is a multiple of ``every`` are watched; so is the
        first step after this call.
    sample : int
        The most values that are counted of one tensor. Of a larger tensor evenly spaced values are counted, but all are
        searched for the largest, and for inf and NaN.
    keep : int
        Number of Snapshots to keep; older ones are dropped.
    callback : callable, optional
        Called with each Snapshot after its step, for example to write it for TensorBoard.

    Returns
    -------
    Watch
        Holds the Snapshots. Its ``close``, or the end of its ``with`` block, ends the watch.

    Raises
    ------
    TypeError
        ``target`` is none of these, a net's ``trainer`` is no mxmp.Trainer, or a module has a ``trainer``.
    ValueError
        The net is not converted, or a block of it has an op hook (``register_op_hook``); the module has no optimizer,
        or has a ``mx.mon.Monitor``; or ``every``, ``sample`` or ``keep`` is not a positive integer.
    """
    check_positive(every=every, sample=sample, keep=keep)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of a Snapshot, got {class_of(callback)}")
    return Watch(trained_network(target, trainer), every, sample, keep, callback)
