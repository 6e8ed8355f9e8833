"""The parts that the three translators share: messages, training loop, decoding and BLEU. Not a recipe.

Data: 5,900 short messages of web applications, by people from English into French (BSD and MIT licences, see data.py);
300 are held out, and no English message is in both parts. Metric: BLEU of the held-out messages, decoded greedily.
Chance is that of a network that copies the English.
"""

from __future__ import annotations

import math
from collections import Counter

import mxnet as mx
import numpy as np
from common import Run, parser, warmed_up
from data import BEGIN, END, PAD, Vocabulary, translations
from mxnet import autograd, gluon

LENGTH = 12  # words of a message, with its end
BATCH, HELD_OUT, VOCABULARY = 64, 300, 2000


def translate(doc: str, family: str, make_net, arguments: list[str] | None, epochs: int = 20, rate: float = 2e-3):
    """Train ``make_net(source words, target words)`` and return the result of the run.

    The net takes FP32 ids of shapes (batch, LENGTH), a message and the words of its translation so far, and returns
    the scores of shape (batch, LENGTH, target words) of the word after each.
    """
    run_options = parser(doc, epochs).parse_args(arguments)
    pairs = translations(longest=LENGTH - 2)
    np.random.RandomState(0).shuffle(pairs)
    held_out, train = pairs[:HELD_OUT], pairs[HELD_OUT:]
    run = Run(run_options, family, "BLEU", round(bleu([s for s, _ in held_out], [t for _, t in held_out]), 2))
    english = Vocabulary([source for source, _ in train], VOCABULARY, least=2)
    french = Vocabulary([target for _, target in train], VOCABULARY, least=2)
    source = english.padded((s for s, _ in train), LENGTH)
    target = french.padded((["<s>", *t, "</s>"] for _, t in train), LENGTH + 1)

    net = make_net(len(english), len(french))
    net.initialize(mx.init.Xavier())
    run.convert(net)
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate, "beta2": 0.98})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    steps = run.epochs * (len(train) // BATCH)
    for x, y in run.batches(source, target, size=BATCH):
        trainer.set_learning_rate(warmed_up(rate, len(run.losses), steps))
        with autograd.record():
            label = y[:, 1:]
            weight = (label != PAD).expand_dims(2)
            loss = loss_fn(net(x, y[:, :-1]), label, weight) * LENGTH / weight.sum() * BATCH
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)

    held_out = held_out[:8] if run.quick else held_out
    made = decode(net, english.padded((s for s, _ in held_out), LENGTH))
    made = [[french.tokens[int(i)] for i in row] for row in made]
    for (before, wanted), after in list(zip(held_out, made))[:5]:
        print(" ".join(before), "->", " ".join(after), "| wanted:", " ".join(wanted))
    return run.finish(bleu(made, [t for _, t in held_out]), loss=run.losses[-1])


def decode(net, source: np.ndarray) -> list[list[int]]:
    """Return the ids of the likeliest words, one after the other, up to the end of the message."""
    source = mx.nd.array(source)
    made = np.full((len(source), LENGTH + 1), PAD, "float32")
    made[:, 0] = BEGIN
    for n in range(LENGTH):
        scores = net(source, mx.nd.array(made[:, :-1]))
        made[:, n + 1] = scores[:, n].argmax(axis=1).asnumpy()
    return [[i for i in row[: row.index(END)] if i != PAD] for row in [[*r[1:].tolist(), END] for r in made]]


def bleu(made: list[list[str]], wanted: list[list[str]]) -> float:
    """Return the corpus BLEU of up to four words (Papineni et al., 2002), with 1 added to counts of two and more."""
    logs = []
    for n in range(1, 5):
        right = total = 0
        for a, b in zip(made, wanted):
            ours, theirs = (Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (a, b))
            right += sum((ours & theirs).values())
            total += sum(ours.values())
        logs.append(math.log(max(right + (n > 1), 1e-9) / max(total + (n > 1), 1)))
    lengths = sum(map(len, made)), sum(map(len, wanted))
    return 100 * math.exp(sum(logs) / 4 + min(0, 1 - lengths[1] / max(lengths[0], 1)))
