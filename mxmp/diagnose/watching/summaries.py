"""Watched steps and the loss scale for TensorBoard, and for the loops that MXNet has: Module.fit and Estimator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mxnet.gluon.contrib.estimator import BatchEnd, TrainBegin

from ...step.step import StepView
from .histogram import Histogram
from .snapshot import Snapshot

__all__ = ["ScaleHandler", "SummaryLog", "log_scale"]


class SummaryLog:
    """Writes to TensorBoard: the loss scale and skips of each step, and the histograms of each watched one.

    ::

        log = SummaryLog(SummaryWriter("runs/a"))
        with mxmp.diagnose.watch(net, trainer, every=100, callback=log):
            for x, y in batches:
                ...
                log.step(trainer)

    Parameters
    ----------
    writer
        Anything with ``add_scalar(tag, value, step)`` and ``add_histogram(tag, values, step, bins=)``: the
        SummaryWriter of tensorboardX, of ``torch.utils.tensorboard`` or of mxboard.
    prefix : str
        In front of every tag.

    Raises
    ------
    TypeError
        ``writer`` has no such methods.
    """

    def __init__(self, writer: Any, prefix: str = "mxmp/") -> None:
        if not callable(getattr(writer, "add_scalar", None)) or not callable(getattr(writer, "add_histogram", None)):
            raise TypeError(
                "writer must have add_scalar and add_histogram, as the SummaryWriter of tensorboardX, "
                f"torch.utils.tensorboard and mxboard has; got {type(writer).__module__}.{type(writer).__name__}"
            )
        self._writer = writer
        self._prefix = prefix

    def step(self, run: StepView) -> None:
        """Loss scale and skipped steps so far of a Trainer or module, at the step that it has taken last."""
        step = run.scaled_step.steps
        self._scalar("loss_scale", run.loss_scale, step)
        self._scalar("skipped_steps", run.skipped_steps, step)

    def __call__(self, snapshot: Snapshot) -> None:
        """A watched step: for each tensor a histogram of the exponents, ``log2`` of the absolute values."""
        step = snapshot.step
        self._scalar("underflow", snapshot.underflow, step)
        self._scalar("underflow_unscaled", snapshot.underflow_unscaled, step)
        if math.isfinite(snapshot.headroom):
            self._scalar("headroom", snapshot.headroom, step)
        for tensor in snapshot.tensors:
            if tensor.histogram.counts.any():
                tag = f"{self._prefix}{tensor.kind.replace(' ', '_')}/{tensor.name.replace(' -> ', '_to_')}"
                values = _exponents(tensor.histogram)
                edges = np.arange(values.min(), values.max() + 2)
                self._writer.add_histogram(tag, values, step, bins=edges)

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(self._prefix + name, value, step)


def _exponents(histogram: Histogram, limit: int = 4096) -> np.ndarray:
    """So many exponents, in the histogram's shares, at least one of each: writers take values."""
    share = histogram.counts / max(histogram.counts.sum() / limit, 1.0)
    return np.repeat(histogram.exponents(), np.ceil(share).astype(int)).astype("float32")


def log_scale(log: SummaryLog, every: int = 1) -> Any:
    """A ``batch_end_callback`` for ``module.fit`` that calls ``log.step(module)`` every so many batches.

    Raises
    ------
    TypeError
        When it is called: ``fit`` is of a module that is not mxmp's.
    """

    def callback(param: Any) -> None:
        module = param.locals["self"] if param.locals else None
        if not isinstance(module, StepView):
            raise TypeError(
                f"log_scale is for the fit of an mxmp.Module or BucketingModule, got {type(module).__name__}"
            )
        if param.nbatch % every == 0:
            log.step(module)

    return callback


class ScaleHandler(TrainBegin, BatchEnd):
    """An event handler for MXNet's Estimator that calls ``log.step(trainer)`` after every so many batches.

    Raises
    ------
    TypeError
        When training begins: the Estimator's trainer is not mxmp's.
    """

    priority = -1000  # after GradientUpdateHandler, which steps

    def __init__(self, log: SummaryLog, every: int = 1) -> None:
        self._log = log
        self._every = every
        self._batches = 0

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(estimator.trainer, StepView):
            raise TypeError(
                f"ScaleHandler is for an Estimator with an mxmp.Trainer, got {type(estimator.trainer).__name__}"
            )
        self._batches = 0

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            self._log.step(estimator.trainer)
