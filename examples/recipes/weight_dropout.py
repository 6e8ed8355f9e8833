"""A language model whose recurrent weights have dropout, as AWD-LSTM's, on the manual of the Python language.

    python examples/recipes/weight_dropout.py --dtype float16

Data: 75,000 words that ship with Python (PSF licence), as in ``lstm_gluon.py``. Each step drops half of the LSTMs'
hidden-to-hidden weights (GluonNLP's ``WeightDropParameter``, which overrides ``Parameter.data``: mxmp keeps such a
Parameter in FP32). Input and output share one embedding. As AWD-LSTM does, it predicts with the average of the weights
over the last part of the run: ``mxmp.master_weights`` has them in FP32. Metric: perplexity of the held-out words.
Chance is that of one who knows how frequent each word is.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from data import chance
from gluonnlp.model.utils import apply_weight_drop
from lstm_gluon import BATCH, STEPS, VOCABULARY, parts, perplexity, texts
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import mxmp

HIDDEN, EPOCHS, RATE = 128, 5, 3e-3
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


class LanguageModel(gluon.HybridBlock):
    """Two LSTMs with weight dropout between an embedding and the same embedding, transposed."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(VOCABULARY, HIDDEN)
            self.lstms = [rnn.LSTM(HIDDEN, input_size=HIDDEN) for _ in range(2)]
            for lstm in self.lstms:
                self.register_child(lstm)
                apply_weight_drop(lstm, ".*h2h_weight", 0.5)
            self.dropout = nn.Dropout(0.2, axes=(0,))  # one mask for all steps
            self.scores = nn.Dense(VOCABULARY, flatten=False, in_units=HIDDEN, params=self.embed.params)

    def hybrid_forward(self, F, words, state):  # noqa: N803  # (steps, batch) -> (steps, batch, vocabulary), 4 states
        x, states = self.dropout(self.embed(words)), []
        for lstm, first in zip(self.lstms, (state[:2], state[2:])):
            x, after = lstm(x, first)
            x, states = self.dropout(x), [*states, *after]
        return (self.scores(x), *states)


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, EPOCHS).parse_args(arguments)
    text, held_out = texts()
    run = Run(options, "weight_dropout", "perplexity", chance(text.ravel(), held_out.ravel(), VOCABULARY))
    net = train(run, text)
    return run.finish(perplexity(net, held_out, begin_state()))


def train(run: Run, text: np.ndarray) -> LanguageModel:
    """Return the trained net, with the mean of the weights that the steps of the last two fifths have left."""
    net = LanguageModel()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    steps = run.epochs * len(list(parts(text)))
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": RATE})
    average: dict[str, mx.nd.NDArray] = {}
    averaged = 0
    for epoch in range(run.epochs):
        state = begin_state()
        for x, y in parts(text):
            if run.quick and len(run.losses) >= QUICK_STEPS:
                break
            with autograd.record():
                scores, *state = net(x, [s.detach() for s in state])
                loss = loss_fn(scores, y)
            trainer.backward(loss)
            trainer.step(STEPS * BATCH / 2)
            run.log(loss)
            if run.quick or len(run.losses) > 0.6 * steps:
                averaged += 1
                for name, weight in mxmp.master_weights(net).items():
                    before = average.setdefault(name, weight)
                    average[name] = before + (weight - before) / averaged
        print(f"epoch {epoch + 1}: loss {np.mean(run.losses[-len(text) // STEPS :]):.4f}", flush=True)
    mxmp.set_master_weights(net, average)
    return net


def begin_state() -> list[mx.nd.NDArray]:
    return [mx.nd.zeros((1, BATCH, HIDDEN)) for _ in range(4)]


if __name__ == "__main__":
    main()
