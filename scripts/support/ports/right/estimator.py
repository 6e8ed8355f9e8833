"""Gluon's Estimator with mxmp's BatchProcessor, on two devices, with an evaluation after each epoch."""

import sys

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


devices = [mx.cpu(0), mx.cpu(1)]
x = mx.nd.array(np.random.rand(128, 1, 8, 8))
y = mx.nd.array(np.random.randint(0, 3, 128))
data = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 16)
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(3))
net.initialize(ctx=devices)
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "adam", {"learning_rate": 0.005})
estimator = Estimator(
    net,
    gluon.loss.SoftmaxCrossEntropyLoss(),
    trainer=trainer,
    context=devices,
    batch_processor=mxmp.BatchProcessor(),
    train_metrics=mx.metric.Accuracy(),
)
estimator.fit(data, data, epochs=3)
