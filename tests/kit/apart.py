"""Runs tests in processes that may end: a plugin of pytest's, for ``conftest.py``.

Each test runs in a process forked from one that has imported MXNet and computed nothing. A module may say that so many
of its tests share one, ``TESTS_PER_PROCESS``; then one that does not pass is run again, alone, and that counts.
"""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing import Pipe
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

SECONDS = 180  # for one test; then SIGALRM ends its process


class Process:
    """A fork of this one, which runs the tests that it is sent."""

    def __init__(self, module: Any, session: pytest.Session) -> None:
        self.module, self.started = module, 0
        self._pipe, there = Pipe()
        self._child = os.fork()
        if not self._child:
            self._pipe.close()
            _serve(there, session)
        there.close()

    def run(self, number: int) -> list[pytest.TestReport] | None:
        """The reports on the session's test of that number; None where the process ended."""
        self.started += 1
        try:
            self._pipe.send(number)
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return None

    def end(self) -> str:
        """End it; how it ended."""
        self._pipe.close()
        _, status = os.waitpid(self._child, 0)
        return signal.Signals(status & 127).name if status & 127 else f"exit status {status >> 8}"


def _serve(pipe: Any, session: pytest.Session) -> None:
    """Run tests until there are no more."""
    try:
        while True:
            item = session.items[pipe.recv()]
            signal.alarm(SECONDS)
            pipe.send_bytes(pickle.dumps(runtestprotocol(item, log=False)))
            signal.alarm(0)
    finally:
        os._exit(0)


_process: Process | None = None  # of this session's tests that share one


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish() -> None:
    _end_shared()


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    global _process
    together, number = getattr(item.module, "TESTS_PER_PROCESS", 1), item.session.items.index(item)
    if together > 1:
        if _process is None or _process.module is not item.module or _process.started == together:
            _end_shared()
            _process = Process(item.module, item.session)
        reports = _process.run(number)
        if reports and all(report.passed for report in reports):
            return reports
        _end_shared()
    alone = Process(item.module, item.session)
    reports = alone.run(number)
    how = alone.end()
    return reports or [_end_of_process(item, how)]


def _end_shared() -> None:
    global _process
    if _process is not None:
        _process.end()
    _process = None


def _end_of_process(item: pytest.Item, how: str) -> pytest.TestReport:
    """A failure; of a test that is marked as failing, what is expected."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    written = "".join(capture.read_global_capture())
    expected = item.get_closest_marker("xfail")
    report = pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        "skipped" if expected else "failed",
        f"the test ended its process: {how}",
        "call",
        sections=[("Captured output", written)],
    )
    if expected:
        report.wasxfail = f"{expected.kwargs['reason']} ({report.longrepr})"
    return report
