"""Miniatures of the families of networks train on the simulated GPU as they do emulated on a CPU, and as in FP32."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .families import CPU, GPU, KINKED, ROWS, SMOOTH, Training, chain, distance, trained


def assert_trains_alike(exact: Any, emulated: Any, computed: Any, room: float = 1.0) -> None:
    """The weights' change, to float16's own error times ``room``: what the emulation changes of FP32's."""
    own = distance(emulated.change(), exact.change())
    assert 0 < own < 4e-3
    assert distance(computed.change(), emulated.change()) < room * own
    assert distance(computed.change(), exact.change()) < 1.5 * own


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "float16") for name in SMOOTH), ("depthwise", "float16-fast"), ("words", "float16-fast")],
)
def test_the_weights_of_a_smooth_network_change_as_in_the_emulation(name, policy):
    runs = (None, CPU), (policy, CPU), (policy, GPU)
    # Where no norm or bias makes much of a sum's last bit, nearly all bits are the same.
    assert_trains_alike(*(trained(SMOOTH[name], *run) for run in runs), room=0.05 if name == "words" else 1.0)


@pytest.mark.parametrize("name", KINKED)
def test_the_losses_of_a_network_with_kinks_are_fp32s(name):
    exact, computed = (trained(KINKED[name], *run, count=8).losses for run in ((None, CPU), ("float16", GPU)))
    assert np.abs(np.subtract(exact, computed)).max() < 2e-2
    assert computed[-1] < computed[1]


def trained_by_contrib_amp(name: str, count: int = 3) -> Training:
    """MXNet's own mixed precision, at the same loss scale. Patches MXNet."""
    from mxnet.contrib import amp

    run = Training(SMOOTH[name], None, GPU)
    amp.init()
    amp.init_trainer(run.trainer)
    scaler = run.trainer._amp_loss_scaler
    scaler._loss_scale = scaler._next_loss_scale = 128.0
    for number in range(count):
        x, y = (mx.nd.array(each, ctx=GPU) for each in run.family.batch(number))
        with autograd.record():
            loss = run.family.loss(run.net(x), y)
            with amp.scale_loss(loss, run.trainer) as scaled:
                autograd.backward(scaled)
        run.trainer.step(ROWS)
    return run


@pytest.mark.parametrize("name", ["residual", "depthwise"])  # its batch_dot sums in float16
def test_the_weights_are_as_near_fp32s_as_those_of_contrib_amp(name):
    exact, ours = (trained(SMOOTH[name], *run).change() for run in ((None, CPU), ("float16", GPU)))
    theirs = trained_by_contrib_amp(name).change()
    assert 0 < distance(theirs, exact) < 2e-2
    assert distance(ours, exact) < 1.5 * distance(theirs, exact)


class Adversaries:
    """DCGAN in small: each network has its trainer and its scale."""

    def __init__(self, policy: str | None, ctx: mx.Context) -> None:
        up, down = {"strides": 2, "padding": 1, "use_bias": False}, {"strides": 2, "padding": 1, "use_bias": False}
        generator = chain(nn.Conv2DTranspose(8, 2, use_bias=False), nn.BatchNorm(), nn.Activation("softsign"))
        generator.add(nn.Conv2DTranspose(8, 4, **up), nn.BatchNorm(), nn.Activation("softsign"))
        generator.add(nn.Conv2DTranspose(1, 4, **up), nn.Activation("tanh"))
        critic = chain(nn.Conv2D(8, 4, **down), nn.Swish(), nn.Conv2D(8, 4, **down), nn.BatchNorm(), nn.Swish())
        critic.add(nn.Dense(1))
        self.ctx, self.nets, self.mixed, self.trainers = ctx, (generator, critic), policy is not None, []
        mx.random.seed(4)
        for net, shape in zip(self.nets, ((1, 6, 1, 1), (1, 1, 8, 8))):
            net.initialize(mx.init.Xavier(), ctx=CPU)
            net(mx.nd.ones(shape))
            net.collect_params().reset_ctx(ctx)
        self.before = self.weights()
        for net in self.nets:
            if policy:
                mxmp.convert(net, policy)
            net.hybridize()
            own: dict[str, Any] = {"loss_scale": mxmp.DynamicLossScaler(64.0)} if policy else {}
            make = mxmp.Trainer if policy else gluon.Trainer
            self.trainers.append(make(net.collect_params(), "sgd", {"learning_rate": 0.2, "momentum": 0.5}, **own))

    def weights(self) -> list[dict[str, np.ndarray]]:
        found = (net._collect_params_with_prefix() for net in self.nets)
        return [
            {
                name: (p.masters()[0] if hasattr(p, "masters") else p.data(self.ctx)).asnumpy()
                for name, p in each.items()
            }
            for each in found
        ]

    def change(self) -> np.ndarray:
        pairs = zip(self.weights(), self.before)
        return np.concatenate(
            [(after[n] - before[n]).ravel() for after, before in pairs for n in sorted(after) if "running" not in n]
        )

    def _train(self, which: int, loss: Any) -> None:
        (self.trainers[which].backward if self.mixed else autograd.backward)(loss)
        self.trainers[which].step(ROWS, ignore_stale_grad=True)

    def step(self, number: int, times: float = 1.0) -> None:
        """Both steps; the real pictures are multiplied."""
        rng, score = np.random.RandomState(number), gluon.loss.SigmoidBinaryCrossEntropyLoss()
        generator, critic = self.nets
        noise, real = (mx.nd.array(rng.randn(ROWS, *shape), ctx=self.ctx) for shape in ((6, 1, 1), (1, 8, 8)))
        ones = mx.nd.ones((ROWS, 1), ctx=self.ctx)
        with autograd.record():
            loss = score(critic(real * times), ones) + score(critic(generator(noise).detach()), 1 - ones)
        self._train(1, loss)
        with autograd.record():
            loss = score(critic(generator(noise)), ones)
        self._train(0, loss)


def test_a_gans_two_trainers_change_both_networks_as_in_the_emulation():
    runs = [Adversaries(*run) for run in ((None, CPU), ("float16", CPU), ("float16", GPU))]
    for run in runs:
        for number in range(3):
            run.step(number)
    assert_trains_alike(*runs)


def test_an_overflow_of_the_critic_leaves_the_generator_its_step_and_its_scale():
    run = Adversaries("float16", GPU)
    run.step(0)
    generator, critic = run.weights()
    run.step(1, times=1e30)
    assert [trainer.last_step_skipped for trainer in run.trainers] == [False, True]
    assert [trainer.loss_scale for trainer in run.trainers] == [64, 32]
    after = run.weights()
    trained_names = [name for name in critic if "running" not in name]
    assert all(np.array_equal(critic[name], after[1][name]) for name in trained_names)
    assert not any(np.array_equal(generator[name], after[0][name]) for name in generator if name.endswith("weight"))
