"""Drawn sequences of calls on a Module or a BucketingModule, and on plain MXNet's beside it."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Callable, ClassVar
from unittest import mock

import mxnet as mx
import numpy as np
from kit.twins import array

import mxmp

from . import drawn_looks
from .drawn_sequences import BATCH, SCALES, GluonPair, drawer, policy_of, refusals, same, spoil


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

    shape: tuple[int, ...] = (BATCH, 6)

    def __init__(self, draw: Callable, policy: Any, scales: bool = True) -> None:
        self.policy, self.head = policy, draw("head", "softmax", "plain")
        self.request = draw("request", "write", "write", "add")
        self.devices = [mx.cpu(i) for i in range(draw("devices", 1, 1, 2))]
        self.wants_inputs = draw("wants inputs", True, False, False)
        self.options = draw("optimizer", *OF_MODULES)
        # Not the weight alone: MXNet's FullyConnected on a CPU then leaves the gradient of the bias as it is.
        fixed = draw("fixed", ["fc1_weight", "fc1_bias"], None, None, None)
        scale = draw("scaler", 64.0, "dynamic", None, 1024.0) if scales else draw("scaler", None)
        common: dict[str, Any] = {"context": self.devices, "fixed_param_names": fixed}
        more = {} if policy is None else {"policy": policy, "loss_scale": scale}
        self.module: Any = self.made(**common, **more)
        self.bind()
        self.module.init_params(arg_params=self.start(0))
        self.init_optimizer()

    def made(self, **kwargs: Any) -> Any:
        kind = mx.mod.Module if self.policy is None else mxmp.Module
        return kind(symbol(self.head), label_names=["softmax_label"] if self.head == "softmax" else [], **kwargs)

    @property
    def current(self) -> Any:
        """The module whose executors ran last."""
        return self.module

    def bind(self, **more: Any) -> None:
        label = [("softmax_label", (BATCH,))] if self.head == "softmax" else None
        requests = {"grad_req": self.request, "inputs_need_grad": self.wants_inputs}
        self.module.bind([("data", self.shape)], label, **{**requests, **more})

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

    def batches(self, seed: int) -> mx.io.NDArrayIter:
        """The last of three is padded."""
        labels = {"softmax_label": (np.arange(2 * BATCH + 2) + seed) % 3} if self.head == "softmax" else None
        return mx.io.NDArrayIter({"data": array(seed, 2 * BATCH + 2, 6)}, labels, BATCH)

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
        group = self.current._exec_group
        return {name: grads for name, grads in zip(group.param_names, group.grad_arrays) if grads[0] is not None}

    def is_finite(self) -> bool:
        return all(np.isfinite(grad.asnumpy()).all() for grads in self.gradients().values() for grad in grads)

    def counts(self) -> tuple[int, dict]:
        """The update counts, which plain MXNet's states files lack."""
        optimizer = self.current._optimizer
        return optimizer.num_update, copy.deepcopy(optimizer._all_index_update_counts)

    def count_from(self, counts: tuple[int, dict]) -> None:
        if self.policy is None:
            optimizer = self.current._optimizer
            optimizer.num_update, optimizer._all_index_update_counts = copy.deepcopy(counts)
            optimizer._set_current_context(0)

    def zero(self) -> None:
        for grads in self.gradients().values():
            for grad in grads:
                grad[:] = 0


class ModulePair:
    """What a sequence of calls does to a Module of mxmp and to its plain twin."""

    environment: ClassVar[dict[str, str]] = {"MXNET_SUBGRAPH_BACKEND": "NONE"}
    OPS = (
        *("forward", "forward", "backward", "backward", "update", "update", "iteration", "iteration", "iteration"),
        *("zero_grad", "evaluate", "load_states", "set_params", "scale", "rebind", "reshape", "add"),
        *("write", "null", "input_grads", "reinit", "new_optimizer", "discard", "overflow", "overflow"),
        *("fit", "score", "predict", "look", "look"),
    )
    LOOKS: ClassVar[dict[str, Callable[[Any], Any]]] = drawn_looks.OF_MODULES

    def __init__(self, seed: int, folder: Path, forced: dict[str, Any]) -> None:
        self.rng, self.folder = random.Random(seed), folder
        drawn, self.draw = self.rng.randrange(2**30), drawer(self.rng, forced)
        self.sides = self.low, self.full = self.made(lambda: drawer(random.Random(drawn), forced))
        # Whether a forward in training has run since the last backward, and a backward since the last update.
        self.number, self.ran, self.due, self.counts, self.watch = 0, 0, False, Counter(), None

    run, look = GluonPair.run, GluonPair.look

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
        self.full.reduce(self.low.module.loss_scale)  # float16 sums may overflow by themselves
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

    def fit(self) -> None:
        if self.due or self.low.head != "softmax":
            return
        self.ran, seen = 0, []
        for side in self.sides:
            metric, of_batches = mx.metric.CrossEntropy(), []
            with refusals() if side is self.low else nullcontext():
                side.module.fit(
                    *(side.batches(self.number), side.batches(self.number + 1), metric),
                    batch_end_callback=lambda each, kept=of_batches: kept.append(each.eval_metric.get()[1]),
                    eval_end_callback=lambda each, kept=of_batches: kept.append(each.eval_metric.get()[1]),
                    num_epoch=1,
                )
            seen.append(of_batches)
        assert seen[0] == seen[1], "metrics of fit"
        assert not self.low.module.last_step_skipped
        self.zero_grad()
        same(self.low.weights(), self.full.weights(), "weights after fit")

    def score(self) -> None:
        if self.low.head == "softmax":
            self.ran, parts = 0, self.draw("num_batch", None, 2)
            found = [side.module.score(side.batches(self.number), ["acc", "ce"], parts) for side in self.sides]
            assert found[0] == found[1]

    def predict(self) -> None:
        self.ran, merged = 0, self.draw("merge_batches", True, False)
        found = [side.module.predict(side.batches(self.number), merge_batches=merged) for side in self.sides]
        low, full = ([found] if merged else [out for outs in found for out in outs] for found in found)
        same([out.asnumpy() for out in low], [out.asnumpy() for out in full], "predictions")

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
            if not side.current.optimizer_initialized:
                side.init_optimizer(force_init=True)

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
        self.full.current.save_optimizer_states(names[1])
        counts = self.full.counts()
        self.iteration()
        with refusals():
            self.low.module.load_optimizer_states(names[0])
        self.full.current.load_optimizer_states(names[1])
        self.full.count_from(counts)


# -- Buckets ----------------------------------------------------------------------------------------


LENGTHS = (2, 3, 5)


def symbol_of(length: int, head: str) -> tuple[mx.sym.Symbol, list[str], list[str]]:
    """Return what ``sym_gen`` does. A bucket has all parameters: plain MXNet numbers them by bucket in its updates."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=5, flatten=False, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(mx.sym.mean(x, axis=1) * length, name="tanh"), num_hidden=3, name="fc2")
    labels = ["softmax_label"] if head == "softmax" else []
    return (mx.sym.SoftmaxOutput(x, name="softmax") if labels else x), ["data"], labels


class BucketsSide(ModuleSide):
    """A BucketingModule, whose batches are of a bucket each."""

    shape = (BATCH, LENGTHS[-1], 6)

    def made(self, **kwargs: Any) -> Any:
        kind = mx.mod.BucketingModule if self.policy is None else mxmp.BucketingModule
        return kind(lambda length: symbol_of(length, self.head), LENGTHS[-1], **kwargs)

    @property
    def current(self) -> Any:
        return self.module._curr_module

    def batch(self, seed: int) -> mx.io.DataBatch:
        length = LENGTHS[seed % 3]
        labels = [mx.nd.array((np.arange(BATCH) + seed) % 3)] if self.head == "softmax" else []
        return mx.io.DataBatch(
            [array(seed, BATCH, length, 6)],
            labels,
            bucket_key=length,
            provide_data=[mx.io.DataDesc("data", (BATCH, length, 6))],
            provide_label=[mx.io.DataDesc("softmax_label", (BATCH,))] if labels else None,
        )


class BucketsPair(ModulePair):
    """What a sequence of calls does to a BucketingModule of mxmp and to its plain twin."""

    OPS = tuple(op for op in ModulePair.OPS if op not in ("fit", "score", "predict", "reshape"))

    def made(self, draws: Callable) -> tuple[ModuleSide, ModuleSide]:
        return BucketsSide(draws(), policy_of(self.rng)), BucketsSide(draws(), None)
