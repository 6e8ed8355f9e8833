"""Every operator that a rule lets compute low, measured on the CPU against FP32: docs/kernels.json and kernels.md.

    python scripts/sweep_operators.py                        # what is not measured yet, or whose emitted graph changed
    python scripts/sweep_operators.py Convolution Pooling    # these again
    python scripts/sweep_operators.py --render               # the page only

Each operator runs in processes of its own, forward and backward, in bfloat16 (the native kernel, whatever the rules
say of it) and float16 (emulated, as mxmp does), on the inputs that ``sweep/arithmetic.py`` and ``sweep/layout.py``
design. What is done is kept after every operator, so a sweep that was cut off goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from pages import kernels as page  # noqa: E402

from sweep.operators import arithmetic, layout  # noqa: E402, F401  (the designs fill CASES)
from sweep.operators.case import CASES  # noqa: E402
from sweep.operators.emission import DTYPES, digest, is_allowed  # noqa: E402
from sweep.operators.runner import Runner  # noqa: E402

RESULTS, PAGE = ROOT / "docs" / "kernels.json", ROOT / "docs" / "kernels.md"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="measured again; default: what is missing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page")
    args = parser.parse_args(argv)
    unknown = set(args.operators) - set(CASES)
    if unknown:
        parser.error(f"no designed inputs for {', '.join(sorted(unknown))}")
    results = load()
    if not args.render:
        sweep(results, args.operators, args.jobs)
    PAGE.write_text(page.render(results), encoding="utf-8")
    return 0


def load() -> dict[str, dict[str, dict[str, Any]]]:
    """Operator -> "case [dtype]" -> record."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def save(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """One record a line, sorted, so that differences read well."""
    blocks = []
    for op in sorted(results):
        rows = [f"  {json.dumps(key)}: {json.dumps(results[op][key])}" for key in sorted(results[op])]
        blocks.append(f" {json.dumps(op)}: {{\n" + ",\n".join(rows) + "\n }")
    RESULTS.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def wanted(op: str, records: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """The cases and dtypes of an operator that ``records`` lacks, with the digest of the graph to measure."""
    found = {}
    for case in CASES[op]:
        for dtype in DTYPES:
            if not is_allowed(case, dtype):
                graph = digest(case, dtype)
                if records.get(f"{case.name} [{dtype}]", {}).get("graph") != graph:
                    found[case.name, dtype] = graph
    return found


def sweep(results: dict[str, dict[str, dict[str, Any]]], operators: list[str], jobs: int) -> None:
    """Measure into ``results``, and keep them after every operator."""
    for op in set(results) - set(CASES):
        del results[op]
    todo = {}
    for op in operators or CASES:
        known = {f"{c.name} [{d}]" for c in CASES[op] for d in DTYPES if not is_allowed(c, d)}
        results[op] = {} if operators else {k: r for k, r in results.get(op, {}).items() if k in known}
        pairs = wanted(op, results[op])
        if pairs:
            todo[op] = pairs
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool, contextlib.ExitStack() as runners:
        free = [runners.enter_context(Runner()) for _ in range(min(jobs, len(todo)))]

        def measure(op: str) -> tuple[str, dict[tuple[str, str], dict[str, Any]]]:
            runner = free.pop()
            try:
                return op, runner.measured(op, list(todo[op]))
            finally:
                free.append(runner)

        for done in progress(concurrent.futures.as_completed([pool.submit(measure, op) for op in todo]), len(todo)):
            op, records = done.result()
            for (name, dtype), record in records.items():
                results[op][f"{name} [{dtype}]"] = {"graph": todo[op][name, dtype], **record}
            save(results)
    save(results)


def progress(items: Any, total: int) -> Any:
    """With a bar where tqdm is installed (``pip install tqdm``)."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, total=total, unit="operator")


if __name__ == "__main__":
    sys.exit(main())
