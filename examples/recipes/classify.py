"""Seven image classifiers on scikit-learn's handwritten digits.

    python examples/recipes/classify.py resnet50 --dtype float16

The networks are GluonCV's, each layer with a few of its channels (a CPU has to train them), on 1,797 real digits
(UCI's optical recognition of handwritten digits, CC BY 4.0, in scikit-learn), three in ten to test on. Chance is 10 %.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Sequence

import cv2
import gluoncv
import mxnet as mx
import numpy as np
from common import Run, parser, predictions
from gluoncv.model_zoo.resnext import ResNext
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 32


class Network(NamedTuple):
    make: Any
    narrower: int  # every layer has so many times fewer channels
    size: int  # of the images
    lr: float


def zoo(name: str) -> Any:
    return lambda: gluoncv.model_zoo.get_model(name, classes=10)


NETWORKS = {
    "alexnet": Network(zoo("alexnet"), 8, 64, 0.002),
    "vgg16": Network(zoo("vgg16"), 8, 32, 0.002),
    "googlenet": Network(lambda: gluoncv.model_zoo.GoogLeNet(classes=10, pretrained_base=False), 8, 48, 0.005),
    "inceptionv3": Network(zoo("inceptionv3"), 8, 80, 0.005),
    "resnet50": Network(zoo("resnet50_v1b"), 8, 32, 0.005),
    "resnext50": Network(lambda: ResNext([3, 4, 6, 3], cardinality=32, bottleneck_width=4, classes=10), 8, 32, 0.005),
}


def narrowed(net: gluon.HybridBlock, times: int) -> gluon.SymbolBlock:
    """The same graph with fewer channels, initialized: the graph's own numbers of filters are divided."""
    graph = json.loads(net(mx.sym.var("data")).tojson())
    for node in graph["nodes"]:
        attributes = node.get("attrs", {})
        attributes.pop("__shape__", None)  # of a weight: it follows from the numbers below
        for key in ("num_filter", "num_hidden", "num_group"):
            count = int(attributes.get(key, 1))
            if count not in (1, 10):
                attributes[key] = str(count // times)
        if node["op"] == "Pooling" and "(7" in attributes["kernel"] or "(8" in attributes.get("kernel", ""):
            attributes["global_pool"] = "True"
    thin = gluon.SymbolBlock(mx.sym.load_json(json.dumps(graph)), mx.sym.var("data"))
    thin.collect_params(".*weight").initialize(mx.init.Xavier("gaussian", "in", 2))
    thin.collect_params(".*(gamma|running_var)").initialize(mx.init.One())
    thin.collect_params(".*(beta|bias|running_mean)").initialize(mx.init.Zero())
    return thin


def digits(size: int) -> Sequence[np.ndarray]:
    """Images (n, 3, size, size) and labels to train on, then to test on."""
    data = load_digits()
    images = np.stack([cv2.resize(image, (size, size), interpolation=cv2.INTER_CUBIC) for image in data.images])
    images = np.repeat(images[:, None] / 8 - 1, 3, axis=1).astype("float32")
    labels = data.target.astype("float32")
    images, held, labels, truth = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0)
    return images, labels, held, truth


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=6)
    options.add_argument("network", choices=NETWORKS)
    for o in ("size","lr","narrower"): options.add_argument("--"+o, type=float)
    options = options.parse_args(arguments)
    run = Run(options, options.network, "top-1, %", chance=10)
    network = NETWORKS[options.network]
    network = network._replace(**{o: (type(getattr(network,o)))(getattr(options,o)) for o in ("size","lr","narrower") if getattr(options,o)})
    images, labels, held, truth = digits(network.size)

    net = run.convert(narrowed(network.make(), network.narrower))
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

    right = predictions(net, held).argmax(axis=1) == truth
    return run.finish(100 * right.mean())


if __name__ == "__main__":
    main()
