"""Whether two workers hold equal weights, bit for bit, at every step with injected overflows, for every optimizer.

One job of two workers for every store and optimizer. Ends with 1 where workers differ or a job fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.optimizers import OPTIMIZERS, options
from support.options import parse
from support.pages import table
from support.processes import share_path

import mxmp
from mxmp import launch as launcher

STORES = ("dist_sync", "horovod")
SPOILED_SHARE = 0.2  # of the steps
# One parameter in float16 with a master, one in FP32.
POLICY = mxmp.Policy("float16", params="float16", exclude=("*dense1*",))


def main(arguments: list[str] | None = None) -> int:
    args = parse(
        *(__doc__, arguments),
        stores=(installed_stores(), "", STORES),
        optimizers=([str], "default: all 19 of MXNet"),
        steps=50,
        devices=(1, "of each worker"),
    )
    names, found = args.optimizers or OPTIMIZERS, {}
    for store, name in itertools.product(args.stores, names):
        found[store, name] = run(store, name, str(args.steps), str(args.devices))
        print(f"{store} {name}: {cell(found[store, name])}", flush=True)
    rows = [[name, *(cell(found[store, name]) for store in args.stores)] for name in names]
    print(table(" | ".join(["optimizer", *args.stores]), rows))
    return int(any(each["differ"] for each in found.values()))


def cell(found: dict[str, Any]) -> str:
    return found["differ"] or f"equal, {found['skipped']} of {found['steps']} skipped"


def run(store: str, name: str, steps: str, devices: str) -> dict:
    """Run one job: steps, skipped ones, and the first difference between the workers, empty where there is none."""
    launch = launcher.launch_horovod if store == "horovod" else launcher.launch
    with tempfile.TemporaryDirectory() as folder:
        share_path()
        work = "from checks.equal_workers import work; import sys; work(*sys.argv[1:])"
        command = [sys.executable, "-W", "ignore", "-c", work, store, name, folder, steps, devices]
        code = launch(command, workers=2, timeout=300)
        if code:
            return {"steps": int(steps), "skipped": None, "differ": f"the job ended with code {code}"}
        first, second = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1))
    pairs = list(enumerate(zip(first, second), 1))
    differ = [
        f"{what} differ at step {i}" for i, (ours, theirs) in pairs for what in ours if ours[what] != theirs[what]
    ]
    differ += [f"one worker's devices differ at step {i + 1}" for i, step in enumerate(first) if not step["devices"]]
    if len({step["weights"] for step in first}) != sum(not step["skipped"] for step in first) + first[0]["skipped"]:
        differ.append("weights did not change at a step that was applied, or changed at one that was skipped")
    return {"steps": len(first), "skipped": sum(step["skipped"] for step in first), "differ": "; ".join(differ[:1])}


def installed_stores() -> list[str]:
    return [store for store in STORES if store != "horovod" or importlib.util.find_spec("horovod")]


def work(store: str, name: str, folder: str, *numbers: str) -> None:
    """Train as one worker on batches of its own, from weights of its own, and write what it holds after each step."""
    steps, devices = map(int, numbers)
    kvstore: Any
    if store == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        kvstore, rank, batch_size = store, hvd.rank(), 4 * devices
    else:
        kvstore = mx.kv.create(store)
        rank, batch_size = kvstore.rank, 4 * devices * kvstore.num_workers
    mx.random.seed(100 + rank)
    contexts, loss = [mx.cpu(k) for k in range(devices)], gluon.loss.L2Loss()
    net = two_layers(contexts)
    scaler = mxmp.DynamicLossScaler(init_scale=2.0**8, growth_interval=4)
    trainer = mxmp.Trainer(net.collect_params(), name, options(name, True), kvstore=kvstore, loss_scale=scaler)
    plan, seen = np.random.RandomState(0), []
    for step in range(steps):
        batches = [batch(100 * step + 10 * rank + k, ctx) for k, ctx in enumerate(contexts)]
        with autograd.record():
            losses = [loss(net(x), y) for x, y in batches]
        trainer.backward(losses)
        spoil, worker, param, device, value = plan.rand(), *plan.randint(2, size=3), plan.choice(3)
        if spoil < SPOILED_SHARE and worker == rank:
            trainer._params[param].list_grad()[device % devices][0, 0] = (np.inf, -np.inf, np.nan)[value]
        trainer.step(batch_size)
        seen.append(
            {
                "weights": digest(array.asnumpy().tobytes() for param in trainer._params for array in held(param)),
                "states": digest(updater.get_states() for updater in trainer._updaters),
                "scale": trainer.loss_scale,
                "skipped": trainer.last_step_skipped,
                "devices": all(len({a.asnumpy().tobytes() for a in p.list_data()}) == 1 for p in trainer._params),
            }
        )
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    if store != "horovod":
        kvstore._barrier()


def two_layers(contexts: list[mx.Context]) -> nn.HybridSequential:
    """Return a small converted net, from 3 inputs to 2 outputs, whose arrays are there."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3, use_bias=False, activation="tanh"), nn.Dense(2, in_units=4, use_bias=False))
    net.initialize(mx.init.Uniform(0.5), ctx=contexts)
    net.hybridize()
    mxmp.convert(net, POLICY)
    for ctx in contexts:
        net(mx.nd.zeros((1, 3), ctx=ctx))
    return net


def batch(number: int, ctx: mx.Context) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    rng = np.random.RandomState(1000 + number)
    return mx.nd.array(rng.randn(4, 3), ctx=ctx), mx.nd.array(rng.randn(4, 2), ctx=ctx)


def held(param: gluon.Parameter) -> list[mx.nd.NDArray]:
    """Return a parameter's arrays, its masters among them."""
    return [*param.list_data(), *(param.masters() if hasattr(param, "masters") else [])]


def digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
