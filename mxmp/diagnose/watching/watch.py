"""``watch``: every N steps the distributions of activations, gradients, weights and updates over float16's range."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

from ...frontend import TrainedNetwork
from ...observed import Observed
from ...probe import StepObserver, values_of
from ...step.gradients import Gradient
from ...step.masters import Weight
from ..shared.targets import Network, Trainer, trained_network
from .histogram import Histogram
from .snapshot import Snapshot, TensorReport, merged

__all__ = ["Watch", "watch"]


class _PendingReport(NamedTuple):
    """A tensor's absolute values, or evenly spaced ones, on their way to the host; their largest and sum of squares."""

    kind: str
    name: str
    op: str
    low: bool
    values: NDArray
    largest: NDArray
    squares: NDArray
    size: int

    def report(self) -> TensorReport:
        """Return the tensor's report. Synchronizes."""
        largest = math.nan if math.isnan(self.squares.asscalar()) else float(self.largest.asscalar())
        histogram = Histogram.of(self.values.asnumpy(), self.size, largest)
        return TensorReport(self.kind, self.name, self.op, self.low, histogram)


class Watch(StepObserver):
    """A watch on a net or module, from ``watch``; ``close`` it, or use it as a context manager.

    Attributes
    ----------
    snapshots : sequence of Snapshot
        The last ``keep`` watched steps, oldest first.
    """

    def __init__(self, network: TrainedNetwork, every: int, sample: int, keep: int, callback: Callable | None) -> None:
        self.snapshots: deque[Snapshot] = deque(maxlen=keep)
        self._every = every
        self._sample = sample
        self._callback = callback
        super().__init__(network)

    def _forget(self) -> None:
        self._reported = False
        self._pending: list[_PendingReport] = []
        self._before: list[tuple[Weight, list[NDArray]]] = []

    @property
    def latest(self) -> Snapshot:
        """Return the last watched step. Raises ``ValueError`` before there was one."""
        if not self.snapshots:
            raise ValueError("no step was watched yet: take one, with forward, backward and step")
        return self.snapshots[-1]

    def __str__(self) -> str:
        return str(self.snapshots[-1]) if self.snapshots else "no step was watched yet"

    def before_update(self, gradients: Sequence[Gradient]) -> None:
        """Take gradients and weights of a watched step."""
        if not self._reported:  # another bucket ran, or a batch of another size
            return
        low = self._low_variables()
        for name, array in gradients:
            self._note_tensor("parameter gradient", name, "", name in low, array)
        self._scale = self._network.gradient_scale
        for weight in self._network.weights():
            before = [copy for array in weight.masters or weight.arrays if (copy := values_of(array)) is not None]
            self._before.append((weight, before))
            for array in before:
                self._note_tensor("weight", weight.name, "", weight.name in low, array)

    def after_step(self) -> None:
        """Finish a watched step, and listen to the next one if it is due."""
        if self._reported:
            self._finish(self._low_variables())
        due = (self._step.steps + 1) % self._every == 0
        if self._probe.listens and self._network.is_stale:
            self._stop()
            due = True
        if due and not self._probe.listens:
            self._start()

    def _low_variables(self) -> set[str]:
        return {name for graph in self._probe.graphs for name in graph.low_variables}

    def _finish(self, low: set[str]) -> None:
        self._probe.stop()
        if not self._step.last_step_skipped:
            with autograd.pause():
                for weight, before in self._before:
                    for old, array in zip(before, weight.masters or weight.arrays):
                        new = values_of(array)
                        if new is not None:
                            self._note_tensor("update", weight.name, "", weight.name in low, new - old)
        reports = merged(pending.report() for pending in self._pending)
        self._forget()
        compute = self._network.policy.compute
        snapshot = Snapshot(self._step.steps, self._scale, self._step.last_step_skipped, compute, reports)
        self.snapshots.append(snapshot)
        if self._callback is not None:
            self._callback(snapshot)

    def _observe(self, observed: Observed, array: NDArray) -> None:
        self._reported = True
        if not observed.inserted or observed.of_output:
            kind = "gradient" if observed.backward else "activation"
            self._note_tensor(kind, observed.label, observed.op, observed.low, array)

    def _note_tensor(self, kind: str, name: str, op: str, low: bool, array: NDArray) -> None:
        with autograd.pause():
            values = values_of(array, magnitude=True)
            if values is None:
                return
            flat = values.reshape((-1,))
            stride = _stride(array.shape, -(-flat.size // self._sample))
            picked = flat if stride == 1 else mx.nd.slice(flat, begin=(0,), end=(flat.size,), step=(stride,))
            pending = _PendingReport(kind, name, op, low, picked, _largest(flat), mx.nd.dot(flat, flat), flat.size)
            self._pending.append(pending)


def _largest(flat: NDArray) -> NDArray:
    """Return the largest value, ignoring NaN. On a CPU ``max`` takes five times as long as a pooling over all."""
    if flat.ctx.device_type == "gpu":
        return flat.max()
    return mx.nd.Pooling(flat.reshape((1, 1, 1, -1)), global_pool=True, pool_type="max", kernel=(1, 1)).reshape((1,))


def _stride(shape: Sequence[int], at_least: int) -> int:
    """Return a stride that has no factor in common with any axis, so that no row or channel is preferred."""
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
    """Watch the exponents of all tensors over the low dtype's range, at the next step and every ``every`` steps.

    ::

        with mxmp.diagnose.watch(net, trainer, every=100) as watched:
            train()
        print(watched)                        # the last watched step
        mxmp.diagnose.plot_histograms(watched.latest, "step.png")

    Per tensor: the share that rounds to zero, that is subnormal and that overflows, for activations (the outputs of
    operators), the gradients that operators send back, parameters' gradients, weights and updates; and how far the
    loss scale could still go up. Training is not changed by a bit: no step runs twice and nothing is drawn. A
    watched step runs operator by operator, copies what it looks at, and waits for the device once more, at its
    end; no other step does anything. Operators within the bodies of control flow, and those that a GPU fuses, are
    not reported one by one.

    Parameters
    ----------
    target : Block, Module or BucketingModule
        A converted net, or a module with an optimizer. Of a BucketingModule the bucket is watched that is current when
        a step becomes due; the watch waits until it runs.
    trainer : Trainer
        For a net: the one that steps.
    every : int
        Steps whose number, counted from 1, is a multiple are watched; and the next one.
    sample : int
        Of larger tensors so many evenly spaced values are counted, and all are searched for the largest.
    keep : int
        Snapshots to remember; older ones are dropped.
    callback : callable
        Called with each Snapshot, for example to write it for TensorBoard.

    Raises
    ------
    TypeError
        ``target`` is none of these, or ``trainer`` is no mxmp.Trainer.
    ValueError
        The net is not converted, has an op hook already, or the module has no optimizer.
    """
    for name, value in (("every", every), ("sample", sample), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return Watch(trained_network(target, trainer), every, sample, keep, callback)
