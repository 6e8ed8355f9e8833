"""What one conversion decides for all graphs of a net: which parameters are stored in float16."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from kit.networks import NETS, made
from kit.oracle import by_gluon, sqnr
from kit.twins import assert_same, step, trainer_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import LowParameter


class SharesItsWeight(gluon.Block):
    """Its Python code reads the weight that a dense layer of it has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(5, 5))
        self.dense = nn.Dense(5, in_units=5, use_bias=False, prefix=self.prefix, params=self.params)

    def forward(self, x):
        return mx.nd.dot(self.dense(x), self.weight.data())


def test_a_parameter_that_the_code_of_a_block_reads_is_stored_in_fp32():
    net = SharesItsWeight()
    net.initialize()
    x = np.random.normal(0, 1, (2, 5)).astype("float32")
    want = net(mx.nd.array(x)).asnumpy()
    mxmp.convert(net, "params=float16")
    assert sqnr(want, net(mx.nd.array(x)).asnumpy()) > 50
    assert net.weight.data().dtype == np.float32


class Joined(nn.HybridBlock):
    """One dense layer with two weights, as GluonNLP's attention has."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.query = self.params.get("query", shape=(4, 6), init=mx.init.Normal(0.5))
            self.key = self.params.get("key", shape=(4, 6), init=mx.init.Normal(0.5))

    def hybrid_forward(self, F, x, query, key):  # noqa: N803
        weight = F.concat(F.reshape(query, shape=(-1, 6)), F.reshape(key, shape=(-1, 6)), dim=0)
        return F.FullyConnected(x, weight, num_hidden=8, no_bias=True)


@pytest.mark.parametrize("name", [*NETS, "joined"])
def test_float16_parameters_change_no_bit(name):
    if name == "joined":
        net, x = Joined(), np.random.normal(size=(3, 6)).astype("float32")
        net.initialize()
    else:
        net, x = made(name)
    want = by_gluon(mxmp.convert(net, "params=float32"), [x])
    mxmp.restore(net)
    got = by_gluon(mxmp.convert(net, "params=float16"), [x])
    are_low = [isinstance(p, LowParameter) for p in net.collect_params().values()]
    assert all(are_low) if name == "joined" else any(are_low)
    assert_same(got.outputs, want.outputs)
    assert_same(got.grads, want.grads)


def test_only_parameters_of_low_operators_are_stored_low():
    net, x = made("convnet")
    mxmp.convert(net, "params=float16")
    by_gluon(net, [x])
    low = {name for name, p in net.collect_params().items() if isinstance(p, LowParameter)}
    assert low == set(net.collect_params(".*(conv|dense).*"))
    assert all(p.dtype in ("float32", np.float32) for p in net.collect_params().values())


def test_every_graph_of_a_recurrent_net_moves_its_parameters_in_the_dtype_in_which_they_are_stored():
    net = gluon.rnn.LSTM(4, input_size=3)
    net.initialize()
    mxmp.convert(net, "params=float16")
    x = mx.nd.ones((2, 3, 3))
    net(x)  # decides how the parameters are stored
    with autograd.record():
        net(x)
    first, second = mxmp.explain(net).graphs
    assert [node.dtype for node in first.nodes] == [node.dtype for node in second.nodes]
    assert {node.dtype for node in second.nodes if node.op == "_rnn_param_concat"} == {"float16"}


def test_a_net_in_which_nothing_runs_low_says_so_at_the_first_forward():
    net = nn.HybridSequential()
    net.add(nn.Activation("relu"), nn.MaxPool2D())
    mxmp.convert(net)
    with pytest.warns(UserWarning, match="no matrix operator"):
        net(mx.nd.ones((1, 1, 4, 4)))


def test_why_nothing_runs_low_is_said_of_all_parts_of_a_net_that_runs_as_python():
    net = nn.Sequential()
    net.add(nn.Conv2DTranspose(2, 3), nn.Activation("relu"))
    net.initialize()
    mxmp.convert(net, "bfloat16")
    with pytest.warns(UserWarning, match="stay in FP32 .*no sound bfloat16 CPU kernel for Deconvolution"):
        net(mx.nd.ones((1, 1, 4, 4)))


class WithoutDtype(nn.HybridBlock):
    """Declares its weight as cells of old versions of MXNet do; MXNet stores it in FP32."""

    def __init__(self, dtype=None):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 5), dtype=dtype)

    def hybrid_forward(self, op, x, weight):
        return op.FullyConnected(x.astype(weight.dtype), weight, no_bias=True, num_hidden=weight.shape[0])


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "compute=float16,params=float16"])
def test_a_parameter_without_a_dtype_is_one_in_fp32(policy):
    steps = []
    for dtype in (None, "float32"):
        net = WithoutDtype(dtype)
        net.initialize(mx.init.One())
        mxmp.convert(net, policy)
        trainer = trainer_of(policy, net, scale=8.0, learning_rate=0.25)
        for _ in range(3):
            with autograd.record():
                loss = net(mx.nd.ones((2, 5))).sum()
            step(trainer, loss, 2)
        steps.append(mxmp.master_weights(net)["weight"].asnumpy())
    np.testing.assert_array_equal(*steps)
