"""User code that reads gradients with the loss scale in them gets one warning; all other reads get none."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import mxnet as mx
import numpy as np
import pytest
from kit.twins import LOSS, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

X, Y = mx.nd.random.normal(shape=(4, 6)), mx.nd.ones((4, 3))
WARNING = r"multiplied by the loss scale.*trainer\.unscale\(\).*trainer\.clip_global_norm"


class Scheduled(gluon.Parameter):
    """A Parameter of a user's own, with a ``grad`` of its own."""

    reads = 0

    def grad(self, ctx=None):
        self.reads += 1
        return super().grad(ctx)


def made(policy="float16", loss_scale=64, kind=None):
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=6), nn.Dense(3, in_units=5))
    if kind is not None:
        for param in net.collect_params().values():
            param.__class__ = kind
    net.initialize(mx.init.Xavier())
    if policy is not None:
        mxmp.convert(net, policy)
    return net, mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=loss_scale)


def backward(net, trainer):
    with autograd.record():
        loss = LOSS(net(X), Y)
    trainer.backward(loss)


def by_grad(net):
    return [p.grad() for p in net.collect_params().values()]


def by_list_grad(net):
    return [p.list_grad()[0] for p in net.collect_params().values()]


READS = [by_grad, by_list_grad]


def silently(call, *args, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args, **named)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("policy", ["float16", "params=float16", None])
def test_the_first_read_between_backward_and_step_warns_and_no_other(policy, read):
    net, trainer = made(policy)
    silently(read, net) if policy is None else silently(net, X)
    silently(backward, net, trainer)
    with pytest.warns(UserWarning, match=WARNING) as found:
        _, gradients = read(net), read(net)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert all(g.shape == p.shape for g, p in zip(gradients, net.collect_params().values()))
    silently(trainer.step, 4)
    backward(net, trainer)
    silently(read, net)


def test_clipping_by_gluon_s_function_warns():
    net, trainer = made()
    backward(net, trainer)
    with pytest.warns(UserWarning, match=WARNING):
        gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 1.0)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("policy", "scale"), [("bfloat16", "dynamic"), ("float16", None), ("float16", 1.0)])
def test_without_a_loss_scale_nothing_warns(policy, scale, read):
    net, trainer = made(policy, scale)
    backward(net, trainer)
    silently(read, net)
    silently(trainer.step, 4)


@pytest.mark.parametrize("read", READS)
def test_true_gradients_are_read_without_a_warning(read):
    net, trainer = made()
    silently(net, X)
    silently(read, net)
    backward(net, trainer)
    silently(trainer.unscale)
    gradients = silently(read, net)
    silently(gluon.utils.clip_global_norm, gradients, 1.0)
    silently(trainer.step, 4)
    silently(read, net)


@pytest.mark.parametrize("read", READS)
def test_clipped_gradients_still_have_the_scale(read):
    net, trainer = made()
    backward(net, trainer)
    silently(trainer.clip_global_norm, 1.0)
    with pytest.warns(UserWarning, match=WARNING):
        read(net)


@pytest.mark.parametrize("read", READS)
def test_a_read_within_scale_loss_warns_after_the_backward_and_not_before(read):
    net, trainer = made()
    silently(net, X)
    with autograd.record():
        loss = LOSS(net(X), Y)
    with trainer.scale_loss(loss) as scaled:
        silently(read, net)
        scaled.backward()
        with pytest.warns(UserWarning, match=WARNING):
            read(net)
    silently(trainer.step, 4)


def test_mxmp_s_own_reads_and_those_of_mxnet_warn_of_nothing():
    net, trainer = made()
    net(X)
    with mxmp.diagnose.watch(net, trainer, every=1), mxmp.diagnose.guard(net, trainer):
        for _ in range(2):
            silently(backward, net, trainer)
            silently(trainer.allreduce_grads)
            silently(trainer.clip_global_norm, 1.0)
            silently(trainer.update, 4)
            silently(net.collect_params().zero_grad)
    silently(mxmp.diagnose.blame, net, trainer, X, loss=lambda out: LOSS(out, Y))


def test_each_trainer_warns_once():
    nets = [made(), made()]
    for net, trainer in nets:
        backward(net, trainer)
        with pytest.warns(UserWarning, match=WARNING):
            by_grad(net)


def test_a_parameter_of_a_user_s_class_keeps_its_own_grad():
    net, trainer = made(kind=Scheduled)
    backward(net, trainer)
    with pytest.warns(UserWarning, match=WARNING):
        by_grad(net)
    assert all(p.reads == 1 for p in net.collect_params().values())


def test_outside_the_window_parameters_and_arrays_are_mxnet_s_own():
    def state(net):
        return [(type(p), sorted(vars(p)), type(p.data())) for p in net.collect_params().values()]

    net, trainer = made()
    net(X)
    before = state(net)
    for finish in (lambda: trainer.step(4), lambda: (trainer.unscale(), trainer.step(4))):
        backward(net, trainer)
        assert state(net) != before
        finish()
        assert state(net) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
@pytest.mark.parametrize("policy", ["float16", "params=float16"])
def test_a_copy_within_the_window_reads_its_gradients_without_a_warning(policy, copied):
    net, trainer = made(policy)
    backward(net, trainer)
    other = copied(net[0].params)
    for param in other.values():
        assert isinstance(silently(param.grad), mx.nd.NDArray)
        assert type(param.data()) is mx.nd.NDArray


@mx.util.use_np
@pytest.mark.parametrize("read", READS)
def test_np_nets_warn_too(read):
    net, trainer = made()
    with autograd.record():
        loss = (net(mx.np.ones((4, 6))) ** 2).sum()
    trainer.backward(loss)
    with pytest.warns(UserWarning, match=WARNING):
        norm = math.sqrt(sum(float((g**2).sum()) for g in read(net)))
    assert norm > 0
    trainer.step(4)
    assert type(net[0].weight.data()) is mx.np.ndarray


@pytest.mark.parametrize("optimizer", ["dcasgd", "sgd"])
def test_weights_may_be_copied_into_other_arrays_within_the_window(optimizer):
    """MXNet refuses ``array[:] = value`` where the classes of the two differ, as in DCASGD's own update."""
    net, _ = made()
    trainer = mxmp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1}, loss_scale=8)
    backward(net, trainer)
    for param in net.collect_params().values():
        kept = mx.nd.zeros(param.shape)
        kept[:] = param.data()
        np.testing.assert_array_equal(kept.asnumpy(), param.data().asnumpy())
    trainer.step(4)


def test_reads_change_no_bit_of_the_training():
    def run(read):
        mx.random.seed(3)
        net, trainer = made()
        for _ in range(3):
            backward(net, trainer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(net)
            trainer.step(4)
        return [p.data().asnumpy() for p in net.collect_params().values()]

    plain = run(lambda net: None)
    for read in READS:
        assert_same(plain, run(read))
