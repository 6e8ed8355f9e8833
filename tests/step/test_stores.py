"""No store that is asked for is dropped: it is the one meant, or refused. Horovod's runs in test_distributed.py."""

from __future__ import annotations

import os
import sys

import mxnet as mx
import numpy as np
import pytest
from kit.nets import forward, train, two_layers
from kit.twins import MASTERS

import mxmp
from mxmp.step import stores


def trainer(kvstore, devices=1):
    return mxmp.Trainer(two_layers(MASTERS, devices).collect_params(), "sgd", kvstore=kvstore)


def bound_module(kvstore, devices=1):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
    contexts = [mx.cpu(k) for k in range(devices)]
    module = mxmp.Module(mx.sym.LinearRegressionOutput(symbol, mx.sym.var("softmax_label")), context=contexts)
    module.bind([("data", (4, 3))], [("softmax_label", (4, 2))])
    module.init_params()
    module.init_optimizer(kvstore)
    return module


@pytest.fixture
def launched(monkeypatch):
    for name in ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        monkeypatch.setenv(name, "2")


DOORS = pytest.mark.parametrize("door", [trainer, bound_module])
DEVICES = pytest.mark.parametrize("devices", [1, 2])


@DOORS
@DEVICES
@pytest.mark.parametrize("name", ["byteps", "devcie", "dits_sync", "", "none"])
def test_a_name_that_mxnet_does_not_know_is_refused(door, devices, name):
    with pytest.raises(ValueError, match=f"has no kvstore '{name}'.*'dist_sync'.*'horovod'"):
        door(name, devices)


@DOORS
def test_so_is_an_object_that_mxnet_made_for_such_a_name(door):
    with pytest.raises(ValueError, match="has no kvstore 'devcie'"):
        door(mx.kv.create("devcie"))
    with pytest.raises(ValueError, match=r"rank 0 of 1.*kvstore=\"horovod\""):
        door(mx.kv.create("horovod"))


@DOORS
def test_without_horovod_the_error_says_how_to_install_it(door, monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.mxnet", None)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ImportError, match=r"pip install .*horovod==.*check_horovod.sh"):
        door("Horovod")


@DOORS
@pytest.mark.parametrize("name", ["DIST_ASYNC", "Dist_Device_Async"])
def test_dist_async_is_refused_in_any_case(door, name):
    with pytest.raises(ValueError, match="before any check"):
        door(name)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", ["dist_sync", "DIST_Sync"])
def test_dist_sync_is_not_dropped_in_any_case_and_a_worker_that_shares_its_gradients_is_told_nothing(name):
    """MXNet looks for "dist" in the name as it is written, and drops the rest where there is one device."""
    assert stores.open_store(name, 0) == "dist_sync"


class Recorder(mx.kv.KVStoreBase):
    """One of several workers, whose others add 1 to every gradient."""

    type = "mine"
    rank = 0
    num_workers = 2

    def __init__(self):
        self.pushed = []

    def is_capable(self, capability):
        return False

    def init(self, key, value):
        pass

    def broadcast(self, key, value, out, priority=0):
        for array in out:
            array[:] = value.copy()

    def pushpull(self, key, value, out=None, priority=0):
        self.pushed.append(key)
        for array in value:
            array += 1


@pytest.fixture
def _registered():
    registry = mx.kv.KVStoreBase.kv_registry
    registry["mine"] = Recorder
    yield
    del registry["mine"]


@pytest.mark.usefixtures("_registered")
def test_a_registered_store_is_used_where_a_worker_has_one_device():
    """MXNet drops it: it has no "dist" in its name."""
    net = two_layers(MASTERS)
    found = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="mine", loss_scale=None)
    assert mx.model._create_kvstore("mine", 1, {})[0] is None
    found.backward(forward(net, 0))
    before = [param.grad().asnumpy() for param in found._params]
    found.step(4)
    assert found._kvstore.pushed == [0, 1]
    for old, param in zip(before, found._params):
        np.testing.assert_allclose(param.grad().asnumpy(), old + 1, atol=2e-3)
    assert bound_module("mine")._kvstore.type == "mine"


@DOORS
@pytest.mark.parametrize(
    ("variable", "store"), [("DMLC_NUM_WORKER", "dist_sync"), ("HOROVOD_SIZE", "horovod")], ids=["dist_sync", "horovod"]
)
def test_a_worker_of_several_that_keeps_its_gradients_to_itself_is_told(door, variable, store, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with pytest.warns(UserWarning, match=f"{variable}=2.*'device'.*train apart.*'{store}'"):
        door("device")
    door(None)
    door(mx.kv.create("device"))


def test_distributed_stores_are_told_from_those_within_a_process():
    assert not stores.is_distributed(None)
    assert not stores.is_distributed(mx.kv.create("device"))
    assert stores.is_distributed(Recorder())

    class Silent(mx.kv.KVStoreBase):
        type = "silent"

    assert not stores.is_distributed(Silent())


@pytest.mark.parametrize(
    ("name", "near"), [("dist_sinc", "dist_sync"), ("dist_device_sink", "dist_device_sync"), ("horovd", "horovod")]
)
def test_a_misspelt_store_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(ValueError, match=f"has no kvstore '{name}'.*did you mean '{near}'"):
        stores.open_store(name, 0)


def test_a_distributed_store_without_a_launcher_is_refused_with_the_command():
    for variable in ("DMLC_ROLE", "DMLC_NUM_WORKER"):
        assert variable not in os.environ
    with pytest.raises(ValueError, match=r"no launcher has started.*python -m mxmp launch --workers 2"):
        mxmp.Trainer(mx.gluon.nn.Dense(2).collect_params(), "sgd", kvstore="dist_sync")
    with pytest.raises(ValueError, match="DMLC_ROLE"):
        bound_module("dist_sync")


def compressing():
    store = mx.kv.create("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    return store


def updating():
    store = mx.kv.create("device")
    store.set_optimizer(mx.optimizer.SGD())
    return store


@DOORS
@pytest.mark.parametrize("store", [compressing, updating], ids=lambda each: each.__name__)
def test_an_open_store_that_returns_no_sums_is_refused(door, store):
    """Scaled gradients would all become the threshold, or weights."""
    with pytest.raises(ValueError, match="does not return the sum"):
        door(store(), 2)


def test_an_open_store_is_tried_once():
    store = mx.kv.create("device")
    assert [stores.open_store(store, 0) for _ in range(2)] == [store, store]


def test_an_open_store_that_was_tried_serves_both_frontends():
    """MXNet refuses keys of two kinds; a Trainer's are numbers, a Module's are names."""
    net = two_layers(MASTERS, 2)
    train(net, mxmp.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("device")), range(1), 2)
    module = bound_module(mx.kv.create("device"), 2)
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 3))], [mx.nd.ones((4, 2))]))
    module.update()
