"""Module.fit with a shuffled iterator, momentum, and a validation set."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=64, name="fc1")
net = mx.sym.Activation(net, act_type="relu")
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10, name="fc2"), name="softmax")
x, y = np.random.rand(256, 20).astype("f"), np.random.randint(0, 10, 256)
train, valid = mx.io.NDArrayIter(x, y, 32, shuffle=True), mx.io.NDArrayIter(x[:64], y[:64], 32)
module = mxmp.Module(net, policy=policy)
module.fit(
    train,
    valid,
    optimizer="sgd",
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    initializer=mx.init.Xavier(),
    num_epoch=5,
)
