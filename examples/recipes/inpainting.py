"""Inpainting with partial convolutions (Liu et al., 2018).

    python examples/recipes/inpainting.py --dtype float16

A small U-Net fills holes: each convolution reads what is known only, scaled by how much that is, and makes its
neighbourhood known. Data: patches of the photographs of a temple and of a flower that come with scikit-learn
(CC BY 2.0); the left three quarters of both to train on, the right quarter held out. Metric: PSNR inside the holes, in
dB. Chance is that of one who fills them with the mean of what is known.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from common import QUICK_STEPS, Run, parser
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_sample_images

SIZE, BATCH, HELD_OUT, WIDTH, STEPS_OF_AN_EPOCH = 32, 8, 96, 16, 50


class PartialConv(gluon.HybridBlock):
    """Of a picture and of its mask (1: known), of one channel; returns both."""

    def __init__(self, channels: int, kernel: int, strides: int = 1, norm: bool = True) -> None:
        super().__init__()
        self.window = {"kernel": (kernel,) * 2, "stride": (strides,) * 2, "pad": (kernel // 2,) * 2}
        with self.name_scope():
            self.conv = nn.Conv2D(channels, kernel, strides, kernel // 2, use_bias=not norm)
            self.norm = nn.BatchNorm() if norm else None

    def hybrid_forward(self, F, x, mask):  # noqa: N803
        known = F.Pooling(mask, pool_type="avg", count_include_pad=True, **self.window)
        x = F.broadcast_mul(self.conv(F.broadcast_mul(x, mask)), 1 / F.maximum(known, 1e-2))
        mask = F.BlockGrad(known > 0)
        if self.norm is not None:
            x = F.relu(self.norm(x))
        return F.broadcast_mul(x, mask), mask


class Inpainter(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.down, self.up = nn.HybridSequential(), nn.HybridSequential()
            for channels, kernel in ((WIDTH, 5), (2 * WIDTH, 3), (4 * WIDTH, 3), (4 * WIDTH, 3)):
                self.down.add(PartialConv(channels, kernel, strides=2))
            for channels in (4 * WIDTH, 2 * WIDTH, WIDTH):
                self.up.add(PartialConv(channels, 3))
            self.up.add(PartialConv(3, 3, norm=False))

    def hybrid_forward(self, F, picture, mask):  # noqa: N803
        levels = [(picture, mask)]
        for layer in self.down:
            levels.append(layer(*levels[-1]))
        x, known = levels.pop()
        for layer in self.up:
            beside, beside_known = levels.pop()
            x, known = (F.UpSampling(y, scale=2, sample_type="nearest") for y in (x, known))
            x = F.concat(F.broadcast_mul(x, known), F.broadcast_mul(beside, beside_known), dim=1)
            x, known = layer(x, F.maximum(known, beside_known))
        return x


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=10).parse_args(arguments)
    photographs = [image.transpose(2, 0, 1).astype("float32") / 127.5 - 1 for image in load_sample_images().images]
    width = photographs[0].shape[2] * 3 // 4
    fixed = np.random.RandomState(0)
    pictures, masks = samples(fixed, [p[:, :, width:] for p in photographs], HELD_OUT)
    mean = (pictures * masks).sum((2, 3), keepdims=True) / masks.sum((2, 3), keepdims=True)
    run = Run(options, "inpainting", "PSNR in the holes, dB", round(psnr(mean, pictures, masks), 2))

    net = Inpainter()
    net.initialize(mx.init.Xavier(magnitude=2))
    run.convert(net)
    rate = 3e-3
    trainer = run.trainer(net.collect_params(), "adam", {"learning_rate": rate})
    steps = run.epochs * STEPS_OF_AN_EPOCH
    for step in range(QUICK_STEPS if run.quick else steps):
        trainer.set_learning_rate(rate * min(1, 1.5 * (1 - step / steps)))
        x, mask = map(mx.nd.array, samples(run.random, [p[:, :, :width] for p in photographs], BATCH))
        with autograd.record():
            off = (net(x * mask, mask) - x).abs()
            loss = (off * mask + 6 * off * (1 - mask)).mean(axis=(1, 2, 3))
        trainer.backward(loss)
        trainer.step(BATCH)
        run.log(loss)
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {np.mean(run.losses[-50:]):.4f}", flush=True)
    made = net(mx.nd.array(pictures * masks), mx.nd.array(masks)).asnumpy()
    return run.finish(psnr(made, pictures, masks))


def samples(random: np.random.RandomState, photographs: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches of shape (count, 3, SIZE, SIZE) in (-1, 1), and masks of (count, 1, SIZE, SIZE), 0 in holes."""
    patches, masks = [], np.ones((count, 1, SIZE, SIZE), "float32")
    for mask in masks:
        photograph = photographs[random.randint(len(photographs))]
        top, left = (random.randint(side - 2 * SIZE) for side in photograph.shape[1:])
        patch = photograph[:, top : top + 2 * SIZE, left : left + 2 * SIZE]
        patches.append(patch.reshape(3, SIZE, 2, SIZE, 2).mean((2, 4))[:, :, :: random.choice([1, -1])])
        for _ in range(3):
            height, width = random.randint(4, 13, 2)
            y, x = random.randint(SIZE - height), random.randint(SIZE - width)
            mask[0, y : y + height, x : x + width] = 0
    return np.stack(patches), masks


def psnr(made: np.ndarray, pictures: np.ndarray, masks: np.ndarray) -> float:
    """Peak signal to noise inside the holes of all pictures, in dB."""
    holes = np.broadcast_to(1 - masks, pictures.shape)
    error = ((np.clip(made, -1, 1) - pictures) ** 2 * holes).sum() / holes.sum()
    return float(10 * np.log10(4 / error))


if __name__ == "__main__":
    main()
