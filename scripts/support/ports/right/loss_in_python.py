"""A Module under MXNet's PythonLossModule, whose gradient is a function of Python."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


def gradient(scores, labels):
    return mx.nd.softmax(scores) - mx.nd.one_hot(labels, 4)


scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="scores")
chain = mx.mod.SequentialModule()
chain.add(mxmp.Module(scores, label_names=None, policy=policy, loss_scale=1024.0))
loss = mx.mod.PythonLossModule(data_names=("scores_output",), grad_func=gradient)
chain.add(loss, take_labels=True, auto_wiring=True)
data = np.random.rand(64, 8)
chain.fit(
    mx.io.NDArrayIter(data, data.sum(axis=1) * 2 % 4 // 1, 16),
    num_epoch=5,
    eval_metric="loss",
    optimizer_params={"learning_rate": 0.5},
    initializer=mx.init.Xavier(),
)
