"""BERT (Devlin et al., 2019), GluonNLP's, small: pre-training and fine-tuning.

    python examples/recipes/bert.py pretraining --dtype float16        # or finetuning

Pre-training hides words and tells whether the second part follows the first. Alone: 3,800 sentences of the manual of
the Python language and the ones after them (PSF licence); metric: perplexity of the hidden words of every tenth, which
is held out; chance is that of one who knows how frequent each word is. Before fine-tuning: 9,600 sentences on films
(vaderSentiment 0.5 on PyPI, MIT) and their second halves. Fine-tuning tells whether the film was liked, from the mean
of the words' states (from the first word's alone so small a model learns nothing for hundreds of steps, in any dtype);
metric: accuracy on every tenth, held out; chance is 50 %.
"""

from __future__ import annotations

import math
from typing import Callable

import gluonnlp as nlp
import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from data import chance, prose, reviews, words
from mxnet import autograd, gluon
from pairs import BATCH, LENGTH, VOCABULARY, columns, masked, numbered, parts, whole

UNITS = 64
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=8)
    options.add_argument("task", choices=("pretraining", "finetuning"))
    options = options.parse_args(arguments)
    if options.task == "finetuning":
        run = Run(options, "bert_finetuning", "accuracy, %", 50.0)
        net, _, held_out = finetune(run)
        return run.finish(accuracy(net, held_out))

    sentences = [sentence[: LENGTH // 2 - 2] for sentence in prose()]
    halves, train = numbered(list(zip(sentences, sentences[1:])))
    held_out = [masked(halves, n, np.random.RandomState(n)) for n in range(0, len(halves), 10)]
    seen = [i for n in train for half in halves[n] for i in half]
    hidden = np.concatenate([row[4] for row in held_out])
    run = Run(options, "bert_pretraining", "perplexity of hidden words", chance(seen, hidden, VOCABULARY))
    net = Bert(VOCABULARY)
    net.initialize(mx.init.Normal(0.05))
    run.convert(net)
    learn(run, net, lambda n: masked(halves, n, run.random), train, run.epochs)
    losses, right = [], []
    for rows in parts(held_out):
        scores, follows = net(*rows[:4])
        losses.append(cross_entropy(scores, rows[4]).mean().asscalar())
        right.append((follows.argmax(1) == rows[5]).mean().asscalar())
    return run.finish(math.exp(np.mean(losses)), next_half=round(100 * float(np.mean(right)), 2))


def finetune(run: Run) -> tuple[gluon.Block, list[tuple], list[tuple]]:
    """Return the fine-tuned net, the rows that it was trained on, and those held out."""
    rated, liked = reviews()
    texts = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in (words(r)[: LENGTH - 3] for r in rated)]
    halves, train = numbered(texts)
    bert = Bert(VOCABULARY)
    net = Liking(bert)
    net.initialize(mx.init.Normal(0.05))
    run.convert(net)
    learn(run, bert, lambda n: masked(halves, n, run.random), train, 2)
    rows = [(*whole(halves, n), liked[n]) for n in range(len(halves))]
    learn(run, net, rows.__getitem__, train, 2)
    return net, [rows[n] for n in train], rows[::10]


def accuracy(net: Callable, rows: list[tuple]) -> float:
    """In %, of a callable whose last output has the scores."""
    return 100 * np.mean([(net(*p[:4])[-1].argmax(1) == p[4]).mean().asscalar() for p in parts(rows)])


class Bert(gluon.HybridBlock):
    """GluonNLP's model with its two heads: the hidden words' scores, and two for the pair."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        with self.name_scope():
            encoder = nlp.model.BERTEncoder(
                units=UNITS, hidden_size=4 * UNITS, num_layers=2, num_heads=4, max_length=LENGTH, dropout=0.1
            )
            self.model = nlp.model.BERTModel(
                encoder, vocabulary, token_type_vocab_size=2, units=UNITS, embed_size=UNITS, use_classifier=True
            )

    def hybrid_forward(self, F, ids, types, length, places):  # noqa: N803
        _, _, pair, hidden = self.model(ids, types, length, places)
        return hidden, pair


class Liking(gluon.HybridBlock):
    """As Bert, and two scores of a film, from the mean of its words."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        with self.name_scope():
            self.bert, self.scores = bert, gluon.nn.Dense(2, in_units=UNITS)

    def hybrid_forward(self, F, ids, types, length, places):  # noqa: N803
        states, _, pair, hidden = self.bert.model(ids, types, length, places)
        states = F.SequenceMask(states, length, use_sequence_length=True, axis=1)
        return hidden, pair, self.scores(F.broadcast_div(states.sum(axis=1), length.expand_dims(1)))


def learn(run: Run, net: gluon.Block, sample, rows: list[int], epochs: int, rate: float = 2e-3) -> None:
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    steps = epochs * (len(rows) // BATCH)
    for step in range(QUICK_STEPS if run.quick else steps):
        if step % (len(rows) // BATCH) == 0:
            order = run.random.permutation(rows)
        trainer.set_learning_rate(rate * min(10 * (step + 1) / steps, 1 - step / steps))
        batch = columns([sample(n) for n in order[step * BATCH % (len(rows) - BATCH) :][:BATCH]])
        with autograd.record():
            loss = loss_of(net(*batch[:4]), *batch[4:])
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {np.mean(run.losses[-100:]):.4f}", flush=True)


def loss_of(outputs: tuple, *answers: mx.nd.NDArray) -> mx.nd.NDArray:
    """Of the hidden words, where they are among the answers, and of the pair or film."""
    return sum(map(cross_entropy, outputs[-len(answers) :], answers))


if __name__ == "__main__":
    main()
