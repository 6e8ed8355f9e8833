"""``net.forward(x)`` in place of ``net(x)``: low precision, or a refusal; never FP32 without a word."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.modules import SHAPES
from kit.twins import FLAGS, array, convert, equal_or_refused, seeded, sequence
from mxnet import gluon
from mxnet.gluon import nn

import mxmp


def symbol_block():
    data = mx.sym.var("data", dtype="float32")
    x = mx.sym.FullyConnected(data, num_hidden=5, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=3, name="fc2")
    net = gluon.SymbolBlock(x, data)
    for name, param in net.collect_params().items():
        param.shape = SHAPES[name]
    return seeded(net)


def leaf():
    return seeded(nn.Dense(3, in_units=6))


def tree():
    return seeded(sequence(nn.Dense(5, in_units=6, activation="tanh"), nn.Dense(3, in_units=5)))


NETS = {"SymbolBlock": symbol_block, "leaf": leaf, "tree": tree}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_forward_computes_what_a_call_computes_or_says_to_call(policy, kind, flags, called_before):
    x = array(0, 4, 6)
    expected = mxmp.convert(NETS[kind](), policy)(x).asnumpy()
    assert not np.array_equal(expected, NETS[kind]()(x).asnumpy())
    net = NETS[kind]()
    convert(policy, net, flags=FLAGS[flags])
    if called_before:
        net(x)
    equal_or_refused(
        lambda: net.forward(x).asnumpy(), lambda found: np.testing.assert_array_equal(found, expected), saying="call"
    )


@pytest.mark.parametrize("kind", NETS)
def test_a_parent_s_forward_that_calls_a_child_s_forward(kind):
    """As a plain Block may write it."""

    class Parent(gluon.Block):
        def __init__(self, child):
            super().__init__()
            self.child = child

        def forward(self, x):
            return self.child.forward(x)

    x = array(0, 4, 6)
    expected = mxmp.convert(NETS[kind]())(x).asnumpy()
    net = Parent(NETS[kind]())
    net.child.hybridize()
    mxmp.convert(net)
    equal_or_refused(
        lambda: net(x).asnumpy(), lambda found: np.testing.assert_array_equal(found, expected), saying="call"
    )
