"""Code that changes Python objects in place: a call changes them as in FP32, and tools that only trace leave them."""

from __future__ import annotations

import copy
import random
from collections import deque
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, Takes, X
from mxnet import autograd, gluon

import mxmp
from mxmp.diagnose import advise, audit, blame

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*it is traced anew:UserWarning"),
    pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation"),
]
RATE, TALLY = 1.0, {}


def made(compute, dtype=None):
    """A net of a class of its own."""
    net = type("Own", (Takes,), {"rate": 1.0})(compute, **changeable())
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    return mxmp.convert(net, dtype) if dtype else net


def changeable():
    config = SimpleNamespace(rate=1.0, inside=[{"calls": 0}])
    return {"rates": [1.0], "config": config, "buffer": np.ones(2), "recent": deque([1.0], 3), "seen": {0}, **drawing()}


def drawing():
    return {"draws": [random.Random(1), np.random.RandomState(1), np.random.default_rng(1)]}


def set_after(block, op, x):
    x = x * block.rate
    type(block).rate = 0.5
    return x


def deletes(block, op, x):
    type(block).late = 2
    del type(block).late
    return x


@pytest.mark.parametrize("compute", [set_after, deletes])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_code_sets_of_the_class_of_its_block_is_set(compute, dtype):
    low, full = made(compute, dtype), made(compute)
    for _ in range(3):
        np.testing.assert_allclose(low(X).asnumpy(), full(X).asnumpy(), rtol=0.03, atol=0.02)
        assert type(low).rate == type(full).rate
    assert not hasattr(type(low), "late")


def rebinds(block, op, x):
    global RATE
    RATE = RATE / 2
    return x * RATE


def counts(block, op, x):
    TALLY["calls"] = TALLY.get("calls", 0) + 1
    return x


def appends(block, op, x):
    block.rates.append(0.5)
    return x * block.rates[-1]


def in_object(block, op, x):
    block.config.rate /= 2
    block.config.inside[0]["calls"] += 1
    block.config.late = 1
    return x


def in_others(block, op, x):
    block.buffer[:] = 3
    block.recent.append(2.0)
    block.seen.add(len(block.seen))
    return x


def draws(block, op, x):
    return x * random.random() + np.random.uniform()


def encloses(calls, last):
    def compute(block, op, x):
        nonlocal last
        calls.append(last)
        last += 1
        return x

    return compute


ENCLOSED = []


def draws_its_own(block, op, x):
    for each in block.draws:
        x = x + each.uniform(0, 1)
    return x


def state(net):
    held = [getattr(net, name) for name in ("rates", "config", "buffer", "recent", "seen")]
    held += [ENCLOSED, [(each.uniform(0, 1)) for each in copy.deepcopy(net.draws)]]
    return repr((type(net).rate, RATE, TALLY, held, random.getstate(), np.random.get_state()))


TOOLS = {
    "tune": lambda net: mxmp.tune(net, X, measure=False),
    "advise": lambda net: mxmp.diagnose.advise(net, X, policy="float16"),
    "audit": lambda net: mxmp.diagnose.audit(net, None, X, policy="float16"),
    "optimize": lambda net: mxmp.optimize_for_inference(net, [X], dtypes=()),
}


@pytest.mark.parametrize(
    "compute",
    [set_after, rebinds, counts, appends, in_object, in_others, draws, draws_its_own, encloses(ENCLOSED, 0)],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_does_not_call_the_net_leaves_what_its_code_changes(compute, tool):
    net = made(compute)
    net.dense(X)  # with shapes
    before = state(net)
    TOOLS[tool](net)
    assert state(net) == before


def test_a_failed_trace_leaves_what_its_code_changes():
    def fails(block, op, x):
        in_object(block, op, in_others(block, op, rebinds(block, op, x)))
        return op.dot(x, "no array")

    net = made(fails, "bfloat16")
    before = state(net)
    with pytest.raises(ValueError, match="cannot be traced"):
        net(X)
    assert state(net) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_variables_of_enclosing_functions_are_those_of_each_call(dtype):
    def net_of(how):
        scale, calls = 1.0, []

        class Enclosed(Takes):
            def hybrid_forward(self, op, x):
                calls.append(scale)
                return self.dense(x) * scale

        def set_scale(value):
            nonlocal scale
            scale = value

        net = Enclosed(None)
        mx.random.seed(3)
        net.initialize(mx.init.Xavier())
        return mxmp.convert(net, how) if how else net, set_scale, calls

    (low, set_low, calls), (full, set_full, expected) = net_of(dtype), net_of(None)
    for value in (1.0, 1.0, 0.5, 2.0):
        set_low(value), set_full(value)
        np.testing.assert_allclose(low(X).asnumpy(), full(X).asnumpy(), rtol=0.03, atol=0.02)
        assert calls == expected


class Counted(gluon.loss.L2Loss):
    """A loss that keeps a mean of its own, in an array and in an attribute."""

    def __init__(self):
        super().__init__()
        self.mean, self.calls = mx.nd.zeros((1,)), []

    def __call__(self, out, label):
        self.calls.append(len(self.calls))
        self.mean[:] = self.mean * 0.5 + out.detach().mean()
        return super().__call__(out, label)


class Queue(gluon.Block):
    """Runs as Python, and writes into an array and a list of its own, as MoCo's queue."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.inner = type("Own", (Takes,), {"rate": 1.0})(in_others, **changeable())
        self.queue, self.calls, self.held = mx.nd.zeros((4, 3)), 0, {"last": []}

    def forward(self, x):
        out = self.inner(x)
        self.queue[:] = self.queue + out.detach()
        self.calls += 1
        self.held["last"].append(self.calls)
        return out + random.random()


LOSS = Counted()
CALLING = {
    "blame": lambda net, trainer: blame(net, trainer, X, loss=lambda out: LOSS(out, X)),
    "audit": lambda net, trainer: audit(net, LOSS, (X, X)),
    "audit of inference": lambda net, trainer: audit(net, None, X),
    "advise": lambda net, trainer: advise(net, X, policy="float16"),
    "explain": lambda net, trainer: mxmp.explain(net, X),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("tool", CALLING)
def test_a_tool_that_calls_a_net_undoes_what_python_code_changes(tool, called):
    net = Queue()
    net.initialize()
    mxmp.convert(net, "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=8.0)
    if called:
        with autograd.record():
            loss = LOSS(net(X), X)
        trainer.backward(loss)

    def seen():
        own = net.queue.asnumpy(), net.calls, net.held, LOSS.mean.asnumpy(), LOSS.calls
        return repr((own, state(net.inner), random.getstate()))

    before, queue = seen(), net.queue
    CALLING[tool](net, trainer)
    assert seen() == before
    assert net.queue is queue
