"""A block with dropout, whose masks may be others, reads a temperature from a module, whose values graphs compare."""

import sys
import types

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

settings = types.ModuleType("settings")


class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.head = nn.Dense(24, activation="relu"), nn.Dense(4)
            self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.2)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.head(self.second(self.body(self.first(x)))) / settings.temperature


net = Net()
net.initialize(mx.init.Xavier())
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for step in range(24):
    settings.temperature = max(0.5, 5 * 0.85**step)
    x = mx.nd.random.normal(shape=(16, 6))
    with autograd.record():
        loss = loss_fn(net(x), x[:, :4].argmax(axis=1))
    trainer.backward(loss)
    trainer.step(16)
