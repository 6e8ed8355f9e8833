"""Layers: ``gluon.nn``, ``gluon.rnn``, ``gluon.contrib``, control flow, and blocks of ``mx.np``."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import contrib, nn, rnn

from .case import Case, uniform, whole
from .language import Unrolled


class Lambda(gluon.HybridBlock):
    """Layers and a function of ``F`` and them."""

    def __init__(self, function: Callable[..., Any], *layers: gluon.Block) -> None:
        super().__init__()
        self.function = function
        self.layers = layers
        for layer in layers:
            self.register_child(layer)

    def hybrid_forward(self, F, *inputs: Any) -> Any:  # noqa: N803
        return self.function(F, *self.layers, *inputs)


def foreach(F, layer: Any, x: Any, state: Any) -> Any:  # noqa: N803
    def body(row: Any, states: Any) -> Any:
        y = layer(row + states[0])
        return y, [y]

    return F.contrib.foreach(body, x, [state])[0]


def foreach_lstm(F, cell: Any, x: Any, h: Any, c: Any) -> Any:  # noqa: N803
    return F.contrib.foreach(cell, x, [h, c])[0]


def while_loop(F, dense: Any, x: Any) -> Any:  # noqa: N803
    def body(number: Any, y: Any) -> Any:
        y = F.tanh(dense(y))
        return y, [number + 1, y]

    return F.contrib.while_loop(lambda n, y: n < 4, body, [F.zeros(1), x], max_iterations=4)[0]


def cond(F, one: Any, other: Any, x: Any) -> Any:  # noqa: N803
    return F.contrib.cond(x.sum() > -1e6, lambda: one(x), lambda: other(x))


def outer_products(F, x: Any) -> Any:  # noqa: N803
    return F.batch_dot(x, x, transpose_b=True)


def rnn_layer(kind: Any, bidirectional: bool = False, layers: int = 1, **options: Any) -> Case:
    name = f"rnn.{kind.__name__}{'.bidirectional' if bidirectional else ''}{f'.{layers}layers' if layers > 1 else ''}"
    suffix = "".join(f".{value}" for value in options.values())
    make = partial(kind, 32, num_layers=layers, bidirectional=bidirectional, input_size=16, **options)
    return Case(name + suffix, "gluon.rnn", make, lambda: [uniform(6, 2, 16)])


def cell(name: str, make: Callable[[], Any]) -> Case:
    return Case(name, "gluon.rnn", lambda: Unrolled(make()), lambda: [uniform(2, 6, 16)])


def conv_cell(kind: str, gate: str) -> Case:
    """``gluon.contrib.rnn``'s convolutional cells."""
    dims = int(kind[0])
    make = getattr(contrib.rnn, f"Conv{dims}D{gate}Cell")
    space = (8,) * dims

    def made() -> gluon.Block:
        return Unrolled(make((4, *space), 8, i2h_kernel=3, h2h_kernel=3, i2h_pad=1), 3)

    return Case(f"contrib.Conv{dims}D{gate}Cell", "gluon.contrib", made, lambda: [uniform(2, 3, 4, *space)])


def sequential(*blocks: Any) -> Any:
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def cells() -> dict[str, Callable[[], Any]]:
    lstm = partial(rnn.LSTMCell, input_size=16)
    return {
        "rnn.RNNCell": lambda: rnn.RNNCell(32, input_size=16),
        "rnn.LSTMCell": lambda: lstm(32),
        "rnn.GRUCell": lambda: rnn.GRUCell(32, input_size=16),
        "rnn.SequentialRNNCell": lambda: stacked(lstm(32), rnn.GRUCell(16, input_size=32)),
        "rnn.ResidualCell": lambda: rnn.ResidualCell(rnn.GRUCell(16, input_size=16)),
        "rnn.ZoneoutCell": lambda: rnn.ZoneoutCell(lstm(16), 0, 0),
        "rnn.BidirectionalCell": lambda: rnn.BidirectionalCell(lstm(16, prefix="l_"), lstm(16, prefix="r_")),
        "contrib.LSTMPCell": lambda: contrib.rnn.LSTMPCell(32, 16, input_size=16),
        "contrib.VariationalDropoutCell": lambda: contrib.rnn.VariationalDropoutCell(lstm(16)),
    }


def stacked(*each: Any) -> Any:
    net = rnn.HybridSequentialRNNCell()
    for one in each:
        net.add(one)
    return net


def blocks() -> dict[str, tuple[str, Callable[[], Any], Callable[[], list]]]:
    """Return kind, net and inputs by name."""
    conv, dense = partial(nn.Conv2D, 8, 3, padding=1), partial(nn.Dense, 16, in_units=16)
    picture, row, cube = partial(uniform, 2, 4, 12, 12), partial(uniform, 2, 4, 12), partial(uniform, 2, 4, 6, 6, 6)
    deformed = partial(contrib.cnn.DeformableConvolution, 8, kernel_size=(3, 3), padding=(1, 1))
    modulated = partial(contrib.cnn.ModulatedDeformableConvolution, 8, kernel_size=(3, 3), padding=(1, 1))
    steps, state = partial(uniform, 5, 2, 16), partial(uniform, 2, 16)
    maps, map_ = partial(uniform, 3, 2, 4, 8, 8), partial(uniform, 2, 4, 8, 8)
    kept: dict[str, dict[str, tuple]] = {
        "gluon.contrib": {
            "contrib.Concurrent": (lambda: concurrent(contrib.nn.Concurrent), picture),
            "contrib.HybridConcurrent": (lambda: concurrent(contrib.nn.HybridConcurrent), picture),
            "contrib.Identity": (lambda: sequential(conv(), contrib.nn.Identity(), conv()), picture),
            "contrib.SyncBatchNorm": (
                lambda: sequential(conv(), contrib.nn.SyncBatchNorm(num_devices=1), conv()),
                picture,
            ),
            "contrib.PixelShuffle1D": (lambda: sequential(nn.Conv1D(8, 3), contrib.nn.PixelShuffle1D(2)), row),
            "contrib.PixelShuffle2D": (lambda: sequential(conv(), contrib.nn.PixelShuffle2D(2)), picture),
            "contrib.PixelShuffle3D": (lambda: sequential(nn.Conv3D(8, 3), contrib.nn.PixelShuffle3D(2)), cube),
            "contrib.DeformableConvolution": (lambda: sequential(conv(), deformed()), picture),
            "contrib.ModulatedDeformableConvolution": (lambda: sequential(modulated()), picture),
        },
        "control flow": {
            "flow.foreach": (lambda: Lambda(foreach, dense()), steps, state),
            "flow.foreach.LSTMCell": (
                *(lambda: Lambda(foreach_lstm, rnn.LSTMCell(16, input_size=16)), steps, state, lambda: state() / 2),
            ),
            "flow.while_loop": (lambda: Lambda(while_loop, dense()), state),
            "flow.cond": (lambda: Lambda(cond, dense(), dense()), state),
            "flow.foreach.convolution": (
                *(lambda: Lambda(foreach, nn.Conv2D(4, 3, padding=1, in_channels=4)), maps, map_),
            ),
        },
        "layer": {
            "batch_dot": (lambda: Lambda(outer_products), partial(uniform, 2, 6, 16)),
            "nn.Embedding": (lambda: sequential(nn.Embedding(20, 16), nn.Dense(8)), partial(whole, 20, 2, 6)),
        },
    }
    layers = kept["layer"]
    for dims, shape in ((1, row), (2, picture), (3, cube)):
        for kind in ("Conv", "ConvTranspose"):
            name = f"Conv{dims}D{kind[4:]}"
            layers[f"nn.{name}"] = (partial(two, getattr(nn, name)), shape)
    for name in ("LayerNorm", "GroupNorm", "InstanceNorm", "BatchNorm"):
        make = partial(getattr(nn, name), **({"num_groups": 2} if name == "GroupNorm" else {}))
        layers[f"nn.{name}"] = (lambda m=make: sequential(nn.Conv2D(8, 3), m(), nn.Conv2D(8, 3)), picture)
    for name in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        layers[f"nn.Activation.{name}"] = (partial(activated, partial(nn.Activation, name)), partial(uniform, 8, 16))
    for name in ("LeakyReLU", "PReLU", "ELU", "SELU", "GELU", "Swish"):
        make = partial(getattr(nn, name), **({"alpha": 0.1} if name == "LeakyReLU" else {}))
        layers[f"nn.{name}"] = (partial(activated, make), partial(uniform, 8, 16))
    return {
        name: (kind, make, lambda drawn=inputs: [draw() for draw in drawn])
        for kind, group in kept.items()
        for name, (make, *inputs) in group.items()
    }


def activated(make: Any) -> Any:
    return sequential(nn.Dense(32), make(), nn.Dense(8))


def two(make: Any) -> Any:
    return sequential(make(8, 3, padding=1), make(4, 3, strides=2, padding=1))


def concurrent(kind: Any) -> Any:
    net = kind(axis=1)
    net.add(nn.Conv2D(4, 3, padding=1), nn.Conv2D(4, 1))
    return net


def numpy_case(name: str, make: Callable[[], Any], *shape: int) -> Case:
    def made() -> Any:
        mx.npx.set_np()
        return make()

    return Case(name, "mx.np", made, lambda: [uniform(*shape).as_np_ndarray()])


def mlp() -> Any:
    return sequential(nn.Dense(32, activation="relu"), nn.Dense(8))


def convolutional() -> Any:
    return sequential(
        nn.Conv2D(8, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(8, 3), nn.GlobalAvgPool2D(), nn.Dense(5)
    )


def products(F, x: Any) -> Any:  # noqa: N803
    return F.np.tanh(F.np.matmul(x, F.np.swapaxes(x, 1, 2)) / 4)


def attention(F, dense: Any, x: Any) -> Any:  # noqa: N803
    y = dense(x)
    return F.npx.batch_dot(F.npx.softmax(F.npx.batch_dot(y, y, transpose_b=True)), y)


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (rnn.RNN, rnn.LSTM, rnn.GRU):
        for bidirectional in (False, True):
            for layers in (1, 2):
                make = partial(rnn_layer, kind, bidirectional, layers)
                found[make().name] = make
    found.update({name: partial(cell, name, make) for name, make in cells().items()})
    for dims in "123":
        for gate in ("RNN", "LSTM", "GRU"):
            found[f"contrib.Conv{dims}D{gate}Cell"] = partial(conv_cell, dims, gate)
    for name, (kind, make, inputs) in blocks().items():
        found[name] = partial(Case, name, kind, make, inputs)
    found["np.mlp"] = partial(numpy_case, "np.mlp", mlp, 4, 16)
    found["np.convolutional"] = partial(numpy_case, "np.convolutional", convolutional, 4, 3, 16, 16)
    found["np.matmul"] = partial(numpy_case, "np.matmul", lambda: Lambda(products), 2, 6, 16)
    found["np.attention"] = partial(
        numpy_case, "np.attention", lambda: Lambda(attention, nn.Dense(16, flatten=False, in_units=16)), 2, 6, 16
    )
    found["contrib.SparseEmbedding"] = "its weight is row-sparse and it is no HybridBlock: mxmp leaves it alone"
    return found
