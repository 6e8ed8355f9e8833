"""What a watched step says: tensors, headroom, underflow, and parameters without a gradient."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import (
    Chain,
    Run,
    batch,
    dense,
    gluon_run,
    gluon_step,
    tensors,
    three,
    values,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import watch


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_underflow_is_shown_where_the_network_was_built_to_underflow(door):
    net, (x, y) = three(middle=2.0**-14, last=2.0**-12), batch()
    run = Run(door, net, on=(x, y), loss_scale=1.0, factor=1.0 if door == "gluon" else 4.0)
    with watch(*run.target) as watched:
        run.step()
    lost = {t.name for t in watched.latest.gradients if t.histogram.underflow() > 0.5}
    assert lost == {"middle_fwd -> first_fwd"}
    assert watched.latest.headroom > 10
    text = str(watched)
    assert "middle_fwd -> first_fwd" in text
    assert "the scale could go up by 2**" in text


def test_the_headroom_is_what_the_scale_can_bear():
    for more, skipped in ((0, False), (1, True)):
        net, (x, y) = three(), batch()
        trainer = gluon_run(net, loss_scale=4.0)
        with watch(net, trainer) as watched:
            gluon_step(net, trainer, x, y)
        room = watched.latest.headroom
        assert room > 3
        net = three()
        trainer = gluon_run(net, loss_scale=4.0 * 2.0 ** (room + more))
        gluon_step(net, trainer, x, y)
        assert trainer.last_step_skipped == skipped


def test_a_skipped_step_is_called_so_and_names_the_tensor():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net, loss_scale=2.0**20)
    with watch(net, trainer) as watched:
        gluon_step(net, trainer, x, y)
    assert watched.latest.skipped
    assert tensors(watched.latest, "update") == {}
    assert watched.latest.headroom < 0
    assert "the scale is too high" in str(watched) or "overflow: " in str(watched)


def test_a_callback_can_write_what_tensorboard_shows():
    """As in docs/looking-inside.md: a writer's histogram of the exponents, each as often as it was counted."""
    net, (x, y) = three(), batch()
    trainer, written = gluon_run(net), {}

    def log(snapshot):
        for tensor in snapshot.tensors:
            exponents = np.repeat(tensor.histogram.exponents(), tensor.histogram.counts)
            written[snapshot.step, tensor.kind, tensor.name] = np.histogram(exponents, range(-149, 129))

    with watch(net, trainer, every=3, callback=log) as watched:
        for _ in range(4):
            gluon_step(net, trainer, x, y)
    assert {step for step, *_ in written} == {1, 3}
    for tensor in watched.latest.tensors:
        counts, _ = written[3, tensor.kind, tensor.name]
        np.testing.assert_array_equal(counts, tensor.histogram.counts)


def vanishing():
    """Seven sigmoids: each makes the gradient several times smaller, until float16 has none of it."""
    layers = [(f"layer{i}", nn.Dense(8, "sigmoid", in_units=8, prefix=f"layer{i}_")) for i in range(7)]
    return values(Chain(("in", nn.Dense(8, in_units=6, prefix="in_")), *layers, dense("last", 4, 8)))


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_watch_leads_with_the_parameters_that_get_no_gradient(door):
    def watched(factor):
        net, (x, y) = vanishing(), batch()
        run = Run(door, net, on=(x, y), loss_scale=1.0, factor=factor)
        net(x)
        with watch(*run.target) as found:
            run.step()
        return found.latest

    snapshot = watched(1e-4)
    gradients = tensors(snapshot, "parameter gradient")
    dead = [name for name, t in gradients.items() if t.histogram.zeros == t.histogram.counted]
    assert 5 < len(dead) < len(gradients)
    assert sorted(snapshot.without_gradient) == sorted(dead)
    last = max(int(name[5]) for name in dead if name.startswith("layer"))
    lines = str(snapshot).splitlines()
    assert lines[1].split("; ") == [
        f"  {len(dead)} of {len(gradients)} parameters get no gradient, all of it is 0",
        f"first, from the loss on, at layer{last}_fwd",
    ]
    assert all(gradients[name].lost == 1 for name in dead)  # by what was rounded before
    counted = sum(t.histogram.counted for t in snapshot.gradients)
    of_dead = sum(gradients[name].histogram.counted for name in dead)
    assert of_dead / counted < snapshot.underflow <= 1
    assert "nan" not in str(snapshot)
    assert "get no gradient" not in str(watched(1e4))
    assert watched(1e4).underflow < 0.01


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_zeros_that_no_rounding_made_are_not_lost(door):
    """Relu's zeros, and a layer behind a relu that lets nothing through."""
    relu = ("relu", lambda ops, x: ops.relu(x, name="relu"))
    down = ("down", lambda ops, x: ops.broadcast_sub(x, ops.ones((1, 1)) * 1e3, name="down"))
    net = values(Chain(dense("first", 8, 6), down, relu, dense("last", 4, 8)))
    x, y = batch()
    run = Run(door, net, on=(x, y))
    with watch(*run.target) as watched:
        run.step()
    snapshot = watched.latest
    assert "first_weight" in snapshot.without_gradient
    assert snapshot.underflow == 0
    assert all(t.lost == 0 for t in snapshot.tensors)


@pytest.mark.parametrize(("factor", "scale"), [(1e-6, 2.0**-4), (1e-5, 1.0), (1e-3, 1.0)])
def test_a_gradient_of_the_loss_that_rounds_to_zero_is_counted(factor, scale):
    def net_of():
        mx.random.seed(0)
        net = nn.HybridSequential(prefix="w_")
        with net.name_scope():
            net.add(nn.Dense(32, in_units=16, activation="relu"), nn.Dense(4, in_units=32))
        net.initialize(mx.init.Xavier())
        return net

    x, y = mx.nd.random.normal(shape=(64, 16)), mx.nd.arange(64) % 4
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    out = net_of()(x)
    out.attach_grad()
    with autograd.record():
        loss = (loss_fn(out, y) * factor).mean()
    loss.backward()
    sent = out.grad.asnumpy() * scale
    lost = ((sent.astype(np.float16) == 0) & (sent != 0)).mean()
    net = mxmp.convert(net_of(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scale)
    with watch(net, trainer, every=1) as watched:
        with autograd.record():
            loss = (loss_fn(net(x), y) * factor).mean()
        trainer.backward(loss)
        trainer.step(1)
    (found,) = (each for each in watched.latest.of("gradient") if each.name.startswith("the loss"))
    assert found.histogram.underflow() == pytest.approx(lost, abs=0.05)
    assert watched.latest.underflow >= 0.3 * lost
    assert np.isfinite(watched.latest.headroom)
