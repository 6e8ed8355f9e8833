"""Every form of states, of MXNet's Trainer and Module and of optimizers of a user's own, and what is none."""

import pickle
import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit import modules
from kit.modules import SHAPES, bound, mlp
from kit.nets import train, two_layers
from kit.pictures import picture, tree
from kit.resuming import PRECISIONS, files, load, save, scaler, steps, trainer_of
from kit.twins import MASTERS, assert_same
from mxnet import gluon
from mxnet.gluon import nn
from support.optimizers import OPTIMIZERS, options

import mxmp
from mxmp.step.state_layout import check_states, positions

# Names in the file and here, shapes in the file, and which parameter here is which of the file; or what is said.
PAIRED = [
    # A dict of parameters comes in the order of names, in which 10 stands before 8.
    ("dense10_ dense8_ dense9_", "dense98_ dense99_ dense100_", "aaa", [2, 0, 1]),
    ("dense8_ dense9_", "net_dense0_ net_dense1_", "aa", [0, 1]),
    ("body_ head_", "net_dense0_ net_dense1_", "aa", "other parameters: 'body_', and here is 'net_dense0_' in its pla"),
    # Lists come as users wrote them. Nets that were built in another order have exchanged their names.
    ("dense5_ dense4_", "dense6_ dense4_", "aa", [0, 1]),
    ("w_4 b_4 w_5 b_5", "w_5 b_5 w_4 b_4", "abcd", [2, 3, 0, 1]),
    ("w_4 b_4 w_5 b_5", "w_5 b_5 w_4 b_4", "abab", r"had 'w_4' where it has 'w_5' here.* order of the saved"),
    ("w_4 b_4 w_5 b_5", "w_4 b_4 w_5 b_5", "abab", [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("saved", "own", "shapes", "expected"), PAIRED)
def test_a_parameter_of_the_file_is_found_by_its_name_and_place(saved, own, shapes, expected):
    sizes = {"a": (3, 3), "b": (3,), "c": (3, 5), "d": (5,)}
    shapes = [sizes[each] for each in shapes]
    here = [shapes[k] for k in np.argsort(expected)] if isinstance(expected, list) else shapes
    try:
        found = positions(saved.split(), own.split(), shapes, here)
    except ValueError as error:
        found = str(error)
    assert found == expected or re.search(expected, found)


def test_masters_of_a_parameter_that_is_not_there_are_refused():
    optimizer = mx.optimizer.create("sgd")
    check_states({}, {1: np.zeros((2, 4))}, optimizer, [(2, 3), (2, 4)])
    for index in (2, -1, "w"):
        with pytest.raises(ValueError, match=f"number {index} of 2"):
            check_states({}, {index: np.zeros((2, 4))}, optimizer, [(2, 3), (2, 4)])


NAMES = ("a_weight", "b_weight")
FORMED = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
}


def trainer(kind, name, dtype="float32", kvstore=None, **more):
    params = [gluon.Parameter(each, shape=(2, 2), dtype=dtype, init=mx.init.Uniform(1)) for each in NAMES]
    for param in params:
        param.initialize()
    more = {"loss_scale": None, **more} if kind is mxmp.Trainer else more
    options = {**(FORMED.get(name) or OPTIMIZERS[name]), "multi_precision": dtype == "float16"}
    return kind(params, name, options, kvstore=kvstore and kvstore(), **more)


def module(kind, name, kvstore=None, devices=1):
    layer = mx.sym.var("data")
    for each in NAMES:
        layer = mx.sym.FullyConnected(layer, num_hidden=2, no_bias=True, name=each[0])
    more = {"policy": "bfloat16"} if kind is mxmp.Module else {}
    found = kind(layer, label_names=None, context=[mx.cpu(i) for i in range(devices)], **more)
    found.bind([("data", (2, 2))])
    found.init_params(mx.init.Uniform(1))
    found.init_optimizer(kvstore and kvstore(), name, FORMED[name])
    return found


def trained(kind, *args, **kwargs):
    """After 3 steps."""
    found = (trainer if issubclass(kind, gluon.Trainer) else module)(kind, *args, **kwargs)
    for step in range(3):
        if isinstance(found, gluon.Trainer):
            with mx.autograd.record():
                loss = sum((param.data() * (step + k + 1)).sum() for k, param in enumerate(found._params))
            loss.backward()
            found.step(1)
        else:
            found.forward(mx.io.DataBatch([mx.nd.ones((2, 2)) * (step + 1)]))
            found.backward([mx.nd.array([[1, 2], [3, 4]])])
            found.update()
    return found


def store(updates=True):
    found = mx.kv.create("local")
    if not updates:  # as with MXNET_UPDATE_ON_KVSTORE=0
        found.is_capable = lambda capability: False
    return found


def bytes_of(dump_optimizer):
    return lambda run, path: Path(path).write_bytes(run._updaters[0].get_states(dump_optimizer=dump_optimizer))


ON_STORE = {"kvstore": store, "update_on_kvstore": True}
TWO_DEVICES = {"kvstore": lambda: store(updates=False), "devices": 2}
SAVE = {"t": lambda run, path: run.save_states(path), "m": lambda run, path: run.save_optimizer_states(path)}
OF = {
    "t": lambda run: run._updaters[0].states,
    "m": lambda run: run._updater.states,
    "store": lambda run: {
        k if isinstance(k, int) else NAMES.index(k): v for k, v in run._kvstore._updater.states.items()
    },
}
# From the form to what is trained and how, what writes the file, whose states these are, and whether it has counts.
FORMS = {
    "gluon.Trainer.save_states": (gluon.Trainer, {}, SAVE["t"], OF["t"], True),
    "gluon.Trainer.save_states, kvstore": (gluon.Trainer, ON_STORE, SAVE["t"], OF["store"], True),
    "kvstore": (
        gluon.Trainer,
        ON_STORE,
        lambda run, path: run._kvstore.save_optimizer_states(path),
        OF["store"],
        False,
    ),
    "gluon _updaters[0].get_states()": (gluon.Trainer, {}, bytes_of(False), OF["t"], False),
    "gluon _updaters[0].get_states(True)": (gluon.Trainer, {}, bytes_of(True), OF["t"], True),
    "mxmp.Trainer.save_states": (mxmp.Trainer, {}, SAVE["t"], OF["t"], True),
    "mxmp _updaters[0].get_states()": (mxmp.Trainer, {}, bytes_of(False), OF["t"], False),
    "mxmp _updaters[0].get_states(True)": (mxmp.Trainer, {}, bytes_of(True), OF["t"], True),
    "Module": (mx.mod.Module, {}, SAVE["m"], OF["m"], False),
    "Module, two devices": (
        *(mx.mod.Module, TWO_DEVICES, SAVE["m"]),
        *(lambda run: {i // 2: state for i, state in run._updater.states.items() if i % 2 == 0}, False),
    ),
    "Module, kvstore": (mx.mod.Module, {"kvstore": store}, SAVE["m"], OF["store"], False),
    "mxmp.Module": (mxmp.Module, {}, SAVE["m"], lambda run: run.updaters[0].states, True),
}


def leaves(states):
    found = [states[index] for index in sorted(states)]
    return [leaf.asnumpy() for state in found for leaf in (state if isinstance(state, (list, tuple)) else [state])]


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("reader", ["Trainer", "Module"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form, reader, name, tmp_path):
    kind, how, write, states_of, has_counts = FORMS[form]
    path, saved = str(tmp_path / "states"), trained(kind, name, **how)
    write(saved, path)
    expected = leaves(states_of(saved))
    if reader == "Trainer":
        found = trainer(mxmp.Trainer, name)
        found.load_states(path)
        states, optimizer = found._updaters[0].states, found.optimizer
    else:
        found = module(mxmp.Module, name)
        found.load_optimizer_states(path)
        states, optimizer = found.updaters[0].states, found.updaters.optimizer
    assert_same(leaves(states), expected)
    assert len(expected) >= 2
    assert optimizer.num_update == (3 if has_counts else 0)
    assert optimizer.lr == FORMED[name]["learning_rate"]


@pytest.mark.parametrize("name", FORMED)
@pytest.mark.parametrize("kind", [gluon.Trainer, mxmp.Trainer])
def test_masters_within_the_states_of_float16_weights_are_found(kind, name, tmp_path):
    """``net.cast("float16")`` with ``multi_precision``: the optimizer keeps the FP32 weights."""
    saved, found = trained(kind, name, dtype="float16"), trainer(mxmp.Trainer, name, dtype="float16")
    bytes_of(False)(saved, tmp_path / "states")
    found.load_states(str(tmp_path / "states"))
    for index, param in enumerate(found._params):
        master = saved._updaters[0].states[index][{"sgd": 1, "adam": 0}[name]].asnumpy()
        assert_same([found._updaters[0].states[index][{"sgd": 1, "adam": 0}[name]]], [master])
        assert_same([param.data()], [master.astype("float16")])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_file_of_a_plain_multi_precision_trainer_gives_states_and_masters(name, tmp_path):
    """(state, master) or (master, state), told apart by what the optimizer makes."""
    plain, net = trained(gluon.Trainer, name, dtype="float16"), nn.HybridSequential(prefix="")
    plain.save_states(str(tmp_path / "states"))
    net.add(*(nn.Dense(2, in_units=2, use_bias=False, prefix=each[:2]) for each in NAMES))
    net.initialize()
    mxmp.convert(net, MASTERS)(mx.nd.zeros((1, 2)))
    options = FORMED.get(name) or OPTIMIZERS[name]
    ours = mxmp.Trainer(net.collect_params(), name, options, loss_scale=1.0)
    ours.load_states(str(tmp_path / "states"))
    gradient = mx.nd.ones((2, 2), dtype="float16")
    for step in range(2):
        assert_same([param.data() for param in ours._params], [param.data() for param in plain._params])
        for trainer in (plain, ours):
            mx.random.seed(step)
            for i, param in enumerate(trainer._params):
                masters = [{i: param.held_masters[0]}] if trainer is ours else []
                trainer._updaters[0](i, gradient, param.data(), *masters)
    assert_same([param.data() for param in ours._params], [param.data() for param in plain._params])


def test_equal_states_of_a_trainers_parameters_are_not_taken_for_those_of_two_devices(tmp_path):
    found = trainer(gluon.Trainer, "sgd")
    found._updaters[0].states = {0: mx.nd.ones((2, 2)), 1: mx.nd.ones((2, 2))}
    (tmp_path / "states").write_bytes(found._updaters[0].get_states())
    found = trainer(mxmp.Trainer, "sgd")
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
    found = trainer(gluon.Trainer, "sgd")
    found._updaters[0].states = states
    (tmp_path / "states").write_bytes(found._updaters[0].get_states())
    found = trainer(mxmp.Trainer, "sgd")
    with pytest.raises(ValueError, match=message):
        found.load_states(str(tmp_path / "states"))
    assert not found._updaters[0].states


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stored", PRECISIONS)
def test_the_file_of_a_plain_fp32_trainer_continues_its_run(name, stored, tmp_path):
    net, other = two_layers(), two_layers(PRECISIONS[stored], seed=99)
    plain, resumed = gluon.Trainer(net.collect_params(), name, options(name, True)), trainer_of(other, name)
    train(net, plain, range(4))
    save(net, plain, tmp_path)
    load(other, resumed, tmp_path)
    assert resumed.loss_scale == 2.0**8
    assert tree(resumed._updaters[0].states) == tree(plain._updaters[0].states)
    if stored == "float32":
        train(net, plain, range(4, 8))
        train(other, resumed, range(4, 8))
        assert picture(resumed)["weights"] == [tree(p.list_data()) for p in plain._params]


# MXNet's own Module leaves the states file open when it reads it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]


OPTIONS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.9, "rescale_grad": 0.25},
    "adam": {"learning_rate": 0.01, "rescale_grad": 0.25},
    "rmsprop": {"learning_rate": 0.01, "rescale_grad": 0.25},
}


def plain_states(folder, store, fixed=()):
    """After 3 steps on two devices."""
    module = mx.mod.Module(mlp(), context=[mx.cpu(0), mx.cpu(1)], fixed_param_names=fixed)
    bound(module).init_optimizer(kvstore=store, optimizer="adam", optimizer_params=OPTIONS["adam"])
    modules.train(module, range(3))
    module.save_optimizer_states(str(folder / "s"))
    return module


@pytest.mark.parametrize("fixed", [(), ("fc1_weight",), ("fc1_weight", "fc1_bias", "fc2_weight")], ids=len)
def test_states_by_weight_and_device_become_those_of_the_weights(fixed, tmp_path, monkeypatch):
    """As a Module numbers them whose kvstore only sums."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    plain = plain_states(tmp_path, "local", fixed)
    module = bound(mxmp.Module(mlp(), fixed_param_names=fixed))
    module.init_optimizer(optimizer="adam", optimizer_params=OPTIONS["adam"])
    module.load_optimizer_states(str(tmp_path / "s"))
    states = module._updater[0].states
    assert len(states) == len(SHAPES) - len(fixed)
    for index, state in states.items():
        for found, expected in zip(state, plain._updater.states[2 * index]):
            np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())


def test_equal_states_by_name_are_not_taken_for_those_of_several_devices(tmp_path):
    """As a Module saves them whose kvstore updates: one state for each name, whatever the number of devices."""
    x = mx.sym.var("data")
    for i in range(4):
        x = mx.sym.FullyConnected(x, num_hidden=6, no_bias=True, name=f"fc{i}")
    states = {f"fc{i}_weight": mx.nd.full((6, 6), i // 2) for i in range(4)}
    (tmp_path / "s").write_bytes(pickle.dumps(states))
    module = mxmp.Module(mx.sym.SoftmaxOutput(x, name="softmax"))
    module.bind([("data", (4, 6))], [("softmax_label", (4,))])
    module.init_params()
    module.init_optimizer(optimizer="sgd", optimizer_params=OPTIONS["sgd"])
    module.load_optimizer_states(str(tmp_path / "s"))
    found = module._updater[0].states
    assert {index: float(state.mean().asscalar()) for index, state in found.items()} == {0: 0, 1: 0, 2: 1, 3: 1}


def test_states_of_devices_that_were_trained_apart_are_refused(tmp_path):
    plain_states(tmp_path, None)
    module = bound(mxmp.Module(mlp()))
    module.init_optimizer(optimizer="adam", optimizer_params=OPTIONS["adam"])
    with pytest.raises(ValueError, match="other parameters"):
        module.load_optimizer_states(str(tmp_path / "s"))


@pytest.mark.parametrize(("kept", "name"), [("namedtuple", "Moments"), ("numpy", "ndarray")])
def test_a_state_that_a_file_cannot_hold_is_refused_when_it_is_saved(kept, name, tmp_path):
    _, fname = files(tmp_path)
    net = two_layers()
    trainer = mxmp.Trainer(net.collect_params(), "ownmomentum", {"kept": kept}, loss_scale=scaler())
    trainer.save_states(fname)
    with open(fname, "rb") as file:
        before = file.read()
    steps(net, trainer, range(2))
    with pytest.raises(TypeError, match=f"keeps a {name} in its state"):
        trainer.save_states(fname)
    with open(fname, "rb") as file:
        assert file.read() == before
