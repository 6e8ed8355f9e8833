"""Python values among a block's arguments and outputs, and what its code asks of Symbols in a trace."""

from __future__ import annotations

import warnings
from collections import namedtuple

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, X, takes
from kit.twins import FLAGS, array, assert_close, convert, seeded
from mxnet import autograd, gluon

import mxmp
from mxmp.gluon.hook import hook_of

pytestmark = pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used by any computation")
Pair = namedtuple("Pair", "first second")


def assert_alike(got, want):
    """As nested, of the same values."""
    if isinstance(want, mx.nd.NDArray):
        assert (type(got), got.dtype) == (type(want), want.dtype)
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=0.02)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert_alike(list(got.values()), list(want.values()))
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        assert type(got) is type(want)
        for one, other in zip(got, want):
            assert_alike(one, other)
    else:
        assert (type(got), repr(got)) == (type(want), repr(want))


def scaled(op, x, how):
    """Compute something else for each value."""
    table = {"bool": 2, "str": 3, "int": 5, "float": 7, "NoneType": 11, "float32": 13, "Context": 17, "type": 19}
    factor = table[type(how).__name__] if not isinstance(how, np.dtype) else 23
    if isinstance(how, (int, float, np.float32)) and not np.isnan(how):
        factor += float(how) + (0.5 if str(how).startswith("-") else 0)
    return x * (factor + (len(how) if isinstance(how, str) else 0)), how


VALUES = [True, False, 1, 0, 1.0, -0.0, 0.0, float("nan"), "a", "bb", None, np.float32(1), mx.cpu(), np.float16]
VALUES += [np.dtype("float16")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_python_values_beside_arrays_compute_what_they_do_in_python_and_are_kept_apart(dtype):
    net, plain = takes(scaled, dtype), takes(scaled)
    for value in [*VALUES, *VALUES]:
        assert_alike(net(X, value), plain(X, value))
    assert len(hook_of(net).graphs) == len(VALUES)


OUTPUTS = {
    "dict": lambda op, x: {"b": x, "a": [x * 2, 3]},
    "number": lambda op, x: (x, 2),
    "None": lambda op, x: (None, x, [None, "s", True]),
    "namedtuple": lambda op, x: (Pair(x, 1.5), Pair(Pair(x * 2, x * 3), None)),
    "several of an operator": lambda op, x: (op.split(x, num_outputs=3, axis=1), 4),
    "tuple": lambda op, x: (x, (x * 2, [x * 3])),
    "one": lambda op, x: x,
    "one of mx.np": lambda op, x: (x, x.as_np_ndarray()),
    "all of mx.np": lambda op, x: [x.as_np_ndarray(), (x.as_np_ndarray() * 2,)],
    "list of one": lambda op, x: [x],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_nested_as_in_python(kind, dtype):
    assert_alike(takes(OUTPUTS[kind], dtype)(X), takes(OUTPUTS[kind])(X))


def test_values_in_nested_arguments_stay_where_they_are():
    def compute(op, x, pair, more):
        (a, flag), (c, [d, n]) = pair, more
        return x + (a if flag else 0) + c * n + (0 if d is None else d)

    net, plain = takes(compute, "float16"), takes(compute)
    for args in [((X, True), (X, [None, 3])), ((None, False), (X, [X, 4])), ([X, False], [X, [X, 0.5]])]:
        assert_alike(net(X, *args), plain(X, *args))


def test_a_number_that_changes_in_each_call_is_warned_of_once_and_leaves_no_graphs():
    net = takes(lambda op, x, t: x * t, "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(16):
            net(X, i / 16)
    with pytest.warns(UserWarning, match=r"'takes\d+' was called with more than 16 different values.*mx.nd.array") as w:
        net(X, 1.0)
    assert len(w) == 1
    for i in range(40):
        assert_alike(net(X, i / 4), takes(lambda op, x, t: x * t)(X, i / 4))
    assert len(hook_of(net).graphs) == 16


def test_a_graph_that_was_dropped_still_has_its_backward():
    net = takes(lambda op, x, t: x * t, "float16")
    with autograd.record():
        loss = net(X, 3.0).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(20):
            net(X, i / 7)
    loss.backward()
    np.testing.assert_allclose(net.dense.bias.grad().asnumpy(), 12)


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.parametrize("order", ["without, with", "with, without", "with, with", "without, with, without"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_is_called_with_and_without_states(layer, dtype, flags, order):
    runs = []
    for how in (dtype, None):
        net, found = seeded(getattr(gluon.rnn, layer)(4, input_size=6)), []
        convert(how, net, flags=FLAGS[flags] if how else None)
        for i, states in enumerate(order.split(", ")):
            x = array(i, 3, 2, 6)
            out, more = (net(x), []) if states == "without" else net(x, net.begin_state(2))
            found += [each.asnumpy() for each in (out, *more)]
        runs.append(found)
    assert_close(*runs, dtype)


def test_what_is_no_value_is_refused_in_words():
    net = takes(lambda op, x, how: x, "float16")
    with pytest.raises(ValueError, match=r"bools, numbers, strings.*got a object\).*exclude=.*mxmp.restore\(net\)"):
        net(X, object())
    for out in (lambda op, x: object(), lambda op, x: (x, {1}), lambda op, x: 3):
        with pytest.raises(ValueError, match=r"cannot be traced.*it returns (a object|a set|no array)"):
            takes(out, "float16")(X)
    data = mx.sym.var("data", dtype="float32")
    served = gluon.SymbolBlock(mx.sym.FullyConnected(data, num_hidden=3), data)
    served.initialize()
    with pytest.raises(ValueError, match="a SymbolBlock takes arrays alone"):
        mxmp.convert(served)(X, True)


def test_tools_take_python_values_too():
    net = takes(lambda op, x, flag: {"out": op.tanh(x) if flag else x, "n": 3}, "float16")
    assert "tanh" in [node.op for node in mxmp.explain(net, X, True).nodes]
    trainer = mxmp.Trainer(net.collect_params(), "sgd")
    with mxmp.diagnose.watch(net, trainer) as watched:
        with autograd.record():
            loss = net(X, True)["out"].sum()
        trainer.backward(loss)
        trainer.step(1)
    assert watched.latest
    assert mxmp.diagnose.blame(net, trainer, X, True, loss=lambda out: out["out"].sum()) is not None
    assert mxmp.tune(mxmp.restore(net), X, True, policy="float16", measure=False)
