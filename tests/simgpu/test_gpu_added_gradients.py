"""Kernels of a GPU that cannot add to a gradient, as cuDNN's with a beta of 0: mxmp lets them read a copy."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest

import mxmp

TESTS_PER_PROCESS = 20
GPU = mx.gpu(0)
S = mx.sym
X = np.random.RandomState(0).normal(0, 1, (2, 4, 6, 6)).astype("float32")
BORDER = (0, 0, 0, 0, 1, 1, 1, 1)
CANNOT_ADD: dict[str, Callable[..., Any]] = {
    "relu": lambda ops, x: ops.Activation(x, act_type="relu"),
    "tanh": lambda ops, x: ops.Activation(x, act_type="tanh"),
    "Pooling": lambda ops, x: ops.Pooling(x, kernel=(2, 2), stride=(2, 2)),
    "global Pooling": lambda ops, x: ops.Pooling(x, kernel=(1, 1), pool_type="avg", global_pool=True),
    "LRN": lambda ops, x: ops.LRN(x, nsize=3),
    "SoftmaxActivation": lambda ops, x: ops.SoftmaxActivation(x, mode="channel"),
    "Pad": lambda ops, x: ops.Pad(x, mode="constant", pad_width=BORDER),
    "Correlation": lambda ops, x: ops.Correlation(x, ops.ones(X.shape), pad_size=4),
}


def bound(op: str, convert: bool, **requests: Any) -> Any:
    side = S.FullyConnected(S.var("data"), num_hidden=3, no_bias=True, name="side")  # something in float16
    symbol = S.Group([CANNOT_ADD[op](S, S.var("x")), side])
    symbol = mxmp.cast_symbol(symbol, "float16", ctx=GPU) if convert else symbol
    return symbol.simple_bind(GPU, x=X.shape, data=(2, 4), grad_req=requests)


def added(op: str, convert: bool, backwards: int, request: str) -> np.ndarray:
    executor = bound(op, convert, x=request, data="null", side_weight="null")
    executor.arg_dict["x"][:] = mx.nd.array(X, ctx=GPU)
    executor.grad_dict["x"][:] = 0
    for _ in range(backwards):
        outputs, rng = executor.forward(is_train=True), np.random.RandomState(1)
        executor.backward([mx.nd.array(rng.rand(*out.shape), ctx=GPU, dtype=out.dtype) for out in outputs])
    return executor.grad_dict["x"].asnumpy()


@pytest.mark.parametrize("op", CANNOT_ADD)
def test_two_backwards_are_twice_the_gradient(op, monkeypatch):
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    one = added(op, False, 1, "write")
    np.testing.assert_allclose(added(op, True, 2, "add"), 2 * one, rtol=1e-4, atol=1e-5)
    assert not np.allclose(added(op, False, 2, "add"), 2 * one, rtol=1e-4, atol=1e-5), "MXNet has mended it"


class Many(mx.gluon.HybridBlock):
    """A tensor with ten readers: with static_alloc, MXNet lets most of them add to its gradient."""

    def __init__(self, op: str, copies: bool) -> None:
        super().__init__()
        self.op, self.copies = op, copies
        with self.name_scope():
            self.last = mx.gluon.nn.Dense(3, in_units=144)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.sin(x)
        read = F.identity(x) if self.copies else x
        total = F.broadcast_mul(x, F.sum(F.square(CANNOT_ADD[self.op](F, read)), axis=(1, 2, 3), keepdims=True))
        for i in range(9):
            total = F.elemwise_add(total, F.sin(x * (i + 1)))
        return self.last(total)


@pytest.mark.parametrize("op", CANNOT_ADD)
def test_one_of_many_readers_overwrites_no_other_s_gradient(op, monkeypatch):
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    found = []
    for copies in (False, True):
        net = Many(op, copies)
        net.initialize(mx.init.One(), ctx=GPU)
        mxmp.convert(net, "float16")
        net.hybridize(static_alloc=True)
        data = mx.nd.array(X, ctx=GPU)
        data.attach_grad()
        with mx.autograd.record():
            out = net(data)
        out.backward(mx.nd.ones_like(out) / 16)
        found.append(data.grad.asnumpy())
    assert np.isfinite(found[0]).all()
    np.testing.assert_allclose(*found, rtol=1e-2, atol=1e-2 * np.abs(found[1]).max())


def added_to(symbol: mx.sym.Symbol, start: float, **shapes: Any) -> np.ndarray:
    """The gradient of x, added to ``start``; the operator itself is FP32."""
    side = S.FullyConnected(S.var("data"), num_hidden=3, no_bias=True, name="side")
    cast = mxmp.cast_symbol(S.Group([symbol, side]), mxmp.Policy("float16", exclude=("alone",)), ctx=GPU)
    requests = {name: "add" if name == "x" else "null" for name in cast.list_arguments()}
    executor = cast.simple_bind(GPU, data=(2, 4), grad_req=requests, **shapes)
    executor.grad_dict["x"][:] = start
    executor.backward([mx.nd.ones(o.shape, ctx=GPU, dtype=o.dtype) for o in executor.forward(is_train=True)])
    return executor.grad_dict["x"].asnumpy()


def test_a_dropout_adds_to_what_is_there():
    assert set(added_to(S.Dropout(S.var("x"), p=0.5, name="alone"), 5, x=(8, 8)).ravel()) == {5.0, 7.0}


def test_a_recurrent_layer_runs_where_mxnet_refuses_to_add():
    layer = S.RNN(S.var("x"), S.var("w"), S.var("h"), mode="gru", state_size=4, num_layers=1, name="alone")
    assert (added_to(layer, 5, x=(3, 2, 5), w=(3 * 4 * 11,), h=(1, 2, 4)) == 5).all()  # zero weights, zero gradient


@pytest.mark.parametrize("convert", [True, False])
def test_a_hard_sigmoid_writes_over_the_gradient_of_a_residual_only_in_mxnets_own_graph(convert):
    weight = np.random.RandomState(0).normal(0, 1, (6, 6)).astype("float16")
    x = S.FullyConnected(S.var("x"), S.var("w"), num_hidden=6, no_bias=True, name="fc")
    symbol = S.hard_sigmoid(x) + x
    symbol = mxmp.cast_symbol(symbol, "float16", ctx=GPU) if convert else symbol
    executor = symbol.simple_bind(GPU, x=(2, 6), w=(6, 6))
    executor.arg_dict["x"][:] = 0  # so the slope is 0.2 everywhere
    executor.arg_dict["w"][:] = weight
    executor.backward([mx.nd.ones(o.shape, ctx=GPU, dtype=o.dtype) for o in executor.forward(is_train=True)])
    slope = 1.2 if convert else 0.4
    np.testing.assert_allclose(executor.grad_dict["x"].asnumpy()[0], slope * weight.sum(axis=0), rtol=2e-3, atol=2e-3)
