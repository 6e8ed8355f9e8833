"""One FP32 reference for both doors, and the graphs and nets that the tests run through them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from mxnet import autograd, gluon

import mxmp

S = mx.sym


class Result(NamedTuple):
    """Outputs, and the gradient of every argument that has one."""

    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    """Signal to quantisation noise in dB; infinite where the two are equal."""
    noise = float(np.sum((reference.astype("float64") - value) ** 2))
    signal = float(np.sum(reference.astype("float64") ** 2))
    return float("inf") if noise == 0 else 10 * np.log10(max(signal, 1e-300) / noise)


def half(value: np.ndarray) -> np.ndarray:
    """Rounded to float16, in FP32."""
    with np.errstate(over="ignore"):
        return np.asarray(value, "float32").astype("float16").astype("float32")


def head_grads(outputs: list[Any]) -> list[mx.nd.NDArray]:
    rng = np.random.RandomState(7)
    return [mx.nd.array(rng.normal(0, 1, out.shape), dtype=out.dtype) for out in outputs]


def by_symbol(
    symbol: mx.sym.Symbol,
    values: dict[str, np.ndarray],
    *,
    train: bool = True,
    grads_of: list[str] | None = None,
    heads: list[np.ndarray] | None = None,
) -> Result:
    """Run a Symbol, with ``values`` for its arguments and auxiliary states, forward and backward.

    ``heads`` are the gradients of the outputs; without them, ``head_grads``.
    """
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    args = {name: mx.nd.array(values[name], dtype=values[name].dtype) for name in arguments}
    wanted = arguments if grads_of is None else grads_of
    grads = {name: mx.nd.zeros(args[name].shape, dtype=args[name].dtype) for name in wanted}
    executor = symbol.bind(mx.cpu(), args, grads, aux_states={name: mx.nd.array(values[name]) for name in states})
    outputs = executor.forward(is_train=train)
    if train:
        given = None if heads is None else [mx.nd.array(h, dtype=o.dtype) for h, o in zip(heads, outputs)]
        executor.backward(given or head_grads(outputs))
    return Result([out.asnumpy() for out in outputs], {n: g.asnumpy() for n, g in grads.items()})


def by_gluon(
    net: gluon.Block, inputs: list[np.ndarray], *, train: bool = True, heads: list[np.ndarray] | None = None
) -> Result:
    """Run a net on ``inputs``, forward and backward; ``heads``: as by ``by_symbol``."""
    arrays = [mx.nd.array(value, dtype=value.dtype) for value in inputs]
    with autograd.record(train_mode=train):
        outputs = net(*arrays)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    if train:
        given = None if heads is None else [mx.nd.array(h, dtype=o.dtype) for h, o in zip(heads, outputs)]
        autograd.backward(outputs, given or head_grads(outputs))
    params = net.collect_params()
    grads = {n: p.grad().asnumpy() for n, p in params.items() if p.grad_req != "null"} if train else {}
    return Result([out.asnumpy() for out in outputs], grads)


def traced(net: gluon.HybridBlock, inputs: list[np.ndarray]) -> tuple[mx.sym.Symbol, dict[str, np.ndarray]]:
    """A net's FP32 Symbol, and the values of its arguments and states."""
    names = [f"input{i}" for i in range(len(inputs))]
    symbol = net(*map(S.var, names))
    symbol = S.Group(list(symbol)) if isinstance(symbol, (list, tuple)) else symbol
    values = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
    return symbol, {**values, **dict(zip(names, inputs))}


def reference(net: gluon.HybridBlock, inputs: list[np.ndarray]) -> Result:
    """The FP32 oracle: the plain Symbol of the net, bound and run, parameters' gradients only."""
    symbol, values = traced(net, inputs)
    return by_symbol(symbol, values, grads_of=trainable(net))


def assert_same_bits(one: Result, other: Result) -> None:
    for value, expected in zip(one.outputs, other.outputs):
        np.testing.assert_array_equal(value, expected)
    assert one.grads.keys() == other.grads.keys()
    for name, expected in other.grads.items():
        np.testing.assert_array_equal(one.grads[name], expected, err_msg=name)


def agree(got: Result, want: Result, floor: float) -> None:
    """Outputs and gradients as close to the reference as ``floor`` dB."""
    for value, expected in zip(got.outputs, want.outputs):
        assert sqnr(expected, value) > floor
    assert got.grads.keys() == want.grads.keys()
    for name, expected in want.grads.items():
        assert sqnr(expected, got.grads[name]) > floor, name


def trainable(net: gluon.Block) -> list[str]:
    return [name for name, p in net.collect_params().items() if p.grad_req != "null"]


def nodes(symbol: mx.sym.Symbol) -> list[dict]:
    return json.loads(symbol.tojson(remove_amp_cast=False))["nodes"]


def casts(symbol: mx.sym.Symbol) -> list[tuple[str, str]]:
    """For every cast in a Symbol: what it reads and the dtype that it makes."""
    every = nodes(symbol)
    return [(every[n["inputs"][0][0]]["name"], n["attrs"]["dtype"]) for n in every if n["op"] in ("Cast", "amp_cast")]


def native(symbol: mx.sym.Symbol, policy: str | mxmp.Policy = "params=float32", **kwargs) -> mx.sym.Symbol:
    """The cast Symbol as a GPU runs it: casts where the dtype changes and nothing else."""
    return mxmp.cast_symbol(symbol, policy, ctx=mx.gpu(), **kwargs)


def filled(symbol: mx.sym.Symbol, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random values for all arguments and states of a Symbol, of modest size and variances positive."""
    rng = np.random.RandomState(3)
    args, _, states = symbol.infer_shape(**shapes)
    values = {}
    for name, shape in zip(symbol.list_arguments(), args):
        fan_in = max(int(np.prod(shape[1:])), 1)
        scale = 1.0 if name in shapes or name.endswith("gamma") else fan_in**-0.5
        values[name] = rng.normal(0, scale, shape).astype("float32")
    for name, shape in zip(symbol.list_auxiliary_states(), states):
        values[name] = np.ones(shape, "float32") if "var" in name else np.zeros(shape, "float32")
    return values


# -- Random graphs ----------------------------------------------------------------------------------

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
