"""One variant of one network in MXNet, a step at a time: see ``turns.Worker``."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Callable, Iterator

from bench.networks import Network, network
from bench.turns import answers, operators, serve, timed


def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers: that it is prepared, and to each command."""
    import mxnet as mx

    chosen = network(config["network"])
    if config["variant"] == TUNING:
        yield tune(chosen, **config)
    else:
        yield from answers(partial(make_step, chosen, **config), mx.nd.waitall)


TUNING = "tuning"


def tune(net_of: Network, *, task: str, policy: str, batch: int, size: int, plan: str, **_: Any) -> dict:
    """Write the plan for ``tuned``, in a process of its own: what tuning takes is no part of a step's peak memory."""
    import mxmp

    started = time.perf_counter()
    net = initialized(net_of)
    made = mxmp.tune(net, *net_of.inputs(batch, size), policy=policy, training=task == "training", cache=False)
    made.save(plan)
    chosen, gains = made.tuned.chosen, made.tuned.gains
    found = {"operators": len(made.decisions), "chosen": chosen, "predicted": made.tuned.predicted.get(chosen, 1.0)}
    measured = gains[chosen][1] if chosen in gains else 1.0
    return {"seconds": time.perf_counter() - started, **found, "measured": measured}


def initialized(net_of: Network) -> Any:
    import mxnet as mx
    import numpy as np

    mx.random.seed(0)
    np.random.seed(0)
    net = net_of.make()
    net.initialize(mx.init.MSRAPrelu() if net_of.optimizer == "sgd" else mx.init.Normal(0.02))
    return net


def make_step(
    net_of: Network, *, variant: str, task: str, dtype: str, policy: str, batch: int, size: int, plan: str, **_: Any
) -> tuple[Callable[[], bool], Callable[[], dict]]:
    """Return two functions.

    One runs one step and returns whether its update was skipped, and does not wait; the other profiles it.
    """
    from mxnet import autograd, gluon

    if variant == "contrib.amp":
        from mxnet.contrib import amp

        amp.init(dtype)
    import mxmp

    net = initialized(net_of)
    inputs = net_of.inputs(batch, size)
    if variant == "rules":
        mxmp.convert(net, policy)
    elif variant == "tuned":
        mxmp.convert(net, mxmp.Plan.load(plan))
    net.hybridize(static_alloc=True, static_shape=True)
    if task != "training":

        def predict() -> bool:
            net(*inputs)
            return False

        return predict, partial(profile, net, predict)

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

    return train, partial(profile, net, train)


def profile(net: Any, step: Callable[[], bool]) -> dict[str, list]:
    """Return of each operator that one step runs how often, and milliseconds in all."""
    import mxnet as mx

    net.hybridize(static_alloc=False, static_shape=False)  # a static graph runs in bulks of many operators
    step()
    found = operators(lambda: [timed(step, mx.nd.waitall) for _ in range(PROFILED)])
    return {name: [count / PROFILED, ms / PROFILED] for name, (count, ms) in found.items()}


PROFILED = 3  # steps


if __name__ == "__main__":
    serve(run)
