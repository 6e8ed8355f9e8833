"""What a step costs on the host: engine operations and CPU time of the calling thread, beside MXNet's own Trainer.

    python scripts/bench_host.py
    python scripts/bench_host.py --nets resnet50_v1b --optimizers sgd lamb --rounds 20
    python scripts/bench_host.py --gpu         # the operators that arrays on a GPU get

On a GPU the device stands still while Python works between the one synchronization of a step and the next
kernel. Neither figure needs a GPU: operations are counted by MXNet's profiler, and the thread's CPU time leaves
out what the device, here the engine's threads, does meanwhile. MXNet's own is a ``gluon.Trainer`` on parameters
of the same shapes and dtypes, with ``multi_precision`` where they are float16. Medians; both take turns. On a CPU
mxmp takes large arrays one by one, which costs the host a little and saves the CPU more: ``--gpu`` leaves that out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any, Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import mxnet as mx
from mxnet import autograd, gluon

import mxmp
from mxmp.step import gradients

STORED = {
    "float16": mxmp.Policy("float16", params="float16"),
    "float32": mxmp.Policy("float16", params="float32"),
}
ROW = "| {net} | {optimizer} | {stored} | {ops} | {their_ops} | {ms:.2f} | {their_ms:.2f} | {ratio:.2f} |"
OPTIMIZERS = {"sgd": {"momentum": 0.9, "wd": 1e-4}, "adam": {}, "lamb": {}}


def resnet() -> tuple[gluon.Block, list]:
    from gluoncv.model_zoo import get_model

    return get_model("resnet50_v1b"), [mx.nd.ones((1, 3, 32, 32))]


def bert() -> tuple[gluon.Block, list]:
    from gluonnlp.model import BERTEncoder

    return BERTEncoder(num_layers=12, units=768, hidden_size=3072, num_heads=12), [mx.nd.ones((1, 8, 768))]


def lstm() -> tuple[gluon.Block, list]:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Embedding(10000, 650), gluon.rnn.LSTM(650, num_layers=2), gluon.nn.Dense(10000, flatten=False))
    return net, [mx.nd.ones((5, 2))]


NETS = {"resnet50_v1b": resnet, "bert_base": bert, "lstm_lm": lstm}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--stored", nargs="+", choices=STORED, default=list(STORED), help="dtype of the parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", action="store_true", help="push the operators of a GPU; the values are not looked at")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.gpu:
        gradients._on_gpu = lambda array: True
    print("| network | optimizer | parameters | operations | MXNet's | host ms | MXNet's | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for net in args.nets:
        for optimizer in args.optimizers:
            for stored in args.stored:
                found.append(measure(net, optimizer, stored, args.rounds))
                print(ROW.format(**found[-1]), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


def measure(net_name: str, optimizer: str, stored: str, rounds: int) -> dict[str, Any]:
    net, inputs = NETS[net_name]()
    net.initialize()
    mxmp.convert(net, STORED[stored])
    net(*inputs)
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    ours = mxmp.Trainer(net.collect_params(), optimizer, OPTIMIZERS[optimizer], loss_scale=128.0)
    plain = [twin(p) for p in params]
    options = {**OPTIMIZERS[optimizer], "multi_precision": stored == "float16"}
    theirs = gluon.Trainer(plain, optimizer, options, update_on_kvstore=False)
    steps: dict[str, Callable[[Callable], Any]] = {
        "ours": lambda around: backward_and_step(lambda: net(*inputs), ours, around),
        "theirs": lambda around: backward_and_step(lambda: [p.data().astype("float32") for p in plain], theirs, around),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(timed)
        step(timed)
    counts = {name: step(counted) for name, step in steps.items()}
    gc.collect()
    gc.disable()
    for k in range(rounds):
        for name in sorted(steps, reverse=k % 2 == 1):
            times[name].append(steps[name](timed))
    gc.enable()
    mine, other = (1e3 * statistics.median(times[name]) for name in ("ours", "theirs"))
    return {
        "net": net_name,
        "optimizer": optimizer,
        "stored": stored,
        "parameters": len(params),
        "ops": counts["ours"],
        "their_ops": counts["theirs"],
        "ms": mine,
        "their_ms": other,
        "ratio": statistics.median(a / b for a, b in zip(times["ours"], times["theirs"])),
    }


def twin(param: gluon.Parameter) -> gluon.Parameter:
    made = gluon.Parameter(param.name, shape=param.shape, dtype=param.grad().dtype)
    made.initialize()
    return made


def backward_and_step(forward: Callable[[], Any], trainer: gluon.Trainer, around: Callable) -> Any:
    """What ``around`` finds out about the step; the backward before it is done."""
    with autograd.record():
        outs = forward()
        outs = outs if isinstance(outs, (list, tuple)) else [outs]
        losses = [out.mean() for out in outs if isinstance(out, mx.nd.NDArray)]  # BERT's encoder returns a list too
    if isinstance(trainer, mxmp.Trainer):
        trainer.backward(losses)
    else:
        autograd.backward(losses)
    mx.nd.waitall()
    found = around(lambda: trainer.step(1))
    mx.nd.waitall()
    return found


def timed(step: Callable[[], None]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def counted(step: Callable[[], None]) -> int:
    """Operators that the engine runs, by MXNet's profiler; frees and waits are none."""
    with tempfile.TemporaryDirectory() as folder:
        mx.profiler.set_config(profile_imperative=True, aggregate_stats=True, filename=f"{folder}/profile.json")
        mx.profiler.set_state("run")
        step()
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        table = mx.profiler.dumps(reset=True)
    section = table.split("operator")[-1] if "operator" in table else table
    rows = re.findall(r"^(\S+)\s+(\d+)\s+[\d.]+\s", section, flags=re.MULTILINE)
    return sum(int(count) for name, count in rows if name not in ("DeleteVariable", "WaitForVar"))


if __name__ == "__main__":
    sys.exit(main())
