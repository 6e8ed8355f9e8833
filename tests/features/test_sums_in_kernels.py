"""What MXNet's own float16 kernels that sum in FP32 compute, against the emulation: softmax, LayerNorm, BatchNorm.

Softmax and LayerNorm do so with MXNET_SAFE_ACCUMULATION; BatchNorm is MXNet's own where cuDNN does not compute it. The
kernels are written here in NumPy, with each rounding that the type ``half_t`` makes in MXNet 1.9.1
(``src/operator/nn/softmax-inl.h``, ``layer_norm.cu``, ``batch_norm.cu``; ``half_t`` computes in FP32 and rounds,
mshadow/half.h). They round more often than the emulation, which rounds once: a softmax also rounds the difference to
the maximum and, in the backward, the terms of its sum; LayerNorm rounds the normalized value, its product with gamma,
and the mean and standard deviation that the backward reads; BatchNorm rounds gamma, beta, the mean, epsilon and the
terms of gamma's gradient. All are errors of about one float16 rounding; sums are FP32.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest
from kit.oracle import Result, S, assert_same_bits, by_symbol, half, sqnr

import mxmp
from mxmp import Policy
from mxmp.precision.safe_sums import VARIABLE

AROUND = Policy(low_ops=["_copy"], params="float32", norm="compute")
# In dB: an error of 1e-3. The kernels' own roundings are below it, and float16 sums of a few hundred terms above.
FLOOR = 60


def fp32(values: np.ndarray) -> np.ndarray:
    return values.sum(-1, keepdims=True, dtype="float32")


def fp16(values: np.ndarray) -> np.ndarray:
    """As the kernels sum without the variable, but for the order."""
    total = np.zeros(values.shape[:-1], "float32")
    for i in range(values.shape[-1]):
        total = half(total + values[..., i])
    return total[..., None]


def softmax(x: np.ndarray, dy: np.ndarray, total: Callable = fp32) -> Result:
    powers = np.exp(half(x - x.max(-1, keepdims=True)))
    y = half(powers / total(powers))
    dx = half(y * half(dy - total(half(dy * y))))
    return Result([y], {"data": dx})


def layer_norm(
    x: np.ndarray, dy: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float, total: Callable = fp32
) -> Result:
    gamma, beta, n = half(gamma), half(beta), x.shape[-1]
    mean = total(x) / n
    std = np.sqrt(total((x - mean) ** 2) / n + np.float32(eps))
    y = half(half(gamma * half((x - mean) / std)) + beta)
    mean, std = half(mean), half(std)
    normal, scaled = (x - mean) / std, dy * gamma / std
    dx = half(scaled - total(scaled) / n - normal * total(scaled * normal) / n)
    rows = {"norm_gamma": dy * normal, "norm_beta": dy}
    return Result([y], {"data": dx, **{name: half(total(value.T)[:, 0]) for name, value in rows.items()}})


def batch_norm(x: np.ndarray, dy: np.ndarray, params: dict[str, np.ndarray], eps: float, frozen: bool) -> Result:
    """The kernels of ``use_global_stats`` (``frozen``) and ``cudnn_off``, of arrays (batch, channels)."""
    gamma, beta = half(params["norm_gamma"]), half(params["norm_beta"])
    if frozen:
        mean, inverse = half(params["norm_moving_mean"]), 1 / np.sqrt(params["norm_moving_var"] + half(np.float32(eps)))
    else:
        mean, inverse = x.mean(0), 1 / np.sqrt(x.var(0) + np.float32(eps))
    y = half(gamma * (x - mean) * inverse + beta)
    mean = half(mean)
    dot, total = half(dy * half(x - mean)).sum(0), dy.sum(0)
    dx = dy if frozen else dy - (x - mean) * dot / len(x) * inverse**2 - total / len(x)
    grads = {"data": dx * gamma * inverse, "norm_gamma": dot * inverse, "norm_beta": total}
    return Result([y], {name: half(grad) for name, grad in grads.items()})


def emulated(inner: str, values: dict[str, np.ndarray], dy: np.ndarray, **attrs) -> Result:
    graph = S.identity(getattr(S, inner)(S.identity(S.var("data")), name="norm", **attrs), name="out")
    return by_symbol(mxmp.cast_symbol(graph, AROUND), values, heads=[dy])


def draw(seed: int, rows: int, width: int, scale: float, mean: float = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    return half(rng.normal(mean, scale, (rows, width))), half(rng.normal(0, 1, (rows, width)))


@pytest.fixture
def safe(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("width", [128, 512])
def test_softmax_is_as_the_emulation_shows_it(width, scale, safe):
    x, dy = draw(1, 64, width, scale)
    shown, kernel, wrong = emulated("softmax", {"data": x}, dy), softmax(x, dy), softmax(x, dy, fp16)
    assert sqnr(shown.outputs[0], kernel.outputs[0]) > FLOOR > sqnr(shown.outputs[0], wrong.outputs[0])
    assert sqnr(shown.grads["data"], kernel.grads["data"]) > FLOOR


@pytest.mark.parametrize("mean", [0, 2])
def test_layer_norm_is_as_the_emulation_shows_it(mean, safe):
    x, dy = draw(2, 256, 768, 1, mean)
    rng = np.random.RandomState(3)
    gamma, beta = rng.normal(1, 0.2, 768).astype("float32"), rng.normal(0, 0.2, 768).astype("float32")
    shown = emulated("LayerNorm", {"data": x, "norm_gamma": gamma, "norm_beta": beta}, dy, eps=1e-5)
    kernel, wrong = (layer_norm(x, dy, gamma, beta, 1e-5, total) for total in (fp32, fp16))
    assert sqnr(shown.outputs[0], kernel.outputs[0]) > FLOOR
    for name in shown.grads:
        assert sqnr(shown.grads[name], kernel.grads[name]) > FLOOR, name
    assert min(sqnr(shown.grads[name], wrong.grads[name]) for name in shown.grads) < FLOOR


# With a mean of 8 standard deviations, the rounding of the data to float16 alone leaves 53 dB; the mean's adds to it.
@pytest.mark.parametrize(("mean", "floor"), [(0, FLOOR), (2, FLOOR), (8, 50)])
@pytest.mark.parametrize("attrs", [{"use_global_stats": True}, {"cudnn_off": True}], ids=str)
def test_batch_norm_without_cudnn_is_as_the_emulation_shows_it(mean, floor, attrs):
    x, dy = draw(9, 1024, 64, 1, mean)
    rng = np.random.RandomState(10)
    values = {"norm_gamma": rng.normal(1, 0.2, 64), "norm_beta": rng.normal(0, 0.2, 64)}
    values |= {"norm_moving_mean": mean + rng.normal(0, 0.2, 64), "norm_moving_var": rng.uniform(0.5, 2, 64)}
    values = {name: value.astype("float32") for name, value in values.items()}
    shown = emulated("BatchNorm", {"data": x, **values}, dy, eps=1e-5, fix_gamma=False, **attrs)
    kernel = batch_norm(x, dy, values, 1e-5, frozen="use_global_stats" in attrs)
    assert sqnr(shown.outputs[0], kernel.outputs[0]) > floor
    for name in kernel.grads:
        assert sqnr(shown.grads[name], kernel.grads[name]) > floor, name


def error(value: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def test_the_kernels_err_by_no_more_than_a_few_roundings():
    """What docs/choosing-a-dtype.md says of them; FP64 is exact here, and is rounded to gamma's dtype and float16."""

    def total(values: np.ndarray) -> np.ndarray:
        return values.sum(-1, keepdims=True, dtype="float64")

    for scale in (1, 4, 10):
        x, dy = draw(6, 256, 128, scale)
        powers = np.exp(x.astype("float64") - x.max(-1, keepdims=True))
        y = powers / total(powers)
        dx, kernel = y * (dy - total(dy * y)), softmax(x, dy)
        assert error(kernel.outputs[0], y) < 2 * error(half(y), y)
        assert error(kernel.grads["data"], dx) < 5 * error(half(dx), dx)
    for mean in (0, 1):
        x, dy = draw(7, 1024, 768, 1, mean)
        gamma, beta = np.random.RandomState(8).normal(1, 0.2, (2, 768))
        normal = (x - x.mean(-1, keepdims=True, dtype="float64")) / x.std(-1, keepdims=True, dtype="float64")
        scaled = dy * gamma / x.std(-1, keepdims=True, dtype="float64")
        want = {
            "data": scaled - total(scaled) / 768 - normal * total(scaled * normal) / 768,
            "norm_gamma": (dy * normal).sum(0),
            "norm_beta": dy.sum(0, dtype="float64"),
        }
        kernel = layer_norm(x, dy, gamma.astype("float32"), beta.astype("float32"), 1e-12)
        y = gamma * normal + beta
        assert error(kernel.outputs[0], y) < 3 * error(half(y), y)
        for name, exact in want.items():
            assert error(kernel.grads[name], exact) < 3 * error(half(exact), exact), name


def test_the_emulation_changes_no_bit_but_by_gamma_and_beta_in_float16(monkeypatch):
    """Where float16 holds gamma and beta, the casts that the kernel makes needless give the same."""
    x, dy = draw(4, 16, 32, 1)
    rng = np.random.RandomState(5)
    values = {"data": x, **{name: half(rng.normal(1, 0.2, 32)) for name in ("norm_gamma", "norm_beta")}}
    before = emulated("LayerNorm", values, dy), emulated("softmax", {"data": x}, dy)
    monkeypatch.setenv(VARIABLE, "1")
    after = emulated("LayerNorm", values, dy), emulated("softmax", {"data": x}, dy)
    for one, other in zip(after, before):
        rounded = {n: half(g) if n.startswith("norm") else g for n, g in other.grads.items()}
        assert_same_bits(one, Result(other.outputs, rounded))
