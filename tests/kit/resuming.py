"""Runs that are saved and go on: a net, its trainer, the files, and what both hold."""

from __future__ import annotations

import collections

import mxnet as mx
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


OWN_OPTIMIZERS = {f"own, {kept}": ("ownmomentum", {"kept": kept}) for kept in ("dict", "list", "number")}
