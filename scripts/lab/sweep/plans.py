"""Count what the casts of every network's plan for a GPU move, beside those of the rules. Nothing is timed.

    python scripts/dev.py sweep plans

For each policy: the bytes that casts read and write in one forward of the training graphs, by the rules and by the plan
of ``tune(measure=False)``, as ``explain`` counts them. A sweep that was ended goes on; at its end it prints the sums,
and names the networks in which the plan moves more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from support.results import FOLDER

from sweep.casts import figures_of, wanted
from sweep.models import sweep_zoo

RESULTS = FOLDER / "plans.json"
POLICIES = ["float16", "float16-fast"]


def main(arguments: list[str] | None = None) -> None:
    for line in summary(sweep_zoo(__doc__, arguments, RESULTS, wanted, partial(figures_of, figures))):
        print(line)


def figures(model: Any) -> dict[str, list[int]]:
    """Return by policy the bytes that casts move by the rules, and by the plan with the fewest."""
    import mxnet as mx

    from mxmp import Policy
    from mxmp.precision.casts import strip
    from mxmp.precision.graph import Graph
    from mxmp.tuning.choices import Task, fewest_bytes, shapes_of
    from mxmp.tuning.job import job_of

    found = {}
    for policy in POLICIES:
        moved = [0, 0]
        for symbol, known in model.training_calls():
            inputs = set(symbol.list_inputs()) - set(model.net.collect_params())
            shapes = {each: shape for each, (shape, _) in known.items() if each in inputs}
            job = job_of(symbol, (), shapes, Policy.parse(policy), mx.gpu(), True, False)
            graph = strip(Graph.from_symbol(symbol))
            task = Task(graph, job.policy, "gpu", learned=model.learned, keep_output_names=True, slow_too=True)
            sizes = shapes_of(graph, shapes)
            # The plan is of another copy of the graph: its operators have the same names.
            for i, plan in enumerate([task.rules_plan, fewest_bytes(job)]):
                moved[i] += task.bytes_cast(plan, sizes)
        found[policy] = moved
    return found


def summary(results: dict[str, Any]) -> list[str]:
    """Return a line for each policy with the sums over all networks, and one for each network that moves more."""
    lines = []
    for policy in POLICIES:
        moved = {name: result[policy] for name, result in results.items() if policy in result}
        rules, plan = (sum(pair[i] for pair in moved.values()) for i in range(2))
        lines.append(f"{policy}: rules {rules / 1e6:.2f}, plans {plan / 1e6:.2f} MB in {len(moved)} networks")
        lines += [f"    {name}: {a:,} -> {b:,} bytes" for name, (a, b) in moved.items() if b > a]
    return lines
