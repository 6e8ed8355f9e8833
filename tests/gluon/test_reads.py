"""What a graph has read of Python: FP32 nets that are not hybridized follow each change, and so do converted ones."""

from __future__ import annotations

import random
import re
import warnings
from array import array
from collections import abc, deque
from functools import singledispatch
from itertools import count
from types import ModuleType, SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, Takes, X, assert_alike, pair
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.hook import hook_of

pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


def closing_over():
    scale = {"s": 1.0}
    net = Takes(lambda block, op, x: x * scale["s"])
    net.scale = scale
    return net


class OfItsClass(Takes):
    """Reads a value of its class by the name of the class, which an instance does not see."""

    tau = 1.0

    def hybrid_forward(self, op, x):
        return self.dense(x) * OfItsClass.tau


class Settings:
    tau = 1.0


class MoreSettings(Settings):
    pass


class Slotted:
    __slots__ = ("tau",)

    def __init__(self):
        self.tau = 1.0


class Called:
    tau = 1.0

    def __call__(self, x):
        return x * self.tau


class Keyed(abc.Mapping):
    """Yields its keys, as a ``WeakKeyDictionary`` does."""

    def __init__(self):
        self.held = {"tau": 1.0}

    def __getitem__(self, name):
        return self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def keys(self):
        yield from self.held


@singledispatch
def dispatched(by):
    return by.tau


def factor():
    return factor.value


called = Called()


factor.value = 1.0
module = ModuleType("settings")
module.of, module.inner = {"tau": 1.0}, SimpleNamespace(tau=1.0)


# tests/features/drawn_code.py has the more usual ones.
CHANGES = {
    "in a deque": (lambda: Takes(lambda b, op, x: x * sum(b.c), c=deque([0.5], 3)), lambda b, v: b.c.append(v)),
    "in an array": (
        lambda: Takes(lambda b, op, x: x * b.c[0], c=array("d", [1.0])),
        lambda b, v: b.c.__setitem__(0, v),
    ),
    "in a slot": (lambda: Takes(lambda b, op, x: x * b.c.tau, c=Slotted()), lambda b, v: setattr(b.c, "tau", v)),
    "of a global class": (lambda: Takes(lambda b, op, x: x * Settings.tau), lambda b, v: setattr(Settings, "tau", v)),
    "of the base of a class": (
        lambda: Takes(lambda b, op, x: x * MoreSettings.tau),
        lambda b, v: setattr(Settings, "tau", v),
    ),
    "of the class of an object": (
        lambda: Takes(lambda b, op, x: x * b.c.tau, c=MoreSettings()),
        lambda b, v: setattr(Settings, "tau", v),
    ),
    **{
        f"of a {kind.__name__} of a class": (
            lambda kind=kind: Takes(lambda b, op, x: x * b.c.tau, c=type("Of", (kind,), {"tau": 1.0})()),
            lambda b, v: setattr(b.c, "tau", v),
        )
        for kind in (dict, tuple, deque, float)
    },
    "in a Mapping": (
        lambda: Takes(lambda b, op, x: x * b.c["tau"], c=Keyed()),
        lambda b, v: b.c.held.update(tau=v),
    ),
    "of a function": (lambda: Takes(lambda b, op, x: x * factor()), lambda b, v: setattr(factor, "value", v)),
    "in a dict of a module": (
        lambda: Takes(lambda b, op, x: x * module.of["tau"]),
        lambda b, v: module.of.update(tau=v),
    ),
    "in an object of a module": (
        lambda: Takes(lambda b, op, x: x * module.inner.tau),
        lambda b, v: setattr(module.inner, "tau", v),
    ),
    "the learning rate": (
        lambda: Takes(lambda b, op, x: x * b.c.learning_rate, c=mx.optimizer.SGD(learning_rate=1.0)),
        lambda b, v: b.c.set_learning_rate(v),
    ),
    "number": (lambda: Takes(lambda b, op, x: x / b.tau, tau=1.0), lambda b, v: setattr(b, "tau", v)),
    "text": (
        lambda: Takes(lambda b, op, x: op.Activation(x, b.act) if b.act else x, act=None),
        lambda b, v: setattr(b, "act", "relu" if v > 1 else "tanh"),
    ),
    "in a NumPy array": (
        lambda: Takes(lambda b, op, x: x * float(b.c[0]), c=np.ones(2)),
        lambda b, v: b.c.__setitem__(0, v),
    ),
    "by the name of the class": (
        lambda: type("OfItsBase", (OfItsClass,), {})(None),
        lambda b, v: setattr(OfItsClass, "tau", v),
    ),
    "in a global object that is called": (
        lambda: Takes(lambda b, op, x: called(x)),
        lambda b, v: setattr(called, "tau", v),
    ),
    "closed over": (closing_over, lambda b, v: b.scale.update(s=v)),
    "that of MXNet's layer": (
        lambda: Takes(lambda b, op, x: b.leaky(x - 1), leaky=nn.LeakyReLU(0.1)),
        lambda b, v: setattr(b.leaky, "_alpha", v),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_that_the_code_reads_may_change_between_calls(kind, nested, dtype):
    make, change = CHANGES[kind]
    nets, inner = pair(make, dtype, nested)
    assert_alike(nets)
    for value in (0.5, 2.0, 0.5, 2.0):
        for each in inner:
            change(each, value)
        assert_alike(nets)
        assert_alike(nets, training=True)
    OfItsClass.tau = Settings.tau = factor.value = module.of["tau"] = module.inner.tau = called.tau = 1.0


@pytest.mark.filterwarnings("error")
def test_code_that_dispatches_by_class_is_traced_once_for_each_value():
    nets, inner = pair(lambda: Takes(lambda b, op, x: x * dispatched(b.c), c=SimpleNamespace(tau=1.0)), "float16")
    for value in (1.0, 2.0, 2.0):
        for each in inner:
            each.c.tau = value
        assert_alike(nets)
    assert len(hook_of(nets[1]).graphs) == 2


def test_an_iterator_that_the_code_reads_goes_on_in_each_call_and_is_said():
    nets, _ = pair(lambda: Takes(lambda b, op, x: x * next(b.numbers), numbers=count(1)), "bfloat16")

    def call():
        for _ in range(4):
            assert_alike(nets, training=True)

    with pytest.warns(UserWarning, match="numbers"):
        call()


def test_a_value_that_comes_back_has_its_graph_still_and_one_that_is_not_read_makes_none():
    nets, inner = pair(CHANGES["number"][0], "float16")
    for value in (1.0, 0.5, 1.0, 0.5, 1.0):
        inner[1].tau = value
        inner[1].unread = value * 3
        globals()["tau"] = value * 5  # the code reads the attribute of this name
        nets[1](X)
    assert len(hook_of(nets[1]).graphs) == 2


def test_a_value_that_changes_in_each_call_is_right_and_warned_of_by_name():
    nets, inner = pair(CHANGES["number"][0], "float16")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for i in range(1, 24):
            for each in inner:
                each.tau = i / 4
            assert_alike(nets)
    (text,) = [str(w.message) for w in warned if "16 values" in str(w.message)]
    assert re.match(r"'takes\d+\.tau', which the code of 'takes\d+' reads, had more than 16 values", text)
    assert len(hook_of(nets[1]).graphs) == 16


DRAWS = {
    "numpy.random": lambda b, op, x: x * np.random.rand(),
    "random": lambda b, op, x: x * (1 if random.random() < 0.5 else 2),
    "RandomState": lambda b, op, x: x * b.rng.rand(),
    "Generator": lambda b, op, x: x * b.generator.random(),
    "Random": lambda b, op, x: x * b.python.random(),
    "mx.random": lambda b, op, x: x * (1 if mx.nd.random.uniform(0, 1, 1).asscalar() < 0.5 else 2),
    "an array": lambda b, op, x: x * b.array.asscalar(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_code_that_draws_random_numbers_or_reads_arrays_runs_in_each_call_and_says_so(kind):
    runs = []
    for how in (None, "float16"):
        mx.random.seed(3)
        net = Takes(DRAWS[kind], rng=np.random.RandomState(1), python=random.Random(1), array=mx.nd.array([2.0]))
        net.generator = np.random.default_rng(1)
        net.initialize(mx.init.Xavier())
        net(X)
        if how:
            mxmp.convert(net, how)
        random.seed(5), np.random.seed(5), mx.random.seed(5)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = []
            for i in range(6):
                net.array[:] = i + 1
                found.append(net(X).asnumpy())
        runs.append(found)
    assert sum("traced anew in each call" in str(w.message) for w in warned) == 1
    np.testing.assert_allclose(*runs, rtol=0.01, atol=1e-3)
