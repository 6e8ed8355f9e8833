"""A convolutional Module with a loop of its own."""

import sys

import mxnet as mx
import numpy as np

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

net = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), name="conv")
net = mx.sym.Activation(mx.sym.BatchNorm(net, name="norm"), act_type="relu")
net = mx.sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(1, 1))
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc"), name="softmax")
module = mxmp.Module(net, policy=policy)
module.bind([("data", (8, 3, 10, 10))], [("softmax_label", (8,))])
module.init_params(mx.init.Xavier())
module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01})
for step in range(20):
    batch = mx.io.DataBatch([mx.nd.array(np.random.rand(8, 3, 10, 10))], [mx.nd.array(np.random.randint(0, 3, 8))])
    module.forward(batch, is_train=True)
    module.backward()
    module.update()
    print(step, module.get_outputs()[0][0].asnumpy())
