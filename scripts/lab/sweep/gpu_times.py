"""Record what the kernels of one training step compute and move, for the model of its time. No GPU is needed.

    bash scripts/nullgpu.sh python scripts/dev.py sweep gpu-times

Networks are recorded at the batches of what has been published (``support/gpu_model.py``), and as
``scripts/gpu_acceptance.sh`` times them. ``sweep gpu-graphs`` models all others. A sweep that was ended goes on.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Callable

from bench import gpu_parts
from support.gpu_model import PART, PUBLISHED, RECORDS, SIZES, TIMED, VARIANTS, key
from support.options import parse
from support.processes import in_a_process, prepare_processes, silence
from support.results import chosen, in_parallel, read, write

from sweep.gpu_graphs import SAFE_SUMS, enlarged

STEPS = 3


def main(arguments: list[str] | None = None) -> None:
    os.environ["MXNET_ENGINE_TYPE"] = "NaiveEngine"
    os.environ["NG_GIB"] = "80"  # of the largest GPU whose figures are compared
    args = parse(
        *(__doc__, arguments, "names"),
        names=([str], "records by name or pattern (default: all)"),
        results=RECORDS,
        again=(False, "record what is there again"),
        seconds=(900.0, "limit of time of a process"),
    )
    found = read(args.results)
    todo = [
        (name, variant)
        for name in chosen(list(wanted()), args.names, "record")
        for variant in wanted()[name]
        if args.again or variant not in found.get(name, {})
    ]
    prepare_processes("support.zoo.catalogue", "sweep.networks.running")
    for (name, variant), (sent, ended) in in_parallel(
        lambda each: in_a_process(args.seconds, worker, *each), todo, unit="record"
    ):
        results = read(args.results)
        work = sent.get("work", {"error": sent.get("error", ended)})
        results[name] = {**results.get(name, {}), variant: work}
        write(args.results, results, depth=2)


def wanted() -> dict[str, list[str]]:
    """Return the variants to record, by "network, batch" and what is timed.

    The last are "timed: network" and "part: name", for the networks and parts of the acceptance run.
    """
    names: dict[str, list[str]] = {}
    for published in PUBLISHED:
        variants = names.setdefault(key(published), [])
        variants += [published.variant] * (published.variant not in variants)
    timed = {f"{TIMED}{name}": VARIANTS for name in SIZES}
    parts = {f"{PART}{name}": ["call"] for name in gpu_parts.parts()}
    return {**names, **timed, **parts}


def worker(pipe: Connection, name: str, variant: str) -> None:
    """Send the work of one step, or the line that says what went wrong."""
    silence()
    if variant == SAFE_SUMS:
        os.environ["MXNET_SAFE_ACCUMULATION"] = "1"
    from gpu.null.record import recording
    from gpu.null.work import work

    from sweep.networks.running import cause

    try:
        step = stepping(name, variant)
        for _ in range(STEPS):
            with recording() as record:
                step()
        pipe.send(("work", work(record.events)))
    except Exception as error:  # what a network cannot do is a result
        pipe.send(("error", cause(error)))


def stepping(name: str, variant: str) -> Callable[[], Any]:
    """Return what runs one step of a name of ``wanted``."""
    import mxnet as mx
    from gpu.null.training import Training

    if name.startswith((TIMED, PART)):
        mx.test_utils.set_default_context(mx.gpu())
    if name.startswith(PART):
        return gpu_parts.parts()[name[len(PART) :]]()
    if name.startswith(TIMED):
        return timed(name[len(TIMED) :], variant)
    training = Training(case(name), variant.partition(",")[0], static_alloc=True, static_shape=True)

    def step() -> None:
        training.forward_backward()
        training.step()

    return step


def timed(name: str, variant: str) -> Callable[[], Any]:
    """Return a step as the acceptance run times it."""
    import mxnet as mx
    from bench.networks import images, network
    from bench.worker import variant_step

    chosen, (batch, size) = network(name), SIZES[name]
    if chosen.inputs is images:  # photographs; here nothing is computed of them
        chosen = replace(chosen, inputs=lambda batch, size: [mx.nd.zeros((batch, 3, size, size))])
    step = partial(variant_step, chosen, task="training", dtype="float16", policy="", plan="")
    return step(variant=variant, batch=batch, size=size)[0]


def case(name: str) -> Any:
    from gpu.null.networks import bert
    from support.zoo.catalogue import CASES

    network, batch = name.split(", ")
    if network == "bert_base":
        return bert(12, 768, 12, int(batch), 128, 30522)
    return enlarged(CASES[network](), int(batch) / 128)
