"""Every file of states that MXNet's Trainer or Module writes, read by mxmp's."""

import mxnet as mx
import numpy as np
import pytest
from kit.twins import assert_same

import mxmp

NAMES = ("a_weight", "b_weight")
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
}


def trainer(kind, name, dtype="float32", **kwargs):
    params = [mx.gluon.Parameter(each, shape=(2, 2), dtype=dtype, init=mx.init.One()) for each in NAMES]
    for param in params:
        param.initialize()
    given = dict(OPTIMIZERS[name], multi_precision=dtype == "float16")
    kwargs = {"kvstore": None, **kwargs}
    return params, kind(params, name, given, **kwargs)


def stepped(kind, name, **kwargs):
    params, found = trainer(kind, name, **kwargs)
    for step in range(3):
        with mx.autograd.record():
            loss = sum((param.data() * (step + k + 1)).sum() for k, param in enumerate(params))
        loss.backward()
        found.step(1)
    return found


def module(kind, name, devices=1, kvstore=None, **kwargs):
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, no_bias=True, name="a")
    layer = mx.sym.FullyConnected(layer, num_hidden=2, no_bias=True, name="b")
    found = kind(layer, label_names=None, context=[mx.cpu(i) for i in range(devices)], **kwargs)
    found.bind([("data", (2, 2))])
    found.init_params(mx.init.One())
    found.init_optimizer(kvstore, name, OPTIMIZERS[name])
    return found


def trained(kind, name, **kwargs):
    found = module(kind, name, **kwargs)
    for step in range(3):
        found.forward(mx.io.DataBatch([mx.nd.ones((2, 2)) * (step + 1)]))
        found.backward([mx.nd.array([[1, 2], [3, 4]])])
        found.update()
    return found


def gluon_file(path, name):
    found = stepped(mx.gluon.Trainer, name)
    found.save_states(path)
    return found._updaters[0].states


def gluon_file_of_a_kvstore(path, name):
    found = stepped(mx.gluon.Trainer, name, kvstore=mx.kv.create("local"), update_on_kvstore=True)
    found.save_states(path)
    return found._kvstore._updater.states


def kvstore_file(path, name):
    found = stepped(mx.gluon.Trainer, name, kvstore=mx.kv.create("local"), update_on_kvstore=True)
    found._kvstore.save_optimizer_states(path)
    return found._kvstore._updater.states


def bytes_of(kind, dump_optimizer, **kwargs):
    def write(path, name):
        updater = stepped(kind, name, **kwargs)._updaters[0]
        with open(path, "wb") as file:
            file.write(updater.get_states(dump_optimizer=dump_optimizer))
        return updater.states

    return write


def own_file(path, name):
    found = stepped(mxmp.Trainer, name, loss_scale=None)
    found.save_states(path)
    return found._updaters[0].states


def module_file(path, name):
    found = trained(mx.mod.Module, name)
    found.save_optimizer_states(path)
    return found._updater.states


def file_of_two_devices(path, name):
    store = mx.kv.create("local")
    store.is_capable = lambda capability: False  # as with MXNET_UPDATE_ON_KVSTORE=0
    found = trained(mx.mod.Module, name, devices=2, kvstore=store)
    found.save_optimizer_states(path)
    return {index // 2: state for index, state in found._updater.states.items() if index % 2 == 0}


def module_file_of_a_kvstore(path, name):
    found = trained(mx.mod.Module, name, kvstore=mx.kv.create("local"))
    found.save_optimizer_states(path)
    return {NAMES.index(key): state for key, state in found._kvstore._updater.states.items()}


def own_module_file(path, name):
    found = trained(mxmp.Module, name, policy="bfloat16")
    found.save_optimizer_states(path)
    return found.updaters[0].states


# From the form to what writes it, and whether it has update counts.
FORMS = {
    "gluon.Trainer.save_states": (gluon_file, True),
    "gluon.Trainer.save_states, kvstore": (gluon_file_of_a_kvstore, True),
    "kvstore.save_optimizer_states": (kvstore_file, False),
    "gluon _updaters[0].get_states()": (bytes_of(mx.gluon.Trainer, False), False),
    "gluon _updaters[0].get_states(True)": (bytes_of(mx.gluon.Trainer, True), True),
    "mxmp.Trainer.save_states": (own_file, True),
    "mxmp _updaters[0].get_states()": (bytes_of(mxmp.Trainer, False, loss_scale=None), False),
    "mxmp _updaters[0].get_states(True)": (bytes_of(mxmp.Trainer, True, loss_scale=None), True),
    "Module": (module_file, False),
    "Module, two devices": (file_of_two_devices, False),
    "Module, kvstore": (module_file_of_a_kvstore, False),
    "mxmp.Module": (own_module_file, True),
}


def leaves(states):
    found = []
    for index in sorted(states):
        state = states[index]
        found += [leaf.asnumpy() for leaf in (state if isinstance(state, (list, tuple)) else [state])]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("reader", ["Trainer", "Module"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form, reader, name, tmp_path):
    write, has_counts = FORMS[form]
    path = str(tmp_path / "states")
    expected = leaves(write(path, name))
    if reader == "Trainer":
        _, found = trainer(mxmp.Trainer, name, loss_scale=None)
        found.load_states(path)
        states, optimizer = found._updaters[0].states, found.optimizer
    else:
        found = module(mxmp.Module, name, policy="bfloat16")
        found.load_optimizer_states(path)
        states, optimizer = found.updaters[0].states, found.updaters.optimizer
    assert_same(leaves(states), expected)
    assert len(leaves(states)) == len(expected) >= 2
    assert optimizer.num_update == (3 if has_counts else 0)
    assert optimizer.lr == OPTIMIZERS[name]["learning_rate"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [mx.gluon.Trainer, mxmp.Trainer])
def test_masters_within_the_states_of_float16_weights_are_found(kind, name, tmp_path):
    """``net.cast("float16")`` with ``multi_precision``: the optimizer keeps the FP32 weights."""
    scale = {} if kind is mx.gluon.Trainer else {"loss_scale": None}
    states = bytes_of(kind, False, dtype="float16", **scale)(str(tmp_path / "states"), name)
    params, found = trainer(mxmp.Trainer, name, dtype="float16", loss_scale=None)
    found.load_states(str(tmp_path / "states"))
    master = {"sgd": 1, "adam": 0}[name]
    for index, param in enumerate(params):
        np.testing.assert_array_equal(
            found._updaters[0].states[index][master].asnumpy(), states[index][master].asnumpy()
        )
        np.testing.assert_array_equal(param.data().asnumpy(), states[index][master].astype("float16").asnumpy())


def test_equal_states_of_a_trainers_parameters_are_not_taken_for_those_of_two_devices(tmp_path):
    _, found = trainer(mx.gluon.Trainer, "sgd")
    found._updaters[0].states = {0: mx.nd.ones((2, 2)), 1: mx.nd.ones((2, 2))}
    (tmp_path / "states").write_bytes(found._updaters[0].get_states())
    _, found = trainer(mxmp.Trainer, "sgd", loss_scale=None)
    found.load_states(str(tmp_path / "states"))
    assert [(state == 1).asnumpy().all() for state in found._updaters[0].states.values()] == [True, True]
    assert list(found._updaters[0].states) == [0, 1]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({5: mx.nd.ones((2, 2))}, "number 5 of 2"),
        ({0: mx.nd.ones((3, 2))}, "number 0 has shape"),
        ({"c_weight": mx.nd.ones((2, 2))}, "'c_weight'"),
        ({0: (mx.nd.ones((2, 2)), mx.nd.ones((2, 2)))}, "not what SGD makes"),
    ],
)
def test_states_of_other_parameters_or_another_optimizer_are_refused(states, message, tmp_path):
    _, found = trainer(mx.gluon.Trainer, "sgd")
    found._updaters[0].states = states
    (tmp_path / "states").write_bytes(found._updaters[0].get_states())
    _, found = trainer(mxmp.Trainer, "sgd", loss_scale=None)
    with pytest.raises(ValueError, match=message):
        found.load_states(str(tmp_path / "states"))
    assert not found._updaters[0].states
