"""Draws the Python code of a net, line by line, and what happens to it between calls."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import nn

import mxmp
from mxmp import diagnose
from mxmp.gluon.hook import hook_of

from .drawn_sequences import RefusedError, refusals

SHAPE = (4, 3)
# Lines of code that make ``{new}`` of ``{a}`` and ``{c}``, all of SHAPE; ``b`` is the block.
LINES = r"""
{new} = F.tanh({a})
{new} = {a} + {c}
{new} = {a} * {c}
{new} = {a} - 0.5 * {c}
{new} = F.broadcast_mul({a}, w)
{new} = b.dense({a})
{new} = b.norm({a})
{new} = b.inner({a})
{new} = b.inner({a}) + b.inner({c})
{new} = {a} * b.k
{new} = {a} * b.options["k"]
{new} = {a} * b.items[0]
{new} = {a} * b.config.k
{new} = {a} * K
{new} = {a} * settings.k
{new} = helper({a})
{new} = b.method({a}, F)
{new} = b.of_class({a})
{new} = (lambda z: z * b.k)({a})
{new} = {a} if b.flag else F.tanh({a})
{new} = {a} if autograd.is_training() else {a} * 0.5
{new} = {a} if autograd.is_recording() else {a} * 2
{new} = y + {a} if y is not None else {a}
{new} = sum([{a}, {c}, {a}])
{new} = F.add_n(*[{a}, {c}])
{new} = {{"p": {a}, "q": [{c}]}}["q"][0]
{new} = {a}.reshape(-1, 1).reshape(4, 3)
{new} = {a}.reshape(2, -1, 3).sum(axis=1).reshape((2, 3)).repeat(2, axis=0)
{new} = {a} * (1 / {a}.shape[0])
{new} = {a}.slice_axis(axis=0, begin=0, end={c}.shape[0])
{new} = {a}.T.T
{new} = {a} - {a}.mean(axis=1, keepdims=True)
{new} = {a} * {c}.max() + ({a} > {c}.mean())
{new} = F.contrib.foreach(lambda row, s: (row * b.k + s, s), {a}, F.zeros((3,)))[0]
p, q, r = F.split({a}, num_outputs=3, axis=1)\n{new} = F.concat(q, p, r, dim=1)
for _ in range(b.rounds):\n    {a} = F.sigmoid({a})\n{new} = {a}
{new} = {a}\nfor value in b.items:\n    {new} = {new} * value
rows = []\nrows.append({a})\n{new} = rows[-1] * 0.5
with autograd.pause():\n    {new} = F.tanh({a})
with autograd.pause():\n    {new} = b.dense({a})
with autograd.pause():\n    aside = F.tanh({a}) * b.k\n{new} = {c} * aside
with autograd.predict_mode():\n    {new} = b.drop({a})
with autograd.predict_mode():\n    {new} = b.drop(b.act({a}))
b.aux = {a}\n{new} = b.aux * 0.5
b.aux = {{"a": {a}, "n": b.k}}\n{new} = {c}
b.count += 1\n{new} = {a} * (b.count % 2)
b.names = ["one", {a} * 2]\n{new} = {c}
TALLY["n"] = b.k\n{new} = {a}
TALLY["n"] = TALLY.get("n", 0) + 1\n{new} = {a} * (TALLY["n"] % 3)
b.inner.k = 0.5\n{new} = b.inner({a})\nb.inner.k = 1.5\n{new} = b.inner({new})
b.inner.last = {a}\n{new} = b.inner.last + {c}
b.config.k = 0.5 if b.config.k > 0.5 else 1.5\n{new} = {a} * b.config.k
type(b).factor = 0.5\n{new} = b.of_class({a})
{new} = {a} * type(b).factor
{new} = b.of_class({a})\ntype(b).factor = 1.5 if b.factor < 1 else 0.5
b.__class__.factor += 0.25\n{new} = {c}
setattr(b, "late", 2 * b.k)\n{new} = {a} * b.late
{new} = {a} * getattr(b, "late", 1) if hasattr(b, "late") else {c}
try:\n    {new} = {a} * b.absent\nexcept AttributeError:\n    {new} = {a} * 2
b.items.append(0.5)\n{new} = {a} * b.items[-1]
K = 0.5 if K > 0.5 else 1.5\n{new} = {a} * K
{new} = {a} * math.sqrt(b.k) + np.float32(b.k) * {c}
{new} = {a}.astype("float16").astype("float32")
{new} = {a}\nwhile {new} is {a}:\n    {new} = F.tanh({a})
{new} = b.twice({a})
{new} = {a} * type(b).factor
{new} = {a} * b.__class__.factor
{new} = b.fixed({a}, b.k)
{new} = b.doubled * {a}
{new} = b.scale({a}) if b.scale else {a}
{new} = b.act({a})
{new} = F.contrib.foreach(lambda row, s: (b.dense(F.expand_dims(row, 0)), s), {a}, F.zeros((3,)))[0].reshape(-3, 0)
with autograd.pause():\n    b.aux = b.inner({a})\n{new} = {c} * 1
with autograd.pause():\n    with autograd.train_mode():\n        {new} = F.sigmoid({a})
with autograd.predict_mode():\n    {new} = {a} if autograd.is_training() else {a} * 0.5
{new} = {{name: f({a}) for name, f in [("t", F.tanh), ("s", F.sigmoid)]}}["s"]
{new} = functools.reduce(lambda p, q: p + q, [{a}, {c}, {a}])
""".strip().split("\n")
# The same lines in MXNet's NumPy interface, and lines of its own.
IN_NUMPY = {
    "F.tanh": "F.np.tanh",
    "F.sigmoid": "F.npx.sigmoid",
    "F.broadcast_mul({a}, w)": "{a} * w",
    "F.add_n(*[{a}, {c}])": "F.np.add(*[{a}, {c}])",
    "F.split({a}, num_outputs=3, axis=1)": "F.np.split({a}, 3, axis=1)",
    "F.concat(q, p, r, dim=1)": "F.np.concatenate([q, p, r], axis=1)",
    "{a}.slice_axis(axis=0, begin=0, end={c}.shape[0])": "{a}[: {c}.shape[0]]",
}
NUMPY_LINES = r"""
{new} = F.np.where({a} > 0, {a}, {c})
{new} = F.np.where({a} > {c}, 0.5, {c})
{new} = F.np.tanh(F.np.einsum("ij,kj,kl->il", {a}, F.np.tanh({c}), F.np.tanh({a})))
{new} = F.np.tanh(F.np.dot(F.np.tanh({a}), F.np.dot(F.np.tanh({c}).T, {a})))
{new} = F.np.tanh(F.np.matmul(F.np.matmul({a}, F.np.tanh({c}).T), F.np.tanh({a})))
{new} = F.np.tanh(F.np.tensordot({a}, F.np.tanh(F.np.tensordot({a}, {c}, ([0], [0]))), 1))
p = F.npx.batch_dot(F.np.expand_dims({a}, 0), F.np.stack([{c}]), transpose_b=True)[0]\n{new} = F.np.tanh(p).dot({a})
{new} = {a}[::-1]
{new} = F.np.concatenate([{a}[:, 1:], {c}[:, :1]], axis=1)
{new} = F.np.concatenate([{a}[1:], {c}[-1:]])
{new} = {a} + F.np.tanh({c}[0] * {a}[-1, :])
{new} = {a} * {c}[:, 0].reshape(-1, 1) + {c}[1, 2]
{new} = {a} * {c}[-1] + {c}[..., -1, None]
{new} = ({a}[:, None] + {c}[None]).mean(axis=0)
{new} = {a}[None, ..., ::-1][0] * {c}.shape[-1]
{new} = F.np.tanh({a} @ F.np.tanh({c}).T) @ {a}
{new} = abs({a}) * (~({c} > 0) | ({a} > 0.5) & ({c} < 0.9)) + {c}.copy()
b.aux = [{a} > 0, {a}.as_nd_ndarray()]\n{new} = {c}
s = {a}.mean()\n{new} = {c} * s + F.np.zeros(()) + s.reshape(1, 1)
{new} = {a} + F.np.expand_dims({c}[:, -1], 1)
{new} = F.npx.reshape(F.npx.reshape({a}, (-6, 2, -1, -2)), (-5, -4))
{new} = F.np.stack([{a}, {c}], axis=-1).mean(axis=-1)
p, *q = F.np.split({a}, [1, 3])\n{new} = F.np.concatenate([*q, p])
{new} = F.np.stack(F.np.split({a}, 2)).reshape(4, 3)
{new} = F.np.concatenate(F.np.array_split({a}, 2, axis=1)[::-1], axis=1)
{new} = F.npx.softmax({a}, F.np.argmax(x, axis=1) + 1, use_length=True)
{new} = F.npx.log_softmax({a}, axis=0)
{new} = F.np.expand_dims(F.npx.pick({a}, F.np.argmin(x, axis=1)), -1) * {c}
{new} = F.npx.one_hot(F.np.argmax(x, axis=1), 3) * {a}
{new} = F.npx.topk({a}, k=3, ret_typ="value") * {c}
{new} = F.np.take({a}, F.np.argsort(x[:, 0]), axis=0)
{new} = F.np.sort({a}, axis=0)
{new} = F.np.cumsum({a}, axis=1)
{new} = F.np.linalg.norm({a} + 2, axis=1, keepdims=True) * {c}
p = F.np.tanh({c})\n{new} = F.np.dot({a}, F.np.linalg.inv(F.np.dot(p.T, p) + F.np.eye(3)))
{new} = F.np.clip({a}, -0.5, None) + {c}.clip(0, 1)
{new} = F.np.maximum({a}, 0.1) - F.np.minimum({c}, 0.2)
{new} = F.npx.layer_norm({a}, w[0], w[0] * 2)
{new} = F.npx.activation({a}, "softrelu") + F.npx.leaky_relu({c}, act_type="gelu")
{new} = {a} * F.np.mean({c}) + {c}.sum() / {a}.size
{new} = {a} - {a}.max(axis=0) * F.np.tanh({c}).var() + {a}.std(1, keepdims=True)
{new} = {a} * F.np.arange({a}.shape[1]) + F.np.linspace(0, 1, 3)
{new} = {a} * np.float32(b.k) / np.sqrt({c}.shape[-1])
{new} = 2 ** F.np.tanh({a}) - F.np.tanh({c}) ** 2 + 1 / (abs(b.k) + F.npx.sigmoid({a}))
{new} = F.np.tile({a}, (2, 1))[1:5] + F.np.repeat({c}, 2, axis=0)[::2]
{new} = F.np.swapaxes({a}, 0, 1).transpose((1, 0)) + F.np.roll({c}, 1, axis=0)
{new} = F.np.pad({a}, ((1, 0), (0, 0)))[1:] + F.np.tril({c})
{new} = F.np.outer(F.np.tanh({a}[:, 0]), {c}[0])
{new} = F.np.broadcast_to({a}[:, :1], {c}.shape)
{new} = {a} * {a}.ndim + F.np.ones_like({c})
{new} = {a}.as_nd_ndarray().reshape((0, -1)).as_np_ndarray()
{new} = ({a}.as_nd_ndarray() * {c}.as_nd_ndarray().mean(axis=1, keepdims=True)).as_np_ndarray()
{new} = F.contrib.foreach(lambda row, s: (row * b.k + s, s), {a}.as_nd_ndarray(), F.zeros((3,)))[0].as_np_ndarray()
with autograd.pause():\n    {new} = F.npx.softmax({a} + F.np.dot({c}, F.np.tanh({c}).T)[:, :3])
with autograd.predict_mode():\n    {new} = F.npx.dropout({a}, p=0.9)
""".strip().split("\n")
for line in (each for each in LINES if "F.contrib" not in each):
    for name, its in IN_NUMPY.items():
        line = line.replace(name, its)
    NUMPY_LINES.append(line)
ENDS = ["return {a}", "return {a}, {c}", "return [{a}, [{c}]]", 'return {{"x": {a}, "k": b.k, "more": [{c}, None]}}']
CALLS = {
    "predict": autograd.predict_mode,
    "train": autograd.train_mode,
    "record": autograd.record,
    "record, predict": lambda: autograd.record(train_mode=False),
}
VALUES = [0.5, 1.0, 1.5]
# Tools, which leave no trace of the calls that they make.
LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "explain": lambda net, x: str(mxmp.explain(net, x)),
    "advise": diagnose.advise,
    "audit": lambda net, x: diagnose.audit(net, first_of, (x, x)),
    "audit outputs": lambda net, x: diagnose.audit(net, None, x),
    "blame": lambda net, x: diagnose.blame(net, mxmp.Trainer(net.collect_params(), "sgd"), x, loss=first_of),
}


def looked(net: Any, look: Callable) -> None:
    """A tool's refusal in words changes nothing either."""
    if hook_of(net):
        with suppress(RefusedError), refusals():
            look(net, (mx.np if mx.util.is_np_array() else mx.nd).ones(SHAPE))


def first_of(out: Any, *_: Any) -> Any:
    while not isinstance(out, mx.nd.NDArray):
        out = next(iter(out.values() if isinstance(out, dict) else out))
    return (out * out).sum()


# What happens between calls, to a block and the module of its code.
EVENTS: dict[str, Callable[[Any, Any, float], Any]] = {
    "attribute": lambda b, module, v: setattr(b, "k", v),
    "in a dict": lambda b, module, v: b.options.update(k=v),
    "in a list": lambda b, module, v: b.items.__setitem__(0, v),
    "longer list": lambda b, module, v: b.items.append(v),
    "in an object": lambda b, module, v: setattr(b.config, "k", v),
    "global": lambda b, module, v: setattr(module, "K", v),
    "of a module": lambda b, module, v: setattr(module.settings, "k", v),
    "of the class": lambda b, module, v: setattr(type(b), "factor", v),
    "flag": lambda b, module, v: setattr(b, "flag", v > 1),
    "rounds": lambda b, module, v: setattr(b, "rounds", int(2 * v) - 1),
    "function": lambda b, module, v: setattr(module, "helper", lambda z: z * v),
    "layer": lambda b, module, v: setattr(b, "dense", fixed_dense(v, f"{b.prefix}later_")),
    "activation": lambda b, module, v: setattr(b, "act", nn.Activation("sigmoid" if v > 1 else "tanh")),
    "scale": lambda b, module, v: setattr(b, "scale", (lambda z: z * v) if v > 0.5 else None),
    "late": lambda b, module, v: setattr(b, "late", v),
    "copy": lambda b, module, v: copy.deepcopy(b),
    "weights": lambda b, module, v: b.dense.weight.set_data(b.dense.weight.data() * v),
    "restored": lambda b, module, v: hook_of(b) and mxmp.convert(mxmp.restore(b), "float16"),
    "grad_req": lambda b, module, v: setattr(b.w, "grad_req", "null" if v < 1 else "write"),
    # Only of the converted net: what MXNet's own graph makes of the code is not asked.
    "hybridized": lambda b, module, v: hook_of(b) and b.hybridize(static_alloc=v > 1, static_shape=v > 1),
    **{look: lambda b, module, v, look=look: looked(b, LOOKS[look]) for look in LOOKS},
}


OF_THE_NET = ("copy", "restored", "hybridized", *LOOKS)


@dataclass(frozen=True)
class Program:
    """Code of a net and of a block inside, and the calls of it, each after what happens first, to which of both."""

    code: str
    is_numpy: bool
    calls: tuple[tuple[tuple[tuple[str, float, bool], ...], str, bool], ...]

    def __str__(self) -> str:
        return f"{self.code}\n{self.is_numpy=} {self.calls}"


@st.composite
def functions(draw: Any, called: str, choices: list[str], most: int, ends: list[str]) -> str:
    names, lines = ["x"], []
    for number in range(draw(st.integers(1, most))):
        used = {"a": draw(st.sampled_from(names)), "c": draw(st.sampled_from(names)), "new": f"v{number}"}
        lines += draw(st.sampled_from(choices)).replace("\\n", "\n").format(**used).split("\n")
        names.append(f"v{number}")
    lines.append(draw(st.sampled_from(ends)).format(a=names[-1], c=draw(st.sampled_from(names))))
    return f"def {called}(b, F, x, y, w):\n    global K\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


@st.composite
def programs(draw: Any) -> Program:
    is_numpy = draw(st.booleans())
    lines = NUMPY_LINES if is_numpy else LINES
    inside = [line for line in lines if "b.inner" not in line]
    code = draw(functions("compute", lines, 7, ENDS)) + draw(functions("inside", inside, 3, ENDS[:1]))
    event = st.tuples(st.sampled_from([*EVENTS]), st.sampled_from(VALUES), st.booleans())
    call = st.tuples(st.lists(event, max_size=2).map(tuple), st.sampled_from([*CALLS]), st.booleans())
    return Program(code, is_numpy, tuple(draw(st.lists(call, min_size=2, max_size=6))))


def fixed_dense(value: float, prefix: str) -> nn.Dense:
    layer = nn.Dense(3, in_units=3, prefix=prefix, weight_initializer=mx.init.Constant(value / 3))
    layer.initialize()
    return layer


_numbers = itertools.count()


def made(code: str) -> tuple[nn.HybridBlock, ModuleType]:
    """Return a net of this code, not initialized, and the module of the code."""
    module = ModuleType(f"drawn{next(_numbers)}")
    vars(module).update(autograd=autograd, math=math, np=np, functools=functools)
    vars(module).update(K=1.0, TALLY={}, settings=ModuleType("settings"))
    module.settings.k = 1.0
    module.helper = lambda z: z * 0.5
    exec(code, vars(module))

    class Drawn(nn.HybridBlock):
        factor = 1.0

        def __init__(self, code):
            super().__init__()
            self.code, self.last = code, None
            self.k, self.flag, self.rounds, self.count, self.aux, self.scale = 1.0, False, 1, 0, None, None
            self.options, self.items, self.config, self.names = {"k": 1.0}, [1.0, 0.5], SimpleNamespace(k=1.0), None
            with self.name_scope():
                # Statistics that stay: a graph updates those of a layer that reaches no loss, too, as MXNet's own does.
                self.dense, self.norm = nn.Dense(3, in_units=3), nn.BatchNorm(in_channels=3, momentum=1)
                self.inner = Drawn("inside") if code == "compute" else None
                self.drop, self.act = nn.Dropout(0.9), nn.Activation("relu")
                self.w = self.params.get("w", shape=(1, 3), init=mx.init.Uniform(1))

        def method(self, x, op):
            return (op.npx if mx.util.is_np_array() else op).sigmoid(x) * self.k

        @staticmethod
        def fixed(x, k):
            return x * k + module.K

        @classmethod
        def twice(cls, x):
            return x * 2 * cls.factor

        @property
        def doubled(self):
            return self.k * 2

        def of_class(self, x):
            return x * self.factor

        def hybrid_forward(self, op, x, y=None, w=None):
            compute = module.compute if self.code == "compute" else module.inside
            return compute(self, op, x, y, w)

    return Drawn("compute"), module
