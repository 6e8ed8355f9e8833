"""AdaptiveLossScaler against DynamicLossScaler where scaling matters: gradients that are zero, and steps that are lost.

A network of two towers of sigmoids reads scikit-learn's digits; the second tower's loss counts by a small weight, so
the gradients of one step lie far apart. The first steps overflow and bring the scale down; then gradients fall by
orders of magnitude, as the towers fit. All runs of a weight start from the same parameters and see the same batches.
Counted in every step, before the update: the share of the parameters' gradients that is zero, as a mean over the
parameters; beside it what is zero in FP32, without scaling.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits
from support.options import parse
from support.pages import show

import mxmp

SCALERS: dict[str, Callable[[], Any]] = {"dynamic": mxmp.DynamicLossScaler, "adaptive": mxmp.AdaptiveLossScaler}


def main(arguments: list[str] | None = None) -> None:
    args = parse(__doc__, arguments, weights=[1e-7, 1e-8, 1e-9], steps=2000, batch=256)

    def rows() -> Iterator[list[Any]]:
        for weight in args.weights:
            for name in ("float32", *SCALERS):
                zeros, skipped, scale, losses = train(weight, SCALERS.get(name), args.steps, args.batch)
                text = f"2^{np.log2(scale):.0f}" if name in SCALERS else ""
                both = " and ".join(f"{loss:.4f}" for loss in losses)
                yield [f"{weight:g}", name, f"{zeros:.3%}", skipped, text, both]

    show("weight | scaler | zero gradients | skipped | last scale | last losses", rows())


class Towers(gluon.HybridBlock):
    """Two networks side by side, with an output each."""

    def __init__(self, layers: int = 4, units: int = 32) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.second = nn.HybridSequential(), nn.HybridSequential()
            for tower in (self.first, self.second):
                for _ in range(layers):
                    tower.add(nn.Dense(units, activation="sigmoid"))
                tower.add(nn.Dense(10))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.first(x), self.second(x)


def train(weight: float, scaler: Callable[[], Any] | None, steps: int, batch: int) -> tuple:
    """Return the mean share of zero gradients, skipped steps, the last scale, both last losses; no scaler: FP32."""
    mx.random.seed(1)
    np.random.seed(1)
    digits = load_digits()
    # shifted: a pixel that is always 0 would have a zero gradient at any scale
    images, labels = mx.nd.array((digits.data - 4.9) / 6.0), mx.nd.array(digits.target)
    net = Towers()
    net.initialize(mx.init.Xavier())
    params = net.collect_params()
    if scaler is not None:
        mxmp.convert(net)
    net.hybridize()
    options = {"learning_rate": 3e-3, "epsilon": 1e-14}
    trainer = mxmp.Trainer(params, "adam", options, loss_scale=None if scaler is None else scaler())
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.RandomState(2)
    zeros, losses = [], []
    for _ in range(steps):
        rows = mx.nd.array(order.choice(len(labels), batch, replace=False))
        x, y = images.take(rows), labels.take(rows)
        with autograd.record():
            both = [loss_fn(out, y) for out in net(x)]
            loss = both[0] + weight * both[1]
        trainer.backward(loss)
        gradients = [p.grad().reshape((-1,)) for p in params.values()]
        zeros.append(mx.nd.concat(*[(g == 0).mean() for g in gradients], dim=0).mean())
        losses.append([each.mean() for each in both])
        trainer.step(batch)
    last = [float(mx.nd.concat(*each, dim=0).mean().asscalar()) for each in zip(*losses[-100:])]
    share = float(mx.nd.concat(*zeros, dim=0).mean().asscalar())
    return share, trainer.skipped_steps, trainer.loss_scale, last
