"""A GAN that grows (Karras et al., 2018): it makes digits of 4x4 pixels first, then of 8x8.

    python examples/recipes/progressive_gan.py --dtype float16

New layers are faded in; pixels are normalised over channels, and the critic sees how much the pictures of a batch
differ, as in the paper. Two trainers, each with its own loss scale. Data: 1,797 handwritten digits (UCI's optical
recognition of handwritten digits, CC BY 4.0, in scikit-learn). Metric: the Frechet distance between 2,000 made digits
and the real ones, in the 32 features of a small classifier of digits (FP32). Chance is the distance of real digits
whose pixels were shuffled among the digits, each at its place: the right pixels, but no strokes.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import Run, parser, predictions
from mxnet import autograd, gluon
from mxnet.gluon import nn
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

NOISE, CHANNELS, BATCH, SIDES = 24, (64, 32), 32, (4, 8)


class Block(gluon.HybridBlock):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        with self.name_scope():
            self.conv = nn.Conv2D(outputs, 3, padding=1, in_channels=inputs)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = F.LeakyReLU(self.conv(x), slope=0.2)
        return F.broadcast_div(x, F.sqrt(F.mean(F.square(x), axis=1, keepdims=True) + 1e-6))


class Generator(gluon.HybridBlock):
    """From noise (batch, NOISE) to pictures (batch, 1, side, side); ``fade`` (1,) is how much the new layers count."""

    def __init__(self, grown: bool, **shared) -> None:
        super().__init__(**shared)
        self.grown = grown
        with self.name_scope():
            self.first = nn.Dense(CHANNELS[0] * 16, in_units=NOISE)
            self.block, self.picture = Block(CHANNELS[0], CHANNELS[0]), nn.Conv2D(1, 1, in_channels=CHANNELS[0])
            if grown:
                self.new_block, self.new_picture = Block(*CHANNELS), nn.Conv2D(1, 1, in_channels=CHANNELS[1])

    def hybrid_forward(self, F, noise, fade):  # noqa: N803
        x = self.block(self.first(noise).reshape((0, -1, 4, 4)))
        if not self.grown:
            return F.tanh(F.broadcast_mul(self.picture(x), fade))  # by 1
        x = F.UpSampling(x, scale=2, sample_type="nearest")
        new, old = self.new_picture(self.new_block(x)), self.picture(x)
        return F.tanh(F.broadcast_mul(new, fade) + F.broadcast_mul(old, 1 - fade))


class Critic(gluon.HybridBlock):
    """From pictures to one number each: above 0 means that it takes it for a real one."""

    def __init__(self, grown: bool, **shared) -> None:
        super().__init__(**shared)
        self.grown = grown
        with self.name_scope():
            self.read = nn.Conv2D(CHANNELS[0], 1, in_channels=1)
            self.conv = nn.Conv2D(CHANNELS[0], 3, padding=1, in_channels=CHANNELS[0] + 1)
            self.hidden, self.out = nn.Dense(64, in_units=CHANNELS[0] * 16), nn.Dense(1, in_units=64)
            self.dropout = nn.Dropout(0.3)
            if grown:
                self.new_read = nn.Conv2D(CHANNELS[1], 1, in_channels=1)
                self.new_conv = nn.Conv2D(CHANNELS[0], 3, padding=1, in_channels=CHANNELS[1])

    def hybrid_forward(self, F, picture, fade):  # noqa: N803
        def halved(y):
            return F.Pooling(y, kernel=(2, 2), stride=(2, 2), pool_type="avg")

        x = F.LeakyReLU(self.read(halved(picture) if self.grown else picture), slope=0.2)
        if self.grown:
            new = F.LeakyReLU(self.new_read(picture), slope=0.2)
            new = halved(F.LeakyReLU(self.new_conv(new), slope=0.2))
            x = F.broadcast_mul(new, fade) + F.broadcast_mul(x, 1 - fade)
        else:
            x = F.broadcast_mul(x, fade)
        off = F.broadcast_sub(x, F.mean(x, axis=0, keepdims=True))
        spread = F.mean(F.sqrt(F.mean(F.square(off), axis=0, keepdims=True) + 1e-6), axis=1, keepdims=True)
        x = F.concat(x, F.broadcast_like(spread, F.slice_axis(x, axis=1, begin=0, end=1)), dim=1)
        x = F.LeakyReLU(self.hidden(self.dropout(F.LeakyReLU(self.conv(x), slope=0.2))), slope=0.2)
        return self.out(x)


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=8).parse_args(arguments)  # of each stage
    real, labels = load_digits(return_X_y=True)
    real = (real / 8 - 1).astype("float32")
    judge = MLPClassifier((32,), alpha=1, max_iter=500, tol=1e-3, random_state=0).fit(real, labels)
    fixed = np.random.RandomState(0)
    chance = distance(judge, np.stack([fixed.permutation(pixel) for pixel in real.T], axis=1), real)
    run = Run(options, "progressive_gan", "Frechet distance", round(chance, 2))

    real, nets = real.reshape(-1, 1, 8, 8), ()
    for side in SIDES:
        # Grown networks: the layers so far are shared, those that are new begin.
        shared = [{"prefix": net.prefix, "params": net.collect_params()} for net in nets] or [{}, {}]
        nets = [kind(side > SIDES[0], **known) for kind, known in zip((Generator, Critic), shared)]
        for net, known in zip(nets, shared):
            for name, parameter in net.collect_params().items():
                if name not in known.get("params", {}):
                    parameter.initialize(mx.init.Normal(0.1))
        train(run, *nets, real.reshape(-1, 1, side, 8 // side, side, 8 // side).mean((3, 5)), side > SIDES[0])
    noise = mx.nd.random.normal(shape=(2000, NOISE))
    made = predictions(lambda z: nets[0](z, mx.nd.ones(1)), noise.asnumpy(), size=200)
    return run.finish(distance(judge, made.reshape(-1, 64), real.reshape(-1, 64)))


def train(run: Run, generator: Generator, critic: Critic, pictures: np.ndarray, fades: bool) -> None:
    trainers = []
    for net in (generator, critic):
        run.convert(net)
        trainers.append(run.trainer(net.collect_params(), "adam", {"learning_rate": 1e-3, "beta1": 0.5}))
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    ones, steps = mx.nd.ones(BATCH), run.epochs * (len(pictures) // BATCH)
    for step, (batch,) in enumerate(run.batches(pictures, size=BATCH), 1):
        fade = mx.nd.full((1,), min(1, 2 * step / steps) if fades else 1)
        noise = mx.nd.random.normal(shape=(BATCH, NOISE))
        made = generator(noise, fade)
        with autograd.record():
            judged = loss_fn(critic(batch, fade), 0.9 * ones) + loss_fn(critic(made, fade), 0 * ones)
        trainers[1].backward(judged)
        trainers[1].step(BATCH)
        with autograd.record():
            fooled = loss_fn(critic(generator(noise, fade), fade), ones)
        trainers[0].backward(fooled)
        trainers[0].step(BATCH)
        run.log(fooled)


def distance(judge: MLPClassifier, made: np.ndarray, real: np.ndarray) -> float:
    """Frechet distance of the features' means and covariances (Heusel et al., 2017)."""
    made, real = (np.maximum(x @ judge.coefs_[0] + judge.intercepts_[0], 0).astype("float64") for x in (made, real))
    ours, theirs = np.cov(made.T), np.cov(real.T)
    return float(((made.mean(0) - real.mean(0)) ** 2).sum() + np.trace(ours + theirs - 2 * sqrtm(ours @ theirs).real))


if __name__ == "__main__":
    main()
