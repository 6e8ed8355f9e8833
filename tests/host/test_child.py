"""The second Python in which kernels may crash: how it ends is an error here, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.measuring import (
    LINUX,
    WAITING,
    add_to_start,
    no_child_is_left,  # noqa: F401
    tuned_apart,
)

import mxmp
from mxmp.tuning import process

pytestmark = pytest.mark.slow


def test_a_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(process, "START", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="before it measured anything: exit status 3"):
        tuned_apart()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeError, match=r"sys\.executable is empty"):
        tuned_apart()


def test_a_process_that_is_killed_is_an_error_and_no_crash_of_a_kernel(monkeypatch):
    code = "from mxmp.tuning import search; import os; search.PlanSearch._learn = lambda *_: os.kill(os.getpid(), 9)"
    add_to_start(monkeypatch, code)
    with pytest.raises(RuntimeError, match="ended by SIGKILL: perhaps memory ran out"):
        tuned_apart()


KILLED = """
import mxnet as mx, mxmp
from mxmp.tuning import process
process.START = process.START.replace("main()", "exec(" + repr(CODE) + "); main()")
mxmp.tune(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), data=(2, 6), cache=False)
"""


@LINUX
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_it_ends_with_this_process(name):
    environment = {**os.environ, "PYTHONPATH": str(Path(mxmp.__file__).parents[1])}
    code = f"import os; os.write(2, b'child %d\\n' % os.getpid()); {WAITING}"
    command = [sys.executable, "-W", "ignore", "-c", f"CODE = {code!r}\n{KILLED}"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as user:
        child = next(line for line in user.stderr if line.startswith("child ")).split()[1]
        user.send_signal(getattr(signal, name))
        user.wait(10)
    deadline = time.perf_counter() + 10
    while os.path.exists(f"/proc/{child}") and time.perf_counter() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{child}")
