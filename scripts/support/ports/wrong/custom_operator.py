"""A CustomOp, with MXNet's default need_top_grad, ignores the gradient it gets, outside the net."""

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


@mx.operator.register("verify_outer_hinge")
class HingeProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        return ["data", "label"]

    def infer_shape(self, shapes):
        return [shapes[0], [shapes[0][0]]], [shapes[0]], []

    def create_operator(self, ctx, shapes, dtypes):
        return Hinge()


net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(4))
net.initialize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=2.0**12)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _step in range(30):
    x, y = mx.nd.array(np.random.randn(16, 6)), mx.nd.array(np.random.randint(0, 4, 16))
    with autograd.record():
        loss = mx.nd.Custom(net(x), y, op_type="verify_outer_hinge")
    trainer.backward(loss)
    trainer.step(16)
