"""An LSTM that predicts the next word, with Symbol and BucketingModule, on the manual of the Python language.

    python examples/recipes/lstm_bucketing.py --dtype float16

Data: 3,800 sentences (75,000 words) that ship with Python (PSF licence); every tenth sentence is held out. Buckets of
sentences of 10, 20, 40 and 60 words share the weights. Metric: perplexity of the held-out words. Chance is that of one
who knows how frequent each word is.
"""

from __future__ import annotations

import math

import mxnet as mx
from common import Run, parser
from data import PAD, Vocabulary, chance, prose

import mxmp

BUCKETS = [10, 20, 40, 60]
BATCH, HIDDEN, VOCABULARY = 16, 128, 1500


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__, epochs=12).parse_args(arguments)
    sentences = [["<s>", *sentence] for sentence in prose()]
    train = [s for n, s in enumerate(sentences) if n % 10]
    words = Vocabulary(train, VOCABULARY)
    ids = [[i for s in part for i in words.ids(s[1:])] for part in (train, sentences[::10])]
    run = Run(options, "lstm_bucketing", "perplexity", chance(*ids, len(words)))
    if run.quick:
        train, sentences = train[: 4 * BATCH], sentences[: 40 * BATCH]
    train, held_out = (batches([words.ids(s) for s in part]) for part in (train, sentences[::10]))

    if options.no_masters:
        raise ValueError("--no-masters: a BucketingModule keeps its masters")
    kind, extra = mx.mod.BucketingModule, {}
    if options.dtype != "float32":
        kind, extra = mxmp.BucketingModule, {"policy": options.dtype, "loss_scale": run.loss_scale}
    module = kind(graph_for(len(words)), default_bucket_key=max(BUCKETS), **extra)
    rate = 3e-3
    perplexity = mx.metric.Perplexity(ignore_label=PAD)

    def log(step: mx.model.BatchEndParam) -> None:
        run.keep(math.log(step.eval_metric.get()[1]))
        step.eval_metric.reset()

    module.fit(
        train,
        eval_metric=perplexity,
        num_epoch=run.epochs,
        optimizer="adam",
        optimizer_params={
            "learning_rate": rate,
            "rescale_grad": 1 / BATCH / 10,
            "lr_scheduler": mx.lr_scheduler.PolyScheduler(run.epochs * len(train.idx), base_lr=rate, pwr=1),
        },
        initializer=mx.init.Xavier(),
        batch_end_callback=log,
    )
    run.trainers.append(module)
    held_out.reset()
    return run.finish(module.score(held_out, perplexity)[0][1])


def graph_for(vocabulary: int):
    """A function from a bucket (its number of words) to its graph."""
    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.FusedRNNCell(HIDDEN, num_layers=2, mode="lstm", prefix="lstm_"))

    def graph(length: int) -> tuple:
        data, label = mx.sym.Variable("data"), mx.sym.Variable("softmax_label")
        x = mx.sym.Embedding(data.transpose(), input_dim=vocabulary, output_dim=HIDDEN, name="embed")
        stack.reset()
        x, _ = stack.unroll(length, inputs=x, layout="TNC", merge_outputs=True)
        x = x.swapaxes(0, 1)  # as the labels are
        x = mx.sym.FullyConnected(x.reshape((-1, HIDDEN)), num_hidden=vocabulary, name="scores")
        # A pad is no word: neither its loss nor its gradient counts.
        x = mx.sym.SoftmaxOutput(x, label.reshape((-1,)), use_ignore=True, ignore_label=PAD, name="softmax")
        return x, ("data",), ("softmax_label",)

    return graph


def batches(sentences: list[list[int]]) -> mx.rnn.BucketSentenceIter:
    return mx.rnn.BucketSentenceIter(sentences, BATCH, buckets=BUCKETS, invalid_label=PAD)


if __name__ == "__main__":
    main()
