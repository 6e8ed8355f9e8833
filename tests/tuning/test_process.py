"""The process in which ``tune`` measures: what happens there, and what of it reaches this one."""

from __future__ import annotations

import os
import signal
import threading
import time

import mxnet as mx
import pytest
from kit import measuring
from kit.measuring import (
    LINUX,
    WAITING,
    add_to_start,
    no_child_is_left,  # noqa: F401
    tuned_apart,
)
from kit.oracle import S
from kit.processes import run_program

import mxmp

pytestmark = pytest.mark.slow
# For the process that measures: no operator lacks its bfloat16 kernel, so some crash (docs/kernels.md).
EVERY_KERNEL = """
from mxmp.precision import missing_kernels as m
m.TABLE["cpu", "bfloat16"] = tuple(row for row in m.TABLE["cpu", "bfloat16"] if not row.all_others)
"""


# -- Crashes ----------------------------------------------------------------------------------------


def upsampled(deconvolutions: int = 1) -> mx.sym.Symbol:
    """A network with grouped deconvolutions, whose bfloat16 gradient crashes."""
    x = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=8, pad=(1, 1), name="conv")
    grouped = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 8, "num_group": 4, "no_bias": True}
    for number in range(deconvolutions):
        x = S.Deconvolution(x, **grouped, name=f"up{number}")
    return S.FullyConnected(x, num_hidden=4, name="fc")


@pytest.mark.bfloat16_kernels
def test_a_kernel_that_crashes_is_left_out_and_the_search_goes_on(monkeypatch):
    add_to_start(monkeypatch, EVERY_KERNEL)
    plan = tuned_apart(upsampled(2), data=(2, 16, 6, 6))
    assert {name: d.reason for name, d in plan.decisions.items() if d.op == "Deconvolution"} == dict.fromkeys(
        ("up0", "up1"), "its low-precision kernel crashes here (SIGSEGV)"
    )
    assert {"float32", "rules"} <= set(plan.tuned.steps)
    assert not any("crash" in plan.decisions[name].reason for name in ("conv", "fc"))
    mxmp.cast_symbol(upsampled(2), plan)


AT_A_STEP = """
from mxmp.tuning import clock
step = clock.Timed._pass
def crashing(self, executor, backward):
    import os, signal
    if any(owner.op == "FullyConnected" for owner in self._owners if hasattr(owner, "op")) and any(
        not hasattr(owner, "op") for owner in self._owners
    ) and executor is self._executor:
        os.kill(os.getpid(), signal.{signal})
    return step(self, executor, backward)
clock.Timed._pass = crashing
"""


@pytest.mark.parametrize("name", ["SIGABRT", "SIGFPE"])
def test_plans_that_crash_nobody_knows_where_leave_fp32(name, monkeypatch):
    """Every plan with a cast is ended outside of its first, careful step."""
    add_to_start(monkeypatch, AT_A_STEP.replace("{signal}", name))
    plan = tuned_apart()
    assert plan.num_low == 0
    assert f"fails here (crash: {name})" in str(plan)
    assert plan.tuned.chosen == "float32"


def test_where_fp32_itself_crashes_nothing_can_be_measured(monkeypatch):
    add_to_start(
        monkeypatch,
        "from mxmp.tuning import clock; import os, signal\n"
        "clock.Timed.step = lambda self: os.kill(os.getpid(), signal.SIGSEGV)",
    )
    with pytest.raises(RuntimeError, match=r"FP32 itself crashes here.*SIGSEGV"):
        tuned_apart()


def test_errors_of_the_process_are_raised_here(monkeypatch):
    add_to_start(monkeypatch, "import sys; sys.modules['igraph'] = None")
    with pytest.raises(ImportError, match=r"pip install 'mxmp\[tune\]'"):
        tuned_apart()


def test_an_error_of_no_known_kind_comes_with_its_traceback(monkeypatch):
    add_to_start(monkeypatch, "from mxmp.tuning import search; search.PlanSearch.run = lambda self: [][0]")
    with pytest.raises(RuntimeError, match="IndexError: list index out of range"):
        tuned_apart()


def test_its_warnings_are_issued_here_and_what_it_prints_is_no_message(monkeypatch, capfd):
    add_to_start(
        monkeypatch,
        "from mxmp.tuning import search; import os, warnings; run = search.PlanSearch.run\n"
        "def saying(self):\n    os.write(1, b'a line of C++'); warnings.warn('slow here', UserWarning)\n"
        "    return run(self)\nsearch.PlanSearch.run = saying",
    )
    with pytest.warns(UserWarning, match="slow here") as caught:
        assert tuned_apart().tuned.steps
    assert [each.filename for each in caught if "slow here" in str(each.message)] == [measuring.__file__]
    out, err = capfd.readouterr()
    assert "a line of C++" not in out
    assert "a line of C++" in err


# -- What reaches this process ----------------------------------------------------------------------


COUNTING = """
import os, sys, threading
import mxnet as mx, numpy as np
import mxmp
net = mx.gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(mx.gluon.nn.Conv2D(16, 3, padding=1), mx.gluon.nn.Dense(10))
net.initialize()
large = "--arrays" in sys.argv
x = mx.nd.random.uniform(shape=(8, 3, 128, 128)) if large else (8, 3, 128, 128)
mx.nd.waitall()
before = len(os.listdir("/proc/self/task"))
mxmp.tune(net, x, cache=False)
print(before, len(os.listdir("/proc/self/task")), threading.active_count())
mx.nd.array(np.zeros(300_000))
print(len(os.listdir("/proc/self/task")))
"""


@LINUX
@pytest.mark.parametrize("arguments", [[], ["--arrays"]])
def test_no_thread_is_left(arguments):
    """Of an array with 393,216 elements as well, whose copy to NumPy would start a second OpenMP team."""
    printed = run_program("-c", COUNTING, *arguments, OMP_NUM_THREADS="3")
    before, after, python, with_team = map(int, printed.split())
    assert (after, python) == (before, 1)
    assert with_team == before + 2  # what the test would see if there were a team


@LINUX
def test_it_measures_with_the_threads_of_training(monkeypatch):
    """One team for the operators, which MXNet's worker leads, and one for copies from NumPy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    add_to_start(
        monkeypatch,
        "from mxmp.tuning import search; import os\nrun = search.PlanSearch.run\n"
        "def counting(self):\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    import mxnet as mx, numpy as np; mx.nd.array(np.zeros(300_000)); mx.nd.waitall()\n"
        "    assert len(os.listdir('/proc/self/task')) == before, 'a team started'\n"
        "    return run(self)\n"
        "search.PlanSearch.run = counting",
    )
    assert tuned_apart().tuned.steps


def test_it_knows_the_environment_and_the_import_path(monkeypatch, tmp_path):
    """In a folder with a module that Python's own name is of, and that nobody imports here."""
    (tmp_path / "random.py").write_text("raise SystemExit('a script of the user')")
    (tmp_path / "helper").mkdir()
    (tmp_path / "helper" / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "helper")
    monkeypatch.setenv("MXMP_TEST_TUNE", "1")
    add_to_start(monkeypatch, "import os, only_here, random; assert os.environ['MXMP_TEST_TUNE'] == '1'")
    assert tuned_apart().tuned.steps


def test_a_script_without_a_main_guard_is_not_run_twice(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "print('once')\nimport mxnet as mx, mxmp\nfrom mxnet.gluon import nn\nnet = nn.Dense(3, prefix='d_')\n"
        "net.initialize()\nprint(mxmp.tune(net, (2, 6), cache=False).num_low >= 0)\n"
    )
    assert run_program(str(script)).split() == ["once", "True"]


# -- The end ----------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("seconds", [0.05, 1.0, 6.0])
def test_ctrl_c_ends_it_at_once_and_leaves_no_child(seconds, monkeypatch, tmp_path):
    """While Python starts, while MXNet is imported, while it measures."""
    add_to_start(monkeypatch, WAITING)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            tuned_apart(cache=tmp_path)
        assert time.perf_counter() - start < seconds + 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []
