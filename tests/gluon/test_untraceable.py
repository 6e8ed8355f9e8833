"""What is said of a block that cannot be traced does what it says."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.takes import Takes, X, takes
from mxnet import autograd
from mxnet.gluon import nn

import mxmp


def test_what_is_inside_a_block_that_cannot_be_traced_is_converted_by_itself():
    def compute(op, x):
        return x / max(1, x.max().asscalar())

    alone = takes(compute, "float16")
    with pytest.raises(ValueError, match=r"or convert, in place of it, what is inside, as mxmp.convert\(net.dense\)"):
        alone(X)
    net = nn.HybridSequential()
    net.add(nn.Dense(3), takes(compute))
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
    with pytest.raises(ValueError, match=r"got an <NDArray 1x.*leave such blocks.*isinstance\(block, HybridLambda"):
        net(X)
    mxmp.convert(net, "float16", exclude=lambda name, block: isinstance(block, nn.HybridLambda))
    np.testing.assert_allclose(net(X).asnumpy(), want, rtol=0.02, atol=0.01)


def test_a_net_that_is_one_block_without_others_is_not_said_to_have_a_rest():
    def add(op, x):
        return op.broadcast_add(x, X[:1])

    alone = nn.HybridLambda(add)
    with pytest.raises(ValueError, match=r"as it gets Parameters; .* or do not convert it"):
        mxmp.convert(alone, "float16")(X)
    net = nn.Sequential()
    net.add(nn.Dense(3), nn.HybridLambda(add))
    net.initialize()
    with pytest.raises(ValueError, match=r"leave such blocks as Python and convert the rest"):
        mxmp.convert(net, "float16")(X)


class Shifted(nn.HybridBlock):
    """Adds an array of its own, in one of several ways, behind a dense layer."""

    def __init__(self, add, constant=False):
        super().__init__()
        self.add = add
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=3)
            if constant:
                self.c = self.params.get_constant("c", X[:1])

    def hybrid_forward(self, op, x, c=None):
        return self.add(op, self.dense(x), c)


SHIFTS = {
    "operator": lambda op, x, c: x * X,
    "from the left": lambda op, x, c: X * x,
    "argument": lambda op, x, c: op.broadcast_add(x, X[:1]),
    "made there": lambda op, x, c: op.broadcast_add(x, mx.nd.ones((1, 3))),
}


@pytest.mark.parametrize("kind", SHIFTS)
def test_an_array_of_the_block_is_to_be_a_constant_and_as_one_it_runs(kind):
    net = Shifted(SHIFTS[kind])
    net.initialize()
    mxmp.convert(net, "bfloat16")
    with pytest.raises(ValueError, match=r"Write self\.c = self\.params\.get_constant\('c', array\) in __init__"):
        net(X)
    nets = [Shifted(lambda op, x, c: op.broadcast_add(x, c), constant=True) for _ in range(2)]
    for each in nets:
        mx.random.seed(3)
        each.initialize()
    mxmp.convert(nets[1], "bfloat16")
    np.testing.assert_allclose(*[each(X).asnumpy() for each in nets], rtol=0.02, atol=0.01)


def test_an_operator_of_arrays_is_to_be_one_of_f():
    net = Shifted(lambda op, x, c: mx.nd.relu(x))
    net.initialize()
    with pytest.raises(ValueError, match=r"Write F in place of mx\.nd, or"):
        mxmp.convert(net, "bfloat16")(X)


@mx.util.use_np
@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        (lambda op, x, c: mx.np.sum(x), r"Write F\.np and F\.npx in place of mx\.np and mx\.npx"),
        (lambda op, x, c: mx.np.exp(x), r"Write F\.np in place of mx\.np\. For an array of the block"),
        (lambda op, x, c: x * mx.np.ones(3), r"write self\.c = self\.params\.get_constant"),
    ],
)
def test_an_operator_of_arrays_in_the_numpy_interface_is_to_be_one_of_f_np(kind, cure):
    net = Shifted(kind)
    net.initialize()
    with pytest.raises(ValueError, match=cure):
        mxmp.convert(net, "bfloat16")(X.as_np_ndarray())


class Heads(nn.HybridBlock):
    def __init__(self, registers):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(3, in_units=3)
            self.heads = {name: nn.Dense(2, in_units=3) for name in "ab"}
        for each in self.heads.values():
            self.register_child(each) if registers else each.initialize()

    def hybrid_forward(self, op, x):
        x = self.first(x)
        return op.concat(*[head(x) for head in self.heads.values()])


@pytest.mark.filterwarnings("ignore:.* is an unregistered container with Blocks")
def test_layers_in_a_dict_are_to_be_children_and_as_children_they_run():
    net = Heads(registers=False)
    net.initialize()
    with pytest.raises(ValueError, match=r"is a Parameter of a layer that .* calls .*self\.register_child\(layer\)"):
        mxmp.convert(net, "bfloat16")(X)
    net = Heads(registers=True)
    net.initialize()
    want = net(X).asnumpy()
    np.testing.assert_allclose(mxmp.convert(net, "bfloat16")(X).asnumpy(), want, rtol=0.02, atol=0.01)


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.filterwarnings("ignore:.* is not used by any computation")
@pytest.mark.parametrize(
    ("compute", "cured", "said"),
    [
        (
            lambda block, op, x: op.khatri_rao(x, x),
            lambda block, op, x: op.BlockGrad(op.khatri_rao(x, x)),
            "operator khatri_rao has no gradient.*write F.BlockGrad",
        ),
        (
            lambda block, op, x: op.ones((2, 2)),
            lambda block, op, x: op.ones_like(x),
            "no output depends on an input.*such as F.ones_like",
        ),
    ],
    ids=["without a gradient", "without an input"],
)
@pytest.mark.parametrize("training", [False, True])
def test_what_mxnet_makes_no_graph_of_has_a_cure_that_cures(compute, cured, said, training):
    def of(code):
        net = Takes(code)
        net.initialize()
        return mxmp.convert(net, "float16")

    with autograd.record(training), pytest.raises(mx.MXNetError, match=said):
        of(compute)(X)
    with autograd.record(training):
        of(cured)(X).wait_to_read()
