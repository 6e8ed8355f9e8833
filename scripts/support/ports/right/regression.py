"""A linear regression head, and two devices."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=1, name="fc2")
net = mx.sym.LinearRegressionOutput(net, mx.sym.var("label"), name="out", grad_scale=0.5)
x = np.random.randn(320, 6).astype("f")
data = mx.io.NDArrayIter(x, x.sum(1, keepdims=True), 16, label_name="label")
module = mxmp.Module(net, label_names=["label"], context=[mx.cpu(0), mx.cpu(1)], policy=policy)
module.fit(data, eval_metric="mse", optimizer="sgd", optimizer_params={"learning_rate": 0.05}, num_epoch=2)
