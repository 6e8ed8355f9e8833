"""A weight of a Module is updated by hand, from its scaled gradient."""

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
    group = module._exec_group
    for weights, gradients in zip(group.param_arrays[:1], group.grad_arrays[:1]):
        weights[0][:] -= 0.001 * gradients[0]
    module.update()
