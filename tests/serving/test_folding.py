"""Folding and fusing change no value of an FP32 graph, whatever MXNet's own pass would make of it."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.oracle import sqnr
from kit.served_networks import S, conv, filled, forward, networks, preactivation, relu, warmed
from mxnet import gluon

import mxmp
from mxmp.gluon.graphs import traced_call
from mxmp.precision.graph import Graph
from mxmp.serving.folding import fold_constants, fold_norms, without_identities
from mxmp.serving.fusing import FUSED, fuse, inner_operators

SHAPE = (2, 3, 10, 10)


def optimized(symbol, params, fold=True, **kwargs):
    graph = without_identities(Graph.from_symbol(symbol))
    if fold:
        graph, params = fold_norms(graph, params)
    return fuse(graph, **kwargs), params


def check(symbol, shape=SHAPE, floor=100.0, **kwargs):
    params = filled(symbol, data=shape)
    x = mx.nd.array(np.random.RandomState(1).normal(size=shape))
    graph, values = optimized(symbol, params, **kwargs)
    made = graph.to_symbol()
    assert made.list_outputs() == symbol.list_outputs()
    for wanted, got in zip(forward(symbol, params, data=x), forward(made, values, data=x)):
        assert sqnr(wanted, got) > floor
    return graph


def two_outputs(x):
    layer = conv(x, "layer")
    return S.Group([layer, relu(layer, "relu")])


def read_by_two(x):
    layer = S.FullyConnected(x, num_hidden=6, name="layer")
    return relu(layer, "relu") + layer


def added_to_its_own_input(x):
    layer = conv(x, "first")
    return layer + conv(layer, "second")


def twice_the_same(x):
    layer = conv(x, "layer")
    return layer + layer


def skip_behind_the_sum(x):
    stem = conv(x, "stem")
    return S.clip(conv(relu(stem, "relu"), "layer") + stem, 0, 6) + stem


def split_and_dropped(x):
    parts = S.SliceChannel(conv(x, "layer"), num_outputs=2)
    return S.Dropout(parts[1], p=0.5) + parts[0]


def norm_over_rows(x):
    return relu(S.BatchNorm(conv(x, "layer"), axis=2, fix_gamma=False, name="bn"), "relu")


def norm_and_its_input(x):
    layer = conv(x, "layer")
    return S.BatchNorm(layer, name="bn", fix_gamma=False) + layer


def one_weight_for_two(x):
    weight = S.var("tied_weight")
    stem = conv(x, "stem")
    return S.BatchNorm(conv(stem, "a", weight=weight), name="na", fix_gamma=False) + S.BatchNorm(
        conv(stem, "b", weight=weight), name="nb", fix_gamma=False
    )


@pytest.mark.parametrize(
    "network",
    [
        *(two_outputs, read_by_two, added_to_its_own_input, twice_the_same, skip_behind_the_sum, split_and_dropped),
        *(norm_over_rows, norm_and_its_input, one_weight_for_two),
    ],
)
@pytest.mark.parametrize("quantizable", [False, True])
def test_what_is_read_from_the_middle_of_a_fusion_stays_right(network, quantizable):
    check(network(S.var("data")), quantizable=quantizable)


def test_the_weights_that_attention_joins_are_joined_once_and_zero_biases_are_quantized_too():
    """As in GluonNLP's BERT, which splits them into heads, stacks these and reads the result."""
    names = ("query", "key", "value")
    weights = [S.reshape(S.var(f"{name}_weight", shape=(8, 6)), shape=(2, -1, 0), reverse=True) for name in names]
    biases = [S.reshape(S.var(f"{name}_bias", shape=(8,)), shape=(2, -1), reverse=True) for name in names]
    weight = S.reshape(S.concat(*weights, dim=-2), shape=(-1, 0), reverse=True)
    bias = S.reshape(S.stack(*biases, axis=1), shape=(-1,))
    symbol = S.FullyConnected(S.var("data"), weight, bias, num_hidden=24, flatten=False, name="all")
    rng = np.random.RandomState(0)
    values = {f"{name}_weight": mx.nd.array(rng.normal(0, 0.3, (8, 6))) for name in names}
    values.update({f"{name}_bias": mx.nd.zeros(8) for name in names})
    graph, folded = fold_constants(Graph.from_symbol(symbol), values)
    assert [node.op for node in graph.nodes() if not node.is_variable] == ["FullyConnected"]
    assert {value.shape for value in folded.values()} == {(24, 6), (24,)}
    data = mx.nd.array(rng.normal(0, 1, (32, 6)))
    served = mxmp.optimize_for_inference(symbol, [data], arg_params=values, dtypes=("int8",))
    assert not [note for note in served.report.notes if "is not known" in note]


def test_the_vector_that_an_rnn_reads_is_made_once():
    net = gluon.nn.HybridSequential()
    net.add(gluon.rnn.LSTM(4, input_size=3))
    net.initialize(mx.init.Normal())
    x = mx.nd.random.normal(shape=(5, 2, 3))
    net(x)
    symbol, found, params, _ = traced_call(net, (x,), False)
    values = {name: param.data() for name, param in params.items()}
    graph, folded = fold_constants(Graph.from_symbol(symbol), values)
    assert not {"Reshape", "_rnn_param_concat"} & {node.op for node in graph.nodes()}
    assert len(folded) == 1
    (name,) = found
    for wanted, got in zip(*(forward(s, v, **{name: x}) for s, v in ((symbol, values), (graph.to_symbol(), folded)))):
        np.testing.assert_array_equal(wanted, got)


def test_the_shape_of_what_is_folded_is_known_where_mxnet_cannot_infer_it():
    term = S.expand_dims(S.var("term", shape=(4,)), axis=0)
    graph, folded = fold_constants(Graph.from_symbol(S.broadcast_add(S.var("data"), term)), {"term": mx.nd.ones(4)})
    assert [value.shape for value in folded.values()] == [(1, 4)]
    assert graph.to_symbol().infer_shape(data=(2, 4))[1] == [(2, 4)]


@pytest.mark.parametrize("norm", [False, True])
def test_preactivation_networks_are_fused_and_right(norm):
    graph = check(preactivation(norm))
    fused = [inner_operators(node) for node in graph.nodes() if node.op in FUSED]
    assert sum(len(names) > 1 for names in fused) == 3  # every addition is part of the convolution before it
    assert not [node for node in graph.nodes() if node.op == "BlockGrad"]


@pytest.mark.parametrize(("name", "size"), [("cifar_resnet20_v2", 32), ("mobilenetv3_small", 48)])
def test_networks_of_gluoncv_are_right_fused(name, size):
    model_zoo = pytest.importorskip("gluoncv.model_zoo")
    net = warmed(model_zoo.get_model(name), 2, 3, size, size, steps=5)
    x = mx.nd.random.normal(shape=(2, 3, size, size))
    symbol, found, params, _ = traced_call(net, (x,), False)
    values = {param.name: param.data() for param in params.values()}
    graph, folded = optimized(symbol, values)
    inputs = dict.fromkeys(found, x)
    wanted, got = (forward(s, v, **inputs)[0] for s, v in ((symbol, values), (graph.to_symbol(), folded)))
    assert np.abs(wanted).max() > 1e-4
    assert sqnr(wanted, got) > 90


def test_mxnet_gets_a_preactivation_network_wrong():
    """The fault that barriers are for: where this fails, they are needed no more."""
    symbol = preactivation(False)
    params = filled(symbol, data=SHAPE)
    x = mx.nd.random.normal(shape=SHAPE)
    wrong = forward(symbol.get_backend_symbol("MKLDNN"), params, data=x)[0]
    assert sqnr(forward(symbol, params, data=x)[0], wrong) < 20


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fix_gamma", [False, True, "TRUE"])  # the last is what R writes, and MXNet reads
@pytest.mark.parametrize("groups", [1, 4])
def test_a_norm_behind_a_convolution_is_part_of_it(bias, fix_gamma, groups):
    stem = conv(S.var("data"), "stem", no_bias=not bias)
    layer = conv(stem, "layer", no_bias=not bias, num_group=groups)
    graph = check(relu(S.BatchNorm(layer, fix_gamma=fix_gamma, eps=1e-2, name="bn"), "relu"))
    assert not [node for node in graph.nodes() if node.op == "BatchNorm"]


def test_a_norm_behind_a_dense_layer_is_part_of_it():
    graph = check(S.BatchNorm(S.FullyConnected(S.var("data"), num_hidden=5, name="fc"), fix_gamma=False, name="bn"))
    assert [node.op for node in graph.nodes() if not node.is_variable] == ["_sg_mkldnn_fully_connected"]


def test_unfused_leaves_nothing_to_fuse():
    """MXNet fuses what is bound by a Module once more."""
    graph = check(preactivation(True), apart=True)
    again = Graph.from_symbol(graph.to_symbol().get_backend_symbol("MKLDNN"))
    assert [(n.op, n.name) for n in again.nodes()] == [(n.op, n.name) for n in graph.nodes()]


@given(networks(), st.booleans(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_any_network_is_right_folded_and_fused(symbol, quantizable, fold):
    check(symbol, floor=90.0, quantizable=quantizable, fold=fold)
