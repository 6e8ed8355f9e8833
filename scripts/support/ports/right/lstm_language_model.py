"""An LSTM language model with truncated backpropagation and clipped gradients."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

policy = sys.argv[1] if len(sys.argv) > 1 else "float16"

corpus = mx.nd.array(np.random.randint(0, 50, (8, 25 * 7)))


class Model(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.encoder = nn.Embedding(50, 16)
            self.rnn = gluon.rnn.LSTM(24, 2, input_size=16)
            self.decoder = nn.Dense(50, in_units=24, flatten=False)

    def forward(self, x, state):
        out, state = self.rnn(self.encoder(x), state)
        return self.decoder(out), state


model = Model()
model.initialize(mx.init.Xavier())
mxmp.convert(model, policy)
trainer = mxmp.Trainer(model.collect_params(), "sgd", {"learning_rate": 1.0})
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
state = model.rnn.begin_state(8)
for i in range(0, 25 * 7 - 7, 7):
    x, y = corpus[:, i : i + 7].T, corpus[:, i + 1 : i + 8].T
    state = [s.detach() for s in state]
    with autograd.record():
        out, state = model(x, state)
        loss = loss_fn(out.reshape((-1, 50)), y.reshape((-1,)))
    trainer.backward(loss)
    trainer.clip_global_norm(0.25 * 7 * 8)
    trainer.step(7 * 8)
