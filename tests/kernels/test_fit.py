"""The graph for a device: native where MXNet has kernels, bfloat16 on a CPU."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit.examples import examples
from kit.graphs import graphs, small
from kit.oracle import S, agree, by_gluon, by_symbol, filled, native, sqnr
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.pipeline import emitted
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.missing_kernels import missing_kernel
from mxmp.precision.plan import PlannedGraph


def test_the_context_of_the_moment_is_the_default():
    symbol = small()
    with mx.gpu():
        assert mxmp.cast_symbol(symbol, "params=float32").tojson() == native(symbol).tojson()


@pytest.mark.parametrize("ctx", ["cuda", 0])
def test_what_is_no_context_is_refused(ctx):
    with pytest.raises(TypeError, match=rf"expected an mxnet Context, such as mx.cpu\(\) or mx.gpu\(0\), got {ctx!r}"):
        mxmp.cast_symbol(small(), ctx=ctx)
    with pytest.raises(TypeError, match=rf"expected an mxnet Context, such as mx.cpu\(\) or mx.gpu\(0\), got {ctx!r}"):
        mxmp.tune(small(), data=(2, 3, 8, 8), measure=False, ctx=ctx)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_bfloat16_is_low_only_where_no_kernel_is_missing(drawn):
    graph = Graph.from_symbol(drawn[0])
    planned = PlannedGraph(graph, decide(graph, Policy("bfloat16", norm="compute"), "cpu"))
    for node, decision in planned.decisions.items():
        assert not decision.low or not missing_kernel(node.op, node.attrs, "bfloat16", "cpu")


def test_bfloat16_runs_grouped_convolutions_after_inference_in_fp32():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, 3, padding=1, groups=4, in_channels=32), nn.Conv2D(32, 3, groups=32, in_channels=32))
    net.add(nn.Conv2D(32, 3, 2, 1, groups=4, in_channels=32), nn.Conv2D(32, 5, 1, 2, groups=32, in_channels=32))
    net.initialize()
    net.hybridize()
    x = np.random.normal(0, 1, (2, 32, 12, 12)).astype("float32")
    want = by_gluon(net, [x], train=False).outputs[0]
    mxmp.convert(net, "bfloat16")
    got = by_gluon(net, [x], train=False).outputs[0]
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()
    assert np.isfinite(by_gluon(net, [x]).outputs[0]).all()


@pytest.mark.parametrize("times", [5, 1000])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_bfloat16_sums_the_gradients_of_a_shared_weight_in_fp32(times, request_):
    """As in an unrolled recurrent network. In bfloat16 the sum would stop at 256."""
    parts, w = S.split(S.var("data"), times, axis=0), S.var("w")
    steps = [S.FullyConnected(parts[i], w, num_hidden=1, no_bias=True) for i in range(times)]
    asked = {"w": request_}
    full = Graph.from_symbol(S.concat(*steps, dim=0))
    graph = emitted(full, decide(full, Policy("bfloat16"), "cpu"), asked).graph
    ones = np.ones((times, 1), "float32")
    got = by_symbol(graph.to_symbol(), {"data": ones, "w": np.ones((1, 1), "float32")}, grads_of=["w"], heads=[ones])
    assert got.grads["w"] == times


@pytest.mark.parametrize("readers", [3, 8, 9, 20])
@pytest.mark.parametrize("produced", ["float32", "bfloat16"])
def test_bfloat16_loses_no_gradient_of_a_tensor_that_many_read(readers, produced):
    """MXNet adds from eight gradients on in place, and the backward of a cast ignores that."""
    x = S.FullyConnected(S.var("data"), num_hidden=4, no_bias=True, name="x")
    x = S.exp(x) if produced == "float32" else x
    full = [S.square(x * (i + 1)) for i in range(readers)]
    low = [S.FullyConnected(x, S.var(f"w{i}"), num_hidden=4, no_bias=True) for i in range(readers)]
    for order in (full + low[:1], low[:1] + full, low + full[:1], full[:1] + low, full + low):
        symbol = S.concat(*order, dim=1)
        values = {name: 0.5 * value for name, value in filled(symbol, data=(3, 5)).items()}
        want = by_symbol(symbol, values).grads["x_weight"]
        assert sqnr(want, by_symbol(mxmp.cast_symbol(symbol, "bfloat16"), values).grads["x_weight"]) > 24


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 3)])
@pytest.mark.parametrize("number", [1, 4])
def test_the_slopes_of_a_prelu_have_their_gradient(number, shape, policy):
    """In MXNet's own graph they have a quarter of it, where all are 0.25."""
    x = S.broadcast_mul(S.var("data"), S.var("w"), name="x")
    y = S.LeakyReLU(x, S.var("slopes", shape=(number,)), act_type="prelu", name="y")
    symbol = S.FullyConnected(S.tanh(y), num_hidden=2, no_bias=True, name="fc")
    values = {**filled(symbol, data=shape, w=shape), "slopes": np.full(number, 0.25, "float32")}
    found = by_symbol(mxmp.cast_symbol(symbol, policy), values)
    slopes = S.reshape(S.var("slopes"), (1, -1, 1, 1)[: len(shape)])
    alike = S.maximum(x, 0) + S.broadcast_mul(S.minimum(x, 0), slopes)
    want = by_symbol(S.FullyConnected(S.tanh(alike), num_hidden=2, no_bias=True, name="fc"), values)
    agree(found, want, 24 if policy == "bfloat16" else 45)


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float16,exclude=sums", "bfloat16,exclude=sums"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_with_a_variable_to_whose_gradient_backwards_add(bias, policy):
    """MXNet itself gives ``u`` the gradient of two backwards in the second; it is FP32's of one here."""
    weight = S.var("w") + S.tanh(S.var("u"))
    x = S.FullyConnected(S.var("data"), weight, num_hidden=16, no_bias=not bias, name="sums")
    symbol = S.FullyConnected(x, num_hidden=3, name="fc")
    values = filled(symbol, data=(3, 8), w=(16, 8), u=(16, 8))
    want = by_symbol(symbol, values, heads=[np.ones((3, 3), "float32")]).grads
    cast = mxmp.cast_symbol(symbol, policy)
    args = {name: mx.nd.array(value) for name, value in values.items()}
    grads = {name: mx.nd.zeros(value.shape) for name, value in values.items()}
    executor = cast.bind(mx.cpu(), args, grads, grad_req={n: "add" if n == "w" else "write" for n in args})
    for times in (1, 2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((3, 3)))
        for name, grad in grads.items():
            expected = want[name] * times if name == "w" else want[name]
            assert sqnr(expected, grad.asnumpy()) > (24 if "bfloat16" in policy else 45), (name, times)


HARD = S.hard_sigmoid
RESIDUALS = {  # with the same in operators whose backward makes a new gradient
    "first": (lambda x: HARD(x) + x, lambda x: HARD(x) * 1 + x * 1),
    "second": (lambda x: S.elemwise_add(x, HARD(x)), lambda x: HARD(x) * 1 + x * 1),
    "through a reshape": (lambda x: S.Flatten(HARD(x)) + x, lambda x: HARD(x) * 1 + x * 1),
    "twice": (lambda x: HARD(x) + HARD(-x) + x, lambda x: HARD(x) * 1 + HARD(-x) * 1 + x * 1),
    "with an idle reader": (
        lambda x: (lambda y: S.BlockGrad(y) + (y + x))(HARD(x)),
        lambda x: S.BlockGrad(HARD(x)) + (HARD(x) * 1 + x * 1),
    ),
}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", RESIDUALS)
def test_a_hard_sigmoid_keeps_the_gradient_that_another_operator_reads(way, policy):
    """In MXNet's own graph ``x`` has 0.4 of its gradient, where 1.2 is right."""

    def net(residual: object) -> S.Symbol:
        x = S.FullyConnected(S.var("data"), num_hidden=6, no_bias=True, name="fc")
        return S.FullyConnected(S.tanh(residual(x)), num_hidden=2, no_bias=True, name="last")

    symbol, alike = map(net, RESIDUALS[way])
    values = filled(symbol, data=(3, 4))
    found = by_symbol(mxmp.cast_symbol(symbol, policy), values)
    agree(found, by_symbol(alike, values), 24 if policy == "bfloat16" else 45)


def test_a_hard_sigmoid_that_is_an_output_is_left_as_it_is():
    symbol = S.hard_sigmoid(S.FullyConnected(S.var("data"), num_hidden=6, name="fc"), name="gate")
    full = Graph.from_symbol(symbol)
    for device in ("cpu", "gpu"):
        assert "gradients_of_others" not in emitted(full, decide(full, Policy("float16"), device)).workarounds


def where(*values: object) -> S.Symbol:
    """NumPy's ``where`` under a condition that broadcasts."""
    read = [each.as_np_ndarray() if isinstance(each, S.Symbol) else each for each in (S.ones((3, 1, 1)), *values)]
    return S.np.where(*read).as_nd_ndarray()


# Operators of a square matrix whose backward in MXNet cannot add to a gradient.
CANNOT_ADD = {
    "clip": lambda x: S.clip(x, -0.2, 0.2),
    "mean": lambda x: S.mean(x, axis=1, keepdims=True),
    "moments": lambda x: S.moments(x, axes=(1,))[1],
    "reverse": lambda x: S.reverse(x, axis=1),
    "_split_v2": lambda x: S.split_v2(x, 2, axis=1)[0],
    "_np_cumsum": lambda x: S.cumsum(x, axis=1),
    "_npi_where": lambda x: where(x, S.ones((1,))),
    "_npi_where_lscalar": lambda x: where(0.5, x),
    "_npi_where_rscalar": lambda x: where(x, 0.5),
    "_linalg_gemm": lambda x: S.linalg_gemm(S.var("u"), S.var("v"), x),
    "_linalg_gemm2": lambda x: S.linalg_gemm2(x, S.var("u")),
    "_linalg_inverse": lambda x: S.linalg_inverse(x),
    "SoftmaxOutput": lambda x: S.SoftmaxOutput(x, S.zeros((4,))),
}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", CANNOT_ADD)
def test_a_kernel_that_cannot_add_to_a_gradient(op, policy):
    """MXNet's own FP32 gradient of two backwards into one array is that of one, or arbitrary."""
    side = S.FullyConnected(S.var("data"), num_hidden=3, no_bias=True, name="side")
    symbol = S.Group([CANNOT_ADD[op](S.var("x")), side])
    assert f'"{op}"' in symbol.tojson()
    shapes = {n: (4, 4) for n in symbol.list_arguments() if n in "uvx"}
    values = {**filled(symbol, data=(2, 4), **shapes), "x": np.eye(4, dtype="float32") + 0.1}
    outputs = symbol.infer_shape(**{name: value.shape for name, value in values.items()})[1]
    heads = [np.random.RandomState(0).normal(0, 1, shape).astype("float32") for shape in outputs]
    want = by_symbol(symbol, values, grads_of=["x"], heads=heads).grads["x"]
    args, grad = {name: mx.nd.array(value) for name, value in values.items()}, mx.nd.zeros((4, 4))
    requests = {name: "add" if name == "x" else "null" for name in args}
    executor = mxmp.cast_symbol(symbol, policy).bind(mx.cpu(), args, {"x": grad}, grad_req=requests)
    for times in (1, 2):
        executor.forward(is_train=True)
        executor.backward([mx.nd.array(head) for head in heads])
        np.testing.assert_allclose(grad.asnumpy(), times * want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}])
def test_a_kernel_that_cannot_add_is_one_of_many_readers(flags, policy):
    """MXNet may let it add to the gradient that other readers of a tensor have written."""

    class Many(nn.HybridBlock):
        def __init__(self, copies: bool) -> None:
            super().__init__()
            self.copies = copies
            with self.name_scope():
                self.last = nn.Dense(3, in_units=4)

        def hybrid_forward(self, ops, x):
            x = ops.tanh(x)
            total = ops.broadcast_like(ops.mean(ops.identity(x) if self.copies else x, axis=1, keepdims=True), x)
            for i in range(9):
                total = ops.elemwise_add(total, ops.sin(x * (i + 1)))
            return self.last(total)

    found = []
    for copies in (False, True):
        net = Many(copies)
        net.initialize(mx.init.One())
        mxmp.convert(net, policy)
        net.hybridize(**flags)
        data = mx.nd.array(np.random.RandomState(0).normal(0, 1, (2, 4)))
        data.attach_grad()
        with mx.autograd.record():
            out = net(data)
        out.backward()
        found.append(data.grad.asnumpy())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("request_", ["null", "write", "add"])
@pytest.mark.parametrize(("readers", "device"), [(1, "cpu"), (8, "cpu"), (1, "gpu"), (7, "gpu"), (8, "gpu")])
def test_a_kernel_that_cannot_add_reads_a_copy_only_where_it_is_to_add(request_, readers, device):
    """A copy of an Inception's pools, which have three other readers, would cost a GPU time."""
    x = S.tanh(S.var("data")) if readers > 1 else S.var("data")
    outputs = [S.mean(x), *(S.sin(x * (i + 1)) for i in range(readers - 1))]
    full = Graph.from_symbol(S.Group(outputs))
    found = emitted(full, decide(full, Policy("float16"), device), {"data": request_}).workarounds
    adds = request_ == "add" if readers == 1 else request_ != "null" and readers == 8
    assert ("overwritten_gradients" in found) is adds
