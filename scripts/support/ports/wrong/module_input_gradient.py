"""Inputs move by a Module's gradient with the loss scale in it, read from its executors."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc1")
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=4, name="fc2")
module = mxmp.Module(net, label_names=None, policy=policy, loss_scale=2.0**12)
module.bind([("data", (16, 6))], inputs_need_grad=True)
module.init_params(mx.init.Xavier())
module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1})
x = mx.nd.array(np.random.randn(16, 6))
for _step in range(30):
    module.forward(mx.io.DataBatch([x]), is_train=True)
    module.backward([(module.get_outputs()[0] - 1) / 16])
    module.update()
    x = x - 0.1 * module._exec_group.input_grad_arrays[0][0].clip(-1, 1)
