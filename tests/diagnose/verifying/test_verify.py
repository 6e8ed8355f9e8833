"""``verify``: whether a port is right, and what is left only rounding, of small programs in the style of real ones."""

from __future__ import annotations

import os
import signal
import sys

import mxnet as mx
import numpy as np
import pytest
from kit.ports import scaled, training
from mxnet import autograd
from mxnet.gluon import nn
from support.ports import PORTS, PROGRAMS, WRONG

import mxmp
from mxmp.diagnose import verify


def test_the_table_has_every_wrong_program():
    assert sorted(WRONG) == sorted(path.stem for path in (PROGRAMS / "wrong").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("port", [*PORTS[::4], *PORTS[3::4]], ids=lambda port: f"{port.name}-{port.dtype}")
def test_a_port_is_called_right_or_named(port):
    """Each in one of the dtypes; ``scripts/dev.py check verify`` tries both."""
    found = port.verified()
    assert port.is_answered(found), str(found)
    assert found.status == (port.expected is not None)


# -- A function ------------------------------------------------------------------------------------


def unseeded(*shape):
    return np.random.RandomState(list(os.urandom(16))).randn(*shape)


UNKNOWN = {
    "it fails in plain MXNet": (lambda: 1 / 0, "in plain MXNet it fails with ZeroDivisionError: division by zero"),
    "no update": (lambda: None, "makes no update by an mxmp.Trainer or mxmp.Module"),
    "it exits with an error": (lambda: sys.exit("no data"), "fails with SystemExit('no data')"),
    "it crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "fails with SIGSEGV"),
    "it is not reproducible": (
        training(scaled, draw=unseeded),
        "two plain runs with the same seeds differ from update 1",
    ),
    "plain MXNet is NaN": (
        training(scaled, draw=lambda *shape: np.full(shape, 1e30)),
        "from update 1 on, plain MXNet's own gradients are inf or NaN",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_said_has_its_reason(case):
    run, why = UNKNOWN[case]
    found = verify(run, progress=False)
    assert found.right is None, str(found)
    assert found.verdict.startswith("Cannot say: ")
    assert why in found.verdict
    assert found.status == 2


@pytest.mark.slow
def test_a_trainer_over_a_net_that_is_not_converted():
    def run():
        net = nn.Dense(1, in_units=2)
        net.initialize()
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=None)
        with autograd.record():
            loss = net(mx.nd.ones((1, 2)))
        trainer.backward(loss)
        trainer.step(1)

    assert "nothing is converted" in verify(run, progress=False).verdict


def test_wrong_arguments():
    with pytest.raises(TypeError, match="a function that builds and trains, or a script, got int"):
        verify(3)
    with pytest.raises(ValueError, match="steps must be a positive integer"):
        verify(print, 0)
    with pytest.raises(ValueError, match="arguments are for a script"):
        verify(print, arguments=["--fast"])
    with pytest.raises(FileNotFoundError):
        verify("no-such-script.py")
