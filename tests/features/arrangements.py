"""Legal arrangements of nets, heads, trainers, scales and devices, drawn; and each with its FP32 twin.

``deltas(arrangement)`` and ``deltas(arrangement, full=True)`` run the same three steps, with evaluations between
them, the latter with neither casts nor scaling, by MXNet's own Trainer or Module.
"""

from __future__ import annotations

import os
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any, Callable

import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from kit.plans import random_exclusions, random_plan
from kit.twins import FLAGS, POLICIES, array, value
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.symbols import traced_call

WIDTH, CLASSES, BATCH, STEPS = 8, 3, 8, 3


# -- what nets are made of --------------------------------------------------------------------------


class Dense(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(WIDTH, in_units=WIDTH)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.tanh(self.dense(x))


class Frozen(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.dense.collect_params().setattr("grad_req", "null")


class Tied(gluon.HybridBlock):
    """One weight, read twice."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.one = nn.Dense(WIDTH, in_units=WIDTH)
            self.two = nn.Dense(WIDTH, in_units=WIDTH, params=self.one.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.tanh(self.two(F.tanh(self.one(x))))


class Normalized(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.dense, self.norm = nn.Dense(WIDTH, in_units=WIDTH), nn.LayerNorm(in_channels=WIDTH)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x + self.norm(self.dense(x))


class Convolved(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.conv, self.norm = (
                nn.Conv1D(4, 3, padding=1, in_channels=2, use_bias=False),
                nn.BatchNorm(in_channels=4),
            )

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        y = F.tanh(self.norm(self.conv(x.reshape((0, 2, -1)))))
        return x + F.Pooling(y, kernel=(2,), stride=(2,), pool_type="avg").reshape((0, -1))


class Grouped(gluon.HybridBlock):
    """Grouped and depthwise convolutions, whose weights FP32 inference leaves in oneDNN's layouts of five axes."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.conv = nn.Conv2D(2 * WIDTH, 3, padding=1, groups=2, in_channels=WIDTH, use_bias=False)
            self.norm = nn.BatchNorm(in_channels=2 * WIDTH)
            self.depthwise = nn.Conv2D(2 * WIDTH, 3, padding=1, groups=2 * WIDTH, in_channels=2 * WIDTH)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        y = F.broadcast_axis(x.reshape((0, 0, 1, 1)), axis=(2, 3), size=(3, 3))
        y = F.Pooling(self.depthwise(F.tanh(self.norm(self.conv(y)))), global_pool=True, pool_type="avg", kernel=(1, 1))
        return x + F.slice_axis(F.Flatten(y), axis=1, begin=0, end=WIDTH)


class Transposed(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.conv = nn.Conv2DTranspose(WIDTH, 1, in_channels=WIDTH)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x + F.Flatten(F.tanh(self.conv(_as_image(F, x))))


class Recurrent(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.lstm = gluon.rnn.LSTM(4, input_size=4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        steps = self.lstm(F.swapaxes(x.reshape((0, 2, 4)), 0, 1))
        return x + F.swapaxes(steps, 0, 1).reshape((0, -1))


class Attention(gluon.HybridBlock):
    """The matrix products of a transformer's self-attention, of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.project = nn.Dense(3 * WIDTH, in_units=WIDTH, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        qkv = self.project(x.reshape((-1, 2, WIDTH)))
        scores = F.contrib.interleaved_matmul_selfatt_qk(qkv, heads=2)
        seen = F.contrib.interleaved_matmul_selfatt_valatt(qkv, F.softmax(scores), heads=2)
        return x + F.tanh(seen).reshape((-1, WIDTH))


class Switched(gluon.HybridBlock):
    """A block that is called with Python values, and answers with some."""

    class Inner(Dense):
        def hybrid_forward(self, F: Any, x: Any, how: list) -> Any:  # noqa: N803
            half, name = how
            return {"out": getattr(F, name)(self.dense(x * 0.5 if half else x)), "half": half}

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.inner = self.Inner()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        found = self.inner(x, [True, "tanh"])
        return found["out"] if found["half"] else x


def _flat(op: Any, w: Any, operator: Callable[[Any], Any]) -> Any:
    """``operator`` of the weight as an image."""
    return operator(op.reshape(w, shape=(1, 1, WIDTH, WIDTH))).reshape((-1, WIDTH))


def _standardized(op: Any, w: Any) -> Any:
    centred = op.broadcast_sub(w, op.mean(w, axis=1, keepdims=True))
    return op.broadcast_div(centred, op.sqrt(op.mean(op.square(centred), axis=1, keepdims=True) + 1e-3)) * 0.3


def _padded(op: Any, w: Any) -> Any:
    more = _flat(op, w, lambda image: op.Pad(image, mode="edge", pad_width=(0, 0, 0, 0, 0, 1, 0, 0)))
    return op.slice_axis(more, axis=0, begin=1, end=1 + WIDTH)


def _joined_halves(op: Any, w: Any) -> Any:
    low, high = (op.slice_axis(w, axis=0, begin=k, end=k + WIDTH // 2) for k in (0, WIDTH // 2))
    return op.concat(op.tanh(high), low, dim=0)


# What stands between a weight and the layer that reads it: continuous where it has a gradient, so that FP32 may differ
# by a rounding. clip cuts at no value that is drawn.
ON_WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "half": lambda op, w: w * 0.5,
    "tanh": lambda op, w: op.tanh(w),
    "sign": lambda op, w: op.sign(w) * 0.3,
    "clip": lambda op, w: op.clip(w, -2, 2),
    "exp": lambda op, w: op.expm1(w),
    "softmax": lambda op, w: op.softmax(w, axis=1),
    "normalized": lambda op, w: op.L2Normalization(w),
    "standardized": _standardized,
    "layer norm": lambda op, w: op.LayerNorm(w, op.ones((WIDTH,)), op.zeros((WIDTH,))) * 0.3,
    "padded": _padded,
    "pooled": lambda op, w: _flat(op, w, lambda image: op.Pooling(image, kernel=(3, 3), pad=(1, 1), pool_type="avg")),
    "take": lambda op, w: op.take(w, op.arange(WIDTH)),
    "embedded": lambda op, w: op.Embedding(op.arange(WIDTH), w, input_dim=WIDTH, output_dim=WIDTH),
    "concat": _joined_halves,
    "stacked": lambda op, w: op.mean(op.stack(w, op.tanh(w), axis=0), axis=0),
    "tiled": lambda op, w: op.slice_axis(op.tile(w, reps=(2, 1)), axis=0, begin=1, end=1 + WIDTH),
    "transposed": lambda op, w: op.transpose(w),
    "swapped": lambda op, w: op.SwapAxis(w, dim1=0, dim2=1),
    "split": lambda op, w: op.broadcast_mul(w, op.split(w, num_outputs=WIDTH, axis=1)[0]),
    "product": lambda op, w: op.dot(w, w, transpose_b=True) * 0.5,
    "layer": lambda op, w: op.FullyConnected(w, op.tanh(w), num_hidden=WIDTH, no_bias=True),
    "detached": lambda op, w: w - op.BlockGrad(w) * 0.5,
    "float64": lambda op, w: op.cast(op.cast(w, dtype="float64"), dtype="float32"),
    "added": lambda op, w: op.add_n(w, w * 0.5),
}


NAIVE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


def _as_image(op: Any, x: Any) -> Any:
    """A reshape is a view, which MXNet's FP32 convolution refuses to read with the naive engine: there it is copied."""
    image = x.reshape((0, 0, 1, 1))
    return op.identity(image) if NAIVE else image


READERS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "dense": lambda op, x, w, plain: op.FullyConnected(x, w, num_hidden=WIDTH, no_bias=True),
    "dense with bias": lambda op, x, w, plain: op.FullyConnected(x, plain, op.mean(w, axis=1), num_hidden=WIDTH),
    "dot": lambda op, x, w, plain: op.dot(x, w),
    "batch_dot": lambda op, x, w, plain: op.batch_dot(
        x.expand_dims(1), op.broadcast_like(w.expand_dims(0), x, lhs_axes=(0,), rhs_axes=(0,))
    ),
    "conv": lambda op, x, w, plain: op.Convolution(
        _as_image(op, x), _as_image(op, w), num_filter=WIDTH, kernel=(1, 1), no_bias=True
    ),
    "two layers": lambda op, x, w, plain: op.dot(op.tanh(op.FullyConnected(x, w, num_hidden=WIDTH, no_bias=True)), w),
    "layer of each": lambda op, x, w, plain: op.dot(x, plain) + op.dot(x, w),
    "gate": lambda op, x, w, plain: op.broadcast_mul(op.dot(x, plain), op.mean(w, axis=0, keepdims=True)),
}


class OnWeight(gluon.HybridBlock):
    """A layer whose weight goes through operators: ``"tanh, clip -> dot"``.

    Where MXNet runs it as it is, they read a ``copy``: some, such as clip, cannot add to a gradient there.
    """

    def __init__(self, what: str, weight: Callable[..., gluon.Parameter] = gluon.Parameter, copy: bool = False) -> None:
        super().__init__()
        self._copy = copy
        operators, self._reader = what.split(" -> ")
        self._operators = [each for each in operators.split(", ") if each]
        name = self.params.prefix + "weight"
        self.weight = self.params._params[name] = weight(name, shape=(WIDTH, WIDTH))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        computed = F.identity(weight) if self._copy else weight
        for each in self._operators:
            computed = ON_WEIGHTS[each](F, computed)
        return F.tanh(READERS[self._reader](F, x, computed, weight).reshape((-1, WIDTH)))


class HalvedParameter(gluon.Parameter):
    """Computes what nets read, as GluonNLP's WeightDropParameter."""

    def data(self, ctx: mx.Context | None = None) -> mx.nd.NDArray:
        return super().data(ctx) * 0.5


class NormalizedParameter(gluon.Parameter):
    def data(self, ctx: mx.Context | None = None) -> mx.nd.NDArray:
        return mx.nd.L2Normalization(super().data(ctx))


class DroppedParameter(gluon.Parameter):
    def data(self, ctx: mx.Context | None = None) -> mx.nd.NDArray:
        return mx.nd.Dropout(super().data(ctx), p=0.0, mode="always")


class NamedParameter(gluon.Parameter):
    """Overrides what computes nothing."""

    def set_data(self, data: mx.nd.NDArray) -> None:
        super().set_data(data)

    def zero_grad(self) -> None:
        super().zero_grad()


PARAMETERS = {each.__name__: each for each in (HalvedParameter, NormalizedParameter, DroppedParameter, NamedParameter)}


class SoftmaxHead(gluon.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any, label: Any) -> Any:  # noqa: N803
        return F.SoftmaxOutput(x, label)


class RegressionHead(gluon.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any, label: Any) -> Any:  # noqa: N803
        return F.LinearRegressionOutput(x, F.one_hot(label, CLASSES))


class MadeHead(gluon.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any, label: Any) -> Any:  # noqa: N803
        return F.MakeLoss(-F.pick(F.log_softmax(x), label))


class Headed(gluon.HybridBlock):
    """A net that ends in its loss head."""

    def __init__(self, body: gluon.HybridBlock, head: gluon.HybridBlock) -> None:
        super().__init__()
        self.body, self.head = body, head

    def hybrid_forward(self, F: Any, x: Any, label: Any) -> Any:  # noqa: N803
        return self.head(self.body(x), label)


Pair = namedtuple("Pair", "out more")


class Valued(gluon.HybridBlock):
    """A net that is called with a Python value, which differs from step to step, and answers with others."""

    def __init__(self, body: gluon.HybridBlock, values: str) -> None:
        super().__init__()
        self.body, (self.value, self.answer) = body, values.split(" -> ")

    def hybrid_forward(self, F: Any, x: Any, *args: Any) -> Any:  # noqa: N803
        *args, how = args
        x = COMPUTED[self.value](F, x, how)
        return ANSWERS[self.answer][0](self.body(x, *args))


# The value of each step, and what the net computes with it.
VALUES: dict[str, Callable[[int], Any]] = {
    "bool": lambda step: step % 2 == 0,
    "number": lambda step: 0.5 + step,
    "integer": lambda step: 1 + step,
    "string": lambda step: ("tanh", "sin")[step % 2],
    "None": lambda step: None,
    "dtype": lambda step: (np.float32, "float64")[step % 2],
    "list": lambda step: [0.5, [None, step % 2 == 0]],
}
COMPUTED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bool": lambda op, x, how: x * 0.5 if how else x,
    "number": lambda op, x, how: x * how,
    "integer": lambda op, x, how: x / how,
    "string": lambda op, x, how: getattr(op, how)(x),
    "None": lambda op, x, how: x if how is None else x * 2,
    "dtype": lambda op, x, how: op.cast(op.cast(x, dtype=how), dtype="float32"),
    "list": lambda op, x, how: x * how[0] if how[1][1] else x,
}
# What the net answers, and where the array is in it.
ANSWERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array": (lambda out: out, lambda answer: answer),
    "dict": (lambda out: {"n": 3, "out": out, "none": None}, lambda answer: answer["out"]),
    "tuple": (lambda out: (True, (out, "name")), lambda answer: answer[1][0]),
    "namedtuple": (lambda out: Pair(out, [1.5]), lambda answer: answer.out),
    "list of one": (lambda out: [out], lambda answer: answer[0]),
}

PARTS = {"dense": Dense, "frozen": Frozen, "tied": Tied, "layer norm": Normalized, "conv": Convolved}
PARTS.update({"grouped": Grouped, "switched": Switched, "transposed": Transposed})
PARTS.update({"recurrent": Recurrent, "attention": Attention})
HEADS = {"SoftmaxOutput": SoftmaxHead, "LinearRegressionOutput": RegressionHead, "MakeLoss": MadeHead}
OPTIMIZERS = {"sgd": {"learning_rate": 0.1}, "nag": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}}


def part(name: str, copy: bool) -> gluon.HybridBlock:
    """One of ``PARTS``; or a layer of which the name says what its weight is: ``"frozen weight: tanh -> dot"``."""
    if name in PARTS:
        return PARTS[name]()
    weight, what = name.split(": ")
    kind, _, _ = weight.rpartition(" ")
    block = OnWeight(what, PARAMETERS.get(kind, gluon.Parameter), copy)
    if kind == "frozen":
        block.weight.grad_req = "null"
    return block


@st.composite
def parts(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["", "", "on weight", "parameter"]))
    if not kind:
        return draw(st.sampled_from(list(PARTS)))
    names = list(PARAMETERS) if kind == "parameter" else ["plain", "plain", "plain", "frozen"]
    weight = draw(st.sampled_from(names))
    at_least = int(kind == "on weight")
    operators = draw(st.lists(st.sampled_from(list(ON_WEIGHTS)), min_size=at_least, max_size=at_least + 1))
    return f"{weight} weight: {', '.join(operators)} -> {draw(st.sampled_from(list(READERS)))}"


# -- arrangements -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """One program.

    ``nets`` are tuples of parts; each net is converted, or kept in FP32 where ``kept`` says so. The nets
    form a chain; or each is a branch behind a trunk that all of them contain (``"trunk"``); or the last is a
    critic that is trained in turns with the others (``"critic"``).
    """

    dtype: str
    nets: tuple[tuple[str, ...], ...]
    kept: tuple[bool, ...]
    topology: str
    head: str  # "loss": of Gluon; or an operator
    head_stands: str  # "inside" the last net, or as a block of its own, "converted" or "plain"
    trainers: str  # "one", "one scaler" for several, or scalers of their "own"
    scale: float | str | None
    call: str
    backwards: int
    devices: int
    flags: str
    flags_first: bool
    optimizer: str
    overflow: bool
    how: str = "rules"  # or operators "excluded" at random, or a "plan" drawn at random
    evaluations: int = 0  # after each step
    seed: int = 0
    values: tuple[str | None, ...] = (None,) * 3  # of each net: its Python argument and answer

    def refusal(self) -> str | None:
        """A word of mxmp's error, where it must refuse this program."""
        if self.topology == "trunk" and FLAGS[self.flags] is not None and any(self.kept) and not all(self.kept):
            return "is now part of .* which was not"  # a converted trunk in a plain net's graph
        scaled = self.scale not in (None, 1.0)
        head_is_plain = self.head_stands == "plain" or (self.head_stands == "inside" and self.kept[-1])
        # What Python code calls is scaled by its attribute grad_scale, which MakeLoss reads too early. To MXNet a
        # hybridized block of one or two operators is Python code too, unless its graph is static.
        # A dense layer and SoftmaxOutput are two.
        is_long = self.head_stands == "inside" and (bool(self.nets[-1]) or self.head != "SoftmaxOutput")
        hidden = FLAGS[self.flags] is not None and (is_long or bool(FLAGS[self.flags]))
        unreached = self.head == "MakeLoss" or (self.head in HEADS and hidden)
        if scaled and unreached and head_is_plain:
            return "loss scale"
        if self.topology != "critic" and self.trainers == "own":
            return "same scaler object"
        if self.call == "unscale" and self.dtype == "float16 masters" and not all(self.kept):
            return "cannot hold unscaled values"
        return None


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    def one_of(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    nets = tuple(tuple(draw(st.lists(parts(), min_size=0, max_size=2))) for _ in range(one_of(1, 2, 2, 3)))
    several = len(nets) > 1
    topology = one_of("chain", "chain", "trunk", "critic") if several else "chain"
    head = one_of("loss", "loss", *HEADS)
    dtype = one_of(*POLICIES)
    call = one_of("backward", "backward", "scale_loss", "unscale")
    how = one_of("rules", "excluded", "plan")
    if dtype == "float16 masters" and (topology == "trunk" or call == "unscale"):
        # Nets that share a parameter must agree whether it is stored in float16, and unscale refuses where one is.
        how = "rules"
    return Arrangement(
        dtype=dtype,
        nets=nets,
        kept=tuple(one_of(False, False, False, True) for _ in nets),
        topology=topology,
        head=head,
        head_stands=one_of("inside", "converted", "plain") if head in HEADS else "plain",
        trainers=one_of("one", "one scaler", "one scaler", "own") if several else "one",
        scale=one_of(1024.0, 64.0, "dynamic", 1.0, None),
        call=call,
        backwards=one_of(1, 1, 2, 3),
        devices=one_of(1, 1, 2, 3),
        flags=one_of(*FLAGS),
        flags_first=one_of(False, True),
        optimizer=one_of(*OPTIMIZERS),
        overflow=one_of(False, False, True),
        how=how,
        evaluations=one_of(0, 1, 2),
        seed=draw(st.integers(0, 1000)),
        values=tuple(
            f"{one_of(*VALUES)} -> {one_of(*ANSWERS)}" if one_of(False, False, False, True) else None for _ in nets
        ),
    )


# -- running one ------------------------------------------------------------------------------------


def deltas(a: Arrangement, *, full: bool = False) -> dict[str, np.ndarray]:
    """What three steps add to every parameter, and the outputs of the evaluations between them."""
    program = _Program(a, full)
    before = program.values()
    outputs: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        program.step(step)
        for number in range(a.evaluations):
            outputs[f"output of evaluation {number} after step {step}"] = program.evaluate()
    mx.nd.waitall()  # BatchNorm writes its statistics in backward without telling the engine
    after = program.values()
    return {**{name: after[name] - before[name] for name in before}, **outputs}


class _Program:
    def __init__(self, a: Arrangement, full: bool) -> None:
        self.a, self.full = a, full
        self.contexts = [mx.cpu(k) for k in range(a.devices)]
        trunk = Dense() if a.topology == "trunk" else None
        self.nets = [self._net(k, trunk) for k in range(len(a.nets))]
        self.head = HEADS[a.head]() if a.head in HEADS and a.head_stands != "inside" else None
        if self.head is not None:
            self.head.initialize(ctx=self.contexts)
        for param in self._params().values():
            if a.backwards > 1 and param.grad_req == "write":
                param.grad_req = "add"
        self._initialize()
        for net, kept in [*zip(self.nets, a.kept), (self.head, a.head_stands == "plain")]:
            if net is not None:
                self._prepare(net, kept)
        self.trainers = self._make_trainers()

    def _net(self, k: int, trunk: Any) -> gluon.HybridBlock:
        net, values = nn.HybridSequential(), self.a.values[k]
        net.add(
            *([] if trunk is None else [trunk]),
            *(part(name, copy=self.full or self.a.kept[k]) for name in self.a.nets[k]),
        )
        last = k == len(self.a.nets) - 1
        ends = last or self.a.topology == "trunk"
        net.add(nn.Dense(CLASSES if ends else WIDTH, in_units=WIDTH))
        if last and self.a.head in HEADS and self.a.head_stands == "inside":
            net = Headed(net, HEADS[self.a.head]())
        return net if values is None else Valued(net, values)

    def _prepare(self, net: gluon.HybridBlock, kept: bool) -> None:
        flags, converted = FLAGS[self.a.flags], not kept and not self.full
        # MXNet's own graphs take no Python values.
        hybridized = net.body if isinstance(net, Valued) and not converted else net
        if flags is not None and self.a.flags_first:
            hybridized.hybridize(**flags)
        if converted:
            mxmp.convert(net, self._how(net))
        if flags is not None and not self.a.flags_first:
            hybridized.hybridize(**flags)

    def _how(self, net: gluon.HybridBlock) -> mxmp.Policy | mxmp.Plan:
        policy = POLICIES[self.a.dtype]
        policy = mxmp.Policy.parse(policy) if isinstance(policy, str) else policy
        if self.a.how == "rules":
            return policy
        x, label = array(0, BATCH, WIDTH), mx.nd.zeros(BATCH)
        if net is self.head:
            x = array(0, BATCH, CLASSES)
        args = (x, label) if net is self.head else self._arguments(net, x, label, 0)
        if self.a.how == "plan":
            return random_plan(net, args, policy, self.a.seed)
        return replace(policy, exclude=tuple(random_exclusions([traced_call(net, args, True)[0]], self.a.seed)))

    def _arguments(self, net: gluon.HybridBlock, x: Any, label: Any, step: int) -> tuple:
        body = net.body if isinstance(net, Valued) else net
        arrays = (x, label) if isinstance(body, Headed) else (x,)
        # A plan is of one graph.
        values = [VALUES[net.value](0 if self.a.how == "plan" else step)] if isinstance(net, Valued) else []
        return (*arrays, *values)

    def _call(self, net: gluon.HybridBlock, x: Any, label: Any, step: int) -> Any:
        out = net(*self._arguments(net, x, label, step))
        return ANSWERS[net.answer][1](out) if isinstance(net, Valued) else out

    def _params(self) -> dict[str, gluon.Parameter]:
        return {name: param for net in self.nets for name, param in net.collect_params().items()}

    def _initialize(self) -> None:
        rng = np.random.RandomState(1)
        for name, param in self._params().items():
            param.initialize(ctx=self.contexts)
            if "running" not in name:
                param.set_data(mx.nd.array(rng.uniform(-0.5, 0.5, param.shape)))

    def _make_trainers(self) -> list[gluon.Trainer]:
        groups: list[dict] = []
        seen: set[str] = set()
        for net in self.nets:  # a shared trunk belongs to the first
            groups.append({k: v for k, v in net.collect_params().items() if k not in seen})
            seen |= groups[-1].keys()
        if self.a.topology == "critic":
            groups = [_joined(groups[:-1]), groups[-1]]
        elif self.a.trainers == "one":
            groups = [_joined(groups)]
        options = OPTIMIZERS[self.a.optimizer]
        if self.full:
            return [gluon.Trainer(g, self.a.optimizer, options, update_on_kvstore=False) for g in groups]
        shared = self._scaler(0)
        scalers = [shared if self.a.trainers == "one scaler" else self._scaler(k) for k in range(len(groups))]
        return [mxmp.Trainer(g, self.a.optimizer, options, loss_scale=s) for g, s in zip(groups, scalers)]

    def _scaler(self, k: int) -> Any:
        if self.a.scale == "dynamic":
            return mxmp.DynamicLossScaler(2.0 ** (8 + k))
        return mxmp.NoLossScaler() if self.a.scale is None else mxmp.StaticLossScaler(self.a.scale)

    def step(self, number: int) -> None:
        if self.a.topology == "critic":
            self._turn(number, self.trainers[-1:], frozen=True)
            self.nets[0].collect_params().zero_grad()
            self._turn(number, self.trainers[:-1], frozen=False)
        else:
            self._turn(number, self.trainers, frozen=False)

    def _turn(self, number: int, trainers: list[gluon.Trainer], *, frozen: bool) -> None:
        """Backwards of one loss, and a step of ``trainers``; ``frozen`` trains the critic only."""
        for k in range(self.a.backwards):
            seed = (number * 8 + k) * 8
            with autograd.record():
                losses = [self._loss(number, seed + d, ctx, frozen) for d, ctx in enumerate(self.contexts)]
            self._backward(losses, trainers)
        skipping = self._overflow(trainers[0]) if self.a.overflow and number == 1 else None
        for trainer in trainers:
            if self.a.call == "unscale" and not self.full:
                trainer.unscale()
        for trainer in trainers:
            if not (self.full and trainer is skipping):
                trainer.step(BATCH * self.a.devices * self.a.backwards)
        self._forget()

    def evaluate(self) -> np.ndarray:
        """The outputs of all nets in inference, one behind the other."""
        x, label = array(7, BATCH, WIDTH), mx.nd.zeros(BATCH)
        found = []
        for net in self.nets:
            out = self._call(net, x, label, 0)
            found.append(out.asnumpy().ravel())
            x = x if self.a.topology == "trunk" else out
        return np.concatenate(found)

    def _loss(self, step: int, seed: int, ctx: mx.Context, frozen: bool) -> Any:
        x = array(seed, BATCH, WIDTH, ctx=ctx)
        label = mx.nd.array((np.arange(BATCH) + seed) % CLASSES, ctx=ctx)
        if self.a.topology == "trunk":
            outs = [self._call(net, x, label, step) for net in self.nets[:-1]]
            return sum(self._plain_loss(out, label).sum() for out in outs) + self._last(x, label, step).sum()
        for net in self.nets[:-1]:
            x = self._call(net, x, label, step)
        return self._last(x.detach() if frozen else x, label, step)

    def _last(self, x: Any, label: Any, step: int) -> Any:
        out = self._call(self.nets[-1], x, label, step)
        if self.a.head in HEADS and self.a.head_stands == "inside":
            return out
        return self._plain_loss(out, label) if self.head is None else self.head(out, label)

    def _plain_loss(self, out: Any, label: Any) -> Any:
        return gluon.loss.SoftmaxCrossEntropyLoss()(out, label)

    def _backward(self, losses: list[Any], trainers: list[gluon.Trainer]) -> None:
        if self.full:
            autograd.backward(losses)
        elif self.a.trainers == "own" and self.a.topology != "critic":
            for trainer in trainers:
                trainer.backward(losses, retain_graph=True)
        elif self.a.call == "scale_loss":
            with trainers[0].scale_loss(losses) as scaled:
                autograd.backward(scaled)
        else:
            trainers[0].backward(losses)

    def _overflow(self, trainer: gluon.Trainer) -> gluon.Trainer:
        trained = [p for p in trainer._params if p.grad_req != "null"]
        trained[0].list_grad()[-1][:] = float("inf")
        return trainer

    def _forget(self) -> None:
        for param in self._params().values():
            if param.grad_req != "null":
                param.zero_grad()

    def values(self) -> dict[str, np.ndarray]:
        """By position, for names count up from one program to the next."""
        return {
            f"{k} ({param.name.split('_', 1)[-1]}) on {device}": value(param, device)
            for k, param in enumerate(self._params().values())
            for device in range(self.a.devices)
        }


def _joined(groups: list[dict]) -> dict:
    return {name: param for group in groups for name, param in group.items()}
