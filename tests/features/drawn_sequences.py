"""Drawn sequences of calls, each made on a net or Module of mxmp that computes in FP32, and on plain MXNet's beside it.

Plain MXNet is not hybridized, so it has no graph that could go stale. A call that mxmp refuses in words is made on
neither, and must leave everything as it was: the sequence goes on. The two are compared bit for bit. In
``drawn_masters`` both compute in float16.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence
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
            mxmp.Trainer(self.params, name, settings(options), **common, loss_scale=scale)
            if scales
            else gluon.Trainer(self.params, name, settings(options), **common)
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

    def call(self, seed: int, ctx: mx.Context | None = None, factor: float = 1.0, net: Any = None) -> mx.nd.NDArray:
        labels = [mx.nd.array((np.arange(BATCH) + seed) % 3, ctx=ctx)] if self.head else []
        return (net or self.net)(array(seed, BATCH, 6, ctx=ctx) * factor, *labels)

    def outputs(self) -> list[np.ndarray]:
        return [self.call(999, ctx).asnumpy() for ctx in self.devices]

    def forward(self, number: int, factor: float = 1.0) -> None:
        losses = []
        with autograd.record():
            for i, ctx in enumerate(self.devices):
                seed = 10 * number + i
                out = self.call(seed, ctx, factor)
                losses.append(out if self.head else LOSS(out, array(seed + 5000, BATCH, 3, ctx=ctx)))
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

    OPS = (
        *("forward", "forward", "backward", "backward", "step", "step", "iteration", "iteration", "iteration"),
        *("unscale", "clip", "discard", "allreduce", "update", "add", "write", "null", "freeze", "thaw", "zero_grad"),
        *("hybridize", "reset_ctx", "load_states", "scale", "evaluate", "copy", "set_data", "reinit"),
        *("overflow", "overflow", "bad_batch", "part", "part", "stray", "inputs", "switch", "master_weights"),
        *("plain_iteration", "plain_step", "wrong_loss", "grad_alone"),
    )
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
        self.number, self.summed, self.counts = 0, False, Counter()

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
            if all(param.grad_req == "add" for param in trained):  # to which another backward adds
                self.forward()
                with refusals():
                    trainer.backward(self.low.losses.pop())
                self.full.backward(self.full.losses.pop(), 1.0)  # which writes the running statistics
        for look in looks.split():
            if look == "clip_global_norm":
                assert np.isfinite(trainer.clip_global_norm(1e9)) == (late and finite)
            else:
                getattr(trainer, look)()
            if look == "unscale" and self.draw("hides", True, False):  # which a user's clipping may do
                for grad in (grad for param in trained for grad in param.list_grad()):
                    grad[:] = mx.nd.where(grad == grad, grad, mx.nd.zeros_like(grad)).clip(-1, 1)
        if late:
            spoil(gradient, self.rng)
        ends = "update" if "allreduce_grads" in looks else "step"
        zeroed = ["zero_grad"] * (trainer.ledger.refuses_backward and not late)
        names = self._leave_out(self.draw("ends", ends, ends, "discard", *zeroed))
        assert names in ({param.name}, set()) or not finite

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

    def stray(self) -> None:
        """A plain backward whose gradients are set to zero before a step."""
        self.forward()
        for side in (self.low, self.full):
            losses = side.losses.pop()
            if side.requested():
                autograd.backward(losses)
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
        if not self.low.requested():
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
        self.forward()
        for side in (self.low, self.full):
            losses = side.losses.pop()
            if side.requested():
                autograd.backward(losses)
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


# -- Modules ----------------------------------------------------------------------------------------


def symbol(head: str) -> mx.sym.Symbol:
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x, name="tanh"), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), name="softmax") if head == "softmax" else x


OF_MODULES = [
    *(("sgd", {"momentum": 0.9}), ("sgd", {}), ("adam", {}), ("nag", {"momentum": 0.9}), ("rmsprop", {}), ("lamb", {})),
    *(("ftml", {}), ("adagrad", {})),
]


class ModuleSide:
    """A Module with an optimizer: plain MXNet's if ``policy`` is None."""

    def __init__(self, draw: Callable, policy: Any, scales: bool = True) -> None:
        self.policy, self.head = policy, draw("head", "softmax", "plain")
        self.request = draw("request", "write", "write", "add")
        self.devices = [mx.cpu(i) for i in range(draw("devices", 1, 1, 2))]
        self.wants_inputs = draw("wants inputs", True, False, False)
        self.options = draw("optimizer", *OF_MODULES)
        # Not the weight alone: MXNet's FullyConnected on a CPU then leaves the gradient of the bias as it is.
        fixed = draw("fixed", ["fc1_weight", "fc1_bias"], None, None, None)
        scale = draw("scaler", 64.0, "dynamic", None, 1024.0) if scales else draw("scaler", None)
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

    def backward(self, seed: int, scale: float = 1.0) -> None:
        """``scale`` is that of the other side, for a twin that is scaled by hand."""
        self.module.backward(None if self.head == "softmax" else [array(seed + 77, BATCH, 3)])

    def reduce(self, scale: float) -> None:
        """Sum over devices what ``update`` would sum otherwise than the other side."""

    def input_grads(self) -> list[np.ndarray]:
        return [grad.asnumpy() for grad in self.module.get_input_grads()]

    def gradients(self) -> dict[str, list[mx.nd.NDArray]]:
        group = self.module._exec_group
        return {name: grads for name, grads in zip(group.param_names, group.grad_arrays) if grads[0] is not None}

    def is_finite(self) -> bool:
        return all(np.isfinite(grad.asnumpy()).all() for grads in self.gradients().values() for grad in grads)

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
        for grads in self.gradients().values():
            for grad in grads:
                grad[:] = 0


class ModulePair:
    """What a sequence of calls does to a Module of mxmp and to its plain twin."""

    OPS = (
        *("forward", "forward", "backward", "backward", "update", "update", "iteration", "iteration", "iteration"),
        *("zero_grad", "evaluate", "load_states", "set_params", "scale", "rebind", "reshape", "add"),
        *("write", "null", "input_grads", "reinit", "new_optimizer", "discard", "overflow", "overflow"),
    )

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        self.rng, self.folder = random.Random(seed), folder
        drawn, self.draw = self.rng.randrange(2**30), drawer(self.rng, forced)
        self.sides = self.low, self.full = self.made(lambda: drawer(random.Random(drawn), forced))
        # Whether a forward in training has run since the last backward, and a backward since the last update.
        self.number, self.ran, self.due, self.counts = 0, 0, False, Counter()

    run = GluonPair.run

    def made(self, draws: Callable) -> tuple[ModuleSide, ModuleSide]:
        return ModuleSide(draws(), policy_of(self.rng)), ModuleSide(draws(), None)

    def end(self) -> None:
        for op in ("iteration", "evaluate"):
            self.run(op)
        same(self.low.weights(), self.full.weights(), "weights")

    def forward(self) -> None:
        same(*(side.forward(self.number) for side in self.sides), "outputs in training")
        self.ran = self.number

    def backward(self) -> None:
        if not self.ran:
            return
        with refusals():
            self.low.backward(self.ran)
        self.full.backward(self.ran, self.low.module.loss_scale)
        self.ran, self.due = 0, True

    def update(self) -> None:
        if not self.due:  # plain MXNet applies old gradients again
            return
        module, scale, skipped = self.low.module, self.low.module.loss_scale, self.low.module.skipped_steps
        with refusals(), suppress(FloatingPointError):
            module.update()
        self.full.reduce(scale)
        if module.skipped_steps > skipped:
            assert not self.full.is_finite()
        else:
            self.full.module.update()
        self.due = False
        if module.skipped_steps > skipped or self.rng.random() < 0.5:
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
        grads, finite = self.low.gradients(), self.full.is_finite()
        skipped, name = self.low.module.skipped_steps, self.rng.choice([*grads])
        spoil(self.rng.choice(grads[name]), self.rng)
        with refusals():
            self.low.module.update()
        assert self.low.module.skipped_steps == skipped + 1
        assert {each.partition(" on ")[0] for each in self.low.module.overflow_params} == {name} or not finite
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
                scaler.loss_scale = self.draw("scale", *SCALES)

    def input_grads(self) -> None:
        if self.low.wants_inputs and self.due and self.low.request == "write":
            same(self.low.input_grads(), self.full.input_grads(), "gradients of inputs")

    def set_params(self) -> None:
        missing = self.draw("allow_missing", True, False)
        for side in self.sides:
            side.module.set_params(side.start(self.number), {}, allow_missing=missing)

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
        self.full.module.get_params()  # or plain MXNet binds the values from before ``set_params``
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
        self.scaler, scalers = scaler, scaler if isinstance(scaler, list) else [scaler] * 2
        for net in self.nets:
            request = "write" if isinstance(scaler, list) else rng.choice(["write", "write", "add"])
            net.collect_params().setattr("grad_req", request)
            if policy is not None:
                mxmp.convert(net, policy)
        kind, (name, options) = gluon.Trainer if policy is None else mxmp.Trainer, rng.choice(OPTIMIZERS)
        self.trainers = [
            kind(net.collect_params(), name, settings(options), None, update_on_kvstore=False, **kwargs)
            for net, kwargs in zip(self.nets, [{"loss_scale": each} if policy else {} for each in scalers])
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

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        self.rng, self.folder, self.draw = random.Random(seed), folder, drawer(random.Random(seed), forced)
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
        how = self.draw("how", "backward", "scale_loss", "by each")
        with refusals():
            if how == "scale_loss":
                with self.low.trainers[by].scale_loss(loss) as scaled:
                    autograd.backward(scaled)
            else:
                for trainer in self.low.trainers[first : last + 1] if how == "by each" else [self.low.trainers[by]]:
                    trainer.backward(loss, retain_graph=True)
        full = self.full.loss(self.number, nets)
        for _ in range(last + 1 - first if how == "by each" else 1):
            full.backward(retain_graph=True)
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


class OwnScalersPair(TrainersPair):
    """What a sequence of calls does to two trainers with a scaler each: as to plain ones, or it is refused."""

    OPS = ("both", "both", "critic", "alone", "step", "step", "step", "nested", "scale")
    NESTED = ("of the scaled loss", "of the loss", "around backward", "in itself", "backward of the scaled")

    def made(self, policy: Any) -> Parts:
        return Parts(policy, [mxmp.StaticLossScaler(64.0), mxmp.DynamicLossScaler(4096.0)], random.Random(self.drawn))

    def end(self) -> None:
        for op in ("step", "step", "both", "step", "alone", "step", "critic", "step", "step"):
            self.run(op)

    def _backward(self, first: int = 0, last: int = 1) -> None:
        """By one trainer, which is the one that then may step."""
        by = self.rng.choice([first, last])
        loss = self.low.loss(self.number, slice(first, last + 1))
        with refusals():
            self.low.trainers[by].backward(loss)
        self.full.loss(self.number, slice(first, last + 1)).backward()

    def both(self) -> None:
        self._backward()

    def critic(self) -> None:
        self._backward(1)

    def alone(self) -> None:
        self._backward(0, 0)

    def step(self) -> None:
        i = self.rng.randrange(2)
        with refusals():
            self.low.trainers[i].step(BATCH)
        self.full.trainers[i].step(BATCH)
        same(self.low.weights(), self.full.weights(), "weights after a step")

    def scale(self) -> None:
        self.low.trainers[self.rng.randrange(2)].scaler.loss_scale = self.rng.choice(SCALES[2:])

    def nested(self) -> None:
        """One scaled backward in the ``with`` block of another."""
        how, loss = self.draw("nested", *self.NESTED), self.low.loss(self.number, slice(2))
        with pytest.raises(RefusedError, match="scale"), refusals():
            self._nest(how, loss)
        for trainer in self.low.trainers:
            trainer.discard()
        for param in (*self.full.parameters(0), *self.full.parameters(1)):
            param.data()._fresh_grad = False

    def _nest(self, how: str, loss: mx.nd.NDArray) -> None:
        outer, inner = self.low.trainers[:1] * 2 if how == "in itself" else self.low.trainers
        with outer.scale_loss(loss) as once:
            if "backward" in how:
                inner.backward(once if "scaled" in how else loss)
            else:
                with inner.scale_loss(loss if how == "of the loss" else once) as twice:
                    autograd.backward(twice)


PAIRS = {"gluon": GluonPair, "module": ModulePair, "trainers": TrainersPair, "scalers": OwnScalersPair}


def run(kind: Any, seed: int, folder: Path, ops: Sequence[str] = (), **forced: Any) -> Counter:
    """Make a sequence of calls, drawn or given, on a pair of a kind; ``forced`` are choices that are not drawn.
    Return how often each call was made, and how many were refused."""
    with mock.patch.dict(os.environ, {"MXNET_SUBGRAPH_BACKEND": "NONE"} if kind is ModulePair else {}):
        pair = kind(seed, folder, forced)
        ops = ops or [pair.rng.choice(pair.OPS) for _ in range(pair.rng.randint(4, 14))]
        try:
            for op in ops:
                pair.run(op)
            pair.end()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed}: {' '.join(ops)}") from error
        return pair.counts
