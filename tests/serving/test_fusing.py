"""MXNet's fusion by oneDNN, kept from what it would get wrong."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import sqnr
from kit.served_networks import SHAPE, S, check, conv, filled, forward, optimized, preactivation, relu, warmed

from mxmp.gluon.symbols import traced_call
from mxmp.precision.graph import Graph
from mxmp.serving.fusing import FUSED, fuse, inner_operators


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


def test_unfused_leaves_nothing_to_fuse():
    """MXNet fuses what is bound by a Module once more."""
    graph = check(preactivation(True), apart=True)
    again = Graph.from_symbol(graph.to_symbol().get_backend_symbol("MKLDNN"))
    assert [(n.op, n.name) for n in again.nodes()] == [(n.op, n.name) for n in graph.nodes()]


@pytest.mark.parametrize("activated", [False, True])
def test_a_layer_that_reads_an_array_for_any_batch_is_not_fused(activated):
    """MXNet infers the batch of the first state of a recurrent cell from what its layer returns."""
    state = S.FullyConnected(S.zeros((0, 8)), num_hidden=4, name="of_state")
    net = S.FullyConnected(S.var("data"), num_hidden=4, name="of_data") + (S.relu(state) if activated else state)
    fused = fuse(Graph.from_symbol(net))
    operators = {node.name: node.op for node in fused.nodes()}
    assert (operators["of_state"], operators["of_data"]) == ("FullyConnected", FUSED[1])
    for rows in (4, 2):
        assert fused.to_symbol().infer_shape(data=(rows, 5))[1] == [(rows, 4)]
