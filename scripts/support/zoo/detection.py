"""Detectors, trackers, and networks with an answer for every pixel, with their real losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from gluoncv import loss as losses
from gluoncv.model_zoo import get_model
from gluoncv.model_zoo.center_net.target_generator import CenterNetTargetGenerator
from gluoncv.model_zoo.rcnn.faster_rcnn.rcnn_target import RCNNTargetGenerator, RCNNTargetSampler
from gluoncv.model_zoo.rcnn.rpn.rpn_target import RPNTargetGenerator
from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
from gluoncv.model_zoo.yolo.yolo_target import YOLOV3PrefetchTargetGenerator
from mxnet import autograd, gluon

from .case import Case, images, uniform, whole

CLASSES = ["cat", "dog"]


def made(name: str) -> gluon.HybridBlock:
    """GluonCV's network of that name; the custom ones take the classes."""
    options = {"classes": CLASSES} if "custom" in name else {}
    return get_model(name, pretrained=False, pretrained_base=False, **options)


def boxes(size: int) -> mx.nd.NDArray:
    """Two boxes of one picture, as (1, 2, 4) corners."""
    return mx.nd.array([[[0.1, 0.1, 0.55, 0.6], [0.3, 0.35, 0.95, 0.9]]]) * size


def classes() -> mx.nd.NDArray:
    return mx.nd.array([[[0], [1]]])


def ssd(name: str) -> Case:
    size = 300 if "300" in name else 512 if "vgg16" in name else 256  # VGG's last convolution has no padding

    def ssd_multibox(outputs: Any) -> Any:
        scores, offsets, anchors = outputs
        with autograd.pause(train_mode=False):
            # As data loaders do, with no negatives chosen by score: the targets are the same in every precision.
            generate = SSDTargetGenerator(negative_mining_ratio=-1)
            class_targets, box_targets, _ = generate(anchors, None, boxes(size) / size, classes())
        return losses.SSDMultiBoxLoss()(scores, offsets, class_targets, box_targets)[0]

    return Case(name, "ssd", partial(made, name), lambda: [images(1, 3, size, size)], ssd_multibox, ranked=True)


def yolo(name: str) -> Case:
    size = 96

    def train_inputs() -> list:
        x, widths = images(1, 3, size, size), [size // stride for stride in (32, 16, 8)]
        maps = [mx.nd.zeros((1, 1, width, width)) for width in widths]
        anchors = [mx.nd.array(each).reshape((1, 1, -1, 2)) for each in _YOLO_ANCHORS]
        generate = YOLOV3PrefetchTargetGenerator(2 if "custom" in name else 80 if "coco" in name else 20)
        return [x, boxes(size), *generate(x, maps, anchors, [*map(_grid, widths)], boxes(size), classes())]

    def yolo3(outputs: Any) -> Any:
        return [sum(each.sum() for each in outputs)]

    draw = lambda: [images(1, 3, size, size)]  # noqa: E731
    return Case(name, "yolo", partial(made, name), draw, yolo3, train_inputs=train_inputs, ranked=True)


_YOLO_ANCHORS = [[116, 90, 156, 198, 373, 326], [30, 61, 62, 45, 59, 119], [10, 13, 16, 30, 33, 23]]


def _grid(width: int) -> mx.nd.NDArray:
    ys, xs = np.mgrid[:width, :width]
    return mx.nd.array(np.stack([xs, ys], -1)[None, :, :, None])


class Proposals(RCNNTargetSampler):
    """Boxes around the true ones, instead of a random choice among the best proposals.

    Which proposals are the best hangs on the last bit of their scores: no two roundings agree on it, and gradients
    of different proposals cannot be compared.
    """

    def hybrid_forward(self, F, rois: Any, scores: Any, truth: Any) -> Any:  # noqa: N803
        near = F.concat(*[truth + shift for shift in (-14, -9, -5, -2, 0, 3, 7, 11)], dim=1)
        number = F.arange(16).reshape((1, 16))
        return near, (number < 4) * 2 - 1, number % 2


def rcnn(name: str) -> Case:
    """Faster and Mask R-CNN with as many proposals as a test needs."""
    size, samples = 128, 16

    def make() -> gluon.HybridBlock:
        net = made(name)
        net.sampler = Proposals(1, 64, samples, 0.5, 0.25, 2)
        net._num_sample, net._batch_size = samples, 1
        net.rpn._train_post_nms = 64
        net._rpn_test_post_nms = net.rpn._test_post_nms = 32
        net._target_generator = RCNNTargetGenerator(net.num_class, samples // 4, 1)
        if hasattr(net, "_rcnn_max_dets"):
            net._rcnn_max_dets = 16
        return net

    def rpn_and_rcnn(outputs: Any) -> Any:
        scores, offsets, *masks, _, _, _, rpn_scores, rpn_offsets, anchors, labels, targets, weights, _ = outputs
        entropy, huber = gluon.loss.SigmoidBinaryCrossEntropyLoss(), gluon.loss.HuberLoss
        with autograd.pause():
            np.random.seed(0)
            generate = RPNTargetGenerator(num_sample=64)
            levels = anchors if isinstance(anchors, (list, tuple)) else [anchors]
            inside = mx.nd.concat(*[level.reshape((-1, 4)) for level in levels], dim=0)
            inside = inside.clip(0, size - 1)  # of so small a picture every anchor sticks out
            found = generate(boxes(size)[0], inside, size, size)
            kinds, shifts, shares = (mx.nd.array(each).expand_dims(0) for each in found)
        kinds = kinds.reshape((1, -1, 1))
        loss = entropy(rpn_scores.reshape((1, -1, 1)), kinds, kinds >= 0)
        loss = loss * rpn_scores.size / 64 + huber(rho=1 / 9)(rpn_offsets, shifts, shares) * rpn_offsets.size / 64
        loss = loss + gluon.loss.SoftmaxCrossEntropyLoss()(scores, labels, (labels >= 0).expand_dims(-1))
        loss = loss + huber(rho=1)(offsets, targets, weights) * offsets.size / samples
        for mask in masks:
            loss = loss + entropy(mask, whole(2, *mask.shape)).mean()
        return loss

    draw = partial(images, 1, 3, size, size)
    return Case(name, "rcnn", make, lambda: [draw()], rpn_and_rcnn, lambda: [draw(), boxes(size), classes()],
                ranked=True, compared=lambda outputs: outputs[-7:-5])  # fmt: skip


def center_net(name: str) -> Case:
    size = 128

    def center_net_losses(outputs: Any) -> Any:
        heat, extent, shift = outputs
        corners, kinds = boxes(size)[0].asnumpy() / 4, [0, 1]
        generate = CenterNetTargetGenerator(heat.shape[1], size // 4, size // 4)
        heat_t, extent_t, extent_m, shift_t, shift_m = (e.expand_dims(0) for e in generate(corners, kinds))
        loss = losses.HeatmapFocalLoss(from_logits=True)(heat, heat_t)
        loss = loss + 0.1 * losses.MaskedL1Loss()(extent, extent_t, extent_m)
        return loss + losses.MaskedL1Loss()(shift, shift_t, shift_m)

    draw = lambda: [images(1, 3, size, size)]  # noqa: E731
    return Case(name, "center_net", partial(made, name), draw, center_net_losses, ranked=True)


def siamrpn(name: str) -> Case:
    def siamrpn_losses(outputs: Any) -> Any:
        scores, offsets = outputs
        target = uniform(1, 4, 5, 17, 17)
        weight = whole(2, 1, 5, 17, 17) / 100
        positive, negative = mx.nd.arange(16), mx.nd.arange(700, 748)
        labels = mx.nd.concat(mx.nd.ones(700), mx.nd.zeros(745), dim=0)
        return list(losses.SiamRPNLoss(1)(scores, offsets, labels, positive, negative, target, weight))

    draw = lambda: [images(1, 3, 127, 127), images(1, 3, 255, 255)]  # noqa: E731
    return Case(name, "siamrpn", partial(get_model, name, bz=1, is_train=True), draw, siamrpn_losses)


SEGMENTS = 5
resize = mx.nd.contrib.BilinearResize2D


def segmentation(name: str) -> Case:
    # Whole multiples of every pooling; pyramid pooling wants 6 x 6 behind a stride of 8.
    size = 96 if name.startswith(("psp", "icnet", "fastscnn")) else 64
    options = {"pretrained_base": False, "crop_size": size, "base_size": size}
    if name.startswith("hrnet"):
        options = {}
    weights = [1.0, 0.4, 0.4, 1.0] if name.startswith("icnet") else [1.0, 1.0, 1.0] if "danet" in name else [1.0, 0.5]

    def softmax_cross_entropy(outputs: Any) -> Any:
        # GluonCV's own losses are this in value; but they are a SoftmaxOutput in Python, whose gradient no loss
        # scale reaches, and which cannot be traced.
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        batch, classes, height, width = outputs[0].shape
        labels = whole(min(classes, SEGMENTS), batch, height, width)
        resized = [out if out.shape[2] == height else resize(out, height=height, width=width) for out in outputs]
        return sum(w * gluon.loss.SoftmaxCrossEntropyLoss(axis=1)(out, labels) for w, out in zip(weights, resized))

    make = partial(get_model, name, pretrained=False, **options)
    return Case(name, "segmentation", make, lambda: [images(2, 3, size, size)], softmax_cross_entropy)


def pose(name: str) -> Case:
    def heatmap_l2(heatmaps: Any) -> Any:
        target = uniform(*heatmaps.shape).abs()
        visible = whole(2, *heatmaps.shape[:2], 1, 1)
        return gluon.loss.L2Loss()(heatmaps, target, visible)

    options = {"num_gpus": 0} if name.startswith("alpha") else {}
    make = partial(get_model, name, pretrained=False, pretrained_base=False, **options)
    return Case(name, "pose", make, lambda: [images(2, 3, 128, 96)], heatmap_l2)


def depth(name: str) -> Case:
    # Their loss warps the neighbouring video frames, which takes a data set; the outputs' projection stands for it.
    channels = 6 if "posenet" in name else 3
    make = partial(get_model, name, pretrained=False, pretrained_base=False)
    return Case(name, "depth", make, lambda: [images(1, channels, 96, 128)])
