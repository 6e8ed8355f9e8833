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

# Signals that come from outside, not from a kernel that crashes.
_ENDED = {"SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGXCPU"}
# Exceptions that are raised again in the user's process; any other becomes a ``RuntimeError``.
_ERRORS = (ValueError, ImportError, MemoryError, OSError, mx.MXNetError)
# From about this many elements on, MXNet copies an array from NumPy with a team of OpenMP threads.
_PARALLEL_COPY = 200_000


# -- The user's process -----------------------------------------------------------------------------


def measured_apart(job: Job, show: Callable[[str], None]) -> tuple[Plan, dict[str, float]]:
    """Measure a job in a process of its own; return the fastest plan and ``job.seconds``.

    If the process crashes, in one operator or in a whole step, another one starts. In that one the operators whose
    low-precision kernels crashed compute in FP32, and the plan that ran is not run again. Blocks until the plan is
    found.

    Parameters
    ----------
    job : Job
        The network, and how to measure it. ``job.seconds`` has the times from earlier runs; new ones are added to it in
        place.
    show : callable
        Called with the name of each part of the search, such as ``"steps"``, when it begins, for a progress bar.

    Raises
    ------
    RuntimeError
        The process cannot start, FP32 itself crashes in it, or it was ended from outside, as Linux does where memory
        runs out.
    ValueError, ImportError, MemoryError, OSError, mxnet.MXNetError
        The search raised this in the process. Another exception of the search is a ``RuntimeError`` with its traceback.
    """
    while True:
        with _started() as process:
            found = _result(process, job, show)
        if isinstance(found, Plan):
            return found, job.seconds
        job = job.after(found)


@contextmanager
def _started() -> Iterator[subprocess.Popen]:
    """Start the process in which ``tune`` measures, yield it, and kill it when the ``with`` block ends or raises."""
    process = start_python(START, hint="Use tune(measure=False)")
    try:
        yield process
    finally:
        process.kill()
        with suppress(OSError), process:  # closes its pipes, and waits
            pass


def _result(process: subprocess.Popen, job: Job, show: Callable[[str], None]) -> Plan | Crash:
    """Send a job to the process that measures, and read its messages until it has found the plan or has crashed.

    Return the plan, or a ``Crash`` if the process ended without one. Until then, the process's warnings are issued
    here, the times that it measured are added to ``job.seconds``, and ``show`` is called with the name of each part of
    the search that begins. Raises an exception that the process reports, and ``RuntimeError`` if another process could
    not do better, for example after a crash in FP32 (``_crash`` lists the cases).
    """
    plan, operators = None, ()
    to_it: IO[bytes] = process.stdin  # type: ignore[assignment]
    from_it: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(BrokenPipeError):  # the process has ended, which the loop finds out
        _send(to_it, job)
    while True:
        try:
            kind, value = pickle.load(from_it)
        except (EOFError, pickle.UnpicklingError):
            return _crash(process.wait(), plan, operators)
        if kind == "found":
            return value
        if kind == "failed":
            error, text = value
            raise error(text)
        if kind == "part":
            show(value)
        elif kind == "warning":
            text, category = value
            warnings.warn(text, category, stacklevel=4)
        elif kind == "seconds":
            job.seconds.update(value)
        elif kind == "plan":
            plan, operators = value, ()
        else:
            operators = value


def _crash(status: int, plan: frozenset[str] | None, operators: tuple[str, ...]) -> Crash:
    """Return how a measuring process crashed, so that the next one can leave out the operators or the plan that ran.

    ``status`` is an exit status, or a signal's number with a minus, as ``Popen.wait`` returns it. ``plan`` are the
    names of the operators that compute in low precision under the plan that ran, None before the first plan;
    ``operators`` the names of those that ran, as far as they are known. Raises ``RuntimeError`` where another process
    could not do better: this one was ended from outside (SIGKILL, SIGTERM, ...), ended before it measured anything, or
    crashed under the plan without low precision.
    """
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
    """Run the process that measures: read a pickled ``Job`` from stdin, and write pickled messages to stdout.

    A message is a tuple of its kind and its value, such as ``("part", "steps")``. The kinds "part", "plan", "operators"
    and "seconds" say how the search proceeds; ``search.measured`` describes them. The value of a "warning" is a text
    and a category. The last message is "found" with the Plan, or "failed" with the type and the text of an exception.
    What other code prints to stdout goes to stderr. If the user's process ends, this one does too.
    """
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other code prints goes to stderr
    prepare_to_crash()
    job: Job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def tell(kind: str, value: Any) -> None:
        with lock:
            _send(messages, (kind, value))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)  # mxmp's own; the user's process has seen those of imports
        warnings.showwarning = lambda message, category, *_: tell("warning", (str(message), category))
        try:
            _start_second_team()
            with mx.util.np_shape(job.numpy[1]), mx.util.np_array(job.numpy[2]):
                tell("found", measured(job, tell))
        except Exception as error:
            known = next((each for each in _ERRORS if isinstance(error, each)), None)
            tell("failed", (known, str(error)) if known else (RuntimeError, traceback.format_exc()))


def _send(stream: IO[bytes], message: Any) -> None:
    """Pickle ``message`` into a pipe and flush it. Raises ``BrokenPipeError`` where the other process has ended."""
    pickle.dump(message, stream)
    stream.flush()


def _end_with_parent() -> None:
    """Wait until the user's process has closed its end of stdin, as it does when it ends, then kill this process.

    It runs in a thread, since the main thread may be in a kernel.
    """
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _start_second_team() -> None:
    """Start a second team of OpenMP threads, as a training loop does when it copies a batch from NumPy.

    With two teams there are more threads than processors. libgomp then lets waiting threads spin for a shorter time.
    Kernels are timed in that state, since it changes their times.
    """
    mx.nd.array(np.zeros(_PARALLEL_COPY, "float32")).wait_to_read()
