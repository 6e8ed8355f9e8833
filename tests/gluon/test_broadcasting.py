"""Operators of two Symbols broadcast where those of arrays do, in converted nets, for the shapes of each call."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.takes import Takes
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

X = mx.nd.array(np.random.RandomState(0).uniform(0.5, 1.5, (4, 3)))

pytestmark = pytest.mark.filterwarnings("ignore:nothing in .* computes in")
OPERATORS = {
    "centred": lambda block, op, x: x - op.mean(x, axis=1, keepdims=True),
    "scaled by a sum": lambda block, op, x: x / x.sum() + x * x.max(axis=0, keepdims=True),
    "power and modulo": lambda block, op, x: (x**2) ** x.mean(axis=0, keepdims=True) + x % x.min(axis=1, keepdims=True),
    "compared": lambda block, op, x: x * (x >= x.mean(axis=1, keepdims=True)) * (x < x.max()) + (x == x.max()),
    "functions": lambda block, op, x: op.maximum(x, x.mean()) + op.minimum(x, x.mean(axis=0, keepdims=True)),
    "of both": lambda block, op, x: x.sum(axis=1, keepdims=True) * x.sum(axis=0, keepdims=True),
    "in a loop": lambda block, op, x: op.contrib.foreach(
        lambda row, state: (row - op.max(row), state), x, op.zeros((1,))
    )[0],
    "asked for its shape": lambda block, op, x: (x - x.mean(axis=1, keepdims=True)) / (x - x.max()).shape[0],
    "behind others": lambda block, op, x: (x + x) * (x - x.mean(axis=1, keepdims=True)) - (x * x).sum(),
}


def pair(compute, dtype, in_units=3):
    nets = []
    for how in (None, dtype):
        net = Takes(compute)
        net.dense = nn.Dense(3, in_units=in_units, prefix=net.prefix + "d_")
        mx.random.seed(3)
        net.initialize(mx.init.Xavier())
        nets.append(mxmp.convert(net, how) if how else net)
    return nets


def assert_alike(nets, x):
    found = []
    for net in nets:
        mx.random.seed(3)  # of weights that wait for their shape
        with autograd.record():
            out = net(x)
        out.backward()
        found.append((out.asnumpy(), net.dense.weight.grad().astype("float32").asnumpy()))
    for low, full in zip(found[1], found[0]):
        np.testing.assert_allclose(low, full, rtol=0.05, atol=0.03 * max(1, abs(full).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("in_units", [0, 3])
@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_of_symbols_broadcast_as_those_of_arrays(kind, in_units, dtype):
    nets = pair(lambda block, op, x: OPERATORS[kind](block, op, op.sigmoid(x) + 0.5), dtype, in_units)
    assert_alike(nets, X)


OF_SCALARS = {
    "a scalar": lambda op, x, s: x * s + (x > s) - s,
    "a scalar first": lambda op, x, s: s / x,
    "in a loop": lambda op, x, s: op.contrib.foreach(lambda row, state: (row * state, state + 1), x, s)[0],
}


@mx.util.use_np
@pytest.mark.parametrize("kind", OF_SCALARS)
def test_scalars_of_the_numpy_interface_broadcast_in_operators_of_the_other(kind):
    def compute(block, op, x):
        return OF_SCALARS[kind](op, x.as_nd_ndarray(), x.mean().as_nd_ndarray()).as_np_ndarray()

    assert_alike(pair(compute, "bfloat16"), X.as_np_ndarray())


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
def test_shapes_that_do_not_differ_at_first_may_differ_later(flags):
    nets = pair(lambda block, op, x: x * x.mean(axis=0, keepdims=True), "bfloat16")
    nets[1].hybridize(**flags)
    for rows in (1, 4, 1, 3):
        assert_alike(nets, X[:rows])


def test_shapes_that_arrays_do_not_broadcast_either_are_refused_by_mxnet():
    net = pair(lambda block, op, x: x + op.zeros((2, 2)), "bfloat16")[1]
    with pytest.raises(mx.MXNetError, match=r"Incompatible attr.*expected \[4,3\], got \[2,2\]"):
        net(X)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
def test_operators_of_equal_shapes_stay_as_they_are_and_others_are_exported(tmp_path):
    net = pair(lambda block, op, x: x * x + (x - x.mean(axis=1, keepdims=True)), "bfloat16")[1]
    want = net(X).asnumpy()
    net.export(str(tmp_path / "net"))
    symbol = mx.sym.load(str(tmp_path / "net-symbol.json"))
    operators = [name for name in symbol.tojson().split('"') if name.startswith(("elemwise_", "broadcast_"))]
    assert operators == ["elemwise_mul", "broadcast_sub", "elemwise_add"]
    loaded = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    np.testing.assert_allclose(loaded(X).asnumpy(), want, rtol=0.03, atol=0.03)
    plan = mxmp.tune(pair(lambda block, op, x: x - x.mean(axis=1, keepdims=True), "bfloat16")[0], X, measure=False)
    assert "broadcast_sub" in {each.op for each in plan.decisions.values()}
