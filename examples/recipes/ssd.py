"""GluonCV's SSD finds handwritten digits on canvases.

    python examples/recipes/ssd.py --dtype float16

The network is GluonCV's ``SSD`` on a small backbone, the loss its ``SSDMultiBoxLoss``. The data: 1 to 3 of the real
digits of scikit-learn (CC BY 4.0) on noise; the test's digits are of the held out ones. The metric is Pascal VOC's mean
average precision at an overlap of 0.5; an untrained network has 0.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from common import Run, parser
from digits import CLASSES, Canvases, canvases
from gluoncv.loss import SSDMultiBoxLoss
from gluoncv.model_zoo.ssd.ssd import SSD
from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
from gluoncv.utils.metrics.voc_detection import VOCMApMetric
from mxnet import autograd, gluon
from mxnet.gluon import nn

SIZE, BATCH, EPOCHS = 64, 32, 18


class Backbone(gluon.HybridBlock):
    """Features at an 8th and a 16th of the resolution."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.near, self.far = nn.HybridSequential(), nn.HybridSequential()
        for channels in (width, 2 * width, 4 * width):
            self.near.add(*convolution(channels, 2), *convolution(channels, 1))
        self.far.add(*convolution(4 * width, 2))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        near = self.near(x)
        return [near, self.far(near)]


def convolution(channels: int, strides: int) -> Sequence[gluon.Block]:
    return nn.Conv2D(channels, 3, strides, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    run = Run(parser(__doc__, EPOCHS).parse_args(arguments), "ssd", "mAP, %", chance=0)
    net, _, held = train(run)
    return run.finish(mean_average_precision(net, held))


def train(run: Run) -> tuple[SSD, Canvases, Canvases]:
    """Return the trained net, the canvases that it was trained on, and those held out."""
    count = 64 if run.quick else 1024
    data, held = canvases(count, False, seed=1, size=SIZE), canvases(count // 2, True, seed=2, size=SIZE)

    net = SSD(
        network=None,
        features=lambda **_: Backbone(),
        num_filters=None,
        base_size=SIZE,
        sizes=[14, 20, 30],
        ratios=[[1, 2, 0.5]] * 2,
        steps=[8, 16],
        classes=CLASSES,
        anchor_alloc_size=16,
    )
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    with autograd.train_mode():
        anchors = net(mx.nd.zeros((1, 3, SIZE, SIZE)))[2]
    kinds, offsets = targets(data, anchors)
    net = run.convert(net)
    steps = run.epochs * (count // BATCH)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=0.01, warmup_steps=10)
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": 0.01, "lr_scheduler": schedule})
    loss_of = SSDMultiBoxLoss()
    for x, kind, offset in run.batches(data.images, kinds, offsets, size=BATCH):
        with autograd.record():
            scores, boxes, _ = net(x)
            loss, _, _ = loss_of(scores, boxes, kind, offset)  # of one device: normalized by the number of digits
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss[0].sum())
    net.set_nms(nms_thresh=0.45, nms_topk=100, post_nms=20)
    return net, data, held


def targets(data: Canvases, anchors: mx.nd.NDArray) -> Sequence[np.ndarray]:
    """Of each anchor its class, 0 is none, and the offsets of its box."""
    generate = SSDTargetGenerator(negative_mining_ratio=-1)  # the loss chooses negatives
    kinds, offsets, _ = generate(anchors, None, mx.nd.array(data.boxes), mx.nd.array(data.ids))
    return kinds.asnumpy(), offsets.asnumpy()


def mean_average_precision(net: Callable, held: Canvases) -> float:
    """In %, of a callable from images to classes, scores and boxes."""
    metric = VOCMApMetric(0.5, CLASSES)
    for first in range(0, len(held.images), BATCH):
        rows = slice(first, first + BATCH)
        ids, scores, boxes = net(mx.nd.array(held.images[rows]))
        metric.update(boxes, ids, scores, held.boxes[rows], held.ids[rows])
    return 100 * metric.get()[1][-1]


if __name__ == "__main__":
    main()
