"""Miniatures of the families of networks train on the simulated GPU as they do emulated on a CPU, and as in FP32."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .families import (
    CPU,
    GPU,
    IMAGE,
    KINKED,
    ROWS,
    SEQUENCE,
    SMOOTH,
    Lambda,
    attention,
    chain,
    differing,
    distance,
    trained,
)

TESTS_PER_PROCESS = 20


def _dense(units: int) -> nn.Dense:
    return nn.Dense(units, flatten=False)


def _conv() -> nn.Conv2D:
    return nn.Conv2D(8, 3, padding=1)


def _around(*middle: gluon.HybridBlock) -> gluon.HybridBlock:
    return chain(_dense(16), *middle, _dense(12))


BLOCKS: dict[str, tuple[Callable[[], gluon.HybridBlock], tuple[int, ...]]] = {
    "tanh": (lambda: _around(nn.Activation("tanh")), SEQUENCE),
    "sigmoid": (lambda: _around(nn.Activation("sigmoid")), SEQUENCE),
    "mean": (lambda: chain(_dense(12), Lambda(lambda f, b, x: f.mean(x, axis=1)), _dense(5)), SEQUENCE),
    "added": (lambda: _around(Lambda(lambda f, b, x: x + b.body(x), body=_dense(16))), SEQUENCE),
    "norm": (lambda: _around(nn.LayerNorm()), SEQUENCE),
    "attention": (attention, SEQUENCE),
    "convolutions": (lambda: chain(_conv(), nn.Activation("tanh"), _conv()), IMAGE),
    "batch norm": (lambda: chain(_conv(), nn.BatchNorm(), nn.Activation("tanh"), nn.Dense(5)), IMAGE),
    "pooling": (lambda: chain(_conv(), nn.AvgPool2D(), _conv(), nn.GlobalAvgPool2D(), nn.Dense(5)), IMAGE),
    "deconvolution": (lambda: chain(_conv(), nn.Conv2DTranspose(6, 2, strides=2), nn.Conv2D(5, 1)), IMAGE),
    "concat": (lambda: chain(_conv(), Lambda(lambda f, b, x: f.concat(x, b.body(x), dim=1), body=_conv())), IMAGE),
}


def gradients(name: str, policy: str | None, ctx: mx.Context) -> dict[str, np.ndarray]:
    """A block's output, and the gradients of its input and parameters."""
    make, shape = BLOCKS[name]
    mx.random.seed(3)
    net, rng = make(), np.random.RandomState(0)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=CPU)
    net(mx.nd.ones((2, *shape)))
    net.collect_params().reset_ctx(ctx)
    if policy:
        mxmp.convert(net, policy)
    net.hybridize()
    x = mx.nd.array(rng.randn(ROWS, *shape), ctx=ctx)
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(mx.nd.array(rng.randn(*y.shape), ctx=ctx))
    params = {key: param for key, param in net._collect_params_with_prefix().items() if param.grad_req != "null"}
    found = {"output": y, "x": x.grad, **{key: param.grad(ctx) for key, param in params.items()}}
    return {key: value.asnumpy() for key, value in found.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_blocks_gradients_are_the_emulations_but_for_a_rare_last_bit(name):
    """In deep networks each such bit turns many others, until they are as far apart as float16 is from FP32."""
    runs = (None, CPU), ("float16,params=float32", CPU), ("float16,params=float32", GPU)
    exact, emulated, computed = (gradients(name, *run) for run in runs)
    for key, value in emulated.items():
        assert distance(computed[key], value) < 0.2 * distance(value, exact[key]), key


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
    # A language model's few roundings of sums are nearly all the same.
    assert_trains_alike(*(trained(SMOOTH[name], *run) for run in runs), room=0.05 if name == "words" else 1.0)


@pytest.mark.parametrize("name", KINKED)
def test_the_losses_of_a_network_with_kinks_are_fp32s(name):
    exact, computed = (trained(KINKED[name], *run, count=8).losses for run in ((None, CPU), ("float16", GPU)))
    assert np.abs(np.subtract(exact, computed)).max() < 2e-2
    assert computed[-1] < computed[1]


class Adversaries:
    """DCGAN in small: each network has its trainer and its scale."""

    def __init__(self, policy: str | None, ctx: mx.Context) -> None:
        up, down = {"strides": 2, "padding": 1, "use_bias": False}, {"strides": 2, "padding": 1, "use_bias": False}
        generator = chain(nn.Conv2DTranspose(8, 2, use_bias=False), nn.BatchNorm(), nn.Activation("tanh"))
        generator.add(nn.Conv2DTranspose(8, 4, **up), nn.BatchNorm(), nn.Activation("tanh"))
        # Not to one channel: MXNet cannot differentiate that in FP32 on a CPU without AVX-512.
        generator.add(nn.Conv2DTranspose(2, 4, **up), nn.Activation("tanh"))
        critic = chain(nn.Conv2D(8, 4, **down), nn.Swish(), nn.Conv2D(8, 4, **down), nn.BatchNorm(), nn.Swish())
        critic.add(nn.Dense(1))
        self.ctx, self.nets, self.mixed, self.trainers = ctx, (generator, critic), policy is not None, []
        mx.random.seed(4)
        for net, shape in zip(self.nets, ((1, 6, 1, 1), (1, 2, 8, 8))):
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
        noise, real = (mx.nd.array(rng.randn(ROWS, *shape), ctx=self.ctx) for shape in ((6, 1, 1), (2, 8, 8)))
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


@pytest.mark.parametrize("name", SMOOTH)
def test_the_order_of_blocks_changes_no_bit(name, monkeypatch):
    runs = [trained(SMOOTH[name], "float16", GPU)]
    monkeypatch.setenv("SIMGPU_SHUFFLE", "1")
    runs.append(trained(SMOOTH[name], "float16", GPU))
    assert runs[0].losses == runs[1].losses
    assert differing(runs[0].weights(), runs[1].weights()) == []
