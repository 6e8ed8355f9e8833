"""A synthesizer in the manner of Tacotron 2 (Shen et al., 2018): from letters to the spectrogram of speech.

    python examples/recipes/tacotron.py --dtype float16

An LSTM asks a location-sensitive attention, which letters to speak, and makes ``GROUP`` frames at a time from the last
frame before; as in Tachibana et al. (2017) the attention is led along the diagonal. Data: pairs of 60 recorded words
(numbers, days, months) by one speaker, from Debian's asterisk-core-sounds-en-wav (8 kHz, CC BY-SA 3.0); 40 pairs are
held out, of words that occur in others. Metric: mean difference of the log-mel energies, in dB, of what it makes from
letters alone, warped in time to the recording. Chance is the mean spectrum.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import Run, parser
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from sound import recordings, spectrogram

LETTERS = "\n abcdefghijklmnopqrstuvwxyz"
BANDS, GROUP, GROUPS, LENGTH, UNITS = 24, 5, 18, 20, 64
BATCH, TRAIN, HELD_OUT = 16, 480, 40


class Tacotron(gluon.HybridBlock):
    """From letters (batch, LENGTH) and the last frame before each group (batch, GROUPS, BANDS) to frames (batch,
    GROUPS, GROUP * BANDS) and where it attended, (batch, GROUPS, LENGTH)."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(len(LETTERS), UNITS)
            self.conv = nn.Conv1D(UNITS, 5, padding=2, activation="relu", in_channels=UNITS)
            self.encoder = rnn.LSTM(UNITS // 2, layout="NTC", bidirectional=True, input_size=UNITS)
            self.before = nn.Dense(UNITS, activation="relu", flatten=False, in_units=BANDS)
            self.cell = rnn.LSTMCell(2 * UNITS, input_size=2 * UNITS)
            self.query, self.key = nn.Dense(UNITS, in_units=2 * UNITS), nn.Dense(UNITS, flatten=False, in_units=UNITS)
            self.location = nn.Conv2D(8, (1, 7), padding=(0, 3), in_channels=1)
            self.place = nn.Dense(UNITS, use_bias=False, flatten=False, in_units=8)
            self.energy = nn.Dense(1, flatten=False, in_units=UNITS)
            self.frames, self.drop = nn.Dense(GROUP * BANDS, in_units=3 * UNITS), nn.Dropout(0.2)

    def hybrid_forward(self, F, letters, frames):  # noqa: N803
        x = self.conv(self.embed(letters).transpose((0, 2, 1))).transpose((0, 2, 1))
        memory = self.encoder(self.drop(x))
        keys, pads = self.key(memory), (letters == 0) * -1e9
        given = F.SliceChannel(self.drop(self.before(frames)), num_outputs=GROUPS, axis=1, squeeze_axis=True)
        context = F.zeros_like(given[0])
        state = [F.concat(context, context, dim=1)] * 2
        seen = F.zeros_like(pads)
        made, attended = [], []
        for before in given:
            h, state = self.cell(F.concat(before, context, dim=1), state)
            places = self.location(seen.reshape((0, 1, 1, -1))).reshape((0, 0, -1)).transpose((0, 2, 1))
            asked = F.broadcast_add(keys + self.place(places), self.query(h).expand_dims(1))
            weights = F.softmax(self.energy(F.tanh(asked)).reshape((0, -1)) + pads)
            context = F.batch_dot(weights.expand_dims(1), memory).reshape((0, -1))
            seen = seen + weights
            made.append(self.frames(F.concat(h, context, dim=1)))
            attended.append(weights)
        return F.stack(*made, axis=1), F.stack(*attended, axis=1)


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=14).parse_args(arguments)
    texts, groups, away = pairs(TRAIN + HELD_OUT)
    befores = np.concatenate([np.zeros_like(groups[:, :1]), groups[:, :-1]], axis=1)[..., -BANDS:]
    decibels = 10 / np.log(10) * 3  # of a unit: see pairs()
    wanted = groups[TRAIN:].reshape(HELD_OUT, -1, BANDS)
    mean = np.broadcast_to(groups[:TRAIN].reshape(-1, BANDS).mean(0), wanted.shape)
    chance = decibels * np.mean([warped(a, b) for a, b in zip(mean, wanted)])
    run = Run(options, "tacotron", "log-mel difference, dB", round(float(chance), 2))

    net = Tacotron()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    rate = 3e-3
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    steps = run.epochs * (TRAIN // BATCH)
    for text, before, frames, off in run.batches(*(a[:TRAIN] for a in (texts, befores, groups, away)), size=BATCH):
        trainer.set_learning_rate(rate * min(1, 1.5 * (1 - len(run.losses) / steps)))
        with autograd.record():
            made, attended = net(text, before)
            loss = (made - frames).abs().mean(axis=(1, 2)) + (attended * off).mean(axis=(1, 2)) * LENGTH
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)

    wanted = wanted[:2] if run.quick else wanted
    texts, frames = mx.nd.array(texts[TRAIN:][: len(wanted)]), np.zeros_like(befores[TRAIN:][: len(wanted)])
    for n in range(GROUPS):
        made = net(texts, mx.nd.array(frames))[0].asnumpy()
        frames[:, n + 1 :] = made[:, n : n + 1, -BANDS:]
    made = made.reshape(wanted.shape)
    return run.finish(decibels * np.mean([warped(a, b) for a, b in zip(made, wanted)]), loss=run.losses[-1])


def pairs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Letters, spectrograms in groups of frames (about -1 to 1), and how far each letter is from the diagonal."""
    spoken, random, rows = recordings(), np.random.RandomState(0), []
    places = np.arange(LENGTH)
    while len(rows) < count:
        said = random.choice(sorted(spoken), 2)
        text = " ".join(said)
        frames = spectrogram(np.concatenate([spoken[word] for word in said]), BANDS).T / 3
        if len(text) > LENGTH or len(frames) > GROUP * GROUPS:
            continue
        steps = np.arange(GROUPS)[:, None] / (len(frames) / GROUP)
        away = 1 - np.exp(-((places / len(text) - steps) ** 2) / 0.08)
        frames = np.pad(frames, ((0, GROUP * GROUPS - len(frames)), (0, 0)), constant_values=np.log(1e-4) / 3)
        ids = [LETTERS.index(letter) for letter in text.ljust(LENGTH, "\n")]
        rows.append((ids, frames.reshape(GROUPS, -1) + 1, np.where(steps <= 1, away, 0)))
    return tuple(np.array(column, "float32") for column in zip(*rows))


def warped(made: np.ndarray, wanted: np.ndarray) -> float:
    """Mean difference per frame along the cheapest path through time."""
    costs = np.abs(made[:, None] - wanted[None]).mean(2)
    total = np.full((len(made) + 1, len(wanted) + 1), np.inf)
    total[0, 0] = 0
    for i, j in np.ndindex(*costs.shape):
        total[i + 1, j + 1] = costs[i, j] + min(total[i, j], total[i, j + 1], total[i + 1, j])
    return total[-1, -1] / len(wanted)


if __name__ == "__main__":
    main()
