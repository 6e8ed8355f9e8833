"""Drawn sequences of calls, each made on a net of mxmp that computes in FP32, and on plain MXNet's beside it.

Plain MXNet is not hybridized, so it has no graph that could go stale. A call that mxmp refuses in words is made on
neither, and must leave everything as it was: the sequence goes on. The two are compared bit for bit. So
are Modules in ``drawn_modules``, and several trainers in ``drawn_trainers``; in ``drawn_masters`` all is float16.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterator, Sequence
from unittest import mock

import mxnet as mx
import numpy as np
import pytest
from kit.twins import LOSS, array, seeded, sequence, value
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support import optimizers

import mxmp
from mxmp.step.ledger import State

from . import drawn_looks

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
    *(("limited", {}), ("sgd", {"momentum": 0.9, "steps": 2}), ("adam", {"steps": 3})),
]
# Every optimizer of MXNet, and the settings that take another way.
VARIANTS = {
    **{name: (name, options) for name, options in optimizers.OPTIMIZERS.items()},
    **{f"scheduled {name}": (name, {"steps": 2, "wd": 1e-3}) for name in ("sgd", "adam", "adamax")},
    "sgd-clip": ("sgd", {"clip_gradient": 0.01}),
    "adam-clip": ("adam", {"clip_gradient": 0.01}),
    "rmsprop-plain": ("rmsprop", {"centered": False}),
    "lbsgd-lars": ("lbsgd", {"momentum": 0.9, "warmup_strategy": "lars"}),
    "lbsgd-power2": ("lbsgd", {"momentum": 0.9, "warmup_strategy": "power2", "warmup_epochs": 1}),
    "plain": ("plain", {}),
    "limited": ("limited", {}),
}
# Plain MXNet updates these differently on each device.
ON_ONE_DEVICE = ("sgld", "nadam", "lbsgd")


@mx.optimizer.register
class Plain(mx.optimizer.Optimizer):
    """An optimizer of a user's own, which never reads ``rescale_grad``."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight -= 0.01 * grad


@mx.optimizer.register
class Limited(Plain):
    """Limits the norm of each gradient before it multiplies by ``rescale_grad``."""

    def update(self, index, weight, grad, state):
        weight -= 0.1 * min(1.0, 0.1 / max(grad.norm().asscalar(), 1e-9)) * self.rescale_grad * grad


def settings(options: dict) -> dict:
    """With a schedule of its own for each trainer, where ``options`` have ``steps``."""
    options = {"learning_rate": 0.1, **options}
    steps = options.pop("steps", None)
    schedule = mx.lr_scheduler.FactorScheduler(steps, 0.5, base_lr=0.1) if steps else None
    return {**options, "lr_scheduler": schedule} if steps else options


def optimizer(name: str, options: dict) -> tuple:
    """By name and settings, or, of a user's own class, as an object."""
    own = name in ("plain", "limited")
    return (mx.optimizer.create(name, **settings(options)), None) if own else (name, settings(options))


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
    """By which all stays in FP32: nothing may compute in low precision, or nothing that gains by it."""
    return rng.choice([mxmp.Policy("float16", exclude=["*"]), mxmp.Policy("bfloat16", full_ops=["FullyConnected"])])


def same(found: Any, wanted: Any, what: str) -> None:
    assert len(found) == len(wanted), what
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one, other, err_msg=what)


def spoil(gradient: mx.nd.NDArray, rng: random.Random) -> None:
    """Write one element that is not finite."""
    flat = gradient.reshape((-1,))
    flat[rng.randrange(flat.size)] = rng.choice(BAD)


class Headed(gluon.HybridBlock):
    """A net that computes its loss inside, with an operator that writes its own gradient."""

    def __init__(self, head: str, body: gluon.HybridBlock) -> None:
        super().__init__(prefix="headed_")
        self.head, self.body = head, body

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        z = self.body(x)
        if self.head in ("SoftmaxOutput", "SVMOutput"):
            return getattr(F, self.head)(z, y)
        if self.head in ("MakeLoss", "make_loss"):
            return getattr(F, self.head)(F.broadcast_sub(z, F.expand_dims(y, 1)).square().sum(axis=1))
        return getattr(F, self.head)(z, F.broadcast_like(F.expand_dims(y, 1), z))


REGRESSIONS = [f"{kind}RegressionOutput" for kind in ("Linear", "Logistic", "MAE")]
HEADS = ["SoftmaxOutput", "SVMOutput", "MakeLoss", "make_loss", *REGRESSIONS]


class Side:
    """A Gluon net and its trainer: MXNet's own trainer where ``scales`` is False, and plain MXNet without a policy."""

    def __init__(
        self, draw: Callable, policy: Any, scales: bool, devices: list[mx.Context], heads: bool = True
    ) -> None:
        self.scales, self.devices = scales, devices
        name, options = draw("optimizer", *OPTIMIZERS)
        bias = name != "groupadagrad"
        norm = [nn.BatchNorm(in_channels=5, prefix="norm_")] if draw("norm", len(devices) == 1, False) and bias else []
        first = nn.Dense(5, in_units=6, activation="tanh", use_bias=bias, prefix="first_")
        layers = first, *norm, nn.Dense(3, in_units=5, use_bias=bias, prefix="last_")
        self.head = draw("head", None, None, None, *HEADS) if heads else None
        self.body = sequence(*layers, prefix="net_")
        self.net = seeded(Headed(self.head, self.body) if self.head else self.body, devices)
        if policy is not None:
            mxmp.convert(self.net, policy)
        self.params = self.net.collect_params()
        self.trained = [param for param in self.params.values() if param.grad_req != "null"]
        self.trained[0].lr_mult, self.trained[-1].wd_mult = draw("multipliers", (1.0, 1.0), (0.5, 3.0))
        self.two_losses = draw("two losses", True, False, False)
        scales_by = [draw("scaler", 64.0, "dynamic", None, mxmp.AdaptiveLossScaler(1024.0)), 16.0]
        kvstore = draw("kvstore", None, "device", "local")
        common = {"kvstore": kvstore, "update_on_kvstore": False}
        if draw("multi_precision", False, False, True) and policy is not None and policy.params == "float16":
            options = {**options, "multi_precision": True}  # which changes nothing
        # MXNet's own of the same parameters; then the one that trains, and another.
        self.plain = (
            None
            if policy is not None and policy.params == "float16"
            else gluon.Trainer(self.params, "sgd", {"learning_rate": 0.05}, **common)
        )
        self.trainer, self.other = (
            mxmp.Trainer(self.params, *optimizer(name, options), **common, loss_scale=scale)
            if scales
            else gluon.Trainer(self.params, *optimizer(name, options), **common)
            for scale in scales_by
        )
        self.losses: list[list[mx.nd.NDArray]] = []

    def weights(self) -> list[np.ndarray]:
        mx.nd.waitall()  # BatchNorm writes its statistics without telling the engine
        return [value(param, device) for param in self.params.values() for device in range(len(self.devices))]

    def states(self) -> list[np.ndarray]:
        """Of the optimizer."""
        states = [states for updater in self.trainer._updaters for _, states in sorted(updater.states.items())]
        each = [state for some in states for state in (some if isinstance(some, (list, tuple)) else [some])]
        return [state.asnumpy() for state in each if isinstance(state, mx.nd.NDArray)]

    def requested(self) -> list[gluon.Parameter]:
        return [param for param in self.trained if param.grad_req != "null"]

    def pairs(self) -> list[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        """Each weight of each device, with its gradient."""
        return [pair for param in self.requested() for pair in zip(param.list_data(), param.list_grad())]

    def fresh(self) -> list[bool]:
        """Which gradients a backward has written since the last step, where MXNet's own Trainer trains."""
        return [weight._fresh_grad for weight, _ in self.pairs()]

    def gradients(self, scale: float = 1.0) -> list[np.ndarray]:
        grads = [grad for param in self.requested() for grad in param.list_grad()]
        return [grad.asnumpy().astype("float32") / np.float32(scale) for grad in grads]

    def is_finite(self) -> bool:
        return all(np.isfinite(gradient).all() for gradient in self.gradients())

    def norm(self) -> float:
        """Of the summed gradients, which every device has if there is a kvstore."""
        counted = self.devices[:1] if self.trainer._kvstore else self.devices
        found = [grad for weight, grad in self.pairs() if weight._fresh_grad and grad.ctx in counted]
        return float(np.linalg.norm(np.concatenate([np.zeros(1), *(grad.asnumpy().ravel() for grad in found)])))

    def arguments(self, seed: int, ctx: mx.Context | None = None) -> tuple[mx.nd.NDArray, ...]:
        labels = [mx.nd.array((np.arange(BATCH) + seed) % 3, ctx=ctx)] if self.head else []
        return array(seed, BATCH, 6, ctx=ctx), *labels

    def loss(self, out: mx.nd.NDArray, seed: int) -> mx.nd.NDArray:
        return out if self.head else LOSS(out, array(seed + 5000, BATCH, 3, ctx=out.ctx))

    def call(self, seed: int, ctx: mx.Context | None = None, factor: float = 1.0, net: Any = None) -> mx.nd.NDArray:
        x, *labels = self.arguments(seed, ctx)
        return (net or self.net)(x * factor, *labels)

    def outputs(self) -> list[np.ndarray]:
        return [self.call(999, ctx).asnumpy() for ctx in self.devices]

    def forward(self, number: int, factor: float = 1.0) -> None:
        losses = []
        with autograd.record():
            for i, ctx in enumerate(self.devices):
                seed = 10 * number + i
                out = self.call(seed, ctx, factor)
                losses.append(self.loss(out, seed))
                losses += [2 * out.square().sum()] * self.two_losses
        self.losses.append(losses)

    def forward_part(self, number: int, first: bool) -> None:
        """Through one layer alone."""
        layer, width = (self.body[0], 6) if first else (self.body[-1], 5)
        with autograd.record():
            outs = [layer(array(10 * number + i, BATCH, width, ctx=ctx)) for i, ctx in enumerate(self.devices)]
            self.losses.append([out.square() for out in outs])

    # -- what MXNet's own Trainer does for a user who scales nothing --

    def backward(self, losses: list[mx.nd.NDArray], scale: float, **kwargs: Any) -> None:
        """``scale`` is that of the net of mxmp."""
        autograd.backward(losses, **kwargs)

    def autograd_grad(self, losses: list[mx.nd.NDArray], scale: float) -> list[np.ndarray]:
        return [grad.asnumpy() for grad in autograd.grad(losses, [weight for weight, _ in self.pairs()])]

    def reduce(self, scale: float) -> None:
        self.trainer.allreduce_grads()


def drawer(rng: random.Random, forced: dict[str, Any]) -> Callable:
    """Return a function that draws one of some choices, unless its name is among those that are ``forced``."""

    def draw(name: str, *choices: Any) -> Any:
        drawn = rng.choice(choices)
        return forced.get(name, drawn)

    return draw


# What a user may call before a step; float16 gradients are not unscaled.
LOOKS = ("", "allreduce_grads", "clip_global_norm", "unscale", "unscale allreduce_grads", "allreduce_grads unscale")


class GluonPair:
    """What a sequence of calls does to a net of mxmp and to its plain twin."""

    environment: ClassVar[dict[str, str]] = {}
    OPS = (
        *("forward", "forward", "backward", "backward", "step", "step", "iteration", "iteration", "iteration"),
        *("unscale", "clip", "discard", "allreduce", "update", "add", "write", "null", "freeze", "thaw", "zero_grad"),
        *("hybridize", "reset_ctx", "load_states", "scale", "evaluate", "copy", "set_data", "reinit"),
        *("overflow", "overflow", "bad_batch", "part", "part", "stray", "inputs", "switch", "master_weights"),
        *("plain_iteration", "plain_step", "wrong_loss", "grad_alone", "look", "look"),
        *("settings", "settings", "files", "edit_weights", "edit_gradients"),
    )
    LOOKS: ClassVar[dict[str, Callable[[Any], Any]]] = drawn_looks.OF_NETS
    WAYS = ("backward", "backward", "twice", "scaled", "kept", "scaled twice", "sum", "plain")

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.draw = drawer(self.rng, forced)
        self.devices = [mx.cpu(i) for i in range(self.draw("devices", 1, 1, 2))]
        drawn, self.policies = self.rng.randrange(2**30), self.policies_of()
        self.draws_of_a_side = lambda: drawer(random.Random(drawn), forced)
        self.make()
        flags = self.draw("flags", None, *FLAGS)
        if flags is not None:
            self.low.net.hybridize(**flags)
        self.number, self.summed, self.counts, self.watch = 0, False, Counter(), None

    def policies_of(self) -> tuple:
        return policy_of(self.rng), None

    def make(self) -> None:
        self.low, self.full = (
            Side(self.draws_of_a_side(), policy, scales, self.devices)
            for policy, scales in zip(self.policies, (True, False))
        )

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
        found, wanted = self.low.states(), self.full.states()
        same(found, wanted, "states of the optimizer")
        assert [state.dtype for state in found] == [state.dtype for state in wanted]

    @property
    def scale_now(self) -> float:
        """The loss scale in the gradients, or of the next backward."""
        return 1.0 if self.low.trainer.ledger.unscaled else self.low.trainer.loss_scale

    # -- the calls --

    def forward(self) -> None:
        for side in (self.low, self.full):
            # MXNet cannot run backward of two records that share an array without a gradient.
            if any(param.grad_req == "null" for param in side.params.values()):
                side.losses.clear()
            side.forward(self.number)

    def backward(self) -> None:
        """In a way that is drawn: at a scale of 1, or beside true gradients, a plain one is as good."""
        if not self.low.losses or not self.low.requested():
            return
        losses, full = self.low.losses.pop(), self.full.losses.pop()
        way = self.draw("way", *self.WAYS)
        way = "backward" if way == "plain" and not self._takes_plain() else way
        with refusals():
            self._backward(losses, way)
        for _ in range(1 + ("twice" in way)):
            self.full.backward(full, 1.0 if way == "plain" else self.low.trainer.loss_scale, retain_graph=True)
        self.summed = False
        same([loss.asnumpy() for loss in losses], [loss.asnumpy() for loss in full], "losses")
        self._same_gradients("gradients")

    def _backward(self, losses: list[mx.nd.NDArray], way: str) -> None:
        trainer = self.low.trainer
        if way == "plain":
            autograd.backward(losses)
        elif way in ("backward", "twice"):
            if way == "twice":
                trainer.backward(losses, retain_graph=True)
            trainer.backward(losses)
        else:
            with trainer.scale_loss(losses) as scaled:
                assert [each.ctx for each in scaled] == [each.ctx for each in losses]
                if self.rng.random() < 0.3:
                    self.scale()  # which is for the next one
                if way == "sum":
                    with autograd.record():
                        scaled = [each.sum() for each in scaled]
                if way == "scaled twice":
                    autograd.backward(scaled, retain_graph=True)
                autograd.backward(scaled, retain_graph=way == "kept")

    def _takes_plain(self) -> bool:
        ledger = self.low.trainer.ledger
        adds = any(param.grad_req == "add" for param in self.low.trained)
        return ledger.state is State.UNSCALED or (
            self.low.trainer.loss_scale == 1.0 and not ledger.refuses_backward and not (adds and ledger.left != 1.0)
        )

    def _same_gradients(self, what: str) -> None:
        """Of those that a backward has written since the last step: others may have another scale."""
        for is_fresh, found, wanted in zip(
            self.full.fresh(), self.low.gradients(self.scale_now), self.full.gradients()
        ):
            if is_fresh:
                np.testing.assert_array_equal(found, wanted, err_msg=what)

    def iteration(self) -> None:
        self.forward()
        self.backward()
        self.step()

    def part(self) -> None:
        """A backward through one layer alone, so that the gradients of the others are old ones, or added to them."""
        first = self.rng.random() < 0.5
        for side in (self.low, self.full):
            side.losses.clear()
            side.forward_part(self.number, first)
        layer = self.low.body[0 if first else -1]
        if any(param.grad_req == "null" for param in layer.collect_params().values()):
            self.low.losses.clear()
        else:
            self.backward()

    def overflow(self) -> None:
        """A step with one element that is not finite, before or after a look at it, which plain MXNet leaves out."""
        trainer, trained = self.low.trainer, self.low.requested()
        if not trained or trainer.scaled_step.skips_at_floor > 1:
            return
        self.forward()
        self.backward()
        param, looks, late = (
            self.rng.choice(trained),
            self.draw("looks", *self._looks()),
            self.draw("late", True, False),
        )
        self.full.reduce(self.scale_now)  # float16 sums may overflow by themselves
        gradient, finite = self.rng.choice(param.list_grad()), self.full.is_finite()
        if not late:
            spoil(gradient, self.rng)
            if all(param.grad_req == "add" for param in trained):
                self._add_to_an_overflow()
        self._look(looks, is_finite=late and finite)
        if late:
            spoil(gradient, self.rng)
        ends = "update" if "allreduce_grads" in looks else "step"
        zeroed = ["zero_grad"] * (trainer.ledger.refuses_backward and not late)
        names = self._leave_out(self.draw("ends", ends, ends, "discard", *zeroed))
        assert names in ({param.name}, set()) or not finite

    def _add_to_an_overflow(self) -> None:
        self.forward()
        with refusals():
            self.low.trainer.backward(self.low.losses.pop())
        self.full.backward(self.full.losses.pop(), 1.0)  # which writes the running statistics

    def _look(self, looks: str, is_finite: bool) -> None:
        """Call what ``looks`` names, and hide after ``unscale`` what is not finite, which a user's clipping may do."""
        trainer = self.low.trainer
        for look in looks.split():
            if look == "clip_global_norm":
                assert np.isfinite(trainer.clip_global_norm(1e9)) == is_finite
            else:
                getattr(trainer, look)()
            if look == "unscale" and self.draw("hides", True, False):
                for grad in (grad for param in self.low.requested() for grad in param.list_grad()):
                    grad[:] = mx.nd.where(grad == grad, grad, mx.nd.zeros_like(grad)).clip(-1, 1)

    def _looks(self) -> list[str]:
        """What may be called before a step, if nothing was."""
        kinds = {grad.dtype for param in self.low.requested() for grad in param.list_grad()}
        unscales = np.float16 not in kinds and not self.low.trainer.ledger.unscaled
        return [*LOOKS[:3], *LOOKS[3:] * unscales]

    def bad_batch(self) -> None:
        """Infinite inputs, which plain MXNet does not get: running statistics are those of the step before."""
        self.iteration()
        for side in (self.low, self.full):
            side.losses.clear()
        if not self.low.requested() or self.low.trainer.last_step_skipped:
            return
        self.low.forward(self.number, factor=float("inf"))
        with refusals():
            self.low.trainer.backward(self.low.losses.pop())
        self._leave_out(self.draw("ends", "step", "discard"))

    def _leave_out(self, how: str) -> set[str]:
        """End a step with an overflow; return the names of the parameters that a step finds at fault."""
        trainer, scaler = self.low.trainer, self.low.trainer.scaler
        skipped, before = trainer.skipped_steps, scaler.loss_scale
        is_step, overflows = how in ("step", "update"), 1
        with refusals():
            if how == "zero_grad":  # the next backward takes it for a discard
                self.zero_grad()
                self.forward()
                self.full.backward(self.full.losses.pop(), 1.0)
                trainer.backward(self.low.losses.pop())
                overflows += not self.low.is_finite()  # of float16, by itself
            getattr(trainer, how)(BATCH, ignore_stale_grad=True) if is_step else trainer.discard()
        assert trainer.skipped_steps == skipped + is_step
        if type(scaler) is mxmp.DynamicLossScaler:
            assert scaler.loss_scale == max(before / 2**overflows, scaler.min_scale)
        left = [grad for is_due, grad in zip(self.full.fresh(), self.low.gradients()) if is_due]
        assert is_step or not any(grad.any() for grad in left)
        self._forget(zeros=self.rng.random() < 0.5)
        same(self.low.weights(), self.full.weights(), "weights after an overflow")
        return set() if not is_step else {name.partition(" on ")[0] for name in trainer.overflow_params}

    def _forget(self, zeros: bool = True) -> None:
        """No later step applies these gradients; with ``zeros``, or where a backward would add to them, none stays."""
        self.summed = False
        for side in (self.low, self.full):
            for param in side.requested():
                if zeros or param.grad_req == "add":
                    param.zero_grad()
        for weight, _ in self.full.pairs():
            weight._fresh_grad = False
        self.low.trainer.discard()

    def step(self, method: str = "step") -> None:
        size = self.draw("size", 1, 3, 7, 12, 96, 100)
        size, trainer = self.rng.choice([int, np.int64, np.float32])(size), self.low.trainer
        scale, skipped = self.scale_now, trainer.skipped_steps
        mx.random.seed(self.number)  # for the noise of SGLD
        with refusals(), suppress(FloatingPointError):
            getattr(trainer, method)(size, ignore_stale_grad=True)
        if method == "step" and not self.summed:  # MXNet's own would sum anew
            self.full.reduce(scale)
        if trainer.skipped_steps > skipped:
            assert not self.full.is_finite()
            self._forget()
        else:
            mx.random.seed(self.number)
            self.full.trainer.update(size, ignore_stale_grad=True)
        self.summed = False
        same(self.low.weights(), self.full.weights(), "weights after a step")

    def update(self) -> None:
        self.step("update")

    def unscale(self) -> None:
        with refusals():
            self.low.trainer.unscale()
        if not self.summed:
            self._same_gradients("true gradients")

    def clip(self) -> None:
        trainer, scale = self.low.trainer, self.scale_now
        with refusals():
            norm = trainer.clip_global_norm(self.rng.choice([1e30, np.float64(1e30)]))
        if not self.summed:
            self.full.reduce(scale)
        self.summed = True
        if np.isfinite(norm) and norm > 0:
            assert norm == pytest.approx(self.full.norm(), rel=1e-5)
            with refusals():
                trainer.clip_global_norm(norm / 2)  # by 0.5 exactly
            for _, grad in self.full.pairs():
                grad *= 0.5

    def discard(self) -> None:
        with refusals():
            self.low.trainer.discard()
        self._forget()

    def allreduce(self) -> None:
        if self.summed:
            return
        scale = self.scale_now
        with refusals():
            self.low.trainer.allreduce_grads()
        self.full.reduce(scale)
        self.summed = True

    def _plain_backward(self) -> None:
        self.forward()
        for side in (self.low, self.full):
            losses = side.losses.pop()
            if side.requested():
                autograd.backward(losses)

    def stray(self) -> None:
        """A plain backward whose gradients are set to zero before a step."""
        self._plain_backward()
        self.zero_grad()

    def inputs(self) -> None:
        """Gradients of an input, which are none of a weight."""
        found = []
        for side in (self.low, self.full):
            side.losses.clear()
            x = array(self.number, BATCH, 6, ctx=self.devices[0])
            x.attach_grad()
            with autograd.record():
                out = side.body(x)
            found.append(autograd.grad(out, [x])[0].asnumpy())
            with autograd.record():
                twice = x * 2
            twice.backward()
        np.testing.assert_array_equal(*found, err_msg="gradients of an input")

    def grad_alone(self) -> None:
        """``autograd.grad`` of the scaled loss, which writes no gradient of a weight."""
        if not self.low.requested() or not self.low.is_finite():  # or it would discard those of an overflow
            return
        self.forward()
        with refusals(), self.low.trainer.scale_loss(self.low.losses.pop()) as scaled:
            found = autograd.grad(scaled, [weight for weight, _ in self.low.pairs()])
        scale, wanted = self.scale_now, self.full.autograd_grad(self.full.losses.pop(), self.scale_now)
        same([grad.asnumpy().astype("float32") / np.float32(scale) for grad in found], wanted, "autograd.grad")

    def wrong_loss(self) -> None:
        """A backward of what is not scaled, within ``scale_loss``: it is refused, and what it wrote is dropped."""
        if self.low.trainer.loss_scale == 1.0 or self.low.trainer.ledger.pending or not self.low.requested():
            return
        self.forward()
        losses = self.low.losses.pop()
        with pytest.raises(RuntimeError, match=r"scaled\.backward"), self.low.trainer.scale_loss(losses):
            autograd.backward(losses)
        self.full.backward(self.full.losses.pop(), 1.0)
        self._forget()

    def switch(self) -> None:
        """To another trainer of the same parameters, which has a loss scale of its own."""
        if not self.low.trainer.ledger.pending:
            self._forget()
            for side in (self.low, self.full):
                side.trainer, side.other = side.other, side.trainer

    def plain_iteration(self) -> None:
        """By MXNet's own Trainer of the same parameters."""
        if self.low.plain is None or self.low.trainer.ledger.pending:
            return
        self._forget()
        self._plain_backward()
        for side in (self.low, self.full):
            if side.requested():
                side.plain.step(BATCH, ignore_stale_grad=True)
        self._forget()
        same(self.low.weights(), self.full.weights(), "weights after a plain step")

    def plain_step(self) -> None:
        """MXNet's own Trainer applies what ``unscale`` has left."""
        if self.low.plain is None or self.summed:
            return
        self.forward()
        self.backward()
        self.unscale()
        if self.full.is_finite():
            for side in (self.low, self.full):
                side.plain.step(BATCH, ignore_stale_grad=True)
        self._forget()
        same(self.low.weights(), self.full.weights(), "weights after a plain step")

    def master_weights(self) -> None:
        """Read, averaged and set in FP32."""
        found = [mxmp.master_weights(side.net) for side in (self.low, self.full)]
        same(*([value.asnumpy() for value in each.values()] for each in found), "master weights")
        for side, weights in zip((self.low, self.full), found):
            trained = {name: value * 0.999 for name, value in weights.items() if "running" not in name}
            mxmp.set_master_weights(side.net, trained)

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

    def settings(self) -> None:
        """One of the optimizer's numbers changes, or one of a parameter's."""
        name = self.draw("setting", "wd", "momentum", "clip_gradient", "beta1", "epsilon", "lr", "lr_mult", "wd_mult")
        for side in (self.low, self.full):
            optimizer = side.trainer._optimizer
            if name.endswith("_mult"):
                setattr(side.trained[-1], name, 0.25)
            elif name == "lr":
                if optimizer.lr_scheduler is None:
                    side.trainer.set_learning_rate(0.05)
            elif getattr(optimizer, name, None):  # from 0 momentum on there would be no state
                setattr(optimizer, name, 0.125 if name == "momentum" else getattr(optimizer, name) / 4)

    def files(self) -> None:
        """Parameters are saved, and loaded after an iteration."""
        names = [str(self.folder / f"{side}.params") for side in ("low", "full")]
        for side, name in zip((self.low, self.full), names):
            side.net.save_parameters(name)
        self.iteration()
        for side, name in zip((self.low, self.full), names):
            side.net.load_parameters(name, ctx=self.devices)
        self.summed = False

    def edit_weights(self) -> None:
        for side in (self.low, self.full):
            for weight in side.trained[0].list_data():
                weight *= 0.5

    def edit_gradients(self) -> None:
        """By a factor, in place, of all or of one."""
        edited = self.draw("edited", 1, None)
        for side in (self.low, self.full):
            for _, grad in side.pairs()[:edited]:
                grad *= 0.5

    def look(self) -> None:
        """One that changes nothing."""
        with refusals():
            self.LOOKS[self.draw("look", *self.LOOKS)](self)

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
        self._forget()

    def scale(self) -> None:
        scaler = self.low.trainer.scaler
        if not isinstance(scaler, mxmp.NoLossScaler):
            with refusals():
                scaler.loss_scale = self.draw("scale", *SCALES)

    def evaluate(self) -> None:
        same(self.low.outputs(), self.full.outputs(), "outputs")

    def copy(self) -> None:
        """MXNet's own copies have all arrays on one device, and fail where a trainer has a kvstore."""
        if not self.full.trainer._kvstore:
            copies = [side.call(999, net=copy.deepcopy(side.net)) for side in (self.low, self.full)]
            same(*([out.asnumpy()] for out in copies), "outputs of a copy")


def run(kind: Any, seed: int, folder: Path, ops: Sequence[str] = (), **forced: Any) -> Counter:
    """Make a sequence of calls, drawn or given, on a pair of a kind; ``forced`` are choices that are not drawn.
    Return how often each call was made, and how many were refused."""
    with mock.patch.dict(os.environ, kind.environment):
        pair = kind(seed, folder, forced)
        ops = ops or [pair.rng.choice(pair.OPS) for _ in range(pair.rng.randint(4, 14))]
        try:
            for op in ops:
                pair.run(op)
            pair.end()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed}: {' '.join(ops)}") from error
        return pair.counts
