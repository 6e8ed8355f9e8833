"""Folding and fusing change no value of an FP32 graph, whatever MXNet's own pass would make of it."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.served_networks import S, check, conv, forward, networks, relu
from mxnet import gluon

import mxmp
from mxmp.gluon.symbols import traced_call
from mxmp.precision.graph import Graph
from mxmp.serving.folding import fold_constants


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
    found = [(node.op, node.name) for node in graph.nodes() if not node.is_variable]
    assert found == [("_sg_mkldnn_fully_connected", "fc"), ("BlockGrad", "bn")]


@given(networks(), st.booleans(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_any_network_is_right_folded_and_fused(symbol, quantizable, fold):
    check(symbol, floor=90.0, quantizable=quantizable, fold=fold)
