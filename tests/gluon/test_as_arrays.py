"""Code for arrays that Symbols take for something else: a graph means what it means on arrays, or refuses it."""

from __future__ import annotations

import operator
import threading

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, Takes, X, assert_alike, pair
from mxnet import autograd, gluon

import mxmp

RESHAPED = {
    "column": lambda block, op, x: op.broadcast_mul(x.reshape(-1, 1), x.sum().reshape(1, 1)),
    "three": lambda block, op, x: op.concat(x.reshape(0, 1, -1), x.reshape((0, 1, -1)), dim=1),
    "a special size": lambda block, op, x: x.reshape(-4, 2, 2, 0),
    "one": lambda block, op, x: x.reshape(-1),
    "by name": lambda block, op, x: x.reshape(shape=(-1, 1)),
    "after its shape": lambda block, op, x: x.reshape(x.shape[1], -1),
}
ROWS = {
    "an index": lambda block, op, x: x[0],
    "a slice": lambda block, op, x: x[:, 1:],
    "a loop": lambda block, op, x: sum(row for row in x),
    "arguments": lambda block, op, x: op.stack(*x),
    "a length": lambda block, op, x: x * len(x),
    "behind a shape": lambda block, op, x: x[0] * x.shape[0],
    "of one part": lambda block, op, x: op.split(x, num_outputs=1, axis=1)[0],
}

# In MXNet's NumPy interface: what is as on arrays, and what is refused, with words of the message.
OF_NUMPY = {
    "the last row": lambda block, op, x: x[-1] * x[:, np.int64(0), None],
    "new axes": lambda block, op, x: x[:, None] * x[None] + x[..., None, :1],
    "an ellipsis": lambda block, op, x: x.reshape(2, 2, 3)[-1, ..., 0] + x[..., 1:, None][0, ..., 0],
    "all of it": lambda block, op, x: x[...] + x[0, ...] + x[:, 1:][None][0][:, :1],
    "products": lambda block, op, x: x @ x.T @ abs(x),
    "masks": lambda block, op, x: x * (~(x > 0) ^ (x > 0.5) | (x < 0.7) & (x < 0.9)),
    "methods": lambda block, op, x: x.copy()[0].broadcast_to((4, 3)) * (x > 0).any(axis=1, keepdims=True),
    "a default": lambda block, op, x: x * (op.np.random.rayleigh(size=(4, 3)) > 0),
    "rounded": lambda block, op, x: round(op.np.ones_like(x) * 1.26, 1) * x * (x == x).all(),
}
REFUSED_OF_NUMPY = {
    "rows by number": (lambda block, op, x: x[op.np.argmax(x, axis=1)], r"F\.np\.take\(x, i, axis=0\)"),
    "a mask": (lambda block, op, x: x[x > 0], r"F\.np\.where\(i, x, 0\)"),
    "a list": (lambda block, op, x: x[[0, 1]], r"F\.np\.take"),
    "a bool": (lambda block, op, x: x[True], r"F\.np\.take"),
    "a loop": (lambda block, op, x: sum(row for row in x), r"F\.np\.split or x\[i\]"),
    "a length": (lambda block, op, x: x * len(x), r"x\.shape\[0\]"),
    "an element": (lambda block, op, x: x.__setitem__(0, 1), r"F\.np\.where or F\.np\.concatenate"),
    "in place": (lambda block, op, x: operator.iadd(x, 1), r"Write x = x \+ y in place of x \+= y"),
    "divided in place": (lambda block, op, x: operator.itruediv(x, 2), r"Write x = x / y in place of x /= y"),
    "a function of numpy": (lambda block, op, x: np.exp(x), r"Write F\.np\.exp\(x\)"),
}


class Reversed(autograd.Function):
    def forward(self, x):
        return x * 1

    def backward(self, head):
        return -head


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.parametrize("kind", RESHAPED)
def test_sizes_of_reshape_are_a_shape(kind):
    nets, _ = pair(lambda: Takes(RESHAPED[kind]), "bfloat16")
    assert_alike(nets)
    assert nets[0](X).shape == nets[1](X).shape


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_an_array_are_no_outputs_of_a_symbol(kind):
    nets, _ = pair(lambda: Takes(ROWS[kind]), "bfloat16")
    with pytest.raises(ValueError, match=r"of an array, and of a Symbol.*F\.slice_axis"):
        nets[1](X)


@mx.util.use_np
@pytest.mark.parametrize("kind", OF_NUMPY)
def test_code_in_the_numpy_interface_means_what_it_does_on_arrays(kind):
    found = []
    for net in pair(lambda: Takes(OF_NUMPY[kind]), "bfloat16")[0]:
        with autograd.record():
            out = net(X.as_np_ndarray())
        out.backward()
        found.append((out.asnumpy(), net.dense.weight.grad().asnumpy()))
    for full, low in zip(*found):
        assert full.shape == low.shape
        np.testing.assert_allclose(low, full, rtol=0.03, atol=0.05)


@mx.util.use_np
@pytest.mark.parametrize("kind", REFUSED_OF_NUMPY)
def test_code_in_the_numpy_interface_is_refused_with_a_cure(kind):
    compute, cure = REFUSED_OF_NUMPY[kind]
    net = pair(lambda: Takes(compute), "bfloat16")[0][1]
    with pytest.raises(ValueError, match=f"'takes.*{cure}"):
        net(X.as_np_ndarray())


@mx.util.use_np
@pytest.mark.filterwarnings("ignore:ndarray.context has been renamed:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recurrent_layer_in_the_numpy_interface_begins_with_states_of_any_batch_size(dtype):
    def make():
        lstm = gluon.rnn.LSTM(3, input_size=3)
        return Takes(lambda block, op, x: lstm(x.reshape(-1, 2, 3)) + block.lstm(op.np.stack([x, x])).sum(), lstm=lstm)

    nets, _ = pair(make, dtype)
    for x in (X, X[:2]):
        outs = [net(x.as_np_ndarray()).asnumpy() for net in nets]
        np.testing.assert_allclose(*outs, rtol=0.03, atol=0.02)


def test_outputs_of_an_operator_are_counted_and_taken_as_ever():
    def split(block, op, x):
        parts = op.split(x, num_outputs=3, axis=1)
        first, *others = parts
        return first + parts[1] * len(op.split(x, num_outputs=2, axis=0)) + others[1]

    nets, _ = pair(lambda: Takes(split), "bfloat16")
    for _ in range(2):
        assert_alike(nets)


@pytest.mark.parametrize("first", [autograd.predict_mode, autograd.train_mode, autograd.record])
def test_a_function_of_autograd_is_refused_in_words(first):
    net = pair(lambda: Takes(lambda block, op, x: Reversed()(x)), "bfloat16")[0][1]
    for scope in (first, autograd.record):
        with pytest.raises(ValueError, match=r"Reversed is an autograd\.Function.*BlockGrad\(2 \* x\) - x"), scope():
            net(X)


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
def test_what_the_words_say_reverses_a_gradient_and_a_function_runs_in_a_block_left_as_python():
    def reversed_(block, op, x):
        return op.BlockGrad(2 * x) - x

    nets, _ = pair(lambda: Takes(lambda block, op, x: Reversed()(x)), "bfloat16")
    mxmp.restore(nets[1])
    mxmp.convert(nets[1].dense, "bfloat16")
    for net in (*nets, pair(lambda: Takes(reversed_), "bfloat16")[0][1]):
        with autograd.record():
            out = net(X)
        out.backward()
        np.testing.assert_allclose(net.dense.bias.grad().asnumpy(), -4)


METHODS = ("reshape", "__getitem__", "__iter__", "__len__")


@pytest.mark.filterwarnings("ignore:the code of .* changes 'compute' in place")
@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
def test_a_trace_without_a_call_waits_for_that_of_another_thread():
    events = begun, other_begun, ended = [threading.Event() for _ in range(3)]
    before = [getattr(mx.sym.Symbol, name) for name in METHODS]

    def first(block, op, x):
        begun.set()
        other_begun.wait(0.5)
        return x * 2

    def second(block, op, x):
        other_begun.set()
        ended.wait(1)
        return x * 2

    def plan():
        begun.wait()
        plans.append(mxmp.tune(pair(lambda: Takes(second), "bfloat16")[0][0], X, measure=False))

    plans = []
    thread = threading.Thread(target=plan)
    thread.start()
    try:
        pair(lambda: Takes(first), "bfloat16")[0][1](X)
        ended.set()
        thread.join()
        assert plans
        assert all(each.is_set() for each in events)
        assert before == [getattr(mx.sym.Symbol, name) for name in METHODS]
    finally:
        for name, method in zip(METHODS, before):
            setattr(mx.sym.Symbol, name, method)


@pytest.mark.filterwarnings("ignore:the code of .* changes 'compute' in place")
def test_symbols_mean_what_they_did_after_a_trace_and_in_other_threads():
    found, other = [], mx.sym.var("other")

    def meanwhile(block, op, x):
        def use():
            found.append((other[0] is not None, len(other)))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return x * 2

    methods, of_numpy = [getattr(mx.sym.Symbol, name) for name in METHODS], dict(vars(mx.sym.np._Symbol))
    nets, _ = pair(lambda: Takes(meanwhile), "bfloat16")
    nets[1](X)
    assert found == [(True, 1)]
    assert methods == [getattr(mx.sym.Symbol, name) for name in METHODS]
    assert of_numpy == vars(mx.sym.np._Symbol)
    with pytest.raises(ValueError, match="x\\[i\\]"):
        pair(lambda: Takes(ROWS["an index"]), "bfloat16")[0][1](X)
    assert methods[0] is mx.sym.Symbol.reshape
