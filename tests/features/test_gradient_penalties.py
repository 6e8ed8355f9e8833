"""Penalties on gradients (WGAN-GP) of a converted net, by the way of the manual: a derivative along the gradient."""

from __future__ import annotations

from functools import lru_cache

import mxnet as mx
import numpy as np
import pytest
from kit.twins import POLICIES, array, assert_close, assert_same, backward, convert, seeded, trainer_of, updates
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

STEPS = 3


class Convolutional(gluon.HybridBlock):
    """A critic's value at ``x``, and its derivative along ``v``; each line has its derivative beside it."""

    shape = (2, 6, 6)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Conv2D(8, 3, in_channels=2, use_bias=False)
            self.second = nn.Conv2D(8, 3, in_channels=8, use_bias=False)
            self.last = nn.Dense(1, in_units=32, use_bias=False)

    def hybrid_forward(self, F, x, v):  # noqa: N803
        for layer in (self.first, self.second):
            x, v = layer(x), layer(v)
            slope = 0.2 + 0.8 * (x > 0)  # of a leaky relu
            x, v = x * slope, v * slope
        return self.last(x), self.last(v)


class Dense(gluon.HybridBlock):
    """With biases, a smooth activation and a skip."""

    shape = (6,)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Dense(16, in_units=6, use_bias=False)
            self.second = nn.Dense(16, in_units=16, use_bias=False)
            self.last = nn.Dense(1, in_units=16, use_bias=False)
            self.bias = self.params.get("bias", shape=(16,))

    def hybrid_forward(self, F, x, v, bias):  # noqa: N803
        x, v = F.tanh(F.broadcast_add(self.first(x), bias)), self.first(v)
        v = v * (1 - x * x)
        y = F.sigmoid(self.second(x))
        x, v = x + y, v + self.second(v) * y * (1 - y)
        return self.last(x), self.last(v)


CRITICS = {"convolutional": Convolutional, "dense": Dense}


def norms(array):
    return array.square().sum(axis=tuple(range(1, array.ndim))).sqrt()


def gradient_at(net, mix):
    mix.attach_grad()
    with autograd.record():
        out, _ = net(mix, mix)
    return autograd.grad(out, [mix], head_grads=[mx.nd.full(out.shape, 64, dtype=mix.dtype)])[0] / 64


def direction(net, mix):
    """Of the gradient at ``mix``, of length 1."""
    gradient = gradient_at(net, mix)
    return gradient / norms(gradient).reshape((-1, *[1] * (gradient.ndim - 1)))


def loss_at(net, step, weight):
    real, fake = array(2 * step, 16, *net.shape) + 0.5, array(2 * step + 1, 16, *net.shape)
    mix = 0.3 * real + 0.7 * fake
    along = direction(net, mix)
    with autograd.record():
        slope = net(mix, along)[1]
        return net(fake, fake)[0].square().mean() - net(real, real)[0].mean() + weight * (slope - 1).square().mean()


def trained(kind, policy, weight=10.0, scale=64.0, how="backward", flags=None):
    """What training adds to the weights."""
    net = seeded(CRITICS[kind](prefix="critic_"), scale=0.3)
    convert(policy and POLICIES[policy], net, flags=flags)
    trainer = trainer_of(policy, net, scale=scale, learning_rate=0.01, momentum=0.9)

    def run():
        for step in range(STEPS):
            loss = loss_at(net, step, weight)
            if how == "scale_loss":
                with trainer.scale_loss(loss) as scaled:
                    autograd.backward(scaled)
            else:
                backward(trainer, loss)
            trainer.step(1)
            assert not getattr(trainer, "skipped_steps", 0)

    return updates(net, run)


@lru_cache(maxsize=None)
def in_fp32(kind, weight=10.0):
    return trained(kind, None, weight)


@pytest.mark.parametrize("how", ["backward", "scale_loss"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", CRITICS)
def test_a_critic_with_a_penalty_learns_what_fp32_learns(kind, policy, scale, how):
    assert_close(trained(kind, policy, scale=scale, how=how), in_fp32(kind), policy)


@pytest.mark.parametrize("kind", CRITICS)
def test_most_of_what_is_learned_here_is_the_penalty_s(kind):
    for full, without in zip(in_fp32(kind), in_fp32(kind, weight=0.0)):
        assert np.abs(full - without).max() > 0.3 * np.abs(full).max()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
def test_hybridize_changes_no_bit(flags, policy):
    assert_same(trained("convolutional", policy, flags=flags), trained("convolutional", policy))


@pytest.mark.parametrize("kind", CRITICS)
def test_its_gradient_is_the_penalty_s_own(kind):
    """Against differences of the penalty, in float64."""
    net = seeded(CRITICS[kind](prefix="critic_"), scale=0.3)
    net.cast("float64")
    mix = array(0, 16, *net.shape).astype("float64")

    def penalty():
        return (norms(gradient_at(net, mix)) - 1).square().mean().asscalar()

    along = direction(net, mix)
    with autograd.record():
        slope = net(mix, along)[1]
        found = (slope - 1).square().mean()
    np.testing.assert_allclose(slope[:, 0].asnumpy(), norms(gradient_at(net, mix)).asnumpy(), rtol=1e-9)
    found.backward()
    for number, param in enumerate(net.collect_params().values()):
        step = array(50 + number, *param.shape).astype("float64") * 1e-6
        value = param.data().copy()
        param.set_data(value + step)
        above = penalty()
        param.set_data(value - step)
        below = penalty()
        param.set_data(value)
        expected = (above - below) / 2
        assert (param.grad() * step).sum().asscalar() == pytest.approx(expected, rel=1e-4)


# -- What MXNet 1.9.1 does with create_graph=True, which the manual says -----------------------------


def test_a_second_derivative_of_a_converted_net_ends_with_mxnet_s_message():
    net = mxmp.convert(seeded(nn.Dense(1, in_units=6)))
    x = array(0, 2, 6)
    x.attach_grad()
    with autograd.record(), pytest.raises(mx.MXNetError, match="CachedOp does not support higher order gradients"):
        autograd.grad(net(x), [x], create_graph=True)


def test_in_plain_mxnet_a_convolution_has_none():
    net = seeded(nn.Conv2D(2, 3, in_channels=2))
    x = array(0, 2, 2, 5, 5)
    x.attach_grad()
    with autograd.record():
        (slope,) = autograd.grad(net(x), [x], create_graph=True)
        total = slope.square()
    with pytest.raises(mx.MXNetError, match="_backward_Convolution is non-differentiable"):
        total.backward()


def test_in_plain_mxnet_that_of_two_dense_layers_is_wrong():
    first, second = seeded(nn.Dense(4, in_units=5, use_bias=False)), seeded(nn.Dense(1, in_units=4, use_bias=False))
    x = array(0, 3, 5)
    x.attach_grad()
    with autograd.record():
        (slope,) = autograd.grad(second(first(x)), [x], create_graph=True)
        total = slope.square().sum()
    total.backward()
    w, v = first.weight.data().asnumpy(), second.weight.data().asnumpy()
    np.testing.assert_allclose(first.weight.grad().asnumpy(), 6 * v.T @ (v @ w), rtol=1e-4)
    assert np.abs(6 * (v @ w) @ w.T).max() > 0.1
    assert (second.weight.grad().asnumpy() == 0).all()
