"""Every model of the zoos: does an evaluation between two training steps change a bit? Into one JSON file.

    python scripts/sweep_sequences.py                    # all that have no result yet; ends early and goes on at will
    python scripts/sweep_sequences.py resnet18_v1b       # these, by name or pattern
    python scripts/sweep_sequences.py --again failed     # those again that failed (or: all)

Each model is converted by the rules, with operators excluded at random, and by plans drawn at random, as tuning might
choose them. It trains, evaluates twice and trains again from the same weights, by MXNet's threaded engine and by
``NaiveEngine``. The two evaluations must be equal, and so must be the gradients before and after them. FP32 inference
leaves weights in oneDNN's own layouts, which no later graph may stumble over.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Iterator

from sweep_models import in_a_process, prepare_processes, read, worker_settings, write

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "sequences.json"
ENGINES = ("ThreadedEnginePerDevice", "NaiveEngine")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models by name or pattern (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", choices=["failed", "all"], help="try those again")
    parser.add_argument("--seconds", type=float, default=240, help="limit of time of a process")
    parser.add_argument("--gib", type=float, default=12, help="limit of memory of a process")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    args = parser.parse_args(arguments)
    from tqdm import tqdm
    from zoo.catalogue import CASES, in_order

    results = read(args.results)
    chosen = [n for n in in_order() if not args.names or any(fnmatch.fnmatch(n, p) for p in args.names)]
    todo = [n for n in chosen if not isinstance(CASES[n], str) and wanted(results.get(n), args.again)]

    def one(name: str) -> tuple[str, dict[str, Any]]:
        return name, {engine: sequence(name, engine, args) for engine in ENGINES}

    prepare_processes()
    with ThreadPool(args.jobs) as pool:
        for name, result in tqdm(pool.imap_unordered(one, todo), total=len(todo), unit="model"):
            write(args.results, {**read(args.results), name: result})


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    return result is None or again == "all" or (again == "failed" and not all(map(passes, result.values())))


def passes(result: dict[str, Any]) -> bool:
    """Whether all that was tried by one engine holds. What FP32 itself cannot do is no fault of a conversion."""
    return "reference_error" in result or ("error" not in result and all(word == "same" for word in result.values()))


def sequence(name: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    found, ended = in_a_process(args.seconds, worker, name, engine, args.gib)
    if "done" not in found and "reference_error" not in found:
        return {**found, "error": ended}
    found.pop("done", None)
    return found


def worker(pipe: Connection, name: str, engine: str, gib: float) -> None:
    os.environ["MXNET_ENGINE_TYPE"] = engine
    worker_settings(gib)
    from zoo.catalogue import CASES
    from zoo.measure import Model, cause
    from zoo.rewriting import plain_copies, zero_unassigned_rois

    try:
        case = CASES[name]()
        with plain_copies(case.copied), zero_unassigned_rois():
            model = Model(case)
            model.refer()
            pipe.send(("full", word := compared(model)))
            if word == "same":
                for way, policy in ways(model):
                    try:
                        pipe.send((way, converted(model, policy)))
                    except Exception as error:  # whatever MXNet or mxmp raises is the result
                        pipe.send((way, cause(error)))
                        return
    except Exception as error:
        pipe.send(("reference_error", cause(error)))
    pipe.send(("done", True))


def ways(model: Any) -> Iterator[tuple[str, Any]]:
    """The policies and plans to convert by; each is drawn anew for each model."""
    from mxnet.gluon import HybridBlock
    from zoo.plans import random_exclusions, random_plan

    import mxmp

    symbols = [call.symbol for call in model.calls]
    for dtype in ("bfloat16", "float16"):
        policy = mxmp.Policy(dtype)
        seed = random.Random(model.case.name + dtype).randrange(1 << 30)
        yield f"{dtype}, rules", policy
        yield f"{dtype}, excluded", mxmp.Policy(dtype, exclude=random_exclusions(symbols, seed))
        if isinstance(model.net, HybridBlock) and len(model.calls) == 1:
            args = tuple((model.case.train_inputs or model.case.inputs)())
            yield f"{dtype}, plan", random_plan(model.net, args, policy, seed)


def converted(model: Any, policy: Any) -> str:
    import mxmp

    mxmp.convert(model.net, policy)
    try:
        return compared(model)
    finally:
        mxmp.restore(model.net)


def compared(model: Any) -> str:
    """Train, evaluate twice, and train again from the same weights: ``"same"``, or what differs."""
    import numpy as np

    model.evaluate()  # writes the weights
    first = model.train()
    inference = [model.infer() for _ in range(2)]
    second = model.train()
    for number, (one, two) in enumerate(zip(*inference)):
        if not np.array_equal(one, two):
            return f"output {number} of the second evaluation differs"
    for number, (one, two) in enumerate(zip(first[0], second[0])):
        if not np.array_equal(one, two, equal_nan=True):
            return f"output {number} in training differs after an evaluation"
    for name, grad in first[1].items():
        if not np.array_equal(grad, second[1][name], equal_nan=True):
            return f"the gradient of {name} differs after an evaluation"
    return "same"


if __name__ == "__main__":
    main()
