"""Small networks of many kinds, by name, with an input each."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn


class Residual(nn.HybridBlock):
    def __init__(self, channels: int, act: str) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation(act))
            self.body.add(nn.Conv2D(channels, 3, padding=1, groups=2, use_bias=False), nn.BatchNorm())
            self.act = nn.Activation(act)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.act(x + self.body(x))


def convnet(act: str = "relu") -> nn.HybridBlock:
    pool = nn.MaxPool2D if act == "relu" else nn.AvgPool2D
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation(act), pool(2, 2))
    net.add(Residual(8, act), nn.Dropout(0), nn.Dense(5))
    return net


def smooth() -> nn.HybridBlock:
    return convnet("tanh")


def mlp() -> nn.HybridBlock:
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="tanh"), nn.Dense(4))
    return net


class Attention(nn.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.qkv = nn.Dense(3 * 8, flatten=False)
            self.norm = nn.LayerNorm()
            self.out = nn.Dense(6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        qkv = self.qkv(x)
        score = F.contrib.interleaved_matmul_selfatt_qk(qkv, heads=2)
        x = F.contrib.interleaved_matmul_selfatt_valatt(qkv, F.softmax(score), heads=2)
        return self.out(self.norm(x))


def tied() -> nn.HybridBlock:
    net = nn.HybridSequential()
    first = nn.Dense(6, in_units=6, activation="sigmoid")
    net.add(first, nn.Dense(6, params=first.params), nn.Dense(2))
    return net


class Upscale(nn.HybridBlock):
    """Two outputs: of a transposed convolution, and of a recurrent layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.stem = nn.Conv2D(3, 1)
            self.up = nn.Conv2DTranspose(4, 4, strides=2, padding=1)
            self.lstm = gluon.rnn.LSTM(5, input_size=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = F.relu(self.up(self.stem(x)))
        return x, self.lstm(F.transpose(F.max(x, axis=3), axes=(2, 0, 1)))


NETS: dict[str, tuple[Callable[[], nn.HybridBlock], tuple[int, ...]]] = {
    "convnet": (convnet, (8, 3, 16, 16)),
    "smooth": (smooth, (8, 3, 16, 16)),
    "mlp": (mlp, (4, 6)),
    "attention": (Attention, (5, 2, 4)),
    "tied": (tied, (3, 6)),
    "upscale": (Upscale, (2, 3, 4, 4)),
}


def made(name: str = "convnet", ctx: Any = None, hybridize: bool = False) -> tuple[nn.HybridBlock, np.ndarray]:
    """A net with all its parameters set, and an input."""
    build, shape = NETS[name]
    net = build()
    net.initialize(mx.init.Xavier(), ctx=ctx or mx.cpu())
    x = np.random.normal(0, 1, shape).astype("float32")
    net(mx.nd.array(x, ctx=(ctx or [mx.cpu()])[0]))
    if hybridize:
        net.hybridize()
    return net, x
