"""Every model of the zoos in float16 and bfloat16: mxmp, ``mxnet.contrib.amp`` and a control, into one JSON file.

    python scripts/sweep_models.py                      # all that have no result yet; ends early and goes on at will
    python scripts/sweep_models.py resnet18_v1b 'rnn.*' # these, by name or pattern
    python scripts/sweep_models.py --again failed       # those again that failed (or: all)
    python scripts/sweep_models.py --jobs 2             # two at a time
    python scripts/make_models_page.py                  # the page of the manual

Each model runs in processes of its own with a limit of time and memory, so that a crash is a result. There are two
controls, neither made by mxmp: ``control`` is FP32 with only its weights rounded to the dtype, ``ideal`` is FP32 with
all that matrix operators read and write rounded, as perfect kernels of the dtype would. A model passes within 3 dB of
the latter; what does not gets a second look (``holds``).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from zoo.measure import Model

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "models.json"
DTYPES = ("float16", "bfloat16")
GIB = 2**30
PRELOADED = ["zoo.catalogue", "zoo.measure"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models by name or pattern (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", choices=["failed", "all"], help="measure those again")
    parser.add_argument("--seconds", type=float, default=300, help="limit of time of a process")
    parser.add_argument("--gib", type=float, default=12, help="limit of memory of a process")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    args = parser.parse_args(arguments)
    from tqdm import tqdm
    from zoo.catalogue import CASES, in_order

    results = read(args.results)
    chosen = [n for n in in_order() if not args.names or any(fnmatch.fnmatch(n, p) for p in args.names)]
    for pattern in args.names:
        if not fnmatch.filter(chosen, pattern):
            raise SystemExit(f"no model is called {pattern!r}; there are {', '.join(list(CASES)[:5])}, ...")
    todo = [name for name in chosen if wanted(results.get(name), args.again)]

    def one(name: str) -> tuple[str, dict[str, Any]]:
        case = CASES[name]
        return name, {"left_out": case} if isinstance(case, str) else sweep(name, args, results.get(name))

    prepare_processes()
    with ThreadPool(args.jobs) as pool:
        for name, result in tqdm(pool.imap_unordered(one, todo), total=len(todo), unit="model"):
            write(args.results, {**read(args.results), name: result})


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    """Whether a model is to be measured: it has no result, not of all stages, or one that ``again`` does not trust."""
    from zoo.measure import STAGES

    if result is None or again == "all":
        return True
    if result.keys() & {"left_out", "reference_error"}:
        return False
    return not result.keys() >= {*STAGES, *looked_into(result)} or (again == "failed" and not passes(result))


def looked_into(result: dict[str, Any]) -> list[str]:
    """Stages for what is not within 3 dB: perfect kernels throughout, then other inputs; for casts, slower kernels."""
    first = [dtype for dtype in DTYPES if not within(result, dtype)]
    second = [d for d in first if f"{d}.throughout" in result and not within(result, d, "throughout")]
    casts = share_holds(result, "bfloat16") is False or bytes_hold(result, "bfloat16") is False
    stages = [f"{dtype}.throughout" for dtype in first] + [f"{dtype}.lag" for dtype in second]
    return stages + ["bfloat16.slow_counts"] * casts


def passes(result: dict[str, Any]) -> bool:
    return "left_out" in result or all(holds(result, dtype) for dtype in DTYPES)


def holds(result: dict[str, Any], dtype: str, margin: float = 3.0) -> bool:
    """Whether it is within ``margin`` dB of perfect kernels, of those throughout, or in the mean over other inputs."""
    lag = result.get(f"{dtype}.lag", {})
    near = bool(lag) and "error" not in lag and min(lag.values()) >= -margin
    return within(result, dtype) or within(result, dtype, "throughout") or near


def within(
    result: dict[str, Any], dtype: str, control: str = "ideal", *, ours: str = "mxmp", margin: float = 3.0
) -> bool:
    """Whether outputs and gradients in ``dtype`` are no more than ``margin`` dB worse than the control's."""
    found, wanted = (result.get(f"{dtype}.{what}", {}) for what in (ours, control))
    if "outputs_db" not in found or "outputs_db" not in wanted or not found["inference_finite"]:
        return False
    keys = [key for key in ("outputs_db", "gradients_db") if key in wanted]
    return all(found.get(key, -200) >= wanted[key] - margin for key in keys)


def share_holds(result: dict[str, Any], dtype: str, ours: str = "counts") -> bool | None:
    """Whether as large a share of the FLOPs is low as under ``mxnet.contrib.amp``; None where that is not known."""
    found, wanted = (result.get(f"{dtype}.{what}", {}).get("low_share") for what in (ours, "amp"))
    return None if found is None or wanted is None else found >= wanted - 1e-9


def bytes_hold(result: dict[str, Any], dtype: str, ours: str = "counts", *, suffix: str = "") -> bool | None:
    """Whether no more bytes are cast, but for outputs; None also where ``mxnet.contrib.amp`` computes less low."""
    found, wanted = (result.get(f"{dtype}.{what}", {}) for what in (ours, "amp"))
    if f"cast_bytes{suffix}" not in found or "cast_bytes" not in wanted:
        return None
    if (found["low_share"] or 0) > (wanted["low_share"] or 0) + 1e-9:
        return None
    return found[f"cast_bytes{suffix}"] - found[f"output_bytes{suffix}"] <= wanted["cast_bytes"]


def sweep(name: str, args: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any]:
    """The stages of one model that ``before`` lacks. One that ends its process is named, the rest go on in another."""
    from zoo.measure import STAGES

    found = {} if args.again or before is None else dict(before)
    # amp cannot be had twice in a process. None: what these results ask for, and once more what those ask for.
    for group in (STAGES[:-1], STAGES[-1:], None, None):
        group = looked_into(found) if group is None else group
        rest = [stage for stage in group if stage not in found]
        while rest:
            told, ended = in_a_process(args.seconds, worker, name, rest, args.gib)
            found.update(told)
            if "reference_error" in told:
                return found
            rest = [stage for stage in rest if stage not in told]
            if rest and "reference" not in told:
                return {"reference_error": ended}
            if rest and not any("error" in told.get(stage, ()) for stage in group):
                found[rest.pop(0)] = {"error": ended}
    return found


def prepare_processes() -> None:
    """Have what every process needs imported once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    # Python before 3.13 does not tell the server sys.path, and what it cannot import each process would import anew.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))


def in_a_process(seconds: float, target: Callable[..., None], *args: Any) -> tuple[dict[str, Any], str]:
    """What ``target(pipe, *args)`` sent as pairs of name and value, and how its process ended."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    found: dict[str, Any] = {}
    ended = ""
    try:
        while here.poll(seconds):
            stage, value = here.recv()
            found[stage] = value
        ended = f"took longer than {seconds:.0f} s"
    except EOFError:
        process.join()
        code = process.exitcode or 0
        ended = f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
    finally:
        process.kill()
        process.join()
    return found, ended


def worker(pipe: Connection, name: str, stages: list[str], gib: float) -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"  # MXNet's own fusion is wrong in FP32 inference
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * GIB), int(gib * GIB)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    from zoo.catalogue import CASES
    from zoo.measure import Model, cause
    from zoo.rewriting import plain_copies, zero_unassigned_rois

    try:
        case = CASES[name]()
        with plain_copies(case.copied), zero_unassigned_rois():
            measure(pipe, Model(case), stages)
    except Exception as error:  # whatever FP32 itself cannot do is the result
        pipe.send(("reference_error", cause(error)))


def measure(pipe: Connection, model: Model, stages: list[str]) -> None:
    """Send the FP32 results, then those of each stage. Raises what FP32 itself raises."""
    if stages != ["float16.amp"]:
        model.refer()
    case, parameters = model.case, len(list(model.net.collect_params()))
    told: dict[str, Any] = {"kind": case.kind, "loss": case.loss_name, "parameters": parameters}
    if case.copied:
        told["copied"] = case.copied
    pipe.send(("reference", told))
    for stage in stages:
        result = model.run(stage)
        pipe.send((stage, result))
        if "error" in result:  # MXNet raises it again wherever the arrays of the operator that failed are used
            return


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    whole.write_text("{\n" + lines + "\n}\n")
    os.replace(whole, path)


if __name__ == "__main__":
    main()
