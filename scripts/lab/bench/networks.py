"""The networks of the benchmark, each with its inputs and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


@dataclass(frozen=True)
class Network:
    """One network. ``size``: of an image's side, or of a sequence; ``inputs`` are of batch and size."""

    title: str
    batch: int
    size: int
    make: Callable[[], Any]
    inputs: Callable[[int, int], list]
    loss: Callable[[Any, int], Any]
    optimizer: str = "sgd"
    options: dict[str, Any] = field(default_factory=lambda: {"learning_rate": 1e-4, "momentum": 0.9})


def images(batch: int, size: int) -> list:
    """Return crops of scikit-learn's two photographs, normalised.

    Not noise: what a cast to float16 takes depends on whether zeros behind a relu come in runs.
    """
    from sklearn.datasets import load_sample_images

    rng, photographs, crops = np.random.RandomState(0), load_sample_images().images, []
    for i in range(batch):
        image = photographs[i % len(photographs)]
        top, left = (rng.randint(0, side - size + 1) for side in image.shape[:2])
        crops.append(image[top : top + size, left : left + size])
    return [mx.nd.array(((np.stack(crops) - 118.0) / 58.0).transpose(0, 3, 1, 2))]


def words(batch: int, length: int) -> list:
    return [mx.nd.array(np.random.RandomState(0).randint(0, WORDS, (length, batch)))]


def sequences(batch: int, length: int) -> list:
    return [mx.nd.array(np.random.RandomState(0).normal(0, 1, (length, batch, 768)))]


WORDS = 10_000


def gluoncv(name: str, **options: Any) -> Any:
    from gluoncv.model_zoo import get_model

    return get_model(name, pretrained=False, **options)


def bert_base() -> Any:
    from gluonnlp.model import BERTEncoder

    return BERTEncoder(num_layers=12, units=768, hidden_size=3072, num_heads=12, max_length=512, dropout=0)


def lstm() -> Any:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Embedding(WORDS, 650), gluon.rnn.LSTM(650, num_layers=2), gluon.nn.Dense(WORDS, flatten=False))
    return net


def classified(outputs: Any, batch: int) -> Any:
    """Return softmax cross entropy of the first output, and of auxiliary heads with 0.4 of the weight."""
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    labels = mx.nd.arange(batch) % outputs[0].shape[1]
    losses = [gluon.loss.SoftmaxCrossEntropyLoss()(out, labels) for out in outputs]
    return losses[0] if len(losses) == 1 else losses[0] + 0.4 * sum(losses[1:])


def detected(outputs: Any, batch: int) -> Any:
    """Return SSD's own loss, of two boxes in each picture."""
    from gluoncv.loss import SSDMultiBoxLoss
    from gluoncv.model_zoo.ssd.target import SSDTargetGenerator

    scores, offsets, anchors = outputs
    with autograd.pause(train_mode=False):
        boxes = mx.nd.array([[[0.1, 0.1, 0.55, 0.6], [0.3, 0.35, 0.95, 0.9]]] * batch)
        generate = SSDTargetGenerator(negative_mining_ratio=-1)
        classes, places, _ = generate(anchors, None, boxes, mx.nd.array([[[0], [1]]] * batch))
    return SSDMultiBoxLoss()(scores, offsets, classes, places)[0]


def next_word(outputs: Any, batch: int) -> Any:
    flat = outputs.reshape((-1, outputs.shape[-1]))
    return gluon.loss.SoftmaxCrossEntropyLoss()(flat, mx.nd.arange(flat.shape[0]) % WORDS).mean()


def squared(outputs: Any, batch: int) -> Any:
    outputs = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    return (outputs**2).mean()


def classifier(title: str, name: str, batch: int = 8, size: int = 112) -> Network:
    return Network(title, batch, size, partial(gluoncv, name), images, classified)


NETWORKS: dict[str, Network] = {
    "resnet50": classifier("ResNet-50", "resnet50_v1b", 16, 112),
    "vgg16": classifier("VGG-16", "vgg16", 8, 112),
    "mobilenetv2": classifier("MobileNetV2", "mobilenetv2_1.0", 16, 112),
    "mobilenetv3": classifier("MobileNetV3", "mobilenetv3_large", 16, 112),
    "densenet121": classifier("DenseNet-121", "densenet121", 4, 224),
    "inceptionv3": classifier("Inception v3", "inceptionv3", 4, 299),
    "resnext50": classifier("ResNeXt-50", "resnext50_32x4d", 8, 112),
    "alexnet": classifier("AlexNet", "alexnet", 16, 224),
    "squeezenet": classifier("SqueezeNet", "squeezenet1.0", 8, 224),
    "ssd300": Network(
        *("SSD-300", 2, 300, partial(gluoncv, "ssd_300_vgg16_atrous_voc", pretrained_base=False), images, detected)
    ),
    "bert": Network(*("BERT-base, 12 layers", 4, 128, bert_base, sequences, squared, "adam", {"learning_rate": 1e-4})),
    "lstm": Network("LSTM language model", 20, 35, lstm, words, next_word),
}


def network(name: str) -> Network:
    """Return one of ``NETWORKS``, or any classification network of GluonCV."""
    return NETWORKS.get(name) or classifier(name, name)
