"""FullyConnected with float16 sums: as a Tensor Core computes them."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.slow


def summed_in_float16(data, weight, bias):
    """A Tensor Core of a V100: four exact products are added to a float16 number, which is rounded."""
    total = np.zeros((len(data), len(weight)), "float16")
    for first in range(0, data.shape[1], 4):
        total = (total + data[:, first : first + 4] @ weight[:, first : first + 4].T).astype("float16")
    return (total + bias).astype("float16")


@pytest.mark.parametrize("flatten", [True, False])
def test_float16_sums_of_a_dense_layer_are_those_of_a_tensor_core(flatten):
    net = nn.Dense(5, in_units=30, flatten=flatten, bias_initializer="uniform")
    net.initialize(mx.init.Normal(1))
    x = mx.nd.random.normal(shape=(8, 2, 15) if flatten else (4, 2, 30))
    outputs = []
    report = mxmp.optimize_for_inference(
        net, [x], dtypes="float16", evaluate=lambda served: outputs.append(served(x).asnumpy()) or 1.0
    ).report
    assert [each.name for each in report.candidates][-1] == "float16 sums"
    rows, weight, bias = (
        array.asnumpy().astype("float16").astype("float32") for array in (x.reshape((-1, 30)), *parameters(net))
    )
    np.testing.assert_array_equal(outputs[-1].reshape((-1, 5)), summed_in_float16(rows, weight, bias))
    assert not np.array_equal(outputs[-1], outputs[-2])


def parameters(net):
    return net.weight.data(), net.bias.data()


def test_where_float16_sums_lose_too_much_the_report_warns_of_them():
    """A float16 sum of ones ends at 2048, where the next number is 2050; an FP32 sum goes on."""
    net = nn.Dense(4, in_units=16384)
    net.initialize(mx.init.One())
    x = mx.nd.ones((8, 16384)) / 4
    report = mxmp.optimize_for_inference(net, [x], dtypes="float16").report
    assert report.chosen == "float16"
    (row,) = [each for each in report.candidates if each.name == "float16 sums"]
    assert row.verdict.startswith("below")
    assert "not accurate enough" in str(report)


def test_a_network_without_dense_layers_has_no_float16_sums_to_measure():
    net = nn.Conv2D(8, 3, in_channels=3)
    net.initialize()
    report = mxmp.optimize_for_inference(net, [mx.nd.ones((4, 3, 8, 8))], dtypes="float16").report
    assert all("float16 sums" not in each.name for each in report.candidates)
    assert "MXNET_FC_TRUE_FP16" not in str(report)
