"""On a GPU: native float16 agrees with the CPU's emulation, and trains."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.gpu


def make(ctx):
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, in_channels=8), nn.BatchNorm(in_channels=16), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(8, in_units=16))
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net.collect_params().reset_ctx(ctx)
    return mxmp.convert(net, "float16")


def train(ctx, steps=5):
    net = make(ctx)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
    rng = np.random.RandomState(0)
    for _ in range(steps):
        x, y = mx.nd.array(rng.randn(16, 8, 8, 8), ctx=ctx), mx.nd.array(np.arange(16) % 8, ctx=ctx)
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
        trainer.backward(loss)
        trainer.step(16)
        assert not trainer.last_step_skipped
    return net


def test_parameters_of_matrix_operators_are_float16_with_fp32_masters():
    net = train(mx.gpu(0), steps=1)
    dtypes = {name: p.data(mx.gpu(0)).dtype for name, p in net.collect_params().items()}
    assert dtypes["net_conv0_weight"] == dtypes["net_dense0_weight"] == np.float16
    assert dtypes["net_batchnorm0_gamma"] == np.float32
    assert net(mx.nd.ones((1, 8, 8, 8), ctx=mx.gpu(0))).dtype == np.float32


def test_training_agrees_with_the_emulation():
    native, emulated = train(mx.gpu(0)), train(mx.cpu())
    for name, param in emulated.collect_params().items():
        expected = param._reduce().asnumpy()
        found = native.collect_params()[name]._reduce().asnumpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * max(1.0, np.abs(expected).max()), err_msg=name)


def test_bfloat16_is_refused_and_the_net_stays_as_it_was():
    net = nn.Dense(4, in_units=3)
    net.initialize(ctx=mx.gpu(0))
    with pytest.raises(ValueError, match="float16"):
        mxmp.convert(net, "bfloat16")
    assert net(mx.nd.ones((1, 3), ctx=mx.gpu(0))).shape == (1, 4)
