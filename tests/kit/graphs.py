"""Small random graphs."""

from __future__ import annotations

import mxnet as mx
from hypothesis import strategies as st

S = mx.sym
_SHAPE = (2, 4, 6, 6)


def _conv(x: mx.sym.Symbol, name: str, **kwargs) -> mx.sym.Symbol:
    return S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name=name, **kwargs)


# Each takes (2, 4, 6, 6) to (2, 4, 6, 6).
_UNARY = [
    _conv,
    lambda x, name: S.Convolution(x, kernel=(1, 1), num_group=2, num_filter=4, no_bias=True, name=name),
    lambda x, name: S.Deconvolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name=name),
    lambda x, name: S.BatchNorm(x, fix_gamma=False, name=name),
    lambda x, name: S.FullyConnected(x, num_hidden=6, flatten=False, name=name),
    lambda x, name: S.relu(x, name=name),
    lambda x, name: S.tanh(x, name=name),
    lambda x, name: S.sigmoid(x, name=name),
    lambda x, name: S.reshape(S.transpose(x, axes=(0, 2, 3, 1)), shape=(2, 4, 6, 6), name=name),
    lambda x, name: S.softmax(x, axis=1, name=name),
    lambda x, name: S.LayerNorm(x, name=name),
    lambda x, name: S.square(x, name=name) * 0.1,
    lambda x, name: S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg", name=name),
    lambda x, name: S.Concat(*S.SliceChannel(x, num_outputs=2, name=f"{name}split"), dim=1, name=name),
    lambda x, name: S.concat(x, x, dim=0, name=f"{name}twice").slice_axis(axis=0, begin=1, end=3),
]
_BINARY = [
    lambda x, y, name: S.elemwise_add(x, y, name=name),
    lambda x, y, name: S.broadcast_mul(x, y, name=name),
    lambda x, y, name: S.slice_axis(S.Concat(x, y, dim=1), axis=1, begin=2, end=6, name=name),
    lambda x, y, name: (
        S.batch_dot(S.reshape(x, shape=(2, 24, 6)), S.reshape(y, shape=(2, 24, 6)), transpose_b=True)
        .slice_axis(axis=2, begin=0, end=6)
        .reshape((2, 4, 6, 6), name=name)
    ),
]
_HEADS = [
    lambda x, name: S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3), S.var("label"), name=name),
    lambda x, name: S.SliceChannel(x, num_outputs=2, name=name),
    lambda x, name: S.FullyConnected(x, num_hidden=3, name=name),
]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]:
    """A small random Symbol over ``data``, with the shapes of its inputs."""
    tensors = [S.var("data")]
    weight = S.var("tied_weight")
    for index in range(draw(st.integers(1, 7))):
        name = f"node{index}"
        x, y = (draw(st.sampled_from(tensors[-3:])) for _ in range(2))
        kind = draw(st.integers(0, len(_UNARY) + len(_BINARY)))
        if kind < len(_UNARY):
            tensors.append(_UNARY[kind](x, name))
        elif kind < len(_UNARY) + len(_BINARY):
            tensors.append(_BINARY[kind - len(_UNARY)](x, y, name))
        else:
            tensors.append(_conv(x, name, weight=weight))
    heads = draw(st.lists(st.sampled_from(tensors[1:]), min_size=0, max_size=2))
    last = draw(st.sampled_from([None, *_HEADS]))
    heads.append(last(tensors[-1], "head") if last else tensors[-1])
    symbol = heads[0] if len(heads) == 1 else S.Group(heads)
    shapes = {"data": _SHAPE, "label": (2,)}
    return symbol, {name: shape for name, shape in shapes.items() if name in symbol.list_arguments()}


def mixed() -> mx.sym.Symbol:
    """Return a graph of many kinds of operators for ``data`` of shape (2, 3, 6, 6)."""
    x = S.relu(S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=4, name="c1"))
    y = S.relu(S.Convolution(x, kernel=(1, 1), num_filter=4, name="c2"))
    x = S.Concat(x, S.transpose(y, axes=(0, 1, 3, 2)), S.abs(y), name="cat")
    left, right = S.SliceChannel(x, num_outputs=2, name="split")
    x = S.relu(S.Deconvolution(-left, kernel=(2, 2), num_filter=6, name="d")).slice_axis(axis=2, begin=0, end=6)
    x = S.tanh(x.slice_axis(axis=3, begin=0, end=6)) + right
    return S.FullyConnected(S.flatten(x), num_hidden=5, name="fc")


def small() -> mx.sym.Symbol:
    """Return a convolution and a dense layer for images, with an exponential between them."""
    x = S.relu(S.Convolution(S.var("data"), kernel=(3, 3), num_filter=4, name="c"), name="r")
    return S.FullyConnected(S.exp(x), num_hidden=5, name="fc")
