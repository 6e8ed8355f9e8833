"""Save and resume: bit-exact at every phase, across devices and precisions, names and orders of parameters."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, batch, contexts, forward, train, two_layers
from kit.pictures import full_weights, picture, tree
from kit.resuming import PRECISIONS, files, interrupted, load, save, scaler, steps, trainer_of, whole
from kit.twins import MASTERS
from mxnet import gluon
from mxnet.gluon import nn
from support.optimizers import OPTIMIZERS, options

import mxmp
from mxmp.step import state_file
from mxmp.step.state_layout import check_states

LAST = 14
PHASES = {"fresh": 0, "mid-interval": 2, "after growth": 3, "right after a skip": 5, "hysteresis used up": 10}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stored", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_continues_bit_for_bit(name, stored, phase, tmp_path):
    def fresh(seed):
        net = two_layers(PRECISIONS[stored], seed=seed)
        return net, trainer_of(net, name, scaler() if seed == 1 else mxmp.DynamicLossScaler())

    done = PHASES[phase]
    trainer, resumed = interrupted(fresh, range(done), range(done, LAST), tmp_path)
    assert whole(resumed) == whole(trainer)
    assert resumed.skipped_steps == 3


@pytest.mark.parametrize("stored", PRECISIONS)
def test_a_run_resumes_in_the_middle_of_an_lbsgd_window(stored, tmp_path):
    def fresh(seed):
        net = two_layers(PRECISIONS[stored], seed=seed)
        more = {**OPTIMIZERS["lbsgd"], "batch_scale": 3}
        return net, mxmp.Trainer(net.collect_params(), "lbsgd", more, loss_scale=scaler())

    trainer, resumed = interrupted(fresh, range(2), range(2, 8), tmp_path)
    assert whole(resumed) == whole(trainer)


def test_the_phases_are_what_they_are_called():
    net = two_layers()
    trainer = trainer_of(net)
    seen = {}
    for step in range(LAST):
        seen[step] = trainer.scaler.state_dict()
        steps(net, trainer, [step])
    assert (seen[2]["clean_steps"], seen[2]["tolerance"]) == (2, 2)
    assert (seen[3]["clean_steps"], seen[3]["scale"]) == (0, 2.0**9)
    assert (seen[5]["clean_steps"], seen[5]["tolerance"]) == (0, 1)
    assert (seen[10]["tolerance"], seen[10]["scale"]) == (0, 2.0**9)


def test_masters_come_from_the_states_file_too(tmp_path):
    _, fname = files(tmp_path)
    net, other = two_layers(MASTERS), two_layers(MASTERS, seed=99)
    trainer, resumed = trainer_of(net), trainer_of(other)
    steps(net, trainer, range(3))
    trainer.save_states(fname)
    resumed.load_states(fname)
    assert full_weights(resumed) == full_weights(trainer)
    assert picture(resumed)["weights"] == picture(trainer)["weights"]


@pytest.mark.parametrize("between", [lambda t: None, lambda t: t.allreduce_grads(), lambda t: t.clip_global_norm(1.0)])
def test_saving_between_backward_and_step_is_refused(between, tmp_path):
    net = two_layers(grad_req="add")
    trainer = trainer_of(net)
    trainer.backward(forward(net, 0))
    between(trainer)
    with pytest.raises(RuntimeError, match="would lose the gradients: step first"):
        trainer.save_states(files(tmp_path)[1])
    assert os.listdir(tmp_path) == []
    trainer.step(4)
    trainer.save_states(files(tmp_path)[1])


def test_loading_between_backward_and_step_forgets_the_gradients(tmp_path):
    _, fname = files(tmp_path)
    net = two_layers()
    trainer = trainer_of(net)
    steps(net, trainer, range(2))
    trainer.save_states(fname)
    trainer.backward(forward(net, 2))
    trainer.load_states(fname)
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        trainer.step(4)
    steps(net, trainer, [2])


@pytest.mark.parametrize("stored", [None, MASTERS])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_backwards_that_add_up_begin_anew_after_loading(devices, scaled, stored, tmp_path):
    """The pending gradients have another scale, or none."""
    _, fname = files(tmp_path)
    nets = [two_layers(stored, devices, grad_req="add") for _ in range(3)]
    scalers = map(mxmp.DynamicLossScaler, (64.0, 1024.0, 64.0))
    saved, trainer, other = (trainer_of(net, loss_scale=scaler) for net, scaler in zip(nets, scalers))
    saved.save_states(fname)
    losses = forward(nets[1], 2, devices)
    if scaled:
        trainer.backward(losses)
    else:
        mx.autograd.backward(losses)
    trainer.load_states(fname)
    other.load_states(fname)
    assert trainer.loss_scale == other.loss_scale
    for net, each in zip(nets[1:], (trainer, other)):
        train(net, each, [5], devices)
    assert full_weights(trainer) == full_weights(other)


@pytest.mark.parametrize("name", ["adam", "lamb", "nag", "ftml"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (2, 1), (2, 3)])
def test_update_counts_and_states_reach_another_number_of_devices(name, saved_on, loaded_on, tmp_path):
    net, other = two_layers(MASTERS, saved_on), two_layers(MASTERS, loaded_on, seed=99)
    trainer, resumed = trainer_of(net, name), trainer_of(other, name)
    steps(net, trainer, range(5), saved_on)
    save(net, trainer, tmp_path)
    load(other, resumed, tmp_path, ctx=contexts(loaded_on))
    assert resumed._optimizer.num_update == trainer._optimizer.num_update
    for step in range(5, 8):
        train(other, resumed, [step], loaded_on)
        for param in resumed._params:
            assert len({tree(a)[2] for a in param.masters()}) == 1
    counts = resumed._optimizer._all_index_update_counts
    assert all(counts[d] == counts[0] for d in range(loaded_on))


def test_counts_of_a_run_on_another_context_alone_are_found(tmp_path):
    """A run on device 1 only leaves an empty table for device 0."""
    _, fname = files(tmp_path)

    def on(device):
        net = nn.Dense(2, in_units=3, prefix="net_")
        net.initialize(mx.init.One(), ctx=mx.cpu(device))
        return net, mxmp.Trainer(net.collect_params(), "adam", options("adam"), loss_scale=scaler())

    def step_on(net, trainer, device, step):
        x, y = batch(step, mx.cpu(device))
        with mx.autograd.record():
            loss = ((net(x) - y) ** 2).sum()
        trainer.backward(loss)
        trainer.step(4)

    net, trainer = on(1)
    for step in range(3):
        step_on(net, trainer, 1, step)
    trainer.save_states(fname)
    other, resumed = on(2)
    for p, q in zip(other.collect_params().values(), net.collect_params().values()):
        p.set_data(q.data())
    resumed.load_states(fname)
    step_on(net, trainer, 1, 3)
    step_on(other, resumed, 2, 3)
    assert [tree(p.data()) for p in resumed._params] == [tree(p.data()) for p in trainer._params]


@pytest.mark.parametrize(("first", "second"), [(None, MASTERS), (MASTERS, None), (CASTS, MASTERS), (MASTERS, CASTS)])
@pytest.mark.parametrize("name", ["sgd", "adam", "lars", "dcasgd"])
def test_states_move_between_fp32_and_float16_parameters(name, first, second, tmp_path):
    """Against a run that has the second precision from the start of the second half."""
    net, other = two_layers(first), two_layers(second, seed=99)
    trainer, resumed = trainer_of(net, name), trainer_of(other, name)
    steps(net, trainer, range(4))
    save(net, trainer, tmp_path)
    load(other, resumed, tmp_path)
    assert full_weights(resumed) == full_weights(trainer)
    assert tree(resumed._updaters[0].states) == tree(trainer._updaters[0].states)
    steps(other, resumed, range(5, 8))
    if {first, second} == {CASTS, MASTERS}:
        steps(net, trainer, range(5, 8))
        assert full_weights(resumed) == full_weights(trainer)


@pytest.mark.parametrize("when", ["before the first forward", "before the first step", "after the first step"])
def test_states_load_before_or_after_the_first_step(when, tmp_path):
    params, fname = files(tmp_path)

    def deferred():
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(4, activation="relu"), nn.Dense(2))
        net.initialize()
        mxmp.convert(net, MASTERS)
        return net, trainer_of(net)

    net, trainer = deferred()
    steps(net, trainer, range(3))
    net.save_parameters(params)
    trainer.save_states(fname)
    other, resumed = deferred()
    if when != "before the first forward":
        other(batch(0)[0])
    if when == "after the first step":
        steps(other, resumed, [0])
    if when != "before the first forward":
        other.load_parameters(params)
    resumed.load_states(fname)
    steps(net, trainer, range(3, 8))
    steps(other, resumed, range(3, 8))
    assert whole(resumed) == whole(trainer)


def test_a_trainer_saves_before_its_parameters_have_shapes(tmp_path):
    _, fname = files(tmp_path)
    net = nn.Dense(2)
    net.initialize()
    trainer = trainer_of(net)
    trainer.save_states(fname)
    trainer.load_states(fname)
    assert trainer.loss_scale == 2.0**8


def test_another_kind_of_scaler_keeps_its_own_state_and_says_so(tmp_path, caplog):
    _, fname = files(tmp_path)
    net = two_layers()
    trainer = trainer_of(net, loss_scale=mxmp.NoLossScaler())
    steps(net, trainer, range(3))
    trainer.save_states(fname)
    other = trainer_of(two_layers())
    other.load_states(fname)
    assert other.loss_scale == 2.0**8
    assert other.scaled_step.steps == 3
    assert "NoLossScaler" in caplog.text


# -- parameters that have other names or another order ----------------------------------------------


def numbered(first, stored=None, seed=7, layers=4, prefix="dense"):
    """Layers of equal shapes, whose names begin with the number that MXNet's counter has reached in the process."""
    net = nn.HybridSequential(prefix="")
    for i in range(layers):
        net.add(nn.Dense(3, in_units=3, use_bias=False, activation="tanh", prefix=f"{prefix}{first + i}_"))
    mx.random.seed(seed)
    net.initialize(mx.init.Uniform(0.5))
    return mxmp.convert(net, stored) if stored else net


def rounds(net, trainer, which):
    """Every second step leaves the last layer out, so that the parameters' update counts differ."""
    for step in which:
        x = mx.nd.array(np.random.RandomState(step).randn(4, 3))
        with mx.autograd.record():
            out = x
            for layer in list(net)[: len(net) - step % 2]:
                out = layer(out)
            loss = (out**2).sum()
        trainer.backward(loss)
        trainer.step(4, ignore_stale_grad=True)


@pytest.mark.parametrize("stored", PRECISIONS)
@pytest.mark.parametrize("more", [("adam", {}), ("lbsgd", {"batch_scale": 3})], ids=lambda more: more[0])
@pytest.mark.parametrize("given", ["dict", "list", "dict then list"])
@pytest.mark.parametrize(("saved", "loaded"), [(8, 12), (12, 98)])
def test_a_net_that_the_same_code_builds_again_resumes_under_its_new_numbers(
    given, more, stored, saved, loaded, tmp_path
):
    _, fname = files(tmp_path)

    def trainer_over(net, given):
        params = net.collect_params()
        return mxmp.Trainer(
            params if given == "dict" else list(params.values()), more[0], {**OPTIMIZERS[more[0]], **more[1]}
        )

    net = numbered(saved, PRECISIONS[stored])
    trainer = trainer_over(net, given.split()[0])
    rounds(net, trainer, range(5))
    net.save_parameters(fname + ".params")
    trainer.save_states(fname)
    rounds(net, trainer, range(5, 9))
    other = numbered(loaded, PRECISIONS[stored], seed=99)
    other.load_parameters(fname + ".params")
    resumed = trainer_over(other, given.split()[-1])
    resumed.load_states(fname)
    rounds(other, resumed, range(5, 9))
    for mine, theirs in zip(other, net):
        assert tree(mine.weight.data()) == tree(theirs.weight.data())
    assert resumed.scaled_step.state_dict() == trainer.scaled_step.state_dict()


@pytest.mark.parametrize("stored", PRECISIONS)
def test_a_list_of_parameters_of_two_nets_keeps_its_order_if_one_of_them_is_built_again(stored, tmp_path):
    """As in MXNet's Trainer, which knows no names: the body that was built again has a higher number than the head."""
    _, fname = files(tmp_path)

    def layer(number, seed):
        net = nn.Dense(3, in_units=3, prefix=f"dense{number}_")
        mx.random.seed(seed)
        net.initialize(mx.init.Uniform(0.5))
        return mxmp.convert(net, PRECISIONS[stored]) if PRECISIONS[stored] else net

    def trainer_over(*nets):
        return mxmp.Trainer([param for net in nets for param in net.collect_params().values()], "adam", loss_scale=8)

    def run(nets, trainer, which):
        for step in which:
            with mx.autograd.record():
                loss = (nets[1](nets[0](mx.nd.array(np.random.RandomState(step).randn(4, 3)))) ** 2).sum()
            trainer.backward(loss)
            trainer.step(4)

    nets = [layer(4, 1), layer(5, 2)]
    trainer = trainer_over(*nets)
    run(nets, trainer, range(3))
    others = [layer(6, 3), layer(5, 4)]
    for number, (net, other) in enumerate(zip(nets, others)):
        net.save_parameters(f"{fname}{number}")
        other.load_parameters(f"{fname}{number}")
    trainer.save_states(fname)
    resumed = trainer_over(*others)
    resumed.load_states(fname)
    for pair in (nets, trainer), (others, resumed):
        run(*pair, range(3, 6))
    for net, other in zip(nets, others):
        assert tree(other.weight.data()) == tree(net.weight.data())


def two_dense(units, prefixes=("dense4_", "dense5_")):
    """Two nets of one process, whose layers get the names of the order in which they are built."""
    nets = [nn.Dense(units, in_units=3, prefix=prefixes[0]), nn.Dense(3, in_units=units, prefix=prefixes[1])]
    for net in nets:
        net.initialize()
    return nets


def adam_over(*nets):
    return mxmp.Trainer([param for net in nets for param in net.collect_params().values()], "adam", loss_scale=8)


def saved_after_a_step(first, second, fname):
    trainer = adam_over(first, second)
    with mx.autograd.record():
        loss = (second(first(mx.nd.ones((4, 3)))) ** 2).sum()
    trainer.backward(loss)
    trainer.step(4)
    trainer.save_states(fname)
    return trainer


def test_a_list_of_the_same_parameters_in_another_order_goes_by_their_names_if_only_these_fit_the_shapes(tmp_path):
    _, fname = files(tmp_path)
    first, second = two_dense(5)
    trainer = saved_after_a_step(first, second, fname)
    resumed = adam_over(second, first)
    resumed.load_states(fname)
    found = resumed._updaters[0].states
    assert tree([found[i] for i in (2, 3, 0, 1)]) == tree([trainer._updaters[0].states[i] for i in range(4)])


def test_nets_of_equal_shapes_that_were_built_in_another_order_do_not_exchange_their_states(tmp_path):
    _, fname = files(tmp_path)
    saved_after_a_step(*two_dense(3), fname)
    refused = adam_over(*two_dense(3, prefixes=("dense5_", "dense4_")))
    before = whole(refused)
    with pytest.raises(ValueError, match=r"had 'dense4_weight' where it has 'dense5_weight' here.* order of the saved"):
        refused.load_states(fname)
    assert whole(refused) == before
    fits = adam_over(*two_dense(3))
    fits.load_states(fname)


def test_a_file_whose_parameters_have_other_names_is_refused_unless_only_their_beginning_differs(tmp_path):
    _, fname = files(tmp_path)
    net = numbered(8)
    trainer = trainer_of(net)
    rounds(net, trainer, range(3))
    trainer.save_states(fname)
    trainer_of(numbered(0, prefix="net_dense")).load_states(fname)
    other = nn.HybridSequential(prefix="")
    other.add(*(nn.Dense(3, in_units=3, use_bias=False, prefix=name) for name in ("body_", "head_", "neck_", "top_")))
    other.initialize()
    refused = trainer_of(other)
    before = whole(refused)
    with pytest.raises(ValueError, match="other parameters: 'dense8_weight', and here is 'body_weight' in its place"):
        refused.load_states(fname)
    assert whole(refused) == before


def test_a_file_without_names_goes_by_the_parameters_order(tmp_path):
    """As files of MXNet's own Trainer do."""
    _, fname = files(tmp_path)
    net, other = numbered(0), numbered(1)
    trainer, resumed = trainer_of(net), trainer_of(other)
    rounds(net, trainer, range(3))
    trainer.save_states(fname)
    with open(fname, "rb") as file:
        content = state_file.read(file.read())
    del content["names"]
    state_file.write(fname, content)
    resumed.load_states(fname)
    assert tree(resumed._updaters[0].states) == tree(trainer._updaters[0].states)


# -- damaged, foreign and malicious files -----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer_of(two_layers(), "sgd"), "optimizer"),
        (lambda: trainer_of(two_layers(bias=True), "adam"), "other parameters: 2 of them, here are 4"),
        (lambda: trainer_of(two_layers(), "adam", scheduled=False), "learning-rate schedule"),
        (lambda: trainer_of(nn_of((4, 3), (2, 5)), "adam"), r"number 1 has shape \(2, 4\), here it has \(2, 5\)"),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_states_of_another_run_are_refused_with_the_difference(make, message, plain, tmp_path):
    fname = str(tmp_path / "states")
    net = two_layers()
    if plain:
        trainer = gluon.Trainer(net.collect_params(), "adam", options("adam", True))
        train(net, trainer, range(2))
        message = "other parameters|of another|" + message if "2 of them" not in message else None
    else:
        trainer = trainer_of(net)
        steps(net, trainer, range(2))
    trainer.save_states(fname)
    if message is None:
        return
    other = make()
    before = whole(other)
    with pytest.raises(ValueError, match=message):
        other.load_states(fname)
    assert whole(other) == before


def test_masters_of_a_parameter_that_is_not_there_are_refused():
    optimizer = mx.optimizer.create("sgd")
    check_states({}, {1: np.zeros((2, 4))}, optimizer, [(2, 3), (2, 4)])
    for index in (2, -1, "w"):
        with pytest.raises(ValueError, match=f"number {index} of 2"):
            check_states({}, {index: np.zeros((2, 4))}, optimizer, [(2, 3), (2, 4)])


def nn_of(*shapes):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for out, units in shapes:
            net.add(nn.Dense(out, in_units=units, use_bias=False))
    net.initialize()
    return net
