"""Record what one training step of every network asks of a GPU: FP32, mxmp and ``mxnet.contrib.amp``. No GPU is needed.

    bash scripts/nullgpu.sh python scripts/dev.py sweep gpu-graphs

MXNet's CUDA build runs on libraries that record every call and compute nothing. Each network and variant is trained
for three steps in a process of its own, at a batch as one trains with or, if memory ends, a quarter of it; the third
step is recorded (``scripts/gpu/null/figures.py``) and its time modelled (``support/gpu_model.py``). A network that FP32
cannot run is a result, and so is what a variant raises. A sweep that was ended goes on; ``--again mxmp`` records anew
what an older tree of ``mxmp/`` asked for.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from support import gpu_model
from support.processes import silence
from support.results import FOLDER, read, tree

from sweep.models import Run, sweep_zoo

RESULTS = FOLDER / "gpu-graphs.json"
# In the last variant softmax and LayerNorm read and write float16, as MXNET_SAFE_ACCUMULATION lets them sum in FP32.
SAFE_SUMS = "float16-fast, safe sums"
OURS = ["float16", "float16-fast", SAFE_SUMS]
VARIANTS = ["float32", "contrib.amp", *OURS]
NO_NETWORK = re.compile(r"(nlp|rnn|nn|flow|contrib|np)\.|batch_dot$|.*_int8$")
# The batches that are tried, from the largest, as shares of one as one trains with; None: the catalogue's own inputs.
BATCHES = {"large": 1.0, "medium": 0.25, "small": None}
BATCH = {"segmentation": 8, "pose": 16, "ssd": 32, "yolo": 16, "center_net": 16, "depth": 12, "siamrpn": 16}
SIZES = {
    "bert": {2: 32, 16: 128, 3: 20},  # sequences, tokens, masked tokens
    "language model": {8: 35, 2: 80},  # tokens, sequences
    "translation": {2: 64, 16: 50, 12: 50},
}


def main(arguments: list[str] | None = None) -> None:
    # One operation after the other, so that the peak of memory is the same each time. MXNet reads it when imported.
    os.environ["MXNET_ENGINE_TYPE"] = "NaiveEngine"
    sweep_zoo(__doc__, arguments, RESULTS, lambda result, again: lacking(result or {}, again), record, names, ("mxmp",))


def names() -> list[str]:
    """Return the names of the zoos' networks, without the catalogue's single layers."""
    from support.zoo.catalogue import in_order

    return [name for name in in_order() if not NO_NETWORK.match(name)]


def lacking(result: dict[str, Any], again: str | None) -> list[str]:
    """Return the variants of a network that have no result yet, or one that ``again`` does not keep."""
    variants = result.get("variants", {})
    if again == "all":
        return VARIANTS
    if again == "mxmp" and result.get("mxmp") != tree():
        return [] if "error" in result else [name for name in VARIANTS if name not in variants or name in OURS]
    if again == "failed":
        return [name for name in VARIANTS if "error" in variants.get(name, {"error": ""})]
    return [] if "error" in result else [name for name in VARIANTS if name not in variants]


def record(name: str, before: dict[str, Any], run: Run, again: str | None) -> dict[str, Any]:
    """Return the figures of one network: those of ``before``, and those of each variant that it lacks."""
    found = {key: before[key] for key in ("kind", "batch", "inputs", "mxmp") if key in before}
    variants, todo = dict(before.get("variants", {})), lacking(before, again)
    if {*OURS} <= {*todo}:
        found["mxmp"] = tree()
    for variant in todo:
        for batch in BATCHES if "batch" not in found else [found["batch"]]:
            sent, ended = run(worker, name, variant, batch)
            if "figures" in sent:
                break
        variants[variant] = sent.get("figures", {"error": sent.get("error", ended)})
        if variant == VARIANTS[0] and "figures" not in sent:
            return {"error": variants[variant]["error"]}  # FP32 itself does not run
        found.update(sent.get("network", {}))
    return {**found, "variants": {each: variants[each] for each in VARIANTS if each in variants}}


def worker(pipe: Connection, gib: float, name: str, variant: str, batch: str) -> None:
    """Send the network's inputs and the figures of one variant, or the line that says what went wrong."""
    silence()
    if variant == SAFE_SUMS:
        os.environ["MXNET_SAFE_ACCUMULATION"] = "1"
    from gpu.null.figures import figures, recorded_step
    from gpu.null.work import work
    from support.zoo.catalogue import CASES

    from sweep.networks.running import cause

    try:
        case = CASES[name]()
        if BATCHES[batch]:
            case = enlarged(case, BATCHES[batch])
        shapes = [list(x.shape) for x in flat((case.train_inputs or case.inputs)())]
        pipe.send(("network", {"kind": case.kind, "batch": batch, "inputs": shapes}))
        passes, step = recorded_step(case, variant.partition(",")[0])
        seconds = gpu_model.times(work(passes.events + step.events), gpu_model.fit(read(gpu_model.RECORDS)))
        pipe.send(("figures", {**figures(passes, step), "seconds": seconds}))
    except Exception as error:  # what a network or contrib.amp cannot do is a result
        pipe.send(("error", cause(error)))


def enlarged(case: Any, share: float = 1.0) -> Any:
    """Return the case with inputs for a ``share`` of a batch as one trains with: those that it has, repeated."""
    import numpy as np

    from sweep.networks.running import array_like

    def wide(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [wide(each) for each in x]
        grown = zip(scaled(case, x.shape, share), x.shape)
        return x, np.pad(x.asnumpy(), [(0, to - size) for to, size in grown], mode="wrap")

    def arrays(kept: Any) -> Any:
        return array_like(*kept) if isinstance(kept, tuple) else [arrays(each) for each in kept]

    kept = wide((case.train_inputs or case.inputs)())
    draw = partial(arrays, kept)  # on the device on which it is called
    return replace(case, inputs=draw, train_inputs=draw)


def flat(arrays: Any) -> list:
    return [x for each in arrays for x in flat(each)] if isinstance(arrays, (list, tuple)) else [arrays]


def scaled(case: Any, shape: tuple, share: float) -> tuple:
    """Return the shape of an input for a ``share`` of a batch as one trains with."""
    if case.kind in ("classification", "gluon") and len(shape) == 4:
        size = 32 if case.name.startswith("cifar") else max(shape[2], 224)
        return (int(128 * share), shape[1], size, size)
    if case.kind == "video" and len(shape) in (4, 5):
        size = shape[-1] if shape[-1] in (112, 299) else 224
        return (int((32 if len(shape) == 4 else 8) * share), *shape[1:-2], size, size)
    sizes = SIZES.get(case.kind)
    if sizes:
        return tuple(sizes.get(size, size) for size in shape)
    return (shape[0] * max(int(BATCH.get(case.kind, 1) * share), 1), *shape[1:])
