"""Count the casts of every network's training graphs, by policy and device, into one JSON file. Nothing is timed.

    python scripts/dev.py sweep casts --before docs/casts.json --results docs/casts.json --again all

For each policy it keeps the number of operators in low precision, of casts, and the bytes that these move in one
forward at the catalogue's own inputs. ``--before`` names an earlier result, with which the new one is compared.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.options import parse
from support.processes import in_a_process, prepare_processes, silence
from support.results import DOCS, chosen, in_parallel, read, write

RESULTS = DOCS / "casts.json"
VARIANTS = [("float16", "gpu"), ("float16-fast", "gpu"), ("bfloat16", "cpu")]


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "names"),
        names=([str], "networks by name or pattern (default: all)"),
        results=RESULTS,
        before=(str, "a result to compare with"),
        again=(str, "measure those again", ("failed", "all")),
        seconds=(300.0, "limit of time of a process"),
        jobs=(1, "networks at a time"),
    )
    from zoo.catalogue import in_order

    before, results = read(Path(args.before)) if args.before else {}, read(args.results)
    known = {} if args.again == "all" else results
    todo = [n for n in chosen(in_order(), args.names, "network") if n not in known or (args.again and "error" in known[n])]
    prepare_processes()
    for name, result in in_parallel(lambda name: one(name, args.seconds), todo, args.jobs):
        results[name] = result
        write(args.results, results)
    for line in compared(before, results):
        print(line)


def one(name: str, seconds: float) -> dict[str, Any]:
    """Return the figures of one network by variant, or why there are none."""
    from zoo.catalogue import CASES

    if isinstance(CASES[name], str):
        return {"left_out": CASES[name]}
    sent, ended = in_a_process(seconds, worker, name)
    return sent.get("figures", {"error": sent.get("error", ended)})


def worker(pipe: Connection, name: str) -> None:
    silence()
    from zoo.catalogue import CASES
    from zoo.measure import Model
    from zoo.running import cause

    try:
        pipe.send(("figures", figures(Model(CASES[name]()))))
    except Exception as error:  # what a network cannot do is a result
        pipe.send(("error", cause(error)))


def figures(model: Any) -> dict[str, dict[str, int]]:
    """Return, by variant, the operators in low precision, the casts and their bytes in one training forward."""
    from mxnet.gluon import Constant

    from mxmp import Policy
    from mxmp.pipeline import emitted
    from mxmp.precision.decide import decide
    from mxmp.precision.graph import Graph
    from mxmp.precision.traffic import cast_sizes

    called = model.training_calls()
    learned = [name for name, param in model.net.collect_params().items() if not isinstance(param, Constant)]
    found: dict[str, dict[str, int]] = {}
    for policy, device in VARIANTS:
        total = {"low": 0, "casts": 0, "bytes": 0}
        for symbol, known in called:
            graph = Graph.from_symbol(symbol)
            plan = decide(graph, Policy.parse(policy), device, parameters=learned, learned=learned)
            casted = emitted(graph, plan)
            there = set(casted.graph.nodes())
            sizes = cast_sizes(casted, {each: shape for each, (shape, _) in known.items()})
            kept = [size for cast, size in zip(casted.casts, sizes) if cast in there]
            total["low"] += plan.num_low
            total["casts"] += len(kept)
            total["bytes"] += sum(size.bytes or 0 for size in kept)
        found[f"{policy} {device}"] = total
    return found


def compared(before: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Return a line for each variant: the sum of bytes in both results, and the networks that move most more."""
    lines = []
    for variant in [" ".join(each) for each in VARIANTS]:
        both = [name for name in results if variant in results[name] and variant in before.get(name, {})]
        moved = {name: (before[name][variant]["bytes"], results[name][variant]["bytes"]) for name in both}
        old, new = (sum(pair[i] for pair in moved.values()) for i in range(2))
        more = sorted((name for name in both if moved[name][0] != moved[name][1]), key=lambda n: moved[n][0] - moved[n][1])
        lines.append(f"{variant}: {old / 1e6:.2f} MB -> {new / 1e6:.2f} MB in {len(both)}; {len(more)} differ")
        lines += [f"    {name}: {moved[name][0]:,} -> {moved[name][1]:,} bytes" for name in more[:30]]
    return lines
