"""``net.save`` and ``net.load``, at any moment of a converted net's life; MXNet gives a loaded net the file's names."""

from __future__ import annotations

import warnings

import mxnet as mx
import numpy as np
import pytest
from kit.twins import POLICIES, array, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

# MXNet says so of a plain net with shared Parameters, whatever saved it: "load" gives each use a name of its own.
UNUSED = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


class Nested(gluon.HybridBlock):
    """Blocks in blocks, a BatchNorm, and one Parameter in two places."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(6, in_units=6, activation="relu")
            self.inner = nn.HybridSequential()
            with self.inner.name_scope():
                self.inner.add(nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6))
            self.shared = nn.Dense(6, in_units=6, params=self.first.params)
            self.last = nn.Dense(2, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.last(self.inner(self.first(x)) + self.shared(x))


def unscoped():
    """Children whose names have a number of their own in every net of a process."""
    net = nn.HybridSequential()
    net.add(nn.Dense(5, in_units=6, activation="tanh"), nn.BatchNorm(in_channels=5), nn.Dense(2, in_units=5))
    return net


class Outer(gluon.Block):
    def __init__(self):
        super().__init__()
        self.body = unscoped()
        self.last = nn.Dense(3, in_units=2)

    def forward(self, x):
        return self.last(self.body(x))


NETS = {"nested": Nested, "unscoped": unscoped, "inside a Block": Outer}
X = array(0, 4, 6)
MOMENTS = ["plain", "plain, called", "hybridized, called", "converted", "converted, called", "converted, trained"]


def made(net, moment, policy="float16"):
    """A net of the moment, of values that no other has."""
    net.initialize(mx.init.Uniform(0.5))
    if "hybridized" in moment:
        net.hybridize()
    if "converted" in moment:
        mxmp.convert(net, POLICIES[policy])
    if "called" in moment:
        net(X)
    if "trained" in moment:
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=8)
        with autograd.record():
            loss = (net(X) ** 2).sum()
        trainer.backward(loss)
        trainer.step(1)
    return net


def outputs(net, policy="float16"):
    """What the net's values give in low precision and in FP32; the net is a plain one afterwards."""
    low = mxmp.convert(net, POLICIES[policy])(X).asnumpy()
    return low, mxmp.restore(net)(X).asnumpy()


@UNUSED
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("into", MOMENTS)
@pytest.mark.parametrize("saved", MOMENTS)
@pytest.mark.parametrize("kind", NETS)
def test_any_net_loads_what_any_net_saved(kind, saved, into, policy, tmp_path):
    file = str(tmp_path / "net")
    source = made(NETS[kind](), saved, policy)
    source.save(file)
    net = made(NETS[kind](), into, policy)
    net.load(file)
    found, (low, full) = net(X).asnumpy(), outputs(source, policy)
    assert_same([found, *outputs(net, policy)], [low if "converted" in into else full, low, full])


@UNUSED
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", NETS)
def test_a_loaded_net_saves_for_a_third_exports_and_loads_again(kind, called, tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    source = made(NETS[kind](), "hybridized, called")
    source.save(first)
    net = made(NETS[kind](), "converted, called" if called else "converted")
    net.load(first)
    net(X)
    net.save(second)
    plain = NETS[kind]()
    plain.load(second)
    expected = source(X).asnumpy()
    np.testing.assert_array_equal(plain(X).asnumpy(), expected)
    net.load(second)
    net(X)
    if isinstance(net, gluon.HybridBlock):
        net.export(str(tmp_path / "exported"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MXNet: "Cannot decide type ...", for any FP32 export
            files = (str(tmp_path / f"exported-{end}") for end in ("symbol.json", "0000.params"))
            served = gluon.SymbolBlock.imports(next(files), ["data"], next(files))
        np.testing.assert_array_equal(served(X).asnumpy(), expected)
    np.testing.assert_array_equal(mxmp.restore(net)(X).asnumpy(), expected)


@pytest.mark.parametrize("kind", NETS)
def test_after_the_first_call_a_loaded_net_has_the_names_of_its_parameters_and_trains(kind, tmp_path):
    file = str(tmp_path / "net")
    made(NETS[kind](), "hybridized, called").save(file)
    net = made(NETS[kind](), "converted")
    names = list(net.collect_params())
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=8)
    net.load(file)
    before = mxmp.restore(mxmp.convert(net))(X).asnumpy()
    mxmp.convert(net)
    with autograd.record():
        loss = (net(X) ** 2).sum()
    assert list(net.collect_params()) == names
    trainer.backward(loss)
    trainer.step(1)
    assert not trainer.last_step_skipped
    assert not (net(X).asnumpy() == before).all()


def test_the_graph_of_a_loaded_net_that_is_not_converted_is_found_too(tmp_path):
    file = str(tmp_path / "net")
    made(unscoped(), "plain").save(file)
    net = unscoped()
    net.load(file)
    assert mxmp.diagnose.advise(net, X.shape).matrices
    assert mxmp.tune(net, X, measure=False).num_low
