"""Count what the casts of every network's training graphs move, and what of it readers ask for. Nothing is timed.

    python scripts/dev.py sweep casts

For each policy and device: operators in low precision, casts, and the bytes that these read and write in one forward at
the catalogue's own inputs, with what ``precision/needs.py`` and ``cost.py`` decide for readers, and without. A sweep
that was ended goes on; at its end it prints the sums, and the networks in which the difference is largest.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Callable
from unittest import mock

from support.processes import silence
from support.results import FOLDER

from sweep.models import Run, sweep_zoo

RESULTS = FOLDER / "casts.json"
VARIANTS = [("float16", "gpu"), ("float16-fast", "gpu"), ("bfloat16", "cpu")]


def main(arguments: list[str] | None = None) -> None:
    for line in summary(sweep_zoo(__doc__, arguments, RESULTS, wanted, partial(figures_of, figures))):
        print(line)


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    return result is None or again == "all" or (again == "failed" and "error" in result)


def figures_of(measure: Callable[[Any], Any], name: str, before: Any, run: Run, again: str | None) -> dict[str, Any]:
    """Return what ``measure(model)`` returns of one network in a process of its own, or why there is nothing."""
    sent, ended = run(worker, measure, name)
    return sent.get("figures", {"error": sent.get("error", ended)})


def worker(pipe: Connection, gib: float, measure: Callable[[Any], Any], name: str) -> None:
    silence()
    from support.zoo.catalogue import CASES

    from sweep.networks.measure import Model
    from sweep.networks.running import cause

    try:
        pipe.send(("figures", measure(Model(CASES[name]()))))
    except Exception as error:  # what a network cannot do is a result
        pipe.send(("error", cause(error)))


def figures(model: Any) -> dict[str, dict[str, list[int]]]:
    """Return, by variant, operators in low precision, casts and their bytes: without readers' needs, and with them."""
    from mxmp.precision.cost import Assignment
    from mxmp.precision.needs import Needs

    called = model.training_calls()
    found = {}
    for policy, device in VARIANTS:
        with mock.patch.object(Needs, "analyse", lambda needs: needs), mock.patch.object(Assignment, "heed_readers"):
            without = counts(called, policy, device, model.learned)
        both = zip(without.items(), counts(called, policy, device, model.learned).values())
        found[f"{policy} {device}"] = {key: [old, new] for (key, old), new in both}
    return found


def counts(called: list[Any], policy: str, device: str, learned: list[str]) -> dict[str, int]:
    from mxmp import Policy
    from mxmp.pipeline import emitted
    from mxmp.precision.decide import decide
    from mxmp.precision.graph import Graph
    from mxmp.precision.operators import Options
    from mxmp.precision.traffic import cast_sizes

    total = {"low": 0, "casts": 0, "bytes": 0}
    for symbol, known in called:
        graph = Graph.from_symbol(symbol)
        plan = decide(graph, Policy.parse(policy), device, Options(parameters=learned, learned=learned))
        kept = cast_sizes(emitted(graph, plan), {each: shape for each, (shape, _) in known.items()})
        total["low"] += plan.num_low
        total["casts"] += len(kept)
        total["bytes"] += sum(size.bytes or 0 for size in kept)
    return total


def summary(results: dict[str, Any]) -> list[str]:
    """Return a line for each variant with the sums over all networks, and one for each network with over 1 % more."""
    lines = []
    for variant in [" ".join(each) for each in VARIANTS]:
        moved = {name: result[variant]["bytes"] for name, result in results.items() if variant in result}
        old, new = (sum(pair[i] for pair in moved.values()) for i in range(2))
        lines.append(f"{variant}: {old / 1e6:.2f} -> {new / 1e6:.2f} MB in {len(moved)} networks")
        more = sorted(
            (name for name, (a, b) in moved.items() if b > 1.01 * a), key=lambda n: -moved[n][1] / moved[n][0]
        )
        lines += [f"    {name}: {moved[name][0]:,} -> {moved[name][1]:,} bytes" for name in more]
    return lines
