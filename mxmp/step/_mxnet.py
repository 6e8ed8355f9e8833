"""What this room reaches behind MXNet's public interface. A test holds each against 1.9.1."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

__all__ = ["replicate_update_counts"]


def replicate_update_counts(optimizer: mx.optimizer.Optimizer, contexts: Sequence[mx.Context]) -> None:
    """Give every device the update counts of the one that has counted most."""
    saved = optimizer._all_index_update_counts.values()
    counts: dict = max(saved, key=lambda each: sum(each.values()), default={})
    devices = {context.device_id for context in contexts}
    optimizer._all_index_update_counts = {device: dict(counts) for device in {*devices, 0}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]
