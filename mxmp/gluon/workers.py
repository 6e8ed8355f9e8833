"""What a Trainer's workers agree on besides the gradients: values to start from, and random draws.

The kvstore knows parameter ``i``'s array, in the gradient's dtype, by ``i``, and its FP32 master by the
number of parameters plus ``i``.
"""

from __future__ import annotations

from typing import Any, Collection, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import Parameter

from ..step.masters import Weight, share_drawn, share_initial
from ..step.stores import is_distributed
from .parameter import weight_of

__all__ = ["has_other_workers", "renew_store", "share_noise", "share_weights"]


def has_other_workers(trainer: gluon.Trainer) -> bool:
    """Whether gradients are summed over processes; the store need not be open yet."""
    asked = trainer._kvstore_params["kvstore"]
    return "dist" in asked if isinstance(asked, str) else is_distributed(asked)


def renew_store(trainer: gluon.Trainer) -> None:
    """For gradients of other dtypes: a key of a store keeps the dtype of its first array. Of this process only."""
    if trainer._kvstore is not None:
        trainer._kvstore_params["kvstore"] = mx.kv.create(trainer._kvstore.type)
        trainer._reset_kvstore()


def share_weights(kvstore: Any, params: Sequence[Parameter], names: Collection[str]) -> None:
    """Wait until this worker holds rank 0's values of the parameters called ``names``, masters included.

    MXNet has sent the arrays. Synchronizes.
    """
    ready = {index: weight_of(param) for index, param in enumerate(params) if param.name in names}
    share_initial(
        kvstore,
        {key: weight for key, weight in _keys(ready, len(params)).items() if weight.masters},
        [array for weight in ready.values() for array in weight.arrays],
    )


def share_noise(kvstore: Any, optimizer: mx.optimizer.Optimizer, params: Sequence[Parameter]) -> None:
    """After an update: see ``share_drawn``."""

    def weights() -> dict[int, Weight]:
        trained = {index: weight_of(param) for index, param in enumerate(params) if param.grad_req != "null"}
        return _keys(trained, len(params))

    share_drawn(kvstore, optimizer, weights)


def _keys(weights: dict[int, Weight], count: int) -> dict[int, Weight]:
    """What holds each weight's value, by its key on the kvstore."""
    return {index + (count if weight.masters else 0): weight for index, weight in weights.items()}
