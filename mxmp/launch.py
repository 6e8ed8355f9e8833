"""Distributed jobs on this machine: scheduler, servers and workers of MXNet's KVStore, or workers of Horovod.

The first process that fails, the time limit, Ctrl-C and SIGTERM each end the whole job; MXNet's own waits for ever.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, Mapping, Sequence

PROGRAM = "python -m mxmp launch"
_WORKERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workers")
_ROLE_ONLY = [sys.executable, "-W", "ignore", "-c", "import mxnet"]
_FINISH = 5.0  # seconds in which scheduler and servers end by themselves, when the workers are done
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_Job = Sequence["tuple[str, subprocess.Popen]"]


def launch(command: Sequence[str], workers: int, servers: int = 1, timeout: float | None = None) -> int:
    """Run ``command`` as workers of MXNet's KVStore (ps-lite); return its status when all processes have ended.
    0, the code of the first that failed, 124 at the limit of ``timeout`` seconds, or 128 and a signal's number."""
    _check(command, timeout, workers=workers, servers=servers)
    address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(_free_port()), "DMLC_NODE_HOST": "127.0.0.1"}
    counts = {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers), "DMLC_INTERFACE": "lo"}
    roles = [("scheduler", _ROLE_ONLY)] + [("server", _ROLE_ONLY)] * servers + [("worker", command)] * workers
    failing = {"PYTHONPATH": os.pathsep.join(filter(None, [_WORKERS, os.environ.get("PYTHONPATH")]))}
    more = {"worker": failing}
    return _run(
        [(role, line, {**address, **counts, "DMLC_ROLE": role, **more.get(role, {})}) for role, line in roles], timeout
    )


def launch_horovod(command: Sequence[str], workers: int, timeout: float | None = None) -> int:
    """Run ``command`` as workers of Horovod with Gloo, as ``launch`` does; ``ImportError`` without Horovod."""
    _check(command, timeout, workers=workers)
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(
            "Horovod is not installed; the manual, Gluon, Several machines, has the command that builds it"
        )
    runner = [sys.executable, "-W", "ignore", "-m", "horovod.runner.launch"]
    line = [*runner, "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", *command]
    return _run([("worker", line, {})], timeout)


def _check(command: Sequence[str], timeout: float | None, **counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}; leave it out for no limit")
    example = f"{PROGRAM} --workers 2 -- python train.py"
    if isinstance(command, str) or not command:
        raise ValueError(f"expected a program and its arguments for the workers, got {command!r}; as in: {example}")
    if shutil.which(command[0]) is None:
        why = "it is no program that can be run" if os.path.exists(command[0]) else "there is no such program"
        fix = f"did you mean: python {command[0]}" if command[0].endswith(".py") else f"expected as in: {example}"
        raise ValueError(f"the workers cannot run {command[0]!r}: {why}; {fix}")


def _run(roles: Sequence[tuple[str, Sequence[str], Mapping[str, str]]], timeout: float | None) -> int:
    """Start each role's command with its variables; return how the job ended, when all of it has ended."""
    jobs: list[tuple[str, subprocess.Popen]] = []
    with _signals_kept() as came:
        try:
            for role, line, variables in roles:
                process = subprocess.Popen(line, env={**os.environ, **variables}, start_new_session=True)
                jobs.append((role, process))
            return _watch(jobs, math.inf if timeout is None else time.monotonic() + timeout, came)
        finally:
            _end([process for _, process in jobs])


@contextmanager
def _signals_kept() -> Iterator[list[int]]:
    """Yield the list of the signals that arrive; an exception would rise between a start and its entry in ``jobs``."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored, and stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _watch(jobs: _Job, deadline: float, came: Sequence[int]) -> int:
    workers = [process for role, process in jobs if role == "worker"]
    while True:
        if came:
            return _say(f"{signal.Signals(came[0]).name} came; the job ends", 128 + came[0])
        for role, process in jobs:
            if process.poll():
                code = process.returncode if process.returncode > 0 else 128 - process.returncode
                who = f"the {role} of process {process.pid}"
                return _say(f"{who} ended with code {process.returncode}; the job ends", code)
        if all(process.poll() == 0 for process in workers):
            _wait(lambda: any(process.poll() is None for _, process in jobs), _FINISH)
            return 0
        if time.monotonic() > deadline:
            return _say("the job ran past its time limit and was ended", 124)
        time.sleep(0.05)


def _say(what: str, code: int) -> int:
    print(f"{PROGRAM}: {what}", file=sys.stderr)
    return code


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End the processes and those that they have started: each has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(OSError):  # none is left, or it belongs to another user by now
                os.killpg(process.pid, number)
        _wait(lambda: sum(map(_lives, processes)) > 0, _GRACE)  # not any(), which would leave some unasked


def _wait(is_busy: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_busy() and time.monotonic() < deadline:
        time.sleep(0.02)


def _lives(process: subprocess.Popen) -> bool:
    """Return whether the process, or one of its session, has not ended."""
    process.poll()  # one that has ended would count until it is waited for
    try:
        os.killpg(process.pid, 0)
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
