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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_and_all_its_processes(left, tmp_path, number):
    command = [sys.executable, "-W", "ignore", "-m", "mxmp", "launch", "--", *LASTING, str(tmp_path / "started")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
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
