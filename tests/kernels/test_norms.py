"""BatchNorm between casts, on a CPU, is what cuDNN's kernel computes: float16 read, FP32 inside, one rounding."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.oracle import Result, S, assert_same_bits, by_symbol, half

import mxmp
from mxmp import Policy
from mxmp.kernels.fit import SWITCH
from mxmp.precision.graph import Graph

LOW_AROUND = Policy(low_ops=["_copy"], params="float32")


def norm_of(**attrs: Any) -> mx.sym.Symbol:
    """A norm between two operators that read and write float16."""
    return S.identity(S.BatchNorm(S.identity(S.var("data")), name="norm", **attrs), name="out")


class Kernel:
    """cuDNN's BatchNorm in FP64, before its one rounding; x and the gradient from above hold float16 values.

    The formulas of "Batch Normalization" (Ioffe and Szegedy, 2015), as cudnnBatchNormalizationForwardTraining,
    ...ForwardInference and ...Backward have them.
    """

    def __init__(self, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, axis: int, eps: float) -> None:
        self.axes = tuple(i for i in range(x.ndim) if i != axis)
        self.shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        self.x, self.gamma, self.beta, self.eps = x.astype("float64"), gamma.reshape(self.shape), beta, eps
        self.mean = self.x.mean(self.axes, keepdims=True)
        self.scale = 1 / np.sqrt(self.x.var(self.axes, keepdims=True) + eps)

    def output(self) -> np.ndarray:
        return self.gamma * (self.x - self.mean) * self.scale + self.beta.reshape(self.shape)

    def inferred(self, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        mean, scale = mean.reshape(self.shape), 1 / np.sqrt(var.reshape(self.shape) + self.eps)
        return self.gamma * (self.x - mean) * scale + self.beta.reshape(self.shape)

    def gradients(self, dy: np.ndarray) -> dict[str, np.ndarray]:
        normal = (self.x - self.mean) * self.scale
        means = [(dy * factor).mean(self.axes, keepdims=True) for factor in (1, normal)]
        return {
            "data": self.gamma * self.scale * (dy - means[0] - normal * means[1]),
            "norm_gamma": (dy * normal).sum(self.axes),
            "norm_beta": dy.sum(self.axes),
        }


def assert_rounded_once(got: np.ndarray, exact: np.ndarray, size: float) -> None:
    """Raise unless all is the nearest float16, but for FP32's error, which is that of values of ``size``."""
    np.testing.assert_array_equal(got, half(got))
    ulp = np.spacing(np.abs(exact).astype("float16")).astype("float64")
    assert (np.abs(got - exact) <= ulp / 2 + 1e-5 * size).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    axis=st.integers(0, 3),
    fix_gamma=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-3, 1e-2]),
    seed=st.integers(0, 2**16),
)
def test_a_norm_between_casts_is_the_kernel_that_casts_inside(shape, axis, fix_gamma, eps, seed):
    axis, rng = axis % len(shape), np.random.RandomState(seed)
    channels = shape[axis]
    cast = mxmp.cast_symbol(norm_of(axis=axis, fix_gamma=fix_gamma, eps=eps), LOW_AROUND, ctx=mx.cpu())
    values = {"data": rng.normal(0.5, 2, shape), "norm_gamma": rng.normal(1, 0.5, channels)}
    values.update(norm_beta=rng.normal(0, 1, channels), norm_moving_mean=rng.normal(0, 1, channels))
    values.update(norm_moving_var=rng.uniform(0.5, 2, channels))
    values = {name: value.astype("float32") for name, value in values.items()}
    dy = half(rng.normal(0, 1, shape))
    gamma = np.ones(channels) if fix_gamma else values["norm_gamma"].astype("float64")
    kernel = Kernel(half(values["data"]), gamma, values["norm_beta"].astype("float64"), axis, eps)

    got = by_symbol(cast, values, heads=[dy])
    size = float(np.abs(kernel.scale).max() * 8)
    assert_rounded_once(got.outputs[0], kernel.output(), size)
    exact = kernel.gradients(dy.astype("float64"))
    assert_rounded_once(got.grads["data"], exact["data"], size)
    for name in ("norm_beta", *(() if fix_gamma else ("norm_gamma",))):
        np.testing.assert_allclose(got.grads[name], exact[name], rtol=1e-4, atol=2e-5 * size)
    inferred = by_symbol(cast, values, train=False).outputs[0]
    mean, var = (values[f"norm_moving_{name}"].astype("float64") for name in ("mean", "var"))
    assert_rounded_once(inferred, kernel.inferred(mean, var), 8.0)


def bits(norm: str | None, *, alone: bool) -> Result:
    """Return what a norm makes by a policy; not ``alone``, FP32 operators read its input and its output too."""
    x = S.identity(S.var("data"))
    y = S.BatchNorm(x, fix_gamma=False, name="norm")
    symbol = S.Group([S.identity(S.relu(y)), *(() if alone else (S.exp(y), S.exp(x)))])
    rng = np.random.RandomState(0)
    values = {"data": rng.normal(0, 1, (4, 3, 5)), "norm_gamma": rng.normal(1, 0.5, 3)}
    values.update(norm_beta=rng.normal(0, 1, 3), norm_moving_mean=np.zeros(3), norm_moving_var=np.ones(3))
    values = {name: value.astype("float32") for name, value in values.items()}
    return by_symbol(mxmp.cast_symbol(symbol, Policy(low_ops=["_copy"], norm=norm), ctx=mx.cpu()), values)


@pytest.mark.parametrize("norm", ["float32", "compute"])
def test_the_bits_do_not_depend_on_where_the_casts_are(norm):
    assert_same_bits(bits(norm, alone=True), bits(None, alone=True))


def test_readers_in_fp32_get_what_a_gpus_kernel_rounds():
    """As by ``norm="compute"``, where the emulation rounds each operator by itself."""
    assert_same_bits(bits("compute", alone=False), bits(None, alone=False))


def test_what_follows_a_norm_or_softmax_computes_low_where_a_reader_does():
    def dense(x, name):
        return S.FullyConnected(x, num_hidden=8, no_bias=True, name=name)

    x = S.LayerNorm(S.Embedding(S.var("words"), input_dim=9, output_dim=8, name="embed"), name="first")
    x = S.Dropout(x, name="dropped")
    weights = S.Dropout(S.softmax(dense(x, "scores"), name="weights"), name="dropped_weights")
    x = S.elemwise_add(x, dense(weights, "values"), name="residual")
    out = S.log_softmax(S.Reshape(S.LayerNorm(x, name="last"), shape=(-1, 8), name="flat"), name="logs")
    for ctx in (mx.cpu(), mx.gpu()):
        (report,) = mxmp.explain(out, ctx=ctx).graphs
        low = {node.name for node in report.nodes if node.dtype == "float16"}
        assert low == {"dropped", "scores", "dropped_weights", "values", "residual"}
        assert "nothing that reads it computes in low precision" in report.plan.decisions["flat"].reason


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (S.BatchNorm, Policy(exclude=["norm"])),
        (S.BatchNorm, Policy(full_ops=["BatchNorm"])),
        (S.LayerNorm, Policy("bfloat16")),
    ],
    ids=["excluded", "in full_ops", "LayerNorm in bfloat16"],
)
def test_what_follows_a_norm_in_fp32_is_fp32(kind, policy):
    norm = kind(S.FullyConnected(S.var("data"), num_hidden=4, name="first"), name="norm")
    symbol = S.FullyConnected(S.relu(norm, name="relu"), num_hidden=4, name="last")
    (report,) = mxmp.explain(symbol, policy=policy, ctx=mx.cpu()).graphs
    assert {node.name for node in report.nodes if node.dtype == "float32"} == {"norm", "relu"}


@pytest.mark.parametrize("attrs", [{}, {"use_global_stats": True}])
def test_casting_again_what_has_its_casts_inside_changes_nothing(attrs, monkeypatch):
    symbol = S.FullyConnected(norm_of(**attrs), num_hidden=2, name="dense")
    once = mxmp.cast_symbol(symbol, LOW_AROUND, ctx=mx.gpu())
    assert mxmp.cast_symbol(once, LOW_AROUND, ctx=mx.gpu()).tojson() == once.tojson()
    monkeypatch.setenv(SWITCH, "fp32_inside_the_kernel")
    apart = mxmp.cast_symbol(once, LOW_AROUND, ctx=mx.gpu())
    numbers = [len(list(Graph.from_symbol(each).nodes())) for each in (once, apart)]
    assert numbers[1] - numbers[0] == (0 if attrs else 2)
