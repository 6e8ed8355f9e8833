"""The scale of recorded forwards: the loss scale in a backward that reaches them, otherwise 1."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from mxmp.gluon import scaling
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
