"""One worker of a ``dist_sync`` job; what it sees after every step goes to ``<folder>/<rank>.pickle``.

    python dist_worker.py <folder> [<rank that dies at step 2>]

Every worker starts with other weights; the store shares rank 0's at the first step, after gradients were
taken at the others, so that one overflows and what follows can be compared with a run in one process.
"""

from __future__ import annotations

import os
import pickle
import sys

import mxnet as mx
from tiny import LOSS, batch, full_weights, tree, two_layers

import mxmp

MIXED = mxmp.Policy("float16", params="float16", exclude=("*dense1*",))
STEPS = 8
SPOILED = {0: (1, 1), 3: (1, 0), 5: (0, 1)}  # step: worker, parameter


def run(kvstore, rank, devices, seed, dies=None):
    """The weights, masters and outcome of every step; ``rank`` None: both workers' batches, a device each."""
    net = two_layers(MIXED, devices=devices, seed=seed)
    scaler = mxmp.DynamicLossScaler(init_scale=2.0**8, growth_interval=2)
    more = {"learning_rate": 0.01}
    trainer = mxmp.Trainer(net.collect_params(), "adam", more, kvstore=kvstore, loss_scale=scaler)
    seen = []
    for step in range(STEPS):
        ranks = range(devices) if rank is None else [rank]
        losses = []
        with mx.autograd.record():
            for k in ranks:
                ctx = mx.cpu(k) if rank is None else mx.cpu()
                x, y = batch(10 * step + k, ctx)
                losses.append(LOSS(net(x), y))
        trainer.backward(losses)
        worker, param = SPOILED.get(step, (None, 0))
        if worker in ranks:
            trainer._params[param].list_grad()[worker if rank is None else 0][:] = float("inf")
        if step == 2 and dies is not None and rank == dies:
            os._exit(3)
        norm = trainer.clip_global_norm(1e6)
        trainer.step(8)
        seen.append(
            {
                "weights": [tree(p.data()) for p in trainer._params],
                "masters": [each[0] for each in full_weights(trainer)],
                "skipped": trainer.last_step_skipped,
                "names": [name.split(" on ")[0] for name in trainer.overflow_params],
                "scale": trainer.loss_scale,
                "norm": norm,
            }
        )
    return seen


if __name__ == "__main__":
    store = mx.kv.create("dist_sync")
    dies = int(sys.argv[2]) if len(sys.argv) > 2 else None
    found = run(store, store.rank, 1, seed=50 + store.rank, dies=dies)
    with open(os.path.join(sys.argv[1], f"{store.rank}.pickle"), "wb") as file:
        pickle.dump(found, file)
    store._barrier()
