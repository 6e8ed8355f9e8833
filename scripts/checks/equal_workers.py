"""Whether two workers hold equal weights, bit for bit, at every step with injected overflows, for every optimizer.

    python scripts/check_equal_workers.py                       # dist_sync, and Horovod where it is installed
    python scripts/check_equal_workers.py --stores horovod --optimizers adam sgd --steps 200

One job of two workers for every store and optimizer. What is done is kept in ``--results`` and is not run again;
``--fresh`` starts over. Ends with 1 where workers differ or a job fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import launch_local  # noqa: E402

STORES = ("dist_sync", "horovod")
SPOILED_SHARE = 0.2  # of the steps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=installed_stores())
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="default: all 19 of MXNet")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--devices", type=int, default=1, help="of each worker")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "equal_workers.json")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("STORE", "OPTIMIZER", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(*args.worker, args.steps, args.devices)
        return 0
    found = json.loads(args.results.read_text()) if args.results.exists() and not args.fresh else {}
    names = args.optimizers or _all_optimizers()
    wanted = [f"{store} {name} {args.steps} {args.devices}" for store in args.stores for name in names]
    for key in wanted:
        if key not in found:
            found[key] = run(*key.split())
            print(f"{key}: {found[key]}", flush=True)
            args.results.parent.mkdir(parents=True, exist_ok=True)
            args.results.write_text(json.dumps(found, indent=1))
    print(table({key: found[key] for key in wanted}))
    return int(any(found[key]["differ"] for key in wanted))


def run(store: str, name: str, steps: str, devices: str) -> dict:
    """One job: steps, skipped ones, and the first difference between the workers, empty where there is none."""
    launch = launch_local.launch_horovod if store == "horovod" else launch_local.launch
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).resolve())
        code = launch(
            [
                *(sys.executable, "-W", "ignore", script),
                *("--steps", steps, "--devices", devices, "--worker", store, name, folder),
            ],
            workers=2,
            timeout=300,
        )
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


def table(found: dict[str, dict]) -> str:
    """Markdown: a row for every optimizer, a column for every store."""
    stores = list(dict.fromkeys(key.split()[0] for key in found))
    names = list(dict.fromkeys(key.split()[1] for key in found))
    lines = ["| optimizer | " + " | ".join(stores) + " |", "|---" * (len(stores) + 1) + "|"]
    for name in names:
        cells = []
        for store in stores:
            one = next((v for k, v in found.items() if k.split()[:2] == [store, name]), None)
            cells.append("" if one is None else one["differ"] or f"equal, {one['skipped']} of {one['steps']} skipped")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def installed_stores() -> list[str]:
    return [store for store in STORES if store != "horovod" or importlib.util.find_spec("horovod")]


def _all_optimizers() -> list[str]:
    from tiny import OPTIMIZERS

    return list(OPTIMIZERS)


def work(store: str, name: str, folder: str, steps: int, devices: int) -> None:
    """One worker: trains on batches of its own, from weights of its own, and writes what it holds after each step."""
    import mxnet as mx
    import numpy as np
    from tiny import LOSS, batch, full_weights, options, tree, two_layers, weights

    import mxmp

    if store == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        kvstore, rank, batch_size = store, hvd.rank(), 4 * devices
    else:
        kvstore = mx.kv.create(store)
        rank, batch_size = kvstore.rank, 4 * devices * kvstore.num_workers
    mx.random.seed(100 + rank)
    # One parameter in float16 with a master, one in FP32.
    policy = mxmp.Policy("float16", params="float16", exclude=("*dense1*",))
    net = two_layers(policy, devices=devices, seed=50 + rank)
    scaler = mxmp.DynamicLossScaler(init_scale=2.0**8, growth_interval=4)
    trainer = mxmp.Trainer(net.collect_params(), name, options(name, True), kvstore=kvstore, loss_scale=scaler)
    plan, seen = np.random.RandomState(0), []
    for step in range(steps):
        losses = []
        with mx.autograd.record():
            for k in range(devices):
                x, y = batch(100 * step + 10 * rank + k, mx.cpu(k))
                losses.append(LOSS(net(x), y))
        trainer.backward(losses)
        spoil, worker, param, device, value = plan.rand(), *plan.randint(2, size=3), plan.choice(3)
        if spoil < SPOILED_SHARE and worker == rank:
            trainer._params[param].list_grad()[device % devices][0, 0] = (np.inf, -np.inf, np.nan)[value]
        trainer.step(batch_size)
        seen.append(
            {
                "weights": _digest([weights(trainer), full_weights(trainer)]),
                "states": _digest([tree(updater.states) for updater in trainer._updaters]),
                "scale": trainer.loss_scale,
                "skipped": trainer.last_step_skipped,
                "devices": all(len({tree(a) for a in p.list_data()}) == 1 for p in trainer._params),
            }
        )
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    if store != "horovod":
        kvstore._barrier()


def _digest(found: object) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
