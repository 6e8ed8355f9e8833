"""Every form of states, of MXNet's Trainer and Module and of optimizers of a user's own, and what is none."""

import collections
import pickle

import mxnet as mx
import numpy as np
import pytest
from kit import modules
from kit.modules import SHAPES, bound, mlp
from kit.nets import train, two_layers
from kit.pictures import full_weights, picture, tree
from kit.resuming import PRECISIONS, files, interrupted, load, save, scaler, steps, trainer_of, whole
from kit.twins import MASTERS, assert_same
from mxnet import gluon
from support.optimizers import OPTIMIZERS, options

import mxmp

NAMES = ("a_weight", "b_weight")
FORMED = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
}


def trainer(kind, name, dtype="float32", **kwargs):
    params = [mx.gluon.Parameter(each, shape=(2, 2), dtype=dtype, init=mx.init.One()) for each in NAMES]
    for param in params:
        param.initialize()
    given = dict(FORMED[name], multi_precision=dtype == "float16")
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
    found.init_optimizer(kvstore, name, FORMED[name])
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


@pytest.mark.parametrize("name", FORMED)
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
    assert optimizer.lr == FORMED[name]["learning_rate"]


@pytest.mark.parametrize("name", FORMED)
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


def plain_float16(name, steps_taken, fname):
    """A ``multi_precision`` run of plain MXNet on float16 weights; returns masters and FP32-like states."""
    params = []
    for i, shape in enumerate(((4, 3), (2, 4))):
        param = gluon.Parameter(f"net_dense{i}_weight", shape=shape, dtype="float16")
        param.initialize(mx.init.Uniform(0.5))
        params.append(param)
    trainer = gluon.Trainer(params, name, {**OPTIMIZERS[name], "multi_precision": True}, update_on_kvstore=False)
    for step in range(steps_taken):
        rng = np.random.RandomState(step)
        for param in params:
            param.grad()[:] = mx.nd.array(rng.randn(*param.shape), dtype="float16")
            param.data()._fresh_grad = True
        trainer.step(1)
    if fname:
        trainer.save_states(fname)
    return params, trainer


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_file_of_a_plain_multi_precision_trainer_gives_states_and_masters(name, tmp_path):
    """(state, master) or (master, state), told apart by what the optimizer makes."""
    _, fname = files(tmp_path)
    params, plain = plain_float16(name, 3, fname)
    net = two_layers(MASTERS, seed=99)
    trainer = mxmp.Trainer(net.collect_params(), name, OPTIMIZERS[name], loss_scale=1.0)
    trainer.load_states(fname)
    for ours, theirs in zip(trainer._params, params):
        assert tree(ours.data()) == tree(theirs.data())
    mx.random.seed(1)
    expected = continue_plain(plain, params)
    mx.random.seed(1)
    for step, param in enumerate(trainer._params):
        masters = {step: param.held_masters[0]}
        trainer._updaters[0](step, mx.nd.ones(param.shape, dtype="float16"), param.data(), masters)
    assert [tree(p.data()) for p in trainer._params] == expected


def continue_plain(trainer, params):
    for i, param in enumerate(params):
        trainer._updaters[0](i, mx.nd.ones(param.shape, dtype="float16"), param.data())
    return [tree(p.data()) for p in params]


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
def test_the_users_own_float16_parameters_resume_in_their_own_layout(name, multi, tmp_path):
    _, fname = files(tmp_path)

    def run(seed):
        mx.random.seed(seed)
        weight = gluon.Parameter("weight", shape=(4, 3), dtype="float16")
        weight.initialize(mx.init.Uniform(1))
        more = {**OPTIMIZERS[name], "multi_precision": multi}
        return weight, mxmp.Trainer([weight], name, more, loss_scale=2.0)

    def step(weight, trainer):
        with mx.autograd.record():
            loss = (weight.data().astype("float32") ** 2).sum()
        trainer.backward(loss)
        trainer.step(1)

    weight, trainer = run(1)
    for _ in range(3):
        step(weight, trainer)
    trainer.save_states(fname)
    other, resumed = run(2)
    other.set_data(weight.data())
    resumed.load_states(fname)
    for _ in range(3):
        step(weight, trainer)
        step(other, resumed)
    assert whole(resumed) == whole(trainer)


Moments = collections.namedtuple("Moments", "mean")


@mx.optimizer.Optimizer.register
class OwnMomentum(mx.optimizer.Optimizer):
    """Momentum that fades with the number of updates, kept in the form ``kept``."""

    def __init__(self, kept="dict", **kwargs):
        super().__init__(**kwargs)
        self.kept = kept
        self.at = Moments(3)

    def create_state(self, index, weight):
        zeros = mx.nd.zeros_like(weight)
        forms = {"list": [zeros, 0.0], "number": 1.0, "namedtuple": Moments(zeros), "numpy": zeros.asnumpy()}
        return {"mean": zeros, "t": 0, "more": {}} if self.kept == "dict" else forms[self.kept]

    def update(self, index, weight, grad, state):
        self._update_count(index)
        moved = grad * self.rescale_grad
        if self.kept == "dict":
            state["t"] += 1
            state["more"]["last"] = state["mean"] + moved
            state["mean"][:] = state["mean"] * 0.9 + state["more"]["last"] / state["t"]
            moved = state["mean"]
        elif self.kept == "list":
            state[1] += 0.5
            state[0][:] = state[0] * 0.9 + moved / state[1]
            moved = state[0]
        elif self.kept == "number":
            moved = moved * state
        weight[:] = weight - self.lr * moved


@pytest.mark.parametrize("stored", PRECISIONS)
@pytest.mark.parametrize("kept", ["dict", "list", "number"])
def test_states_with_dicts_and_numbers_resume_bit_for_bit(kept, stored, tmp_path):
    def fresh(seed):
        net = two_layers(PRECISIONS[stored], seed=seed)
        return net, mxmp.Trainer(net.collect_params(), "ownmomentum", {"kept": kept}, loss_scale=scaler())

    trainer, resumed = interrupted(fresh, range(3), range(3, 7), tmp_path)
    assert full_weights(resumed) == full_weights(trainer)
    assert tree(resumed._updaters[0].states) == tree(trainer._updaters[0].states)


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
