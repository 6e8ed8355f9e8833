"""AdaptiveLossScaler against DynamicLossScaler where scaling matters: gradients that are zero, and steps that are lost.

    python scripts/bench_adaptive_scale.py               # 2,000 steps of sigmoid networks of 4 to 10 layers, on digits
    python scripts/bench_adaptive_scale.py --markdown    # the table of docs/looking-inside.md

Gradients shrink by about 4 in each sigmoid, so each network of the family needs another scale. The runs of a network
start from the same weights and see the same batches. Counted in every step, before the update: the share of the
parameters' gradients that is zero, as a mean over the parameters; beside it what is zero in FP32, without scaling.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

SCALERS: dict[str, Callable[[], Any]] = {
    "dynamic": mxmp.DynamicLossScaler,
    "adaptive": mxmp.AdaptiveLossScaler,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8, 10])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    head = ("layers", "scaler", "zero gradients", "skipped", "last scale", "last loss")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head) if args.markdown else row(head))
    worse = []
    for depth in args.depths:
        found = {name: train(depth, SCALERS.get(name), args) for name in ("float32", *SCALERS)}
        for name, (zeros, skipped, scale, loss) in found.items():
            text = f"2**{np.log2(scale):.0f}" if name in SCALERS else ""
            cells = (str(depth), name, f"{zeros:.2%}", str(skipped), text, f"{loss:.3f}")
            print("| " + " | ".join(cells) + " |" if args.markdown else row(cells), flush=True)
        adaptive, dynamic = found["adaptive"], found["dynamic"]
        worse += [depth] if adaptive[0] > dynamic[0] or adaptive[1] > dynamic[1] else []
    if worse:
        raise SystemExit(f"adaptive has more zeros or more skips at {worse} layers")


def row(cells: tuple) -> str:
    return "".join(f"{cell:<16}" for cell in cells)


def train(depth: int, scaler: Callable[[], Any] | None, args: argparse.Namespace) -> tuple[float, int, float, float]:
    """Mean share of zero gradients, skipped steps, last scale, mean loss of the last 100 steps. No scaler: FP32."""
    from sklearn.datasets import load_digits

    mx.random.seed(1)
    np.random.seed(1)
    digits = load_digits()
    pixels = digits.data / 16.0 + 0.1  # a pixel that is always 0 would have a zero gradient at any scale
    images, labels = mx.nd.array(pixels), mx.nd.array(digits.target)
    net = nn.HybridSequential()
    for _ in range(depth):
        net.add(nn.Dense(64, activation="sigmoid"))
    net.add(nn.Dense(10))
    net.initialize(mx.init.Xavier())
    params = net.collect_params()
    options = {"learning_rate": 1e-3}
    if scaler is None:
        trainer = mxmp.Trainer(params, "adam", options, loss_scale=None)
    else:
        mxmp.convert(net)
        trainer = mxmp.Trainer(params, "adam", options, loss_scale=scaler())
    net.hybridize()
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.RandomState(2)
    zeros, losses = [], []
    for _ in range(args.steps):
        rows = mx.nd.array(order.choice(len(labels), args.batch, replace=False))
        with autograd.record():
            loss = loss_fn(net(images.take(rows)), labels.take(rows)).mean()
        trainer.backward(loss)
        gradients = [p.grad().reshape((-1,)) for p in params.values()]
        zeros.append(mx.nd.concat(*[(g == 0).mean() for g in gradients], dim=0).mean())
        losses.append(loss)
        trainer.step(1)
    last = float(mx.nd.concat(*[each.reshape((1,)) for each in losses[-100:]], dim=0).mean().asscalar())
    share = float(mx.nd.concat(*zeros, dim=0).mean().asscalar())
    return share, trainer.skipped_steps, trainer.loss_scale, last


if __name__ == "__main__":
    main()
