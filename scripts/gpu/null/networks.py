"""The families of networks that are trained on the null GPU, each small: cases of ``support.zoo``."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import gluonnlp as nlp
import mxnet as mx
from mxnet.gluon import nn, rnn
from support.zoo.case import Case, images, uniform, whole
from support.zoo.catalogue import CASES

WORDS = 200


def bert(
    layers: int = 2, units: int = 32, heads: int = 4, batch: int = 4, length: int = 16, words: int = WORDS
) -> Case:
    """GluonNLP's BERT, trained on masked words and the next sentence."""
    masked = max(2, length * 3 // 20)

    def make() -> Any:
        encoder = nlp.model.bert.BERTEncoder(
            num_layers=layers, units=units, hidden_size=4 * units, num_heads=heads, max_length=length, dropout=0.1
        )
        return nlp.model.bert.BERTModel(
            encoder, vocab_size=words, token_type_vocab_size=2, units=units, embed_size=units, use_classifier=True,
            use_decoder=True,
        )  # fmt: skip

    def inputs() -> list:
        positions = mx.nd.arange(masked).reshape((1, masked)).repeat(batch, axis=0)
        return [whole(words, batch, length), whole(2, batch, length), mx.nd.full(batch, length), positions]

    def masked_words_and_next_sentence(outputs: Any) -> Any:
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        *_, following, decoded = outputs
        return loss(decoded, whole(words, batch, masked)).mean() + loss(following, whole(2, batch)).mean()

    return Case(f"bert_{layers}_{units}", "bert", make, inputs, masked_words_and_next_sentence)


class LanguageModel(mx.gluon.HybridBlock):
    """The next word, from an embedding and a fused recurrent layer."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(WORDS, 16)
            self.layer = layer(32, num_layers=2, input_size=16)
            self.decoder = nn.Dense(WORDS, flatten=False, in_units=32)

    def hybrid_forward(self, F: Any, words: Any) -> Any:  # noqa: N803
        return self.decoder(self.layer(self.embedding(words)))


def recurrent(layer: Callable[..., Any]) -> Case:
    def softmax(outputs: Any) -> Any:
        return mx.gluon.loss.SoftmaxCrossEntropyLoss()(outputs, whole(WORDS, *outputs.shape[:2]))

    return Case(layer.__name__, "recurrent", partial(LanguageModel, layer), lambda: [whole(WORDS, 6, 3)], softmax)


def alexnet() -> Case:
    """AlexNet's layers, narrow: its 54 million weights would be written many times over."""

    def make() -> nn.HybridSequential:
        net = nn.HybridSequential()
        for channels, kernel, strides in ((16, 11, 4), (32, 5, 1), (32, 3, 1)):
            net.add(nn.Conv2D(channels, kernel, strides, padding=kernel // 2, activation="relu"), nn.MaxPool2D(3, 2))
        net.add(nn.Flatten(), *(nn.Dense(64, activation="relu") for _ in range(2)), nn.Dropout(0.5), nn.Dense(10))
        return net

    def softmax(outputs: Any) -> Any:
        return mx.gluon.loss.SoftmaxCrossEntropyLoss()(outputs, whole(10, outputs.shape[0]))

    return Case("alexnet", "classification", make, lambda: [images(2, 3, 128, 128)], softmax)


def generator() -> Case:
    """DCGAN's generator, from noise to pictures of 8 x 8."""

    def make() -> nn.HybridSequential:
        net = nn.HybridSequential()
        net.add(nn.Conv2DTranspose(32, 4, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2DTranspose(16, 4, strides=2, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2D(3, 3, padding=1), nn.Activation("tanh"))
        return net

    return Case("dcgan generator", "gan", make, lambda: [uniform(4, 32, 1, 1)])


def discriminator() -> Case:
    """DCGAN's discriminator, from pictures of 8 x 8 to a number."""

    def make() -> nn.HybridSequential:
        net = nn.HybridSequential()
        net.add(nn.Conv2D(16, 4, strides=2, padding=1, use_bias=False), nn.BatchNorm(), nn.LeakyReLU(0.2))
        net.add(nn.Conv2D(32, 4, strides=2, padding=1, use_bias=False), nn.BatchNorm(), nn.LeakyReLU(0.2), nn.Dense(1))
        return net

    def cross_entropy(scores: Any) -> Any:
        return mx.gluon.loss.SigmoidBinaryCrossEntropyLoss()(scores, mx.nd.ones_like(scores))

    return Case("dcgan discriminator", "gan", make, lambda: [images(4, 3, 8, 8)], cross_entropy)


FAMILIES: dict[str, Callable[[], Case]] = {
    **{
        name: CASES[name]
        for name in (
            "resnet18_v1b",
            "resnet18_v2",
            "mobilenetv2_0.25",
            "mobilenetv3_small",
            "gluon.vgg11",
            "gluon.densenet121",
            "se_resnet18_v1",
            "squeezenet1.1",
            "ssd_512_mobilenet1.0_voc",
            "faster_rcnn_resnet50_v1b_voc",
            "fcn_resnet50_voc",
            "standard_lstm_lm_200",
            "transformer_en_de_512",
        )
    },
    "alexnet": alexnet,
    "lstm": partial(recurrent, rnn.LSTM),
    "gru": partial(recurrent, rnn.GRU),
    "bert": bert,
    "dcgan.generator": generator,
    "dcgan.discriminator": discriminator,
}
