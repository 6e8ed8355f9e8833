"""The loss scale in the loss heads that a backward reaches: set before it, and 1 again after it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Sequence

import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from ..precision._mxnet import exact_text
from ..step.python_operators import true_gradients
from . import _mxnet
from .record import Record
from .scaling import forget_scales, scales_in, unscaled_calls

# Global: whether this thread is inside a scaled backward, of whatever trainer.
_local = threading.local()


@contextmanager
def heads_scaled_by(value: float, record: Record) -> Iterator[None]:
    """Multiply the gradients that loss heads and Python operators write by ``value``, in a backward of ``record``.
    Raises ``RuntimeError`` inside another such ``with`` block on this thread: the loss would be scaled twice."""
    if getattr(_local, "open", False):
        raise RuntimeError(
            "a scaled backward inside scale_loss would be scaled twice: call autograd.backward there, on the "
            "scaled loss, or trainer.backward(loss) outside"
        )
    reached = scales_in(record)
    scales = [memory for _, memory in reached.values()] if value != 1.0 else []
    heads = record.heads_with_attribute() if value != 1.0 else []
    _local.open = True
    try:
        # MXNet's engine orders these writes and the backward's reads, so nothing waits.
        _set(scales, value)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", exact_text(np.float32(own) * np.float32(value)))
        with true_gradients(value):
            yield
    finally:
        _set(scales, 1.0)
        for head, own in heads:
            _mxnet.set_attribute(head, "grad_scale", own)
        _local.open = False
        forget_scales([name for name, (fed, _) in reached.items() if _mxnet.recorded_name(fed) is None])


def refuse_late_scale(record: Record, scale: float) -> None:
    """Raise ``ValueError`` if a forward of ``record`` has loss heads that the loss scale ``scale`` would not multiply.
    It is then one in bfloat16, of a time when no mxmp.Trainer had a loss scale."""
    if unscaled_calls and any(node.name in unscaled_calls for node in record.nodes()):
        raise ValueError(
            f"the net, in bfloat16, ran before there was a loss scale; it is {scale:g} now. The gradient of the net's "
            "loss head would not be multiplied by it, and the update would divide by it: call the net again"
        )


def _set(scales: Sequence[NDArray], value: float) -> None:
    with autograd.pause():
        for scale in scales:
            scale[:] = value
