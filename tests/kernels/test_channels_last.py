"""BatchNorm with channels last: said by ``advise``, ``explain`` and the first call on a GPU, and NHWC is advised where
no BatchNorm stands."""

from __future__ import annotations

import logging

import mxnet as mx
import pytest
from mxnet.gluon import nn

import mxmp
from mxmp.kernels.channels_last import norms_over_rows
from mxmp.pipeline import Conversion, Use
from mxmp.precision.graph import Graph


def network(layout="NHWC", **norm):
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), layout=layout, name="conv")
    return mx.sym.BatchNorm(x, name="norm", **norm) if norm else x


def loop(axis):
    def body(x, states):
        return mx.sym.BatchNorm(x, axis=axis, name="norm"), states

    return mx.sym.contrib.foreach(body, mx.sym.var("data"), [mx.sym.var("s")])[0]


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        (network(axis=3), ["norm"]),
        (network(axis=-1), ["norm"]),
        (network("NCHW", axis=1), []),
        (network("NCHW", fix_gamma=False), []),  # axis 1 is the default
        (mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), axis=-1), []),  # of a matrix: axis 1
        (loop(3), ["norm"]),
    ],
)
def test_which_norms_read_a_row_for_each_pixel(symbol, found):
    assert [name.rpartition("/")[2] for name in norms_over_rows(Graph.from_symbol(symbol))] == found


@pytest.mark.parametrize(("device", "said"), [("gpu", True), ("cpu", False)])
def test_explain_says_it_for_a_gpu_alone(device, said):
    found = mxmp.explain(network(axis=3), ctx=mx.Context(device))
    assert found.graphs[0].slow_norms == (("norm",) if said else ())
    assert ("BatchNorm with another axis than 1: norm" in str(found)) is said


def test_the_first_graph_for_a_gpu_logs_it_once(caplog):
    symbol, conversion = network(axis=3), Conversion(mxmp.Policy("float16"))
    with caplog.at_level(logging.WARNING, "mxmp"):
        for device in ("cpu", "gpu", "gpu"):
            graph = Graph.from_symbol(symbol)
            conversion.build(graph, Use(device, symbol.list_arguments()[1:]))
    assert len([r for r in caplog.records if "norm: BatchNorm with another axis than 1" in r.getMessage()]) == 1


@pytest.mark.parametrize(("norm", "advised"), [(False, True), (True, False)])
def test_channels_last_are_advised_for_networks_without_batch_norm_alone(norm, advised):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), *([nn.BatchNorm()] if norm else []), nn.Dense(8))
    net.initialize()
    text = str(mxmp.diagnose.advise(net, (8, 8, 16, 16)))
    assert ("layout='NHWC' saves that" in text) is advised
    assert ("keep it nevertheless" in text) is not advised


def test_advise_names_the_norms():
    assert mxmp.diagnose.advise(network(axis=3), data=(8, 16, 16, 8)).slow_norms == ("norm",)
