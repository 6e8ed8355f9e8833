"""What the Symbolic door reaches behind MXNet's public interface. A test holds each against 1.9.1.

A subclass of MXNet's (``Module``, ``BucketingModule``) also uses what it inherits; ``INHERITED`` lists that.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

import mxnet as mx

__all__ = ["INHERITED", "environment", "number_weights_plainly"]

INHERITED = {
    "Module": (
        "_arg_params _aux_params _compression_params _context _exec_group _kvstore _optimizer _param_names "
        "_params_dirty _preload_opt_states _symbol _sync_params_from_devices _updater"
    ),
    "BucketingModule": (
        "_buckets _call_sym_gen _compression_params _context _curr_module _default_bucket_key _fixed_param_names "
        "_group2ctxs _monitor _params_dirty _reset_bind _state_names _work_load_list"
    ),
}


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """``name`` set to ``value`` for a call of MXNet's that takes no argument for it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def number_weights_plainly(optimizer: mx.optimizer.Optimizer, names: list[str], devices: int) -> None:
    """Weight ``i`` is number ``i``, on every device.

    Without updates on the kvstore, Module numbers weight ``i`` on device ``k`` as ``i * devices + k``.
    """
    by_device = {i * devices + k: name for i, name in enumerate(names) for k in range(devices)}
    if optimizer.idx2name == by_device:
        optimizer.idx2name = dict(enumerate(names))
