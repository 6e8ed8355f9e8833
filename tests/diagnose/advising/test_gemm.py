"""The matrix products of every operator against the definition."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.flops import products_of

from mxmp.diagnose.advising.gemm import Gemm
from mxmp.precision.rule import Kind
from mxmp.precision.rules import RULES

S = mx.sym


X, Y = S.var("x"), S.var("y")


def rnn(mode, **options):
    return S.RNN(X, Y, S.var("h"), *([S.var("c")] if mode == "lstm" else []), mode=mode, **options)


# (symbol, shapes, times x (m, k) (k, n))
PRODUCTS = {
    "grouped convolution": (
        S.Convolution(X, kernel=(3, 3), num_filter=8, num_group=2, pad=(1, 1), stride=(2, 2)),
        {"x": (2, 4, 8, 8)},
        [Gemm(2, 2 * 4 * 4, 4, 2 * 9)],
    ),
    "channels last": (
        S.Convolution(X, kernel=(3, 3), num_filter=8, layout="NHWC"),
        {"x": (2, 8, 8, 4)},
        [Gemm(1, 2 * 36, 8, 4 * 9)],
    ),
    "deconvolution": (S.Deconvolution(X, kernel=(3, 3), num_filter=8), {"x": (2, 4, 8, 8)}, [Gemm(1, 128, 72, 4)]),
    "deformable": (
        S.contrib.DeformableConvolution(X, Y, kernel=(3, 3), num_filter=8),
        {"x": (2, 4, 8, 8), "y": (2, 18, 6, 6)},
        [Gemm(1, 72, 8, 36)],
    ),
    "flattening layer": (S.FullyConnected(X, num_hidden=8), {"x": (2, 6, 5)}, [Gemm(1, 2, 8, 30)]),
    "layer": (S.FullyConnected(X, num_hidden=8, flatten=False), {"x": (2, 6, 5)}, [Gemm(1, 12, 8, 5)]),
    "dot": (S.dot(X, Y, transpose_b=True), {"x": (4, 5), "y": (7, 5)}, [Gemm(1, 4, 7, 5)]),
    "dot of more axes": (S.dot(X, Y), {"x": (2, 3, 5), "y": (5, 4, 6)}, [Gemm(1, 6, 24, 5)]),
    "batch_dot": (S.batch_dot(X, Y), {"x": (3, 4, 5), "y": (3, 5, 7)}, [Gemm(3, 4, 7, 5)]),
    "transposed batch_dot": (
        S.batch_dot(X, Y, transpose_a=True, transpose_b=True),
        {"x": (3, 5, 4), "y": (3, 7, 5)},
        [Gemm(3, 4, 7, 5)],
    ),
    "gemm2": (S.linalg.gemm2(X, Y), {"x": (2, 3, 4, 5), "y": (2, 3, 5, 7)}, [Gemm(6, 4, 7, 5)]),
    "gemm": (S.linalg.gemm(X, Y, S.var("z")), {"x": (4, 5), "y": (5, 7), "z": (4, 7)}, [Gemm(1, 4, 7, 5)]),
    "gemm2 over the first axes": (
        S.linalg.gemm2(X, Y, axis=0),
        {"x": (4, 3, 5), "y": (5, 3, 7)},
        [Gemm(3, 4, 7, 5)],
    ),
    "scores": (
        S.contrib.interleaved_matmul_selfatt_qk(X, heads=2),
        {"x": (6, 3, 24)},
        [Gemm(2 * 3, 6, 6, 4)],
    ),
    "values": (
        S.contrib.interleaved_matmul_selfatt_valatt(X, Y, heads=2),
        {"x": (6, 3, 24), "y": (6, 6, 6)},
        [Gemm(2 * 3, 6, 4, 6)],
    ),
    "scores of a decoder": (
        S.contrib.interleaved_matmul_encdec_qk(X, Y, heads=2),
        {"x": (5, 3, 8), "y": (6, 3, 16)},
        [Gemm(2 * 3, 5, 6, 4)],
    ),
    "values of a decoder": (
        S.contrib.interleaved_matmul_encdec_valatt(X, Y, heads=2),
        {"x": (6, 3, 16), "y": (6, 5, 6)},
        [Gemm(2 * 3, 5, 4, 6)],
    ),
    "LSTM of two layers": (
        rnn("lstm", state_size=8, num_layers=2),
        {"x": (7, 3, 5)},
        [Gemm(1, 21, 32, 5), Gemm(7, 3, 32, 8), Gemm(1, 21, 32, 8), Gemm(7, 3, 32, 8)],
    ),
    "GRU, both ways": (
        rnn("gru", state_size=8, num_layers=2, bidirectional=True),
        {"x": (7, 3, 5)},
        [Gemm(2, 21, 24, 5), Gemm(14, 3, 24, 8), Gemm(2, 21, 24, 16), Gemm(14, 3, 24, 8)],
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_operators(case):
    symbol, shapes, gemms = PRODUCTS[case]
    assert list(products_of(symbol, **shapes).gemms) == gemms


@pytest.mark.parametrize(
    ("function", "shapes", "gemms"),
    [
        (lambda x, y: mx.sym.np.dot(x, y), [(2, 3, 5), (5, 7)], [Gemm(1, 6, 7, 5)]),
        (lambda x, y: mx.sym.np.matmul(x, y), [(2, 1, 3, 5), (4, 5, 7)], [Gemm(8, 3, 7, 5)]),
        (lambda x, y: mx.sym.np.tensordot(x, y, axes=2), [(2, 3, 5), (3, 5, 7)], [Gemm(1, 2, 7, 15)]),
        (lambda x, y: mx.sym.np.tensordot(x, y, axes=((0,), (1,))), [(2, 3), (5, 2)], [Gemm(1, 3, 5, 2)]),
    ],
)
def test_products_of_numpy_operators(function, shapes, gemms):
    symbol = function(mx.sym.var("x").as_np_ndarray(), mx.sym.var("y").as_np_ndarray())
    assert list(products_of(symbol, **dict(zip("xy", shapes))).gemms) == gemms


@pytest.mark.parametrize("axes", [(8, 8), (9, 7)])
def test_a_deconvolution_is_its_convolution_the_other_way_round(axes):
    """With every tap on a pixel, both multiply the same pairs."""
    options = {"kernel": (3, 3), "num_group": 2}
    forward = products_of(S.Convolution(X, num_filter=6, **options), x=(2, 4, *axes))
    small = (axes[0] - 2, axes[1] - 2)
    back = products_of(S.Deconvolution(X, num_filter=4, **options), x=(2, 6, *small))
    assert forward.flops == back.flops


def test_every_operator_that_computes_low_for_its_products_is_counted():
    """The rules' matrix products, and no one forgot one here."""
    from mxmp.diagnose.advising.gemm import PRODUCTS

    low = {op for op, rule in RULES.items() if rule.kind is Kind.LOW}
    aliases = {op for op in low if op.startswith(("_npx_", "_sparse_"))}  # MXNet's other names of counted ones
    assert {op for op in low - aliases if op not in PRODUCTS} == set()
