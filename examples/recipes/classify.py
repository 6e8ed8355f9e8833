"""Seven image classifiers on scikit-learn's handwritten digits.

    python examples/recipes/classify.py resnet50 --dtype float16

The networks are GluonCV's, and Inception v2. Each layer has an 8th or a 16th of its channels, so that a CPU can train
them. The data: 1,797 real digits (UCI's optical recognition of handwritten digits, CC BY 4.0, in scikit-learn); three
in ten are held out. Chance is 10 %.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Sequence

import gluoncv
import mxnet as mx
import numpy as np
from common import Run, parser, top_1
from digits import moved, split
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import HybridConcurrent

BATCH, EPOCHS = 32, 15


class Network(NamedTuple):
    make: Any
    narrower: int  # every layer has so many times fewer channels
    size: int  # of the images
    lr: float
    copies: int = 1  # of each picture, all but the first a little moved, turned and scaled


def zoo(name: str) -> Any:
    """Return a function that makes a network of GluonCV's."""
    return lambda: gluoncv.model_zoo.get_model(name, classes=10)


def convolution(channels: int, kernel: int, strides: int = 1) -> list[gluon.Block]:
    """Return a convolution with its norm and its activation."""
    layer = nn.Conv2D(channels, kernel, strides, kernel // 2, use_bias=False)
    return [layer, nn.BatchNorm(), nn.Activation("relu")]


INCEPTION_V2 = (  # 1x1; reduction and 3x3; reduction and two of 3x3; pooling, its projection: no 1x1 where it strides
    (64, (64, 64), (64, 96), nn.AvgPool2D, 32),
    (64, (64, 96), (64, 96), nn.AvgPool2D, 64),
    (0, (128, 160), (64, 96), nn.MaxPool2D, 0),
    (224, (64, 96), (96, 128), nn.AvgPool2D, 128),
    (192, (96, 128), (96, 128), nn.AvgPool2D, 128),
    (160, (128, 160), (128, 160), nn.AvgPool2D, 128),
    (96, (128, 192), (160, 192), nn.AvgPool2D, 128),
    (0, (128, 192), (192, 256), nn.MaxPool2D, 0),
    (352, (192, 320), (160, 224), nn.AvgPool2D, 128),
    (352, (192, 320), (192, 224), nn.MaxPool2D, 128),
)


def inception_v2(classes: int) -> gluon.HybridBlock:
    """Return table 1 of "Batch Normalization" (Ioffe and Szegedy, 2015), which GluonCV does not have."""
    net = nn.HybridSequential()
    net.add(*convolution(64, 7, 2), nn.MaxPool2D(3, 2, 1), *convolution(64, 1), *convolution(192, 3))
    net.add(nn.MaxPool2D(3, 2, 1))
    for one, three, double, pool, projection in INCEPTION_V2:
        strides = 1 if one else 2
        branches = [
            convolution(one, 1) if one else [],
            [*convolution(three[0], 1), *convolution(three[1], 3, strides)],
            [*convolution(double[0], 1), *convolution(double[1], 3), *convolution(double[1], 3, strides)],
            [pool(3, strides, 1), *(convolution(projection, 1) if projection else [])],
        ]
        block = HybridConcurrent(axis=1)
        for layers in filter(None, branches):
            branch = nn.HybridSequential()
            branch.add(*layers)
            block.add(branch)
        net.add(block)
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


NETWORKS = {
    "alexnet": Network(zoo("alexnet"), 8, 64, 0.002, copies=3),
    "vgg16": Network(zoo("vgg16"), 8, 32, 0.001, copies=2),
    "googlenet": Network(lambda: gluoncv.model_zoo.GoogLeNet(classes=10, pretrained_base=False), 8, 64, 0.01),
    "inceptionv2": Network(lambda: inception_v2(classes=10), 8, 48, 0.02),
    "inceptionv3": Network(zoo("inceptionv3"), 8, 96, 0.03),
    "resnet50": Network(zoo("resnet50_v1b"), 8, 48, 0.02),
    "resnext50": Network(zoo("resnext50_32x4d"), 16, 48, 0.03),
}


def narrowed(net: gluon.HybridBlock, times: int) -> mx.sym.Symbol:
    """Return the net's graph with so many times fewer filters in each layer."""
    graph = json.loads(net(mx.sym.var("data")).tojson())
    for node in graph["nodes"]:
        attributes = node.get("attrs", {})
        attributes.pop("__shape__", None)  # of a weight: it follows from the numbers below
        for key in ("num_filter", "num_hidden", "num_group"):
            count = int(attributes.get(key, 1))
            if count not in (1, 10):
                attributes[key] = str(count // times)
        if attributes.get("kernel") in ("(7, 7)", "(8, 8)") and node["op"] == "Pooling":
            attributes["global_pool"] = "True"  # the last one, of 224x224 or 299x299 pixels
    return mx.sym.load_json(json.dumps(graph))


def data(network: Network, quick: bool) -> Sequence[np.ndarray]:
    """Return images of shape (n, 3, size, size) from -1 to 1 and labels to train on, then those held out."""
    parts, copies = split(network.size), network.copies
    if quick:
        parts, copies = [part[: 2 * BATCH] for part in parts], 1
    ink, held = (np.repeat(moved(each, copies)[:, None] * 2 - 1, 3, axis=1) for each in parts[::2])
    return ink, np.tile(parts[1], copies), held, np.tile(parts[3], copies)


def train(network: Network, run: Run) -> tuple[gluon.Block, Sequence[np.ndarray]]:
    """Return the trained net and ``data``."""
    images, labels, held, truth = data(network, run.quick)
    net = gluon.SymbolBlock(narrowed(network.make(), network.narrower), mx.sym.var("data", dtype="float32"))
    net.collect_params(".*weight").initialize(mx.init.Xavier("gaussian", "in", 2))
    net.collect_params(".*(gamma|running_var)").initialize(mx.init.One())
    net.collect_params(".*(beta|bias|running_mean)").initialize(mx.init.Zero())
    net = run.convert(net)
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (len(images) // BATCH), base_lr=network.lr, warmup_steps=10)
    settings = {"learning_rate": network.lr, "lr_scheduler": schedule}
    trainer = run.trainer(net.collect_params(), "adam", settings)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in run.batches(images, labels, size=BATCH):
        with autograd.record():
            loss = loss_of(net(x), y)
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)
    return net, (images, labels, held, truth)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=EPOCHS)
    options.add_argument("network", choices=NETWORKS)
    options = options.parse_args(arguments)
    run = Run(options, options.network, "top-1, %", chance=10)
    net, (_, _, held, truth) = train(NETWORKS[options.network], run)
    return run.finish(top_1(net, held, truth))


if __name__ == "__main__":
    main()
