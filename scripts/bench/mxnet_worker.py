"""One variant of one network in MXNet, a step at a time: see ``turns.Worker``."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.networks import Network, network
from bench.turns import peak_bytes, serve


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers: that it is prepared, and to each command."""
    import mxnet as mx

    before = peak_bytes()
    started = time.perf_counter()
    if config["variant"] == TUNING:
        found = tune(network(config["network"]), **config)
        yield {"seconds": time.perf_counter() - started, **found}
        return
    net, step = make_step(network(config["network"]), **config)
    step()
    mx.nd.waitall()
    yield {"prepared": time.perf_counter() - started}
    for command in map(str.strip, sys.stdin):
        if command == "step":
            start = time.perf_counter()
            skipped = step()
            mx.nd.waitall()
            yield {"seconds": time.perf_counter() - start, "skipped": skipped}
        elif command == "memory":
            yield {"peak": peak_bytes(), "before": before}
        elif command == "profile":
            yield {"operators": profile(net, step)}


TUNING = "tuning"


def tune(net_of: Network, *, task: str, dtype: str, batch: int, size: int, plan: str, **_: Any) -> dict:
    """Write the plan for ``tuned``, in a process of its own: what tuning takes is no part of a step's peak memory."""
    import mxmp

    net = initialized(net_of)
    made = mxmp.tune(net, *net_of.inputs(batch, size), policy=dtype, training=task == "training", cache=False)
    made.save(plan)
    chosen, gains = made.tuned.chosen, made.tuned.gains
    found = {"operators": len(made.decisions), "chosen": chosen, "predicted": made.tuned.predicted.get(chosen, 1.0)}
    return {**found, "measured": gains[chosen][1] if chosen in gains else 1.0}


def initialized(net_of: Network) -> Any:
    import mxnet as mx
    import numpy as np

    mx.random.seed(0)
    np.random.seed(0)
    net = net_of.make()
    net.initialize(mx.init.MSRAPrelu() if net_of.optimizer == "sgd" else mx.init.Normal(0.02))
    return net


def make_step(
    net_of: Network, *, variant: str, task: str, dtype: str, batch: int, size: int, plan: str, **_: Any
) -> tuple[Any, Callable[[], bool]]:
    """The net, and a function that runs one step and says whether its update was skipped; it does not wait."""
    from mxnet import autograd, gluon

    if variant == "contrib.amp":
        from mxnet.contrib import amp

        amp.init(dtype)
    import mxmp

    net = initialized(net_of)
    inputs = net_of.inputs(batch, size)
    training = task == "training"
    if variant == "rules":
        mxmp.convert(net, dtype)
    elif variant == "tuned":
        mxmp.convert(net, mxmp.Plan.load(plan))
    net.hybridize(static_alloc=True, static_shape=True)
    if not training:

        def predict() -> bool:
            net(*inputs)
            return False

        return net, predict

    ours = variant in ("rules", "tuned")
    kind = mxmp.Trainer if ours else gluon.Trainer
    with autograd.record():  # SSD traces another network for inference, and MXNet keeps the first
        net(*inputs)  # shapes of the parameters
    trainer = kind(net.collect_params(), net_of.optimizer, dict(net_of.options))

    def train() -> bool:
        with autograd.record():
            loss = net_of.loss(net(*inputs), batch)
        if ours:
            trainer.backward(loss)
        else:
            autograd.backward(loss)
        trainer.step(batch, ignore_stale_grad=True)  # some networks carry a layer that they never call
        return ours and trainer.last_step_skipped

    return net, train


PROFILED = 3  # steps


def profile(net: Any, step: Callable[[], bool]) -> dict[str, list]:
    """Of each operator that MXNet's engine runs in one step: how often, and milliseconds in all."""
    import mxnet as mx

    net.hybridize(static_alloc=False, static_shape=False)  # a static graph runs in bulks of many operators
    step()
    with tempfile.TemporaryDirectory() as folder:
        options = {"profile_symbolic": True, "profile_imperative": True, "aggregate_stats": True}
        mx.profiler.set_config(filename=f"{folder}/profile.json", **options)
        mx.nd.waitall()
        mx.profiler.set_state("run")
        for _ in range(PROFILED):
            step()
            mx.nd.waitall()
        mx.profiler.set_state("stop")
        found = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
    waits = ("DeleteVariable", "WaitForVar")
    return {
        name: [row["Count"] / PROFILED, row["Total"] / PROFILED] for name, row in found.items() if name not in waits
    }


if __name__ == "__main__":
    serve(run)
