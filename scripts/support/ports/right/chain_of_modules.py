"""Two Modules in a SequentialModule, trained by its fit."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="hidden")
scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="scores")
head = mx.sym.SoftmaxOutput(scores, name="softmax")
chain = mx.mod.SequentialModule()
chain.add(mxmp.Module(hidden, label_names=None, policy=policy, loss_scale=1024.0))
chain.add(mxmp.Module(head, policy=policy, loss_scale=1024.0), take_labels=True, auto_wiring=True)
data = np.random.rand(64, 8)
chain.fit(
    mx.io.NDArrayIter(data, data.sum(axis=1) * 2 % 4 // 1, 16),
    num_epoch=5,
    optimizer_params={"learning_rate": 0.5},
    initializer=mx.init.Xavier(),
)
