"""Runs that are saved and go on: a net, its trainer, the files, and what both hold."""

from __future__ import annotations

from support.optimizers import options

import mxmp
from kit.nets import forward, overflow, train
from kit.pictures import full_weights, picture
from kit.twins import MASTERS

PRECISIONS = {"float32": None, "float16": MASTERS}


def scaler():
    return mxmp.DynamicLossScaler(init_scale=2.0**8, growth_interval=3, hysteresis=2)


def trainer_of(net, name="adam", loss_scale=None, scheduled=True, **kwargs):
    return mxmp.Trainer(
        net.collect_params(), name, options(name, scheduled), loss_scale=loss_scale or scaler(), **kwargs
    )


def steps(net, trainer, which, devices=1):
    """Train; steps in ``SPOILED`` overflow."""
    for step in which:
        if step in SPOILED:
            trainer.backward(forward(net, step, devices))
            overflow(trainer)
            trainer.step(4)
        else:
            train(net, trainer, [step], devices)


SPOILED = (4, 8, 9)


def whole(trainer):
    """Everything that a resumed run must have in common with one that was not interrupted."""
    return picture(trainer), trainer.scaled_step.state_dict(), full_weights(trainer)


def files(tmp_path):
    return str(tmp_path / "net.params"), str(tmp_path / "trainer.states")


def save(net, trainer, tmp_path):
    params, fname = files(tmp_path)
    net.save_parameters(params)
    trainer.save_states(fname)


def load(net, trainer, tmp_path, **kwargs):
    params, fname = files(tmp_path)
    net.load_parameters(params, **kwargs)
    trainer.load_states(fname)


def interrupted(fresh, first, rest, tmp_path):
    """Return the trainers of two runs of ``fresh(seed)``: one trains all steps, the other resumes after ``first``."""
    net, trainer = fresh(1)
    steps(net, trainer, first)
    save(net, trainer, tmp_path)
    other, resumed = fresh(2)
    load(other, resumed, tmp_path)
    for each in ((net, trainer), (other, resumed)):
        steps(*each, rest)
    return trainer, resumed
