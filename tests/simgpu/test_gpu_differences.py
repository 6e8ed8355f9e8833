"""Where float16 arithmetic of a GPU is special: what its machine code gives, and what mxmp emulates on a CPU.

The reasons are in MXNet's kernels, whose machine code computes here, but for the products of cuBLAS and cuDNN: of those
only that the output is float16 counts. README.md beside this file lists what is not emulated.
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
    ("products", "bias", "expected"), [([2048, 1], -2048, 0.0), ([40000, 40000], -60000, np.inf), ([1, 2], 3, 6.0)]
)
@pytest.mark.parametrize("kind", ["FullyConnected", "Convolution"])
def test_a_bias_is_added_to_a_rounded_product(kind, products, bias, expected):
    """The product is written in float16, and a second kernel adds the bias."""
    x = np.array(products, "float32").reshape((1, 2) if kind == "FullyConnected" else (1, 2, 1, 1))
    options = {"num_hidden": 1} if kind == "FullyConnected" else {"num_filter": 1, "kernel": (1, 1)}
    symbol = getattr(mx.sym, kind)(*variables("x", "w", "b"), **options)
    inputs = {"x": x, "w": np.ones_like(x), "b": [bias]}
    assert output(symbol, CPU, **inputs).tolist() == output(symbol, GPU, **inputs).tolist() == [expected]


SATURATING = np.array([1, 3, 4, 5, 6], "float32")


@pytest.mark.parametrize("act", ["tanh", "sigmoid"])
@pytest.mark.parametrize("kind", ["operator", "Activation"])
def test_the_gradients_of_tanh_and_sigmoid_are_those_of_their_rounded_outputs(act, kind):
    """1 - y * y of the float16 y: 0 where tanh is 1 in float16. cuDNN's Activation rounds its gradient once."""
    x = mx.sym.Variable("x")
    symbol = getattr(mx.sym, act)(x) if kind == "operator" else mx.sym.Activation(x, act_type=act)
    low, ones = act if kind == "operator" else "Activation", np.ones(5, "float32")
    y = np.tanh(SATURATING) if act == "tanh" else 1 / (1 + np.exp(-SATURATING))
    y = y.astype(H).astype("float32")
    exact = 1 - y * y if act == "tanh" else y * (1 - y)
    for ctx in (CPU, GPU):
        found = gradient(symbol, ctx, "x", ones, low, x=SATURATING)
        np.testing.assert_allclose(found, exact, rtol=2**-11)
        assert found[3] == 0 or act == "sigmoid"


@pytest.mark.parametrize("operator", ["softsign", "sigmoid"])
def test_a_pointwise_gradient_is_rounded_twice_on_a_gpu_and_once_in_the_emulation(operator):
    """MXNet's kernel rounds the slope, then its product with the gradient."""
    x, heads = np.random.RandomState(0).randn(2, 400).astype(H).astype("float32")
    y = (1 / (1 + np.exp(-x.astype("float64")))).astype(H).astype("float64")
    slope = y * (1 - y) if operator == "sigmoid" else 1 / (1 + np.abs(x.astype("float64"))) ** 2
    once, twice = (slope * heads).astype(H), (slope.astype(H).astype("float32") * heads).astype(H)
    symbol = getattr(mx.sym, operator)(mx.sym.Variable("x"))
    assert (once != twice).sum() > 50
    np.testing.assert_array_equal(gradient(symbol, CPU, "x", heads, operator, x=x), once)
    np.testing.assert_array_equal(gradient(symbol, GPU, "x", heads, operator, x=x), twice)


def test_a_hard_sigmoid_has_fp32_constants_and_on_a_gpu_rounds_its_product_and_its_slope():
    """Every number. Rounded constants would give the emulation a slope at 2.5 and -2.5."""
    x = np.arange(1 << 16, dtype="uint16").view(H)
    x = x[np.isfinite(x)].astype("float32")
    heads = np.random.RandomState(0).randn(len(x)).astype(H).astype("float32")
    symbol, alpha = mx.sym.hard_sigmoid(mx.sym.Variable("x")), np.float32(0.2)
    with np.errstate(over="ignore"):
        once, twice = (alpha * x + H(0.5)).astype(H), ((alpha * x).astype(H) + H(0.5)).astype(H)
    np.testing.assert_array_equal(output(symbol, CPU, "hard_sigmoid", x=x), np.clip(once, 0, 1))
    np.testing.assert_array_equal(output(symbol, GPU, "hard_sigmoid", x=x), np.clip(twice, 0, 1))
    for ctx, slope in ((CPU, alpha), (GPU, np.float32(H(alpha)))):
        slopes = np.where(np.abs(x) < 2.5, slope * heads, 0).astype(H)
        np.testing.assert_array_equal(gradient(symbol, ctx, "x", heads, "hard_sigmoid", x=x), slopes)


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
    ("make", "operator", "x", "expected"),
    [
        (lambda x: 1.1 - x, "_rminus_scalar", 1, H(1.1) - H(1)),
        (lambda x: x * 0.3, "_mul_scalar", 1002, H(0.3) * H(1002)),
        (lambda x: mx.sym.LeakyReLU(x, slope=0.1), "LeakyReLU", -10, H(0.1) * H(-10)),
    ],
)
def test_a_constant_is_float16(make, operator, x, expected):
    symbol, values = make(mx.sym.Variable("x")), np.full((1, 8), x, "float32")
    assert output(symbol, CPU, operator, x=values)[0] == output(symbol, GPU, operator, x=values)[0] == expected


@pytest.mark.parametrize("operator", ["broadcast_add", "broadcast_mul"])
@pytest.mark.parametrize("rows", [64, 3000, 30000])
def test_the_gradient_of_a_broadcast_input_is_about_as_good_as_one_rounding(operator, rows):
    """reduce_kernel<half, half, half> compensates: an error below 2 units in the last place of the largest sum."""
    rng = np.random.RandomState(0)
    heads, x = (rng.randn(rows, 16).astype(H).astype("float32") for _ in range(2))
    symbol = getattr(mx.sym, operator)(*variables("x", "w"))
    exact = (heads.astype("float64") * (x if operator == "broadcast_mul" else 1)).sum(0)
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact).max())) - 10)
    errors = {}
    for ctx in (CPU, GPU):
        found = gradient(symbol, ctx, "w", heads, operator, x=x, w=np.ones((1, 16)))
        errors[ctx.device_type] = float(np.abs(found - exact).max() / unit)
    assert errors["cpu"] <= 0.5 + 1e-3
    assert errors["gpu"] < 2, errors


def test_the_terms_of_a_broadcast_gradient_may_underflow_on_a_gpu_alone():
    heads, x = np.full((4096, 8), 2.0**-13, "float32"), np.full((4096, 8), 2.0**-13, "float32")
    symbol = mx.sym.broadcast_mul(*variables("x", "w"))
    inputs = {"x": x, "w": np.ones((1, 8), "float32")}
    assert gradient(symbol, CPU, "w", heads, "broadcast_mul", **inputs).tolist() == [2.0**-14] * 8
    assert gradient(symbol, GPU, "w", heads, "broadcast_mul", **inputs).tolist() == [0] * 8


def test_pad_at_the_edge_stays_in_fp32():
    """Each corner is read 61 * 61 times. In float16 a GPU adds ones until 2048 + 1 is 2048."""
    product = mx.sym.Convolution(*variables("x", "w"), kernel=(1, 1), num_filter=1, no_bias=True)
    symbol = mx.sym.Pad(product, mode="edge", pad_width=(0, 0, 0, 0, 60, 60, 60, 60))
    heads, inputs = np.ones((1, 1, 122, 122)), {"x": np.ones((1, 1, 2, 2)), "w": np.ones((1, 1, 1, 1))}
    with pytest.warns(UserWarning, match="change nothing: low_ops=Pad"):
        of_mxmp = [gradient(symbol, ctx, "x", heads, "Pad", **inputs).tolist() for ctx in (CPU, GPU)]
    assert of_mxmp == [[float(H(61 * 61))] * 4] * 2
    low = mx.nd.ones((1, 1, 2, 2), ctx=GPU, dtype="float16")
    low.attach_grad()
    with mx.autograd.record():
        y = mx.nd.Pad(low, mode="edge", pad_width=(0, 0, 0, 0, 60, 60, 60, 60))
    y.backward()
    assert low.grad.asnumpy().ravel().tolist() == [2048.0] * 4
