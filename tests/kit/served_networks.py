"""Small networks with the structures that fusion and quantization get wrong, and one that is trained on digits."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn

from kit.oracle import sqnr
from mxmp.precision.graph import Graph
from mxmp.serving.folding import fold_norms, without_identities
from mxmp.serving.fusing import fuse

S = mx.sym


def filled(symbol: mx.sym.Symbol, seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, mx.nd.NDArray]:
    """Random parameters and running statistics, none of them trivial, by name."""
    rng = np.random.RandomState(seed)
    sizes, _, states = symbol.infer_shape(**shapes)
    values = {}
    for name, size in [*zip(symbol.list_arguments(), sizes), *zip(symbol.list_auxiliary_states(), states)]:
        if name in shapes:
            continue
        fan_in = max(int(np.prod(size[1:])), 1)
        drawn = rng.uniform(0.5, 2, size) if "var" in name or "gamma" in name else rng.normal(0, fan_in**-0.5, size)
        values[name] = mx.nd.array(drawn)
    return values


def forward(symbol: mx.sym.Symbol, params: dict, **inputs: mx.nd.NDArray) -> list[np.ndarray]:
    """The outputs in inference, without MXNet's own fusion at bind: its default context is another CPU."""
    known = {**params, **inputs}
    args = {name: known[name].as_in_context(mx.cpu(1)) for name in symbol.list_arguments()}
    states = {name: params[name].as_in_context(mx.cpu(1)) for name in symbol.list_auxiliary_states()}
    executor = symbol.bind(mx.cpu(1), args, grad_req="null", aux_states=states)
    return [out.astype("float32").asnumpy() for out in executor.forward(is_train=False)]


def conv(x: mx.sym.Symbol, name: str, **kwargs: Any) -> mx.sym.Symbol:
    return S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=8, name=name, **{"no_bias": True, **kwargs})


def relu(x: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    return S.Activation(x, act_type="relu", name=name)


def preactivation(norm: bool) -> mx.sym.Symbol:
    x = conv(S.var("data"), "stem")
    for i in range(3):
        y = S.BatchNorm(x, fix_gamma=False, name=f"bn{i}") if norm else x
        x = x + conv(relu(y, f"relu{i}"), f"conv{i}")
    return x


def warmed(net: gluon.HybridBlock, *shape: int, steps: int = 20) -> gluon.HybridBlock:
    """Initialize a net, and let its running statistics see data: MXNet updates them in backward."""
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    for _ in range(steps):
        x = mx.nd.random.normal(shape=shape)
        with autograd.record():
            loss = net(x).sum()
        loss.backward()
    mx.nd.waitall()
    return net


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images[:, None] / 8 - 1).astype("float32"), data.target.astype("float32")


def trained_on_digits() -> gluon.HybridBlock:
    """A residual network that is right on nine in ten of the digits that it did not see."""
    images, labels = digits()
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(Residual(), Residual(), nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=None)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.RandomState(0).permutation(1200)
    for start in range(0, 3 * 1200, 60):
        batch = order[start % 1200 : start % 1200 + 60]
        with autograd.record():
            loss = loss_of(net(mx.nd.array(images[batch])), mx.nd.array(labels[batch]))
        loss.backward()
        trainer.step(60)
    return net


class Residual(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(16, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
            self.body.add(nn.Conv2D(16, 3, padding=1, use_bias=False), nn.BatchNorm())

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.relu(x + self.body(x))


def batches(images: np.ndarray, count: int = 3, size: int = 32) -> list[mx.nd.NDArray]:
    """Batches of digits that did not train the network of ``trained_on_digits``, to calibrate it with."""
    return [mx.nd.array(images[1200 + i * size : 1200 + (i + 1) * size]) for i in range(count)]


LAYERS = {
    "conv": lambda x, y, name: conv(x, name),
    "biased": lambda x, y, name: conv(x, name, no_bias=False),
    "norm": lambda x, y, name: S.BatchNorm(x, fix_gamma=False, name=name),
    "relu": lambda x, y, name: relu(x, name),
    "clip": lambda x, y, name: S.clip(x, 0, 1, name=name),
    "add": lambda x, y, name: S.elemwise_add(x, y, name=name),
    "tanh": lambda x, y, name: S.Activation(x, act_type="tanh", name=name),
    "dropout": lambda x, y, name: S.Dropout(x, name=name),
    "leaky": lambda x, y, name: S.LeakyReLU(x, act_type="leaky", slope=0.1, name=name),
    "pool": lambda x, y, name: S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="max", name=name),
}


@st.composite
def networks(draw):
    """Convolutions, norms and activations, with skips to anything before."""
    tensors = [conv(S.var("data"), "stem")]
    for index in range(draw(st.integers(2, 8))):
        x, y = (tensors[draw(st.integers(max(len(tensors) - 3, 0), len(tensors) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(["conv", "add", *LAYERS]))
        tensors.append(LAYERS[kind](x, y, f"node{index}"))
    heads = [tensors[-1], *(t for t in tensors[1:-1] if draw(st.integers(0, 5)) == 0)]
    return S.Group(heads) if len(heads) > 1 else heads[0]


LOW = [
    pytest.param("bfloat16", marks=pytest.mark.bfloat16_kernels),
    pytest.param("int8", marks=pytest.mark.vnni),
]


SHAPE = (2, 3, 10, 10)


def optimized(symbol, params, fold=True, **kwargs):
    graph = without_identities(Graph.from_symbol(symbol))
    if fold:
        graph, params = fold_norms(graph, params)
    return fuse(graph, **kwargs), params


def check(symbol, shape=SHAPE, floor=100.0, **kwargs):
    params = filled(symbol, data=shape)
    x = mx.nd.array(np.random.RandomState(1).normal(size=shape))
    graph, values = optimized(symbol, params, **kwargs)
    made = graph.to_symbol()
    assert made.list_outputs() == symbol.list_outputs()
    for wanted, got in zip(forward(symbol, params, data=x), forward(made, values, data=x)):
        assert sqnr(wanted, got) > floor
    return graph
