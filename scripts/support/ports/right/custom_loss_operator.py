"""A loss head written as a CustomOp that writes its own gradient."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Hinge(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        scores, labels = in_data
        sign = 2 * mx.nd.one_hot(labels, scores.shape[1]) - 1
        self.assign(in_grad[0], req[0], mx.nd.where(scores * sign < 1, -sign, mx.nd.zeros_like(sign)))
        self.assign(in_grad[1], req[1], mx.nd.zeros_like(labels))


@mx.operator.register("verify_hinge")
class HingeProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        return ["data", "label"]

    def infer_shape(self, shapes):
        return [shapes[0], [shapes[0][0]]], [shapes[0]], []

    def create_operator(self, ctx, shapes, dtypes):
        return Hinge()


class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.head = nn.Dense(24, activation="relu"), nn.Dense(5)

    def hybrid_forward(self, F, x, y):  # noqa: N803
        return F.Custom(self.head(self.body(x)), y, op_type="verify_hinge")


net = Net()
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02})
for _step in range(21):
    x, y = mx.nd.array(np.random.randn(16, 9)), mx.nd.array(np.random.randint(0, 5, 16))
    with autograd.record():
        out = net(x, y)
    trainer.backward(out)
    trainer.step(16)
