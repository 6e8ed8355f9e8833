"""Networks with an answer for every pixel: segmentation, pose, depth."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx
from gluoncv.model_zoo import get_model
from mxnet import gluon

from .case import Case, images, uniform, whole

CLASSES = 5
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
        labels = whole(min(classes, CLASSES), batch, height, width)
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
