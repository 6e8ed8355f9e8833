"""Every model of the zoos: does an evaluation between two training steps change a bit? Into one JSON file.

Each model is converted by the rules, with operators excluded at random, and by plans drawn at random, as tuning might
choose them. It trains, evaluates twice and trains again from the same weights, by MXNet's threaded engine and by
``NaiveEngine``. The two evaluations must be equal, and so must be the gradients before and after them. FP32 inference
leaves weights in oneDNN's own layouts, which no later graph may stumble over.
"""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from typing import Any, Iterator

from support.results import DOCS

from sweep.models import Run, sweep_zoo, with_model

RESULTS = DOCS / "sequences.json"
ENGINES = ("ThreadedEnginePerDevice", "NaiveEngine")


def main(arguments: list[str] | None = None) -> None:
    sweep_zoo(
        __doc__, arguments, RESULTS, wanted, lambda name, _, run, __: {e: sequence(run, name, e) for e in ENGINES}
    )


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    failed = result is not None and "left_out" not in result and not all(map(passes, result.values()))
    return result is None or again == "all" or (again == "failed" and failed)


def passes(result: dict[str, Any]) -> bool:
    """Return whether all that was tried by one engine holds. What FP32 itself cannot do is no fault of a conversion."""
    return "reference_error" in result or ("error" not in result and all(word == "same" for word in result.values()))


def sequence(run: Run, name: str, engine: str) -> dict[str, Any]:
    found, ended = run(worker, name, engine)
    if "done" not in found and "reference_error" not in found:
        return {**found, "error": ended}
    found.pop("done", None)
    return found


def worker(pipe: Connection, gib: float, name: str, engine: str) -> None:
    os.environ["MXNET_ENGINE_TYPE"] = engine
    with_model(pipe, gib, name, tried)
    pipe.send(("done", True))


def tried(pipe: Connection, model: Any) -> None:
    from zoo.running import cause

    model.refer()
    pipe.send(("full", word := compared(model)))
    for way, policy in ways(model) if word == "same" else ():
        try:
            pipe.send((way, converted(model, policy)))
        except Exception as error:  # whatever MXNet or mxmp raises is the result
            pipe.send((way, cause(error)))
            return


def ways(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the policies and plans to convert by; each is drawn anew for each model."""
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
