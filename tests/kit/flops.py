"""The operators of small graphs, with what ``advise`` counts of them."""

from __future__ import annotations

import mxnet as mx

from mxmp.diagnose.advising.flops import Tensor, shaped_nodes
from mxmp.precision.graph import Graph


def tensors(**shapes):
    return {name: Tensor(shape, "float32") for name, shape in shapes.items()}


def products_of(symbol, **shapes):
    """Return the matrix products of the one operator of ``symbol`` that has some."""
    (step,) = [s for s in shaped_nodes(Graph.from_symbol(symbol), tensors(**shapes)) if s.products()]
    return step.products()


S = mx.sym
X = S.var("data")


def fc(outputs, name="fc", data=X, **options):
    return S.FullyConnected(data, num_hidden=outputs, name=name, **options)


def language_model(vocabulary, units, layers=2):
    """An embedding, an LSTM and a decoder."""
    words = S.Embedding(X, input_dim=vocabulary, output_dim=units, name="embedding")
    states = [S.var(name, shape=(layers, 0, units)) for name in ("h", "c")]
    out = S.RNN(words, S.var("w"), *states, mode="lstm", state_size=units, num_layers=layers, name="lstm")
    return fc(vocabulary, "decoder", out, flatten=False)
