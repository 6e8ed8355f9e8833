"""What ``step`` asks of MXNet's library and of Python, beside gluon.Trainer's; a GPU's is in tests/nullgpu."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.calls import calls_of_a_step, python_calls
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mxmp

OPTIMIZERS = {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {}, "lamb": {}}
# Of the check: sums of squares, copies of running statistics, and the way of the numbers to the host.
CHECK = 40
X = mx.nd.ones((1, 3, 32, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_asks_no_more_of_mxnet_than_gluon_s_and_the_check(name):
    options = {"learning_rate": 1e-3, **OPTIMIZERS[name]}
    kind = "sgd" if name == "momentum" else name
    plain = vision.mobilenet0_5(classes=10)
    plain.initialize()
    plain.hybridize()
    theirs = calls_of_a_step(
        plain, (X,), gluon.Trainer(plain.collect_params(), kind, options), lambda loss: loss.backward()
    )
    net = vision.mobilenet0_5(classes=10)
    net.initialize()
    mxmp.convert(net, "compute=bfloat16,params=float32")
    trainer = mxmp.Trainer(net.collect_params(), kind, options)
    ours = calls_of_a_step(net, (X,), trainer, trainer.backward)
    assert ours[0] <= theirs[0] + CHECK
    assert ours[1] <= 1.1 * theirs[1]


def test_a_step_costs_the_same_beside_other_trainers():
    def stepped():
        net = nn.Sequential()
        net.add(*(nn.Dense(2, in_units=2) for _ in range(20)))
        net.initialize()
        mxmp.convert(net, "bfloat16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd")
        for _ in range(3):
            with autograd.record():
                loss = net(mx.nd.ones((1, 2))).sum()
            trainer.backward(loss)
            calls = python_calls(lambda: trainer.step(1))
        return trainer, calls

    _, alone = stepped()
    others = [stepped() for _ in range(20)]
    _, beside = stepped()
    assert beside < alone + 10 * len(others)
