"""Every optimizer that MXNet registers: scaling and masters change no bit."""

from __future__ import annotations

from itertools import cycle

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, forward, train, two_layers
from kit.pictures import full_weights, tree
from kit.twins import MASTERS
from mxnet import autograd, gluon
from support.optimizers import OPTIMIZERS, options

import mxmp
from mxmp.step.updater import Updater, rescaled

BATCH_SIZES = (1, 3, 7, 12, 96, 100)
STEPS = 100
VARIANTS = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "sgd-clip": ("sgd", {"clip_gradient": 0.01}),
    "sgd-no-momentum": ("sgd", {"momentum": 0.0}),
    "adam-clip": ("adam", {"clip_gradient": 0.01}),
    "rmsprop-plain": ("rmsprop", {"centered": False}),
    "lbsgd-lars": ("lbsgd", {"warmup_strategy": "lars"}),
    "lbsgd-power2": ("lbsgd", {"warmup_strategy": "power2", "warmup_epochs": 1}),
}


def test_every_registered_optimizer_is_in_the_list():
    registered = mx.optimizer.Optimizer.opt_registry.items()
    assert set(OPTIMIZERS) == {name for name, kind in registered if kind.__module__.startswith("mxnet.optimizer")}


def run(trainer_class, name, extra, **kwargs):
    net = two_layers()
    found = {**options(name, scheduled=name == "sgd" and not extra), **extra}
    trainer = trainer_class(net.collect_params(), name, found, **kwargs)
    for step, batch_size in zip(range(STEPS), cycle(BATCH_SIZES)):
        train(net, trainer, [step], batch_size=batch_size)
    return tree([p.data() for p in trainer._params]), tree(trainer._updaters[0].states)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_power_of_two_scale_changes_no_bit_of_100_steps_of_six_batch_sizes(variant):
    name, extra = VARIANTS[variant]
    plain = run(gluon.Trainer, name, extra)
    scaled = run(mxmp.Trainer, name, extra, loss_scale=2.0**12)
    assert scaled == plain


@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_parameters_with_masters_equal_fp32_parameters_with_casts(variant):
    name, extra = VARIANTS[variant]
    found = []
    for policy in (MASTERS, CASTS):
        net = two_layers(policy)
        trainer = mxmp.Trainer(net.collect_params(), name, {**OPTIMIZERS[name], **extra}, loss_scale=2.0**6)
        train(net, trainer, range(40))
        assert trainer.skipped_steps == 0
        low = [p.data().dtype == np.float16 for p in trainer._params]
        assert all(low) if policy is MASTERS else not any(low)
        found.append((full_weights(trainer), tree(trainer._updaters[0].states)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_need_no_multi_precision_and_it_does_no_harm(name):
    found = []
    for multi in (False, True):
        net = two_layers(MASTERS)
        more = {**OPTIMIZERS[name], "multi_precision": multi}
        trainer = mxmp.Trainer(net.collect_params(), name, more, loss_scale=2.0**6)
        train(net, trainer, range(5))
        found.append((full_weights(trainer), tree(trainer._updaters[0].states)))
    assert found[0] == found[1]


@pytest.mark.parametrize("scale", [2.0**k for k in (0, 1, 8, 16, 20, 24)])
def test_rescale_grad_reaches_kernels_exactly_for_many_batch_sizes(scale):
    """Against the product of float32 numbers; exponent notation is where MXNet's parser slips."""
    rng = np.random.RandomState(0)
    gradient = rng.randn(500).astype(np.float32)
    optimizer = mx.optimizer.create("sgd", learning_rate=1.0)
    for size in [*range(1, 130), 1000, 1024, 4096, 12345, 100000]:
        optimizer.rescale_grad = 1 / size
        weight = mx.nd.zeros(500)
        updater = Updater(optimizer)
        with rescaled(optimizer, 1 / scale):
            updater(0, mx.nd.array(gradient * np.float32(scale)), weight)
        expected = -(gradient * np.float32(1 / size))
        assert np.array_equal(weight.asnumpy(), expected), size


def test_lbsgd_over_several_batches_sums_true_gradients_whatever_the_scale():
    """Against MXNet's updater on copies: its own sum holds the gradient buffer, which backward overwrites."""
    more = {**OPTIMIZERS["lbsgd"], "batch_scale": 3, "warmup_strategy": "lars"}
    net = two_layers()
    optimizer = mx.optimizer.create("lbsgd", rescale_grad=1 / 4, **more)
    updater = mx.optimizer.get_updater(optimizer)
    params = [net.collect_params()[k] for k in sorted(net.collect_params())]
    for step in range(12):
        autograd.backward(forward(net, step))
        for i, param in enumerate(params):
            updater(i, param.grad().copy(), param.data())
    for policy, scale in ((None, 2.0**12), (None, 1.0)):
        other = two_layers(policy)
        trainer = mxmp.Trainer(other.collect_params(), "lbsgd", more, loss_scale=scale)
        train(other, trainer, range(12))
        assert tree([p.data() for p in trainer._params]) == tree([p.data() for p in params])


def test_the_scale_may_change_within_an_lbsgd_window():
    more = {**OPTIMIZERS["lbsgd"], "batch_scale": 3}
    found = []
    for scaler in (mxmp.StaticLossScaler(8), mxmp.DynamicLossScaler(init_scale=8, growth_interval=1)):
        net = two_layers()
        trainer = mxmp.Trainer(net.collect_params(), "lbsgd", more, loss_scale=scaler)
        train(net, trainer, range(9))
        found.append(tree([p.data() for p in trainer._params]))
    assert found[0] == found[1]


class Unscaled(mx.optimizer.Optimizer):
    """A user's own, which never reads ``rescale_grad``: right in FP32 with the mean of a loss and ``step(1)``."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight -= self.lr * grad


class LimitedNorm(Unscaled):
    """A user's own, which limits the norm of each gradient before it multiplies by ``rescale_grad``."""

    def update(self, index, weight, grad, state):
        factor = min(1.0, 0.1 / grad.norm().asscalar())
        weight -= self.lr * factor * self.rescale_grad * grad


@pytest.mark.parametrize("kind", [Unscaled, LimitedNorm])
@pytest.mark.parametrize("policy", [None, CASTS, MASTERS])
def test_an_optimizer_of_the_users_own_gets_true_gradients_whatever_the_scale(kind, policy):
    found = []
    for scale in (None, 2.0**12):
        net = two_layers(policy)
        trainer = mxmp.Trainer(net.collect_params(), kind(learning_rate=0.1), loss_scale=scale)
        for step in range(5):
            with autograd.record():
                loss = forward(net, step)[0].mean()
            trainer.backward(loss)
            trainer.step(1)
        assert trainer.skipped_steps == 0
        found.append(full_weights(trainer))
    assert found[1] == found[0]


def test_clipping_reaches_an_optimizer_of_the_users_own():
    net = two_layers()
    trainer = mxmp.Trainer(net.collect_params(), Unscaled(learning_rate=1.0), loss_scale=None)
    before = [param.data().asnumpy() for param in trainer._params]
    trainer.backward(forward(net, 0))
    trainer.clip_global_norm(1e-3)
    trainer.step(1)
    moved = [param.data().asnumpy() - old for param, old in zip(trainer._params, before)]
    assert np.sqrt(sum(float((each**2).sum()) for each in moved)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_float16_parameters_of_the_users_own_cast_train_with_multi_precision(name):
    """``net.cast('float16')`` without convert: MXNet's layout of states, our check and scale."""
    found = []
    for trainer_class, scale in ((gluon.Trainer, None), (mxmp.Trainer, 2.0**4)):
        weight = gluon.Parameter("weight", shape=(6,), dtype="float16")
        weight.initialize(mx.init.One())
        kwargs = {} if scale is None else {"loss_scale": scale}
        more = {**OPTIMIZERS[name], "multi_precision": True}
        trainer = trainer_class([weight], name, more, **kwargs)
        for step in range(5):
            with autograd.record():
                loss = ((weight.data() * (step + 1)).astype("float32") ** 2).sum()
            if scale is None:
                loss.backward()
            else:
                trainer.backward(loss)
            trainer.step(1)
        found.append((tree(weight.data()), tree(trainer._updaters[0].states)))
    assert found[0] == found[1]
