"""Noise is added to a Module's scaled gradients."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=4, name="fc2")
net = mx.sym.SoftmaxOutput(net, name="softmax")
module = mxmp.Module(net, policy=policy, loss_scale=2.0**12)
module.bind([("data", (16, 6))], [("softmax_label", (16,))])
module.init_params(mx.init.Xavier())
module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1})
for _step in range(30):
    batch = mx.io.DataBatch([mx.nd.array(np.random.randn(16, 6))], [mx.nd.array(np.random.randint(0, 4, 16))])
    module.forward_backward(batch)
    for arrays in module._exec_group.grad_arrays:
        for array in arrays:
            array += mx.nd.array(np.random.randn(*array.shape))
    module.update()
