"""Which dtype an operator takes that may compute in either: the one with fewer casts."""

from __future__ import annotations

import mxnet as mx
from kit.oracle import S
from kit.plans import Z, fc, low_of


def test_gates_and_attention_stay_low():
    gate = S.sigmoid(fc(Z, "gate_fc"), name="gate")
    gated = S.elemwise_mul(gate, Z, name="gated")
    assert {"gate", "gated"} <= low_of(fc(gated, "out"))
    rest = S.elemwise_add(gated, S.elemwise_mul(1 - gate, Z, name="rest"), name="sum")
    assert {"gate", "rest", "sum"} <= low_of(fc(rest, "out"))


def test_an_unrolled_lstm_computes_low_what_no_fp32_state_multiplies():
    cell = mx.rnn.LSTMCell(4, prefix="lstm_")
    outputs, _ = cell.unroll(3, [S.var(f"x{i}") for i in range(3)], merge_outputs=False)
    assert {f"lstm_t{i}_i" for i in range(3)} <= low_of(fc(outputs[-1], "out"))
    zero = fc(S.var("start"), "zero")
    outputs, _ = cell.unroll(3, [S.var(f"x{i}") for i in range(3)], begin_state=[zero, zero], merge_outputs=False)
    assert {f"lstm_t{i}_{gate}" for i in range(3) for gate in "ifo"} <= low_of(fc(outputs[-1], "out"))


def test_a_sigmoid_before_a_norm_that_a_gpu_computes_inside_stays_low():
    x = S.Convolution(S.var("data"), kernel=(1, 1), num_filter=4, name="c")
    x = S.BatchNorm(S.sigmoid(x, name="s"), name="bn")
    assert "s" in low_of(S.Convolution(x, kernel=(1, 1), num_filter=4, name="c2"))


def test_attention_with_a_mask_stays_low():
    scores = S.dot(Z, Z, transpose_b=True, name="scores")
    masked = S.broadcast_add(scores / 2, S.var("mask") * -1e4)
    assert "scores" in low_of(S.dot(S.softmax(masked), Z, name="read"))


def residual(norm):
    x = fc(S.var("data"), "into")
    for name in ("first", "second"):
        x = norm(S.elemwise_add(fc(x, f"{name}_fc"), x, name=f"{name}_sum"), name=f"{name}_norm")
    return fc(x, "last")


def test_a_norm_and_a_product_that_an_fp32_norm_reads_are_added_in_fp32():
    """As in a transformer: a cast of the product costs what one of the sum does. The first sum has no norm in it."""
    assert low_of(residual(S.LayerNorm)) & {"first_sum", "second_sum"} == {"first_sum"}


def test_a_norm_and_a_product_that_cudnn_s_norm_reads_are_added_low():
    assert {"first_sum", "second_sum"} <= low_of(residual(S.BatchNorm))


def test_outputs_that_the_policy_leaves_low_are_low():
    assert low_of(S.sigmoid(Z, name="p"), "float16,output=compute") == {"z", "p"}


def test_fp32_reaches_through_what_rounds_nothing_but_not_through_what_shrinks():
    twice = S._internal._mul_scalar(fc(Z, "fc") * 2, scalar=2, name="twice")
    assert "twice" not in low_of(S.relu(twice), device="cpu")
    assert "twice" in low_of(S.max(twice, axis=1), device="cpu")
