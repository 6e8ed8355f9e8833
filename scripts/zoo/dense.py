"""Networks with an answer for every pixel: segmentation, pose, depth."""

from __future__ import annotations

from functools import partial
from typing import Any

from gluoncv import loss as losses
from gluoncv.model_zoo import get_model
from mxnet import gluon

from .case import Case, images, uniform, whole

__all__ = ["depth", "pose", "segmentation"]

CLASSES = 5


def segmentation(name: str) -> Case:
    # Whole multiples of every pooling; pyramid pooling wants 6 x 6 behind a stride of 8.
    size = 96 if name.startswith(("psp", "icnet", "fastscnn")) else 64
    options = {"pretrained_base": False, "crop_size": size, "base_size": size}
    if name.startswith("hrnet"):
        options = {}
    several = name.startswith(("danet", "icnet", "psp", "fcn", "fastscnn", "deeplab_r"))

    def softmax_cross_entropy(outputs: Any) -> Any:
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        classes, height, width = outputs[0].shape[1:]
        labels = whole(min(classes, CLASSES), outputs[0].shape[0], height, width)
        if name.startswith("icnet"):
            return losses.ICNetLoss(crop_size=size)(*outputs, labels)
        if name.startswith("danet"):
            return losses.SegmentationMultiLosses()(*outputs, labels)
        return losses.MixSoftmaxCrossEntropyLoss(aux=several and len(outputs) > 1, aux_weight=0.5)(*outputs, labels)

    return Case(
        name,
        "segmentation",
        partial(get_model, name, pretrained=False, **options),
        lambda: [images(2, 3, size, size)],
        softmax_cross_entropy,
    )


def pose(name: str) -> Case:
    def heatmap_l2(heatmaps: Any) -> Any:
        target = uniform(*heatmaps.shape).abs()
        visible = whole(2, *heatmaps.shape[:2], 1, 1)
        return gluon.loss.L2Loss()(heatmaps, target, visible)

    options = {"num_gpus": 0} if name.startswith("alpha") else {}
    return Case(
        name,
        "pose",
        partial(get_model, name, pretrained=False, pretrained_base=False, **options),
        lambda: [images(2, 3, 128, 96)],
        heatmap_l2,
    )


def depth(name: str) -> Case:
    # Their loss warps the neighbouring video frames, which takes a data set; the outputs' projection stands for it.
    channels = 6 if "posenet" in name else 3
    return Case(
        name,
        "depth",
        partial(get_model, name, pretrained=False, pretrained_base=False),
        lambda: [images(1, channels, 96, 128)],
    )
