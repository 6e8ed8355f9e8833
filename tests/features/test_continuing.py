"""A training that goes on from its files is the one that was not interrupted, to the bit; all else about it is drawn.

MXMP_DRAWN=100 tries as many of each kind; ``-k "adam and module and 17"`` repeats one.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from kit.pictures import tree
from kit.resuming import OWN_OPTIMIZERS
from kit.twins import LOSS, MASTERS, value
from mxnet import autograd
from mxnet.gluon import nn
from support.optimizers import OPTIMIZERS, schedule

import mxmp

ROWS, WIDTH, LONGEST, EPOCH = 8, 3, 3, 7
FULL = {"float32": None, "float16": mxmp.Policy("float16", params="float32"), "bfloat16": "bfloat16"}
PRECISIONS = {**FULL, "masters": MASTERS}
SAME = {"float16", "masters"}  # to the bit
# Parameters that a user has stored in float16, and whether the optimizer keeps their FP32 values.
OWN = {"own": False, "own, multi_precision": True}
MORE = {
    "lbsgd, 3 batches": ("lbsgd", {**OPTIMIZERS["lbsgd"], "batch_scale": 3}),
    "adam, in float16": ("adam", {"learning_rate": 0.01, "epsilon": 0.01}),
    **OWN_OPTIMIZERS,
}
# The first run's, and what another one has before it reads a file.
SCALERS = {
    "dynamic": (lambda: mxmp.DynamicLossScaler(2.0**8, growth_interval=2, hysteresis=2), mxmp.DynamicLossScaler),
    "eager": (lambda: mxmp.DynamicLossScaler(2.0**4, growth_interval=1, max_scale=64.0), mxmp.DynamicLossScaler),
    "adaptive": (lambda: mxmp.AdaptiveLossScaler(4.0, growth_interval=4, measure_interval=3), mxmp.AdaptiveLossScaler),
    "static": (lambda: mxmp.StaticLossScaler(64.0), lambda: mxmp.StaticLossScaler(2.0)),
    "none": (mxmp.NoLossScaler, mxmp.NoLossScaler),
}
STEPS = {
    "clean": lambda run: run.train(),
    "skipped": lambda run: run.train(np.inf),
    "twice": lambda run: (run.backward(), run.train()),
    "discarded": lambda run: (run.backward(), run.driver.discard()),
    "scaled": lambda run: (run.train(), run.set_scale()),
    "partial": lambda run: run.train(left_out=1),
    "fitted": lambda run: run.fit(),
}


class Run:
    """A training as drawn; the first one has the seed 0. ``driver`` is its Trainer or Module."""

    def __init__(self, drawn: SimpleNamespace, seed: int) -> None:
        self.drawn, self.seed, self.number = drawn, seed, 0
        self.contexts = [mx.cpu(i) for i in drawn.devices]
        inputs, self.net = WIDTH if drawn.has_shapes else 0, nn.HybridSequential(prefix="")
        if drawn.norm:
            self.net.add(nn.BatchNorm(in_channels=inputs, prefix="norm_"), nn.Dropout(0.2))
        like = {"in_units": inputs, "use_bias": False, "activation": "tanh"}
        self.net.add(*(nn.Dense(WIDTH, prefix=f"dense{number}_", **like) for number in drawn.numbers))
        self.frozen = [self.net[-1].weight.name] if drawn.frozen else []
        reseed(seed)
        self.make()

    def optimizing(self) -> tuple[str, dict[str, Any]]:
        name, options = MORE.get(self.drawn.optimizer) or (self.drawn.optimizer, OPTIMIZERS[self.drawn.optimizer])
        more = {"lr_scheduler": schedule(name)} if self.drawn.scheduled else {}
        return name, {**options, **more, "multi_precision": OWN.get(self.drawn.precision, False)}

    def scaler(self) -> Any:
        return SCALERS[self.drawn.scaler][self.seed]()

    def set_scale(self) -> None:
        if self.drawn.scaler != "none":
            self.driver.scaled_step.scaler.loss_scale = 32.0

    def do(self, step: str, number: int) -> None:
        self.number = number
        if not self.drawn.goes_on_drawing:
            reseed(number)
        with suppress(FloatingPointError):  # of the third skipped step at a scale that cannot fall
            STEPS[step](self)
        self.clear()

    def draw(self, *shape: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
        return np.random.normal(0, random.uniform(1, 2), shape) * factor, np.random.normal(0, 1, (ROWS, WIDTH))

    def picture(self) -> dict[str, Any]:
        """What no interruption may change, in the order of the layers."""
        mx.nd.waitall()  # BatchNorm writes its statistics without telling the engine
        weights, updaters, order = self.parts()
        assert all(np.isfinite(each).all() for each in weights)
        counts = updaters[0].optimizer._all_index_update_counts.get(self.drawn.devices[0], {})
        step = self.driver.scaled_step.state_dict()
        return {
            "weights": tree([each + 0.0 for each in weights]),  # whose -0 may become 0
            "states": [tree(updaters[0].states.get(i)) for i in order],
            "counts": (updaters[0].optimizer.num_update, [counts.get(i) for i in order]),
            "step": {**step, "overflow_params": len({name.partition(" on ")[0] for name in step["overflow_params"]})},
        }


def reseed(seed: int) -> None:
    for each in (random, np.random, mx.random):
        each.seed(seed)


class OfTrainer(Run):
    ways = "params states", "states params", "states"

    def make(self) -> None:
        self.net.initialize(mx.init.Uniform(0.7), ctx=self.contexts)
        if self.drawn.precision in OWN:
            self.net.cast("float16")
        elif PRECISIONS[self.drawn.precision] is not None:
            mxmp.convert(self.net, PRECISIONS[self.drawn.precision])
        params = self.net.collect_params()
        self.params = [*params.values()]
        for param in self.params:
            if param.grad_req != "null":
                param.grad_req = "null" if param.name in self.frozen else self.drawn.request
        given = self.params if self.drawn.is_list else params
        self.driver = mxmp.Trainer(given, *self.optimizing(), loss_scale=self.scaler())

    def backward(self, factor: float = 1.0, left_out: int = 0) -> None:
        """Of a loss on the first device alone, so that the number of devices changes no sum."""
        x, y = self.draw(ROWS, WIDTH, factor=factor)
        losses = []
        with autograd.record():
            for k, ctx in enumerate(self.contexts):
                out = mx.nd.array(x, ctx=ctx)
                for layer in [*self.net][: len(self.net) - left_out]:
                    out = self.call(layer, out)
                losses.append(LOSS(out, mx.nd.array(y, ctx=ctx)) * float(k == 0))
        self.driver.backward(losses)

    def call(self, layer: Any, x: mx.nd.NDArray) -> mx.nd.NDArray:
        if self.drawn.precision not in OWN or not isinstance(layer, nn.Dense):
            return layer(x)
        weight = layer.weight.data(x.ctx).astype("float32")  # MXNet multiplies no float16 on a CPU
        return mx.nd.tanh(mx.nd.FullyConnected(x, weight, num_hidden=WIDTH, no_bias=True))

    def train(self, factor: float = 1.0, left_out: int = 0) -> None:
        """Without its last layers, so that the parameters' update counts differ."""
        self.backward(factor, left_out)
        self.driver.step(ROWS, ignore_stale_grad=True)

    fit = train

    def clear(self) -> None:
        self.net.collect_params().zero_grad()  # to which another backward may add

    def parts(self) -> tuple[list, list, list]:
        found = [[value(param, k) for k in range(len(self.contexts))] for param in self.params]
        assert all(np.array_equal(first, other) for first, *others in found for other in others)
        order = [self.driver._params.index(param) for param in self.params]
        return [first for first, *_ in found], self.driver._updaters, order

    def save(self, path: str) -> None:
        mxmp.save_checkpoint(path, self.net, self.driver, epoch=EPOCH)

    def load(self, path: str, how: str, step: str) -> bool:
        """Return whether all has shapes then."""
        for part in how.split():
            if part == "checkpoint":
                assert mxmp.load_checkpoint(path, self.net, self.driver) == EPOCH
            elif part == "params":
                self.net.load_parameters(f"{path}.params", ctx=self.contexts)
            else:
                self.driver.load_states(f"{path}.states")
        return self.drawn.has_shapes or how != "states"

    def leave(self, rng: random.Random) -> None:
        """Leave gradients that no step has applied."""
        what = rng.choice(["", "scaled", "plain"])
        if what == "plain":
            with autograd.record():
                loss = sum((param.data(self.contexts[0]).astype("float32") ** 2).sum() for param in self.params)
            loss.backward()
        elif what:
            self.backward(3.0)


class OfModule(Run):
    ways = "in place", "anew", "states"

    def make(self, *checkpoint: Any) -> None:
        data = mx.sym.mean(mx.sym.var("data"), axis=1)
        symbol = mx.sym.LinearRegressionOutput(self.net(data), mx.sym.var("label"), name="out")
        policy, names = PRECISIONS[self.drawn.precision] or "float16", (["data"], ["label"])
        more = {
            "context": self.contexts,
            "policy": policy,
            "loss_scale": self.scaler(),
            "fixed_param_names": self.frozen,
        }
        if self.drawn.buckets:
            kind, args, more["sym_gen"] = mxmp.BucketingModule, [], lambda key: (symbol, *names)
            more["default_bucket_key"] = LONGEST
        else:
            kind, args, more["label_names"] = mxmp.Module, [] if checkpoint else [symbol], names[1]
        if checkpoint:
            self.driver = kind.load(*checkpoint, load_optimizer_states=True, **more)
        else:
            self.driver = kind(*args, **more)
            self.get_ready()

    def get_ready(self) -> None:
        self.driver.bind(*shapes().values(), grad_req=self.drawn.request)
        if not self.driver.params_initialized:
            self.driver.init_params(mx.init.Uniform(0.7))
        self.driver.init_optimizer(**self.options())

    def options(self) -> dict[str, Any]:
        name, options = self.optimizing()
        return {"optimizer": name, "optimizer_params": {"rescale_grad": 1 / ROWS, **options}}

    def batch(self, factor: float = 1.0) -> mx.io.DataBatch:
        length = LONGEST - self.number % 2
        arrays = [[mx.nd.array(each)] for each in self.draw(ROWS, length, WIDTH, factor=factor)]
        return mx.io.DataBatch(*arrays, bucket_key=length, **shapes(length))

    def backward(self, factor: float = 1.0) -> None:
        self.driver.forward_backward(self.batch(factor))

    def train(self, factor: float = 1.0, left_out: int = 0) -> None:
        self.backward(factor)
        self.driver.update()

    def fit(self) -> None:
        """``fit`` makes ready what is not."""
        data = Batches([self.batch()])
        vars(data).update(shapes())
        self.driver.fit(data, eval_metric="mse", num_epoch=1, **self.options())

    def clear(self) -> None:
        self.driver.discard()

    def parts(self) -> tuple[list, list, list]:
        weights = [array.asnumpy() for each in self.driver.get_params() for _, array in sorted(each.items())]
        module = self.driver.modules[LONGEST] if self.drawn.buckets else self.driver
        for first, *others in module.arrays().values():
            assert all(np.array_equal(first.asnumpy(), other.asnumpy()) for other in others)
        return weights, module.updaters, [*module.updaters.numbers.values()]

    def save(self, path: str) -> None:
        mx.callback.module_checkpoint(self.driver, path, 1, save_optimizer_states=True)(EPOCH - 1)
        mxmp.save_checkpoint(path, self.driver, epoch=EPOCH)

    def load(self, path: str, how: str, step: str) -> bool:
        """Return whether the Module is ready then."""
        if how == "checkpoint":
            assert mxmp.load_checkpoint(path, self.driver) == EPOCH
        if how == "in place":
            self.driver.load_params(f"{path}-{EPOCH:04d}.params")
        if how in ("in place", "states"):
            self.driver.load_optimizer_states(f"{path}-{EPOCH:04d}.states")
        if how == "anew":
            self.make(path, EPOCH)
            if step == "fitted" and self.drawn.request == "write":  # as ``fit`` binds
                return False
            self.get_ready()
        return True

    def leave(self, rng: random.Random) -> None:
        pass


class Batches(list):
    """What ``fit`` takes."""

    reset = list.copy


def shapes(length: int = LONGEST) -> dict[str, list[mx.io.DataDesc]]:
    found = {"data": (ROWS, length, WIDTH), "label": (ROWS, WIDTH)}
    return {f"provide_{name}": [mx.io.DataDesc(name, shape)] for name, shape in found.items()}


KINDS = {"trainer": OfTrainer, "module": OfModule}


def drawn(optimizer: str, stored: str, rng: random.Random) -> SimpleNamespace:
    norm = optimizer != "groupadagrad" and rng.random() < 0.3
    scheduled = optimizer in OPTIMIZERS and optimizer != "ftrl" and rng.random() < 0.5
    return SimpleNamespace(
        precision=rng.choice({"full": [*FULL], "any": [*PRECISIONS, "masters"]}.get(stored, [stored])),
        optimizer=optimizer,
        scheduled=scheduled,
        scaler=rng.choice([*SCALERS]),
        request=rng.choice(["write", "add"]),
        frozen=rng.random() < 0.2,
        devices=rng.choice([(0,), (1,), (0, 1)][: 2 if norm or scheduled else 3]),
        norm=norm,
        goes_on_drawing=rng.random() < 0.3,  # random numbers, as the file says
        numbers=(9, 10),
        is_list=rng.random() < 0.5,
        has_shapes=True,
        buckets=rng.random() < 0.5,
    )


def changed(kind: str, first: SimpleNamespace, rng: random.Random) -> SimpleNamespace:
    """What may be otherwise when a run goes on."""
    other = SimpleNamespace(**vars(first))
    # Elsewhere, float16 gradients are added to one another.
    if first.precision in PRECISIONS and first.request == "write" and (kind == "trainer" or len(first.devices) == 1):
        other.precision = rng.choice([*PRECISIONS, *sorted(SAME)])
    if kind == "trainer":
        # By a schedule, rates of parameters with other counts go by their order; Nadam and SGLD go by it, too.
        is_ordered = first.scheduled or first.optimizer in ("nadam", "sgld")
        other.is_list = first.is_list if is_ordered else rng.random() < 0.5
        one_is_new = [(98, 10)] if first.is_list and other.is_list else []
        if first.is_list or not is_ordered:
            other.numbers = rng.choice([(10, 11), (99, 100), first.numbers, *one_is_new])
        other.devices = rng.choice([(0,), (2,), (0, 1), (0, 1, 2)][: 2 if first.norm or first.scheduled else 4])
        other.has_shapes = first.precision in OWN or rng.random() < 0.6
    elif not first.norm:
        other.devices = rng.choice([first.devices, (2, 3)])
    return other


SEEDS = range(int(os.environ.get("MXMP_DRAWN", "1")))
QUICK = ["adam", "sgd", "lbsgd, 3 batches", "own, dict"]
EACH = [
    *(("trainer", name, stored) for name in [*OPTIMIZERS, *MORE] for stored in ("full", "masters")),
    *(("trainer", name, stored) for name in ("sgd", "adam, in float16") for stored in OWN),
    *(("module", name, "any") for name in [*OPTIMIZERS, *MORE]),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Parameters already initialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accumulating with float16"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "optimizer", "stored"),
    [pytest.param(*each, marks=[] if each[1] in QUICK else pytest.mark.slow) for each in EACH],
)
def test_a_training_that_goes_on_is_the_one_that_was_not_interrupted(kind, optimizer, stored, seed, tmp_path):
    rng = random.Random(f"{kind} {optimizer} {stored} {seed}")
    first = drawn(optimizer, stored, rng)
    steps, whole = rng.choices([*STEPS, "clean", "clean", "skipped"], k=6), KINDS[kind](first, 0)
    others = [None, first, changed(kind, first, rng)]
    stops, expected = rng.choices(range(len(steps)), k=len(others)), []
    for k, step in enumerate(steps):
        if k in stops:
            whole.save(f"{tmp_path}/{k}")
        expected.append(whole.picture())
        whole.do(step, k)
    expected.append(whole.picture())
    for other, at in zip(others, stops):
        run = KINDS[kind](other, 1) if other else whole
        if run.drawn.has_shapes:
            for step in rng.choice([(), ("clean",), ("clean", "skipped")]):
                run.do(step, 99)
            run.leave(rng)
        # The first forward makes masters, and states have all weights only where each has one.
        has_all = first.precision == "masters" and not first.norm and {*steps[:at]} - {"partial"}
        ways = [way for way in run.ways if way != "states" or (has_all and steps[at] != "partial")]
        how = "checkpoint" if first.goes_on_drawing else rng.choice(ways)
        case = f"{how}, {steps} of {vars(first)} from {at} on as {other}"
        if run.load(f"{tmp_path}/{at}", how, steps[at]):
            assert_same(run.picture(), expected[at], case)
        for k in range(at, len(steps)):
            if k > at and k in stops and first.goes_on_drawing:  # which draws a seed
                run.save(f"{tmp_path}/again")
            run.do(steps[k], k)
            # A Module divides a batch among its devices, and so the sums.
            is_same = kind == "trainer" or len(first.devices) == len(run.drawn.devices)
            precisions = {first.precision, run.drawn.precision}
            if is_same and (len(precisions) == 1 or precisions == SAME):
                assert_same(run.picture(), expected[k + 1], f"step {k}, {case}")


def assert_same(found: dict, wanted: dict, case: str) -> None:
    for name, each in wanted.items():
        assert found[name] == each, f"{name}, {case}"
