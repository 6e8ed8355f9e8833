"""An LSTM that predicts the next word, in Gluon, on the manual of the Python language.

    python examples/recipes/lstm_gluon.py --dtype float16

Data: 75,000 words that ship with Python (PSF licence); the last tenth is held out. The text is read in ``BATCH``
streams, ``STEPS`` words at a time, and the LSTM's state is carried on. Metric: perplexity of the held-out words.
Chance is that of one who knows how frequent each word is.
"""

from __future__ import annotations

import math
from typing import Callable

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from data import Vocabulary, chance, prose
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

BATCH, STEPS, HIDDEN, VOCABULARY, EPOCHS = 16, 20, 128, 1500, 5
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


class LanguageModel(gluon.HybridBlock):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(vocabulary, hidden)
            self.lstm = rnn.LSTM(hidden, num_layers=2, input_size=hidden)
            self.dropout = nn.Dropout(0.2)
            self.scores = nn.Dense(vocabulary, flatten=False)

    def hybrid_forward(self, F, words, state):  # noqa: N803  # (steps, batch) -> (steps, batch, vocabulary) and state
        x, state = self.lstm(self.dropout(self.embed(words)), state)
        return (self.scores(self.dropout(x)), *state)


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, EPOCHS).parse_args(arguments)
    text, held_out = texts()
    run = Run(options, "lstm_gluon", "perplexity", chance(text.ravel(), held_out.ravel(), VOCABULARY))
    return run.finish(perplexity(train(run, text), held_out))


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the words to train on and those held out, as ``streams``."""
    words = [word for sentence in prose() for word in ["<s>", *sentence]]
    text, held_out = words[: len(words) * 9 // 10], words[len(words) * 9 // 10 :]
    vocabulary = Vocabulary([text], VOCABULARY)
    return streams(vocabulary.ids(text)), streams(vocabulary.ids(held_out))


def train(run: Run, text: np.ndarray) -> LanguageModel:
    """Return the trained net."""
    net = LanguageModel(VOCABULARY, HIDDEN)
    net.initialize(mx.init.Xavier())
    run.convert(net)
    rate, steps = 3e-3, run.epochs * (len(text) // STEPS)
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    for epoch in range(run.epochs):
        state = begin_state()
        for x, y in parts(text):
            if run.quick and len(run.losses) >= QUICK_STEPS:
                break
            trainer.set_learning_rate(rate * (1 - len(run.losses) / (steps + 1)))
            with autograd.record():
                scores, *state = net(x, [s.detach() for s in state])
                loss = loss_fn(scores, y)
            trainer.backward(loss)
            trainer.step(STEPS * BATCH / 2)
            run.log(loss)
        print(f"epoch {epoch + 1}: loss {np.mean(run.losses[-len(text) // STEPS :]):.4f}", flush=True)
    return net


def perplexity(net: Callable, text: np.ndarray, first: list[mx.nd.NDArray] | None = None) -> float:
    """Of a callable from words and a state to scores and the next state; ``first`` is the first one, all zeros."""
    state, losses = first or begin_state(), []
    for x, y in parts(text):
        scores, *state = net(x, state)
        losses.append(loss_fn(scores, y).mean().asscalar())
    return math.exp(np.mean(losses))


def begin_state() -> list[mx.nd.NDArray]:
    return [mx.nd.zeros((2, BATCH, HIDDEN)) for _ in range(2)]


def streams(ids: list[int]) -> np.ndarray:
    """FP32 of shape (words of a stream, BATCH)."""
    return np.array(ids[: len(ids) // BATCH * BATCH], "float32").reshape(BATCH, -1).T


def parts(text: np.ndarray):
    """Words and the words that follow them, each of shape (STEPS, BATCH)."""
    for start in range(0, len(text) - STEPS, STEPS):
        yield mx.nd.array(text[start : start + STEPS]), mx.nd.array(text[start + 1 : start + STEPS + 1])


if __name__ == "__main__":
    main()
