"""One model in FP32, by two controls, by mxmp and by ``mxnet.contrib.amp``."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from support.zoo.case import Case, floating, other_inputs
from support.zoo.vision import all_blocks

import mxmp
from mxmp import Policy
from mxmp.kernels.fit import device_of
from mxmp.kernels.padding import LargeInputs
from mxmp.pipeline import emitted
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.missing_kernels import missing_kernel

from .rewriting import rounded_kernels
from .running import (
    Call,
    array_like,
    call,
    calls,
    cause,
    counted,
    rounded,
    sqnr,
    with_rounded_inputs,
    without_chance,
)

DTYPES = ("float16", "bfloat16")
LEARNING_RATE = 1e-3
WARM_UP = 2
OTHERS = 8


class Result(NamedTuple):
    """Outputs of inference and of training, and the gradient of every parameter."""

    inference: list[np.ndarray]
    training: list[np.ndarray]
    grads: dict[str, np.ndarray]


class Model:
    """A case's net and, after ``refer``, its FP32 results.

    Each stage measures against them and leaves the net as it was.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        mx.random.seed(0)
        np.random.seed(0)
        self.net = case.make()
        without_chance(self.net)
        for name, param in self.net.collect_params().items():
            if name.endswith(("gamma", "var")):
                param.init = "ones"  # zeros, as ResNeXt's last gammas, would stop every gradient before them
            elif name.endswith(("beta", "bias", "mean")) and param.init is None:
                param.init = "zeros"  # of a SymbolBlock, whose parameters have no initializer of their own
        self.net.initialize(case.init or mx.init.Xavier(magnitude=2))
        self.net(*case.inputs())
        self._fresh()

    def warm_up(self) -> None:
        """Train a little: an untrained net's running statistics are no statistics."""
        for _ in range(WARM_UP):
            self._train()

    @property
    def learned(self) -> list[str]:
        """Return the names of the parameters that may train: all but Constants."""
        return [name for name, param in self.net.collect_params().items() if not isinstance(param, gluon.Constant)]

    def training_calls(self) -> list[Call]:
        """Return the calls of graphs in one forward of training."""
        with calls() as found, autograd.record():
            self.net(*(self.case.train_inputs or self.case.inputs)())
        return found

    def refer(self) -> None:
        """Find FP32's results, from running statistics of a few batches.

        Raises
        ------
        ArithmeticError
            They are not finite, or others each time.
        """
        self.warm_up()
        self.weights = {n: p.data().asnumpy() for n, p in self.net.collect_params().items() if p._data is not None}
        with calls() as self.calls:
            self.reference = self.evaluate()
        if not all(np.isfinite(each).all() for each in [*self.reference.training, *self.reference.grads.values()]):
            raise ArithmeticError("FP32 itself is not finite")
        again = self.evaluate().grads
        differing = [name for name, grad in self.reference.grads.items() if not np.array_equal(grad, again[name])]
        if differing:
            raise ArithmeticError(f"FP32 itself gives another gradient of {differing[0]} each time")

    def _fresh(self) -> None:
        for block in all_blocks(self.net):
            if isinstance(block, gluon.HybridBlock):
                block._clear_cached_op()  # of the other mode: a network may branch on is_training
        self.net.hybridize()

    def _train(self, trainer: mxmp.Trainer | None = None) -> tuple[list, dict[str, np.ndarray]]:
        """One training step; the scale backs off and the step is tried again while it overflows."""
        inputs = (self.case.train_inputs or self.case.inputs)()
        self._asked = [] if self._trainable() else [x for x in inputs if x.dtype == np.float32]
        for x in self._asked:
            x.attach_grad()
        for _ in range(30):
            mx.random.seed(5)
            np.random.seed(5)
            with autograd.record():
                outputs = self.net(*inputs)
                loss = self.case.loss(outputs)
            if trainer is None:
                autograd.backward(loss)
                grads = self._grads()
                break
            trainer.backward(loss)
            trainer.unscale()
            grads = self._grads()
            trainer.step(1, ignore_stale_grad=True)  # some networks carry a layer that they never call
            if not trainer.last_step_skipped:
                break
        return [out.astype("float32").asnumpy() for out in floating(self.case.compared(outputs))], grads

    def _grads(self) -> dict[str, np.ndarray]:
        """Gradients of the parameters; of the inputs, where there are none."""
        found = {name: param.grad() for name, param in self._trainable().items()}
        found.update({f"input {number}": x.grad for number, x in enumerate(self._asked)})
        dense = {n: g if isinstance(g, mx.np.ndarray) else g.tostype("default") for n, g in found.items()}
        return {name: grad.astype("float32").asnumpy() for name, grad in dense.items()}

    def _trainable(self) -> dict[str, gluon.Parameter]:
        return {name: param for name, param in self.net.collect_params().items() if param.grad_req != "null"}

    def evaluate(self, scaled: bool = False) -> Result:
        """Inference and a training step from the kept weights."""
        self._set(self.weights)
        return self._evaluate(scaled)

    def _evaluate(self, scaled: bool = False) -> Result:
        self._fresh()
        mx.random.seed(5)
        inference = [out.astype("float32").asnumpy() for out in floating(self.net(*self.case.inputs()))]
        self._fresh()
        trainer = None
        if scaled and self._trainable():
            options = {"learning_rate": LEARNING_RATE}
            # Below 1 where a net's gradients, from random weights, are beyond float16's range.
            scale = mxmp.DynamicLossScaler(init_scale=2**12, min_scale=2**-40)
            trainer = mxmp.Trainer(self._trainable(), "sgd", options, kvstore=None, loss_scale=scale)
        training, grads = self._train(trainer)
        return Result(inference, training, grads)

    def train(self) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Return the outputs and gradients of one training step from the kept running statistics, without an update.

        The weights are not written: they keep the layout in which the last call left them.
        """
        trained = self._trainable()
        self._set({name: value for name, value in self.weights.items() if name not in trained})
        return self._train()

    def infer(self) -> list[np.ndarray]:
        """Return the outputs in inference, by the graphs of earlier calls."""
        mx.random.seed(5)
        return [out.astype("float32").asnumpy() for out in floating(self.net(*self.case.inputs()))]

    def _set(self, values: dict[str, np.ndarray]) -> None:
        for name, param in self.net.collect_params().items():
            if name in values:
                param.set_data(array_like(param.data(), values[name]))

    def _set_rounded(self, dtype: str) -> list[str]:
        """Round the weights, all but those of norms; returns their names."""
        chosen = [name for name in self.weights if not name.endswith(("gamma", "beta", "mean", "var"))]
        self._set({**self.weights, **{name: rounded(self.weights[name], dtype) for name in chosen}})
        return chosen

    def control(self, dtype: str) -> dict[str, Any]:
        """FP32 with nothing but its weights rounded (its inputs, where there are no weights)."""
        chosen = self._set_rounded(dtype)
        case = self.case
        if not chosen:
            self.case = with_rounded_inputs(case, dtype)
        try:
            return self._compare(self._evaluate())
        finally:
            self.case = case

    def ideal(self, dtype: str, *, throughout: bool = False) -> dict[str, Any]:
        """FP32 with what matrix operators read and write rounded, and the gradients: perfect kernels of the dtype."""
        self._set_rounded(dtype)
        with rounded_kernels(dtype, throughout=throughout):
            return self._compare(self._evaluate(scaled=True))

    def throughout(self, dtype: str) -> dict[str, Any]:
        """The same with what pointwise operators write between them rounded as well."""
        return self.ideal(dtype, throughout=True)

    def lag(self, dtype: str) -> dict[str, Any]:
        """By mxmp less by perfect kernels, in the mean over other inputs: near 0 where one input was chance."""
        kept, found = self.reference, []
        for number in range(1, OTHERS + 1):
            with other_inputs(number):
                self.reference = self.evaluate()
                found.append((self.ideal(dtype), self.mxmp(dtype)))
        self.reference = kept
        keys = [key for key in ("outputs_db", "gradients_db") if key in found[0][1]]
        return {key: round(float(np.mean([ours[key] - ideal[key] for ideal, ours in found])), 2) for key in keys}

    def mxmp(self, dtype: str) -> dict[str, Any]:
        self._set(self.weights)
        mxmp.convert(self.net, Policy(dtype))
        try:
            return self._compare(self._evaluate(scaled=True))
        finally:
            mxmp.restore(self.net)

    def counts(self, dtype: str) -> dict[str, Any]:
        """What mxmp's graphs are made of: on a GPU for float16, which a CPU only emulates."""
        policies = {"": f"compute={dtype}", "_norm_compute": f"compute={dtype},norm=compute"}
        context = mx.gpu() if dtype == "float16" else mx.cpu()
        found = {}
        for suffix, policy in policies.items():
            casted = [Call(cast(c, policy, context), c.known) for c in self.calls]
            shares = counted(casted, total=self.calls)  # what mxmp adds of its own is no part of the network
            found.update({f"{key}{suffix}": value for key, value in shares.items()})
        return found

    def slow_counts(self, dtype: str) -> dict[str, Any]:
        """Had mxmp taken kernels that are right, but slower than FP32's."""

        def sound(*args: Any, **options: Any) -> str:
            return missing_kernel(*args, **{**options, "slow_too": True})

        with mock.patch("mxmp.precision.operators.missing_kernel", sound):
            return self.counts(dtype)

    def amp(self, dtype: str) -> dict[str, Any]:
        """By ``mxnet.contrib.amp``, which patches MXNet for good: the process can do nothing after it.

        In float16 a CPU has no kernels for it: only the error is asked for, and no FP32 results are needed.
        """
        from mxnet.contrib import amp

        amp.init(dtype)
        found: dict[str, Any] = {}
        with calls() as traced:
            try:
                if dtype == "float16":
                    with autograd.record():
                        outputs = self.net(*(self.case.train_inputs or self.case.inputs)())
                    for out in floating(outputs):
                        out.wait_to_read()
                else:
                    self._set(self.weights)
                    found = self._compare(self._evaluate())
            except Exception as error:
                found = {"error": cause(error)}
        whole = traced if "error" not in found or len(traced) == 1 else []  # it may have failed between two graphs
        try:
            found.update(counted(whole or self._traced()))
        except Exception as error:
            found["uncounted"] = cause(error)
        return found

    def _traced(self) -> list[Call]:
        """The graphs that would have run, had the kernels existed; those of a net that is one graph."""
        inputs = (self.case.train_inputs or self.case.inputs)()
        return [call(self.net, inputs)]

    def run(self, stage: str) -> dict[str, Any]:
        """One of ``STAGES``; what MXNet or mxmp raises is the result."""
        dtype, what = stage.split(".")
        try:
            return getattr(self, what)(dtype)
        except Exception as error:
            return {"error": cause(error)}

    def _compare(self, got: Result) -> dict[str, Any]:
        want = self.reference
        outputs = [(want.training, got.training)]
        if not self.case.ranked:
            outputs.append((want.inference, got.inference))
        found: dict[str, Any] = {"inference_finite": all(np.isfinite(out).all() for out in got.inference)}
        found["outputs_db"] = min((sqnr(a, b) for x, y in outputs for a, b in zip(x, y)), default=200.0)
        alive = {name: grad for name, grad in want.grads.items() if np.any(grad)}
        each = {name: sqnr(grad, got.grads[name]) for name, grad in alive.items()}
        if each:
            found["gradients_db"] = float(np.median(list(each.values())))
            worst = min(each, key=each.__getitem__)
            found["worst_gradient"] = [worst, round(each[worst], 2)]
        return {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}


STAGES = [f"{dtype}.{what}" for dtype in DTYPES for what in ("control", "ideal", "mxmp", "counts")]
STAGES += ["bfloat16.amp", "float16.amp"]  # each patches MXNet for good, and so is its process's last


def cast(called: Call, policy: str, context: mx.Context) -> mx.sym.Symbol:
    """The graph that a converted net runs; ``cast_symbol`` keeps the outputs' names as well, at a price."""
    graph, parsed = Graph.from_symbol(called.symbol), mxmp.Policy.parse(policy)
    shapes = [shape for shape, _ in called.known.values()]
    large = LargeInputs(graph, list(called.known), parsed.compute).at(shapes)
    return emitted(graph, decide(graph, parsed, device_of(context)), large_inputs=large).graph.to_symbol()
