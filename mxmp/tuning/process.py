"""The process in which ``tune`` measures, from both sides.

Its kernels may crash, it draws random numbers, and it starts teams of threads: none of that reaches the user's process.
It is a fresh Python with the environment and the import path of the user's, and runs in the state in which training
runs: with as many threads, and with the OpenMP team that copying a batch from NumPy starts.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager, suppress
from typing import IO, Any, Callable, Iterator

import mxnet as mx
import numpy as np

from ..child import code_of, prepare_to_crash, start_python
from ..precision.plan import Plan
from .job import Crash, Job
from .search import measured

__all__ = ["START", "main", "measured_apart"]

START = code_of("mxmp.tuning.process")

# The process was ended by somebody, not by a kernel.
_ENDED = {"SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGXCPU"}
# Raised again in the user's process; another is a ``RuntimeError`` there.
_ERRORS = (ValueError, ImportError, MemoryError, OSError, mx.MXNetError)
# Elements of an array for whose copy MXNet starts a team of OpenMP threads in the main thread.
_PARALLEL_COPY = 200_000


# -- The user's process -----------------------------------------------------------------------------


def measured_apart(job: Job, show: Callable[[str], None]) -> tuple[Plan, dict[str, float]]:
    """Return the plan that ``search.measured`` finds in a process of its own, and the times that are known then.

    A plan in which that process crashes is left out, and another process goes on without it. ``show`` is called with
    the name of each part of the search. Warnings of the process are issued here.

    Raises
    ------
    RuntimeError
        The process cannot start, FP32 itself crashes, or somebody ended it, as Linux does where memory runs out.
    ValueError, ImportError, MemoryError, OSError, mxnet.MXNetError
        The process raised it.
    """
    while True:
        with _started() as process:
            found = _result(process, job, show)
        if isinstance(found, Plan):
            return found, job.seconds
        job = job.after(found)


@contextmanager
def _started() -> Iterator[subprocess.Popen]:
    """Start the process, and end it with the block, however that ends."""
    process = start_python(START, hint="Use tune(measure=False)")
    try:
        yield process
    finally:
        process.kill()
        with suppress(OSError), process:  # closes its pipes, and waits
            pass


def _result(process: subprocess.Popen, job: Job, show: Callable[[str], None]) -> Plan | Crash:
    """Return the plan, or how the process crashed."""
    plan, operators = None, ()
    to_it: IO[bytes] = process.stdin  # type: ignore[assignment]
    from_it: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(BrokenPipeError):  # its end is read below
        _send(to_it, job)
    while True:
        try:
            what, value = pickle.load(from_it)
        except (EOFError, pickle.UnpicklingError):
            return _crash(process.wait(), plan, operators)
        if what == "found":
            return value
        if what == "failed":
            kind, text = value
            raise kind(text)
        if what == "part":
            show(value)
        elif what == "warning":
            text, category = value
            warnings.warn(text, category, stacklevel=4)
        elif what == "seconds":
            job.seconds.update(value)
        elif what == "plan":
            plan, operators = value, ()
        else:
            operators = value


def _crash(status: int, plan: frozenset[str] | None, operators: tuple[str, ...]) -> Crash:
    """Return how a process crashed that measured ``plan``; raise ``RuntimeError`` where nothing can go on."""
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    if name in _ENDED:
        why = ": perhaps memory ran out; try a smaller batch" if name == "SIGKILL" else ""
        raise RuntimeError(f"the process in which tune measures was ended by {name}{why}")
    if plan is None:
        raise RuntimeError(f"the process in which tune measures ended before it measured anything: {name}")
    if not plan:
        at = f" at {', '.join(operators)}" if operators else ""
        raise RuntimeError(f"tune can measure nothing: FP32 itself crashes here{at} ({name})")
    return Crash(plan, operators, name)


# -- The process that measures ----------------------------------------------------------------------


def main() -> None:
    """Read a job from stdin, and write messages to stdout, the plan last."""
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no message
    prepare_to_crash()
    job: Job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(what: str, value: Any) -> None:
        with lock:
            _send(messages, (what, value))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)  # mxmp's own; what MXNet's imports warn of is known here
        warnings.showwarning = lambda message, category, *_: tell("warning", (str(message), category))
        try:
            _start_second_team()
            with mx.util.np_shape(job.numpy[1]), mx.util.np_array(job.numpy[2]):
                tell("found", measured(job, tell))
        except Exception as error:
            kind = next((each for each in _ERRORS if isinstance(error, each)), None)
            tell("failed", (kind, str(error)) if kind else (RuntimeError, traceback.format_exc()))


def _send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream)
    stream.flush()


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of stdin: the user's process is gone."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _start_second_team() -> None:
    """Start the threads that training has: libgomp waits in another way where there are more than processors."""
    mx.nd.array(np.zeros(_PARALLEL_COPY, "float32")).wait_to_read()
