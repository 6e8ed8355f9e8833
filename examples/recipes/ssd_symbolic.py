"""A single-shot detector of handwritten digits, by MXNet's Symbols, Module and MultiBox operators.

    python examples/recipes/ssd_symbolic.py --dtype float16

The heads are those of MXNet's own example: ``SoftmaxOutput`` over the anchors, ``MakeLoss`` of their boxes. Data and
metric are those of ssd.py: digits of scikit-learn (CC BY 4.0) on noise, mean average precision. Untrained: 0.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from digits import CLASSES, Canvases, canvases
from gluoncv.utils.metrics.voc_detection import VOCMApMetric

SIZE, BATCH = 64, 32
SIZES, RATIOS = ((0.22, 0.28), (0.35, 0.45)), (1, 2, 0.5)
KINDS, ANCHORS = len(CLASSES) + 1, len(SIZES[0]) + len(RATIOS) - 1  # of each place


def convolution(x: mx.sym.Symbol, channels: int, strides: int = 1) -> mx.sym.Symbol:
    x = mx.sym.Convolution(x, num_filter=channels, kernel=(3, 3), stride=(strides, strides), pad=(1, 1), no_bias=True)
    return mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False), act_type="relu")


def network(width: int = 16) -> mx.sym.Symbol:
    x = mx.sym.var("data")
    for channels in (width, 2 * width, 4 * width):
        x = convolution(convolution(x, channels, 2), channels)
    features = [x, convolution(x, 4 * width, 2)]
    scores, offsets, anchors = [], [], []
    for feature, sizes in zip(features, SIZES):
        for found, count in ((scores, ANCHORS * KINDS), (offsets, ANCHORS * 4)):
            head = mx.sym.Convolution(feature, num_filter=count, kernel=(3, 3), pad=(1, 1))
            found.append(mx.sym.flatten(mx.sym.transpose(head, axes=(0, 2, 3, 1))))
        anchors.append(mx.sym.contrib.MultiBoxPrior(feature, sizes=sizes, ratios=RATIOS, clip=False))
    scores = mx.sym.transpose(mx.sym.reshape(mx.sym.concat(*scores), shape=(0, -1, KINDS)), axes=(0, 2, 1))
    offsets, anchors = mx.sym.concat(*offsets), mx.sym.concat(*anchors, dim=1)

    targets, mask, kinds = mx.sym.contrib.MultiBoxTarget(
        anchors,
        mx.sym.var("label"),
        scores,
        overlap_threshold=0.5,
        negative_mining_ratio=3,
        negative_mining_thresh=0.5,
    )
    probabilities = mx.sym.SoftmaxOutput(
        scores, kinds, ignore_label=-1, use_ignore=True, multi_output=True, normalization="valid"
    )
    box_loss = mx.sym.MakeLoss(mx.sym.smooth_l1(mask * (offsets - targets), scalar=1), normalization="valid")
    found = mx.sym.contrib.MultiBoxDetection(probabilities, offsets, anchors, nms_threshold=0.45, nms_topk=100)
    return mx.sym.Group([probabilities, box_loss, mx.sym.BlockGrad(kinds), mx.sym.BlockGrad(found)])


class MultiBoxLoss(mx.metric.EvalMetric):
    """Cross-entropy of the anchors that count."""

    def __init__(self) -> None:
        super().__init__("multibox")

    def update(self, labels: Any, preds: Sequence[mx.nd.NDArray]) -> None:
        probabilities, kinds = preds[0].asnumpy(), preds[2].asnumpy().astype(int)
        right = np.take_along_axis(probabilities, kinds.clip(0)[:, None], axis=1)[:, 0][kinds >= 0]
        self.sum_metric -= np.log(right + 1e-12).sum()
        self.num_inst += right.size


def batches(data: Canvases, **options: Any) -> mx.io.NDArrayIter:
    """Labels (n, most, 5): a class and corners from 0 to 1; -1 where there is no digit."""
    labels = np.concatenate([data.ids, np.where(data.boxes < 0, -1, data.boxes / SIZE)], axis=2)
    return mx.io.NDArrayIter(data.images, labels, BATCH, label_name="label", **options)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    run = Run(parser(__doc__, epochs=6).parse_args(arguments), "ssd_symbolic", "mAP, %", chance=0)
    if run.quick:
        run.epochs = 1
    count = QUICK_STEPS * BATCH if run.quick else 1024
    data, held = canvases(count, False, seed=1, size=SIZE), canvases(count // 2, True, seed=2, size=SIZE)
    module = run.module(network(), label_names=["label"])
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (count // BATCH), base_lr=0.004, warmup_steps=10)
    module.fit(
        batches(data, shuffle=True),
        eval_metric=MultiBoxLoss(),
        batch_end_callback=run.log_metric,
        initializer=mx.init.Xavier("gaussian", "in", 2),
        optimizer="adam",
        optimizer_params={"learning_rate": 0.004, "lr_scheduler": schedule},
        num_epoch=run.epochs,
    )
    metric = VOCMApMetric(0.5, CLASSES)
    rows = module.predict(batches(held))[3]
    metric.update(rows[:, :, 2:] * SIZE, rows[:, :, :1], rows[:, :, 1:2], held.boxes, held.ids)
    return run.finish(100 * metric.get()[1][-1])


if __name__ == "__main__":
    main()
