"""Step time of FP32, mxmp and mxnet.contrib.amp, side by side in one run.

    python scripts/bench_step.py                                  # resnet50_v1b, batch 16, 112x112
    python scripts/bench_step.py --model vgg11_bn --batch 8 --variants float32 bfloat16 tuned-bfloat16

Each variant is a process of its own (``contrib.amp`` patches MXNet for good), and they take turns, one
step each, so that a machine whose speed drifts does not favour one. Printed: the median step time, the
median of the ratios FP32 / variant taken round by round, with the quartiles of that ratio.
``tuned-bfloat16`` follows the plan that ``mxmp.tune`` finds first. ``unskipped-float16`` and
``unblocked-float16`` are the emulation without one of its two optimisations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import traceback
import warnings
from multiprocessing.connection import Connection

import numpy as np

from bench.turns import quartiles

VARIANTS = ("float32", "float16", "bfloat16", "amp-bfloat16", "amp-float16")
OTHERS = ("tuned-bfloat16", "unskipped-float16", "unblocked-float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50_v1b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=15, help="steps first, in which the loss scale settles")
    parser.add_argument("--policy", default="", help="added to the dtype, for example norm=compute")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS + OTHERS, default=list(VARIANTS))
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    times, failed = measure(args)
    report(args, times, failed)


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str]]:
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    failed: dict[str, str] = {}
    for variant in args.variants:
        here, there = context.Pipe()
        context.Process(target=worker, args=(there, variant, args), daemon=True).start()
        error = here.recv()
        if error:
            failed[variant] = error
        else:
            pipes[variant] = here
    times: dict[str, list[float]] = {variant: [] for variant in pipes}
    for round_ in range(args.warmup + args.rounds):
        for variant, pipe in pipes.items():
            pipe.send("step")
            took, skipped = pipe.recv()
            if round_ >= args.warmup:
                times[variant].append(took)
                if skipped:
                    print(f"{variant}: a step was skipped and took less time for it; raise --warmup")
    for pipe in pipes.values():
        pipe.send("stop")
    return times, failed


def report(args: argparse.Namespace, times: dict[str, list[float]], failed: dict[str, str]) -> None:
    print(f"{args.model}, batch {args.batch}, {args.size}x{args.size}, {args.rounds} rounds {args.policy}")
    print(f"{'variant':<18}{'ms/step':>9}   {'float32 / variant':<20}")
    figures = {}
    for variant, taken in times.items():
        ratios = [a / b for a, b in zip(times.get("float32", taken), taken)]
        low, middle, high = quartiles(ratios)
        figures[variant] = {"ms": statistics.median(taken) * 1e3, "speedup": middle, "quartiles": [low, high]}
        note = f"{middle:.2f} ({low:.2f} to {high:.2f}), or {1 / middle:.2f} times its time"
        print(f"{variant:<18}{figures[variant]['ms']:>9.1f}   {note}")
    for variant, error in failed.items():
        print(f"{variant:<18}{'fails':>9}   {error}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "figures": figures, "failed": failed}, file, indent=1)


def worker(pipe: Connection, variant: str, args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    try:
        step = make_step(variant, args)
        step()
    except Exception as error:  # whatever contrib.amp raises is the result to report
        traceback.print_exc(limit=0)
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[-1][:100]}")
        return
    pipe.send("")
    while pipe.recv() == "step":
        start = time.perf_counter()
        skipped = step()
        pipe.send((time.perf_counter() - start, skipped))


def photographs(count: int, size: int) -> np.ndarray:
    """Crops of scikit-learn's two photographs, normalised.

    Not noise: what a cast to float16 takes depends on whether zeros behind a relu come in runs.
    """
    from sklearn.datasets import load_sample_images

    rng = np.random.RandomState(0)
    images = load_sample_images().images
    crops = []
    for i in range(count):
        image = images[i % len(images)]
        top, left = (rng.randint(0, side - size + 1) for side in image.shape[:2])
        crops.append(image[top : top + size, left : left + size])
    return ((np.stack(crops) - 118.0) / 58.0).transpose(0, 3, 1, 2).astype("float32")


def make_step(variant: str, args: argparse.Namespace):
    """A function that trains one step and waits for it."""
    import mxnet as mx
    from mxnet import autograd, gluon

    dtype = variant.split("-")[-1]
    uses_amp = variant.startswith("amp-")
    if uses_amp:
        from mxnet.contrib import amp

        amp.init(dtype)
    from gluoncv.model_zoo import get_model

    import mxmp
    from mxmp.precision import emulation

    if variant.startswith("unskipped-"):
        emulation._Emulation.skip_needless_roundings = lambda self: None
    if variant.startswith("unblocked-"):
        emulation.blocked_batch_norms = lambda graph: None
    mx.random.seed(0)
    net = get_model(args.model, classes=1000)
    net.initialize(mx.init.MSRAPrelu())
    if not uses_amp and dtype != "float32":
        policy = f"compute={dtype},{args.policy}"
        shape = (args.batch, 3, args.size, args.size)
        mxmp.convert(net, mxmp.tune(net, shape, policy=policy) if variant.startswith("tuned-") else policy)
    net.hybridize(static_alloc=True, static_shape=True)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": 0.01, "momentum": 0.9}
    if uses_amp or dtype == "float32":
        trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    else:
        trainer = mxmp.Trainer(net.collect_params(), "sgd", options)
    x = mx.nd.array(photographs(args.batch, args.size))
    y = mx.nd.array([i % 1000 for i in range(args.batch)])

    def step() -> bool:
        with autograd.record():
            loss = loss_fn(net(x), y)
        if isinstance(trainer, mxmp.Trainer):
            trainer.backward(loss)
        else:
            loss.backward()
        trainer.step(args.batch)
        mx.nd.waitall()
        return getattr(trainer, "last_step_skipped", False)

    return step


if __name__ == "__main__":
    main()
