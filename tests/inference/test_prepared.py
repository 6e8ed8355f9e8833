"""What a served block does at each call: oneDNN says which tensors it reorders, and weights are to be so once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import lru_cache

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.host import cpu
from mxmp.inference.prepared import KEPT_SHAPES, Prepared

pytestmark = pytest.mark.slow


class Loop(gluon.HybridBlock):
    """A ``foreach``, and layers that oneDNN fuses before and behind it."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(64, activation="relu", flatten=False, in_units=32)
            self.last = nn.Dense(1024, activation="relu", in_units=64)

    def hybrid_forward(self, F, x):  # noqa: N803
        data = self.first(x).swapaxes(0, 1)
        start = F.zeros_like(F.slice_axis(data, axis=0, begin=0, end=1).reshape((-1, 64)))
        out, states = F.contrib.foreach(lambda row, state: (row + state[0], [row + state[0]]), data, [start])
        return self.last(F.broadcast_add(states[0], 0 * out.sum(axis=0)))


def convolutions():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(32, 3, activation="relu", in_channels=3), nn.Conv2D(32, 3, in_channels=32), nn.Dense(10))
    return net


NETS = {"convolutions": (convolutions, (3, 12, 12)), "loop": (Loop, (5, 32))}


@lru_cache(maxsize=None)
def served(kind):
    """An optimized net, and the net."""
    mx.random.seed(0)
    make, shape = NETS[kind]
    net = make()
    net.initialize(mx.init.Xavier())
    batches = [mx.nd.random.normal(shape=(4, *shape)) for _ in range(2)]
    net(batches[0])
    return mxmp.optimize_for_inference(net, batches, dtypes=()), net, batches[0]


def main(kind):
    """The program of ``reorders``: calls in pairs, of which the second is to do no more than the first."""
    block, _, x = served(kind)

    def say(text):
        mx.nd.waitall()
        os.write(1, f"@{text}\n".encode())

    def call(text, batch):
        say(text)
        block(batch).wait_to_read()

    for _ in range(2):
        for rows in range(1, KEPT_SHAPES + 1):
            block(x[:rows]).wait_to_read()
    for rows in range(1, KEPT_SHAPES + 1):
        call(f"{rows} after another", x[:rows])
        call(f"{rows} again", x[:rows])
    block.hybridize()
    call("hybridized", x)
    call("hybridized again", x)
    say("end")


def reorders(kind):
    """How many tensors oneDNN reorders in each call of ``main``, by what the call is named there."""
    environment = {
        **os.environ,
        "DNNL_VERBOSE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code = f"from inference import test_prepared; test_prepared.main({kind!r})"
    run = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found, name = {}, ""
    for line in run.stdout.splitlines():
        if line.startswith("@"):
            name = line[1:]
            found[name] = 0
        elif line.startswith("dnnl_verbose,exec,cpu,reorder") and name != "end":
            found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize("kind", NETS)
def test_weights_are_prepared_once_for_each_shape(kind):
    found = reorders(kind)
    for rows in range(1, KEPT_SHAPES + 1):
        assert found[f"{rows} after another"] == found[f"{rows} again"]
    assert found["hybridized again"] == found[f"{KEPT_SHAPES} again"]
    if kind == "loop" and not cpu.lacks("avx512f"):  # no tensor that it computes needs another layout there
        assert found["1 again"] == 0


def test_a_shape_of_the_latest_calls_is_not_compiled_again(monkeypatch):
    compiled, compile_one = [], Prepared._compiled
    monkeypatch.setattr(Prepared, "_compiled", lambda self: compiled.append(1) or compile_one(self))
    net, _, batch = served("convolutions")
    for rows in (1, 2, 1, 2):
        net(batch[:rows])
    assert len(compiled) <= 2


@pytest.mark.parametrize("kind", NETS)
def test_any_shape_and_thread_gets_the_networks_answer(kind):
    block, net, x = served(kind)
    parts = [mx.nd.concat(x[rows:], x, x, dim=0)[:size] for size in range(1, KEPT_SHAPES + 3) for rows in range(2)]
    wanted = [net(part).asnumpy() for part in parts]
    wrong = []

    def calls():
        for part, want in zip(parts * 2, wanted * 2):
            if not np.allclose(block(part).asnumpy(), want, atol=1e-5):
                wrong.append(part.shape)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", NETS)
def test_parameters_that_move_are_read_where_they_are(kind):
    block, _, x = served(kind)
    before = block(x).asnumpy()
    for context in (mx.cpu(1), mx.cpu(0)):
        block.collect_params().reset_ctx(context)
        moved = block(x.as_in_context(context))
        assert moved.context == context
        np.testing.assert_array_equal(moved.asnumpy(), before)
    old = {name: param.data() for name, param in block.collect_params().items()}
    block.collect_params().reset_ctx(mx.cpu(1))
    block.collect_params().reset_ctx(mx.cpu(0))
    for name, param in block.collect_params().items():
        assert param.data() is not old[name]
        old[name][:] = 0
    np.testing.assert_array_equal(block(x).asnumpy(), before)


def test_an_op_hook_sees_the_operators():
    block, _, x = served("convolutions")
    want, seen = block(x).asnumpy(), []
    block.register_op_hook(lambda name, operator, array: seen.append(name))
    np.testing.assert_array_equal(block(x).asnumpy(), want)
    assert len(seen) >= 3
