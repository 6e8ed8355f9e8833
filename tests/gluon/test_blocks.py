"""Which blocks of a net run as graphs: plain blocks, children by themselves, excluded ones."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.networks import made, mlp
from kit.oracle import sqnr
from kit.twins import array, assert_close, seeded, sequence, train, trainer_of
from mxnet import gluon
from mxnet.gluon import nn

import mxmp


class Plain(gluon.Block):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.second = mlp(), nn.Dense(2)

    def forward(self, x):
        return self.second(self.first(x) * 2) if float(x.sum().asscalar()) == 0 else self.second(self.first(x))


def test_a_plain_block_has_its_hybrid_children_converted():
    net = Plain()
    net.initialize()
    x = mx.nd.random.normal(shape=(3, 6))
    want = net(x).asnumpy()
    mxmp.convert(net)
    got = net(x).asnumpy()
    assert got.dtype == np.float32
    assert not np.array_equal(got, want)
    assert sqnr(want, got) > 45
    np.testing.assert_array_equal(mxmp.restore(net)(x).asnumpy(), want)


def test_a_converted_child_of_an_unconverted_graph_is_an_error_that_names_both():
    net, x = made("mlp")
    mxmp.convert(net[0])
    net.hybridize()
    with pytest.raises(ValueError, match=rf"{net[0].name}.*{net.name}.*outermost.*mxmp\.convert") as caught:
        net(mx.nd.array(x))
    assert "casts would be lost" in str(caught.value)
    mxmp.convert(net)
    net(mx.nd.array(x))


class SharedByDefault(gluon.HybridBlock):
    """As GluonNLP's MLPAttentionCell: a default argument is one block in all nets."""

    def __init__(self, act: gluon.HybridBlock = gluon.nn.Activation("tanh")) -> None:  # noqa: B008
        super().__init__()
        with self.name_scope():
            self.body, self.act = gluon.nn.Dense(6, in_units=6), act

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.act(self.body(x))


@pytest.mark.parametrize("hybridized", [False, True])
def test_an_fp32_net_may_share_a_block_without_parameters_with_a_converted_one(hybridized):
    nets, x = [SharedByDefault() for _ in range(2)], mx.nd.random.normal(shape=(3, 6))
    for net in nets:
        net.initialize()
    want = nets[1](x).asnumpy()
    mxmp.convert(nets[0], "bfloat16")(x)
    nets[1].hybridize(hybridized)
    np.testing.assert_array_equal(nets[1](x).asnumpy(), want)
    assert not np.array_equal(nets[0](x).asnumpy(), mxmp.restore(nets[0])(x).asnumpy())


def test_exclude_keeps_a_block_in_fp32():
    net, x = made("mlp")
    want = net[0](mx.nd.array(x)).asnumpy()
    mxmp.convert(net, exclude=[net[0].name])
    np.testing.assert_array_equal(net[0](mx.nd.array(x)).asnumpy(), want)
    mxmp.convert(net)
    assert not np.array_equal(net[0](mx.nd.array(x)).asnumpy(), want)


class ByValue(gluon.HybridBlock):
    """Looks at a number, which no graph can."""

    def hybrid_forward(self, F, x):  # noqa: N803
        return x * 2 if float(F.sum(x).asscalar()) > 0 else x


class OwnForward(gluon.HybridBlock):
    """Overrides ``forward``: MXNet traces ``hybrid_forward``, which there is none of."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.inner = nn.Dense(6, in_units=6)

    def forward(self, x):
        return self.inner(x) + 1


WAYS = {
    "name": lambda block: [block.name],
    "pattern": lambda block: ["*" + block.name.split("_")[-1]],
    "filter": lambda block: lambda name, each: each is block,
    "filter of a class": lambda block: lambda name, each: isinstance(each, type(block)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ByValue, OwnForward])
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_excluding_a_block_leaves_it_as_python_and_converts_around_it(policy, kind, way):
    nets = [seeded(sequence(nn.Dense(6, in_units=6), kind(), nn.Dense(3, in_units=6), prefix="net_")) for _ in range(2)]
    net, odd = nets[1], nets[1][1]
    mxmp.convert(net, policy, exclude=WAYS[way](odd))
    found, expected = (train(each, range(2), trainer_of(how, each)) for each, how in ((net, policy), (nets[0], None)))
    assert_close(found, expected, policy)
    report = mxmp.explain(net, array(0, 4, 6))
    assert odd.name in report.unconverted
    assert sum(node.dtype == policy for node in report.nodes if node.op == "FullyConnected") == 2


def test_a_filter_keeps_a_block_in_fp32_that_could_be_traced_too():
    net = seeded(sequence(nn.Dense(6, in_units=6), nn.Dense(3, in_units=6)))
    mxmp.convert(net, "float16", exclude=lambda name, block: block is net[1])
    report = mxmp.explain(net, array(0, 4, 6))
    assert [n.dtype for n in report.nodes if n.op == "FullyConnected"] in (["float16", "float32"], ["float16"])
