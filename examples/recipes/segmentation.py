"""A pyramid scene parsing network tells digits on a canvas apart, pixel by pixel.

    python examples/recipes/segmentation.py --dtype float16

The data: 1 to 3 of scikit-learn's real digits (CC BY 4.0) on noise; the test's digits are of the held out ones. The
metric is the mean over the ten digits and the background of intersection over union. Chance is that of a network that
calls everything background: 8 %, the background's share of the pixels divided by eleven.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from common import Run, parser, predictions
from digits import CLASSES, Canvases, canvases
from mxnet import autograd, gluon
from mxnet.gluon import nn

SIZE, BATCH = 48, 16


def convolution(channels: int, kernel: int = 3, strides: int = 1, dilation: int = 1) -> list[gluon.Block]:
    """Return a convolution with its norm and its activation."""
    padding = dilation * (kernel // 2)
    layer = nn.Conv2D(channels, kernel, strides, padding, dilation, use_bias=False)
    return [layer, nn.BatchNorm(), nn.Activation("relu")]


class Pyramid(gluon.HybridBlock):
    """PSPNet's pooling: the features, and beside them their means over 1x1, 2x2 and 3x3 parts of the picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branches = nn.HybridSequential()
        for _ in (1, 2, 3):
            branch = nn.HybridSequential()
            branch.add(*convolution(channels, kernel=1))
            self.branches.add(branch)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        pooled = (F.contrib.AdaptiveAvgPooling2D(x, output_size=parts) for parts in (1, 2, 3))
        means = [branch(part) for branch, part in zip(self.branches, pooled)]
        return F.concat(x, *(F.contrib.BilinearResize2D(part, like=x, mode="like") for part in means), dim=1)


def network(width: int = 16, size: int = SIZE) -> gluon.HybridBlock:
    """Return a net from images (n, 3, size, size) to scores (n, 11, size, size), by features of a quarter of that."""
    net = nn.HybridSequential()
    net.add(*convolution(width, strides=2), *convolution(width), *convolution(2 * width, strides=2))
    net.add(*convolution(2 * width), *convolution(3 * width), *convolution(3 * width, dilation=2))
    net.add(Pyramid(width), *convolution(3 * width), nn.Conv2D(len(CLASSES) + 1, 1))
    net.add(nn.HybridLambda(lambda F, x: F.contrib.BilinearResize2D(x, height=size, width=size)))  # noqa: N803
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    return net


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=5).parse_args(arguments)
    run = Run(options, "segmentation", "mIoU, %", chance=8)
    count = 64 if run.quick else 800
    data, held = canvases(count, False, seed=1, size=SIZE), canvases(count // 4, True, seed=2, size=SIZE)
    net = run.convert(network())
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (count // BATCH), base_lr=0.005, warmup_steps=10)
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": 0.005, "lr_scheduler": schedule})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)
    for x, y in run.batches(data.images, pixels(data), size=BATCH):
        weight = 0.1 + 0.9 * (y > 0).expand_dims(1)  # most pixels are background
        with autograd.record():
            loss = loss_of(net(x), y, weight).mean()  # over 36,864 pixels, each with a gradient of 2^-15 at most
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss)
    return run.finish(mean_overlap(predictions(net, held.images).argmax(axis=1), pixels(held)))


def pixels(data: Canvases) -> np.ndarray:
    """Return the class of each pixel, 0 is the background."""
    return (data.masks * (data.ids[..., None] + 1)).max(axis=1)


def mean_overlap(found: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean intersection over union of the classes that are there, in percent."""
    shares = [((found == c) & (truth == c)).sum() / ((found == c) | (truth == c)).sum() for c in np.unique(truth)]
    return 100 * float(np.mean(shares))


if __name__ == "__main__":
    main()
