"""A Transformer (Vaswani et al., 2017) that translates messages from English into French.

    python examples/recipes/transformer.py --dtype float16

Data (5,900 messages of web applications, BSD and MIT licences), metric and training loop: see translation.py.
"""

from __future__ import annotations

import numpy as np
from data import PAD
from mxnet import gluon
from mxnet.gluon import nn
from translation import LENGTH, translate

UNITS, HEADS, LAYERS = 64, 4, 2


class Attention(gluon.HybridBlock):
    """Attention of several heads. ``blocked``, of shape (batch or 1, queries or 1, keys), is 1 where none may look."""

    def __init__(self, units: int = UNITS) -> None:
        super().__init__()
        self.scale = (units // HEADS) ** -0.5
        with self.name_scope():
            self.query, self.key, self.value, self.out = (nn.Dense(units, flatten=False) for _ in range(4))

    def hybrid_forward(self, F, x, memory, blocked):  # noqa: N803
        q, k, v = (self._split(F, y) for y in (self.query(x), self.key(memory), self.value(memory)))
        scores = (F.batch_dot(q, k, transpose_b=True) * self.scale).reshape((-4, -1, HEADS, -2))
        weights = F.softmax(F.broadcast_add(scores, blocked.expand_dims(1) * -1e9)).reshape((-3, -2))
        joined = F.batch_dot(weights, v).reshape((-4, -1, HEADS, -2)).transpose((0, 2, 1, 3)).reshape((0, 0, -3))
        return self.out(joined)

    @staticmethod
    def _split(F, x):  # noqa: N803  # (batch, length, units) -> (batch * heads, length, units of a head)
        return x.reshape((0, 0, HEADS, -1)).transpose((0, 2, 1, 3)).reshape((-3, 0, 0))


class Layer(gluon.HybridBlock):
    """A layer of the encoder, or of the decoder when it is given what the encoder made."""

    def __init__(self, decoder: bool, units: int = UNITS) -> None:
        super().__init__()
        with self.name_scope():
            self.attend, self.norm = Attention(units), nn.LayerNorm(in_channels=units)
            self.cross = Attention(units) if decoder else None
            self.cross_norm = nn.LayerNorm(in_channels=units) if decoder else None
            self.feed = nn.HybridSequential()
            self.feed.add(nn.Dense(4 * units, activation="relu", flatten=False), nn.Dense(units, flatten=False))
            self.feed_norm, self.drop = nn.LayerNorm(in_channels=units), nn.Dropout(0.1)

    def hybrid_forward(self, F, x, blocked, memory=None, memory_blocked=None):  # noqa: N803
        normed = self.norm(x)
        x = x + self.drop(self.attend(normed, normed, blocked))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.cross_norm(x), memory, memory_blocked))
        return x + self.drop(self.feed(self.feed_norm(x)))


class Transformer(gluon.HybridBlock):
    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        angles = np.arange(LENGTH)[:, None] / 100 ** (np.arange(0, UNITS, 2) / UNITS)
        with self.name_scope():
            self.positions = self.params.get_constant("positions", np.hstack([np.sin(angles), np.cos(angles)])[None])
            self.future = self.params.get_constant("future", np.triu(np.ones((1, LENGTH, LENGTH)), k=1))
            self.embed_source, self.embed_target = nn.Embedding(source, UNITS), nn.Embedding(target, UNITS)
            self.encoder, self.decoder = nn.HybridSequential(), nn.HybridSequential()
            for _ in range(LAYERS):
                self.encoder.add(Layer(decoder=False))
                self.decoder.add(Layer(decoder=True))
            self.norms = nn.HybridSequential()
            self.norms.add(nn.LayerNorm(in_channels=UNITS), nn.LayerNorm(in_channels=UNITS))
            self.scores, self.drop = nn.Dense(target, flatten=False), nn.Dropout(0.1)

    def hybrid_forward(self, F, source, target, positions, future):  # noqa: N803
        pads = F.expand_dims(source == PAD, axis=1)
        x = self.drop(F.broadcast_add(self.embed_source(source) * UNITS**0.5, positions))
        for layer in self.encoder:
            x = layer(x, pads)
        x = self.norms[0](x)
        y = self.drop(F.broadcast_add(self.embed_target(target) * UNITS**0.5, positions))
        for layer in self.decoder:
            y = layer(y, future, x, pads)
        return self.scores(self.norms[1](y))


def main(arguments: list[str] | None = None) -> dict:
    return translate(__doc__, "transformer", Transformer, arguments, epochs=10)


if __name__ == "__main__":
    main()
