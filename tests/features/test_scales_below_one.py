"""A loss scale below 1, as of gradients above 65504: the same numbers everywhere as at a scale of 1."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

X, Y = mx.nd.array(np.random.RandomState(1).uniform(-1, 1, (8, 6))), mx.nd.arange(8) % 3


@pytest.mark.parametrize("power", [-60, -40])
def test_the_norm_of_gradients_whose_squares_underflow(power):
    from mxmp.step.gradients import Gradient, norm

    values = np.float32(2.0**power) * np.arange(1, 4, dtype=np.float32)
    assert norm([Gradient("w", mx.nd.array(values))]) == pytest.approx(2.0**power * 14**0.5, rel=1e-6)
    assert norm([Gradient("w", mx.nd.zeros(3))]) == 0


def regression():
    rng = np.random.RandomState(1)
    return mx.nd.array(rng.randn(256, 20)), mx.nd.array(rng.uniform(200, 600, (256, 1)))


SCALERS = [mxmp.DynamicLossScaler, mxmp.AdaptiveLossScaler]


@pytest.mark.slow
@pytest.mark.parametrize(("scaler", "guarded"), [*((each, False) for each in SCALERS), (SCALERS[0], True)])
def test_an_unnormalized_regression_trains_at_a_scale_below_one(scaler, guarded):
    x, y = regression()
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Dense(64, activation="relu"), nn.Dense(64, activation="relu"), nn.Dense(1))
    net.initialize(mx.init.Xavier())
    mxmp.convert(net, "float16")
    net(x)
    trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, loss_scale=scaler())
    guard = mxmp.diagnose.guard(net, trainer) if guarded else None
    losses = []
    for _ in range(50):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        trainer.backward(loss)
        trainer.step(256)
        losses.append(loss.mean().asscalar())
    assert losses[-1] < losses[0] / 5
    assert 2**-14 <= trainer.loss_scale < 1
    assert not guarded or not guard.moved  # no layer is at fault


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_module_s_too(scaler):
    x, y = regression()
    hidden = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64), act_type="relu")
    sym = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(hidden, num_hidden=1), name="out")
    module = mxmp.Module(sym, policy="float16", label_names=["out_label"], loss_scale=scaler())
    module.bind([("data", x.shape)], [("out_label", y.shape)])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.1})
    for _ in range(50):
        module.forward_backward(mx.io.DataBatch([x], [y]))
        module.update()
    assert ((module.get_outputs()[0] - y) ** 2).mean().asscalar() < 60_000
    assert 2**-14 <= module.loss_scale < 1
