"""The manual's page of the operator sweep, from its results."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Iterator

from support.operators.case import CASES, DTYPES, emitted, is_allowed
from support.operators.errors import FEW, ONE
from support.options import parse
from support.pages import filled, table
from support.results import DOCS, FOLDER, read

from mxmp.precision.rule import Kind
from mxmp.precision.rule_table import CUDA_BUILD_ONLY
from mxmp.precision.rules import RULES

Results = Dict[str, Dict[str, Dict[str, Any]]]
COMPUTED = FOLDER / "kernels-gpu.json"
_KEYS = {"added gradients": "add", "fused": "fused", "safe sums": "safe"}  # of ``variants`` in the file

# Verdicts that an emitted operator must not have.
FAULTS = ("biased", "inaccurate", "NaN", "infinity", "uninitialised", "wrong gradient", "error", "crash")
NOT_A_FAULT = ("sound", "wrong in FP32 too", "unmeasurable")
_WHY_NOT = {Kind.FULL: "FP32 by its rule", Kind.HEAD: "a loss head, FP32 by its rule"}


def main(arguments: list[str] | None = None) -> None:
    parse(__doc__, arguments)
    (DOCS / "kernels.md").write_text(render(read(FOLDER / "kernels.json")), encoding="utf-8")


def render(results: Results) -> str:
    """Return the page in Markdown: a table per dtype, what failed, and what is not measured with the reason."""
    head = "operator | cases | used | forward error, bias | backward error, bias | found"
    computed: Results = read(COMPUTED)
    parts = {}
    for dtype in DTYPES:
        operators = [op for op in sorted(CASES) if _pairs(op, dtype)]
        rows = [list(_cells(op, dtype, results.get(op, {}))) for op in operators]
        if dtype == "float16":
            rows = [[*row, _summary(computed.get(op, {}))] for op, row in zip(operators, rows)]
        parts[dtype] = table(f"{head} | computed of a GPU's code" if dtype == "float16" else head, rows)
    far = "operator | case | largest error, forward | backward | used"
    parts["far"] = table(far, _far(computed))
    parts["variants"] = table("way | operator | cases | largest difference, in the case", _variants(computed))
    groups: dict[str, list[str]] = {}
    for op, why in not_measured().items():
        groups.setdefault(why, []).append(op)
    head = "operator | dtype | found | first case | MXNet's answer, or the requests at fault"
    parts["failed"] = table(head, _exceptions(results))
    left_out = ((why, " ".join(f"`{op}`" for op in sorted(ops))) for why, ops in sorted(groups.items()))
    return filled(__file__, **parts, left_out=table("reason | operators", left_out))


def _pairs(op: str, dtype: str) -> list[Any]:
    return [case for case in CASES[op] if not is_allowed(case, dtype)]


def _cells(op: str, dtype: str, records: dict[str, dict[str, Any]]) -> Iterator[Any]:
    cases = _pairs(op, dtype)
    found = {case.name: records.get(f"{case.name} [{dtype}]", {"verdict": "not measured yet"}) for case in cases}
    used = [emitted(case, dtype) for case in cases]
    verdicts = Counter(r["verdict"] for r in found.values())
    yield from (f"`{op}`", len(cases), "yes" if all(used) else "in part" if any(used) else "no")
    yield from (_worst([r[way] for r in found.values() if way in r]) for way in ("forward", "backward"))
    yield "sound" if set(verdicts) == {"sound"} else ", ".join(f"{v} {n}" for v, n in verdicts.most_common())


def _summary(records: dict[str, dict[str, Any]]) -> str:
    verdicts = Counter(record["verdict"] for record in records.values())
    return ", ".join(f"{v} {n}" if len(verdicts) > 1 else v for v, n in verdicts.most_common()) or "not run"


def _far(computed: Results) -> Iterator[list[Any]]:
    """Yield the first case of each operator whose machine code is off by more than a few roundings."""
    for op in sorted(computed):
        cases = {case.name: case for case in CASES.get(op, ())}
        for name, record in computed[op].items():
            if record["verdict"] == "more" and name in cases:
                used = "yes" if emitted(cases[name], "float16") else "no"
                yield [f"`{op}`", f"`{name}`", f"{record['forward']:g}", f"{record['backward']:g}", used]
                break


def _variants(computed: Results) -> Iterator[list[str]]:
    """Yield each operator whose kernel gives other numbers in another way of running: the count, and the worst case."""
    for way, limit in (("added gradients", FEW), ("fused", ONE), ("safe sums", 0.0)):
        for op in sorted(computed):
            runs = {name: record.get("variants", {}).get(_KEYS[way]) for name, record in computed[op].items()}
            sizes = {name: max(found) if isinstance(found, list) else found for name, found in runs.items() if found}
            large = {name: size for name, size in sizes.items() if size > limit}
            if large:
                worst = max(large, key=lambda name: large[name])
                of_all = sum(found is not None for found in runs.values()) if way != "safe sums" else len(runs)
                yield [way, f"`{op}`", f"{len(large)} of {of_all}", f"{_size(runs[worst])}: `{worst}`"]


def _size(found: Any) -> str:
    return " and ".join(f"{size:g}" for size in found) if isinstance(found, list) else f"{found:g}"


def _worst(pairs: list[list[float]]) -> str:
    if not pairs:
        return "—"
    error, bias = max(pairs, key=lambda pair: pair[0])
    return (f"{error:.2f}, {bias:+.2f}" if error < 100 else f"{error:.0e}") if error else "exact"


def _exceptions(results: Results) -> Iterator[list[str]]:
    """Yield what MXNet answered where a kernel failed, once for each operator, dtype and answer."""
    for op in sorted(results):
        met = set()
        for key, record in results[op].items():
            name, _, dtype = key.rpartition(" [")
            group = (dtype, record["verdict"])
            if record["verdict"] not in ("sound", "biased", "inaccurate") and group not in met:
                met.add(group)
                why = record.get("why", "").replace("|", "/").replace("<", "(").replace(">", ")")
                yield [f"`{op}`", dtype[:-1], record["verdict"], f"`{name}`", why]


def not_measured() -> dict[str, str]:
    """Return every canonical or aliased name that the sweep leaves out, with the reason."""
    found = {}
    for op, rule in RULES.items():
        if op in CUDA_BUILD_ONLY:
            found[op] = "registered by MXNet's CUDA build only"
        elif rule.kind in _WHY_NOT:
            found[op] = f"{_WHY_NOT[rule.kind]}: {rule.reason}"
        elif rule.kind is Kind.ALONE:
            found[op] = f"left alone: {rule.reason}"
        elif op == "_CrossDeviceCopy":
            found[op] = "copies between devices"
    return found
