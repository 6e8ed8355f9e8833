"""WaveNet (van den Oord et al., 2016): the next sample of recorded speech, from those before.

    python examples/recipes/wavenet.py --dtype float16

Gated convolutions whose dilation doubles from layer to layer, over samples of 8 bits (mu-law), as in the paper. Data:
recordings of 60 words (numbers, days, months) by one speaker, from Debian's asterisk-core-sounds-en-wav (8 kHz,
CC BY-SA 3.0); every sixth word is held out. Metric: bits per sample of the held-out words. Chance is that of one who
knows how frequent each of the 256 values is.
"""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser, predictions
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sound import recordings

CHANNELS, SKIP, DILATIONS, LENGTH, BATCH, STEPS_OF_AN_EPOCH = 32, 64, (1, 2, 4, 8, 16, 32, 64) * 2, 768, 4, 50
PAST = sum(DILATIONS)  # samples that a prediction can depend on


class Residual(gluon.HybridBlock):
    def __init__(self, dilation: int, last: bool) -> None:
        super().__init__()
        self.dilation = dilation
        with self.name_scope():
            self.conv = nn.Conv2D(2 * CHANNELS, (1, 2), dilation=(1, dilation), in_channels=CHANNELS)
            self.residual = nn.Conv2D(CHANNELS, 1, in_channels=CHANNELS) if not last else None
            self.skip = nn.Conv2D(SKIP, 1, in_channels=CHANNELS)

    def hybrid_forward(self, F, x):  # noqa: N803
        """Shorter by the dilation: what would need samples from before the first falls off."""
        value, gate = F.split(self.conv(x), num_outputs=2, axis=1)
        gated = F.tanh(value) * F.sigmoid(gate)
        if self.residual is not None:
            x = F.slice_axis(x, axis=3, begin=self.dilation, end=None) + self.residual(gated)
        return x, self.skip(gated)


class WaveNet(gluon.HybridBlock):
    """From samples (batch, length) in 0 .. 255 to scores (batch, length - PAST, 256) of the sample after each."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(256, CHANNELS)
            self.layers = nn.HybridSequential()
            for n, dilation in enumerate(DILATIONS, 1):
                self.layers.add(Residual(dilation, last=n == len(DILATIONS)))
            self.head = nn.HybridSequential()
            self.head.add(nn.Activation("relu"), nn.Conv2D(128, 1), nn.Activation("relu"), nn.Conv2D(256, 1))

    def hybrid_forward(self, F, samples):  # noqa: N803
        x = self.embed(samples).transpose((0, 2, 1)).expand_dims(2)  # (batch, CHANNELS, 1, length)
        total, left = 0, PAST
        for layer, dilation in zip(self.layers, DILATIONS):
            x, skip = layer(x)
            left -= dilation
            total = total + F.slice_axis(skip, axis=3, begin=left, end=None)
        return self.head(total).reshape((0, 0, -1)).transpose((0, 2, 1))


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=5).parse_args(arguments)
    spoken = [mu_law(sound) for _, sound in sorted(recordings().items())]
    held_out = [word for n, word in enumerate(spoken) if n % 6 == 0]
    train = [word for n, word in enumerate(spoken) if n % 6]
    counts = np.bincount(np.concatenate(train).astype(int), minlength=256) + 1
    frequent = -np.log2(counts / counts.sum())
    windows = np.concatenate([cut(word, PAST + LENGTH + 1) for word in held_out])
    chance = frequent[windows[:, PAST + 1 :].astype(int)].mean()
    run = Run(options, "wavenet", "bits per sample", round(float(chance), 3))

    net = WaveNet()
    net.initialize(mx.init.Xavier())
    run.convert(net)
    rate = 3e-3
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    steps = run.epochs * STEPS_OF_AN_EPOCH
    for step in range(QUICK_STEPS if run.quick else steps):
        trainer.set_learning_rate(rate * min(1, 1.5 * (1 - step / steps)))
        x = mx.nd.array(np.stack([window(run.random, train) for _ in range(BATCH)]))
        with autograd.record():
            loss = loss_fn(net(x[:, :-1]), x[:, PAST + 1 :])
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {np.mean(run.losses[-50:]):.4f}", flush=True)
    losses = predictions(
        lambda x: loss_fn(net(x[:, :-1]), x[:, PAST + 1 :]), windows[: 2 if run.quick else None], size=8
    )
    return run.finish(losses.mean() / math.log(2))


def mu_law(sound: np.ndarray) -> np.ndarray:
    """Samples in (-1, 1) as FP32 integers from 0 to 255, finer near silence."""
    loud = sound / np.abs(sound).max()
    return np.round((np.sign(loud) * np.log1p(255 * np.abs(loud)) / np.log(256) + 1) * 127.5).astype("float32")


def window(random: np.random.RandomState, words: list[np.ndarray]) -> np.ndarray:
    word = words[random.randint(len(words))]
    start = random.randint(max(len(word) - PAST - LENGTH, 1))
    return np.resize(word[start : start + PAST + LENGTH + 1], PAST + LENGTH + 1)


def cut(word: np.ndarray, length: int) -> np.ndarray:
    """Windows of shape (count, length) that predict each sample once at most."""
    starts = range(0, len(word) - length + 1, length - PAST - 1)
    return np.array([word[start : start + length] for start in starts], "float32").reshape(-1, length)


if __name__ == "__main__":
    main()
