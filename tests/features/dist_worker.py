"""One worker of a distributed job; what it sees after every step goes to ``<folder>/<rank>.pickle``.

    python dist_worker.py dist_sync|horovod <folder> [--devices N] [--dies RANK]

Every worker starts with other weights; the store shares rank 0's at the first step, after gradients were
taken at the others, so that one overflows and what follows can be compared with a run in one process.
"""

from __future__ import annotations

import argparse
import os
import pickle

import mxnet as mx
from kit.nets import batch, two_layers
from kit.pictures import full_weights, tree
from kit.twins import LOSS

import mxmp

MIXED = mxmp.Policy("float16", params="float16", exclude=("*dense1*",))
STEPS = 8
SPOILED = {0: (1, 1), 3: (1, 0), 5: (0, 1)}  # step: worker, parameter


def run(kvstore, workers, devices, seed, batch_size=8, dies=None):
    """The weights, masters and outcome of every step; ``workers``: whose batches this process takes."""
    net = two_layers(MIXED, devices=devices * len(workers), seed=seed)
    scaler = mxmp.DynamicLossScaler(init_scale=2.0**8, growth_interval=2)
    more = {"learning_rate": 0.01}
    trainer = mxmp.Trainer(net.collect_params(), "adam", more, kvstore=kvstore, loss_scale=scaler)
    shards = [worker * devices + k for worker in workers for k in range(devices)]
    seen = []
    for step in range(STEPS):
        losses = []
        with mx.autograd.record():
            for k, shard in enumerate(shards):
                x, y = batch(10 * step + shard, mx.cpu(k))
                losses.append(LOSS(net(x), y))
        trainer.backward(losses)
        worker, param = SPOILED.get(step, (None, 0))
        if worker in workers:
            trainer._params[param].list_grad()[workers.index(worker) * devices][:] = float("inf")
        if step == 2 and dies is not None and dies in workers:
            os._exit(3)
        norm = trainer.clip_global_norm(1e6)
        trainer.step(batch_size)
        seen.append(
            {
                "weights": [tree(p.list_data()) for p in trainer._params],
                "masters": [each[0] for each in full_weights(trainer)],
                "skipped": trainer.last_step_skipped,
                "names": [name.split(" on ")[0] for name in trainer.overflow_params],
                "scale": trainer.loss_scale,
                "norm": norm,
            }
        )
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("folder")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dies", type=int)
    args = parser.parse_args()
    if args.store == "horovod":
        import horovod.mxnet as hvd

        hvd.init()
        store, rank, mine = "horovod", hvd.rank(), 1
    else:
        store = mx.kv.create(args.store)
        rank, mine = store.rank, store.num_workers
    found = run(store, [rank], args.devices, 50 + rank, 4 * args.devices * mine, args.dies)
    with open(os.path.join(args.folder, f"{rank}.pickle"), "wb") as file:
        pickle.dump(found, file)
    if args.store != "horovod":
        store._barrier()


if __name__ == "__main__":
    main()
