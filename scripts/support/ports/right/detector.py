"""A net that returns other things in training than in prediction, as SSD does."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"


class Detector(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.MaxPool2D())
            self.classes = nn.Conv2D(6, 3, padding=1)
            self.boxes = nn.Conv2D(8, 3, padding=1)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.features(x)
        classes = F.reshape(F.transpose(self.classes(x), (0, 2, 3, 1)), (0, -1, 3))
        boxes = F.reshape(F.transpose(self.boxes(x), (0, 2, 3, 1)), (0, -1, 4))
        if autograd.is_training():
            return classes, boxes
        return F.softmax(classes), F.clip(boxes, -1, 1)


net = Detector()
net.initialize(mx.init.Xavier())
net.hybridize()
mxmp.convert(net, policy)
trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
class_loss, box_loss = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()
for step in range(20):
    x = mx.nd.array(np.random.rand(4, 3, 8, 8))
    if step % 5 == 0:
        scores, _ = net(x)
        print(step, scores.max().asscalar())
    with autograd.record():
        classes, boxes = net(x)
        label = mx.nd.array(np.random.randint(0, 3, classes.shape[:2]))
        loss = class_loss(classes, label) + box_loss(boxes, mx.nd.zeros_like(boxes))
    trainer.backward(loss)
    trainer.step(4)
