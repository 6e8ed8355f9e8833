"""What autograd recorded of losses: names, operators and nodes, each read when it is asked for."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import autograd

from mxmp.gluon._mxnet import recorded_name
from mxmp.gluon.record import Record


def test_a_record_names_the_leaves_operators_and_nodes_behind_all_losses():
    x, w = mx.nd.ones((2, 3)), mx.nd.ones((4, 3))
    x.attach_grad()
    w.attach_grad()
    with autograd.record():
        losses = [mx.nd.FullyConnected(x, w, no_bias=True, num_hidden=4), mx.nd.tanh(x)]
    record = Record(losses)
    assert record.leaves == {autograd.get_symbol(leaf).name for leaf in (x, w)}
    assert record.operators == {"null", "FullyConnected", "tanh"}
    assert sorted(node.op for node in record.nodes() if not node.is_variable) == ["FullyConnected", "tanh"]


def test_a_loss_that_was_not_recorded_raises_when_it_is_looked_at():
    record = Record([mx.nd.ones((1,))])
    with pytest.raises(RuntimeError, match="the loss was not recorded"):
        _ = record.leaves


def test_the_name_of_a_leaf_is_the_one_in_the_record_or_none():
    x = mx.nd.ones((2,))
    assert recorded_name(x) is None
    x.attach_grad()
    with autograd.record():
        loss = x * 2
    assert Record([loss]).leaves == {recorded_name(x)}
