"""Horovod as a kvstore, for ``kvstore="horovod"``; that of MXNet 1.9.1 sums nothing over workers."""

from __future__ import annotations

import itertools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

_HOROVOD = (
    'kvstore="horovod" needs Horovod with its MXNet part, which is built on installation, with cmake, g++ and MXNet '
    "installed before: HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation horovod==0.28.1 "
    "(scripts/check_horovod.sh does it, and runs two workers)"
)


class Horovod(mx.kv.KVStoreBase):
    """A kvstore that sums over this worker's devices, and averages over Horovod's workers, who all get the same bits.
    As with ``horovod.mxnet.DistributedTrainer``, ``Trainer.step`` takes the batch size of one worker."""

    type = "horovod"
    _stores = itertools.count()

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(_HOROVOD) from error
        if not hvd.is_initialized():
            hvd.init()
        self._hvd = hvd
        # Horovod matches arrays by name over all workers, who open their stores in one order.
        self._prefix = f"mxmp.{next(self._stores)}"

    @property
    def rank(self) -> int:
        return self._hvd.rank()

    @property
    def num_workers(self) -> int:
        return self._hvd.size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # no updates on the store

    def init(self, key: Any, value: NDArray) -> None:
        """Do nothing: Horovod stores no values. MXNet calls it with each key and the first value for it."""

    def broadcast(self, key: Any, value: NDArray, out: Any, priority: int = 0) -> None:
        first, *others = out if isinstance(out, (list, tuple)) else [out]
        with autograd.pause():
            if first is not value:
                first[:] = value
            self._hvd.broadcast_(first, root_rank=0, name=f"{self._prefix}.broadcast.{key}", priority=priority)
            for other in others:
                first.copyto(other)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Write the average of the sums to ``out``, or to ``value``; ``ValueError`` for a row-sparse array."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        outs = values if out is None else list(out) if isinstance(out, (list, tuple)) else [out]
        if any(array.stype != "default" for array in values):
            raise ValueError(f"{key!r} is {values[0].stype}: Horovod averages dense gradients only (sparse_grad=False)")
        with autograd.pause():
            total = values[0]
            if len(values) > 1:
                total = mx.nd.add_n(*(array.as_in_context(total.ctx) for array in values))
            elif outs[0] is not total:
                total = total.copy()
            share = 1.0 / self.num_workers
            # Division before the sum over workers keeps an average of float16 finite; after it, FP32 rounds less.
            before, after = (share, 1.0) if total.dtype == np.float16 else (1.0, share)
            self._hvd.allreduce_(
                total,
                op=self._hvd.Sum,
                name=f"{self._prefix}.average.{key}",
                priority=priority,
                prescale_factor=before,
                postscale_factor=after,
            )
            for array in outs:
                if array is not total:
                    total.copyto(array)
