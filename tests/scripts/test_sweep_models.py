"""A handful of the sweep's models, and that it counts, rounds and survives as it says."""

from __future__ import annotations

import contextlib
import json
import os
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon.contrib.nn import HybridConcurrent
from pages import models as make_models_page
from sweep import models as sweep_models

pytest.importorskip("gluoncv", reason="needs GluonCV: pip install 'mxmp[vision]'")
pytest.importorskip("gluonnlp", reason="needs GluonNLP: pip install 'mxmp[nlp]'")

from gluoncv.model_zoo import get_model_list
from gluonnlp.model import list_models
from support.zoo import catalogue
from support.zoo.case import Case, other_inputs, uniform
from sweep.networks import rewriting, running
from sweep.networks.measure import STAGES, Model

FEW = ["cifar_resnet20_v1", "nn.Conv2D", "nlp.TransformerEncoderCell", "flow.foreach", "np.convolutional"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "models.json"
    sweep_models.main([*FEW, "--results", str(path)])
    return json.loads(path.read_text())


@pytest.mark.parametrize("dtype", sweep_models.DTYPES)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.bfloat16_kernels  # contrib.amp has no emulation
def test_models_are_as_near_to_fp32_as_perfect_kernels(swept, name, dtype):
    result = swept[name]
    assert result.keys() == {"mxmp", "reference", *STAGES}
    floor = 30 if dtype == "float16" else 15
    assert result[f"{dtype}.mxmp"]["outputs_db"] > floor
    assert sweep_models.within(result, dtype, "ideal"), result


def test_what_does_not_pass_is_measured_with_perfect_pointwise_kernels_too():
    model = Model(catalogue.CASES["rnn.LSTMCell"]())
    model.refer()
    found = {f"float16.{stage}": model.run(f"float16.{stage}") for stage in ("ideal", "mxmp", "throughout")}
    assert sweep_models.looked_into({**found, "bfloat16.ideal": {}})[0] == "float16.throughout"
    # The gates of the last step, whose states are outputs, compute in FP32.
    assert found["float16.mxmp"]["outputs_db"] > found["float16.throughout"]["outputs_db"]
    assert sweep_models.within(found, "float16", "throughout")


def test_what_computes_less_low_than_amp_is_counted_with_slower_kernels_too(monkeypatch):
    monkeypatch.setenv("MXMP_WITHOUT", "emulated_bfloat16")
    model = Model(catalogue.CASES["gluon.mobilenetv2_0.25"]())
    model.refer()
    found = {"bfloat16.counts": model.counts("bfloat16"), "bfloat16.slow_counts": model.slow_counts("bfloat16")}
    slow = found["bfloat16.slow_counts"]
    assert found["bfloat16.counts"]["low_share"] < slow["low_share"] == 1
    assert found["bfloat16.counts"]["cast_bytes"] > 2 * slow["cast_bytes"]
    found["bfloat16.amp"] = {"low_share": 1.0, "cast_bytes": slow["cast_bytes"] - slow["output_bytes"]}
    assert "bfloat16.slow_counts" in sweep_models.looked_into(found)
    for holds in (sweep_models.share_holds, sweep_models.bytes_hold):
        assert holds(found, "bfloat16") is False
        assert make_models_page.slow_too(holds, found, "bfloat16") is True
    found["bfloat16.amp"]["low_share"] = 0.5
    assert sweep_models.bytes_hold(found, "bfloat16") is None
    assert sweep_models.share_holds(found, "bfloat16") is True


@pytest.mark.bfloat16_kernels  # contrib.amp has no emulation
def test_amp_stands_beside(swept):
    assert "outputs_db" in swept["cifar_resnet20_v1"]["bfloat16.amp"]
    assert "not implemented" in swept["cifar_resnet20_v1"]["float16.amp"]["error"]


def test_every_name_of_the_zoos_is_in_the_catalogue():
    assert set(get_model_list()) - catalogue.CASES.keys() == set()
    networks = {name for name in list_models() if name.islower()}  # the others are classes
    assert networks - catalogue.CASES.keys() == set()
    assert sorted(catalogue.in_order()) == sorted(catalogue.CASES)


# -- The controls -----------------------------------------------------------------------------------


def test_perfect_kernels_round_what_matrix_operators_read_and_write():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3, use_bias=False), gluon.nn.Activation("tanh"))
    net.initialize(mx.init.Normal(1))
    net.hybridize()
    x = uniform(5, 3)
    with rewriting.rounded_kernels("float16"):
        found = net(x).asnumpy()
    half = [running.rounded(v.asnumpy(), "float16") for v in (x, net[0].weight.data())]
    expected = np.tanh(running.rounded(half[0] @ half[1].T, "float16"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    net.hybridize()
    assert not np.allclose(net(x).asnumpy(), expected, rtol=1e-6)


def dense():
    return gluon.nn.Dense(4, in_units=4, use_bias=False)


def test_perfect_kernels_round_the_gradient_of_each_reader_and_their_sum():
    first, readers = dense(), HybridConcurrent(axis=1)
    readers.add(*(dense() for _ in range(3)))  # of one tensor, whose gradients MXNet would sum at once
    net = gluon.nn.HybridSequential()
    net.add(first, readers)
    net.initialize(mx.init.Normal(1))
    net.hybridize()
    x, up = uniform(1, 4), uniform(1, 12)
    with rewriting.rounded_kernels("bfloat16"), autograd.record():
        loss = (net(x) * up).sum()
    loss.backward()

    def low(value):
        return running.rounded(value, "bfloat16")

    ups = np.split(up.asnumpy(), 3, axis=1)
    each = [low(u) @ low(reader.weight.data().asnumpy()) for u, reader in zip(ups, readers)]
    summed = low(sum(map(low, each)))
    assert not np.array_equal(summed, low(sum(each)))
    np.testing.assert_array_equal(first.weight.grad().asnumpy(), low(summed.T @ low(x.asnumpy())))


def test_perfect_kernels_throughout_round_what_pointwise_operators_write():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3, use_bias=False), gluon.nn.Activation("tanh"))
    net.initialize(mx.init.Normal(1))
    x = uniform(5, 3)
    found = []
    for throughout in (False, True):
        net.hybridize()
        with rewriting.rounded_kernels("float16", throughout=throughout):
            found.append(net(x).asnumpy())
    np.testing.assert_array_equal(found[1], running.rounded(found[0], "float16"))
    assert not np.array_equal(*found)


@pytest.mark.parametrize("copied", [(), ("BatchNorm",)])
def test_copies_let_mxnet_train_what_it_cannot(copied):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv3D(16, 3, in_channels=3), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
    net.initialize()
    net.hybridize()
    with rewriting.plain_copies(copied), autograd.record():
        loss = net(uniform(2, 3, 5, 5, 5)).sum()
    with contextlib.nullcontext() if copied else pytest.raises(mx.MXNetError, match="is_view"):
        loss.backward()
        net[0].weight.grad().wait_to_read()


def test_other_inputs_are_others_and_these_again_afterwards():
    first = uniform(2, 3).asnumpy()
    with other_inputs(1):
        assert not np.array_equal(uniform(2, 3).asnumpy(), first)
    np.testing.assert_array_equal(uniform(2, 3).asnumpy(), first)


def test_the_lag_behind_perfect_kernels_is_small_over_other_inputs():
    model = Model(catalogue.CASES["nn.Conv2D"]())
    model.refer()
    before = model.reference
    assert all(abs(lag) < 1 for lag in model.lag("bfloat16").values())
    assert model.reference is before


@pytest.mark.parametrize(
    ("stages", "holds"),
    [
        ({"ideal": (50, 20)}, True),
        ({"ideal": (60, 20)}, False),
        ({"ideal": (60, 20), "throughout": (52, 22)}, True),
        ({"ideal": (60, 20), "throughout": (60, 20), "lag": (-1, 0)}, True),
        ({"ideal": (60, 20), "throughout": (60, 20), "lag": (-1, -4)}, False),
    ],
)
def test_a_model_holds_by_a_first_a_second_or_a_third_look(stages, holds):
    result = {f"float16.{n}": dict(zip(("outputs_db", "gradients_db"), v)) for n, v in stages.items()}
    result["float16.mxmp"] = {"outputs_db": 50.0, "gradients_db": 20.0, "inference_finite": True}
    assert sweep_models.holds(result, "float16") == holds
    assert sweep_models.within(result, "float16") == (len(stages) == 1 and holds)


def test_the_control_of_a_net_without_weights_rounds_its_inputs():
    def product(F, x):  # noqa: N803
        return F.batch_dot(x, x)

    case = Case("plain", "layer", lambda: gluon.nn.HybridLambda(product), lambda: [uniform(2, 4, 4)])
    model = Model(case)
    model.refer()
    assert 40 < model.control("bfloat16")["outputs_db"] < 70


# -- Models that end their process ------------------------------------------------------------------


def tell_and_abort(pipe):
    pipe.send(("reference", 1))
    os.abort()


def sleep(pipe):
    time.sleep(60)


def test_a_crash_and_a_limit_are_results():
    assert sweep_models.in_a_process(30, tell_and_abort) == ({"reference": 1}, "the process ended by SIGABRT")
    assert sweep_models.in_a_process(1, sleep) == ({}, "took longer than 1 s")
