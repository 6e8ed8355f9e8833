"""Drawn sequences of calls on two trainers that share a scaler, or have one each, and on plain MXNet's beside them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Sequence

import mxnet as mx
import numpy as np
import pytest
from kit.twins import LOSS, array, seeded
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .drawn_sequences import (
    BATCH,
    OPTIMIZERS,
    SCALES,
    GluonPair,
    RefusedError,
    drawer,
    policy_of,
    refusals,
    same,
    settings,
    spoil,
)


class Parts:
    """Two nets in a chain with a trainer each, or of ``owned`` nets, and what they know of a scaler: plain MXNet's if
    it is None."""

    def __init__(self, policy: Any, scaler: Any, rng: random.Random, owned: Sequence[tuple] = ((0,), (1,))) -> None:
        self.nets = [seeded(nn.Dense(4, in_units=6), seed=1), seeded(nn.Dense(2, in_units=4), seed=2)]
        self.scaler, scalers = scaler, scaler if isinstance(scaler, list) else [scaler] * len(owned)
        for net in self.nets:
            request = "write" if isinstance(scaler, list) else rng.choice(["write", "write", "add"])
            net.collect_params().setattr("grad_req", request)
            if policy is not None:
                mxmp.convert(net, policy)
        kind, (name, options) = gluon.Trainer if policy is None else mxmp.Trainer, rng.choice(OPTIMIZERS)
        parameters = [[param for i in each for param in self.parameters(i)] for each in owned]
        self.trainers = [
            kind(params, name, settings(options), None, update_on_kvstore=False, **kwargs)
            for params, kwargs in zip(parameters, [{"loss_scale": each} if policy else {} for each in scalers])
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

    environment: ClassVar[dict[str, str]] = {}
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
        self.low.scaler.loss_scale = self.scale_now = self.draw("scale", *SCALES[2:])

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


class OverlappingPair:
    """What a sequence of calls does to three trainers with one scaler, one of both nets and one of each: a gradient is
    applied once, by the first of them that steps."""

    environment: ClassVar[dict[str, str]] = {}
    OPS = ("backward", "backward", "step", "step", "step", "overflow", "scale")
    OWNED = ((0, 1), (1,), (0,))

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        self.rng, self.draw = random.Random(seed), drawer(random.Random(seed), forced)
        drawn, policy = self.rng.randrange(2**30), policy_of(self.rng)
        scaler = mxmp.DynamicLossScaler(64.0, growth_interval=2)
        self.low = Parts(policy, scaler, random.Random(drawn), self.OWNED)
        self.full = Parts(None, None, random.Random(drawn), self.OWNED)
        # The nets whose gradients are not applied, and those that have an overflow.
        self.number, self.due, self.bad, self.counts = 0, set(), set(), Counter()

    run = GluonPair.run

    def end(self) -> None:
        for op in ("step", "backward", "step", "step", "step"):
            self.run(op)

    def backward(self) -> None:
        nets = self.draw("nets", (0, 1), (1,), (0,))
        by = self.rng.choice([i for i, owned in enumerate(self.OWNED) if {*owned} & {*nets}])
        reached = slice(nets[0], nets[-1] + 1)
        self.low.trainers[by].backward(self.low.loss(self.number, reached))
        self.full.loss(self.number, reached).backward()
        self.due |= {*nets}
        self.bad -= {net for net in nets if self.low.parameters(net)[0].grad_req == "write"}

    def overflow(self) -> None:
        self.backward()
        net = max(self.due)
        spoil(self.rng.choice(self.low.parameters(net)).grad(), self.rng)
        self.bad.add(net)
        self.step()

    def step(self) -> None:
        i, leaves_out = self.draw("stepping", 0, 1, 2), self.rng.random() < 0.15
        its = {*self.OWNED[i]} & self.due
        if leaves_out:
            self.low.trainers[i].discard()
        else:
            self.low.trainers[i].step(BATCH, ignore_stale_grad=True)
            assert not its or self.low.trainers[i].last_step_skipped == bool(its & self.bad)
        if not leaves_out and not its & self.bad:
            self.full.trainers[i].step(BATCH, ignore_stale_grad=True)
        for side in (self.low, self.full):
            for param in [param for net in its for param in side.parameters(net)]:
                param.data()._fresh_grad = False
                if param.grad_req == "add" or leaves_out:
                    param.zero_grad()
        self.due -= its
        self.bad -= its
        if not self.due:
            assert {trainer.loss_scale for trainer in self.low.trainers} == {self.low.scaler.loss_scale}
        same(self.low.weights(), self.full.weights(), "weights after a step")

    def scale(self) -> None:
        if not self.due:
            self.low.scaler.loss_scale = self.draw("scale", *SCALES[2:])


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
