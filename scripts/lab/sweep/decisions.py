"""Compare what this tree of mxmp and another one decide for every network of the zoos. Nothing is timed.

    git worktree add ../before COMMIT
    python scripts/dev.py sweep decisions ../before
    python scripts/dev.py sweep decisions ../before --families --results scripts/lab/results/decisions-families.json

For each policy and device: the operators of the training graphs that are in another dtype than before, with the reasons
of both trees, and the bytes that casts move in one forward. The FP32 graphs are traced once, by this tree, into
``--graphs``; a sweep that was ended goes on. Each tree decides in a process of its own. ``--families``: the graphs of
the first steps of the recipes that ``parity`` trains, instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

from support.families import FAMILIES
from support.options import parse
from support.pages import show
from support.processes import in_a_process, prepare_processes, silence
from support.results import FOLDER, ROOT, in_parallel, write
from support.trees import environment_of, other_tree

VARIANTS = [("float16", "gpu"), ("float16-fast", "gpu"), ("bfloat16", "cpu"), ("float16", "cpu")]
SECONDS = 600.0
_EMULATION = "emulated_bfloat16"  # which earlier trees do not know


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        *(__doc__, arguments, "before"),
        before=([str], "the other tree's folder"),
        graphs=(str(Path.home() / ".cache" / "mxmp" / "graphs"), "where FP32 graphs are kept"),
        families=(False, "of the recipes that parity trains"),
        results=(str(FOLDER / "decisions.json"), "where the comparison is written"),
    )
    other = other_tree(args.before)
    folder = Path(args.graphs, *["families"] * args.families)
    folder.mkdir(parents=True, exist_ok=True)
    if args.families:
        trace_each(trace_family, list(FAMILIES), folder)
    else:
        trace_all(folder)
    before, now = (decided(tree, folder) for tree in (other, ROOT))
    found = compared(before, now)
    write(Path(args.results), found)
    count = sum(change["count"] for change in found["changes"])
    print(f"{found['networks']} networks; {count} operators in another dtype")
    show("variant | bytes before | bytes now | networks with over 1 % more", rows(found))


def trace_all(folder: Path) -> None:
    from support.zoo.catalogue import CASES, in_order

    prepare_processes("support.zoo.catalogue", "sweep.networks.measure")
    trace_each(trace, [name for name in in_order() if not isinstance(CASES[name], str)], folder)


def trace_each(trace: Callable[[Connection, str, str], None], names: list[str], folder: Path) -> None:
    def one(name: str) -> None:
        _, ended = in_a_process(SECONDS, trace, name, str(file_of(folder, name)))
        if ended:
            file_of(folder, name).write_text(json.dumps({"error": ended}))

    for _ in in_parallel(one, [name for name in names if not file_of(folder, name).exists()], 1):
        pass


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_')}.json"


def trace(pipe: Connection, name: str, path: str) -> None:
    """Write a network's FP32 graphs of a training step to ``path``, or why there are none."""
    silence()
    import mxnet as mx
    from support.zoo.catalogue import CASES

    from sweep.networks.measure import Model
    from sweep.networks.running import cause

    try:
        model = Model(CASES[name]())
        found: dict[str, Any] = {"learned": model.learned}
        found["graphs"] = [
            {
                "json": call.symbol.tojson(remove_amp_cast=False),
                "numpy": isinstance(call.symbol, mx.sym.np._Symbol),
                "shapes": {each: shape for each, (shape, _) in call.known.items()},
            }
            for call in model.training_calls()
        ]
    except Exception as error:  # what FP32 itself cannot do is a result
        found = {"error": cause(error)}
    put(found, path)


def put(found: dict[str, Any], path: str) -> None:
    Path(f"{path}.part").write_text(json.dumps(found))
    os.replace(f"{path}.part", path)


def trace_family(pipe: Connection, name: str, path: str) -> None:
    """Write the FP32 graphs that a recipe's first step converts to ``path``."""
    silence()
    from parity.beginning import begin

    from mxmp.pipeline import Conversion
    from mxmp.precision.casts import strip

    graphs: dict[str, Any] = {}
    learned: set[str] = set()
    build = Conversion.build

    def kept(self: Conversion, graph: Any, use: Any) -> Any:
        text = strip(graph).to_symbol().tojson(remove_amp_cast=False)
        graphs.setdefault(text, {"json": text, "numpy": graph.numpy, "shapes": dict(use.training_shapes)})
        learned.update(set(use.parameters).difference(use.constants))
        return build(self, graph, use)

    Conversion.build = kept  # type: ignore[method-assign]
    recipe, *arguments = FAMILIES[name].recipe.split()
    try:
        begin([1], str(ROOT / "examples" / "recipes" / recipe), [*arguments, "--dtype", "float16"])
    except SystemExit:  # behind the first step
        put({"learned": sorted(learned), "graphs": list(graphs.values())}, path)


def decided(tree: Path, folder: Path) -> dict[str, Any]:
    """Return what the mxmp in ``tree`` decides, by network and variant."""
    env = environment_of(tree)
    # Graphs of bfloat16 are those of a CPU that has its kernels, whether or not this one does.
    if _EMULATION in (tree / "mxmp" / "kernels" / "table.py").read_text(encoding="utf-8"):
        env["MXMP_WITHOUT"] = _EMULATION
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the mxmp in {tree} did not decide; its error stands above")
    return json.loads(done.stdout)


def decide_all(folder: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        traced = json.loads(path.read_text())
        if "error" not in traced:
            found[path.stem] = {" ".join(each): decide_one(traced, *each) for each in VARIANTS}
    return found


def decide_one(traced: dict[str, Any], policy: str, device: str) -> dict[str, Any]:
    from mxmp import Policy  # of the tree that PYTHONPATH names first
    from mxmp.pipeline import emitted
    from mxmp.precision import decide as deciding
    from mxmp.precision.graph import Graph
    from mxmp.precision.traffic import cast_sizes

    operators, moved = {}, 0
    for number, each in enumerate(traced["graphs"]):
        graph = Graph.from_json(each["json"], numpy=each["numpy"])
        options = deciding.Options(parameters=traced["learned"], learned=traced["learned"])
        plan = deciding.decide(graph, Policy.parse(policy), device, options)
        for name, decision in plan.decisions.items():
            operators[f"{number}: {name}"] = [decision.op, decision.low, decision.reason]
        shapes = {name: tuple(shape) for name, shape in each["shapes"].items()}
        moved += sum(size.bytes or 0 for size in cast_sizes(emitted(graph, plan), shapes))
    return {"operators": operators, "bytes": moved}


def compared(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    changes, moved = [], {}
    for variant in (" ".join(each) for each in VARIANTS):
        pairs = {name: (before[name][variant], now[name][variant]) for name in now}
        moved[variant] = {name: [old["bytes"], new["bytes"]] for name, (old, new) in pairs.items()}
        for network, (old, new) in pairs.items():
            changes += [
                dict(zip(("network", "variant", "name", "op", "low", "before", "now"), [network, variant, name, *each]))
                for name, each in differences(old["operators"], new["operators"])
            ]
    more = {
        variant: {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} for variant, pairs in moved.items()
    }
    total = {variant: [sum(each) for each in zip(*pairs.values())] for variant, pairs in moved.items()}
    return {"networks": len(now), "bytes": total, "other bytes": more, "changes": grouped(changes)}


def grouped(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for all changes of a network that differ in the operators' names only, with their number."""
    groups: dict[tuple, list[str]] = {}
    for change in changes:
        groups.setdefault(tuple((key, value) for key, value in change.items() if key != "name"), []).append(
            change["name"]
        )
    return [{**dict(key), "count": len(names), "first": names[0]} for key, names in groups.items()]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    if old.keys() != new.keys():
        raise SystemExit(f"the trees see other operators: {sorted(old.keys() ^ new.keys())[:3]}")
    return [
        (name, [op, low, old[name][2], reason]) for name, (op, low, reason) in new.items() if old[name][1] is not low
    ]


def rows(found: dict[str, Any]) -> list[list[str]]:
    more = {
        variant: [n for n, (a, b) in each.items() if b > 1.01 * a] for variant, each in found["other bytes"].items()
    }
    return [
        [variant, f"{old:,}", f"{new:,}", ", ".join(more[variant]) or "none"]
        for variant, (old, new) in found["bytes"].items()
    ]


if __name__ == "__main__":
    print(json.dumps(decide_all(Path(sys.argv[1]))))
