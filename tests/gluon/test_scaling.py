"""The scale of recorded forwards: the loss scale in a backward that reaches them, otherwise 1."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.gluon import scaling
from mxmp.gluon.parameter import BFLOAT16
from mxmp.gluon.scaling import Record, call_with_scale, heads_scaled_by


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
