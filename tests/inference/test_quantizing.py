"""A graph in INT8 differs from FP32 by rounding to 8 bits alone, where MXNet's own passes make it wrong too."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from kit.examples import examples
from kit.oracle import sqnr
from kit.served_networks import S, conv, filled, forward, networks, relu

from mxmp.inference.quantizing import quantize, tensors_to_calibrate
from mxmp.precision.graph import Graph
from mxmp.serving.folding import fold_norms, without_identities
from mxmp.serving.fusing import fuse
from mxmp.serving.lowering import lower

SHAPE = (2, 3, 10, 10)
# In dB. Eight bits keep 30 to 40 in these networks; a wrong operator leaves less than 20.
FLOOR = 25.0


def check(symbol, every=False):
    """Quantize all that can be, ranges taken from the data itself, and compare; return the operators in INT8."""
    params, x = filled(symbol, data=SHAPE), mx.nd.array(np.random.RandomState(1).normal(size=SHAPE))
    graph, folded = fold_norms(without_identities(Graph.from_symbol(symbol)), params)
    fused = fuse(graph, quantizable=True)
    inner, names = fused.to_symbol().get_internals(), tensors_to_calibrate(fused, folded)
    tensors = [inner[name if name in inner.list_outputs() else "data"] for name in names]
    values = forward(S.Group(tensors), folded, data=x) if names else []
    ranges = {name: (float(value.min()), float(value.max())) for name, value in zip(names, values)}
    made, weights, quantized = quantize(fused, folded, ranges, (), every=every)
    for wanted, got in zip(forward(symbol, params, data=x), forward(made.to_symbol(), weights, data=x)):
        assert wanted.shape == got.shape
        assert sqnr(wanted, got) > FLOOR
    assert not [node for node in made.nodes() if node.op == "_copy" or node.name.endswith("_apart")]
    return quantized


def branch(x):
    return conv(relu(conv(x, "first"), "first_relu"), "second")


def pooled(x):
    return S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="max", name="pool")


def joined(x):
    parts = S.Concat(relu(conv(x, "left"), "left_relu"), relu(conv(x, "right"), "right_relu"), dim=1)
    return S.slice_axis(parts, axis=1, begin=4, end=12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("through", [lambda x: x, pooled, joined], ids=["itself", "pooled", "joined"])
@pytest.mark.parametrize("signed", [False, True], ids=["adds relu", "adds signed"])
@pytest.mark.parametrize("activated", [False, True], ids=["gives signed", "gives relu"])
def test_a_convolution_that_adds_a_tensor_of_the_other_sign_is_right(activated, signed, through, bias):
    """ResNets v1 add a signed tensor before a relu, and ResNets v2 a relu before none."""
    stem = relu(conv(S.var("data"), "stem"), "stem_relu")
    skip = conv(stem, "skip") if signed else through(stem)
    total = skip + conv(branch(stem), "third", no_bias=not bias)
    assert len(check(relu(total, "relu") if activated else total)) >= 4


def test_a_convolution_that_adds_its_own_input_is_right():
    stem = relu(conv(S.var("data"), "stem"), "stem_relu")
    assert len(check(conv(stem + conv(stem, "layer"), "last"))) == 3


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kind", ["sum", "lp", "avg"])
def test_a_pooling_without_an_int8_kernel_stays_out(kind, every):
    """MXNet's pass takes it for one with a kernel, and crashed the user's process where layers are fused."""
    stem = relu(conv(S.var("data"), "stem"), "stem_relu")
    pool = S.Pooling(stem, kernel=(2, 2), stride=(2, 2), pool_type=kind, p_value=2, name="pool")
    assert ("pool" in check(S.FullyConnected(pool, num_hidden=6, name="fc"), every)) == (kind == "avg")


@pytest.mark.parametrize("order", [1, -1])
def test_outputs_in_the_middle_of_a_network_are_right(order):
    stem = relu(conv(S.var("data"), "stem"), "stem_relu")
    heads = [S.clip(stem, 0, 1), stem, conv(stem, "last"), stem]
    assert len(check(S.Group(heads[::order]))) == 2


@pytest.mark.parametrize("before", [lambda x: relu(x, "before"), lambda x: S.clip(x, 0, 1)], ids=["relu", "clip"])
def test_a_relu_of_a_tensor_without_negative_values_is_right(before):
    assert "second" in check(relu(before(conv(S.var("data"), "stem")), "second"), every=True)


@pytest.mark.parametrize("between", [lambda x: x, pooled], ids=["itself", "pooled"])
def test_a_chain_of_relus_is_right(between):
    first = relu(conv(S.var("data"), "stem"), "first")
    second = relu(first, "second")
    check(S.Group([relu(between(second), "third"), first, second]), every=True)


@pytest.mark.vnni
def test_a_product_that_is_read_in_int8_and_in_fp32_is_right():
    stem = conv(S.var("data"), "stem")
    product = S.elemwise_mul(stem, conv(stem, "other"), name="product")
    found = check(S.Group([conv(product, "last"), S.broadcast_add(product, product)]))
    assert {"product", "last"} <= set(found)


@pytest.mark.vnni
@given(networks())
@settings(max_examples=examples(40), deadline=None)
def test_any_network_is_right_in_int8(symbol):
    for every in (False, True):
        check(symbol, every=every)


@pytest.mark.vnni
@pytest.mark.parametrize(
    "before",
    [
        lambda x: S.Concat(x, x * 2, dim=1),
        lambda x: S.Concat(x, S.ones((2, 4)), dim=1),
        lambda x: S.Embedding(x, input_dim=5, output_dim=4, name="table"),
    ],
    ids=["concat", "concat with a constant", "embedding"],
)
def test_a_dense_layer_computes_each_batch_with_the_range_of_calibration(before):
    """MXNet's kernel keeps the range of the first batch, where the graph does not hold one."""
    symbol = S.FullyConnected(before(S.var("data")), num_hidden=8, name="fc")
    params = filled(symbol, data=(2, 4))
    if "table_weight" in params:
        params["table_weight"] *= mx.nd.arange(1, 6).reshape((5, 1))
    fused = fuse(Graph.from_symbol(symbol), quantizable=True)
    ranges = dict.fromkeys(tensors_to_calibrate(fused, params), (-8.0, 8.0))
    made, weights, quantized = quantize(fused, params, ranges, ())
    assert quantized == ["fc"]
    served = mx.nd.CachedOp(made.to_symbol(), [("static_alloc", True), ("static_shape", True)])
    names = made.to_symbol().list_inputs()
    for scale in (1, 4, 2):
        x = mx.nd.array([[1, 0, 1, 0], [0, 1, 1, 1]]) * scale
        (wanted,) = forward(symbol, params, data=x)
        got = served(*({**weights, "data": x}[name] for name in names))
        assert sqnr(wanted, got.asnumpy()) > FLOOR


GATED = {
    "pooled": lambda x: S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)),
    "pooled by maxima": lambda x: S.Pooling(x, global_pool=True, pool_type="max", kernel=(1, 1)),
    "mean": lambda x: S.mean(x, axis=(2, 3), keepdims=True),
    "mean of two axes": lambda x: S.mean(x, axis=(2, 3)),
    "adaptive": lambda x: S.contrib.AdaptiveAvgPooling2D(x, output_size=1),
    "whole": lambda x: x,
}


def gated(channels, end, flatten):
    """A layer, squeeze-and-excitation with a hard sigmoid, and a dense layer."""
    x = S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=channels, name="layer")
    inner = S.contrib.AdaptiveAvgPooling2D(x, output_size=1)
    inner = S.Convolution(inner, kernel=(1, 1), num_filter=channels, name="gate")
    x = GATED[end](S.broadcast_mul(x, S.clip(inner * 0.2 + 0.5, 0, 1)))
    return S.FullyConnected(x, num_hidden=4, flatten=flatten, name="dense")


@pytest.mark.parametrize("kind", ["int8", "float32", "bfloat16"])
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "last axis"])
@pytest.mark.parametrize("end", GATED)
@pytest.mark.parametrize("channels", [8, 16])  # oneDNN has blocks of 8, or of 16 with AVX-512
def test_a_dense_layer_behind_a_gate_runs_again_and_gives_the_same(channels, end, flatten, kind):
    """oneDNN's fused layer failed in its second run: MXNet then stores its data otherwise than in the first one."""
    symbol = gated(channels, end, flatten)
    params, x = filled(symbol, data=SHAPE), mx.nd.array(np.random.RandomState(1).normal(size=SHAPE))
    graph = without_identities(Graph.from_symbol(symbol))
    if kind == "int8":
        fused = fuse(graph, quantizable=True)
        inner, names = fused.to_symbol().get_internals(), tensors_to_calibrate(fused, params)
        known = {*inner.list_outputs()}
        values = forward(S.Group([inner[name if name in known else "data"] for name in names]), params, data=x)
        ranges = {name: (float(value.min()), float(value.max())) for name, value in zip(names, values)}
        made, params, _ = quantize(fused, params, ranges, ())
    else:
        made, params = (fuse(graph), params) if kind == "float32" else lower(graph, params)
    fast = made.to_symbol()
    arrays = {**params, "data": x}
    executor = fast.bind(mx.cpu(), {name: arrays[name] for name in fast.list_arguments()}, grad_req="null")
    runs = [executor.forward(is_train=False)[0].asnumpy() for _ in range(4)]
    assert all(np.array_equal(run, runs[0]) for run in runs)
    if kind != "int8":  # without VNNI, sums of INT8 products overflow
        wanted = forward(symbol, filled(symbol, data=SHAPE), data=x)[0]
        assert sqnr(wanted, runs[0]) > (100 if kind == "float32" else 30)


def test_a_tensor_of_which_nothing_is_known_is_an_error():
    symbol = S.FullyConnected(S.var("data"), num_hidden=8, name="fc")
    params = filled(symbol, data=(2, 4))
    with pytest.raises(mx.MXNetError, match="'data' has no range for INT8"):
        quantize(fuse(Graph.from_symbol(symbol), quantizable=True), params, {}, ())


@pytest.mark.parametrize("mode", ["gru", "rnn_relu", "rnn_tanh"])
def test_a_recurrent_layer_that_is_no_lstm_stays_in_fp32(mode):
    """MXNet's own pass fails for a graph that has one."""
    x = S.RNN(S.var("data"), S.var("rnn_p"), S.var("rnn_h"), state_size=4, num_layers=1, mode=mode, name="rnn")
    symbol = S.FullyConnected(x, num_hidden=8, flatten=False, name="fc")
    params = filled(symbol, data=(3, 2, 4))
    fused = fuse(Graph.from_symbol(symbol), quantizable=True)
    ranges = dict.fromkeys(tensors_to_calibrate(fused, params), (-1.0, 1.0))
    assert quantize(fused, params, ranges, ())[2] == ["fc"]
