"""Weights read, averaged and put back in memory: float16 Parameters lose nothing of their FP32 masters."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, forward, two_layers
from kit.pictures import full_weights
from kit.twins import MASTERS
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import LowParameter, store_low


def test_values_that_are_set_and_not_put_back_count():
    param = gluon.Parameter("w", shape=(2, 2))
    param.initialize()
    param.set_data(mx.nd.array([[1 + 2.0**-20, 2], [3, 4 + 2.0**-15]]))
    store_low(param, "float16")
    kept = param.data().copy()
    changed = kept.copy()
    changed[0, 1] = 5
    param.set_data(changed)  # float16: what equals the rounded master keeps it, element by element
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), [[1 + 2.0**-20, 5], [3, 4 + 2.0**-15]])
    param.set_data(changed.astype("float32") + 2.0**-20)  # FP32: exactly
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), changed.asnumpy().astype("float32") + 2.0**-20)
    param.set_data(kept)
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), [[1 + 2.0**-20, 2], [3, 4 + 2.0**-15]])


def test_loading_a_file_sets_exactly_what_it_holds(tmp_path):
    net = two_layers(MASTERS)
    params = list(net.collect_params().values())
    for param in params:
        param.set_data(param.data().astype("float32"))
    rounded = [param.data().asnumpy().astype("float32") for param in params]
    for param, value in zip(params, rounded):
        mxmp.set_master_weights([param], {param.name: value * (1 + 2.0**-14)})
    mx.nd.save(str(tmp_path / "w"), {param.name: mx.nd.array(value) for param, value in zip(params, rounded)})
    net.collect_params().load(str(tmp_path / "w"))
    for param, value in zip(params, rounded):
        np.testing.assert_array_equal(param.masters()[0].asnumpy(), value)


def test_an_update_forgets_what_was_kept_and_a_skip_does_not():
    net = two_layers(MASTERS)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=2.0**8)
    param = net[0].weight
    kept, master = param.data().copy(), param.masters()[0].asnumpy()
    param.set_data(mx.nd.ones(param.shape))
    trainer.backward(forward(net, 0))
    param.grad()[:] = np.inf
    trainer.step(4)
    assert trainer.last_step_skipped
    param.set_data(kept)
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), master)
    trainer.backward(forward(net, 0))
    trainer.step(4)
    param.set_data(kept)
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), kept.asnumpy())


# -- master_weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, MASTERS, CASTS, "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2])
def test_master_weights_are_those_of_a_file_and_set_again_they_change_nothing(policy, devices, tmp_path):
    net = two_layers(policy, devices)
    for param in net.collect_params().values():
        mxmp.set_master_weights([param], {param.name: np.random.RandomState(0).randn(*param.shape)})
    before = [param.list_data()[0].asnumpy() for param in net.collect_params().values()]
    found = mxmp.master_weights(net)
    net.save_parameters(str(tmp_path / "w"))
    saved = mx.nd.load(str(tmp_path / "w"))
    assert saved.keys() == found.keys()
    for name, value in saved.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name].asnumpy(), value.asnumpy())
    for value in found.values():
        value *= 1  # copies
    mxmp.set_master_weights(net, found)
    for param, array in zip(net.collect_params().values(), before):
        for each in param.list_data():
            np.testing.assert_array_equal(each.asnumpy(), array)
    by_name = mxmp.master_weights(net.collect_params())
    assert list(by_name) == list(net.collect_params())
    assert [a.asnumpy().tobytes() for a in by_name.values()] == [a.asnumpy().tobytes() for a in found.values()]


def test_running_statistics_of_two_devices_are_averaged_and_names_of_equal_nets_agree():
    nets = []
    for _ in range(2):
        net = nn.HybridSequential()
        net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4))
        net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        nets.append(mxmp.convert(net, MASTERS))
    mean = nets[0][1].running_mean
    mean.list_data()[0][:], mean.list_data()[1][:] = 1, 3
    found = mxmp.master_weights(nets[0])
    assert (found["1.running_mean"].asnumpy() == 2).all()
    mxmp.set_master_weights(nets[1], {**found, "0.bias": np.ones(4)})
    assert [a.asnumpy()[0] for a in nets[1][1].running_mean.list_data()] == [2, 2]
    assert [a.asnumpy()[0] for a in nets[1][0].bias.list_data()] == [1, 1]


@mx.util.use_np
def test_master_weights_of_the_numpy_interface():
    net = nn.Dense(3, in_units=2)
    net.initialize()
    mxmp.convert(net, MASTERS)(mx.np.ones((1, 2)))
    assert isinstance(net.weight, LowParameter)
    found = mxmp.master_weights(net)
    assert isinstance(found["weight"], mx.np.ndarray)
    mxmp.set_master_weights(net, {"weight": np.full((3, 2), 1 + 2.0**-20)})
    kept = net.weight.data().copy()
    net.weight.set_data(mx.np.ones((3, 2)) * 7)
    net.weight.set_data(kept)
    np.testing.assert_array_equal(mxmp.master_weights(net)["weight"].asnumpy(), np.float32(1 + 2.0**-20))


def test_what_cannot_be_set_is_refused_and_changes_nothing():
    net = two_layers(MASTERS)
    before = full_weights(mxmp.Trainer(net.collect_params(), "sgd"))
    good = {name: value * 2 for name, value in mxmp.master_weights(net).items()}
    for wrong, match in [
        ({**good, "0.wieght": mx.nd.ones((4, 3))}, r"no Parameter '0.wieght'; did you mean '0.weight'\?"),
        ({**good, "1.weight": mx.nd.ones((3, 2))}, r"'1.weight' has shape \(2, 4\), got a value of \(3, 2\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            mxmp.set_master_weights(net, wrong)
        assert full_weights(mxmp.Trainer(net.collect_params(), "sgd")) == before
    with pytest.raises(TypeError, match=r"got Module: use its get_params\(\) and set_params\(\)"):
        mxmp.master_weights(mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), label_names=None))
    with pytest.raises(TypeError, match="expected Parameters"):
        mxmp.master_weights([net])
    with pytest.raises(ValueError, match=r"'weight' has no values yet: initialize"):
        mxmp.master_weights(nn.Dense(3))
