import mxnet as mx
import numpy as np

import mxmp

data = mx.sym.var("data")
net = mx.sym.FullyConnected(data, num_hidden=64, name="fc1")
net = mx.sym.Activation(net, act_type="relu")
net = mx.sym.FullyConnected(net, num_hidden=10, name="fc2")
net = mx.sym.SoftmaxOutput(net, name="softmax")
x, y = np.random.rand(256, 20).astype("f"), np.random.randint(0, 10, 256)
train = mx.io.NDArrayIter(x, y, 32, shuffle=True)
module = mxmp.Module(net, policy="float16")
module.fit(
    train,
    optimizer="sgd",
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    initializer=mx.init.Xavier(),
    num_epoch=5,
)
