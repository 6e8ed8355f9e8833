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

import gluonnlp as nlp
import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from data import UNKNOWN, Vocabulary, prose, reviews, words
from mxnet import autograd, gluon

LENGTH, UNITS, BATCH, HIDDEN_WORDS, VOCABULARY = 28, 64, 32, 4, 2500
MASK, SPLIT = UNKNOWN, 3  # ids: a hidden word is an unknown one; a separator stands between the halves
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=8)
    options.add_argument("task", choices=("pretraining", "finetuning"))
    options = options.parse_args(arguments)
    if options.task == "pretraining":
        sentences = [sentence[: LENGTH // 2 - 2] for sentence in prose()]
        texts = list(zip(sentences, sentences[1:]))
    else:
        rated, liked = reviews()
        texts = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in (words(r)[: LENGTH - 3] for r in rated)]
    vocabulary = Vocabulary([half for n, text in enumerate(texts) if n % 10 for half in text], VOCABULARY)
    halves = [(vocabulary.ids(first), vocabulary.ids(second)) for first, second in texts]
    train = [n for n in range(len(texts)) if n % 10]
    held_out = [masked(halves, n, np.random.RandomState(n)) for n in range(0, len(texts), 10)]
    counts = np.bincount([i for n in train for half in halves[n] for i in half], minlength=VOCABULARY) + 1.0
    hidden = np.concatenate([row[4] for row in held_out]).astype(int)
    chance = math.exp(-np.log(counts / counts.sum())[hidden].mean())
    goals = {"pretraining": ("perplexity of hidden words", round(chance, 1)), "finetuning": ("accuracy, %", 50.0)}
    run = Run(options, f"bert_{options.task}", *goals[options.task])

    net = Bert(VOCABULARY)
    whole_net = net if options.task == "pretraining" else Liking(net)
    whole_net.initialize(mx.init.Normal(0.05))
    run.convert(whole_net)
    learn(run, net, lambda n: masked(halves, n, run.random), train, run.epochs if whole_net is net else 2)
    if options.task == "pretraining":
        losses, right = [], []
        for rows in parts(held_out):
            scores, follows = net(*rows[:4])
            losses.append(cross_entropy(scores, rows[4]).mean().asscalar())
            right.append((follows.argmax(1) == rows[5]).mean().asscalar())
        return run.finish(math.exp(np.mean(losses)), next_half=round(100 * float(np.mean(right)), 2))

    learn(run, whole_net, lambda n: (*whole(halves, n), liked[n]), train, 2)
    held_out = [(*whole(halves, n), liked[n]) for n in range(0, len(texts), 10)]
    right = [(whole_net(*rows[:4])[-1].argmax(1) == rows[4]).mean().asscalar() for rows in parts(held_out)]
    return run.finish(100 * np.mean(right))


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


def whole(halves: list, n: int, second: list | None = None) -> tuple:
    """Ids, types, length and the place 0 of a sentence, whose second half may be another's."""
    first, second = halves[n][0], halves[n][1] if second is None else second
    ids = [2, *first, SPLIT, *second, SPLIT]
    types = [0] * (len(first) + 2) + [1] * (LENGTH - len(first) - 2)
    return np.array(ids + [0] * (LENGTH - len(ids))), np.array(types), len(ids), np.zeros(HIDDEN_WORDS)


def masked(halves: list, n: int, random: np.random.RandomState) -> tuple:
    """As ``whole``, with hidden words: their places and ids, and 1 if the second half is the first one's own."""
    follows = random.rand() < 0.5
    ids, types, length, _ = whole(halves, n, None if follows else halves[random.randint(len(halves))][1])
    places = random.choice(np.flatnonzero((ids > 3) | (ids == UNKNOWN)), HIDDEN_WORDS)
    hidden = ids[places].copy()
    ids[places] = MASK
    return ids, types, length, places, hidden, float(follows)


def columns(rows: list[tuple]) -> list[mx.nd.NDArray]:
    made = [mx.nd.array(np.stack(column)) for column in zip(*rows)]
    return [*made[:3], made[3].astype("int32"), *made[4:]]


def parts(rows: list[tuple]):
    return (columns(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH))


if __name__ == "__main__":
    main()
