"""A handful of the sweep's models, and that it counts, rounds and survives as it says."""

from __future__ import annotations

import json
import os
import time

import mxnet as mx
import numpy as np
import pytest
import sweep_models
from mxnet import gluon

pytest.importorskip("gluoncv", reason="needs GluonCV: pip install 'mxmp[vision]'")
pytest.importorskip("gluonnlp", reason="needs GluonNLP: pip install 'mxmp[nlp]'")

from gluoncv.model_zoo import get_model_list
from gluonnlp.model import list_models
from zoo import catalogue, flops, ideal, running
from zoo.case import Case, uniform
from zoo.measure import STAGES, Model

FEW = ["cifar_resnet20_v1", "nn.Conv2D", "nlp.TransformerEncoderCell", "flow.foreach", "np.convolutional"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "models.json"
    sweep_models.main([*FEW, "--results", str(path)])
    return json.loads(path.read_text())


@pytest.mark.parametrize("dtype", sweep_models.DTYPES)
@pytest.mark.parametrize("name", FEW)
def test_models_are_as_near_to_fp32_as_perfect_kernels(swept, name, dtype):
    result = swept[name]
    assert result.keys() == {"reference", *STAGES}
    floor = 30 if dtype == "float16" else 15
    assert result[f"{dtype}.mxmp"]["outputs_db"] > floor
    assert sweep_models.within(result, dtype), result


def test_amp_stands_beside(swept):
    assert "outputs_db" in swept["cifar_resnet20_v1"]["bfloat16.amp"]
    assert "not implemented" in swept["cifar_resnet20_v1"]["float16.amp"]["error"]


def test_every_name_of_the_zoos_is_in_the_catalogue():
    assert set(get_model_list()) - catalogue.CASES.keys() == set()
    networks = {name for name in list_models() if name.islower()}  # the others are classes
    assert networks - catalogue.CASES.keys() == set()
    assert sorted(catalogue.in_order()) == sorted(catalogue.CASES)


# -- Counting ---------------------------------------------------------------------------------------


def counts(symbol, **shapes):
    known = {name: (shape, np.dtype("float32")) for name, shape in shapes.items()}
    return flops.count(symbol.tojson(remove_amp_cast=False), known)


S = mx.sym
X = S.var("x")


@pytest.mark.parametrize(
    ("symbol", "shapes", "expected"),
    [
        (S.Convolution(X, kernel=(3, 3), num_filter=8, num_group=2), {"x": (2, 4, 8, 8)}, 2 * 2 * 8 * 36 * 2 * 9),
        (S.Deconvolution(X, kernel=(3, 3), num_filter=8), {"x": (2, 4, 8, 8)}, 2 * 2 * 4 * 64 * 8 * 9),
        (S.FullyConnected(X, num_hidden=8, flatten=False), {"x": (2, 6, 5)}, 2 * 12 * 5 * 8),
        (S.batch_dot(X, S.var("y")), {"x": (3, 4, 5), "y": (3, 5, 7)}, 2 * 3 * 4 * 5 * 7),
        (S.dot(X, S.var("y"), transpose_b=True), {"x": (4, 5), "y": (7, 5)}, 2 * 4 * 5 * 7),
        (S.contrib.interleaved_matmul_selfatt_qk(X, heads=2), {"x": (6, 3, 24)}, 2 * 6 * 6 * 3 * 8),
        (S.relu(X), {"x": (4, 5)}, 0),
    ],
)
def test_flops_of_operators(symbol, shapes, expected):
    assert counts(symbol, **shapes).flops == expected


def test_flops_of_a_loop_are_those_of_all_its_rounds():
    def body(row, states):
        y = S.FullyConnected(row + states[0], S.var("w"), no_bias=True, num_hidden=4)
        return y, [y]

    outputs, states = S.contrib.foreach(body, X, [S.var("s")])
    found = counts(S.Group([outputs, *states]), x=(5, 2, 4), s=(2, 4), w=(4, 4))
    assert found.flops == 5 * 2 * 2 * 4 * 4


def test_low_flops_and_bytes_of_casts():
    low = S.amp_cast(X, dtype="float16")
    again = S.amp_cast(X, dtype="float16")
    weight = S.amp_cast(S.var("w"), dtype="float16")
    y = S.FullyConnected(low, weight, no_bias=True, num_hidden=8)
    z = S.FullyConnected(S.amp_cast(again + 0 * low, dtype="float32"), S.var("v"), no_bias=True, num_hidden=8)
    found = counts(S.Group([S.amp_cast(y, dtype="float16"), z]), x=(2, 6), w=(8, 6), v=(8, 6))
    assert (found.flops, found.low_flops) == (2 * 2 * 2 * 6 * 8, 2 * 2 * 6 * 8)
    assert (found.casts, found.cast_bytes) == (3, (12 + 48 + 12) * 6)  # equal ones are one, and one does nothing


# -- The controls -----------------------------------------------------------------------------------


def test_perfect_kernels_round_what_matrix_operators_read_and_write():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3, use_bias=False), gluon.nn.Activation("tanh"))
    net.initialize(mx.init.Normal(1))
    net.hybridize()
    x = uniform(5, 3)
    with ideal.rounded_matrices("float16"):
        found = net(x).asnumpy()
    half = [running.rounded(v.asnumpy(), "float16") for v in (x, net[0].weight.data())]
    expected = np.tanh(running.rounded(half[0] @ half[1].T, "float16"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    net.hybridize()
    assert not np.allclose(net(x).asnumpy(), expected, rtol=1e-6)


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
