"""What this room reaches behind MXNet's public interface. A test holds each against 1.9.1."""

from __future__ import annotations

import sys
from typing import Sequence

import mxnet as mx

__all__ = ["is_asked_by_user", "replicate_update_counts"]


def is_asked_by_user() -> bool:
    """Whether the function that asks was called by neither MXNet nor us: its caller may write into what it gets."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in ("mxnet", "mxmp")


def replicate_update_counts(optimizer: mx.optimizer.Optimizer, contexts: Sequence[mx.Context]) -> None:
    """Give every device the update counts of the one that has counted most."""
    saved = optimizer._all_index_update_counts.values()
    counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
    devices = {context.device_id for context in contexts}
    optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]
