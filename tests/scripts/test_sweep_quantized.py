"""What the sweep of INT8 takes from a report: INT8's metric, with all operators and with those that are accurate."""

import mxnet as mx
import pytest
from mxnet.gluon import nn
from sweep import quantized

pytestmark = [pytest.mark.slow, pytest.mark.vnni]


@pytest.fixture(scope="module")
def net():
    net = nn.HybridSequential()
    net.add(*(nn.Dense(8, activation="relu", flatten=False) for _ in range(3)))
    net.initialize(mx.init.Normal(0.5))
    net(mx.nd.ones((1, 8)))
    return net


def trained(net, metric, allowed):
    """A network whose metric is its number of operators in INT8, of which ``allowed`` lose nothing."""
    sign = 1 if metric.startswith("accuracy") else -1
    batches = [mx.nd.random.normal(shape=(4, 8)) for _ in range(3)]
    count = lambda served: quantized.operators(served.symbol)  # noqa: E731
    return quantized.Trained(net, batches, lambda served: -sign * (count(served) > allowed), count, metric)


@pytest.mark.parametrize("metric", ["accuracy, %", "perplexity"])
def test_what_int8_loses_is_not_taken_from_float32(net, metric):
    found = quantized.quantized(trained(net, metric, 2), 2, max_drop=0.5)
    assert found["all"] == {"value": 3, "operators": 3}
    assert found["within"] == {"value": 2, "operators": 2}
    assert set(found["sqnr"]) == {"int8", "int8, 1 in float32"}
    row = quantized.row("name", {"metric": metric, "float32": 0.5, **dict.fromkeys(("5", "10", "50"), found)})
    assert row == ["name", metric, "0.50", *["+1.50 (all: +2.50)"] * 3, "2 of 3"]


@pytest.mark.parametrize("has_layers", [True, False])
def test_a_network_without_a_layer_for_int8_or_that_no_int8_is_accurate_enough_for_has_none(net, has_layers):
    if not has_layers:
        net = nn.LayerNorm(in_channels=8)
        net.initialize()
    found = quantized.quantized(trained(net, "accuracy, %", 0), 2, max_drop=0.5)
    row = quantized.row("name", {"metric": "", "float32": 3, **dict.fromkeys(("5", "10", "50"), found)})
    assert found["within"] is None
    if has_layers:
        assert found["all"]["operators"] == 3
        assert row[3:] == ["none (all: +0.00)"] * 3 + ["none"]
    else:
        assert (found["all"], found["calibrator"]) == (None, None)
        assert "nothing to quantize" in found["notes"][0]
        assert row[3:] == ["none"] * 4
