"""Every model of the zoos in float16 and bfloat16: mxmp, ``mxnet.contrib.amp`` and a control, into one JSON file.

Each model runs in processes of its own with a limit of time and memory, so that a crash is a result. There are two
controls, neither made by mxmp: ``control`` is FP32 with only its weights rounded to the dtype, ``ideal`` is FP32 with
all that matrix operators read and write rounded, as perfect kernels of the dtype would. A model passes within 3 dB of
the latter; what does not gets a second look (``holds``). A sweep that was ended goes on. After a change of mxmp,
``--again mxmp`` measures what it computes where an older tree of ``mxmp/`` did; the controls stand.
"""

from __future__ import annotations

import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from support.options import parse
from support.processes import in_a_process, prepare_processes, silence
from support.results import FOLDER, chosen, in_parallel, read, tree, write

if TYPE_CHECKING:
    from sweep.networks.measure import Model

RESULTS = FOLDER / "models.json"
DTYPES = ("float16", "bfloat16")
OURS = ("mxmp", "counts", "lag", "slow_counts")
GIB = 2**30
Run = Callable[..., "tuple[dict[str, Any], str]"]


def main(arguments: list[str] | None = None) -> None:
    sweep_zoo(__doc__, arguments, RESULTS, wanted, sweep, more_again=("mxmp",))


def without_mxmp(result: dict[str, Any]) -> dict[str, Any]:
    """Return the stages in which mxmp has no part."""
    return {stage: found for stage, found in result.items() if stage.split(".")[-1] not in OURS}


def sweep_zoo(
    doc: str,
    arguments: list[str] | None,
    path: Path,
    wanted: Callable[[dict[str, Any] | None, str | None], Any],
    one: Callable[[str, dict[str, Any], Run, str | None], dict[str, Any]],
    names: Callable[[], list[str]] | None = None,
    more_again: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Measure by ``one(name, results so far, run, again)`` each model that is wanted, and keep its results in a file.

    ``run(target, *arguments)`` calls ``target(pipe, limit of memory in GiB, *arguments)`` in a process of its own.
    Returns all results of the file.
    """
    args = parse(
        *(doc, arguments, "names"),
        names=([str], "models by name or pattern (default: all)"),
        results=path,
        again=(str, "measure those again", ("failed", "all", *more_again)),
        seconds=(300.0, "limit of time of a process"),
        gib=(12.0, "limit of memory of a process"),
        jobs=(1, "models at a time"),
    )
    from support.zoo.catalogue import CASES, in_order

    results = read(args.results)
    there = names() if names else in_order()
    todo = [name for name in chosen(there, args.names, "network") if wanted(results.get(name), args.again)]

    def run(target: Callable[..., None], *more: Any) -> tuple[dict[str, Any], str]:
        return in_a_process(args.seconds, target, args.gib, *more)

    def measured(name: str) -> dict[str, Any]:
        left_out = isinstance(CASES[name], str)
        return {"left_out": CASES[name]} if left_out else one(name, results.get(name, {}), run, args.again)

    prepare_processes("support.zoo.catalogue", "sweep.networks.measure")
    for name, result in in_parallel(measured, todo, args.jobs):
        write(args.results, {**read(args.results), name: result})
    return read(args.results)


def wanted(result: dict[str, Any] | None, again: str | None) -> bool:
    """Return whether to measure a model: it has no result, not of all stages, or one that ``again`` does not trust."""
    from sweep.networks.measure import STAGES

    if result is None or again == "all":
        return True
    if result.keys() & {"left_out", "reference_error"}:
        return False
    if again == "mxmp" and result.get("mxmp") != tree():
        return True
    return not result.keys() >= {*STAGES, *looked_into(result)} or (again == "failed" and not passes(result))


def looked_into(result: dict[str, Any]) -> list[str]:
    """List stages of what is not within 3 dB: perfect kernels throughout, then other inputs; slow kernels for casts."""
    first = [dtype for dtype in DTYPES if not within(result, dtype)]
    second = [d for d in first if f"{d}.throughout" in result and not within(result, d, "throughout")]
    casts = share_holds(result, "bfloat16") is False or bytes_hold(result, "bfloat16") is False
    stages = [f"{dtype}.throughout" for dtype in first] + [f"{dtype}.lag" for dtype in second]
    return stages + ["bfloat16.slow_counts"] * casts


def passes(result: dict[str, Any]) -> bool:
    return "left_out" in result or all(holds(result, dtype) for dtype in DTYPES)


def holds(result: dict[str, Any], dtype: str, margin: float = 3.0) -> bool:
    """Return whether it is near perfect kernels, those throughout, or in the mean over other inputs."""
    lag = result.get(f"{dtype}.lag", {})
    near = bool(lag) and "error" not in lag and min(lag.values()) >= -margin
    return within(result, dtype) or within(result, dtype, "throughout") or near


def within(
    result: dict[str, Any], dtype: str, control: str = "ideal", *, ours: str = "mxmp", margin: float = 3.0
) -> bool:
    """Return whether outputs and gradients in ``dtype`` are no more than ``margin`` dB worse than the control's."""
    found, wanted = (result.get(f"{dtype}.{what}", {}) for what in (ours, control))
    if "outputs_db" not in found or "outputs_db" not in wanted or not found["inference_finite"]:
        return False
    keys = [key for key in ("outputs_db", "gradients_db") if key in wanted]
    return all(found.get(key, -200) >= wanted[key] - margin for key in keys)


def share_holds(result: dict[str, Any], dtype: str, ours: str = "counts") -> bool | None:
    """Return whether as large a share of the FLOPs is low as under ``mxnet.contrib.amp``; None where not known."""
    found, wanted = (result.get(f"{dtype}.{what}", {}).get("low_share") for what in (ours, "amp"))
    return None if found is None or wanted is None else found >= wanted - 1e-9


def bytes_hold(result: dict[str, Any], dtype: str, ours: str = "counts", *, suffix: str = "") -> bool | None:
    """Return whether no more bytes are cast, but for outputs; None where ``mxnet.contrib.amp`` computes less low."""
    found, wanted = (result.get(f"{dtype}.{what}", {}) for what in (ours, "amp"))
    if f"cast_bytes{suffix}" not in found or "cast_bytes" not in wanted:
        return None
    if (found["low_share"] or 0) > (wanted["low_share"] or 0) + 1e-9:
        return None
    return found[f"cast_bytes{suffix}"] - found[f"output_bytes{suffix}"] <= wanted["cast_bytes"]


def sweep(name: str, before: dict[str, Any], run: Run, again: str | None) -> dict[str, Any]:
    """Run the stages that ``before`` lacks. One that ends its process is named, the rest go on in another."""
    from sweep.networks.measure import STAGES

    found = without_mxmp(before) if again in (None, "mxmp") else {}
    found["mxmp"] = tree()
    # amp cannot be had twice in a process. None: what these results ask for, and once more what those ask for.
    for group in (STAGES[:-1], STAGES[-1:], None, None):
        group = looked_into(found) if group is None else group
        rest = [stage for stage in group if stage not in found]
        while rest:
            sent, ended = run(with_model, name, measure, rest)
            found.update(sent)
            if "reference_error" in sent:
                return found
            rest = [stage for stage in rest if stage not in sent]
            if rest and "reference" not in sent:
                return {"reference_error": ended}
            if rest and not any("error" in sent.get(stage, ()) for stage in group):
                found[rest.pop(0)] = {"error": ended}
    return found


def with_model(pipe: Connection, gib: float, name: str, use: Callable[..., None], *arguments: Any) -> None:
    """Call ``use(pipe, model, *arguments)`` in a process that prints nothing, with a limit of memory."""
    silence()
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * GIB), int(gib * GIB)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from support.zoo.catalogue import CASES

    from sweep.networks.measure import Model
    from sweep.networks.rewriting import plain_copies, zero_unassigned_rois
    from sweep.networks.running import cause

    try:
        case = CASES[name]()
        with plain_copies(case.copied), zero_unassigned_rois():
            use(pipe, Model(case), *arguments)
    except Exception as error:  # whatever FP32 itself cannot do is the result
        pipe.send(("reference_error", cause(error)))


def measure(pipe: Connection, model: Model, stages: list[str]) -> None:
    """Send the FP32 results, then those of each stage. Raises what FP32 itself raises."""
    if stages != ["float16.amp"]:
        model.refer()
    case, parameters = model.case, len(list(model.net.collect_params()))
    first: dict[str, Any] = {"kind": case.kind, "loss": case.loss_name, "parameters": parameters}
    if case.copied:
        first["copied"] = case.copied
    pipe.send(("reference", first))
    for stage in stages:
        result = model.run(stage)
        pipe.send((stage, result))
        if "error" in result:  # MXNet raises it again wherever the arrays of the operator that failed are used
            return
