"""Save and resume: bit-exact at every phase, across devices and precisions, names and orders of parameters."""

from __future__ import annotations

import os

import pytest
from kit.nets import forward, train, two_layers
from kit.pictures import tree
from kit.resuming import files, steps, trainer_of, whole
from mxnet import gluon
from mxnet.gluon import nn
from support.optimizers import options

import mxmp
from mxmp.step import state_file


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


def nn_of(*shapes, names=("net_dense0_", "net_dense1_")):
    net = nn.HybridSequential(prefix="")
    net.add(*(nn.Dense(out, in_units=units, use_bias=False, prefix=name) for name, (out, units) in zip(names, shapes)))
    net.initialize()
    return net


def renamed():
    return trainer_of(nn_of((4, 3), (2, 4), names=("body_", "head_")))


def test_a_file_without_names_goes_by_the_parameters_order(tmp_path):
    """As files of MXNet's own Trainer do."""
    _, fname = files(tmp_path)
    net, resumed = two_layers(), renamed()
    trainer = trainer_of(net)
    steps(net, trainer, range(3))
    trainer.save_states(fname)
    with open(fname, "rb") as file:
        content = state_file.read(file.read())
    del content["names"]
    state_file.write(fname, content)
    resumed.load_states(fname)
    assert tree(resumed._updaters[0].states) == tree(trainer._updaters[0].states)


@pytest.mark.parametrize(
    ("make", "message", "of_plain"),
    [
        (lambda: trainer_of(two_layers(), "sgd"), "optimizer", "optimizer"),
        (lambda: trainer_of(two_layers(bias=True), "adam"), "other parameters: 2 of them, here are 4", None),
        (lambda: trainer_of(two_layers(), "adam", scheduled=False), "learning-rate schedule", "schedule"),
        (
            lambda: trainer_of(nn_of((4, 3), (2, 5)), "adam"),
            r"number 1 has shape \(2, 4\), here it has \(2, 5\)",
            "shape",
        ),
        (renamed, "other parameters: 'net_dense0_weight', and here is 'body_weight' in its place", None),
    ],
)
def test_states_of_another_run_are_refused_with_the_difference(make, message, of_plain, tmp_path):
    fname, net = str(tmp_path / "states"), two_layers()
    for kind in (gluon.Trainer, mxmp.Trainer):
        trainer = kind(net.collect_params(), "adam", options("adam", True))
        train(net, trainer, range(2))
        trainer.save_states(fname)
        other, says = make(), message if kind is mxmp.Trainer else of_plain
        before = whole(other)
        if says is not None:
            with pytest.raises(ValueError, match=says):
                other.load_states(fname)
            assert whole(other) == before
