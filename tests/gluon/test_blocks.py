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
from mxmp import Plan
from mxmp.precision.renaming import renamed


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


def test_a_child_of_a_converted_net_can_be_called_alone():
    net, x = made("mlp")
    want = net[0](mx.nd.array(x)).asnumpy()
    mxmp.convert(net)
    for _ in range(2):
        child = net[0](mx.nd.array(x))
        assert child.dtype == np.float32
        assert not np.array_equal(child.asnumpy(), want)
        assert sqnr(want, child.asnumpy()) > 55
        net(mx.nd.array(x))


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


# MXNet says so of a network with another graph in evaluation.
pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


def scoped():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Dense(4, in_units=4), nn.HybridSequential())
        with net[1].name_scope():
            net[1].add(nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    return net


def layers(*widths, activation=None, kind=nn.Dense):
    net = nn.HybridSequential()
    net.add(*(kind(width, in_units=4, activation=activation) for width in widths))
    net.initialize()
    return net


def test_blocks_that_would_get_one_name_leave_the_plan_as_it_is():
    plan = mxmp.tune(layers(4, 4), (2, 4), policy="float16", measure=False)
    assert renamed(plan, ["n_", "a_", "b_"]).blocks == ("n_", "a_", "b_")
    for blocks in (["n_", "a_", "a_"], ["n_", "a_"], ["n_", "a_", "b_", "c_"], [], ["", "", ""], plan.blocks):
        assert renamed(plan, blocks) is plan


def test_a_file_whose_blocks_are_none_is_refused():
    text = mxmp.tune(scoped(), (2, 4), policy="float16", measure=False).to_json()
    start = text.index(' "blocks"')
    end = text.index("],", start) + 1
    for wrong in ("[1]", "5", '{"a": 1}', '"dense0_"', "null", "[null]"):
        with pytest.raises(ValueError, match="not a precision plan"):
            Plan.from_json(f'{text[:start]} "blocks": {wrong}{text[end:]}')
