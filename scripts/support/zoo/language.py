"""GluonNLP's networks and their parts."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import gluonnlp as nlp
import mxnet as mx
from gluonnlp.model import get_model
from mxnet import gluon

from .case import Case, uniform, whole

WORDS = 200
WEIGHTS = nlp.initializer.TruncNorm(stdev=0.02)
_SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss
BERTS = ["bert_12_768_12", "bert_24_1024_16", "ernie_12_768_12"]
ROBERTAS = ["roberta_12_768_12", "roberta_24_1024_16"]
LANGUAGE_MODELS = [
    *("awd_lstm_lm_600", "awd_lstm_lm_1150"),
    *("standard_lstm_lm_200", "standard_lstm_lm_650", "standard_lstm_lm_1500"),
]
ELMOS = ["elmo_2x1024_128_2048cnn_1xhighway", "elmo_2x2048_256_2048cnn_1xhighway", "elmo_2x4096_512_2048cnn_2xhighway"]


def vocabulary(kind: Any = nlp.Vocab) -> Any:
    return kind(nlp.data.count_tokens([f"word{number}" for number in range(WORDS)]))


def pretrained_not(name: str, **options: Any) -> gluon.Block:
    """The network without its pretrained weights, dropout or a data set's vocabulary."""
    if "elmo" not in name:
        options["vocab"] = vocabulary(nlp.vocab.BERTVocab if "bert" in name or "ernie" in name else nlp.Vocab)
    return get_model(name, dataset_name=None, pretrained=False, **options)[0]


def words(*shape: int) -> mx.nd.NDArray:
    return whole(WORDS, *shape)


def lengths(batch: int = 2) -> mx.nd.NDArray:
    return mx.nd.array([16, 11] * (batch // 2))


# A ratio over the few scores of a classifier is chance: over six of them it is 4 dB off.
CLASSIFIED = 24


def bert(name: str, batch: int = CLASSIFIED) -> Case:
    """Masked words and, but for RoBERTa, the next sentence, as in pretraining."""

    def masked_words(outputs: Any) -> Any:
        decoded = outputs[-1]
        return _SOFTMAX()(decoded, whole(WORDS, *decoded.shape[:2])).mean()

    def masked_words_and_next_sentence(outputs: Any) -> Any:
        following = outputs[-2]
        return masked_words(outputs) + _SOFTMAX()(following, whole(2, following.shape[0])).mean()

    def inputs() -> list:
        masked = mx.nd.array([[1, 4, 7], [0, 3, 9]] * (batch // 2))
        return [words(batch, 16), *([whole(2, batch, 16)] if sentences else []), lengths(batch), masked]

    sentences = batch == CLASSIFIED
    loss = masked_words_and_next_sentence if sentences else masked_words
    return Case(name, "bert", partial(pretrained_not, name, dropout=0), inputs, loss, init=WEIGHTS)


def classifier() -> Case:
    def make() -> gluon.Block:
        net = pretrained_not("bert_12_768_12", dropout=0, use_decoder=False, use_classifier=False)
        return nlp.model.BERTClassifier(net, num_classes=3, dropout=0)

    def softmax_cross_entropy(scores: Any) -> Any:
        return _SOFTMAX()(scores, whole(3, CLASSIFIED))

    def inputs() -> list:
        return [words(CLASSIFIED, 16), whole(2, CLASSIFIED, 16), lengths(CLASSIFIED)]

    return Case("BERTClassifier", "bert", make, inputs, softmax_cross_entropy, init=WEIGHTS)


def next_word(outputs: Any) -> Any:
    decoded = outputs[0]
    return _SOFTMAX()(decoded, whole(WORDS, *decoded.shape[:2])).mean()


def language_model(name: str) -> Case:
    options = {"dropout": 0, "hparam_allow_override": True}
    if name.startswith("awd"):
        options.update(weight_drop=0, drop_h=0, drop_i=0, drop_e=0)
    return Case(name, "language model", partial(pretrained_not, name, **options), lambda: [words(8, 2)], next_word)


def translation(units: int = 512) -> Case:
    def make() -> gluon.Block:
        encoder, decoder, one_step = nlp.model.transformer.get_transformer_encoder_decoder(
            num_layers=2, num_heads=8, units=units, hidden_size=2048, dropout=0, max_src_length=32, max_tgt_length=32
        )
        return nlp.model.translation.NMTModel(
            vocabulary(), vocabulary(), encoder, decoder, one_step, embed_size=units, embed_dropout=0
        )

    def next_word_masked(outputs: Any) -> Any:
        decoded = outputs[0]
        return nlp.loss.MaskedSoftmaxCELoss()(decoded, words(*decoded.shape[:2]), mx.nd.array([12, 9]))

    def inputs() -> list:
        return [words(2, 16), words(2, 12), lengths(), mx.nd.array([12, 9])]

    return Case("transformer_en_de_512", "translation", make, inputs, next_word_masked)


def part(name: str, make: Callable[[], Any], draw: Callable[[], Any], times: int = 1) -> Case:
    return Case(name, "gluonnlp part", make, lambda: [draw() for _ in range(times)])


def elmo(name: str) -> Case:
    # Without a mask: it is broadcast by `*`, which a Symbol cannot.
    return Case(name, "language model", lambda: Begun(pretrained_not(name)), lambda: [whole(250, 2, 6, 50) + 1])


class Begun(gluon.Block):
    """A bidirectional language model from fresh states; its last states are dropped."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x, self.model.begin_state(mx.nd.zeros, batch_size=2))[0]


def parts() -> dict[str, Callable[[], Case]]:
    m, cell = nlp.model, {"units": 16, "hidden_size": 32}
    sequence, rows, steps = partial(uniform, 2, 6, 16), partial(uniform, 4, 16), partial(uniform, 6, 2, 16)
    stack = {**cell, "num_layers": 2, "num_heads": 4, "max_length": 8}
    clipped = partial(m.LSTMPCellWithClip, 32, 16, input_size=16, cell_clip=3, projection_clip=3)
    language_model = partial(m.BiLMEncoder, "lstmpc", 2, 16, 32, proj_size=16, cell_clip=3, proj_clip=3)
    made: dict[str, tuple] = {
        "MultiHeadAttentionCell": (
            *(lambda: m.MultiHeadAttentionCell(m.DotProductAttentionCell(scaled=True), 16, 16, 16, 4), sequence, 2),
        ),
        "MLPAttentionCell": (lambda: m.MLPAttentionCell(16), sequence, 2),
        "MLPAttentionCell.normalized": (lambda: m.MLPAttentionCell(16, normalized=True), sequence, 2),
        "DotProductAttentionCell": (lambda: m.DotProductAttentionCell(units=16, luong_style=False), sequence, 2),
        "DotProductAttentionCell.plain": (lambda: m.DotProductAttentionCell(), sequence, 2),
        "TransformerEncoder": (lambda: m.TransformerEncoder(**stack), sequence),
        "TransformerEncoderCell": (lambda: m.TransformerEncoderCell(**cell, num_heads=4), sequence),
        "PositionwiseFFN": (lambda: m.PositionwiseFFN(**cell), sequence),
        "PositionwiseFFN.gelu": (lambda: m.PositionwiseFFN(**cell, activation="gelu"), sequence),
        "BERTEncoder": (lambda: m.BERTEncoder(**stack), steps),
        "Highway": (lambda: m.Highway(16, 2), rows),
        "ConvolutionalEncoder": (
            lambda: m.ConvolutionalEncoder(embed_size=16, output_size=16, num_highway=1),
            partial(uniform, 7, 2, 16),
        ),
        "BiLMEncoder": (lambda: Begun(language_model()), steps),
        "L2Normalization": (lambda: m.L2Normalization(), rows),
        "GELU": (lambda: m.GELU(), rows),
        "LSTMPCellWithClip": (lambda: Unrolled(clipped()), sequence),
        "ISDense": (lambda: Sampled(m.ISDense), rows),
        "NCEDense": (lambda: Sampled(m.NCEDense), rows),
    }
    return {f"nlp.{name}": partial(part, f"nlp.{name}", *both) for name, both in made.items()}


class Unrolled(gluon.HybridBlock):
    """A cell over a few steps."""

    def __init__(self, cell: Any, steps: int = 6) -> None:
        super().__init__()
        self.cell, self.steps = cell, steps

    def hybrid_forward(self, F, x: Any) -> Any:  # noqa: N803
        return self.cell.unroll(self.steps, x, layout="NTC", merge_outputs=True)[0]


class Sampled(gluon.HybridBlock):
    """A sampled softmax over fixed candidates."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.dense = kind(20, 5, 16)

    def hybrid_forward(self, F, x: Any) -> Any:  # noqa: N803
        sampled = [F.arange(5), F.ones(5) * 0.25, F.ones(4) * 0.2]
        return self.dense(x, sampled, F.arange(4) + 6)[0]


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {name: partial(bert, name) for name in BERTS}
    found.update({name: partial(bert, name, 2) for name in ROBERTAS})
    distilbert = partial(pretrained_not, "distilbert_6_768_12", dropout=0)
    inputs = lambda: [words(2, 16), lengths()]  # noqa: E731
    found["distilbert_6_768_12"] = lambda: Case("distilbert_6_768_12", "bert", distilbert, inputs, init=WEIGHTS)
    found["BERTClassifier"] = classifier
    found.update({name: partial(language_model, name) for name in LANGUAGE_MODELS})
    found["transformer_en_de_512"] = translation
    found.update({name: partial(elmo, name) for name in ELMOS})
    found["big_rnn_lm_2048_512"] = "its sampled softmax is no HybridBlock and takes row-sparse weights"
    found.update(parts())
    return found
