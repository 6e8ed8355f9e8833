"""One worker of a ``dist_sync`` job: ``<folder> <optimizer>``; its weights go to ``<folder>/<rank>.pickle``."""

from __future__ import annotations

import os
import pickle
import sys

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from twins import MASTERS, array, seeded, values

import mxmp

# DCASGD's momentum fails in plain FP32 MXNet too; GroupAdaGrad takes 2-D weights and no weight decay.
OPTIMIZERS = {
    "adadelta": {"wd": 1e-3},
    "adagrad": {"learning_rate": 0.05, "wd": 1e-3},
    "adam": {"learning_rate": 0.01, "wd": 1e-3},
    "adamax": {"learning_rate": 0.01, "wd": 1e-3},
    "ccsgd": {"learning_rate": 0.05, "momentum": 0.9},
    "dcasgd": {"learning_rate": 0.05, "wd": 1e-3},
    "ftml": {"learning_rate": 0.01, "wd": 1e-3},
    "ftrl": {"learning_rate": 0.05, "wd": 1e-3},
    "groupadagrad": {"learning_rate": 0.05},
    "lamb": {"learning_rate": 0.01, "wd": 1e-3},
    "lars": {"learning_rate": 0.5, "momentum": 0.9},
    "lbsgd": {"learning_rate": 0.05, "momentum": 0.9},
    "nadam": {"learning_rate": 0.01, "wd": 1e-3},
    "nag": {"learning_rate": 0.05, "momentum": 0.9},
    "rmsprop": {"learning_rate": 0.01, "wd": 1e-3, "centered": True},
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "sgld": {"learning_rate": 1e-3},
    "signum": {"learning_rate": 0.01, "wd": 1e-3},
    "test": {"rescale_grad": -0.05},
}
LOSS = gluon.loss.L2Loss()


def contexts(count):
    return [mx.cpu(i) for i in range(count)]


def ready(policy, devices):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6, use_bias=False), nn.Dense(2, in_units=4, use_bias=False))
    seeded(net, contexts(devices))
    if policy is not None:
        mxmp.convert(net, policy)
    return net


def run(name: str, store: mx.kv.KVStore, rank: int) -> list:
    """The weights after each of four steps, the second with an inf on worker 1."""
    net = ready(MASTERS, 1)
    trainer = mxmp.Trainer(net.collect_params(), name, dict(OPTIMIZERS[name]), kvstore=store, loss_scale=64.0)
    seen = []
    for i in range(4):
        with mx.autograd.record():
            out = net(array(10 * i + rank, 4, 6))
            loss = LOSS(out, mx.nd.ones_like(out))
        trainer.backward(loss)
        if i == 1 and rank == 1:
            net[1].weight.grad()[:] = float("inf")
        trainer.step(8)
        seen.append([v.tobytes() for v in values(net)])
    return seen


if __name__ == "__main__":
    store = mx.kv.create("dist_sync")
    mx.random.seed(100 + store.rank)
    found = run(sys.argv[2], store, store.rank)
    with open(os.path.join(sys.argv[1], f"{store.rank}.pickle"), "wb") as file:
        pickle.dump(found, file)
    store._barrier()
