"""GluonCV's networks by name, and those of ``gluon.model_zoo.vision``: classification and video; the rest by kind."""

from __future__ import annotations

import contextlib
import inspect
import re
from functools import partial
from typing import Any
from unittest import mock

import mxnet as mx
from gluoncv.model_zoo import get_model, get_model_list
from gluoncv.model_zoo.model_zoo import _models
from gluoncv.nn.dropblock import DropBlock
from mxnet import gluon

from . import detection
from .case import Case, images, whole

INT8 = "a quantized twin of another name: its graph is a file of int8 operators, not for training"
SIZES = {  # the smallest input that a network's last pooling allows, where it is not 64 x 64
    r"cifar_": 32,
    r"vgg\d+(_bn)?$": 32,
    r"(densenet|squeezenet|shufflenet|residualattentionnet|googlenet|alexnet)": 224,
    r"nasnet": 224,
    r"inception_?v3": 299,
}
FRAMES = {  # frames a clip, height and width
    r"slowfast_4x16": (36, 64),  # 32 frames of the fast path, then those of the slow one
    r"slowfast_8x8": (40, 64),
    r"slowfast_16x8": (80, 64),
    r"i3d_inceptionv3": (16, 299),
    r"i3d_inceptionv1": (16, 224),
    r"i3d": (16, 64),
    r"c3d": (16, 112),
    r"(p3d|r2plus1d)": (16, 112),
}
_SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss


def matching(table: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for pattern, value in table.items() if re.match(pattern, name)), default)


def softmax(classes: int) -> Any:
    """Return softmax cross entropy of the first output, and of auxiliary heads with 0.4 of the weight."""

    def softmax_cross_entropy(outputs: Any) -> Any:
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        labels = whole(classes, outputs[0].shape[0])
        losses = [_SOFTMAX()(out, labels) for out in outputs]
        return losses[0] if len(losses) == 1 else losses[0] + 0.4 * sum(losses[1:])

    return softmax_cross_entropy


def classification(name: str, maker: Any = get_model, kind: str = "classification") -> Case:
    size = matching(SIZES, name, 64)
    # The shapes of pruned networks are in GluonCV's own tables.
    options: dict[str, Any] = {} if re.search(r"v1d_0|v1b_0", name) else {"classes": 10}
    options.update({"pretrained_base": False} if "hrnet" in name else {})
    return Case(
        name if kind == "classification" else f"{kind}.{name}",
        kind,
        partial(maker, name, pretrained=False, **options),
        lambda: [images(2, 3, size, size)],
        softmax(10),
        # Without batch norms and from smaller weights, what comes out is subnormal in float16.
        init=mx.init.MSRAPrelu() if re.match("squeezenet|vgg|alexnet", name) else None,
        copied=("Concat",) if name.startswith("nasnet") else (),
    )


def video(name: str) -> Case:
    clip = matching(FRAMES, name, None)
    size = clip[1] if clip else 299 if "inceptionv3" in name else 224 if re.match("vgg|inceptionv1", name) else 64
    shape = (1, 3, *clip, size) if clip else (2, 3, size, size)
    draw, copied = partial(images, *shape), ("BatchNorm",) if clip else ()
    return Case(name, "video", partial(untrained, name, nclass=10), lambda: [draw()], softmax(10), copied=copied)


def untrained(name: str, **options: Any) -> gluon.HybridBlock:
    """Return a network of videos without downloads."""
    options.update(pretrained=False, pretrained_base=False)
    if "use_kinetics_pretrain" in inspect.signature(_models[name]).parameters:
        options["use_kinetics_pretrain"] = False
    with contextlib.ExitStack() as stack:
        # GluonCV's ResNet-18 loads its base network whatever it is told, and its Inception moves parameters that have
        # no values yet to another device, which MXNet refuses.
        stack.enter_context(mock.patch("gluoncv.model_zoo.model_store.get_model_file"))
        for owner, what in ((gluon.Block, "load_parameters"), (gluon.ParameterDict, "reset_ctx")):
            stack.enter_context(mock.patch.object(owner, what))
        return get_model(name, **options)


def all_blocks(net: gluon.Block) -> list[gluon.Block]:
    found: list[gluon.Block] = []
    net.apply(found.append)
    return found


def without_drop_blocks(net: gluon.Block) -> None:
    """GluonCV's mask is of one size, which the inputs must have."""
    for block in all_blocks(net):
        if isinstance(block, DropBlock):
            block.drop_prob = 0


KINDS = {  # by pattern of the name, the first that fits
    r".*rcnn": detection.rcnn,
    r"ssd_": detection.ssd,
    r"yolo3_": detection.yolo,
    r"center_net_": detection.center_net,
    r"siamrpn": detection.siamrpn,
    r"monodepth2": detection.depth,
    r".*pose": detection.pose,
    r"(fcn|psp|deeplab|icnet|fastscnn|danet)_?|hrnet.*_s$": detection.segmentation,
    r".*_(ucf101|hmdb51|kinetics400|kinetics700|sthsthv2)$|(i3d|slowfast|resnet\d+_v1b)_?.*custom$": video,
}


def cases() -> dict[str, Any]:
    """Return a function that makes the case, by name; a name that is left out has its reason instead."""
    found: dict[str, Any] = {}
    for name in get_model_list():
        found[name] = INT8 if name.endswith("_int8") else partial(matching(KINDS, name, classification), name)
    maker = mx.gluon.model_zoo.vision.get_model
    for name in VISION:
        found[f"gluon.{name}"] = partial(classification, name, maker, "gluon")
    return found


VISION = [f"resnet{depth}_v{version}" for version in (1, 2) for depth in (18, 34, 50, 101, 152)]
VISION += [f"vgg{depth}{norm}" for norm in ("", "_bn") for depth in (11, 13, 16, 19)]
VISION += [f"densenet{depth}" for depth in (121, 161, 169, 201)]
VISION += [f"mobilenet{version}{width}" for version in ("", "v2_") for width in ("1.0", "0.75", "0.5", "0.25")]
VISION += ["alexnet", "squeezenet1.0", "squeezenet1.1", "inceptionv3"]
