"""FP32 masters under an optimizer: what is updated, what computes, and what a user's own write does."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.nets import contexts, two_layers
from kit.twins import MASTERS, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp


def test_a_plain_trainer_is_kept_away_from_float16_values():
    net = two_layers()
    gluon.Trainer(net.collect_params(), "sgd")
    mxmp.convert(net, MASTERS)
    with pytest.raises(TypeError, match=r"mxmp\.Trainer"):
        net(mx.nd.zeros((1, 3)))


def trained_masters(optimizer, tmp_path, ones):
    """Masters of a small net on two devices after steps, a write into the weight, a save and a load."""
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=4), nn.Dense(2, in_units=8))
    net.initialize(mx.init.Constant(0.1), ctx=contexts(2))
    mxmp.convert(net, "params=float16")
    trainer = mxmp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
    for when in range(4):
        with autograd.record():
            losses = [net(ones((3, 4), ctx=ctx)).sum() for ctx in contexts(2)]
        trainer.backward(losses)
        trainer.step(8)
        if when == 1:
            for data in net[0].weight.list_data():
                data[:] = data * 2
        elif when == 2:
            net.save_parameters(str(tmp_path / "net.params"))
            net.load_parameters(str(tmp_path / "net.params"), ctx=contexts(2))
    return [master.asnumpy() for param in net.collect_params().values() for master in param.masters()]


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lamb"])
def test_a_net_of_numpy_arrays_has_the_same_masters(optimizer, tmp_path):
    want = trained_masters(optimizer, tmp_path, mx.nd.ones)
    with mx.util.np_shape(True), mx.util.np_array(True):
        got = trained_masters(optimizer, tmp_path, mx.np.ones)
    assert_same(got, want)
