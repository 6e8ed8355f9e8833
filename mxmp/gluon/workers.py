"""What a Trainer's workers agree on besides the gradients: values to start from, and random draws.

The kvstore knows parameter ``i``'s array, in the gradient's dtype, by ``i``, and its FP32 master by the
number of parameters plus ``i``.
"""

from __future__ import annotations

from typing import Any, Collection, Sequence

import mxnet as mx
from mxnet.gluon import Parameter

from ..step.masters import Weight, share_drawn, share_initial
from .parameter import weight_of

__all__ = ["share_noise", "share_weights"]


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
