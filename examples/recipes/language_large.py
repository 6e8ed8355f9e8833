"""A Transformer that predicts the next word, at a batch so large that float16 needs its loss scale.

    python examples/recipes/language_large.py --dtype float16 --state /tmp/language
    python examples/recipes/language_large.py --dtype float16 --loss-scale none --state /tmp/language-none

Data: Django's manual, 640 pages of 1.5 million words (BSD licence); every tenth page is held out. The loss is the mean
over the 8,192 words of a batch, and most of the 8,000 scores of each word have a probability below 1e-4: such a score's
gradient is below 1.3e-8, and float16's smallest number is 6e-8. A step takes three seconds of one core. With
``--state`` a run that was ended goes on after its last epoch of 20 steps. Metric: perplexity of the words held out.
Chance is that of one who knows how frequent each word is.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser, warmed_up
from data import Vocabulary, chance, handbook
from mxnet import autograd, gluon
from mxnet.gluon import nn
from transformer import Layer

ROWS, LENGTH, VOCABULARY = 64, 128, 8000  # texts of a batch, words of a text
UNITS, LAYERS, STEPS_OF_AN_EPOCH = 128, 2, 20
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


class LanguageModel(gluon.HybridBlock):
    """From FP32 ids of shape (batch, LENGTH) to the scores (batch, LENGTH, vocabulary) of the word after each."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        with self.name_scope():
            self.positions = self.params.get("positions", shape=(1, LENGTH, UNITS))
            self.future = self.params.get_constant("future", np.triu(np.ones((1, LENGTH, LENGTH)), k=1))
            self.embed, self.layers = nn.Embedding(vocabulary, UNITS), nn.HybridSequential()
            for _ in range(LAYERS):
                self.layers.add(Layer(decoder=False, units=UNITS))
            self.norm, self.scores = nn.LayerNorm(in_channels=UNITS), nn.Dense(vocabulary, flatten=False)

    def hybrid_forward(self, F, ids, positions, future):  # noqa: N803
        x = F.broadcast_add(self.embed(ids), positions)
        for layer in self.layers:
            x = layer(x, future)
        return self.scores(self.norm(x))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=20, state=True).parse_args(arguments)
    pages = handbook()
    train = [page for n, page in enumerate(pages) if n % 10]
    words = Vocabulary(train, VOCABULARY)
    seen, held_out = (np.array([i for page in part for i in words.ids(page)]) for part in (train, pages[::10]))
    run = Run(options, "language_large", "perplexity", chance(seen, held_out, len(words)))
    net = LanguageModel(len(words))
    net.initialize(mx.init.Normal(0.02))
    run.convert(net)
    rate, steps = 2e-3, run.epochs * STEPS_OF_AN_EPOCH
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    run.resume(net, trainer)
    while len(run.losses) < (QUICK_STEPS if run.quick else steps):
        step = len(run.losses)
        starts = np.random.RandomState((options.seed, step)).randint(len(seen) - LENGTH, size=ROWS)
        mx.random.seed(options.seed * steps + step)  # of dropout: a run that goes on draws what one at a stretch does
        trainer.set_learning_rate(warmed_up(rate, step, steps))
        x, y = texts(seen, starts)
        with autograd.record():
            loss = cross_entropy(net(x), y).mean()
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss)
        if len(run.losses) % STEPS_OF_AN_EPOCH == 0:
            print(f"step {step + 1} of {steps}: loss {np.mean(run.losses[-STEPS_OF_AN_EPOCH:]):.4f}", flush=True)
            run.save(net, trainer)

    starts = np.arange(0, len(held_out) - LENGTH, LENGTH)
    batches = np.array_split(starts, math.ceil(len(starts) / ROWS))[: 1 if run.quick else None]
    losses = [cross_entropy(net(x), y).asnumpy() for x, y in (texts(held_out, part) for part in batches)]
    return run.finish(math.exp(np.concatenate(losses).mean()))


def texts(ids: np.ndarray, starts: np.ndarray) -> list[mx.nd.NDArray]:
    """Return the words that begin at ``starts`` and the words after them, FP32 of shape (starts, LENGTH)."""
    return [mx.nd.array(ids[starts[:, None] + np.arange(first, first + LENGTH)]) for first in (0, 1)]


if __name__ == "__main__":
    main()
