"""What is said of a block that cannot be traced does what it says."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.known import takes
from mxnet.gluon import nn

import mxmp

X = mx.nd.random.uniform(0.5, 1, shape=(4, 3))


def test_what_is_inside_a_block_that_cannot_be_traced_is_converted_by_itself():
    alone = takes(lambda op, x: x / max(1, x.max().asscalar()), "float16")
    with pytest.raises(ValueError, match=r"or convert, in place of it, what is inside, as mxmp.convert\(net.dense\)"):
        alone(X)
    net = nn.HybridSequential()
    net.add(nn.Dense(3), takes(alone.compute))
    net[0].initialize()
    mxmp.convert(net, "float16")
    with pytest.raises(
        ValueError, match=r"isinstance\(block, Takes\)\), and what is inside by itself, as .*block.dense"
    ):
        net(X)
    mxmp.convert(net, "float16", exclude=lambda name, block: isinstance(block, type(alone)))
    mxmp.convert(net[1].dense, "float16")
    net(X)
    assert all(node.dtype == "float16" for node in mxmp.explain(net).nodes if node.op == "FullyConnected")


def test_lambdas_that_read_an_array_are_left_as_python_with_their_class():
    net = nn.HybridSequential()
    for _ in range(2):
        net.add(nn.Dense(3), nn.HybridLambda(lambda op, x: op.broadcast_add(x, X[:1])))
    net.initialize()
    want = net(X).asnumpy()
    mxmp.convert(net, "float16")
    with pytest.raises(ValueError, match=r"leave such blocks as Python.*isinstance\(block, HybridLambda"):
        net(X)
    mxmp.convert(net, "float16", exclude=lambda name, block: isinstance(block, nn.HybridLambda))
    np.testing.assert_allclose(net(X).asnumpy(), want, rtol=0.02, atol=0.01)
