"""The launcher of distributed jobs: nothing that it started outlives it, whatever ends it, and wrong calls say why."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mxmp import launch as launcher
from mxmp.__main__ import main

ROOT = Path(__file__).parents[1]
LASTING = ["sh", "-c", "sleep 60 & touch $0-$$; wait"]  # has a child of its own


@pytest.fixture
def left(monkeypatch, tmp_path):
    """A function that lists the processes that were started with this test's environment and have not ended."""
    mark = f"MXMP_TEST_LAUNCH={tmp_path}"
    monkeypatch.setenv(*mark.split("="))

    def list_them():
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_text(errors="replace").split("\0"):
                    found.append((process / "cmdline").read_text())
            except OSError:
                pass
        return found

    return list_them


def lasting_job(folder, stderr=subprocess.PIPE):
    """The command, whose two workers have started."""
    command = [sys.executable, "-W", "ignore", "-m", "mxmp", "launch", "--", *LASTING, str(folder / "started")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, env=environment, stderr=stderr, text=True, start_new_session=True)
    until(lambda: len(list(folder.glob("started-*"))) == 2)
    return job


def until(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        (["sh", "-c", "sleep 60 & exit 3"], 3),
        (["sh", "-c", "sleep 60 & kill -9 $$"], 137),
        (["sh", "-c", "trap '' TERM; sleep 60 & sleep 0.2; exit 4"], 4),  # its child does not hear SIGTERM
        (["sh", "-c", "sleep 60 & exit 0"], 0),
    ],
)
def test_a_worker_that_ends_leaves_no_process_of_the_job(left, monkeypatch, workers, code):
    monkeypatch.setattr(launcher, "_ROLE_ONLY", ["sleep", "60" if code else "0"])
    monkeypatch.setattr(launcher, "_GRACE", 0.3)
    assert launcher.launch(workers, workers=2) == code
    assert left() == []


def test_what_cannot_be_started_ends_what_was_started_before(left, monkeypatch, tmp_path):
    """A file that is executable and no program fails when the scheduler and the server run."""
    program = tmp_path / "train"
    program.write_bytes(b"\0 no program")
    program.chmod(0o755)
    monkeypatch.setattr(launcher, "_ROLE_ONLY", ["sleep", "60"])
    with pytest.raises(OSError, match="train"):
        launcher.launch([str(program)], workers=1)
    assert left() == []


@pytest.fixture
def _heard():
    """What is started hears the signals that this process may ignore, under nohup or in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_all_its_processes(left, tmp_path, number):
    job = lasting_job(tmp_path)
    assert len(left()) == 1 + 2 + 2 * 2
    job.send_signal(number)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 128 + number
    assert said == f"python -m mxmp launch: {signal.Signals(number).name} came; the job ends\n"
    assert left() == []


def test_signals_mean_after_a_job_what_they_meant_before(monkeypatch):
    monkeypatch.setattr(launcher, "_ROLE_ONLY", ["true"])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert launcher.launch(["true"], workers=1) == 0
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.slow
def test_a_job_started_under_nohup_hears_no_hangup(left, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = lasting_job(tmp_path, subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert job.poll() is None
    job.terminate()
    assert job.wait(timeout=60) == 128 + signal.SIGTERM
    assert left() == []


# -- workers that fail while a kvstore is open ------------------------------------------------------

# MXNet's KVStore waits for the other workers when it is freed; this one waits for nobody.
STORE = """
import atexit, os, sys, threading, time
class Store:
    def __del__(self):
        time.sleep(60)
def fail(how):
    store = Store()
    if how == "raise":
        raise KeyError("loss")
    if how == "caught":
        try:
            raise KeyError("loss")
        except KeyError:
            sys.exit(5)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
    if how == "handler":
        atexit.register(time.sleep, 60)
    if how == "interrupt":
        raise KeyboardInterrupt
    raise SystemExit({"text": "no data", "true": True, "negative": -1}.get(how, 3))
if __name__ == "__main__":
    fail(sys.argv[1])
"""
STATUSES = {"raise": 1, "exit": 3, "caught": 5, "text": 1, "true": 1, "negative": 255, "thread": 3, "handler": 3}
STATUSES["interrupt"] = 130


@pytest.fixture
def train(monkeypatch, tmp_path):
    """The folder of a program ``train.py`` that fails as its argument says."""
    monkeypatch.setattr(launcher, "_ROLE_ONLY", ["sleep", "60"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STORE)
    (tmp_path / "script").write_text(f"#!{sys.executable}\n{STORE}")
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(STORE)
    return tmp_path


@pytest.mark.parametrize("how", STATUSES)
def test_a_worker_that_fails_with_an_open_kvstore_ends_the_job_with_its_status(left, train, capfd, how):
    start = time.monotonic()
    assert launcher.launch([sys.executable, "train.py", how], workers=2, timeout=30) == STATUSES[how]
    assert time.monotonic() - start < 20
    assert left() == []
    said = capfd.readouterr().err
    assert ("KeyError: 'loss'" in said) == (how == "raise")
    assert "sitecustomize" not in said
    assert ("no data" in said) == (how == "text")


PYTHON = sys.executable
STARTED = {
    "with options": [PYTHON, "-uW", "ignore", "-X", "utf8", "train.py", "exit"],
    "a module": [PYTHON, "-um", "train", "exit"],
    "a package": [PYTHON, "-mpackage", "exit"],
    "a folder": [PYTHON, "package", "exit"],
    "code": [PYTHON, "-c", "import sys, train; train.fail(sys.argv[1])", "exit"],
    "by its first line": ["./script", "exit"],
    "by a shell": ["sh", "-c", f"{PYTHON} train.py exit || exit $?"],
    "by env": ["env", "A=1", PYTHON, "train.py", "exit"],
}


@pytest.mark.parametrize("by", STARTED)
def test_a_worker_fails_so_however_its_python_is_started(left, train, by):
    assert launcher.launch(STARTED[by], workers=1, timeout=30) == 3
    assert left() == []


SEEN = "import os, sys; print([sys.argv, sys.path, __name__, globals().get('__file__'), os.environ.get('PYTHONPATH')])"


@pytest.mark.parametrize("path", [None, "/nowhere"])
@pytest.mark.parametrize("by", ["file", "module", "code", "child"])
def test_a_worker_sees_what_it_would_see_without_the_launcher(train, monkeypatch, capfd, by, path):
    (train / "seen.py").write_text(SEEN)
    (train / "child.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SEEN!r}, 'x'])")
    monkeypatch.setattr(launcher, "_ROLE_ONLY", ["true"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path:
        monkeypatch.setenv("PYTHONPATH", path)
    words = {"file": ["seen.py", "x"], "module": ["-m", "seen", "x"], "code": ["-c", SEEN, "x"], "child": ["child.py"]}
    command = [PYTHON, *words[by]]
    subprocess.run(command, check=True)
    plain = capfd.readouterr().out
    assert launcher.launch(command, workers=1, timeout=30) == 0
    assert capfd.readouterr().out == plain


def test_the_line_about_a_failed_worker_has_its_process_as_the_worker_has(train, capfd):
    assert launcher.launch([PYTHON, "train.py", "raise"], workers=1, timeout=30) == 1
    *_, own, last = capfd.readouterr().err.splitlines()
    process = own.partition("(process ")[2].partition(")")[0]
    assert own == f"python -m mxmp launch: a worker (process {process}) raised KeyError"
    assert last == f"python -m mxmp launch: the worker of process {process} ended with code 1; the job ends"


REAL = """
import sys
import mxnet as mx, numpy as np
kv = mx.kv.create("dist_sync")
def fail(*_):
    if kv.rank == 1:
        {}["loss"]
if sys.argv[1] == "module":
    import mxmp
    x = np.zeros((16, 4), "float32")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), name="softmax")
    module = mxmp.Module(symbol, policy="float16")
    module.fit(mx.io.NDArrayIter(x, x[:, 0], 8), num_epoch=2, kvstore=kv, batch_end_callback=fail)
elif sys.argv[1] == "gluon":
    import mxmp
    net = mxmp.convert(mx.gluon.nn.Dense(3), "float16")
    net.initialize()
    trainer = mxmp.Trainer(net.collect_params(), "sgd", kvstore=kv)
    for number in range(3):
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 4)))
        trainer.backward(loss)
        trainer.step(4)
        fail()
else:
    kv.init("w", mx.nd.zeros((3,)))
    kv.push("w", mx.nd.ones((3,)))
    fail()
    out = mx.nd.zeros((3,))
    kv.push("w", mx.nd.ones((3,)))
    kv.pull("w", out=out)
    out.wait_to_read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bare", "module", "gluon"])
def test_an_exception_in_one_worker_of_mxnets_kvstore_ends_the_job_and_names_the_rank(left, tmp_path, capfd, kind):
    (tmp_path / "train.py").write_text(REAL)
    command = [PYTHON, "-W", "ignore", str(tmp_path / "train.py"), kind]
    assert launcher.launch(command, workers=2, timeout=240) == 1
    assert left() == []
    said = capfd.readouterr().err
    assert "KeyError: 'loss'" in said
    assert "python -m mxmp launch: the worker of rank 1 (process " in said


WRONG = {
    "no program": (["--workers", "2"], "got []; as in: python -m mxmp launch --workers 2 -- python train.py"),
    "a program that does not exist": (["--", "nosuch", "-x"], "cannot run 'nosuch': there is no such program"),
    "a script without its interpreter": (["--", __file__], f"did you mean: python {__file__}"),
    "a folder": (["--", str(ROOT)], "it is no program"),
    "no workers": (["--workers", "0", "--", "true"], "workers must be a whole number of at least 1, got 0"),
    "fewer than none": (["--workers", "-1", "--", "true"], "workers must be a whole number of at least 1, got -1"),
    "no servers": (["--servers", "0", "--", "true"], "servers must be a whole number of at least 1, got 0"),
    "no time": (["--timeout", "0", "--", "true"], "timeout must be a positive number of seconds, got 0.0"),
    "time that is no number": (["--timeout", "nan", "--", "true"], "timeout must be a positive number"),
    "no workers of Horovod": (["--horovod", "--workers", "0", "--", "true"], "workers must be"),
    "a program of Horovod's that does not exist": (["--horovod", "--", "nosuch"], "cannot run 'nosuch'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_asked_for_wrongly_starts_nothing_and_is_one_line(left, monkeypatch, capsys, case):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    arguments, message = WRONG[case]
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m mxmp launch: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_horovod_that_is_not_installed_is_named(capsys):
    assert main(["launch", "--horovod", "--", "true"]) == 2
    assert "Horovod is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [True, 2.0, "2", None, math.nan])
def test_a_number_of_workers_that_is_no_number_is_an_error(workers):
    with pytest.raises(ValueError, match="workers must be a whole number"):
        launcher.launch(["true"], workers)


def test_a_command_line_in_one_string_is_an_error_that_shows_a_list_of_words():
    with pytest.raises(ValueError, match=r"a program and its arguments for the workers, got 'python train.py'"):
        launcher.launch("python train.py", 2)
