"""Which blocks of a net run as graphs: plain blocks, children by themselves, excluded ones."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.networks import made, mlp
from kit.oracle import sqnr
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
