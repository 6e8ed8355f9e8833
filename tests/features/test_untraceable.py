"""Networks that no graph can hold: the first call names the block and says what to do, and excluding it works."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
from kit.twins import (
    FLAGS,
    array,
    assert_close,
    convert,
    equal_or_refused,
    seeded,
    sequence,
    step,
    train,
    trainer_of,
    updates,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning")
Pair = namedtuple("Pair", ["left", "right"])


class ByValue(gluon.HybridBlock):
    """Looks at a number."""

    def hybrid_forward(self, F, x):  # noqa: N803
        return x * 2 if float(F.sum(x).asscalar()) > 0 else x


class ByShape(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        return F.reshape(x, (x.shape[0], -1))


class ByLength(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        return x / len(x)


class ByNumPy(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        return x * float(np.mean(x.asnumpy()) > -100)


class OwnForward(gluon.HybridBlock):
    """Overrides ``forward``: MXNet traces ``hybrid_forward``, which there is none of."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.inner = nn.Dense(6, in_units=6)

    def forward(self, x):
        return self.inner(x) + 1


BLOCKS = {"value": ByValue, "shape": ByShape, "length": ByLength, "numpy": ByNumPy, "own forward": OwnForward}


def net_with(block):
    return seeded(sequence(nn.Dense(6, in_units=6), block(), nn.Dense(3, in_units=6), prefix="net_"))


def odd(net):
    return net[1]


# ``len`` of a Symbol is 1, mxmp's trace knows shapes, ``forward`` may be written so that a graph comes of it: nothing
# fails there.
FAILING = {"value": ByValue, "numpy": ByNumPy}


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("kind", FAILING)
def test_the_first_call_names_the_block_and_says_what_to_do(kind, outermost, flags, record):
    net = seeded(FAILING[kind]()) if outermost else net_with(FAILING[kind])
    block = net if outermost else odd(net)
    convert("float16", net, flags=FLAGS[flags])
    for _ in range(2):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught, autograd.record(record):
            net(array(0, 4, 6))
        said = str(caught.value)
        for word in (block.name, "graph", "exclude"):
            assert word in said, said


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("outermost", [False, True])
def test_an_overridden_forward_is_right_or_refused_by_name(outermost, flags):
    def make():
        return seeded(OwnForward()) if outermost else net_with(OwnForward)

    expected = make()(array(0, 4, 6)).asnumpy()
    net = make()
    convert("float16", net, flags=FLAGS[flags])
    equal_or_refused(
        lambda: net(array(0, 4, 6)).asnumpy(),
        lambda found: assert_close([found], [expected]),
        saying=((net if outermost else odd(net)).name, "graph", "exclude"),
    )


def reference(kind):
    """Updates in FP32, without hybridize."""
    net = net_with(BLOCKS[kind])
    return train(net, range(2), trainer_of(None, net))


WAYS = {
    "name": lambda block: [block.name],
    "pattern": lambda block: ["*" + block.name.split("_")[-1]],
    "filter": lambda block: lambda name, each: each is block,
    "filter of a class": lambda block: lambda name, each: isinstance(each, type(block)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_excluding_the_block_leaves_it_as_python_and_converts_around_it(policy, kind, way):
    net = net_with(BLOCKS[kind])
    mxmp.convert(net, policy, exclude=WAYS[way](odd(net)))
    assert_close(train(net, range(2), trainer_of(policy, net)), reference(kind), policy)
    report = mxmp.explain(net, array(0, 4, 6))
    assert odd(net).name in report.unconverted
    assert sum(node.dtype == policy for node in report.nodes if node.op == "FullyConnected") == 2
    mxmp.restore(net)
    np.testing.assert_array_equal(net(array(0, 4, 6)).asnumpy(), net(array(0, 4, 6)).asnumpy())


def test_a_filter_keeps_a_block_in_fp32_that_could_be_traced_too():
    net = seeded(sequence(nn.Dense(6, in_units=6), nn.Dense(3, in_units=6)))
    mxmp.convert(net, "float16", exclude=lambda name, block: block is net[1])
    report = mxmp.explain(net, array(0, 4, 6))
    assert [n.dtype for n in report.nodes if n.op == "FullyConnected"] in (["float16", "float32"], ["float16"])


class Named(gluon.HybridBlock):
    """Answers with a namedtuple."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        return Pair(self.body(x), x)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_namedtuple_stays_one_or_is_refused(flags):
    net = seeded(Named())
    convert("float16", net, flags=FLAGS[flags])

    def check(out):
        # Hybridized, plain MXNet answers with a list; not hybridized, with what the block made.
        assert isinstance(out, Pair) or FLAGS[flags] is not None

    equal_or_refused(lambda: net(array(0, 4, 6)), check, saying=(net.name, "graph", "exclude"))


class Scalar(gluon.HybridBlock):
    """Takes a number beside its input."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x, factor=2.0):  # noqa: N803
        return self.body(x) * factor


def test_an_input_that_is_no_array_is_right_or_refused_by_name():
    twin = seeded(Scalar())(array(0, 4, 6), 3.0).asnumpy()
    net = mxmp.convert(seeded(Scalar()))
    equal_or_refused(
        lambda: net(array(0, 4, 6), 3.0).asnumpy(), lambda out: assert_close([out], [twin]), saying=(net.name, "graph")
    )


@pytest.mark.parametrize("order", ["without, with", "with, without", "with, with", "without, with, without"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_is_called_with_and_without_states(layer, policy, flags, order):
    def make():
        return seeded(getattr(gluon.rnn, layer)(4, input_size=6))

    def run(net):
        found = []
        for i, how in enumerate(order.split(", ")):
            x = array(i, 3, 2, 6)
            if how == "without":
                found.append(net(x).asnumpy())
            else:
                out, states = net(x, net.begin_state(2))
                found += [out.asnumpy(), *(s.asnumpy() for s in states)]
        return found

    net = make()
    convert(policy, net, flags=FLAGS[flags])
    assert_close(run(net), run(make()), policy)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_recurrent_layer_trains_with_and_without_states(policy):
    def run(policy):
        net = seeded(gluon.rnn.LSTM(4, input_size=6))
        convert(policy, net)
        trainer = trainer_of(policy, net)

        def steps():
            states = None
            for i in range(3):
                with autograd.record():
                    if states is None:
                        out = net(array(i, 3, 2, 6))
                        states = net.begin_state(2)
                    else:
                        out, states = net(array(i, 3, 2, 6), [s.detach() for s in states])
                    loss = (out**2).mean()
                step(trainer, loss, 1)

        return updates(net, steps)

    assert_close(run(policy), run(None), policy)


# -- summary and cast -------------------------------------------------------------------------------


@pytest.mark.parametrize("called", [False, True])
def test_summary_of_a_converted_net_prints_or_says_how(called, capsys):
    net = mxmp.convert(net_with(lambda: nn.Dense(6, in_units=6)))
    if called:
        net(array(0, 4, 6))
    try:
        net.summary(array(0, 4, 6))
    except (ValueError, RuntimeError, AssertionError) as refused:
        text = str(refused)
    else:
        assert "Total params" in capsys.readouterr().out
        low = mxmp.convert(net_with(lambda: nn.Dense(6, in_units=6)))(array(0, 4, 6)).asnumpy()
        np.testing.assert_array_equal(net(array(0, 4, 6)).asnumpy(), low)
        return
    assert "restore" in text or "hybridized" in text


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("policy", ["float16", "bfloat16", mxmp.Policy("float16", params="float16")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float64", "float32"])
def test_cast_after_convert_is_right_or_says_what_to_do(dtype, policy, called):
    expected = net_with(lambda: nn.Dense(6, in_units=6))(array(0, 4, 6)).asnumpy()
    net = mxmp.convert(net_with(lambda: nn.Dense(6, in_units=6)), policy)
    if called:
        net(array(0, 4, 6))

    def run():
        net.cast(dtype)
        return net(array(0, 4, 6).astype(dtype)).astype("float32").asnumpy()

    equal_or_refused(run, lambda out: assert_close([out], [expected], "bfloat16"), saying=("convert", "cast"))
