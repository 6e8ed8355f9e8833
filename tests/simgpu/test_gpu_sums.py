"""Sums of 4,096 equal terms on the simulated GPU: of each operator the first case that computes in float16.

MXMP_SUMS=1 tries every case; ``gpu.sim.sums`` keeps what they gave.
"""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from gpu.sim import sums
from mxnet import autograd, gluon, nd
from support.results import read

import mxmp

TESTS_PER_PROCESS = 30
KNOWN = read(sums.RESULTS)
WHOLE = [each for each in sums.cases() if KNOWN[each.op][sums.name_of(each)].startswith(sums.WHOLE)]
FIRST = {each.op: each for each in reversed(WHOLE)}
TRIED = WHOLE if os.environ.get("MXMP_SUMS") else list(FIRST.values())


@pytest.mark.parametrize("each", TRIED, ids=lambda each: f"{each.op} {sums.name_of(each)}")
def test_a_sum_of_equal_terms_is_whole(each):
    assert sums.judged(each).startswith(sums.WHOLE)


@pytest.mark.parametrize("safe", ["0", "1"])
@pytest.mark.parametrize("width", [5, 200, 4096])
def test_a_softmax_of_fp32_that_returns_float16_sums_in_fp32_forward_and_backward(width, safe, monkeypatch):
    """As under a mask: half of each row is at -1e9, and the second row is under nothing else."""
    monkeypatch.setenv("MXNET_SAFE_ACCUMULATION", safe)
    rng = np.random.RandomState(0)
    x, dy = rng.randn(3, width).astype("float32"), rng.randn(3, width).astype("float16")
    x[0, width // 2 :], x[1], x[2] = -1e9, -1e9, 0
    read = nd.array(x, mx.gpu())
    read.attach_grad()
    with autograd.record():
        y = nd.softmax(read, dtype="float16")
    y.backward(nd.array(dy, mx.gpu(), dtype="float16"))
    powers = np.exp(x.astype("float64") - x.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True)
    slope = wanted * (dy - (wanted * dy).sum(1, keepdims=True))
    for found, exact in ((y, wanted), (read.grad, slope)):
        assert np.linalg.norm(found.asnumpy() - exact) <= 2.0**-9 * np.linalg.norm(exact)


def moving_average() -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv1D(4, 1, in_channels=2), gluon.nn.AvgPool1D(336, 1), gluon.nn.Conv1D(1, 1, in_channels=4))
    return net


def deformable() -> gluon.nn.HybridSequential:
    """Its offsets are of a convolution with cudnn_off."""
    net, offsets = gluon.nn.HybridSequential(), mx.init.Normal(0.1)
    net.add(gluon.nn.Conv2D(4, 1, in_channels=3), gluon.nn.Activation("sigmoid"))
    net.add(gluon.contrib.cnn.DeformableConvolution(4, (3, 3), in_channels=4, offset_weight_initializer=offsets))
    return net


@pytest.mark.parametrize(("make", "shape"), [(moving_average, (4, 2, 1008)), (deformable, (2048, 3, 3, 3))])
@pytest.mark.parametrize("frontend", ["gluon", "symbol"])
def test_a_networks_gradients_are_fp32s_to_some_roundings(make, shape, frontend):
    x = np.random.RandomState(0).rand(*shape)
    full, low = (
        _gradients(make, x, ctx, policy, frontend) for ctx, policy in ((mx.cpu(), None), (mx.gpu(0), "float16"))
    )
    for name, wanted in full.items():
        assert np.linalg.norm(low[name] - wanted) <= 2.0**-10 * np.linalg.norm(wanted), name


def _gradients(make, x, ctx, policy, frontend) -> dict[str, np.ndarray]:
    mx.random.seed(1)
    net = make()
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net(nd.array(x[:1]))  # the shapes of all parameters
    parameters = {name: p.data() for name, p in net._collect_params_with_prefix().items()}
    if frontend == "gluon":
        net.collect_params().reset_ctx([ctx])
        if policy:
            mxmp.convert(net, policy)
        net.hybridize()
        with autograd.record():
            loss = net(nd.array(x, ctx=ctx)).sum() / 8
        loss.backward()
        found = {n: p.grad(ctx) for n, p in net._collect_params_with_prefix().items()}
    else:
        names = {name: p.name for name, p in net._collect_params_with_prefix().items()}
        symbol = mx.sym.sum(net(mx.sym.Variable("data"))) / 8
        if policy:
            symbol = mxmp.cast_symbol(symbol, policy, ctx=ctx)
        executor = symbol.simple_bind(ctx, data=x.shape)
        executor.arg_dict["data"][:] = nd.array(x, ctx=ctx)
        for name, value in parameters.items():
            executor.arg_dict[names[name]][:] = value
        executor.forward(is_train=True)
        executor.backward([nd.ones(1, ctx=ctx)])
        found = {name: executor.grad_dict[names[name]] for name in parameters}
    return {name: array.astype("float32").asnumpy() for name, array in found.items()}
