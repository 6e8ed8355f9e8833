"""A multiplicative LSTM over letters whose features tell whether a film was liked (Radford et al., 2017).

    python examples/recipes/sentiment.py --dtype float16

The network learns to predict the next letter, nothing else. Its states over a sentence are then given to a logistic
regression: their mean, largest and smallest. Data: 9,600 sentences on films, rated by people (vaderSentiment 0.5 on
PyPI, MIT licence), every tenth held out. Metric: accuracy of liked or not; the bits per letter stand beside it. Chance
is 50 %.
"""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
from common import Run, parser, predictions
from data import reviews
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.linear_model import LogisticRegression

LETTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789'.,-!?"
BATCH, LENGTH, UNITS, EMBEDDED = 64, 64, 128, 32


class MultiplicativeLSTM(gluon.HybridBlock):
    """mLSTM (Krause et al., 2016): what a letter does to the state depends on the state, by a product of both."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(len(LETTERS), EMBEDDED)
            # The letters' part of the gates and of the product, for all of them at once.
            self.of_letter = nn.Dense(5 * UNITS, flatten=False, in_units=EMBEDDED)
            self.product = nn.Dense(UNITS, use_bias=False, in_units=UNITS)
            self.of_product = nn.Dense(4 * UNITS, use_bias=False, in_units=UNITS)
            self.scores = nn.Dense(len(LETTERS), flatten=False, in_units=UNITS)

    def hybrid_forward(self, F, letters):  # noqa: N803  # (batch, LENGTH) -> scores (batch, LENGTH, letters), states (…, UNITS)
        given = F.SliceChannel(self.of_letter(self.embed(letters)), num_outputs=LENGTH, axis=1, squeeze_axis=True)
        h = c = F.zeros_like(F.slice_axis(given[0], axis=1, begin=0, end=UNITS))
        states = []
        for x in given:
            m = F.slice_axis(x, axis=1, begin=4 * UNITS, end=None) * self.product(h)
            gates = F.slice_axis(x, axis=1, begin=0, end=4 * UNITS) + self.of_product(m)
            i, f, o, u = F.split(gates, num_outputs=4, axis=1)
            c = F.sigmoid(f + 1) * c + F.sigmoid(i) * F.tanh(u)
            h = F.sigmoid(o) * F.tanh(c)
            states.append(h)
        states = F.stack(*states, axis=1)
        return self.scores(states), states


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=4).parse_args(arguments)
    run = Run(options, "sentiment", "accuracy, %", 50.0)
    texts, liked = (part[:640] if run.quick else part for part in reviews())
    ids = np.array([letters(text) for text in texts], "float32")
    held_out = np.arange(len(texts)) % 10 == 0

    net = MultiplicativeLSTM()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    rate = 4e-3
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    steps = run.epochs * (int((~held_out).sum()) // BATCH)
    for (x,) in run.batches(ids[~held_out], size=BATCH):
        trainer.set_learning_rate(rate * min(1, 1.5 * (1 - len(run.losses) / steps)))
        with autograd.record():
            loss = loss_fn(net(x[:, :-1])[0], x[:, 1:])
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)

    losses = predictions(lambda x: loss_fn(net(x[:, :-1])[0], x[:, 1:]), ids[held_out])
    features = predictions(lambda x: summary(net(x[:, 1:])[1]), ids)
    judge = LogisticRegression(C=3, max_iter=2000).fit(features[~held_out], liked[~held_out])
    accuracy = judge.score(features[held_out], liked[held_out])
    return run.finish(100 * accuracy, bits_per_letter=round(float(losses.mean() / math.log(2)), 4))


def summary(states: mx.nd.NDArray) -> mx.nd.NDArray:
    """Mean, largest and smallest value of each feature over a sentence."""
    return mx.nd.concat(states.mean(axis=1), states.max(axis=1), states.min(axis=1), dim=1)


def letters(text: str) -> list[int]:
    """LENGTH + 1 ids: the text in lower case after a line's end, cut off or filled up with line ends."""
    known = ["\n", *(letter for letter in text.lower() if letter in LETTERS)][: LENGTH + 1]
    return [LETTERS.index(letter) for letter in known] + [0] * (LENGTH + 1 - len(known))


if __name__ == "__main__":
    main()
