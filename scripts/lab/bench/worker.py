"""One variant of one network, a step at a time: see ``turns.Worker``."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Callable, Dict, Iterator, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from support.profile import operators

from bench.networks import Network, network
from bench.turns import answers, peak_bytes, serve, timed

PROFILED = 3  # steps
# The first runs one step and returns whether it was skipped; the second profiles it.
Step = Tuple[Callable[[], Any], Callable[[], Dict[str, Any]]]


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers: that it is prepared, and to each command."""
    chosen = network(config["network"])
    on_gpu = config.get("device") == "gpu"
    if on_gpu:
        mx.test_utils.set_default_context(mx.gpu())
    if config["variant"] == "tuning":
        yield tune(chosen, **config)
    else:
        yield from answers(partial(variant_step, chosen, **config), gpu_bytes if on_gpu else peak_bytes)


def gpu_bytes() -> int:
    """Return the bytes of the GPU that are in use. MXNet's pool gives none back, so this is its peak so far."""
    mx.nd.waitall()
    free, total = mx.context.gpu_memory_info()
    return total - free


def tune(net_of: Network, *, task: str, policy: str, batch: int, size: int, plan: str, **_: Any) -> dict:
    """Write the plan for ``tuned``, in a process of its own: what tuning takes is no part of a step's peak memory."""
    import mxmp

    started, net = time.perf_counter(), initialized(net_of)
    options = {"training": task == "training", "optimizer": net_of.optimizer}
    made = mxmp.tune(net, *net_of.inputs(batch, size), policy=policy, cache=False, **options)
    made.save(plan)
    chosen, gains = made.tuned.chosen, made.tuned.gains
    found = {"operators": len(made.decisions), "chosen": chosen, "predicted": made.tuned.predicted.get(chosen, 1.0)}
    measured = gains[chosen][1] if chosen in gains else 1.0
    return {"seconds": time.perf_counter() - started, **found, "measured": measured}


def initialized(net_of: Network) -> Any:
    mx.random.seed(0)
    np.random.seed(0)
    net = net_of.make()
    net.initialize(mx.init.MSRAPrelu() if net_of.optimizer == "sgd" else mx.init.Normal(0.02))
    return net


def variant_step(
    net_of: Network, *, variant: str, task: str, dtype: str, policy: str, batch: int, size: int, plan: str, **_: Any
) -> Step:
    if variant == "contrib.amp":
        from mxnet.contrib import amp

        amp.init(dtype)
    import mxmp

    net, inputs, ours = initialized(net_of), net_of.inputs(batch, size), variant not in ("float32", "contrib.amp")
    if ours:
        named = {"rules": policy, "tuned": plan}.get(variant, variant)
        mxmp.convert(net, mxmp.Plan.load(named) if variant == "tuned" else named)
    net.hybridize(static_alloc=True, static_shape=True)
    if task != "training":
        step: Callable[[], Any] = partial(net, *inputs)
        return step, partial(profile, net, step)

    with autograd.record():  # SSD traces another network for inference, and MXNet keeps the first
        net(*inputs)  # shapes of the parameters
    kind = mxmp.Trainer if ours else gluon.Trainer
    options = {**net_of.options, **({"multi_precision": True} if dtype == "float16" and variant != "float32" else {})}
    trainer = kind(net.collect_params(), net_of.optimizer, options)
    if variant == "contrib.amp" and dtype == "float16":
        amp.init_trainer(trainer)

    def train() -> bool:
        with autograd.record():
            loss = net_of.loss(net(*inputs), batch)
            if variant == "contrib.amp" and dtype == "float16":
                with amp.scale_loss(loss, trainer) as loss:
                    pass
        (trainer if ours else autograd).backward(loss)
        trainer.step(batch, ignore_stale_grad=True)  # some networks carry a layer that they never call
        return ours and trainer.last_step_skipped

    return train, partial(profile, net, train)


def profile(net: Any, step: Callable[[], Any]) -> dict[str, dict]:
    """Return of each operator that one step runs how often, and milliseconds in all."""
    net.hybridize(static_alloc=False, static_shape=False)  # a static graph runs in bulks of many operators
    step()
    found = operators(lambda: [timed(step, mx.nd.waitall) for _ in range(PROFILED)])
    return {"operators": {name: [count / PROFILED, ms / PROFILED] for name, (count, ms) in found.items()}}


if __name__ == "__main__":
    serve(run)
