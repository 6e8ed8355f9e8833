"""What the machine code of MXNet's float16 kernels computes, by case, on the simulated GPU: results/kernels-gpu.json.

    bash scripts/simgpu.sh python scripts/dev.py sweep simulated    # continues where it was ended

Each operator that a rule lets compute low runs in float16, whether or not mxmp uses the kernel, forward and backward,
against FP32 on a CPU, on the same rounded inputs and constants; and against mxmp's emulation. ``variants.py`` has the
other ways in which the same kernels run.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Iterator

import mxnet as mx
import numpy as np
from support.operators.case import CASES, Case, as_read, digest, is_allowed
from support.operators.errors import FEW, ONE, largest_error, short, ulp
from support.operators.running import reason_of, run
from support.options import parse
from support.results import FOLDER, read, write

from mxmp.pipeline import low_graph
from mxmp.policy import Policy
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision, Plan
from sweep.operators.variants import apart, variants

RESULTS = FOLDER / "kernels-gpu.json"  # operator -> case -> record
_SECONDS = 120
_RANDOM = ("Dropout",)


def main(arguments: list[str] | None = None) -> None:
    text = "compute these again (default: what is not computed yet, or whose emitted graph changed)"
    args = parse(__doc__, arguments, "operators", operators=([str], text))
    if not mx.context.num_gpus():
        raise SystemExit("run this on the simulated GPU: bash scripts/simgpu.sh python scripts/dev.py sweep simulated")
    os.environ.update(MXNET_USE_FUSION="0", MXNET_SUBGRAPH_BACKEND="NONE")
    results = read(RESULTS)
    for op in args.operators or sorted(CASES):
        cases = [each for each in CASES[op] if not each.empty and not is_allowed(each, "float16")]
        before = {} if args.operators else results.get(op, {})
        digests = {case.name: digest(case, "float16") for case in cases}
        kept = {name: r for name, r in before.items() if r.get("graph") == digests.get(name) and _is_whole(r)}
        todo = [case for case in cases if case.name not in kept]
        found = {case.name: {"graph": digests[case.name], **record} for case, record in _computed(op, todo)}
        results[op] = dict(sorted({**kept, **found}.items()))
        if todo:
            write(RESULTS, dict(sorted(results.items())), depth=2)
            print(op, _counts(results[op]), flush=True)


def _is_whole(record: dict[str, Any]) -> bool:
    return "forward" not in record or "variants" in record


def _counts(records: dict[str, Any]) -> dict[str, int]:
    verdicts = [record["verdict"] for record in records.values()]
    return {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}


def _computed(op: str, todo: list[Case]) -> Any:
    """Yield each case with its record; a process that ends is started again behind the case that ended it."""
    ended = {"verdict": "not run", "why": "the stubs do not compute it, or the process ended"}
    done = 0
    while done < len(todo):
        there, here = os.pipe()
        child = os.fork()
        if not child:
            with os.fdopen(here, "w", buffering=1) as told:
                for case in todo[done:]:
                    signal.alarm(_SECONDS)
                    with mx.util.np_shape(op.startswith("_np")):
                        for part in _parts(case):
                            told.write(json.dumps(part) + "\n")
                    told.write("null\n")
            os._exit(0)
        os.close(here)
        record: dict[str, Any] = {}
        with os.fdopen(there) as read_from:
            for part in map(json.loads, read_from):
                if part is not None:
                    record.update(part)
                    continue
                yield todo[done], record
                done, record = done + 1, {}
        os.waitpid(child, 0)
        if done < len(todo):
            yield todo[done], {"variants": {}, **record} if record else ended
            done += 1


def _parts(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the record of a case, and then the growing record of its variants, in which the process may end."""
    if case.op in _RANDOM:
        yield {"verdict": "not run", "why": "its numbers are random"}
        return
    rng = np.random.RandomState(5)
    values = [spec.values(rng) for spec in case.inputs]
    values = [v.astype("float16").astype("float32") if s.grad else v for v, s in zip(values, case.inputs)]
    try:
        plain = as_read(case, "float16").graph()
        shapes = [out.shape for out in run(plain, case, mx.cpu(), values, None)[0]]
        heads = [rng.normal(0, 1, shape).astype("float16").astype("float32") for shape in shapes]
        exact = run(plain, case, mx.cpu(), values, heads)
    except mx.MXNetError as error:
        yield {"verdict": "unmeasurable", "why": reason_of(error)}
        return
    low = _low(case, "gpu")
    try:
        found = run(low, case, mx.gpu(), values, heads)
    except mx.MXNetError as error:
        yield {"verdict": "error", "why": reason_of(error)}
        return
    each = max(largest_error(*pair, ulp(pair[1], "float16")) for way in zip(found, exact) for pair in zip(*way))
    forward, backward = (max((largest_error(*pair) for pair in zip(*way)), default=0) for way in zip(found, exact))
    few = max(forward, backward) <= FEW
    verdict = "one rounding" if each <= ONE else "a few roundings" if few else "more"
    yield {"forward": short(forward), "backward": short(backward), "verdict": verdict}
    try:
        emulated = run(_low(case, "cpu"), case, mx.cpu(), values, heads)
        yield {"emulated": apart(found, emulated)}
    except mx.MXNetError:
        pass  # mxmp emulates no such kernel
    known: dict[str, Any] = {}
    for variant in variants(case, plain, low, values, heads, exact, found):
        known.update(variant)
        yield {"variants": known}
    yield {"variants": known}


def _low(case: Case, device: str) -> Graph:
    policy = Policy("float16", params="float32", norm="compute")
    return low_graph(case.graph(), Plan(policy, device, {"op": Decision(case.op, True, "computed")}), device)[0]
