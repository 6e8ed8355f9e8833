# ruff: noqa: N803
"""Healthy networks for ``audit``: trained in FP32 for a while, frozen, with dropout, control flow and the like."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo.vision import get_resnet

import mxmp
from mxmp.diagnose import Audit, audit

CE, L2 = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.L2Loss()


class Healthy(NamedTuple):
    """A network with its data and loss, the steps of training in FP32, and whether its weights are frozen then."""

    make: Callable[[], gluon.HybridBlock]
    data: Callable[[np.random.RandomState], tuple[np.ndarray, np.ndarray]]
    loss: Any = CE
    steps: int = 40
    frozen: bool = False
    optimizer: str = "adam"


def rows(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(64, 16))
    return x, (x[:, :4] + 0.5 * rng.normal(size=(64, 4))).argmax(axis=1)


def targets(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(64, 16))
    return x, np.tanh(x[:, :2]) + 0.3 * rng.normal(size=(64, 2))


def images(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    y = rng.randint(0, 4, 16)
    return rng.normal(size=(16, 3, 16, 16)) + y[:, None, None, None] * 0.3, y


def pictures(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(16, 3, 16, 16))
    return x, x * 0.5


def noise(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(16, 10, 1, 1)), rng.normal(size=(16, 3, 8, 8))


def series(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(7, 32, 8))
    return x, (x.sum(axis=(0, 2)) > 0).astype(int)


def words(rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    x = rng.randint(0, 50, (32, 9))
    return x, x[:, 0] % 4


def stack(*layers: Any) -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="")
    with net.name_scope():
        for layer in layers:
            net.add(layer)
    return net


class Function(gluon.HybridBlock):
    """Layers that a function of ``F``, the layers and the input uses."""

    def __init__(self, function: Callable, *layers: Any) -> None:
        super().__init__(prefix="")
        self.function, self.layers = function, layers
        for layer in layers:
            self.register_child(layer)

    def hybrid_forward(self, F, x):
        return self.function(F, self.layers, x)


def mlp(dropout: float = 0.0, *more: Any) -> nn.HybridSequential:
    return stack(
        *(nn.Dense(32, activation="relu"), nn.Dropout(dropout), nn.Dense(32, activation="relu"), nn.Dropout(dropout)),
        *(nn.Dense(4), *more),
    )


def conv() -> nn.HybridSequential:
    layers = [nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D()]
    return stack(*layers, nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(), nn.Dense(4))


def vgg() -> nn.HybridSequential:
    head = [nn.Dense(32, activation="relu"), nn.Dropout(0.5), nn.Dense(32, activation="relu"), nn.Dropout(0.5)]
    return stack(nn.Conv2D(8, 3, activation="relu"), nn.MaxPool2D(), nn.Flatten(), *head, nn.Dense(4))


def autoencoder() -> nn.HybridSequential:
    down = nn.Conv2D(8, 3, strides=2, padding=1, activation="relu")
    return stack(down, nn.Conv2D(8, 3, padding=1, activation="relu"), nn.Conv2DTranspose(3, 2, strides=2))


def generator() -> nn.HybridSequential:
    layers = [nn.Conv2DTranspose(8, 4, use_bias=False), nn.BatchNorm(), nn.Activation("relu")]
    return stack(*layers, nn.Conv2DTranspose(3, 4, 2, 1, use_bias=False), nn.Activation("tanh"))


def unet() -> Function:
    def body(F, layers, x):
        first, down, up, last = layers
        kept = F.relu(first(x))
        return last(F.concat(kept, F.relu(up(F.relu(down(kept)))), dim=1))

    convolutions = nn.Conv2D(8, 3, padding=1), nn.Conv2D(8, 3, strides=2, padding=1)
    return Function(body, *convolutions, nn.Conv2DTranspose(8, 2, strides=2), nn.Conv2D(3, 1))


def loop(dropout: float = 0.0) -> Function:
    def body(F, layers, x):
        step, read, drop, out = layers

        def one(row, state):
            state = F.tanh(read(row) + step(state))
            return drop(state), state

        outs, _ = F.contrib.foreach(one, x, F.zeros_like(F.slice_axis(x, axis=0, begin=0, end=1)).reshape((-3, 0)))
        return out(F.mean(outs, axis=0))

    return Function(
        body, nn.Dense(8, in_units=8), nn.Dense(8, in_units=8), nn.Dropout(dropout), nn.Dense(2, in_units=8)
    )


def recurrent(layer: Callable) -> Function:
    return Function(lambda F, layers, x: layers[1](F.mean(layers[0](x), axis=0)), layer(16), nn.Dense(2))


def unrolled() -> Function:
    cell = gluon.rnn.LSTMCell(16, input_size=8)
    out = nn.Dense(2, in_units=16)
    return Function(
        lambda F, layers, x: layers[1](layers[0].unroll(7, x, layout="TNC", merge_outputs=False)[0][-1]), cell, out
    )


def embedded() -> nn.HybridSequential:
    return stack(
        nn.Embedding(50, 16), nn.HybridLambda(lambda F, x: F.mean(x, axis=1)), nn.Dense(32, "relu"), nn.Dense(4)
    )


def attention(dropout: float = 0.1) -> Function:
    def body(F, layers, x):
        embed, query, key, value, norm, drop, out = layers
        x = embed(x)
        scores = F.softmax(F.batch_dot(query(x), key(x), transpose_b=True) / 4)
        return out(F.mean(norm(x + drop(drop(F.batch_dot(scores, value(x))))), axis=1))

    dense = [nn.Dense(16, flatten=False, in_units=16) for _ in range(3)]
    return Function(body, nn.Embedding(50, 16), *dense, nn.LayerNorm(), nn.Dropout(dropout), nn.Dense(4))


def twice() -> Function:
    layer = nn.Dense(16, in_units=16)
    return Function(lambda F, layers, x: layers[1](F.relu(layers[0](F.relu(layers[0](x))))), layer, nn.Dense(4))


def gated() -> Function:
    def body(F, layers, x):
        return layers[2](F.relu(layers[0](x)) * F.sigmoid(layers[1](x)))

    return Function(body, nn.Dense(32), nn.Dense(32), nn.Dense(4))


def noisy() -> Function:
    def body(F, layers, x):
        middle = layers[0](x)
        return layers[1](F.relu(middle + 0.1 * F.random.normal(shape=(64, 16))))

    return Function(body, nn.Dense(16), nn.Dense(2))


def resnet() -> gluon.HybridBlock:
    return get_resnet(1, 18, thumbnail=True, classes=4)


HEALTHY_TOO: dict[str, Healthy] = {
    "mlp": Healthy(mlp, rows),
    "mlp, trained long": Healthy(mlp, rows, steps=150),
    "mlp, frozen": Healthy(mlp, rows, frozen=True),
    "mlp, two dropouts": Healthy(lambda: mlp(0.5), rows),
    "mlp of a regression": Healthy(lambda: stack(nn.Dense(32, activation="relu"), nn.Dense(2)), targets, L2),
    "mlp of a regression, frozen": Healthy(lambda: stack(nn.Dense(32, "tanh"), nn.Dense(2)), targets, L2, frozen=True),
    "mlp, LayerNorm": Healthy(lambda: stack(nn.Dense(32, "relu"), nn.LayerNorm(), nn.Dropout(0.1), nn.Dense(4)), rows),
    "convolutions": Healthy(conv, images),
    "convolutions, frozen": Healthy(conv, images, frozen=True),
    "convolutions, inference": Healthy(conv, images, None, frozen=True),
    "VGG's head": Healthy(vgg, images),
    "autoencoder": Healthy(autoencoder, pictures, L2),
    "autoencoder, frozen": Healthy(autoencoder, pictures, L2, frozen=True),
    "generator": Healthy(generator, noise, L2),
    "U-net": Healthy(unet, pictures, L2),
    "foreach": Healthy(loop, series),
    "foreach, dropout": Healthy(lambda: loop(0.3), series),
    "LSTM": Healthy(lambda: recurrent(gluon.rnn.LSTM), series),
    "GRU": Healthy(lambda: recurrent(gluon.rnn.GRU), series),
    "LSTM, unrolled": Healthy(unrolled, series),
    "embedding": Healthy(embedded, words),
    "attention": Healthy(attention, words),
    "attention, frozen": Healthy(attention, words, frozen=True),
    "a layer called twice": Healthy(twice, rows),
    "gates": Healthy(gated, rows),
    "noise": Healthy(noisy, targets, L2),
    "ResNet-18, frozen": Healthy(resnet, images, None, 3, frozen=True, optimizer="sgd"),
}


def healthy_too(name: str, compute: str) -> Audit:
    """The audit of a network of ``HEALTHY_TOO`` after its training in FP32, by plain MXNet."""
    case = HEALTHY_TOO[name]
    rng = np.random.RandomState(2)
    np.random.seed(2)  # MXNet's initializers draw from it
    mx.random.seed(2)
    net = case.make()
    net.initialize(mx.init.Xavier())
    x, y = map(mx.nd.array, case.data(rng))
    trainer = gluon.Trainer(net.collect_params(), case.optimizer, {"learning_rate": 0.01})
    for _ in range(case.steps):
        with autograd.record():
            loss = (case.loss or CE)(net(x), y)
        loss.backward()
        trainer.step(len(y))
    if case.frozen:
        net.collect_params().setattr("grad_req", "null")
    mxmp.convert(net, compute)
    return audit(net, case.loss, (x, y) if case.loss else x)
