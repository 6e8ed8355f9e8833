"""Miniatures of the families of networks, and a run of one: on any devices, in FP32 or by a policy.

Values of parameters and batches depend on seeds alone, so runs on a CPU and on the simulated GPU begin as one.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from kit.blocks import Lambda
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

CPU, GPU = mx.cpu(), mx.gpu(0)
ROWS, WORDS, UNITS, CLASSES = 8, 13, 12, 5


def chain(*blocks: gluon.HybridBlock) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def conv(channels: int, kernel: int = 3, act: str | None = "tanh", **options: Any) -> nn.HybridSequential:
    found = chain(nn.Conv2D(channels, kernel, padding=kernel // 2, use_bias=False, **options), nn.BatchNorm())
    if act:
        found.add(nn.Swish() if act == "swish" else nn.Activation(act))
    return found


def residual(act: str = "tanh") -> gluon.HybridBlock:
    body = chain(conv(8, act=act), conv(8, act=None))
    added = Lambda(lambda f, b, x: f.Activation(x + b.body(x), act_type=act), body=body)
    pool = nn.MaxPool2D if act == "relu" else nn.AvgPool2D
    return chain(conv(8, act=act), added, pool(), conv(16, act=act), nn.GlobalAvgPool2D(), nn.Dense(CLASSES))


def relu6() -> gluon.HybridBlock:
    return Lambda(lambda f, b, x: f.clip(x, 0, 6))


def depthwise(relu: bool = False) -> gluon.HybridBlock:
    """MobileNet: inverted bottlenecks, of which one has squeeze and excitation."""
    act = None if relu else "swish"
    gate = chain(nn.GlobalAvgPool2D(), nn.Conv2D(4, 1), nn.Activation("tanh"), nn.Conv2D(16, 1))
    excited = Lambda(lambda f, b, x: f.broadcast_mul(x, f.sigmoid(b.gate(x))), gate=gate)
    body = [conv(16, 1, act=act), conv(16, groups=16, strides=2, act=act), excited, conv(8, 1, act=None)]
    body = [layer for each in body for layer in ((each, relu6()) if relu else (each,))]
    return chain(conv(8, act=act), *body, nn.GlobalAvgPool2D(), nn.Dense(CLASSES))


def dense() -> gluon.HybridBlock:
    """DenseNet: each layer reads all before it, and norms come first."""

    def grows() -> gluon.HybridBlock:
        body = chain(nn.BatchNorm(), nn.Activation("tanh"), nn.Conv2D(4, 3, padding=1))
        return Lambda(lambda f, b, x: f.concat(x, b.body(x), dim=1), body=body)

    return chain(nn.Conv2D(6, 3, padding=1), grows(), grows(), nn.AvgPool2D(), grows(), nn.Flatten(), nn.Dense(CLASSES))


def u_net() -> gluon.HybridBlock:
    """A class for each pixel."""
    across = Lambda(
        lambda f, b, x: f.concat(x, b.up(b.low(b.down(x))), dim=1),
        down=nn.AvgPool2D(),
        low=conv(12),
        up=nn.Conv2DTranspose(6, 2, strides=2),
    )
    return chain(conv(6), across, conv(8), nn.Conv2D(CLASSES, 1))


def attention() -> gluon.HybridBlock:
    def compute(f: Any, b: Any, x: Any) -> Any:
        queries, keys, values = f.split(b.parts(x), num_outputs=3, axis=2)
        scores = f.softmax(f.batch_dot(queries, keys, transpose_b=True) / UNITS**0.5, axis=-1)
        return b.out(f.batch_dot(scores, values))

    return Lambda(compute, parts=nn.Dense(3 * UNITS, flatten=False), out=nn.Dense(UNITS, flatten=False))


def encoder() -> gluon.HybridBlock:
    """A transformer's encoder, its norms first, over vectors."""

    def added(body: gluon.HybridBlock) -> gluon.HybridBlock:
        return Lambda(lambda f, b, x: x + b.body(b.norm(x)), body=body, norm=nn.LayerNorm())

    wide = chain(nn.Dense(2 * UNITS, flatten=False), nn.Swish(), nn.Dense(UNITS, flatten=False))
    mean = Lambda(lambda f, b, x: f.mean(x, axis=1))
    first = nn.Dense(UNITS, flatten=False)
    return chain(first, added(attention()), added(wide), nn.LayerNorm(), mean, nn.Dense(CLASSES))


def words() -> gluon.HybridBlock:
    """A language model whose decoder has the embedding's weight."""
    embedding = nn.Embedding(WORDS, UNITS)
    decoder = nn.Dense(WORDS, flatten=False, params=embedding.params, use_bias=False, in_units=UNITS)
    return Lambda(
        lambda f, b, x: b.decoder(b.norm(b.read(b.embedding(x)))),
        embedding=embedding, read=attention(), norm=nn.LayerNorm(), decoder=decoder,
    )  # fmt: skip


class Family(NamedTuple):
    make: Callable[[], gluon.HybridBlock]
    shape: tuple[int, ...]  # of a sample
    labels: tuple[int, ...] = ()  # of a sample, too
    axis: int = 1  # of the classes in the outputs

    def batch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.RandomState(number)
        x = rng.randint(0, WORDS, (ROWS, *self.shape)) if self.axis == 2 else rng.randn(ROWS, *self.shape)
        return x.astype("float32"), rng.randint(0, CLASSES, (ROWS, *self.labels)).astype("float32")

    def loss(self, outputs: Any, labels: Any) -> Any:
        return gluon.loss.SoftmaxCrossEntropyLoss(axis=self.axis)(outputs, labels)


IMAGE, SEQUENCE = (3, 8, 8), (6, UNITS)
SMOOTH = {
    "residual": Family(residual, IMAGE),
    "depthwise": Family(depthwise, IMAGE),
    "dense": Family(dense, IMAGE),
    "u-net": Family(u_net, IMAGE, IMAGE[1:]),
    "encoder": Family(encoder, SEQUENCE),
    "words": Family(words, SEQUENCE[:1], SEQUENCE[:1], axis=2),
}
KINKED = {"relu": Family(lambda: residual("relu"), IMAGE), "relu6": Family(lambda: depthwise(True), IMAGE)}


class Training:
    """A net with its trainer. ``policy`` None is MXNet's own in FP32; ``scale`` is a number or a scaler."""

    def __init__(
        self,
        family: Family,
        policy: str | None,
        *devices: mx.Context,
        optimizer: str = "sgd",
        options: dict[str, Any] | None = None,
        scale: Any = 128.0,
        request: str = "write",
    ) -> None:
        self.family, self.devices, self.mixed = family, list(devices), policy is not None
        mx.random.seed(3)
        self.net = family.make()
        self.net.initialize(mx.init.Xavier(magnitude=2), ctx=CPU)
        self.net(mx.nd.array(family.batch(0)[0][:2]))
        self.net.collect_params().reset_ctx(self.devices)
        self.net.collect_params().setattr("grad_req", request)
        self.before = self.weights()
        if policy:
            mxmp.convert(self.net, policy)
        self.net.hybridize()
        options = {"learning_rate": 0.1, "momentum": 0.9} if options is None and optimizer == "sgd" else options
        own = {"loss_scale": scale} if policy else {"update_on_kvstore": False}
        made = (mxmp.Trainer if policy else gluon.Trainer)(self.net.collect_params(), optimizer, options, **own)
        self.trainer: Any = made

    def backward(self, number: int, times: Sequence[float] = (1.0,)) -> float:
        """The mean loss of a batch, a part of it on each device, whose inputs are multiplied by ``times``."""
        count, losses = len(self.devices), []
        parts = [np.split(each, count) for each in self.family.batch(number)]
        with autograd.record():
            for i, ctx in enumerate(self.devices):
                x, y = (mx.nd.array(part[i], ctx=ctx) for part in parts)
                losses.append(self.family.loss(self.net(x * times[i % len(times)]), y))
        if self.mixed:
            self.trainer.backward(losses)
        else:
            autograd.backward(losses)
        return float(np.mean([loss.asnumpy() for loss in losses]))

    def step(self, number: int, times: Sequence[float] = (1.0,)) -> float:
        loss = self.backward(number, times)
        self.trainer.step(ROWS)
        return loss

    def steps(self, count: int, first: int = 0) -> list[float]:
        return [self.step(first + i) for i in range(count)]

    def weights(self, device: int = 0) -> dict[str, np.ndarray]:
        """FP32 masters where float16 is stored, and the running statistics."""
        found = self.net._collect_params_with_prefix()
        arrays = {name: (p.masters if hasattr(p, "masters") else p.list_data)() for name, p in found.items()}
        return {name: array[device].asnumpy() for name, array in arrays.items()}

    def change(self) -> np.ndarray:
        """Of all weights since the beginning, side by side."""
        after = self.weights()
        return np.concatenate([(after[n] - self.before[n]).ravel() for n in sorted(after) if "running" not in n])


def trained(*arguments: Any, count: int = 3, **options: Any) -> Training:
    made = Training(*arguments, **options)
    made.losses = made.steps(count)  # type: ignore[attr-defined]
    return made


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """The names of arrays of which a bit differs."""
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]
