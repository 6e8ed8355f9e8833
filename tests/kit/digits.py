"""One small convolutional network on scikit-learn's digits, as a Symbol and as a Block with the same head."""

import mxnet as mx
import numpy as np
from mxnet import gluon
from sklearn.datasets import load_digits

import mxmp


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


BATCH = 32


SHAPES = [("data", (BATCH, 1, 8, 8))], [("softmax_label", (BATCH,))]


SGD = {"learning_rate": 0.05, "momentum": 0.9}


def bound(symbol, kind=mxmp.Module, context=None, optimizer="sgd", kvstore="local", grad_req="write", **mixed):
    module = kind(symbol, context=context or mx.cpu(), **mixed)
    module.bind(*SHAPES, grad_req=grad_req)
    mx.random.seed(3)
    np.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore, optimizer, SGD if optimizer == "sgd" else {"learning_rate": 0.01})
    return module


def batches(digits, count=5):
    for i in range(count):
        part = slice(i * BATCH, (i + 1) * BATCH)
        yield mx.io.DataBatch([mx.nd.array(digits.x[part])], [mx.nd.array(digits.y[part])])


def weights(module):
    args, auxs = module.get_params()
    return {k: v.asnumpy() for k, v in {**args, **auxs}.items()}


def everything(module):
    """All that a step may change, bit for bit."""
    arrays = [a.asnumpy() for arrays in module._exec_group.param_arrays for a in arrays]
    arrays += [m.asnumpy() for masters in module.core.masters.values() for m in masters]
    for updater in module._updater:
        for state in updater.states.values():
            arrays += [s.asnumpy() for s in (state if isinstance(state, tuple) else (state,)) if s is not None]
    optimizer = module._optimizer
    return [*arrays, np.array(sorted(optimizer._index_update_count.items())), np.array(optimizer.num_update)]
