"""What autograd recorded of losses: names, operators and nodes, each read when it is asked for."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import autograd

from mxmp.precision.record import Record, operators_of


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
    with pytest.raises(mx.MXNetError):
        _ = record.leaves


def test_operators_of_a_symbol():
    assert operators_of(mx.sym.MakeLoss(mx.sym.var("x") + 1)) == {"null", "_plus_scalar", "MakeLoss"}
