"""Rewrites for MXNet's CUDA build, as graphs and, on the CPU, as numbers; that they run: tests/nullgpu."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import cast_nodes, nodes
from kit.twins import assert_same
from mxnet import symbol as S

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.pipeline import emitted, low_graph
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.operators import Options
from mxmp.precision.subgraphs import bodies


def operators(symbol):
    return [node["op"] for node in nodes(symbol) if node["op"] != "null"]


def numbers(symbol, shape=(2, 3, 6, 6)):
    """The output in evaluation and training, and the gradients, on the CPU."""
    rng = np.random.RandomState(0)
    bound = symbol.simple_bind(mx.cpu(), data=shape)
    for array in bound.arg_arrays:
        array[:] = rng.randn(*array.shape)
    found = [bound.forward(is_train=False)[0].asnumpy(), bound.forward(is_train=True)[0].asnumpy()]
    bound.backward(mx.nd.array(rng.randn(*bound.outputs[0].shape)))
    return [*found, *(array.asnumpy() for array in bound.grad_arrays)]


def on_a_gpu(symbol, policy="float16"):
    return mxmp.cast_symbol(symbol, policy, ctx=mx.gpu())


def in_full(symbol):
    """All in FP32, with the rewrites for a GPU: a CPU can compute it."""
    return low_graph(Graph.from_symbol(symbol), mxmp.Policy("float16", exclude=("*",)), "gpu")[0].to_symbol()


def in_float32(symbol):
    """What a GPU gets in float16, with casts to FP32 instead: a CPU can compute it."""
    return mx.sym.load_json(
        on_a_gpu(symbol, "params=float32").tojson(remove_amp_cast=False).replace('"float16"', '"float32"')
    )


def convolution(**attrs):
    return S.Convolution(S.var("data"), num_filter=4, kernel=(3, 3), pad=(1, 1), name="convolution", **attrs)


@pytest.mark.parametrize("policy", ["float16", "norm=compute"])
@pytest.mark.parametrize("at_the_head", [False, True])
def test_batch_norm_with_relu_is_two_operators_on_a_gpu(policy, at_the_head):
    norm = S.contrib.BatchNormWithReLU(convolution(), fix_gamma=False, eps=1e-3, name="norm")
    symbol = norm if at_the_head else S.FullyConnected(norm, num_hidden=2, name="dense")
    found = on_a_gpu(symbol, policy)
    assert "_contrib_BatchNormWithReLU" not in operators(found)
    assert operators(found).index("BatchNorm") < operators(found).index("relu")
    assert found.list_outputs() == symbol.list_outputs()
    assert found.list_arguments() == symbol.list_arguments()
    assert found.list_auxiliary_states() == symbol.list_auxiliary_states()
    for got, want in zip(numbers(in_full(symbol)), numbers(symbol)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("begin", "end"), [((0,), (1,)), ((0, 1), (9, -1)), ((None, 0, 1), (None, 2, 3))])
def test_a_step_keeps_a_slice_out_of_the_fusion_on_a_gpu(begin, end):
    symbol = S.log_softmax(S.slice(convolution(), begin=begin, end=end, name="part"), axis=1)
    steps = on_a_gpu(symbol).attr_dict()["part"]["step"]
    assert steps.count("1") == len(begin)
    assert "step" not in mxmp.cast_symbol(symbol, "float16", ctx=mx.cpu()).attr_dict()["part"]
    assert_same(numbers(in_full(symbol)), numbers(symbol))


@pytest.mark.parametrize(
    ("operator", "given", "parameter", "default"),
    [(S.LeakyReLU, {"slope": 0.3}, "act_type", "leaky"), (S.smooth_l1, {}, "scalar", "1.0")],
)
def test_a_default_that_the_fusion_looks_up_is_written_on_a_gpu(operator, given, parameter, default):
    symbol = operator(convolution(), name="layer", **given)
    found = on_a_gpu(symbol)
    written = next(node.attrs for node in Graph.from_symbol(found).nodes() if node.op == operator.__name__)
    assert written[parameter] == default
    assert all(float(written[name]) == value for name, value in given.items())
    assert strip(Graph.from_symbol(found)).to_json() == strip(Graph.from_symbol(symbol)).to_json()
    assert_same(numbers(in_full(symbol)), numbers(symbol))


def normed(**attrs):
    norm = S.BatchNorm(convolution(no_bias=True), fix_gamma=False, name="norm", **attrs)
    return S.FullyConnected(S.relu(norm, name="relu"), num_hidden=2, name="dense")


def test_the_casts_around_a_norm_are_inside_its_kernel_on_a_gpu(monkeypatch):
    inner = ["convolution_to_float32", "norm_to_float16"]
    outer = ["data_to_float16", "dense"]
    assert cast_nodes(on_a_gpu(normed())) == outer
    assert cast_nodes(on_a_gpu(normed(), "norm=float32")) == [outer[0], *inner, outer[1]]
    (report,) = mxmp.explain(normed(), ctx=mx.gpu(), data=(2, 3, 6, 6)).graphs
    assert report.workarounds["fp32_inside_the_kernel"] == ("norm",)
    assert {node.name: (node.dtype, node.casts) for node in report.nodes}["norm"] == ("float32", 0)
    assert [cast.tensor for cast in report.casts] == ["data", "dense_float16"]
    monkeypatch.setenv(SWITCH, "fp32_inside_the_kernel")
    assert cast_nodes(on_a_gpu(normed())) == [outer[0], *inner, outer[1]]


@pytest.mark.parametrize("attrs", [{"use_global_stats": True}, {"cudnn_off": True}])
def test_a_norm_that_cudnn_does_not_compute_keeps_its_casts_but_for_norm_compute(attrs):
    assert cast_nodes(on_a_gpu(normed(**attrs)))[1:3] == ["convolution_to_float32", "norm_to_float16"]
    assert cast_nodes(on_a_gpu(normed(**attrs), "float16-fast")) == ["data_to_float16", "dense"]


def test_an_fp32_operator_reads_what_a_kernel_has_rounded():
    norm = normed().get_internals()["norm_output"]
    symbol = S.Group([S.FullyConnected(norm, num_hidden=2, name="dense"), S.exp(norm, name="exp")])
    assert cast_nodes(on_a_gpu(symbol)) == ["data_to_float16", "dense", "norm_to_float32"]


def test_a_norm_at_the_head_is_fp32_and_not_rounded():
    norm = normed().get_internals()["norm_output"]
    found = on_a_gpu(S.Group([S.FullyConnected(norm, num_hidden=2, name="dense"), norm]))
    assert cast_nodes(found) == ["data_to_float16", "convolution_to_float32", "norm_to_float16", "dense"]
    assert found[1].infer_type(data="float32")[1] == [np.float32]


@pytest.mark.parametrize("size", [{}, {"output_size": 1}, {"output_size": (1, 1)}])
def test_an_adaptive_average_of_everything_is_cudnns_on_a_gpu(size, monkeypatch):
    symbol = S.FullyConnected(S.contrib.AdaptiveAvgPooling2D(convolution(), **size), num_hidden=2, name="dense")
    assert "Pooling" in operators(on_a_gpu(symbol))
    for got, want in zip(numbers(in_float32(symbol)), numbers(symbol)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    monkeypatch.setenv(SWITCH, "global_averages")
    assert "_contrib_AdaptiveAvgPooling2D" in operators(on_a_gpu(symbol))


@pytest.mark.parametrize("at_the_head", [False, True])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [1, -1, (2, 3), (0, 1, 2, 3), ()], ids=str)
def test_a_sum_reads_float16_and_adds_in_fp32_on_a_gpu(axis, keepdims, at_the_head, monkeypatch):
    total = S.sum(convolution(), axis=axis, keepdims=keepdims, name="total")
    symbol = total if at_the_head else S.exp(-S.abs(total), name="exp")
    found = on_a_gpu(symbol)
    assert "_np_sum" in operators(found)
    assert cast_nodes(found) == ["data_to_float16"]
    assert found.list_outputs() == symbol.list_outputs()
    assert found.infer_shape(data=(2, 3, 6, 6)) == symbol.infer_shape(data=(2, 3, 6, 6))
    for got, want in zip(numbers(in_float32(symbol)), numbers(symbol)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    monkeypatch.setenv(SWITCH, "sums_of_float16")
    assert cast_nodes(on_a_gpu(symbol)) == ["data_to_float16", "convolution_to_float32"]


def test_a_sum_that_float16_operators_alone_read_is_rounded_by_its_kernel_on_a_gpu():
    total = S.sum(convolution(), axis=1, name="total")
    low = S.FullyConnected(total, num_hidden=2, name="dense")
    twice = S.elemwise_add(low, S.FullyConnected(S.Flatten(total), num_hidden=2, name="other"))
    assert cast_nodes(on_a_gpu(low)) == ["data_to_float16", "dense"]
    assert cast_nodes(on_a_gpu(S.Group([low, total]))) == ["data_to_float16", "total_to_float16", "dense"]
    assert on_a_gpu(S.Group([low, total])).infer_type(data="float32")[1] == [np.float32] * 2
    for found in (low, twice):
        for got, want in zip(numbers(in_float32(found)), numbers(found)):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_sum_over_a_vector_has_the_shape_that_mxnets_has():
    vector = S.reshape(convolution(), shape=(-1,))
    for keepdims in (False, True):
        symbol = S.exp(S.sum(vector, axis=0, keepdims=keepdims))
        assert on_a_gpu(symbol).infer_shape(data=(2, 3, 6, 6))[1] == symbol.infer_shape(data=(2, 3, 6, 6))[1] == [(1,)]


def test_a_sum_over_all_but_some_axes_keeps_its_cast():
    symbol = S.exp(S.sum(convolution(), axis=1, exclude=True))
    assert cast_nodes(on_a_gpu(symbol)) == ["data_to_float16", "convolution_to_float32"]


@pytest.mark.parametrize(("scale", "steps"), [(2, 1), (4, 2), (8, 3)])
def test_an_upsampling_doubles_step_by_step_on_a_gpu(scale, steps, monkeypatch):
    large = S.UpSampling(convolution(), scale=scale, sample_type="nearest", name="large")
    symbol = S.FullyConnected(large, num_hidden=2, name="dense")
    assert operators(on_a_gpu(symbol)).count("UpSampling") == steps
    for got, want in zip(numbers(in_float32(symbol)), numbers(symbol)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    monkeypatch.setenv(SWITCH, "upsampling_in_steps")
    assert operators(on_a_gpu(symbol)).count("UpSampling") == 1


def test_another_adaptive_average_is_fp32_on_both_devices():
    symbol = S.FullyConnected(S.contrib.AdaptiveAvgPooling2D(convolution(), output_size=2, name="pool"), num_hidden=2)
    for ctx in (mx.cpu(), mx.gpu()):
        (report,) = mxmp.explain(symbol, ctx=ctx).graphs
        assert report.plan.decisions["pool"].low is False


def test_a_norm_with_relu_of_low_input_has_no_casts_on_a_gpu():
    norm = S.contrib.BatchNormWithReLU(convolution(), fix_gamma=False, name="norm")
    assert cast_nodes(on_a_gpu(S.FullyConnected(norm, num_hidden=2, name="dense"))) == ["data_to_float16", "dense"]


@pytest.mark.parametrize("policy", ["params=float32", "params=float16"])
def test_the_gradient_of_a_sum_is_not_the_array_of_a_variable_to_which_backwards_add_on_a_gpu(policy):
    """In the graph for a GPU, as FP32 on a CPU: whose gradients share an array is decided for both devices alike."""
    weight = S.var("w") + S.tanh(S.var("u"))
    symbol = S.FullyConnected(S.var("data"), weight, num_hidden=4, no_bias=True, name="fc")
    text = on_a_gpu(symbol, policy).tojson(remove_amp_cast=False)
    found = mx.sym.load_json(text.replace('"float16"', '"float32"').replace('"__dtype__": "2"', '"__dtype__": "0"'))
    shapes = {"data": (3, 8), "w": (4, 8), "u": (4, 8)}
    rng = np.random.RandomState(0)
    args = {name: mx.nd.array(rng.randn(*shape)) for name, shape in shapes.items()}
    grads = {name: mx.nd.zeros(shape) for name, shape in shapes.items()}
    executor = found.bind(mx.cpu(), args, grads, grad_req={"data": "null", "w": "add", "u": "write"})
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((3, 4)))
    once = np.tile(args["data"].asnumpy().sum(axis=0), (4, 1))
    np.testing.assert_allclose(grads["w"].asnumpy(), 2 * once, rtol=1e-5, atol=1e-5)
    slope = 1 - np.tanh(args["u"].asnumpy()) ** 2
    np.testing.assert_allclose(grads["u"].asnumpy(), once * slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("residual", "copies"), [(True, 2), (False, 1)])
def test_the_rows_of_a_loop_are_copied_on_a_gpu_unless_a_product_reads_them(residual, copies, monkeypatch):
    def body(x, h):
        out = S.tanh(S.FullyConnected(x, num_hidden=6, name="dense") * h)
        return (out + x if residual else out), out

    symbol = S.contrib.foreach(body, S.var("data"), S.ones((3, 6)))[0]
    found = on_a_gpu(symbol)
    (loop,) = (node for node in Graph.from_symbol(found).nodes() if node.op == "_foreach")
    (inside,) = (body.graph for body in bodies(loop))
    assert [node.op for node in inside.nodes()].count("_npi_concatenate") == copies
    assert inside.heads[0].node.op == "_npi_concatenate"
    assert inside.heads[1].node.op != "_npi_concatenate"
    assert strip(Graph.from_symbol(found)).to_json() == strip(Graph.from_symbol(symbol)).to_json()
    same = numbers(in_float32(symbol), (4, 3, 6))
    monkeypatch.setenv(SWITCH, "fused_rows")
    for got, want in zip(same, numbers(in_float32(symbol), (4, 3, 6)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_rows_of_a_loop_in_fp32_are_not_copied_on_a_gpu():
    symbol = S.contrib.foreach(lambda x, h: (x * h, x * h), S.var("data"), S.ones((3, 6)))[0]
    low = S.FullyConnected(symbol, num_hidden=2)
    assert "_npi_concatenate" not in on_a_gpu(low).tojson(remove_amp_cast=False)


def cell_with_shared_weights(times, request="write", policy="float16"):
    """A dense layer applied so many times, as trained on a GPU: the FP32 graph, and the one to run."""
    x, weight, bias = S.var("data"), S.var("weight"), S.var("bias")
    for step in range(times):
        x = S.tanh(S.FullyConnected(x, weight, bias, num_hidden=4, name=f"step{step}"))
    graph, options = Graph.from_symbol(x), Options(parameters={"weight", "bias"}, learned={"weight", "bias"})
    plan = decide(graph, mxmp.Policy.parse(policy), "gpu", options)
    return graph, emitted(graph, plan, {"data": "null", "weight": request, "bias": request})


def copied(low):
    return {node.inputs[0].node.name for node in low.graph.nodes() if node.op == "_copy"}


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("times", range(3, 10))
def test_five_to_seven_readers_of_a_float16_weight_read_a_copy_on_a_gpu(times, request_, monkeypatch):
    monkeypatch.delenv("MXNET_USE_FUSION", raising=False)
    graph, low = cell_with_shared_weights(times, request_)
    assert copied(low) == ({"weight", "bias"} if 5 <= times <= 7 else set())
    assert len([node for node in low.graph.nodes() if node.op == "_copy"]) == len(copied(low))
    assert low.workarounds.keys() >= ({"sums_of_gradients"} if copied(low) else set())
    assert operators(strip(low.graph).to_symbol()) == operators(graph.to_symbol())


def test_no_weight_is_copied_for_the_sum_of_its_gradients_where_none_is_fused(monkeypatch):
    assert not copied(cell_with_shared_weights(5, "null")[1]), "inference, and frozen weights"
    assert not copied(cell_with_shared_weights(5, policy="params=float32")[1]), "its cast is there to be joined"
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    assert not copied(cell_with_shared_weights(5)[1])
