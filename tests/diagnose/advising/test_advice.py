"""What is advised: sizes that miss the Tensor Cores, products that could be one, and where memory is the bound."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.flops import fc, language_model
from mxnet import gluon

from mxmp.diagnose import advise
from mxmp.diagnose.advising.advice import Padding
from mxmp.diagnose.advising.gpus import GPUS

S = mx.sym


X = S.var("data")


def test_a_vocabulary_is_padded():
    found = advise(language_model(33_278, 648), data=(35, 16))
    decoder = found.matrices[-1]
    assert decoder.paddings == (Padding("outputs", 33_278, 33_280),)
    assert decoder.padding_cost == pytest.approx(2 / 33_278)
    assert "outputs 33,278 -> 33,280 (+0.006% of its FLOPs)" in str(found)
    assert found.tensor_share == pytest.approx(decoder.flops / found.flops)  # MXNet's RNN never requests them
    assert found.fitting_share == 0
    assert "never requests" in str(found)


@pytest.mark.parametrize(
    ("symbol", "shape", "paddings"),
    [
        (fc(64), (31, 16), [("rows (batch)", 31, 32)]),
        (fc(10), (32, 12), [("outputs", 10, 16), ("inputs", 12, 16)]),
        (fc(64), (32, 16), []),
        (
            S.Convolution(X, kernel=(3, 3), num_filter=20),
            (5, 3, 9, 9),
            [("input channels", 3, 8), ("output channels", 20, 24)],
        ),
        (S.Convolution(X, kernel=(3, 3), num_filter=8, stride=(2, 2)), (5, 3, 9, 9), [("input channels", 3, 4)]),
        (S.Convolution(X, kernel=3, num_filter=8, stride=2), (5, 3, 9), [("input channels", 3, 4)]),
        (S.Convolution(X, kernel=(3, 3), num_filter=8, stride=(2, 2)), (5, 4, 9, 9), []),
        (
            S.Convolution(X, kernel=(3, 3), num_filter=24, num_group=2),
            (5, 16, 9, 9),
            [("output channels a group", 12, 16)],
        ),
    ],
)
def test_sizes_that_are_no_multiples(symbol, shape, paddings):
    (matrix,) = advise(symbol, data=shape).matrices
    assert [(p.what, p.value, p.to) for p in matrix.paddings] == paddings


def test_int8_wants_multiples_of_16():
    ranges = {f"{end}_{of}": S.var(f"{end}_{of}", shape=(1,)) for end in ("min", "max") for of in ("data", "weight")}
    product = S.contrib.quantized_fully_connected(
        data=S.var("data", dtype="int8"), weight=S.var("w", dtype="int8"), num_hidden=24, no_bias=True, **ranges
    )
    (matrix,) = advise(product, device="t4", data=(32, 32), w=(24, 32)).matrices
    assert (matrix.dtype, matrix.paddings) == ("int8", (Padding("outputs", 24, 32),))
    assert matrix.on_tensor_cores(GPUS["t4"])
    assert not matrix.on_tensor_cores(GPUS["v100"])


def test_layouts():
    conv = S.Convolution(X, kernel=(3, 3), num_filter=8, layout="NHWC")
    assert advise(conv, data=(2, 9, 9, 8)).matrices[0].layout == "NHWC"
    assert advise(S.dot(X, S.var("y"), transpose_a=True), data=(8, 16), y=(8, 24)).matrices[0].layout == "TN"
    assert "NCHW" not in str(advise(conv, data=(2, 9, 9, 8)))
    assert "transpose around" in str(advise(S.Convolution(X, kernel=(3, 3), num_filter=8), data=(2, 8, 9, 9)))


def test_gates_of_one_input_could_be_one_product():
    gates = [fc(64, name, flatten=False) for name in ("i", "f", "g", "o")]
    state = S.var("h")
    recurrent = [fc(64, f"h_{name}", state) for name in ("i", "f", "g", "o")]
    found = advise(sum(map(S.sum, gates + recurrent)), data=(32, 16), h=(32, 64))
    assert [(j.names, j.input, j.outputs) for j in found.joinable] == [
        (("i", "f", "g", "o"), "data", 256),
        (("h_i", "h_f", "h_g", "h_o"), "h", 256),
    ]
    assert "one FullyConnected with 256 outputs" in str(found)


def test_queries_keys_and_values():
    tokens = S.LayerNorm(X, name="norm")
    q, k, v = (fc(768, name, tokens, flatten=False) for name in "qkv")
    out = S.batch_dot(S.softmax(S.batch_dot(q, k, transpose_b=True)), v)
    (joinable,) = advise(out, data=(4, 128, 768)).joinable
    assert (joinable.names, joinable.outputs) == (("q", "k", "v"), 3 * 768)


def test_products_that_cannot_be_joined():
    shared = S.var("w")
    both = [fc(64, name, X, weight=shared) for name in ("a", "b")]
    other = [fc(64, "c", flatten=False), fc(64, "d", S.relu(X))]
    assert advise(sum(map(S.sum, both + other)), data=(32, 16)).joinable == ()
    cell = gluon.rnn.LSTMCell(64, input_size=64)
    cell.initialize()
    assert advise(cell, (32, 64), [mx.nd.zeros((32, 64))] * 2).joinable == ()


def test_intensity_and_ridge_points():
    (matrix,) = advise(fc(1024, no_bias=True), data=(512, 256)).matrices
    elements = 512 * 256 + 256 * 1024 + 512 * 1024
    assert matrix.flops == 2 * 512 * 256 * 1024
    assert matrix.intensity == matrix.flops / (2 * elements)
    assert matrix.intensity_in("tf32") == matrix.intensity_in("float32") == matrix.intensity / 2
    ridges = {name: [round(gpu.ridge(d), 1) for d in ("float16", "tf32", "float32")] for name, gpu in GPUS.items()}
    assert ridges == {"v100": [138.9, 17.4, 17.4], "t4": [203.1, 25.3, 25.3], "a100": [200.6, 100.3, 12.5]}
