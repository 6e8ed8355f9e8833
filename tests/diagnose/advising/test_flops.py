"""FLOPs of every matrix operator against the definition, in loops and of casts."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.flops import products_of, tensors
from support.counting import count

import mxmp
from mxmp.precision.graph import Graph

S = mx.sym
X = S.var("x")


def test_flops_are_counted_by_the_multiply():
    """A product written out: for every output a multiply and an add per term."""
    rows, inputs, outputs = 3, 5, 7
    counted = sum(2 for _ in np.ndindex(rows, inputs, outputs))
    assert products_of(S.FullyConnected(X, num_hidden=outputs), x=(rows, inputs)).flops == counted


def test_what_multiplies_no_matrices_has_no_flops():
    assert count(Graph.from_symbol(S.softmax(S.relu(X) + 1)), tensors(x=(4, 5))).flops == 0


@pytest.mark.parametrize(
    ("read", "rows"),
    [(lambda x: x, 4), (lambda x: S.one_hot(S.argmax(x, axis=-1), depth=3), 3)],
    ids=["rows", "argmax, which keeps its axis"],
)
def test_flops_of_a_loop_are_those_of_all_its_rounds(read, rows):
    def body(row, states):
        y = S.FullyConnected(read(row + states[0]), S.var("w"), no_bias=True, num_hidden=4, flatten=False)
        return y, [y]

    outputs, states = S.contrib.foreach(body, X, [S.var("s")])
    graph = Graph.from_symbol(S.Group([outputs, *states]))
    assert count(graph, tensors(x=(5, 2, 4), s=(2, 4), w=(4, rows))).flops == 5 * 2 * 2 * rows * 4


def test_low_flops_and_bytes_of_casts():
    low = S.amp_cast(X, dtype="float16")
    again = S.amp_cast(X, dtype="float16")
    weight = S.amp_cast(S.var("w"), dtype="float16")
    y = S.FullyConnected(low, weight, no_bias=True, num_hidden=8)
    z = S.FullyConnected(S.amp_cast(again + 0 * low, dtype="float32"), S.var("v"), no_bias=True, num_hidden=8)
    symbol = S.Group([S.amp_cast(y, dtype="float16"), z])
    counts = count(Graph.from_symbol(symbol), tensors(x=(2, 6), w=(8, 6), v=(8, 6)))
    assert (counts.flops, counts.low_flops) == (2 * 2 * 2 * 6 * 8, 2 * 2 * 6 * 8)
    assert (counts.casts, counts.cast_bytes) == (3, (12 + 48 + 12) * 6)  # equal ones are one, and one does nothing


def test_bytes_of_the_outputs_casts_are_told_apart():
    y = S.FullyConnected(
        S.amp_cast(X, dtype="float16"), S.amp_cast(S.var("w"), dtype="float16"), no_bias=True, num_hidden=8
    )
    counts = count(Graph.from_symbol(S.amp_cast(y, dtype="float32")), tensors(x=(2, 6), w=(8, 6)))
    assert (counts.casts, counts.cast_bytes, counts.output_bytes) == (3, (12 + 48 + 16) * 6, 16 * 6)


def test_copies_by_convolutions_of_ones_are_no_work_of_the_network(monkeypatch):
    monkeypatch.setenv("MXMP_WITHOUT", "emulated_bfloat16")  # which not every CPU needs
    symbol = S.Convolution(X, S.var("w"), S.var("b"), kernel=(3, 3), num_filter=64, num_group=8)
    low = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
    assert sum(node.op == "Convolution" for node in Graph.from_symbol(low).nodes()) == 2
    shapes = tensors(x=(2, 64, 7, 7), w=(64, 8, 3, 3), b=(64,))
    counts = count(Graph.from_symbol(low), shapes)
    assert counts.flops == counts.low_flops == count(Graph.from_symbol(symbol), shapes).flops
