"""Speech recognition with CTC: recurrent (bidirectional GRU) and convolutional, letter by letter.

    python examples/recipes/speech.py recurrent --dtype float16

Data: recordings of 60 words (numbers, days, months) by one speaker, from Debian's asterisk-core-sounds-en-wav (8 kHz,
CC BY-SA 3.0). An utterance is one or two of them, played at other speeds and loudnesses, in noise; 400 utterances of
other word orders, speeds and noise are held out, of the same recordings. Metric: edits per letter, in percent (the
letter error rate), of the best path. Chance is that of a network that always answers "e".
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import Run, parser, predictions, warmed_up
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from sound import recordings, spectrogram

LETTERS = " abcdefghijklmnopqrstuvwxyz"  # and a blank after them
BATCH, TRAIN, HELD_OUT, FRAMES, BANDS, LONGEST = 16, 800, 400, 80, 32, 20


def recurrent() -> nn.HybridSequential:
    """Return a net from (batch, BANDS, FRAMES) to scores of (batch, FRAMES / 2, letters)."""
    net = nn.HybridSequential()
    net.add(nn.Conv1D(64, 5, strides=2, padding=2), nn.Activation("relu"))
    net.add(nn.HybridLambda(lambda F, x: F.transpose(x, (2, 0, 1))))  # noqa: N803
    net.add(rnn.GRU(64, num_layers=2, bidirectional=True, input_size=64))
    net.add(nn.Dense(len(LETTERS) + 1, flatten=False), nn.HybridLambda(lambda F, x: F.transpose(x, (1, 0, 2))))  # noqa: N803
    return net


def convolutional() -> nn.HybridSequential:
    """Return a net as ``recurrent`` does; the height is 1, for MXNet's BatchNorm fails after a Conv1D on a CPU."""
    net = nn.HybridSequential()
    net.add(nn.HybridLambda(lambda F, x: F.expand_dims(x, axis=2)))  # noqa: N803
    for strides, kernel in ((2, 7), (1, 7), (1, 7), (1, 9)):
        net.add(nn.Conv2D(96, (1, kernel), strides=(1, strides), padding=(0, kernel // 2), use_bias=False))
        net.add(nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.1))
    net.add(nn.Conv2D(len(LETTERS) + 1, 1))
    net.add(nn.HybridLambda(lambda F, x: F.transpose(x.reshape((0, 0, -1)), (0, 2, 1))))  # noqa: N803
    return net


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=24)
    options.add_argument("network", choices=("recurrent", "convolutional"))
    options = options.parse_args(arguments)
    random = np.random.RandomState(0)  # the same utterances for every seed
    train, held_out = (2 * BATCH, 8) if options.quick else (TRAIN, HELD_OUT)
    sounds, texts = utterances(random, train + held_out)
    labels = np.full((len(texts), LONGEST), -1, "float32")
    for row, text in zip(labels, texts):
        row[: len(text)] = [LETTERS.index(letter) for letter in text]
    chance = round(error_rate(["e"] * held_out, texts[train:]), 1)
    run = Run(options, f"speech_{options.network}", "letter error rate, %", chance)

    net = {"recurrent": recurrent, "convolutional": convolutional}[options.network]()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    rate = {"recurrent": 3e-3, "convolutional": 2e-3}[options.network]
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    loss_fn = gluon.loss.CTCLoss(layout="NTC", label_layout="NT")  # its blank is the last letter
    steps = run.epochs * (train // BATCH)
    for x, y in run.batches(sounds[:train], labels[:train], size=BATCH):
        trainer.set_learning_rate(warmed_up(rate, len(run.losses), steps))
        with autograd.record():
            loss = loss_fn(net(x), y)
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)

    heard = [best_path(scores) for scores in predictions(net, sounds[train:])]
    for ours, theirs in list(zip(heard, texts[train:]))[:5]:
        print(f"{ours!r} | said: {theirs!r}")
    return run.finish(error_rate(heard, texts[train:]))


def utterances(random: np.random.RandomState, count: int) -> tuple[np.ndarray, list[str]]:
    """Return spectrograms of shape (count, BANDS, FRAMES) and what was said."""
    spoken = recordings()
    vocabulary = sorted(spoken)
    sounds, texts = [], []
    while len(texts) < count:
        said = random.choice(vocabulary, random.randint(1, 3))
        sound = np.concatenate([spoken[word] for word in said])
        # Played faster or slower: the pitch changes with the speed, as with other speakers.
        places = np.arange(0, len(sound), random.uniform(0.85, 1.2))
        sound = np.interp(places, np.arange(len(sound)), sound) * random.uniform(0.5, 1.5)
        sound = sound + random.normal(0, random.uniform(0.002, 0.03), sound.shape)
        picture, text = spectrogram(sound, BANDS), " ".join(said)
        if picture.shape[1] <= FRAMES and len(text) <= LONGEST:
            sounds.append(np.pad(picture, ((0, 0), (0, FRAMES - picture.shape[1])), constant_values=picture.min()))
            texts.append(text)
    sounds = np.array(sounds, "float32")
    return (sounds - sounds.mean()) / sounds.std(), texts


def best_path(scores: np.ndarray) -> str:
    """Return the likeliest letter of each frame, repeated ones once, without blanks."""
    ids = scores.argmax(axis=1)
    kept = [i for i, before in zip(ids, [-1, *ids]) if i != before and i < len(LETTERS)]
    return "".join(LETTERS[i] for i in kept)


def error_rate(heard: list[str], said: list[str]) -> float:
    """Return insertions, deletions and substitutions (Levenshtein) per letter said, in percent."""
    edits = 0
    for ours, theirs in zip(heard, said):
        row = list(range(len(theirs) + 1))
        for i, letter in enumerate(ours, 1):
            before, row[0] = row[0], i
            for j, wanted in enumerate(theirs, 1):
                before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != wanted))
        edits += row[-1]
    return 100 * edits / sum(map(len, said))


if __name__ == "__main__":
    main()
