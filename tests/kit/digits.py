"""One small convolutional network on scikit-learn's digits, as a Symbol and as a Block with the same head."""

import mxnet as mx
import numpy as np
from mxnet import gluon
from sklearn.datasets import load_digits


class Digits:
    def __init__(self):
        data = load_digits()
        self.x = (data.images / 16).astype("float32")[:, None]
        self.y = data.target.astype("float32")

    def train(self, batch=64):
        return mx.io.NDArrayIter(self.x[:1280], self.y[:1280], batch)

    def validation(self, batch=64):
        return mx.io.NDArrayIter(self.x[1280:], self.y[1280:], batch, last_batch_handle="pad")


class Net(gluon.HybridBlock):
    """Conv, BatchNorm, relu, Dense, and the head inside, as Symbols have it."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.conv = gluon.nn.Conv2D(8, 3, padding=1, in_channels=1)
            self.norm = gluon.nn.BatchNorm(in_channels=8)
            self.dense = gluon.nn.Dense(10, in_units=512)

    def hybrid_forward(self, F, x, label):  # noqa: N803
        return F.SoftmaxOutput(self.dense(F.relu(self.norm(self.conv(x)))), label, name="softmax")


def seeded() -> Net:
    """The Block, with the same weights at every call."""
    mx.random.seed(7)
    np.random.seed(7)
    net = Net()
    net.initialize(mx.init.Xavier())
    return net


def symbol() -> mx.sym.Symbol:
    return Net()(mx.sym.var("data"), mx.sym.var("softmax_label"))
