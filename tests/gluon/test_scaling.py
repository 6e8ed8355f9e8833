"""The scale of recorded forwards: the loss scale in a backward that reaches them, otherwise 1."""

from __future__ import annotations

import weakref

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.gluon import scaling
from mxmp.gluon import trainer as trainers
from mxmp.gluon.hook import hook_of
from mxmp.gluon.record import Record
from mxmp.gluon.scaled_heads import heads_scaled_by
from mxmp.gluon.scaling import call_with_scale
from mxmp.precision._mxnet import BFLOAT16


def forwards(*contexts):
    """A scaled forward per context, each of which keeps what it was fed, recorded."""
    fed, outs = [], []
    weight = mx.nd.ones((1,))
    weight.attach_grad()
    with mx.autograd.record():
        for ctx in contexts:
            outs.append(call_with_scale(lambda s: fed.append(s) or weight.as_in_context(s.ctx) * s, ctx))
    return fed, outs


def test_the_scale_of_each_forward_is_one_but_in_a_block_whose_losses_reach_it():
    (first, second, other), outs = forwards(mx.cpu(0), mx.cpu(1), mx.cpu(0))
    assert (first.dtype, first.shape, first.asscalar()) == (np.float32, (1,), 1)
    with heads_scaled_by(256.0, Record(outs[:2])):
        assert [a.asscalar() for a in (first, second, other)] == [256, 256, 1]
        with pytest.raises(RuntimeError, match="scaled twice"), heads_scaled_by(2.0, Record(outs)):
            pass
        assert [a.asscalar() for a in (first, second, other)] == [256, 256, 1]
    assert [a.asscalar() for a in (first, second, other)] == [1, 1, 1]


def test_the_scale_does_not_outlive_an_error():
    (fed,), outs = forwards(mx.cpu(0))
    with pytest.raises(KeyError), heads_scaled_by(256.0, Record(outs)):
        raise KeyError
    assert fed.asscalar() == 1


def test_forwards_that_no_backward_reaches_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(scaling, "_LIVE_RECORDS", 5)
    (*_, last), outs = forwards(*[mx.cpu(0)] * 9)
    assert len(scaling._scales) <= 5
    with heads_scaled_by(256.0, Record(outs[-1:])):
        assert last.asscalar() == 256


@pytest.mark.parametrize("value", [1.0, 256.0])
def test_a_forward_whose_record_a_backward_has_used_up_is_forgotten(value):
    before = set(scaling._scales)
    _, outs = forwards(mx.cpu(), mx.cpu())
    for retain in (True, False):
        assert len(set(scaling._scales) - before) == 2
        with heads_scaled_by(value, Record(outs[:1])):
            mx.autograd.backward(outs[:1], retain_graph=retain)
    (left,) = set(scaling._scales) - before
    with heads_scaled_by(value, Record(outs[1:])):
        assert scaling._scales[left][1].asscalar() == value


@pytest.mark.parametrize("by", ["backward", "scale_loss"])
@pytest.mark.parametrize(
    ("dtype", "good", "bad"), [("float16", 3002.0, 3001.0), (BFLOAT16, 302.0, 301.0)], ids=("half", "bf16")
)
def test_a_loss_that_would_round_the_scale_is_refused_and_one_that_holds_it_is_not(dtype, good, bad, by):
    def step(scale):
        weight = mx.gluon.Parameter("weight", shape=(3,))
        weight.initialize(mx.init.One())
        trainer = mxmp.Trainer([weight], "sgd", {"learning_rate": 1.0}, loss_scale=scale)
        with mx.autograd.record():
            loss = mx.nd.amp_cast(weight.data() * 1, dtype=dtype)
        if by == "backward":
            trainer.backward(loss)
        else:
            with trainer.scale_loss(loss) as scaled:
                scaled.backward()
        trainer.step(1)
        return weight.data().asnumpy()

    np.testing.assert_allclose(step(good), 0, atol=1e-6)
    with pytest.raises(ValueError, match=f"cannot hold the loss scale {bad:g}"):
        step(bad)


# -- whether a graph scales its loss heads -----------------------------------------------------------


def classifier(policy, monkeypatch):
    """A net that ends in a loss head, and a batch; no trainer lives that tests before have left."""
    monkeypatch.setattr(scaling, "living_trainers", weakref.WeakSet())
    monkeypatch.setattr(trainers, "living_trainers", scaling.living_trainers)
    data, label = (mx.sym.var(name, dtype="float32") for name in ("data", "label"))
    out = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(data, num_hidden=5, no_bias=True, name="fc"), label, name="softmax"
    )
    net = mx.gluon.SymbolBlock(out, [data, label])
    net.initialize()
    mxmp.convert(net, policy)
    return net, (mx.nd.random.normal(shape=(4, 3)), mx.nd.array([0, 1, 2, 3]))


def scales_heads(net):
    return ["_scale_step" in built.op.symbol.tojson() for built in hook_of(net).graphs.values()]


def gradient(net, trainer, batch):
    with mx.autograd.record():
        out = net(*batch)
    trainer.backward(out)
    trainer.unscale()
    return net.collect_params("fc_weight")["fc_weight"].grad().asnumpy()


def trainer_of(net, **options):
    return mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}, **options)


def test_a_graph_in_bfloat16_scales_its_heads_once_a_trainer_has_a_loss_scale(monkeypatch):
    net, batch = classifier("bfloat16", monkeypatch)
    want = gradient(net, trainer_of(net), batch)
    assert scales_heads(net) == [False]
    scaled = trainer_of(net, loss_scale=64.0)
    np.testing.assert_allclose(gradient(net, scaled, batch), want, rtol=1e-6)
    assert sorted(scales_heads(net)) == [False, True]
    scaled.step(1)
    scaled.scaler.loss_scale = 1.0
    np.testing.assert_allclose(gradient(net, scaled, batch), want, rtol=1e-6)
    assert len(scales_heads(net)) == 2


@pytest.mark.parametrize("is_new", [False, True])
def test_a_loss_scale_that_comes_after_the_forward_is_refused_and_not_lost(is_new, monkeypatch):
    net, batch = classifier("bfloat16", monkeypatch)
    late = trainer_of(net, loss_scale=1.0)
    want = gradient(net, late, batch)
    late.step(1)
    with mx.autograd.record():
        out = net(*batch)
    if is_new:
        late = trainer_of(net, loss_scale=8.0)
    else:
        late.scaler.loss_scale = 8.0
    with pytest.raises(ValueError, match="call the net again"):
        late.backward(out)
    np.testing.assert_allclose(gradient(net, late, batch), want, rtol=1e-6)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_prediction_scales_no_heads(policy, monkeypatch):
    net, batch = classifier(policy, monkeypatch)
    net(*batch)
    assert scales_heads(net) == [False]
    trainer = trainer_of(net, loss_scale=64.0)
    with mx.autograd.record(train_mode=False):  # fine-tuning with frozen statistics
        out = net(*batch)
    trainer.backward(out)
    assert sorted(scales_heads(net)) == [False, True]


# -- loss heads that Python code calls --------------------------------------------------------------

BARE = {
    "SoftmaxOutput": lambda x, y, **own: mx.nd.SoftmaxOutput(x, y, use_ignore=True, ignore_label=-1, **own),
    "LinearRegressionOutput": mx.nd.LinearRegressionOutput,
    "LogisticRegressionOutput": mx.nd.LogisticRegressionOutput,
    "MAERegressionOutput": mx.nd.MAERegressionOutput,
}


@pytest.mark.parametrize("by", ["backward", "scale_loss", "both, of one record"])
@pytest.mark.parametrize("own", [{}, {"grad_scale": 0.3}, {"grad_scale": 1e-5}])
@pytest.mark.parametrize("head", BARE)
@pytest.mark.parametrize("scale", [2.0**10, 2.0**-9])
def test_a_bare_head_is_scaled_exactly_and_for_one_backward(head, own, by, scale):
    weight = mx.gluon.Parameter("weight", shape=(4, 3))
    weight.initialize(mx.init.Uniform(1))
    label = mx.nd.array([0, 2, -1, 1]) if head == "SoftmaxOutput" else mx.nd.ones((4, 3)) / 3
    trainer = mxmp.Trainer([weight], "sgd", loss_scale=scale)
    with mx.autograd.record():
        out = BARE[head](weight.data() * 2, label, **own).log() * 3
    out.backward(retain_graph=True)
    want = weight.grad().asnumpy()
    weight.zero_grad()
    weight.data()._fresh_grad = False
    if by != "scale_loss":
        trainer.backward(out, retain_graph=True)
    if by != "backward":
        with trainer.scale_loss(out) as scaled:
            scaled.backward(retain_graph=True)
    np.testing.assert_array_equal(weight.grad().asnumpy(), want * np.float32(scale))
    trainer.step(1)
    out.backward()
    np.testing.assert_array_equal(weight.grad().asnumpy(), want)


def test_an_overflow_of_a_bare_head_is_skipped_and_an_error_leaves_the_head_as_it_was():
    weight = mx.gluon.Parameter("weight", shape=(4, 3))
    weight.initialize()
    trainer = mxmp.Trainer([weight], "sgd", loss_scale=2.0**20)
    for value, skipped in [(np.inf, True), (1, False)]:
        with mx.autograd.record():
            out = mx.nd.LinearRegressionOutput(weight.data() * value, mx.nd.ones((4, 3)))
        trainer.backward(out)
        trainer.step(1)
        assert trainer.last_step_skipped == skipped
    with mx.autograd.record():
        out = mx.nd.LinearRegressionOutput(weight.data(), mx.nd.ones((4, 3)))
    out.backward(retain_graph=True)
    want = weight.grad().asnumpy()
    weight.data()._fresh_grad = False
    with pytest.raises(KeyError), trainer.scale_loss(out):
        raise KeyError
    out.backward()
    np.testing.assert_array_equal(weight.grad().asnumpy(), want)


@pytest.mark.parametrize("op", ["MakeLoss", "make_loss"])
def test_a_bare_head_that_cannot_be_scaled_is_refused(op):
    weight = mx.gluon.Parameter("weight", shape=(4, 3))
    weight.initialize()
    trainer = mxmp.Trainer([weight], "sgd")
    with mx.autograd.record():
        out = getattr(mx.nd, op)(weight.data())
    with pytest.raises(ValueError, match=rf"{op} writes its own gradient.*mxmp.convert"):
        trainer.backward(out)
