"""A Module whose gradients of two batches are added."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=4, name="fc2")
net = mx.sym.SoftmaxOutput(net, name="softmax")
module = mxmp.Module(net, policy=policy)
module.bind([("data", (8, 6))], [("softmax_label", (8,))], grad_req="add")
module.init_params(mx.init.Xavier())
module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1})
for step in range(40):
    batch = mx.io.DataBatch([mx.nd.array(np.random.randn(8, 6))], [mx.nd.array(np.random.randint(0, 4, 8))])
    module.forward_backward(batch)
    if step % 2:
        module.update()
        module.discard()
