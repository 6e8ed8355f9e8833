"""Every operator that a rule lets compute low, measured on the CPU against FP32: results/kernels.json, docs/kernels.md.

Each operator runs in processes of its own, forward and backward, in bfloat16 (the native kernel, whatever the rules
say of it) and float16 (emulated, as mxmp does), on the inputs that ``arithmetic.py`` and ``layout.py``
design. What is done is kept after every operator, so a sweep that was cut off goes on.
"""

from __future__ import annotations

import contextlib
from typing import Any

from pages import kernels
from support.operators.case import CASES, DTYPES, digest, is_allowed
from support.options import parse
from support.results import DOCS, FOLDER, in_parallel, read, write

from sweep.operators.runner import Runner

RESULTS, PAGE = FOLDER / "kernels.json", DOCS / "kernels.md"  # operator -> "case [dtype]" -> record


def main(arguments: list[str] | None = None) -> None:
    text = "measure these again (default: what is not measured yet, or whose emitted graph changed)"
    args = parse(__doc__, arguments, "operators", operators=([str], text), jobs=2)
    unknown = set(args.operators) - set(CASES)
    if unknown:
        raise SystemExit(f"no designed inputs for {', '.join(sorted(unknown))}")
    sweep(read(RESULTS), args.operators, args.jobs)
    kernels.main([])


def wanted(op: str, records: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the cases and dtypes of an operator that ``records`` lacks, with the digest of the graph to measure."""
    found = {}
    for case in CASES[op]:
        for dtype in DTYPES:
            if not is_allowed(case, dtype):
                graph = digest(case, dtype)
                if records.get(f"{case.name} [{dtype}]", {}).get("graph") != graph:
                    found[case.name, dtype] = graph
    return found


def sweep(results: dict[str, dict[str, dict[str, Any]]], operators: list[str], jobs: int) -> None:
    """Measure into ``results``, and write them after every operator."""
    for op in set(results) - set(CASES):
        del results[op]
    todo = {}
    for op in operators or CASES:
        known = {f"{c.name} [{d}]" for c in CASES[op] for d in DTYPES if not is_allowed(c, d)}
        results[op] = {} if operators else {k: r for k, r in results.get(op, {}).items() if k in known}
        pairs = wanted(op, results[op])
        if pairs:
            todo[op] = pairs
    with contextlib.ExitStack() as runners:
        free = [runners.enter_context(Runner()) for _ in range(min(jobs, len(todo)))]

        def measure(op: str) -> dict[tuple[str, str], dict[str, Any]]:
            runner = free.pop()
            try:
                return runner.measured(op, list(todo[op]))
            finally:
                free.append(runner)

        for op, records in in_parallel(measure, todo, jobs, "operator"):
            for (name, dtype), record in records.items():
                results[op][f"{name} [{dtype}]"] = {"graph": todo[op][name, dtype], **record}
            save(results)
    save(results)


def save(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write all, sorted, so that differences read well."""
    write(RESULTS, {op: dict(sorted(results[op].items())) for op in sorted(results)}, depth=2)
