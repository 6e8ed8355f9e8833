"""The process in which ``tune`` measures, from both sides: kernels may crash in it.

It is a fresh Python in the state in which training runs: with the user's environment, import path and threads, and
with the OpenMP team that copying a batch from NumPy starts.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from dataclasses import replace
from typing import Any, Callable

import mxnet as mx
import numpy as np

from ..host.child import Child, ChildEndedError, code_of, from_parent, to_parent
from ..messages.callers import warn_user
from ..precision.plan import Plan
from .job import Crash, Job
from .search import measured

START = code_of("mxmp.tuning.process")

# Signals that come from outside, not from a kernel that crashes.
_ENDED = {"SIGHUP", "SIGINT", "SIGKILL", "SIGQUIT", "SIGTERM", "SIGXCPU"}
# Exceptions that are raised again in the user's process; any other becomes a ``RuntimeError``.
_ERRORS = (ValueError, ImportError, MemoryError, OSError, mx.MXNetError)
# From about this many elements on, MXNet copies an array from NumPy with a team of OpenMP threads.
_PARALLEL_COPY = 200_000


# -- The user's process -----------------------------------------------------------------------------


def measured_apart(job: Job, show: Callable[[str], None]) -> tuple[Plan, dict[str, float]]:
    """Return the fastest plan, and ``job.seconds`` with the new times. Blocks until the plan is found."""
    while True:  # after a crash, without the operators and the plan that crashed
        child = Child(START, hint="Use tune(measure=False)")
        try:
            found = _result(child, job, show)
        finally:
            child.end()
        if isinstance(found, Plan):
            return found, job.seconds
        job = replace(job, crashes=(*job.crashes, found))


def _result(child: Child, job: Job, show: Callable[[str], None]) -> Plan | Crash:
    """Send a job; show and keep what the process reports until it has found the plan, or crashed."""
    plan, operators = None, ()
    child.send(job)
    while True:
        try:
            kind, value = child.receive()
        except ChildEndedError as ended:
            return _crash(str(ended), plan, operators)
        if kind == "found":
            return value
        if kind == "failed":
            error, text = value
            raise error(text)
        if kind == "part":
            show(value)
        elif kind == "warning":
            text, category = value
            warn_user(text, category)
        elif kind == "seconds":
            job.seconds.update(value)
        elif kind == "plan":
            plan, operators = value, ()
        else:
            operators = value


def _crash(name: str, plan: frozenset[str] | None, operators: tuple[str, ...]) -> Crash:
    """Return how the process crashed; raise ``RuntimeError`` where another one would not help."""
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
    """Read a pickled ``Job`` from stdin, and write pickled messages to stdout: each a kind and its value.
    The kinds are those of ``search.Tell``, "warning" and, at the end, "found" or "failed"."""
    send = to_parent()
    job: Job = from_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(kind: str, value: Any) -> None:
        send((kind, value))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)  # mxmp's own; the user's process has seen those of imports
        warnings.showwarning = lambda message, category, *_: tell("warning", (str(message), category))
        try:
            # A second team of OpenMP threads, as a training loop starts it when it copies a batch from NumPy. With more
            # threads than processors, libgomp lets waiting threads spin for a shorter time, which changes the times.
            mx.nd.array(np.zeros(_PARALLEL_COPY, "float32")).wait_to_read()
            with mx.util.np_shape(job.numpy[1]), mx.util.np_array(job.numpy[2]):
                tell("found", measured(job, tell))
        except Exception as error:
            known = next((each for each in _ERRORS if isinstance(error, each)), None)
            tell("failed", (known, str(error)) if known else (RuntimeError, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process when the user's has; it needs a thread, as the main one may be in a kernel."""
    os.read(0, 1)  # until stdin is closed
    os.kill(os.getpid(), signal.SIGKILL)
