"""Operators on the simulated GPU: MXNet's own kernels, against NumPy and against the CPU's kernels."""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

TESTS_PER_PROCESS = 100
GPU = mx.gpu(0)
EPS = {"float32": 2.0**-23, "float16": 2.0**-10}  # the distance of numbers at 1


def numbers(dtype: str) -> np.ndarray:
    """Of all sizes, with both zeros, subnormal numbers, the largest, infinities and NaN."""
    rng, info = np.random.RandomState(0), np.finfo(dtype)
    edges = [0, -0.0, info.max, -info.max, np.inf, -np.inf, np.nan, info.tiny, 1, -1, 0.5, 1.5, 2.5]
    edges += [float(info.tiny) / 4, float(np.nextafter(np.array(0, dtype), np.array(1, dtype)))]
    found = rng.randn(3000) * 2.0 ** rng.randint(-14, 14, 3000)
    return np.concatenate([np.array(edges), found]).astype(dtype)


ELEMENTWISE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lambda a, b: a + b, np.add),
    "subtract": (lambda a, b: a - b, np.subtract),
    "multiply": (lambda a, b: a * b, np.multiply),
    "divide": (lambda a, b: a / b, np.divide),
    "maximum": (nd.broadcast_maximum, lambda a, b: np.where(np.isnan(a) | (a > b), a, b)),
    "square": (lambda a, b: nd.square(a), lambda a, b: np.square(a)),
    "sqrt": (lambda a, b: nd.sqrt(a), lambda a, b: np.sqrt(a)),
    "relu": (lambda a, b: nd.relu(a), lambda a, b: np.where(np.isnan(a) | (a > 0), a, a.dtype.type(0))),
    "floor": (lambda a, b: nd.floor(a), lambda a, b: np.floor(a)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", EPS)
def test_elementwise_kernels_round_once_as_numpy_does(name, dtype):
    """Bit by bit, but for the sign of zero and what is in NaN."""
    ours, theirs = ELEMENTWISE[name]
    a = numbers(dtype)
    b = np.roll(a, 7)[::-1].copy()
    found = ours(*(nd.array(x, ctx=GPU, dtype=dtype) for x in (a, b))).asnumpy()
    with np.errstate(all="ignore"):
        wanted = theirs(a, b).astype(dtype)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    assert found.dtype == wanted.dtype
    assert list(zip(a[~same], b[~same], found[~same], wanted[~same])) == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_casts_round_once(dtype):
    wide = numbers("float32" if dtype == "float16" else "float16")
    found = nd.amp_cast(nd.array(wide, ctx=GPU, dtype=wide.dtype), dtype=dtype).asnumpy()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, wide.astype(dtype))


RNG = np.random.RandomState(5)
X, ROWS = RNG.randn(4, 6, 8, 8), RNG.randn(12, 40)
VOLUMES = np.random.RandomState(6).randn(2, 4, 4, 5, 6)
# Inputs, of which those with a name in PLAIN keep FP32 in float16; and the operator.
OPERATORS: dict[str, tuple[dict[str, np.ndarray], Callable[..., Any]]] = {
    "FullyConnected": (
        {"x": ROWS, "w": RNG.randn(9, 40) * 0.2, "b": RNG.randn(9)},
        lambda x, w, b: nd.FullyConnected(x, w, b, num_hidden=9),
    ),
    "Convolution": (
        {"x": X, "w": RNG.randn(5, 6, 3, 3) * 0.2, "b": RNG.randn(5)},
        lambda x, w, b: nd.Convolution(x, w, b, kernel=(3, 3), num_filter=5, pad=(1, 1), stride=(2, 2)),
    ),
    "dot": ({"a": ROWS, "b": RNG.randn(40, 7) * 0.2}, nd.dot),
    "batch_dot": (
        {"a": RNG.randn(3, 5, 16), "b": RNG.randn(3, 7, 16) * 0.3},
        lambda a, b: nd.batch_dot(a, b, transpose_b=True),
    ),
    "BatchNorm": (
        {"x": X, "gamma": RNG.rand(6) + 0.5, "beta": RNG.randn(6), "mean": np.zeros(6), "var": np.ones(6)},
        lambda x, gamma, beta, mean, var: nd.BatchNorm(x, gamma, beta, mean, var, fix_gamma=False),
    ),
    "Pooling max": ({"x": X}, lambda x: nd.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="max")),
    "Pooling avg": ({"x": X}, lambda x: nd.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")),
    "Convolution of volumes": (
        {"x": VOLUMES, "w": RNG.randn(6, 2, 2, 3, 3) * 0.2, "b": RNG.randn(6)},
        lambda x, w, b: nd.Convolution(
            x, w, b, kernel=(2, 3, 3), num_filter=6, pad=(1, 0, 1), stride=(2, 1, 2), dilate=(1, 2, 1), num_group=2
        ),
    ),
    "Deconvolution of volumes": (
        {"x": VOLUMES, "w": RNG.randn(4, 3, 2, 2, 2) * 0.2},
        lambda x, w: nd.Deconvolution(x, w, kernel=(2, 2, 2), num_filter=3, stride=(2, 2, 2)),
    ),
    "Pooling max of volumes": (
        {"x": VOLUMES},
        lambda x: nd.Pooling(x, kernel=(2, 3, 2), stride=(1, 2, 2), pad=(1, 1, 0), pool_type="max"),
    ),
    "Pooling avg of volumes": (
        {"x": VOLUMES},
        lambda x: nd.Pooling(x, kernel=(2, 3, 2), pad=(0, 1, 1), pool_type="avg", count_include_pad=False),
    ),
    "Convolution of sequences": (
        {"x": RNG.randn(4, 6, 9), "w": RNG.randn(5, 6, 3) * 0.2, "b": RNG.randn(5)},
        lambda x, w, b: nd.Convolution(x, w, b, kernel=(3,), num_filter=5, pad=(1,)),
    ),
    "relu": ({"x": ROWS}, lambda x: nd.Activation(x, act_type="relu")),
    "tanh": ({"x": ROWS}, lambda x: nd.Activation(x, act_type="tanh")),
    "softmax": ({"x": ROWS}, nd.softmax),
    "log_softmax": ({"x": ROWS}, nd.log_softmax),
    "LayerNorm": ({"x": ROWS, "gamma": RNG.rand(40) + 0.5, "beta": RNG.randn(40)}, nd.LayerNorm),
    "Embedding": (
        {"index": RNG.randint(0, 9, (4, 5)).astype(float), "w": RNG.randn(9, 16)},
        lambda index, w: nd.Embedding(index, w, input_dim=9, output_dim=16),
    ),
    "sum": ({"x": ROWS}, lambda x: nd.sum(x, axis=1)),
    "broadcast_mul": ({"a": ROWS, "b": RNG.randn(12, 1)}, nd.broadcast_mul),
    "elementwise chain": ({"a": ROWS, "b": RNG.rand(12, 40) + 1}, lambda a, b: nd.exp(-nd.abs(a)) * b + a / b),
    "transpose": ({"x": X}, lambda x: nd.transpose(x, axes=(0, 2, 3, 1))),
    "SpatialTransformer": (
        {"x": X, "theta": np.array([1, 0.2, 0.1, -0.3, 0.8, 0.2]) + RNG.randn(4, 6) * 0.1},
        lambda x, theta: nd.SpatialTransformer(
            x, theta, target_shape=(5, 7), transform_type="affine", sampler_type="bilinear"
        ),
    ),
    "BilinearSampler": ({"x": X, "grid": RNG.uniform(-1.2, 1.2, (4, 2, 5, 7))}, nd.BilinearSampler),
    "concat": ({"a": ROWS, "b": RNG.randn(12, 3)}, lambda a, b: nd.concat(a, b, dim=1)),
}
PLAIN = {"gamma", "beta", "mean", "var", "index"}
PLAIN_IN_NORMS_ONLY = {"gamma", "beta"}
NOT_DIFFERENTIATED = {"mean", "var", "index"}
# Why an operator is not compared in float16.
NOT_IN_FLOAT16 = {
    "batch_dot": "MXNet asks cuBLAS for float16 sums, which are not computed; mxmp does not (tests/nullgpu)",
    "SpatialTransformer": "float16 coordinates are a twentieth of a pixel off: mxmp's rule is FP32",
    "BilinearSampler": "float16 coordinates are a twentieth of a pixel off: mxmp's rule is FP32",
}


def computed(name: str, ctx: mx.Context, dtype: str, rounded_to: str) -> list[np.ndarray]:
    """The output and the gradients, of inputs that were rounded first."""
    inputs, operator = OPERATORS[name]
    arrays = []
    for key, value in inputs.items():
        plain = key in PLAIN and not (name == "LayerNorm" and key in PLAIN_IN_NORMS_ONLY)
        rounded = value.astype("float32" if plain else rounded_to)
        arrays.append(nd.array(rounded, ctx=ctx, dtype="float32" if plain else dtype))
    trained = [array for key, array in zip(inputs, arrays) if key not in NOT_DIFFERENTIATED]
    for array in trained:
        array.attach_grad()
    with autograd.record():
        y = operator(*arrays)
    y.backward(nd.array(np.random.RandomState(7).randn(*y.shape).astype("float16"), ctx=ctx, dtype=y.dtype))
    return [array.astype("float32").asnumpy() for array in (y, *(each.grad for each in trained))]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", EPS)
def test_operators_and_their_gradients_are_the_cpus(name, dtype):
    """Of the largest number of each array: some roundings of the dtype from the CPU's FP32 on the same inputs."""
    if dtype == "float16" and name in NOT_IN_FLOAT16:
        pytest.skip(NOT_IN_FLOAT16[name])
    roundings = {"float32": 20, "float16": 2}[dtype]
    wanted = computed(name, mx.cpu(), "float32", dtype)
    found = computed(name, GPU, dtype, dtype)
    errors = [float(np.abs(f - w).max() / np.abs(w).max()) for f, w in zip(found, wanted)]
    assert max(errors) <= roundings * EPS[dtype], errors


def test_a_reduction_compensates_its_float16_sums_and_an_embeddings_gradient_does_not():
    ones = nd.ones((2, 3000), ctx=GPU, dtype="float16")
    assert nd.sum(ones, axis=1).asnumpy().tolist() == [3000, 3000]
    table = nd.ones((2, 4), ctx=GPU, dtype="float16")
    table.attach_grad()
    with autograd.record():
        rows = nd.Embedding(nd.zeros((3000,), ctx=GPU), table, input_dim=2, output_dim=4)
    rows.backward()
    assert table.grad.asnumpy().tolist() == [[2048] * 4, [0] * 4]
