"""ArcFace on handwritten digits, by MXNet's Symbols and Module: an angle between a picture and its class, and a margin.

    python examples/recipes/arcface.py --dtype float16

Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR 2019. A convolutional network turns
a picture into a vector of length 1; so are the rows of the last weight, one for each class. Their product is the cosine
of an angle. The angle of a picture to its own class grows by a margin before the softmax, so vectors of one class must
be closer to each other than the others by that margin. Data: scikit-learn's digits (CC BY 4.0). The result is the share
of held-out digits whose closest class is theirs. Chance is 10 %.

Two things need FP32. The product that is the cosine would round to 1 what is within 2**-9 (bfloat16) or 2**-12
(float16) of it, and there the gradient of arccos is infinite: it is excluded by name. And in FP32 too a sum of squares
may come out as 1 or a little more, so the cosine is clipped before arccos.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import mxnet as mx
from common import Run, parser
from digits import CLASSES, split

BATCH, SIZE, EPOCHS = 64, 16, 12
WIDTH = 32  # of the vector
SCALE, MARGIN = 16.0, 0.3  # of the logits; of the angle, in radians
LARGEST = 1 - 2.0**-20  # cosine; the gradient of arccos is 724 there


def embedding(pictures: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a vector of length 1 for each picture."""
    x = pictures
    for number, channels in enumerate((16, 32, 64)):
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=channels, no_bias=True, name=f"conv{number}")
        x = mx.sym.relu(mx.sym.BatchNorm(x, fix_gamma=False, name=f"norm{number}"), name=f"relu{number}")
        x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name=f"pool{number}")
    x = mx.sym.FullyConnected(x, num_hidden=WIDTH, no_bias=True, name="vector")
    return mx.sym.L2Normalization(mx.sym.BatchNorm(x, name="norm"), name="unit")


def arcface(vectors: mx.sym.Symbol, labels: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return the softmax of scaled cosines, with the margin, and the plain cosines."""
    classes = mx.sym.L2Normalization(mx.sym.var("class_weight", shape=(len(CLASSES), WIDTH)), name="class_unit")
    cosine = mx.sym.FullyConnected(vectors, classes, num_hidden=len(CLASSES), no_bias=True, name="cosine")
    angle = mx.sym.arccos(mx.sym.clip(cosine, -LARGEST, LARGEST))
    own = mx.sym.one_hot(labels, depth=len(CLASSES))
    # Beyond pi the cosine would rise again.
    wider = mx.sym.broadcast_minimum(angle + MARGIN * own, mx.sym.full((1, 1), math.pi))
    logits = SCALE * mx.sym.cos(wider)
    return mx.sym.Group([mx.sym.SoftmaxOutput(logits, labels, name="softmax"), mx.sym.BlockGrad(cosine, name="scores")])


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    run = Run(parser(__doc__, epochs=EPOCHS).parse_args(arguments), "arcface", "top-1, %", chance=10)
    images, labels, held, truth = split(SIZE)
    if run.quick:
        run.epochs, images, labels = 1, images[: 2 * BATCH], labels[: 2 * BATCH]
    training = mx.io.NDArrayIter(images[:, None], labels, BATCH, shuffle=True, last_batch_handle="discard")
    test = mx.io.NDArrayIter(held[:, None], truth, BATCH)

    symbol = arcface(embedding(mx.sym.var("data")), mx.sym.var("softmax_label"))
    excluded = {} if run.options.dtype == "float32" else {"exclude": ["cosine"]}
    module = run.module(symbol, **excluded)
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (len(images) // BATCH), base_lr=0.01, warmup_steps=10)
    module.fit(
        training,
        eval_metric=mx.metric.CrossEntropy(output_names=["softmax_output"], label_names=["softmax_label"]),
        batch_end_callback=run.log_metric,
        initializer=mx.init.Xavier("gaussian", "in", 2),
        optimizer="adam",
        optimizer_params={"learning_rate": 0.01, "lr_scheduler": schedule},
        num_epoch=run.epochs,
    )
    _, scores = module.predict(test)
    return run.finish(100 * (scores.asnumpy().argmax(axis=1) == truth).mean())


if __name__ == "__main__":
    main()
