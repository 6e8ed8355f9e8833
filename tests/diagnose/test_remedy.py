"""What the casts around batch normalisation cost, and what to do about it: explain says it, and one line of the log."""

from __future__ import annotations

import copy
import logging

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxmp
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.traffic import Remedy, RemedyLog

# (4, 2, 8, 8) -> conv (4, 16, 8, 8) -> norm -> relu -> conv (4, 3, 8, 8)
SHAPE = (4, 2, 8, 8)
MIDDLE, LAST, FIRST_WEIGHTS, LAST_WEIGHTS = 4 * 16 * 64, 4 * 3 * 64, 16 * 2 * 9, 3 * 16 * 9
CASTS_KEPT = 6 * (4 * 2 * 64 + LAST)  # of the data and of the output, 4 + 2 bytes
WEIGHTS = 6 * (FIRST_WEIGHTS + LAST_WEIGHTS)
AROUND_NORM = 6 * 2 * MIDDLE  # in front of it, and in front of the next convolution


def conv_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(3, 3, padding=1, use_bias=False))
    net.initialize()
    return net


def explained(policy, ctx, net=None, **shapes):
    return mxmp.explain((net or conv_net())(mx.sym.var("data")), policy=policy, ctx=ctx, **shapes).graphs[0]


def test_explain_gives_the_bytes_and_the_policy_that_saves_them():
    report = explained("float16", mx.gpu(), data=SHAPE)
    assert report.cast_bytes == CASTS_KEPT + AROUND_NORM
    written = 4 * (3 * MIDDLE + LAST)
    assert report.remedy == Remedy(mxmp.Policy(norm="compute"), 2, 4, CASTS_KEPT, report.cast_bytes, written)
    follows = explained("float16-fast", mx.gpu(), data=SHAPE)
    assert (len(follows.casts), follows.cast_bytes) == (report.remedy.num_casts, report.remedy.cast_bytes)
    assert follows.remedy is None
    text = str(mxmp.explain(conv_net()(mx.sym.var("data")), ctx=mx.gpu(), data=SHAPE))
    assert "norm=compute (policy 'float16-fast') casts 0.01 MiB instead of 0.05 MiB" in text


def test_weights_that_are_cast_in_the_graph_are_so_by_both_policies():
    report = explained("params=float32", mx.gpu(), data=SHAPE)
    assert report.cast_bytes == CASTS_KEPT + AROUND_NORM + WEIGHTS
    assert report.remedy.cast_bytes == CASTS_KEPT + WEIGHTS
    assert report.remedy.policy == mxmp.Policy(params="float32", norm="compute")
    assert "(policy 'compute=float16,params=float32,norm=compute')" in str(report.remedy)


def test_resnet50_at_128_images_casts_a_hundredth():
    vision = pytest.importorskip("gluoncv.model_zoo")
    found = explained("float16", mx.gpu(), vision.get_model("resnet50_v1b"), data=(128, 3, 224, 224)).remedy
    assert str(found) == "norm=compute (policy 'float16-fast') casts 0.11 GiB instead of 14.43 GiB"
    unknown = explained("float16", mx.gpu(), vision.get_model("resnet50_v1b")).remedy
    assert str(unknown) == "norm=compute (policy 'float16-fast') takes 2 casts instead of 104"


def dense_net():
    net = nn.HybridSequential()
    net.add(nn.Dense(64), nn.Dense(64), nn.Dense(64), nn.Dense(2), nn.BatchNorm(), nn.Dense(2))
    net.initialize()
    return net


@pytest.mark.parametrize(
    ("net", "policy", "ctx", "shape"),
    [
        (conv_net, "float16", mx.cpu(), SHAPE),  # emulated
        (conv_net, "bfloat16", mx.cpu(), SHAPE),
        (conv_net, "float16-fast", mx.gpu(), SHAPE),
        (dense_net, "float16", mx.gpu(), (8, 64)),  # its norm is a fiftieth of what is written
    ],
)
def test_nothing_is_said_where_there_is_little_to_gain(net, policy, ctx, shape):
    assert explained(policy, ctx, net(), data=shape).remedy is None


# -- The log ----------------------------------------------------------------------------------------


@pytest.fixture
def told(caplog):
    """The lines of mxmp's log about casts."""
    caplog.set_level(logging.INFO, "mxmp")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "mxmp" and "in every forward" in r.message]


LINE = "norm=compute (policy 'bfloat16') casts 0.01 MiB instead of 0.06 MiB, in every forward"


def test_a_conversion_tells_once_in_one_line(told):
    net = mxmp.convert(conv_net(), "bfloat16-safe")
    assert told() == []
    x = mx.nd.ones(SHAPE)
    net(x)
    with autograd.record():
        net(x)
    net.hybridize()
    net(x)
    assert told() == [f"{net.name!r}: {LINE}"]
    copy.deepcopy(net)(x)
    assert len(told()) == 1
    mxmp.convert(net, "bfloat16-safe,full_ops=exp")
    net(x)
    assert len(told()) == 2


def test_a_module_tells_once_for_all_that_it_binds(told):
    symbol = conv_net()(mx.sym.var("data"))
    module = mxmp.Module(symbol, policy="bfloat16-safe", label_names=None)
    module.bind([("data", SHAPE)])
    module.init_params()
    module.bind([("data", SHAPE)], for_training=False, force_rebind=True)
    assert told() == [f"{symbol.name!r}: {LINE}"]


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float16-fast"])
def test_a_cpu_s_defaults_have_nothing_to_tell(told, policy):
    mxmp.convert(conv_net(), policy)(mx.nd.ones(SHAPE))
    module = mxmp.Module(conv_net()(mx.sym.var("data")), policy=policy, label_names=None)
    module.bind([("data", SHAPE)])
    assert told() == []


def test_a_gpu_s_default_tells(told):
    net = conv_net()
    symbol = net(mx.sym.var("data"))
    plan = decide(Graph.from_symbol(symbol), mxmp.Policy(), "gpu")
    log = RemedyLog()
    for _ in range(2):
        log.note(net.name, symbol, plan, {"data": SHAPE})
    assert len(told()) == 1
    assert "policy 'float16-fast'" in told()[0]
