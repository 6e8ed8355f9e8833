"""A small Module, and how it trains."""

from __future__ import annotations

from typing import Any, Iterable

import mxnet as mx
import numpy as np

import mxmp

from .twins import array

SHAPES = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}


def mlp() -> mx.sym.Symbol:
    """Two layers on 6 inputs, of 5 units and 3 classes."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x, name="tanh"), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax")


def bucketing(**more: Any) -> mxmp.BucketingModule:
    return mxmp.BucketingModule(lambda key: (mlp(), ["data"], ["softmax_label"]), 0, **more)


def start() -> dict[str, mx.nd.NDArray]:
    """The same weights of ``mlp`` at every call."""
    rng = np.random.RandomState(0)
    return {name: mx.nd.array(rng.uniform(-0.5, 0.5, shape)) for name, shape in SHAPES.items()}


def bound(module: Any, **more: Any) -> Any:
    """``module``, bound to batches of 4, with the weights of ``start`` unless it has some."""
    module.bind([("data", (4, 6))], [("softmax_label", (4,))], **more)
    if not module.params_initialized:
        module.init_params(arg_params=start(), aux_params={})
    return module


def batch(i: int) -> mx.io.DataBatch:
    data, label = [("data", (4, 6))], [("softmax_label", (4,))]
    arrays = [array(i, 4, 6)], [mx.nd.array([0, 1, 2, i % 3])]
    return mx.io.DataBatch(*arrays, bucket_key=0, provide_data=data, provide_label=label)


def train(module: Any, steps: Iterable[int]) -> None:
    for i in steps:
        module.forward_backward(batch(i))
        module.update()


def weights(module: Any) -> list[np.ndarray]:
    return [module.get_params()[0][name].asnumpy() for name in SHAPES]
