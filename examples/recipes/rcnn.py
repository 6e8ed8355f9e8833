"""GluonCV's Faster R-CNN finds handwritten digits on canvases; Mask R-CNN cuts them out as well.

    python examples/recipes/rcnn.py mask_rcnn --dtype float16

The networks are GluonCV's ``FasterRCNN`` and ``MaskRCNN`` on a small backbone, the losses those of its scripts. The
data: 1 to 3 of scikit-learn's real digits (CC BY 4.0) on noise; the test's digits are of the held out ones. The metric
is Pascal VOC's mean average precision at an overlap of 0.5, of boxes; the result of Mask R-CNN also tells the overlap
of the masks, ``mask_iou``. An untrained network has 0.
"""

from __future__ import annotations

from typing import Any, Sequence

import cv2
import mxnet as mx
import numpy as np
from common import Run, parser
from digits import CLASSES, Canvases, canvases
from gluoncv.model_zoo.rcnn.faster_rcnn import FasterRCNN
from gluoncv.model_zoo.rcnn.mask_rcnn import MaskRCNN
from gluoncv.model_zoo.rcnn.rpn.rpn_target import RPNTargetGenerator
from gluoncv.utils.metrics.voc_detection import VOCMApMetric
from mxnet import autograd, gluon
from mxnet.gluon import nn

SIZE, BATCH, ROIS, ANCHORS = 64, 8, 16, 32  # RoIs and anchors that are sampled from an image


def network(name: str, width: int = 16) -> gluon.HybridBlock:
    backbone, head = nn.HybridSequential(), nn.HybridSequential()
    for channels, strides in ((width, 2), (width, 1), (2 * width, 2), (2 * width, 1), (2 * width, 1)):
        backbone.add(nn.Conv2D(channels, 3, strides, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    head.add(nn.Conv2D(2 * width, 3, 1, 1, activation="relu"))
    masks = {"mask_channels": 2 * width, "rcnn_max_dets": 8, "target_roi_scale": 2}
    kind, more = {"faster_rcnn": (FasterRCNN, {}), "mask_rcnn": (MaskRCNN, masks)}[name]
    net = kind(
        features=backbone,
        top_features=head,
        classes=CLASSES,
        box_features=gluon.nn.Dense(8 * width, activation="relu"),
        roi_size=(7, 7),
        strides=4,
        clip=4.14,
        rpn_channel=2 * width,
        base_size=8,
        scales=(2, 3),
        ratios=(1, 2),
        alloc_size=(32, 32),
        rpn_train_pre_nms=128,
        rpn_train_post_nms=32,
        rpn_test_pre_nms=128,
        rpn_test_post_nms=16,
        rpn_min_size=4,
        per_device_batch_size=BATCH,
        num_sample=ROIS,
        pos_ratio=0.5,
        max_num_gt=3,
        **more,
    )
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    net.set_nms(nms_thresh=0.3, nms_topk=16)
    return net


def proposals(net: gluon.Block, data: Canvases) -> list[np.ndarray]:
    """What the region proposal network should say of each anchor: its kind, the offsets of its box, their weights."""
    with autograd.train_mode():
        rows = slice(0, BATCH)
        outputs = net(*(mx.nd.array(array[rows]) for array in (data.images, data.boxes, data.ids)))
    anchors = next(out for out in outputs if out.ndim == 3 and out.shape[0] == 1 and out.shape[2] == 4).reshape((-1, 4))
    generate = RPNTargetGenerator(ANCHORS, 0.6, 0.3, allowed_border=1000)
    with_digits = (mx.nd.array(boxes[boxes[:, 0] >= 0]) for boxes in data.boxes)
    return [np.stack(part).astype("float32") for part in zip(*(generate(b, anchors, SIZE, SIZE) for b in with_digits))]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=15)
    options.add_argument("network", choices=["faster_rcnn", "mask_rcnn"])
    options = options.parse_args(arguments)
    run = Run(options, options.network, "mAP, %", chance=0)
    count = 64 if run.quick else 400
    data, held = canvases(count, False, seed=1, size=SIZE), canvases(count // 4, True, seed=2, size=SIZE)
    net = network(options.network)
    np.random.seed(0)  # draws the anchors
    wanted = proposals(net, data)
    net = run.convert(net)
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (count // BATCH), base_lr=0.008, warmup_steps=10)
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": 0.008, "lr_scheduler": schedule})
    for x, boxes, ids, masks, *rpn in run.batches(data.images, data.boxes, data.ids, data.masks, *wanted, size=BATCH):
        with autograd.record():
            loss = losses(net, net(x, boxes, ids), masks, *rpn)
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss)
    return run.finish(**evaluation(net, held))


def losses(net: gluon.Block, outputs: Sequence, masks: Any, rpn_kinds: Any, rpn_targets: Any, rpn_weights: Any) -> Any:
    """The sum of GluonCV's four losses, or five."""
    scores, offsets, *mask, rois, _, matches, rpn_scores, rpn_offsets, _, kinds, targets, weights, found = outputs
    entropy, huber = gluon.loss.SigmoidBinaryCrossEntropyLoss(), gluon.loss.HuberLoss
    rpn_kinds = rpn_kinds.reshape((BATCH, -1, 1))
    loss = entropy(rpn_scores, rpn_kinds, rpn_kinds >= 0).mean() * rpn_kinds[0].size / ANCHORS
    loss = loss + huber(rho=1 / 9)(rpn_offsets, rpn_targets, rpn_weights).mean() * rpn_targets[0].size / ANCHORS
    loss = loss + gluon.loss.SoftmaxCrossEntropyLoss()(scores, kinds, (kinds >= 0).expand_dims(-1)).mean()
    loss = loss + huber(rho=1)(offsets, targets, weights).mean() * targets[0].size / ROIS
    for predicted in mask:
        with autograd.pause():
            positive = [mx.nd.stack(*(each[n][found[n]] for n in range(BATCH))) for each in (rois, matches, kinds)]
            truth, here = net.mask_target(positive[0], masks, *positive[1:])
        loss = loss + (entropy(predicted, truth, here).sum() * predicted[0][0].size / here.sum()).squeeze()
    return loss


def evaluation(net: gluon.Block, held: Canvases) -> dict[str, float]:
    net.hybridize()  # plain MXNet has one graph at a time, and that was for training
    metric, overlaps = VOCMApMetric(0.5, CLASSES), []
    for n, image in enumerate(held.images):
        ids, scores, boxes, *masks = net(mx.nd.array(image[None]))
        metric.update(boxes, ids, scores, held.boxes[n : n + 1], held.ids[n : n + 1])
        if masks:
            overlaps += mask_overlaps(boxes[0].asnumpy(), masks[0][0].asnumpy(), held.masks[n])
    return {"value": 100 * metric.get()[1][-1], **({"mask_iou": 100 * float(np.mean(overlaps))} if overlaps else {})}


def mask_overlaps(boxes: np.ndarray, masks: np.ndarray, truths: np.ndarray) -> list[float]:
    """Of each digit that is there, the best intersection over union with a mask that was found."""
    drawn = np.zeros((len(masks), SIZE, SIZE), bool)
    for whole, mask, box in zip(drawn, masks, boxes.round().clip(0, SIZE).astype(int)):
        left, top, right, bottom = box
        if right > left and bottom > top:
            whole[top:bottom, left:right] = cv2.resize(mask, (right - left, bottom - top)) > 0.5
    digits = [truth > 0 for truth in truths if truth.any()]
    return [max((truth & mask).sum() / (truth | mask).sum() for mask in drawn) for truth in digits]


if __name__ == "__main__":
    main()
