"""Every optimizer that MXNet registers: scaling and masters change no bit."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import forward, train, two_layers
from kit.pictures import tree
from mxnet import autograd, gluon
from support.optimizers import OPTIMIZERS

import mxmp
from mxmp.step.updater import Updater, rescaled


def test_every_registered_optimizer_is_in_the_list():
    registered = mx.optimizer.Optimizer.opt_registry.items()
    assert set(OPTIMIZERS) == {name for name, kind in registered if kind.__module__.startswith("mxnet.optimizer")}


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
