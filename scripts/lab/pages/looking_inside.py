"""The pictures of docs/looking-inside.md: a network of sigmoids, whose gradients shrink from layer to layer."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits
from support.options import parse
from support.results import DOCS

import mxmp
from mxmp.diagnose import plot_histograms, plot_loss_scale, watch


def main(arguments: list[str] | None = None) -> None:
    args = parse(__doc__, arguments, folder=DOCS, steps=400)
    trainer, watched = train(args.steps)
    args.folder.mkdir(parents=True, exist_ok=True)
    plot_histograms(watched.latest, str(args.folder / "watch.png"))
    plot_loss_scale(trainer, str(args.folder / "loss-scale.png"), watched=watched)
    print(watched)


def train(steps: int) -> tuple:
    """Train a small convolutional network on scikit-learn's digits; the first scale is too high, as often."""
    mx.random.seed(0)
    digits = load_digits()
    images, labels = mx.nd.array(digits.images[:, None] / 16.0), mx.nd.array(digits.target)
    net = nn.HybridSequential(prefix="")
    with net.name_scope():
        for _ in range(4):
            net.add(nn.Conv2D(16, 3, padding=1), nn.Activation("sigmoid"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    mxmp.convert(net)
    net.hybridize()
    scaler = mxmp.DynamicLossScaler(growth_interval=50)  # 2000 would show one growth in hours
    trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, loss_scale=scaler)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.RandomState(0)
    with watch(net, trainer, every=10) as watched:
        for _ in range(steps):
            rows = mx.nd.array(order.choice(len(digits.target), 64, replace=False))
            with autograd.record():
                loss = loss_fn(net(images.take(rows)), labels.take(rows))
            trainer.backward(loss)
            trainer.step(len(rows))
    return trainer, watched
