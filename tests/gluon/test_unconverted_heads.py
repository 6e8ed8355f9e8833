"""Which outputs of a block that is not converted ignore their head gradients, as loss heads do."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import autograd, gluon

from mxmp.gluon.record import Record
from mxmp.gluon.unconverted_heads import outputs_of_cached_ops


def hidden(function, arrays=1):
    """By name in the block, which outputs of a hybridized block read the gradient from above."""

    class Block(gluon.HybridBlock):
        def hybrid_forward(self, F, *given):  # noqa: N803
            return function(F, *given)

    block = Block(prefix="block_")
    block.hybridize()
    layers = gluon.nn.HybridSequential()
    layers.add(gluon.nn.Dense(3, in_units=3), gluon.nn.BatchNorm(in_channels=3), gluon.nn.Dropout(0.5))
    layers.initialize()
    given = [mx.nd.ones((4, 3)) for _ in range(arrays)]
    with autograd.record():
        out = block(layers(given[0]), *given[1:])
        outputs = out if isinstance(out, list) else [out]
        loss = sum(output.mean() for output in outputs)
    (found,) = outputs_of_cached_ops(Record([loss])).values()
    return [reads for _, reads in sorted(found.items())]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda op, x: op.square(x * 2) + 1, [True]),
        (lambda op, x: op.SoftmaxOutput(x * 2, op.zeros((4,))) * 3 + 1, [False]),
        (lambda op, x: op.MakeLoss(op.square(x) * 2, name="mine"), [False]),
        (lambda op, x: op.BlockGrad(x * 2 + 1), [False]),
        (lambda op, x: [op.make_loss(x * 2, name="a"), op.tanh(x * 3, name="b")], [False, True]),
        (lambda op, x: op.make_loss(x * 2) + op.tanh(x * 3), [True]),
    ],
)
def test_mxnet_tells_which_gradients_a_hybridized_block_reads(function, expected):
    assert hidden(function) == expected


def test_a_block_that_gets_one_array_twice_is_told_by_the_others():
    function = lambda op, x, y, z, w: op.elemwise_add(x * y * 2, z * w)  # noqa: E731
    assert hidden(function, 4) == [True]


def test_calls_in_a_row_are_told_apart():
    double = gluon.nn.HybridLambda(lambda op, x: op.square(x * 2) + 1)
    head = gluon.nn.HybridLambda(lambda op, x: op.MakeLoss(op.square(x) * 2))
    for block in (double, head):
        block.hybridize()
    x = mx.nd.ones((2, 3))
    x.attach_grad()
    with autograd.record():
        loss = double(head(double(x)))
    found = outputs_of_cached_ops(Record([loss]))
    assert [list(each.values()) for each in found.values()] == [[True], [False], [True]]
