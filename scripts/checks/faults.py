"""Plants each fault of ``fault_table.py`` in a copy of the project, and fails where its tests do not notice.

What is found goes to build/faults.json, a line for each fault: the test that failed, "missed", or "not there" where
the line that it changes is another one by now. A run that was ended goes on; --again tries those that were not caught.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from support.options import parse
from support.processes import in_a_process
from support.results import ROOT, chosen, in_parallel, read, write

from checks.fault_table import FAULTS, Fault

BUILD = ROOT / "build"
MISSED, NOT_THERE = "missed", "not there"
SECONDS = 600


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        __doc__,
        arguments,
        "files",
        files=([str], "files of mxmp, or patterns"),
        results=BUILD / "faults.json",
        again=False,
    )
    names = {name_of(fault): fault for fault in FAULTS}
    known = read(options.results)
    patterns = [f"{file}: *" for file in options.files]
    todo = [
        n for n in chosen([*names], patterns, "fault") if n not in known or (options.again and not is_test(known[n]))
    ]
    tree = BUILD / "faults"
    copy_project(tree)
    # mxmp itself is imported in each process, with the fault.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mxnet", "pytest"])
    for name, found in in_parallel(lambda name: planted(names[name], tree), todo, unit="fault"):
        known[name] = found
        write(options.results, known)
    found = Counter("caught" if is_test(known[name]) else known[name] for name in names if name in known)
    print(*(f"{name}: {known[name]}" for name in names if name in known and not is_test(known[name])), sep="\n")
    print(", ".join(f"{count} {how}" for how, count in found.items()), f"of {len(names)}")
    return int(set(found) != {"caught"})


def name_of(fault: Fault) -> str:
    return f"{fault.file}: {fault.old.strip()} -> {fault.new.strip()}"


def is_test(found: str) -> bool:
    return "::" in found or "by SIG" in found


def copy_project(tree: Path) -> None:
    """Copy what git tracks or would add, as it is now, into the empty folder ``tree``."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def planted(fault: Fault, tree: Path) -> str:
    """Return the first test that fails with the fault in the copy, which is mended afterwards."""
    file = tree / "mxmp" / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return NOT_THERE
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        found, ended = in_a_process(SECONDS, first_failure, tree, [f"tests/{name}" for name in fault.tests.split()])
    finally:
        file.write_text(text, encoding="utf-8")
    if "failed" in found or ended:
        return found.get("failed", ended)
    if found["code"] != 0:
        raise RuntimeError(f"{fault.tests}: pytest ended with {found['code']}")
    return MISSED


def first_failure(pipe: Any, tree: Path, tests: list[str]) -> None:
    """Send the id of the first of ``tests`` to fail in the copy, then pytest's exit status. In a process of its own."""
    import pytest

    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                pipe.send(("failed", report.nodeid))

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                raise RuntimeError(report.longreprtext)

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.chdir(tree)
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True  # two faults of one file may be planted in the same second
    options = ["-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=ci", f"--timeout={SECONDS}"]
    pipe.send(("code", int(pytest.main([*options, *tests], plugins=[Reporter()]))))


if __name__ == "__main__":
    sys.exit(main())
