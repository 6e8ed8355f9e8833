"""LSTMs with attention in the manner of GNMT (Wu et al., 2016) that translate messages from English into French.

    python examples/recipes/gnmt.py --dtype float16

The encoder reads in both directions; the decoder's first LSTM asks the attention, and what it attended to is given to
the second, which adds its output to the first's. Data (messages of web applications, BSD and MIT licences), metric
and training loop: see translation.py.
"""

from __future__ import annotations

from data import PAD
from mxnet import gluon
from mxnet.gluon import nn, rnn
from translation import translate

UNITS = 96


class GNMT(gluon.HybridBlock):
    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        with self.name_scope():
            self.embed_source, self.embed_target = nn.Embedding(source, UNITS), nn.Embedding(target, UNITS)
            self.both_ways = rnn.LSTM(UNITS // 2, layout="NTC", bidirectional=True, input_size=UNITS)
            self.encoder = rnn.LSTM(UNITS, layout="NTC", input_size=UNITS)
            self.first = rnn.LSTM(UNITS, layout="NTC", input_size=UNITS)
            self.second = rnn.LSTM(UNITS, layout="NTC", input_size=2 * UNITS)
            self.query, self.scores = nn.Dense(UNITS, flatten=False), nn.Dense(target, flatten=False)
            self.drop = nn.Dropout(0.1)

    def hybrid_forward(self, F, source, target):  # noqa: N803
        x = self.both_ways(self.drop(self.embed_source(source)))
        memory = x + self.encoder(self.drop(x))

        y = self.first(self.drop(self.embed_target(target)))
        alike = F.batch_dot(self.query(y), memory, transpose_b=True)  # (batch, target's length, source's length)
        pads = F.expand_dims(source == PAD, axis=1)
        context = F.batch_dot(F.softmax(F.broadcast_add(alike, pads * -1e9)), memory)
        y = y + self.second(self.drop(F.concat(y, context, dim=2)))
        return self.scores(self.drop(F.concat(y, context, dim=2)))


def main(arguments: list[str] | None = None) -> dict:
    return translate(__doc__, "gnmt", GNMT, arguments, epochs=12, rate=4e-3)


if __name__ == "__main__":
    main()
