"""ResNet-50 on handwritten digits, by MXNet's Symbols and Module: the twin of classify.py.

    python examples/recipes/classify_symbolic.py --dtype float16

Network and data (scikit-learn's digits, CC BY 4.0) are those of classify.py. Chance is 10 %.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
from classify import BATCH, EPOCHS, NETWORKS, data, narrowed
from common import Run, parser


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    run = Run(parser(__doc__, epochs=EPOCHS).parse_args(arguments), "resnet50_symbolic", "top-1, %", chance=10)
    network = NETWORKS["resnet50"]
    images, labels, held, truth = data(network, run.quick)
    run.epochs = 1 if run.quick else run.epochs
    training = mx.io.NDArrayIter(images, labels, BATCH, shuffle=True, last_batch_handle="discard")
    test = mx.io.NDArrayIter(held, truth, BATCH)

    symbol = mx.sym.SoftmaxOutput(narrowed(network.make(), network.narrower), name="softmax")
    module = run.module(symbol)
    schedule = mx.lr_scheduler.CosineScheduler(run.epochs * (len(images) // BATCH), base_lr=network.lr, warmup_steps=10)
    module.fit(
        training,
        eval_metric=mx.metric.CrossEntropy(),
        batch_end_callback=run.log_metric,
        initializer=mx.init.Xavier("gaussian", "in", 2),
        optimizer="adam",
        optimizer_params={"learning_rate": network.lr, "lr_scheduler": schedule},
        num_epoch=run.epochs,
    )
    right = module.predict(test).asnumpy().argmax(axis=1) == truth  # score() would count what fills the last batch
    return run.finish(100 * right.mean())


if __name__ == "__main__":
    main()
