"""Convolutions with attention (Gehring et al., 2017, ConvS2S) that translate messages from English into French.

    python examples/recipes/convs2s.py --dtype float16

Every layer is a gated convolution over three words; those of the decoder see the words before only and attend to what
the encoder made. Data (messages of web applications, BSD and MIT licences), metric and training loop: see
translation.py.
"""

from __future__ import annotations

from data import PAD
from mxnet import gluon
from mxnet.gluon import nn
from translation import LENGTH, translate

UNITS, LAYERS = 96, 2


class Gated(gluon.HybridBlock):
    """A convolution over three words, the half of its channels gating the other. Words are the last axis."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.padding = 2 if causal else 1
        with self.name_scope():
            self.conv = nn.Conv1D(2 * UNITS, 3, padding=self.padding, in_channels=UNITS)
            self.drop = nn.Dropout(0.1)

    def hybrid_forward(self, F, x):  # noqa: N803
        y = F.slice_axis(self.conv(self.drop(x)), axis=2, begin=0, end=LENGTH)
        value, gate = F.split(y, num_outputs=2, axis=1)
        return value * F.sigmoid(gate)


class ConvS2S(gluon.HybridBlock):
    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        with self.name_scope():
            self.embed_source, self.embed_target = nn.Embedding(source, UNITS), nn.Embedding(target, UNITS)
            self.place_source = self.params.get("place_source", shape=(1, LENGTH, UNITS))
            self.place_target = self.params.get("place_target", shape=(1, LENGTH, UNITS))
            self.encoder, self.decoder, self.queries = (nn.HybridSequential() for _ in range(3))
            for _ in range(LAYERS):
                self.encoder.add(Gated(causal=False))
                self.decoder.add(Gated(causal=True))
                self.queries.add(nn.Dense(UNITS, flatten=False))
            self.scores, self.drop = nn.Dense(target, flatten=False), nn.Dropout(0.1)

    def hybrid_forward(self, F, source, target, place_source, place_target):  # noqa: N803
        pads = F.expand_dims(source == PAD, axis=1)
        embedded = F.broadcast_add(self.embed_source(source), place_source)
        x = embedded.transpose((0, 2, 1))
        for layer in self.encoder:
            x = (x + layer(x)) * 0.5**0.5
        values = (x.transpose((0, 2, 1)) + embedded) * 0.5**0.5

        embedded = F.broadcast_add(self.embed_target(target), place_target)
        y = embedded.transpose((0, 2, 1))
        for layer, query in zip(self.decoder, self.queries):
            h = layer(y)
            asked = (query(h.transpose((0, 2, 1))) + embedded) * 0.5**0.5
            alike = F.batch_dot(asked, x) * UNITS**-0.5  # (batch, target's length, source's length)
            seen = F.batch_dot(F.softmax(F.broadcast_add(alike, pads * -1e9)), values)
            y = (y + (h + seen.transpose((0, 2, 1))) * 0.5**0.5) * 0.5**0.5
        return self.scores(self.drop(y.transpose((0, 2, 1))))


def main(arguments: list[str] | None = None) -> dict:
    return translate(__doc__, "convs2s", ConvS2S, arguments, epochs=12, rate=4e-3)


if __name__ == "__main__":
    main()
