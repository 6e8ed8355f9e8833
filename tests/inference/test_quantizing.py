"""A graph in INT8 differs from FP32 by rounding to 8 bits alone, where MXNet's own passes make it wrong too."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from counts import examples
from hypothesis import given, settings
from oracle import sqnr
from served_networks import S, conv, filled, forward, networks, relu

from mxmp.inference.quantizing import quantize, tensors_to_calibrate
from mxmp.precision.graph import Graph
from mxmp.serving.folding import fold_norms, without_identities
from mxmp.serving.fusing import fuse

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


def test_a_product_that_is_read_in_int8_and_in_fp32_is_right():
    stem = conv(S.var("data"), "stem")
    product = S.elemwise_mul(stem, conv(stem, "other"), name="product")
    found = check(S.Group([conv(product, "last"), S.broadcast_add(product, product)]))
    assert {"product", "last"} <= set(found)


@given(networks())
@settings(max_examples=examples(40), deadline=None)
def test_any_network_is_right_in_int8(symbol):
    for every in (False, True):
        check(symbol, every=every)
