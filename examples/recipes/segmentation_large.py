"""The network of segmentation.py at PSPNet's size, where float16 needs its loss scale.

    python examples/recipes/segmentation_large.py --dtype float16 --state /tmp/large
    python examples/recipes/segmentation_large.py --dtype float16 --loss-scale none --state /tmp/large-none

Pictures of 480x480 pixels are mosaics of 10x10 canvases with scikit-learn's real digits (CC BY 4.0). The loss is the
mean over the 3.7 million pixels of a batch, as in PSPNet's training with 16 pictures: each pixel has a gradient below
3e-7, and most have less than float16's smallest number, 6e-8. A step takes seconds of one core, a run an hour: with
``--state`` one that was ended goes on after its last epoch of 10 steps. Metric and chance are those of segmentation.py.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser, warmed_up
from digits import canvases
from mxnet import autograd, gluon
from segmentation import SIZE, mean_overlap, network, pixels

PICTURES, TILES, STEPS_OF_AN_EPOCH = 16, 10, 10


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__, epochs=25, state=True).parse_args(arguments)
    run = Run(options, "segmentation_large", "mIoU, %", chance=8)
    tiles = 2 if run.quick else TILES
    data, held = (canvases(count, count < 800, seed, size=SIZE) for count, seed in ((800, 1), (200, 2)))
    net = run.convert(network(size=SIZE * tiles))
    rate, steps = 0.005, run.epochs * STEPS_OF_AN_EPOCH
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)
    run.resume(net, trainer)
    while len(run.losses) < (QUICK_STEPS if run.quick else steps):
        step = len(run.losses)
        rows = np.random.RandomState((options.seed, step)).randint(len(data.images), size=(PICTURES, tiles, tiles))
        x, y = (mx.nd.array(mosaic(part[rows])) for part in (data.images, pixels(data)))
        weight = 0.1 + 0.9 * (y > 0).expand_dims(1)
        trainer.set_learning_rate(warmed_up(rate, step, steps))
        with autograd.record():
            loss = loss_of(net(x), y, weight).mean()
        trainer.backward(loss)
        trainer.step(1)
        run.log(loss)
        if len(run.losses) % STEPS_OF_AN_EPOCH == 0:
            print(f"step {step + 1} of {steps}: loss {np.mean(run.losses[-STEPS_OF_AN_EPOCH:]):.4f}", flush=True)
            run.save(net, trainer)

    found, truth = [], []
    for first in range(0, len(held.images), tiles**2):
        rows = np.arange(first, first + tiles**2).reshape(1, tiles, tiles)
        scores = net(mx.nd.array(mosaic(held.images[rows]))).asnumpy()
        found.append(scores.argmax(axis=1))
        truth.append(mosaic(pixels(held)[rows]))
    return run.finish(mean_overlap(np.concatenate(found), np.concatenate(truth)))


def mosaic(parts: np.ndarray) -> np.ndarray:
    """Return pictures (n, ..., rows * height, columns * width) of parts (n, rows, columns, ..., height, width)."""
    return np.concatenate(np.concatenate(np.moveaxis(parts, (1, 2), (0, 1)), axis=-2), axis=-1)


if __name__ == "__main__":
    main()
