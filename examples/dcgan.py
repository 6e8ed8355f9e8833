"""Train a small DCGAN on scikit-learn's digits in float16, with two trainers that scale independently.

    python examples/dcgan.py --output dcgan

The generator's and the discriminator's gradients have different ranges, so each has its own
``mxmp.Trainer`` with its own loss scale. Written: ``scales.png``, both scales over time with the
skipped steps, and ``digits.png``, a grid of generated digits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

import mxmp

NOISE = 32


def main(arguments: list[str] | None = None) -> dict[str, mxmp.Trainer]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32, help="channels of the widest layer's half")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--growth-interval", type=int, default=50, help="clean steps before a scale doubles")
    parser.add_argument("--policy", default="float16", help="float16, bfloat16 or a policy string")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("dcgan"), help="folder of the pictures")
    args = parser.parse_args(arguments)
    mx.random.seed(args.seed)
    np.random.seed(args.seed)

    generator, discriminator = make_generator(args.width), make_discriminator(args.width)
    trainers = {}
    for name, net in (("generator", generator), ("discriminator", discriminator)):
        net.initialize(mx.init.Normal(0.05))
        mxmp.convert(net, args.policy)
        scale = mxmp.DynamicLossScaler(growth_interval=args.growth_interval)
        options = {"learning_rate": args.lr, "beta1": 0.5}
        trainers[name] = mxmp.Trainer(net.collect_params(), "adam", options, loss_scale=scale)
    steps = train(generator, discriminator, trainers, args)

    args.output.mkdir(parents=True, exist_ok=True)
    plot_scales(trainers, steps, args.output / "scales.png")
    plot_digits(generator, args.output / "digits.png")
    print(f"pictures are in {args.output}")
    return trainers


def make_generator(width: int) -> nn.HybridSequential:
    """From noise of shape (batch, NOISE, 1, 1) to pictures of shape (batch, 1, 8, 8) in (-1, 1)."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2DTranspose(2 * width, 4, use_bias=False),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.Conv2DTranspose(width, 4, strides=2, padding=1, use_bias=False),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.Conv2D(1, 3, padding=1),
        nn.Activation("tanh"),
    )
    return net


def make_discriminator(width: int) -> nn.HybridSequential:
    """From pictures to one number each: above 0 means that it takes it for a real one."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(width, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2D(2 * width, 4, strides=2, padding=1, use_bias=False),
        nn.BatchNorm(),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Dense(1),
    )
    return net


def train(generator: nn.Block, discriminator: nn.Block, trainers: dict, args: argparse.Namespace) -> int:
    """Returns the number of steps."""
    pictures = mx.nd.array(load_digits().images[:, None] / 8 - 1)
    loader = gluon.data.DataLoader(pictures, args.batch, shuffle=True, last_batch="discard")
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    real, fake = mx.nd.ones((args.batch,)), mx.nd.zeros((args.batch,))
    start = time.time()
    for epoch in range(args.epochs):
        losses = np.zeros(2)
        for batch in loader:
            noise = mx.nd.random.normal(shape=(args.batch, NOISE, 1, 1))
            made = generator(noise)
            with autograd.record():
                # Of 0.9 instead of 1 for real pictures: a discriminator that is never sure teaches more.
                of_real = loss_fn(discriminator(batch), real * 0.9)
                of_fake = loss_fn(discriminator(made), fake)
            trainers["discriminator"].backward([of_real, of_fake])
            trainers["discriminator"].step(args.batch)

            with autograd.record():
                fooled = loss_fn(discriminator(generator(noise)), real)
            trainers["generator"].backward(fooled)
            trainers["generator"].step(args.batch)
            losses += (of_real + of_fake).mean().asscalar(), fooled.mean().asscalar()
        scales = ", ".join(f"{n} {t.loss_scale:g} ({t.skipped_steps} skipped)" for n, t in trainers.items())
        losses /= len(loader)
        print(f"epoch {epoch + 1:3}: loss D {losses[0]:.3f} G {losses[1]:.3f}; loss scale {scales}", flush=True)
    print(f"{time.time() - start:.0f} seconds")
    return args.epochs * len(loader)


def plot_scales(trainers: dict[str, mxmp.Trainer], steps: int, path: Path) -> None:
    """Both loss scales over the steps, with a cross where a step was skipped."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, trainer in trainers.items():
        history = trainer.scale_history
        scales = [*(e.loss_scale for e in history), trainer.loss_scale]
        (line,) = axes.step([*(e.step for e in history), steps + 1], scales, where="post", label=name)
        skips = [e for e in history if e.skipped]
        axes.plot([e.step for e in skips], [e.loss_scale for e in skips], "x", color=line.get_color())
    axes.set(xlabel="step", ylabel="loss scale", title="Two trainers, two loss scales (x: a skipped step)")
    axes.set_yscale("log", base=2)
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def plot_digits(generator: nn.Block, path: Path, rows: int = 6) -> None:
    made = generator(mx.nd.random.normal(shape=(rows * rows, NOISE, 1, 1))).asnumpy()
    framed = np.pad(made[:, 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    grid = framed.reshape(rows, rows, 10, 10).transpose(0, 2, 1, 3).reshape(rows * 10, rows * 10)
    plt.imsave(path, np.kron(grid, np.ones((8, 8))), cmap="gray")


if __name__ == "__main__":
    main()
