"""``grad_req="add"``: gradients of several backwards add up, through everything that mxmp inserts."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.modules import batch, bound, mlp, start
from kit.twins import (
    MASTERS,
    POLICIES,
    SCALE,
    array,
    assert_close,
    backward,
    convert,
    loss_of,
    seeded,
    sequence,
    trainer_of,
    updates,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp


class Tied(nn.HybridSequential):
    """Two layers, one weight."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            first = nn.Dense(6, in_units=6, use_bias=False)
            self.add(first, nn.Dense(6, in_units=6, use_bias=False, params=first.params), nn.Dense(2, in_units=6))


class Head(gluon.HybridBlock):
    """A loss head that writes its own gradient."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        return F.MakeLoss(F.square(self.body(x)))


class Attention(gluon.HybridBlock):
    """The matrix products of a transformer's self-attention."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.project = nn.Dense(12, in_units=6, flatten=False)
            self.norm = nn.LayerNorm(in_channels=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        qkv = self.project(F.reshape(x, (-1, 2, 6)))
        scores = F.contrib.interleaved_matmul_selfatt_qk(qkv, heads=1)
        seen = F.contrib.interleaved_matmul_selfatt_valatt(qkv, F.softmax(scores), heads=1)
        return F.reshape(self.norm(seen), (-1, 8))


def picture(*layers):
    return sequence(nn.HybridLambda(lambda nd, x: nd.reshape(x, (4, 6, 1, 1))), *layers, nn.Dense(2, in_units=6))


NETS = {
    "dense": lambda: sequence(nn.Dense(5, in_units=6, activation="tanh"), nn.Dense(2, in_units=5, use_bias=False)),
    "convolution": lambda: picture(nn.Conv2D(6, 1, in_channels=6)),
    "grouped convolution": lambda: picture(nn.Conv2D(6, 1, in_channels=6, groups=3)),
    "transposed convolution": lambda: picture(nn.Conv2DTranspose(6, 1, in_channels=6)),
    "batch norm": lambda: picture(nn.Conv2D(6, 1, in_channels=6), nn.BatchNorm(in_channels=6, epsilon=1.0)),
    "tied weights": Tied,
    "embedding": lambda: sequence(
        nn.HybridLambda(lambda nd, x: nd.abs(nd.round(x))), nn.Embedding(9, 3), nn.Dense(2, in_units=18)
    ),
    "recurrent": lambda: sequence(
        nn.HybridLambda(lambda nd, x: nd.reshape(x, (2, -1, 3))),
        gluon.rnn.LSTM(3, input_size=3),
        nn.Dense(2, in_units=3, flatten=False),
    ),
    "attention": Attention,
    "loss head": Head,
}


def two_backwards(make, policy, flags):
    """Updates of two accumulated batches and a step, then of two more."""
    net = seeded(make())
    net.collect_params().setattr("grad_req", "add")
    convert(policy, net, flags=flags)
    trainer = trainer_of(policy, net)

    def head_of(i):
        with autograd.record():
            return net(array(i, 4, 6))

    def step(first):
        for i in (first, first + 1):
            backward(trainer, head_of(i) if make is Head else loss_of(net, seed=i))
        trainer.step(8)
        net.collect_params().zero_grad()

    return [*updates(net, lambda: step(0)), *updates(net, lambda: step(2))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", NETS)
def test_two_backwards_add_up_as_in_fp32(kind, policy):
    found = two_backwards(NETS[kind], POLICIES[policy], None)
    expected = two_backwards(NETS[kind], None, None)
    trained = [i for i, full in enumerate(expected) if np.abs(full).max() > 1e-4]
    assert_close([found[i] for i in trained], [expected[i] for i in trained], policy)


@pytest.mark.parametrize("order", [("add", "write"), ("write", "add")], ids="-".join)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_changes_after_the_first_call_holds(policy, order):
    def gradients(policy):
        net = seeded(NETS["dense"]())
        convert(policy, net)
        found = []
        for request in order:
            net.collect_params().setattr("grad_req", request)
            for i in range(2):
                loss_of(net, seed=i).backward()
            found += [p.grad().asnumpy().astype("float32") for p in net.collect_params().values()]
        return found

    assert_close(gradients(POLICIES[policy]), gradients(None), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_with_different_requests_stand_side_by_side(policy):
    def gradients(policy):
        net = seeded(NETS["dense"]())
        net[0].weight.grad_req, net[0].bias.grad_req = "add", "null"
        convert(policy, net)
        for i in range(3):
            loss_of(net, seed=i).backward()
        return [p.grad().asnumpy().astype("float32") for p in (net[0].weight, net[1].weight)]

    assert_close(gradients(POLICIES[policy]), gradients(None), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_an_input_add_up(policy):
    def gradient(policy):
        net = seeded(NETS["dense"]())
        convert(policy, net)
        x = array(0, 4, 6)
        x.attach_grad("add")
        for _ in range(3):
            with autograd.record():
                out = net(x)
                loss = (out * out).sum()
            loss.backward()
        return [x.grad.asnumpy()]

    assert_close(gradient(POLICIES[policy]), gradient(None), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_module_two_backwards_add_up_for_weights_and_inputs(policy):
    def trained(kind, **mixed):
        module = bound(kind(mlp(), **mixed), inputs_need_grad=True, grad_req="add")
        module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.5})
        for i in range(2):
            module.forward_backward(batch(i))
        module.update()
        after = module.get_params()[0]
        learned = [(after[name] - value).asnumpy() for name, value in start().items()]
        return [*learned, module.get_input_grads()[0].asnumpy()]

    found = trained(mxmp.Module, policy=POLICIES[policy], loss_scale=SCALE)
    assert_close(found, trained(mx.mod.Module), policy)


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0**20), (2.0**20, 2.0**-8)])
def test_sums_of_float16_gradients_follow_a_loss_scale_by_any_factor(before, after):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    mxmp.convert(net, MASTERS)
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=before)
    step = trainer.scaled_step
    step.continue_sums([])
    sums = mx.nd.array([2.0**10 if after < before else 2.0**-10], dtype="float16")
    expected = sums.astype("float32") * (after / before)
    step.scaler.loss_scale = after
    step.continue_sums([sums])
    assert sums.asnumpy() == pytest.approx(expected.asnumpy(), rel=1e-3)


def test_the_first_sum_of_float16_gradients_takes_the_default_loss_scale():
    net = nn.Dense(2, in_units=6)
    net.initialize(mx.init.One())
    mxmp.convert(net, MASTERS)
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    assert trainer.loss_scale > 2.0**15
    with autograd.record():
        loss = net(mx.nd.full((1, 6), 1e-3)).sum() * 1e-3
    trainer.backward(loss)
    assert np.isfinite(net.weight.grad().asnumpy()).all()
    trainer.step(1)
    assert not trainer.last_step_skipped


@pytest.mark.parametrize("way", ["scale_loss", "backward"])
@pytest.mark.parametrize("policy", POLICIES)
def test_backwards_within_a_record_add_to_sums_when_the_loss_scale_has_changed(policy, way):
    """As in the loop of a YOLO that calls backward within ``autograd.record()``."""
    net = seeded(nn.Dense(3, in_units=6))
    convert(POLICIES[policy], net)
    net(array(0, 4, 6))
    net.collect_params().setattr("grad_req", "add")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, loss_scale=SCALE)
    found = []
    for scale in (SCALE, 2 * SCALE):
        trainer.scaler.loss_scale = scale
        with autograd.record():
            loss = net(array(0, 4, 6)).square().mean()
            if way == "backward":
                trainer.backward(loss)
            else:
                with trainer.scale_loss(loss) as scaled:
                    autograd.backward(scaled)
        found.append([param.grad().asnumpy() / scale for param in net.collect_params().values()])
        trainer.step(4)
    for first, second in zip(*found):
        np.testing.assert_allclose(second, 2 * first, rtol=1e-2, atol=1e-4)
