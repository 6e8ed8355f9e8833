"""Drawn sequences of calls, each made on a net or Module of mxmp that computes in FP32, and on plain MXNet's beside it.

Plain MXNet is not hybridized, so it has no graph that could go stale. A call that mxmp refuses in words is made on
neither, and must leave everything as it was: the sequence goes on. The two are compared bit for bit.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
from kit.twins import LOSS, array, seeded, sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

BATCH = 4
FLAGS = [
    {"active": False},
    {},
    {"static_alloc": True},
    {"static_alloc": True, "static_shape": True},
    {"static_alloc": True, "static_shape": True, "inline_limit": 0},
]
SCALES = [2.0**-40, 2.0**-14, 1.0, 8.0, 64.0, 1024.0, 2.0**15]
BAD = [float("inf"), -float("inf"), float("nan")]
OPTIMIZERS = [
    *(("sgd", {"momentum": 0.9, "wd": 0.01}), ("sgd", {}), ("adam", {}), ("nag", {"momentum": 0.9}), ("rmsprop", {})),
    *(("adam", {"clip_gradient": 0.05}), ("adagrad", {}), ("ftrl", {}), ("signum", {}), ("lamb", {}), ("plain", {})),
]


@mx.optimizer.register
class Plain(mx.optimizer.Optimizer):
    """An optimizer of a user's own, which never reads ``rescale_grad``."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight -= 0.01 * grad


class RefusedError(Exception):
    """mxmp has refused a call in words; ``args[0]`` has them."""


@contextmanager
def refusals() -> Iterator[None]:
    """Raise ``RefusedError`` in place of an error in words; one of MXNet's own is none."""
    try:
        yield
    except mx.MXNetError:
        raise
    except (ValueError, TypeError, RuntimeError, UserWarning) as error:
        raise RefusedError(str(error)) from error


def policy_of(rng: random.Random) -> mxmp.Policy:
    return mxmp.Policy(rng.choice(["float16", "bfloat16"]), exclude=["*"])


def same(found: Any, wanted: Any, what: str) -> None:
    assert len(found) == len(wanted), what
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one, other, err_msg=what)


def spoil(gradient: mx.nd.NDArray, rng: random.Random) -> None:
    """Write one element that is not finite."""
    flat = gradient.reshape((-1,))
    flat[rng.randrange(flat.size)] = rng.choice(BAD)


class Side:
    """A Gluon net and its trainer: plain MXNet's if ``policy`` is None."""

    def __init__(self, policy: Any, rng: random.Random, devices: list[mx.Context]) -> None:
        self.policy, self.devices = policy, devices
        norm = [nn.BatchNorm(in_channels=5)] if len(devices) == 1 and rng.random() < 0.5 else []
        layers = [nn.Dense(5, in_units=6, activation="tanh"), *norm, nn.Dense(3, in_units=5)]
        self.net = seeded(sequence(*layers, prefix="net_"), devices)
        if policy is not None:
            mxmp.convert(self.net, policy)
        self.params = self.net.collect_params()
        self.trained = [param for param in self.params.values() if param.grad_req != "null"]
        optimizer, options = rng.choice(OPTIMIZERS)
        options = {"learning_rate": 0.1, **options}
        scaler = rng.choice([64.0, "dynamic", None, mxmp.AdaptiveLossScaler(1024.0)])
        kind, more = (gluon.Trainer, {}) if policy is None else (mxmp.Trainer, {"loss_scale": scaler})
        kvstore = None if len(devices) == 1 and rng.random() < 0.5 else "device"
        self.trainer = kind(self.params, optimizer, options, kvstore=kvstore, update_on_kvstore=False, **more)
        self.losses: list[list[mx.nd.NDArray]] = []

    def weights(self) -> list[np.ndarray]:
        mx.nd.waitall()  # BatchNorm writes its statistics without telling the engine
        return [each.asnumpy() for param in self.params.values() for each in param.list_data()]

    def gradients(self, scale: float | None = None) -> list[np.ndarray]:
        scale = scale or (1.0 if self.policy is None else self.trainer.loss_scale)
        return [grad.asnumpy() / scale for p in self.trained if p.grad_req != "null" for grad in p.list_grad()]

    def norm(self) -> float:
        """Of the summed gradients, which every device has."""
        found = [p.list_grad()[0].asnumpy().ravel() for p in self.trained if p.grad_req != "null"]
        return float(np.linalg.norm(np.concatenate(found or [np.zeros(1)])))

    def outputs(self, net: Any = None) -> list[np.ndarray]:
        return [(net or self.net)(array(999, BATCH, 6, ctx=ctx)).asnumpy() for ctx in self.devices]

    def forward(self, number: int) -> None:
        losses = []
        with autograd.record():
            for i, ctx in enumerate(self.devices):
                seed = 10 * number + i
                out = self.net(array(seed, BATCH, 6, ctx=ctx))
                losses.append(LOSS(out, array(seed + 5000, BATCH, 3, ctx=ctx)))
        self.losses.append(losses)


class GluonPair:
    """What a sequence of calls does to a net of mxmp and to its plain twin."""

    OPS = (
        *("forward", "forward", "backward", "backward", "step", "step", "iteration", "iteration", "iteration"),
        *("unscale", "clip", "discard", "allreduce", "update", "add", "write", "null", "freeze", "thaw", "zero_grad"),
        *("hybridize", "reset_ctx", "load_states", "scale", "evaluate", "copy", "set_data", "reinit"),
        *("overflow", "overflow", "scale_loss"),
    )

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        devices = [mx.cpu(i) for i in range(self.rng.choice([1, 1, 2]))]
        drawn, policy = self.rng.randrange(2**30), policy_of(self.rng)
        self.made = lambda: [Side(each, random.Random(drawn), devices) for each in (policy, None)]
        self.low, self.full = self.made()
        if self.rng.random() < 0.7:
            self.low.net.hybridize(**self.rng.choice(FLAGS))
        self.number, self.summed, self.counts = 0, False, Counter()

    def run(self, op: str) -> None:
        self.number += 1
        try:
            getattr(self, op)()
        except RefusedError:
            self.counts["refused calls"] += 1
        else:
            self.counts[op] += 1

    def end(self) -> None:
        """A last iteration and an evaluation, and the comparison."""
        for op in ("iteration", "evaluate"):
            self.run(op)
        same(self.low.weights(), self.full.weights(), "weights")

    # -- the calls --

    def forward(self) -> None:
        for side in (self.low, self.full):
            # MXNet cannot run backward of two records that share an array without a gradient.
            if any(param.grad_req == "null" for param in side.params.values()):
                side.losses.clear()
            side.forward(self.number)

    def backward(self) -> None:
        if not self.low.losses:
            return
        losses, full = self.low.losses.pop(), self.full.losses.pop()
        if not any(param.grad_req != "null" for param in self.low.trained):
            return
        with refusals():
            self.low.trainer.backward(losses)
        autograd.backward(full)
        self.summed = False
        same(self.low.gradients(), self.full.gradients(), "gradients")

    def iteration(self) -> None:
        self.forward()
        self.backward()
        self.step()

    def scale_loss(self) -> None:
        """As ``backward``, with a new scale within the block, which is for the next one."""
        self.forward()
        losses, full = self.low.losses.pop(), self.full.losses.pop()
        if any(param.grad_req != "null" for param in self.low.trained):
            with refusals(), self.low.trainer.scale_loss(losses) as scaled:
                self.scale()
                autograd.backward(scaled)
            autograd.backward(full)
            self.summed = False
            same(self.low.gradients(), self.full.gradients(), "gradients")

    def overflow(self) -> None:
        """A step with one element that is not finite, which plain MXNet leaves out."""
        self.forward()
        self.backward()
        trained = [param for param in self.low.trained if param.grad_req != "null"]
        if not trained:
            return
        param = self.rng.choice(trained)
        spoil(self.rng.choice(param.list_grad()), self.rng)
        if all(param.grad_req == "add" for param in trained):  # to which another backward adds
            self.forward()
            with refusals():
                self.low.trainer.backward(self.low.losses.pop())
            autograd.backward(self.full.losses.pop())  # which writes the running statistics
        skipped, looks = self.low.trainer.skipped_steps, self.rng.choice(["", "", "unscale", "allreduce_grads"])
        with refusals():
            getattr(self.low.trainer, looks, lambda: None)()
            (self.low.trainer.update if looks == "allreduce_grads" else self.low.trainer.step)(BATCH)
        assert self.low.trainer.skipped_steps == skipped + 1
        assert {name.partition(" on ")[0] for name in self.low.trainer.overflow_params} == {param.name}
        self.leave_out()
        same(self.low.weights(), self.full.weights(), "weights after an overflow")

    def leave_out(self) -> None:
        """Of the step, no gradient stays."""
        self.summed = False
        for side in (self.low, self.full):
            for param in side.trained:
                if param.grad_req != "null":
                    for weight in param.list_data():
                        weight._fresh_grad = False
                    param.zero_grad()

    def step(self, method: str = "step") -> None:
        size = BATCH * self.rng.choice([1, 2])
        if method == "step" and self.low.trainer.ledger.summed:  # MXNet's own would sum anew
            method = "update"
            with refusals():
                self.low.trainer.step(size, ignore_stale_grad=True)
        else:
            with refusals():
                getattr(self.low.trainer, method)(size, ignore_stale_grad=True)
        getattr(self.full.trainer, method)(size, ignore_stale_grad=True)
        self.summed = False
        same(self.low.weights(), self.full.weights(), "weights after a step")

    def update(self) -> None:
        self.step("update")

    def unscale(self) -> None:
        with refusals():
            self.low.trainer.unscale()
        if not self.summed:
            same(self.low.gradients(scale=1.0), self.full.gradients(), "true gradients")

    def clip(self) -> None:
        with refusals():
            norm = self.low.trainer.clip_global_norm(1e30)
        if not self.summed:
            self.full.trainer.allreduce_grads()
        self.summed = True
        if norm > 0:
            assert norm == pytest.approx(self.full.norm(), rel=1e-5)
            with refusals():
                self.low.trainer.clip_global_norm(norm / 2)  # by 0.5 exactly
            for param in self.full.trained:
                for grad in param.list_grad() if param.grad_req != "null" else ():
                    grad *= 0.5

    def discard(self) -> None:
        if not hasattr(self.low.trainer, "discard"):
            return
        with refusals():
            self.low.trainer.discard()
        self.leave_out()

    def allreduce(self) -> None:
        if self.summed:
            return
        with refusals():
            self.low.trainer.allreduce_grads()
        self.full.trainer.allreduce_grads()
        self.summed = True

    def _request(self, how: str, count: int = 6) -> None:
        for side in (self.low, self.full):
            for param in side.trained[:count]:
                param.grad_req = how
        self.summed = False

    def add(self) -> None:
        self._request("add")

    def write(self) -> None:
        self._request("write")

    def null(self) -> None:
        self._request("null")

    def freeze(self) -> None:
        self._request("null", 2)

    def thaw(self) -> None:
        self._request("write", 2)

    def zero_grad(self) -> None:
        for side in (self.low, self.full):
            side.params.zero_grad()

    def hybridize(self) -> None:
        self.low.net.hybridize(**self.rng.choice(FLAGS))

    def reset_ctx(self) -> None:
        for side in (self.low, self.full):
            if self.number % 2:
                side.params.reset_ctx([mx.cpu(i + 5) for i in range(len(side.devices))])
            side.params.reset_ctx(side.devices)
        self.summed = False

    def reinit(self) -> None:
        for side in (self.low, self.full):
            side.params.initialize(force_reinit=True, ctx=side.devices)
        self.set_data()
        self.summed = False

    def set_data(self) -> None:
        for side in (self.low, self.full):
            for i, param in enumerate(side.trained):
                param.set_data(array(100 + i + self.number, *param.shape) * 0.3)

    def load_states(self) -> None:
        """Saved here, and loaded after an iteration."""
        names = [str(self.folder / f"{side}.later") for side in ("low", "full")]
        with refusals():
            self.low.trainer.save_states(names[0])
        self.full.trainer.save_states(names[1])
        self.iteration()
        with refusals():
            self.low.trainer.load_states(names[0])
        self.full.trainer.load_states(names[1])

    def scale(self) -> None:
        scaler = self.low.trainer.scaler
        if not isinstance(scaler, mxmp.NoLossScaler):
            with refusals():
                scaler.loss_scale = self.rng.choice(SCALES)

    def evaluate(self) -> None:
        same(self.low.outputs(), self.full.outputs(), "outputs")

    def copy(self) -> None:
        """MXNet's own copies have all arrays on one device, and fail where a trainer has a kvstore."""
        if not self.full.trainer._kvstore:
            nets = [copy.deepcopy(side.net) for side in (self.low, self.full)]
            same(*([net(array(999, BATCH, 6)).asnumpy()] for net in nets), "outputs of a copy")


# -- Modules ----------------------------------------------------------------------------------------


def symbol(head: str) -> mx.sym.Symbol:
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x, name="tanh"), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax") if head == "softmax" else x


class ModuleSide:
    """A Module with an optimizer: plain MXNet's if ``policy`` is None."""

    def __init__(self, policy: Any, rng: random.Random) -> None:
        self.policy, self.head = policy, rng.choice(["softmax", "plain"])
        self.request = rng.choice(["write", "write", "add"])
        self.devices = [mx.cpu(i) for i in range(rng.choice([1, 1, 2]))]
        self.wants_inputs = rng.random() < 0.3
        self.options = rng.choice([("sgd", {"momentum": 0.9}), ("sgd", {}), ("adam", {})])
        # Not the weight alone: MXNet's FullyConnected on a CPU then leaves the gradient of the bias as it is.
        fixed = ["fc1_weight", "fc1_bias"] if rng.random() < 0.2 else None
        scale = rng.choice([64.0, "dynamic", None, 1024.0])
        labels = ["softmax_label"] if self.head == "softmax" else []
        common: dict[str, Any] = {"context": self.devices, "fixed_param_names": fixed, "label_names": labels}
        more = {} if policy is None else {"policy": policy, "loss_scale": scale}
        kind = mx.mod.Module if policy is None else mxmp.Module
        self.make = lambda: kind(symbol(self.head), **common, **more)
        self.module = self.make()
        self.bind()
        self.module.init_params(arg_params=self.start(0))
        self.init_optimizer()

    def bind(self, **more: Any) -> None:
        label = [("softmax_label", (BATCH,))] if self.head == "softmax" else None
        requests = {"grad_req": self.request, "inputs_need_grad": self.wants_inputs}
        self.module.bind([("data", (BATCH, 6))], label, **{**requests, **more})

    def init_optimizer(self, **more: Any) -> None:
        name, options = self.options
        options = {"learning_rate": 0.1, "rescale_grad": 1 / BATCH, **options}
        with mock.patch.dict(os.environ, {"MXNET_UPDATE_ON_KVSTORE": "0"}):
            self.module.init_optimizer("device", name, options, **more)

    @staticmethod
    def start(seed: int) -> dict[str, mx.nd.NDArray]:
        shapes = {"fc1_weight": (5, 6), "fc1_bias": (5,), "fc2_weight": (3, 5), "fc2_bias": (3,)}
        return {name: array(seed + i, *shape) * 0.3 for i, (name, shape) in enumerate(shapes.items())}

    def batch(self, seed: int) -> mx.io.DataBatch:
        labels = [mx.nd.array((np.arange(BATCH) + seed) % 3)] if self.head == "softmax" else []
        return mx.io.DataBatch([array(seed, BATCH, 6)], labels)

    def weights(self) -> list[np.ndarray]:
        return [array.asnumpy() for _, array in sorted(self.module.get_params()[0].items())]

    def forward(self, seed: int, train: bool = True) -> list[np.ndarray]:
        self.module.forward(self.batch(seed), is_train=train)
        return [out.asnumpy() for out in self.module.get_outputs()]

    def backward(self, seed: int) -> None:
        self.module.backward(None if self.head == "softmax" else [array(seed + 77, BATCH, 3)])

    def counts(self) -> tuple[int, dict]:
        """The update counts, which plain MXNet's states files lack."""
        optimizer = self.module._optimizer
        return optimizer.num_update, copy.deepcopy(optimizer._all_index_update_counts)

    def count_from(self, counts: tuple[int, dict]) -> None:
        if self.policy is None:
            optimizer = self.module._optimizer
            optimizer.num_update, optimizer._all_index_update_counts = copy.deepcopy(counts)
            optimizer._set_current_context(0)

    def zero(self) -> None:
        for grads in self.module._exec_group.grad_arrays:
            for grad in grads:
                if grad is not None:
                    grad[:] = 0


class ModulePair:
    """What a sequence of calls does to a Module of mxmp and to its plain twin."""

    OPS = (
        *("forward", "forward", "backward", "backward", "update", "update", "iteration", "iteration", "iteration"),
        *("zero_grad", "evaluate", "load_states", "set_params", "scale", "rebind", "reshape", "add"),
        *("write", "null", "input_grads", "reinit", "new_optimizer", "discard", "overflow", "overflow"),
    )

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        drawn, policy = self.rng.randrange(2**30), policy_of(self.rng)
        self.low, self.full = ModuleSide(policy, random.Random(drawn)), ModuleSide(None, random.Random(drawn))
        self.sides = self.low, self.full
        # Whether a forward in training has run since the last backward, and a backward since the last update.
        self.number, self.ran, self.due, self.counts = 0, 0, False, Counter()

    run, end = GluonPair.run, GluonPair.end

    def forward(self) -> None:
        same(*(side.forward(self.number) for side in self.sides), "outputs in training")
        self.ran = self.number

    def backward(self) -> None:
        if not self.ran:
            return
        with refusals():
            self.low.backward(self.ran)
        self.full.backward(self.ran)
        self.ran, self.due = 0, True

    def update(self) -> None:
        if not self.due:  # plain MXNet applies old gradients again
            return
        with refusals():
            self.low.module.update()
        self.full.module.update()
        self.due = False
        if self.rng.random() < 0.5:
            self.zero_grad()
        same(self.low.weights(), self.full.weights(), "weights after an update")

    def iteration(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def overflow(self) -> None:
        if self.due or self.low.module.last_step_skipped:
            return
        self.forward()
        self.backward()
        group = self.low.module._exec_group
        grads = {name: each for name, each in zip(group.param_names, group.grad_arrays) if each[0] is not None}
        skipped, name = self.low.module.skipped_steps, self.rng.choice([*grads])
        spoil(self.rng.choice(grads[name]), self.rng)
        with refusals():
            self.low.module.update()
        assert self.low.module.skipped_steps == skipped + 1
        assert {each.partition(" on ")[0] for each in self.low.module.overflow_params} == {name}
        self.due = False
        self.zero_grad()
        same(self.low.weights(), self.full.weights(), "weights after an overflow")

    def zero_grad(self) -> None:
        for side in self.sides:
            side.zero()

    def evaluate(self) -> None:
        self.ran = 0
        same(*(side.forward(999, train=False) for side in self.sides), "outputs")

    def scale(self) -> None:
        scaler = self.low.module.scaled_step.scaler
        if not isinstance(scaler, mxmp.NoLossScaler):
            with refusals():
                scaler.loss_scale = self.rng.choice(SCALES)

    def input_grads(self) -> None:
        if self.low.wants_inputs and self.due and self.low.request == "write":
            same(
                *([grad.asnumpy() for grad in side.module.get_input_grads()] for side in self.sides),
                "gradients of inputs",
            )

    def set_params(self) -> None:
        for side in self.sides:
            side.module.set_params(side.start(self.number), {})

    def reinit(self) -> None:
        for side in self.sides:
            side.module.init_params(arg_params=side.start(self.number), force_init=True)

    def new_optimizer(self) -> None:
        for side in self.sides:
            side.options = "sgd", {"momentum": 0.5}
            side.init_optimizer(force_init=True)

    def discard(self) -> None:
        if not hasattr(self.low.module, "discard"):
            return
        with refusals():
            self.low.module.discard()
        self.due, self.ran = False, 0
        self.zero_grad()

    def _rebind(self, **more: Any) -> None:
        if self.due:
            return
        self.ran = 0
        for side in self.sides:
            side.request = more.get("grad_req", side.request)
            side.bind(force_rebind=True, **more)
            side.init_optimizer() if not side.module.optimizer_initialized else None

    def rebind(self) -> None:
        self._rebind()

    def add(self) -> None:
        self._rebind(grad_req="add")
        self.zero_grad()

    def write(self) -> None:
        self._rebind(grad_req="write")

    def null(self) -> None:
        self.ran = 0
        self._rebind(for_training=False, inputs_need_grad=False)
        if not self.due:
            self.evaluate()
            self._rebind()

    def reshape(self) -> None:
        if self.due:
            return
        self.ran = 0
        for size in (2 * BATCH, BATCH):
            label = [("softmax_label", (size,))] if self.low.head == "softmax" else None
            for side in self.sides:
                side.module.reshape([("data", (size, 6))], label)

    def load_states(self) -> None:
        names = [str(self.folder / f"{side}.states") for side in ("low", "full")]
        with refusals():
            self.low.module.save_optimizer_states(names[0])
        self.full.module.save_optimizer_states(names[1])
        counts = self.full.counts()
        self.iteration()
        with refusals():
            self.low.module.load_optimizer_states(names[0])
        self.full.module.load_optimizer_states(names[1])
        self.full.count_from(counts)


# -- Trainers that share a scaler -------------------------------------------------------------------


class Parts:
    """Two nets in a chain with a trainer each, and what they know of a scaler: plain MXNet's if it is None."""

    def __init__(self, policy: Any, scaler: Any, rng: random.Random) -> None:
        self.nets = [seeded(nn.Dense(4, in_units=6), seed=1), seeded(nn.Dense(2, in_units=4), seed=2)]
        self.scaler, kwargs = scaler, {} if policy is None else {"loss_scale": scaler}
        for net in self.nets:
            net.collect_params().setattr("grad_req", rng.choice(["write", "write", "add"]))
            if policy is not None:
                mxmp.convert(net, policy)
        kind, (name, options) = gluon.Trainer if policy is None else mxmp.Trainer, rng.choice(OPTIMIZERS)
        options = {"learning_rate": 0.1, **options}
        self.trainers = [
            kind(net.collect_params(), name, options, kvstore=None, update_on_kvstore=False, **kwargs)
            for net in self.nets
        ]

    def loss(self, seed: int, nets: slice) -> mx.nd.NDArray:
        with autograd.record():
            x = array(seed, BATCH, 4 if nets.start else 6)
            for net in self.nets[nets]:
                x = net(x)
            return LOSS(x, array(seed + 5000, *x.shape))

    def parameters(self, i: int) -> list[gluon.Parameter]:
        return [*self.nets[i].collect_params().values()]

    def weights(self) -> list[np.ndarray]:
        return [param.data().asnumpy() for i in range(2) for param in self.parameters(i)]


class TrainersPair:
    """What a sequence of calls does to two trainers with one dynamic scaler, and to their plain twins.

    The scale is that of the algorithm, written out here: it stands still until each trainer that a backward has
    reached has stepped, and then falls or counts once.
    """

    OPS = (
        *("round", "round", "round", "overflow", "overflow", "alone", "through", "through", "critic", "step", "step"),
        *("scale", "clip", "unscale", "resume"),
    )

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.drawn, self.policy = self.rng.randrange(2**30), policy_of(self.rng)
        self.interval, self.hysteresis = self.rng.choice([1, 2, 3]), self.rng.choice([1, 1, 2])
        self.low, self.full = self.made(self.policy), self.made(None)
        self.scale_now, self.clean, self.tolerance = 1024.0, 0, self.hysteresis
        # Trainers that have yet to step, those with a bad gradient, and whether the algorithm says what comes.
        self.number, self.due, self.bad, self.is_said, self.counts = 0, set(), set(), True, Counter()
        self.unscaled: set[int] = set()
        self.stepped = False

    def made(self, policy: Any) -> Parts:
        options = {"growth_interval": self.interval, "hysteresis": self.hysteresis}
        return Parts(policy, policy and mxmp.DynamicLossScaler(1024.0, **options), random.Random(self.drawn))

    run = GluonPair.run

    def end(self) -> None:
        for op in ("step", "step", "round"):
            self.run(op)

    def _backward(self, first: int = 0, last: int = 1) -> None:
        nets, by = slice(first, last + 1), self.rng.choice([first, last])
        loss = self.low.loss(self.number, nets)
        with refusals():
            if self.rng.random() < 0.5:
                self.low.trainers[by].backward(loss)
            else:
                with self.low.trainers[by].scale_loss(loss) as scaled:
                    autograd.backward(scaled)
        self.full.loss(self.number, nets).backward()
        self.due |= {*range(first, last + 1)}

    def through(self) -> None:
        """Through both nets, also where the second one, or both, have gradients that are not applied."""
        if not self.bad and not self.unscaled:
            self.is_said &= not self.due
            self._backward()

    def critic(self) -> None:
        """Through the second net alone."""
        if self.due <= {1} and not self.bad and not self.unscaled:
            self._backward(1)

    def _step(self, i: int) -> None:
        """A step, or gradients that are discarded."""
        leaves_out = self.rng.random() < 0.15
        with refusals():
            self.low.trainers[i].discard() if leaves_out else self.low.trainers[i].step(BATCH)
        if not leaves_out:
            self.stepped = True
            assert self.low.trainers[i].last_step_skipped == (i in self.bad)
        if not leaves_out and i not in self.bad:
            self.full.trainers[i].step(BATCH)
        for side in (self.low, self.full):
            for param in side.parameters(i):
                param.data()._fresh_grad = False
                if param.grad_req == "add" or leaves_out or i in self.bad:
                    param.zero_grad()
        self.due -= {i}
        self.unscaled -= {i}
        if not self.due:
            self._adjust()
        if self.is_said:
            assert self.low.scaler.loss_scale == self.scale_now
        if not self.due and not self.is_said:
            state = self.low.scaler.state_dict()
            self.scale_now, self.clean, self.tolerance = state["scale"], state["clean_steps"], state["tolerance"]
            self.is_said = True
        same(self.low.weights(), self.full.weights(), "weights after a step")

    def _adjust(self) -> None:
        self.clean = 0 if self.bad else self.clean + self.stepped
        if self.bad:
            self.tolerance -= 1
            self.scale_now /= 2 if self.tolerance <= 0 else 1
        elif self.clean == self.interval:
            self.scale_now, self.clean, self.tolerance = self.scale_now * 2, 0, self.hysteresis
        self.bad, self.stepped = set(), False

    def step(self) -> None:
        if self.due:
            self._step(self.rng.choice(sorted(self.due)))

    def _finish(self) -> None:
        while self.due:
            self.step()

    def round(self, bad: Sequence[int] = ()) -> None:
        self._finish()
        self._backward()
        for i in bad:
            spoil(self.rng.choice(self.low.parameters(i)).grad(), self.rng)
        self.bad = {*bad}
        if bad and self.rng.random() < 0.3:
            self.scale()
        for i in self.rng.choice([(0, 1), (1, 0)]):
            self._step(i)

    def overflow(self) -> None:
        self.round(self.rng.choice([(0,), (1,), (0, 1)]))

    def alone(self) -> None:
        """A step of one net for a loss of its own, as in a GAN."""
        self._finish()
        i = self.rng.randrange(2)
        self._backward(i, i)
        if self.rng.random() < 0.3:
            spoil(self.low.parameters(i)[0].grad(), self.rng)
            self.bad = {i}
        self._step(i)

    def scale(self) -> None:
        self.low.scaler.loss_scale = self.scale_now = self.rng.choice(SCALES[2:])

    def clip(self) -> None:
        if self.due and not self.bad:
            i = min(self.due)
            with refusals():
                norm = self.low.trainers[i].clip_global_norm(1e30)
                self.low.trainers[i].clip_global_norm(norm / 2)  # by 0.5 exactly
            self.unscaled |= {i}
            for param in self.full.parameters(i):
                param.grad()[:] *= 0.5

    def unscale(self) -> None:
        if self.due:
            i = max(self.due)
            with refusals():
                self.low.trainers[i].unscale()
            self.unscaled |= {i}

    def resume(self) -> None:
        """In new nets, trainers and scalers."""
        self._finish()
        names = [[str(self.folder / f"{side}{i}") for i in range(2)] for side in ("low", "full")]
        for side, files in zip((self.low, self.full), names):
            for net, trainer, file in zip(side.nets, side.trainers, files):
                net.save_parameters(f"{file}.params")
                trainer.save_states(f"{file}.states")
        self.low, self.full = self.made(self.policy), self.made(None)
        for side, files in zip((self.low, self.full), names):
            for net, trainer, file in zip(side.nets, side.trainers, files):
                net.load_parameters(f"{file}.params")
                trainer.load_states(f"{file}.states")
        assert self.low.scaler.loss_scale == self.scale_now


PAIRS = {"gluon": GluonPair, "module": ModulePair, "trainers": TrainersPair}


def run(kind: str, seed: int, folder: Path, ops: Sequence[str] = ()) -> Counter:
    """Make a sequence of calls, drawn or given; return how often each was made, and how many were refused."""
    with mock.patch.dict(os.environ, {"MXNET_SUBGRAPH_BACKEND": "NONE"} if kind == "module" else {}):
        pair = PAIRS[kind](seed, folder)
        ops = ops or [pair.rng.choice(pair.OPS) for _ in range(pair.rng.randint(4, 14))]
        try:
            for op in ops:
                pair.run(op)
            pair.end()
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {' '.join(ops)}") from error
        return pair.counts
