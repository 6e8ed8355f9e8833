"""``tune`` with few rounds, in this process or another, and what is tuned."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from kit.oracle import S
from mxmp.tuning import process, search

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# For ``add_to_start``: the process waits where it would measure.
WAITING = "from mxmp.tuning import search; import time; search.PlanSearch.run = lambda self: time.sleep(600)"
FEW = {"_ROUNDS": 3, "_MOST_ROUNDS": 3, "_PROFILES": 2, "_MOST_PROFILES": 2}


def measured_here(job, show):
    """Stands for ``measured_apart`` where a test changes functions of the search."""
    seconds = dict(job.seconds)

    def tell(what, value):
        if what == "seconds":
            seconds.update(value)
        if what == "part":
            show(value)

    return search.measured(job, tell), seconds


def add_to_start(monkeypatch, code):
    """Let the process that measures run this code before it reads its job."""
    start = process.START.replace("main()", f"exec({code!r}); main()")
    monkeypatch.setattr(process, "START", start)


def children() -> list[int]:
    """Processes that this one started, zombies included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = folder.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(after_name[1]) == os.getpid():
            found.append(int(folder.parent.name))
    return found


class Net(gluon.HybridBlock):
    """Convolutions, BatchNorm, ReLU6, a skip; operators that the code does not name; another answer in evaluation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Conv2D(8, 3, padding=1)
            self.norm = nn.BatchNorm()
            self.second = nn.Conv2D(8, 3, padding=1)
            self.dense = nn.Dense(5)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = F.clip(self.norm(self.first(x)), 0, 6)
        out = self.dense(F.relu(self.second(x) + x))
        return out if autograd.is_training() else F.softmax(out)


def a_net(shaped: bool = False) -> Net:
    mx.random.seed(3)
    net = Net(prefix="net_")
    net.initialize()
    if shaped:
        net(mx.nd.zeros((1, 3, 8, 8)))
    return net


SHAPE = (2, 3, 8, 8)


def data() -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(5).normal(0, 1, SHAPE))


def two(hidden: int = 4) -> mx.sym.Symbol:
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=hidden, name="a"), name="r")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="b"), name="softmax")


def named() -> mx.sym.Symbol:
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=4, name="a"), name="r")
    return S.FullyConnected(x, num_hidden=3, name="b")


def tuned_apart(symbol=None, **options):
    options = {"data": (2, 6), "cache": False, "progress": False, **options}
    return mxmp.tune(named() if symbol is None else symbol, **options)


@pytest.fixture(autouse=True)
def no_child_is_left():
    before = children()
    yield
    assert children() == before
