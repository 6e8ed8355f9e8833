"""Where float16 on a GPU is not what mxmp emulates on a CPU. Each case says what either gives, and why.

The reason is in MXNet's kernels, whose machine code computes here, but for the products of cuBLAS and cuDNN: of those
only that the output is float16 counts. A case that fails says that the list in README.md beside this file has changed.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import mxmp

TESTS_PER_PROCESS = 1  # fusion is a setting of the process
CPU, GPU = mx.cpu(), mx.gpu(0)
H = np.float16


def bound(symbol: mx.sym.Symbol, ctx: mx.Context, low: str | None, **inputs: Any) -> Any:
    policy = mxmp.Policy("float16", low_ops=[low]) if low else "float16"
    executor = mxmp.cast_symbol(symbol, policy, ctx=ctx).simple_bind(ctx, **{k: np.shape(v) for k, v in inputs.items()})
    for name, value in inputs.items():
        executor.arg_dict[name][:] = mx.nd.array(value, ctx=ctx)
    return executor


def output(symbol: mx.sym.Symbol, ctx: mx.Context, low: str | None = None, **inputs: Any) -> np.ndarray:
    return bound(symbol, ctx, low, **inputs).forward(is_train=True)[0].astype("float32").asnumpy().ravel()


def gradient(symbol: mx.sym.Symbol, ctx: mx.Context, of: str, head: Any, low: str, **inputs: Any) -> np.ndarray:
    executor = bound(symbol, ctx, low, **inputs)
    (y,) = executor.forward(is_train=True)
    executor.backward([mx.nd.array(head, ctx=ctx, dtype=y.dtype)])
    return executor.grad_dict[of].astype("float32").asnumpy().ravel()


def variables(*names: str) -> list[mx.sym.Symbol]:
    return [mx.sym.Variable(name) for name in names]


@pytest.mark.parametrize(
    ("products", "bias", "emulated", "on_a_gpu"),
    [([2048, 1], -2048, 1.0, 0.0), ([40000, 40000], -60000, 20000.0, np.inf)],
)
@pytest.mark.parametrize("kind", ["FullyConnected", "Convolution"])
def test_a_bias_is_added_to_a_rounded_product(kind, products, bias, emulated, on_a_gpu):
    """The product is written in float16, and a second kernel adds the bias."""
    x = np.array(products, "float32").reshape((1, 2) if kind == "FullyConnected" else (1, 2, 1, 1))
    options = {"num_hidden": 1} if kind == "FullyConnected" else {"num_filter": 1, "kernel": (1, 1)}
    symbol = getattr(mx.sym, kind)(*variables("x", "w", "b"), **options)
    inputs = {"x": x, "w": np.ones_like(x), "b": [bias]}
    assert output(symbol, CPU, **inputs).tolist() == [emulated]
    assert output(symbol, GPU, **inputs).tolist() == [on_a_gpu]


SATURATING = np.array([1, 3, 4, 5, 6], "float32")


def test_the_gradient_of_tanh_is_that_of_its_rounded_output():
    """1 - y * y of the float16 y: 0 where tanh is 1 in float16. The emulation keeps FP32's y."""
    symbol, ones = mx.sym.tanh(mx.sym.Variable("x")), np.ones(5, "float32")
    y = np.tanh(SATURATING).astype(H).astype("float32")
    found = gradient(symbol, GPU, "x", ones, "tanh", x=SATURATING)
    np.testing.assert_array_equal(found, (1 - y * y).astype(H).astype("float32"))
    assert found[3] == 0
    emulated = gradient(symbol, CPU, "x", ones, "tanh", x=SATURATING)
    np.testing.assert_allclose(emulated, 1 / np.cosh(SATURATING) ** 2, rtol=2**-10)


def test_the_gradient_of_sigmoid_is_that_of_its_rounded_output():
    symbol, ones = mx.sym.sigmoid(mx.sym.Variable("x")), np.ones(5, "float32")
    y = (1 / (1 + np.exp(-SATURATING))).astype(H).astype("float32")
    found = gradient(symbol, GPU, "x", ones, "sigmoid", x=SATURATING)
    np.testing.assert_array_equal(found, (y * (1 - y)).astype(H).astype("float32"))
    emulated = gradient(symbol, CPU, "x", ones, "sigmoid", x=SATURATING)
    exact = np.exp(-SATURATING) / (1 + np.exp(-SATURATING)) ** 2
    np.testing.assert_allclose(emulated, exact, rtol=2**-10)
    assert abs(found[4] / exact[4] - 1) > 0.01


WIDE = np.array([2049, 70000, 3], "float32")
ROUNDED = [2048.0, np.inf, 3.0]


def test_operators_that_fusion_joins_do_not_round_between(fusion):
    """A cast to float16, abs and a cast to FP32 are one kernel, which computes in FP32."""
    symbol = mx.sym.abs(mx.sym.Variable("x"))
    assert output(symbol, CPU, "abs", x=WIDE).tolist() == ROUNDED
    assert output(symbol, GPU, "abs", x=WIDE).tolist() == WIDE.tolist()


def test_without_fusion_they_round_as_the_emulation_does():
    symbol = mx.sym.abs(mx.sym.Variable("x"))
    assert output(symbol, GPU, "abs", x=WIDE).tolist() == ROUNDED


@pytest.mark.parametrize(
    ("make", "operator", "x", "emulated", "on_a_gpu"),
    [
        (lambda x: 1.1 - x, "_rminus_scalar", 1, H(1.1 - 1), H(1.1) - H(1)),
        (lambda x: x * 0.3, "_mul_scalar", 1002, H(0.3 * 1002), H(0.3) * H(1002)),
    ],
)
def test_a_constant_is_float16_where_no_fusion_joins_its_operator(make, operator, x, emulated, on_a_gpu):
    symbol, values = make(mx.sym.Variable("x")), np.full((1, 8), x, "float32")
    assert output(symbol, CPU, operator, x=values)[0] == emulated
    assert output(symbol, GPU, operator, x=values)[0] == on_a_gpu
    assert emulated != on_a_gpu


def test_the_gradient_of_a_broadcast_input_is_summed_in_float16():
    """reduce_kernel<half, half, half>: 3,000 terms, compensated within a thread, rounded at each of its levels."""
    heads = np.random.RandomState(0).randn(3000, 50).astype(H).astype("float32")
    symbol = mx.sym.broadcast_add(*variables("x", "w"))
    inputs = {"x": np.zeros((3000, 50)), "w": np.zeros((1, 50))}
    exact = heads.astype("float64").sum(0)
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 10)
    errors = {}
    for ctx in (CPU, GPU):
        found = gradient(symbol, ctx, "w", heads, "broadcast_add", **inputs)
        errors[ctx.device_type] = float((np.abs(found - exact) / unit).max())
    assert errors["cpu"] <= 0.5 + 1e-3  # one rounding
    assert 2 < errors["gpu"] < 1000


def test_pad_at_the_edge_adds_its_gradients_in_float16():
    """Each corner is read 61 * 61 times: ones are added until 2048 + 1 is 2048."""
    symbol = mx.sym.Pad(mx.sym.Variable("x"), mode="edge", pad_width=(0, 0, 0, 0, 60, 60, 60, 60))
    heads, x = np.ones((1, 1, 122, 122), "float32"), np.ones((1, 1, 2, 2), "float32")
    assert gradient(symbol, CPU, "x", heads, "Pad", x=x).tolist() == [float(H(61 * 61))] * 4
    assert gradient(symbol, GPU, "x", heads, "Pad", x=x).tolist() == [2048.0] * 4
