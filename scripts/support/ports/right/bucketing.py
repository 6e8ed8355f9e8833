"""A BucketingModule over sequences of three lengths."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def graph(length):
    data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
    words = mx.sym.Embedding(data, input_dim=30, output_dim=8, name="embed")
    cell = mx.rnn.LSTMCell(12, prefix="lstm_")
    outputs, _ = cell.unroll(length, inputs=words, merge_outputs=True)
    scores = mx.sym.FullyConnected(mx.sym.reshape(outputs, (-1, 12)), num_hidden=30, name="out")
    return mx.sym.SoftmaxOutput(scores, mx.sym.reshape(label, (-1,)), name="softmax"), ("data",), ("softmax_label",)


sentences = [list(np.random.randint(1, 30, np.random.randint(3, 9))) for _ in range(100)]
data = mx.rnn.BucketSentenceIter(sentences, 8, buckets=[4, 6, 8], invalid_label=0)
module = mxmp.BucketingModule(graph, default_bucket_key=data.default_bucket_key, policy=policy)
module.fit(
    data,
    eval_metric=mx.metric.Perplexity(0),
    optimizer="adam",
    optimizer_params={"learning_rate": 0.01},
    initializer=mx.init.Xavier(),
    num_epoch=4,
)
