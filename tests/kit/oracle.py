"""One FP32 reference for Symbols and nets, and how close to it a result is."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
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


def cast_nodes(symbol: mx.sym.Symbol) -> list[str]:
    """The names of a Symbol's ``Cast`` operators."""
    return [node["name"] for node in nodes(symbol) if node["op"] == "Cast"]
