# ruff: noqa: N803
"""Small networks by kinds of information, each with one operator that rounding to low precision ruins.

A plan that does not depend on the rules has the matrix operators and the planted one in low precision, and all else in
FP32. ``python scripts/dev.py check audit`` says how many of the plants ``audit`` names first.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import Audit, audit
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision, Plan

PLANTED = "planted"
ROWS = 32
MATRIX = {"FullyConnected", "Convolution"}
L2 = gluon.loss.L2Loss()
BOTH = ("float16", "bfloat16")


class Net(gluon.HybridBlock):
    """A body, with two hidden layers and an output layer that it may use: ``body(F, net, *inputs)``."""

    def __init__(self, body: Callable, units: int = 4) -> None:
        super().__init__(prefix="")
        self.body = body
        with self.name_scope():
            self.hidden = nn.Dense(16, activation="relu", flatten=False, prefix="hidden_")
            self.more = nn.Dense(16, flatten=False, prefix="more_")
            self.out = nn.Dense(units, flatten=False, prefix="out_")

    def hybrid_forward(self, F, *inputs):
        return self.body(F, self, *inputs)


class Plant(NamedTuple):
    """A network in which the operator ``planted`` destroys information, with its data and its loss.

    ``data`` takes a RandomState, and returns the inputs and the labels as NumPy arrays.
    """

    kind: str
    name: str
    body: Callable
    data: Callable[[np.random.RandomState], tuple[list, list]]
    loss: Callable | None = L2
    dtypes: tuple[str, ...] = BOTH
    units: int = 4
    lost: str | None = None
    # The name of the operator that is at fault, if it has another one: a layer that the rules have in low precision.
    where: str = PLANTED
    # Operators that the rules keep in FP32 and a policy moves; without them a plan has ``where`` in low precision.
    low_ops: tuple[str, ...] = ()
    # Changes the weights of the network.
    prepare: Callable | None = None


def normal(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Callable:
    return lambda rng: rng.normal(offset, scale, shape)


def plain(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(size=(ROWS, 8))], [rng.normal(size=(ROWS, 4))]


def binary(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(size=(ROWS, 8))], [(rng.uniform(size=(ROWS, 4)) > 0.5).astype(float)]


def offset(center: float, spread: float) -> Callable:
    return lambda rng: ([rng.normal(center, spread, (ROWS, 4))], [rng.normal(size=(ROWS, 4))])


def scalar(F, op: str, x: Any, value: float, name: str | None = PLANTED) -> Any:
    return getattr(F._internal, f"_{op}_scalar")(x, scalar=value, **({"name": name} if name else {}))


def logits(net: Net, x: Any, size: float = 1.0) -> Any:
    return net.out(net.hidden(x)) * size


def bce(p: Any, y: Any) -> Any:
    return -(y * (p + 1e-12).log() + (1 - y) * (1 - p + 1e-12).log()).mean(axis=1)


def mean(out: Any, *labels: Any) -> Any:
    return out.mean()


def _attention(F, net, x, mask):
    scores = F.broadcast_add(net.out(net.hidden(x)), scalar(F, "mul", mask, -1e9))
    return F.softmax(scores)


def _distances(planted: str) -> Callable:
    def body(F, net, x, centers):
        def named(each: str) -> dict:
            return {"name": PLANTED} if each == planted else {}

        a, b = F.sum(F.square(x), axis=1, keepdims=True), F.sum(F.square(centers), axis=1)
        product = F.dot(x, centers, transpose_b=True, **named("dot"))
        squares = F.broadcast_add(a, b.expand_dims(0), **named("add"))
        return net.out(-F.broadcast_sub(squares, 2 * product))

    return body


def _centers(rng: np.random.RandomState) -> tuple[list, list]:
    centers = rng.normal(6, 0.1, (4, 8))
    x = centers[rng.randint(0, 4, ROWS)] + rng.normal(0, 0.1, (ROWS, 8))
    return [x, centers], [rng.normal(size=(ROWS, 4))]


def _variance(planted: str) -> Callable:
    def body(F, net, x):
        def named(each: str) -> dict:
            return {"name": PLANTED} if each == planted else {}

        square = F.mean(F.square(x, **named("square")), axis=1, keepdims=True, **named("mean of squares"))
        variance = square - F.square(F.mean(x, axis=1, keepdims=True))
        return net.out(
            net.hidden(F.broadcast_div(F.broadcast_sub(x, F.mean(x, axis=1, keepdims=True)), F.sqrt(variance + 1e-3)))
        )

    return body


def _peaks(F, net, x):
    heat = net.hidden(x).reshape((0, 1, 4, 4))
    heat = F.concat(heat, heat * 0.9, dim=1)
    most = F.Pooling(heat, kernel=(3, 3), pad=(1, 1), stride=(1, 1), pool_type="max", name=PLANTED)
    return net.out((heat * F.broadcast_equal(heat, most)).flatten())


def _position(F, net, x, ids):
    ids = scalar(F, "plus", ids, 1.0)
    code = F.one_hot(F.broadcast_mod(ids, F.ones((1,)) * 8), 8)
    return net.out(net.hidden(x + code))


def _ids(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(size=(ROWS, 8)), rng.randint(3000, 9000, ROWS)], [rng.normal(size=(ROWS, 4))]


def _angle(planted: str) -> Callable:
    def body(F, net, x):
        named = {each: {"name": PLANTED} if each == planted else {} for each in ("mul", "sin")}
        angle = F._internal._mul_scalar(x, scalar=37.0, **named["mul"])
        return net.out(net.hidden(F.sin(angle, **named["sin"])))

    return body


def _boxes(F, net, x, box):
    left, right = F.slice_axis(box, axis=1, begin=0, end=2), F.slice_axis(box, axis=1, begin=2, end=4)
    return net.out(net.hidden(x)) + F.tile(F.elemwise_sub(right, left, name=PLANTED), (1, 2))


def _box(rng: np.random.RandomState) -> tuple[list, list]:
    left = rng.uniform(500, 900, (ROWS, 2))
    return [rng.normal(size=(ROWS, 8)), np.concatenate([left, left + rng.uniform(1, 3, (ROWS, 2))], 1)], [
        rng.normal(size=(ROWS, 4))
    ]


def _scores(F, net, x, box):
    # Coordinates beside scores: one tensor, of which the scores are read as differences from an offset.
    both = F.concat(box, scalar(F, "plus", net.out(net.hidden(x)), 1000.0, None), dim=1, name=PLANTED)
    return F.slice_axis(both, axis=1, begin=4, end=8) - 1000


def _mixture(F, net, x):
    squares = F.square(net.out(net.hidden(x)) - 2)
    return F.log(F.sum(F.exp(scalar(F, "mul", squares, -6.0, None), name=PLANTED), axis=1, keepdims=True))


def _binomial(F, net, x, counts):
    r = F.Activation(net.out(net.hidden(x)), act_type="softrelu") + 0.5
    return F.gammaln(counts + r, name=PLANTED) - F.gammaln(counts + 1)


def _counts(rng: np.random.RandomState) -> tuple[list, list]:
    return [rng.normal(size=(ROWS, 8)), rng.randint(50, 400, (ROWS, 4))], []


def _over_time(F, net, x):
    total = F.cumsum(x, axis=1, name=PLANTED)
    steps = F.slice_axis(total, axis=1, begin=1, end=9) - F.slice_axis(total, axis=1, begin=0, end=8)
    return net.out(net.hidden(steps - 40))


def _sum(F, net, x):
    return net.out(net.hidden(F.broadcast_sub(F.sum(x, axis=1, name=PLANTED), F.ones((1,)) * 2000)))


PLANTS = [
    # -- probabilities near 0 and 1
    Plant("probability", "sigmoid", lambda F, net, x: F.sigmoid(logits(net, x, 8), name=PLANTED), binary, bce),
    Plant(
        "probability",
        "softmax",
        lambda F, net, x: F.softmax(6 * F.tanh(logits(net, x, 3)), name=PLANTED),
        lambda rng: ([rng.normal(size=(ROWS, 8))], [rng.randint(0, 2, ROWS)]),
        lambda p, y: -((1 - p + 1e-12).log() * (1 - mx.nd.one_hot(y, 2))).sum(axis=1),
        units=2,
    ),
    Plant(
        "probability",
        "log(1 - tanh²)",
        lambda F, net, x: F.log(1 - F.square(F.tanh(logits(net, x, 3), name=PLANTED)) + 1e-6),
        plain,
    ),
    Plant(
        "probability", "erf", lambda F, net, x: F.log(1 - F.erf(F.abs(logits(net, x, 2)), name=PLANTED) + 1e-6), plain
    ),
    Plant(
        "probability",
        "product",
        lambda F, net, x: F.elemwise_mul(F.sigmoid(logits(net, x, 8)), F.sigmoid(logits(net, x, 8) + 5), name=PLANTED),
        binary,
        bce,
    ),
    Plant(
        "probability",
        "reshaped",
        lambda F, net, x: F.Reshape(F.sigmoid(logits(net, x, 8)), shape=(-1, 4), name=PLANTED),
        binary,
        bce,
    ),
    # -- limits
    Plant(
        "limit",
        "clip",
        lambda F, net, x: F.clip(F.sigmoid(logits(net, x, 20)), 1e-4, 1 - 1e-4, name=PLANTED),
        binary,
        bce,
    ),
    Plant(
        "limit",
        "minimum",
        lambda F, net, x: F.log(6 - scalar(F, "minimum", F.relu(logits(net, x, 20)), 5.9999)),
        plain,
    ),
    Plant(
        "limit",
        "cosine before arccos",
        lambda F, net, x: F.arccos(scalar(F, "mul", F.tanh(logits(net, x, 4)), 0.9999)),
        plain,
    ),
    # -- differences of near-equal numbers
    Plant(
        "difference",
        "of products",
        lambda F, net, x, y: net.out(net.hidden(F.elemwise_sub(x, y, name=PLANTED))),
        lambda rng: (lambda a: ([a, a + rng.normal(0, 0.1, (ROWS, 4))], [rng.normal(size=(ROWS, 4))]))(
            rng.normal(500, 100, (ROWS, 4))
        ),
    ),
    Plant(
        "difference",
        "from the maximum",
        lambda F, net, x: F.broadcast_sub(
            scalar(F, "plus", logits(net, x), 3000.0), F.max(logits(net, x) + 3000, axis=1, keepdims=True)
        ),
        plain,
    ),
    Plant(
        "difference",
        "1 - cos",
        lambda F, net, x: (1 - F.cos(0.02 * logits(net, x), name=PLANTED)) * 1e4,
        plain,
    ),
    # -- variance by E[x²] - E[x]²
    Plant("variance", "square", _variance("square"), offset(60, 1)),
    Plant("variance", "mean of squares", _variance("mean of squares"), offset(60, 1)),
    # -- large offsets
    Plant(
        "offset", "kelvin", lambda F, net, x: net.out(net.hidden(scalar(F, "minus", x, 288.0) / 0.3)), offset(288, 0.3)
    ),
    Plant("offset", "pressure", lambda F, net, x: scalar(F, "plus", logits(net, x), 1013.0), plain),
    Plant(
        "offset",
        "year",
        lambda F, net, x: net.out(net.hidden(scalar(F, "minus", x, 2010.0) / 5)),
        offset(2010, 5),
        dtypes=("bfloat16",),
    ),
    Plant(
        "offset",
        "timestamp",
        lambda F, net, x: net.out(net.hidden(scalar(F, "minus", x, 1.6e9) / 1e4)),
        offset(1.6e9, 1e4),
    ),
    Plant(
        "offset",
        "batch norm",
        lambda F, net, x: net.out(
            net.hidden(F.broadcast_sub(scalar(F, "mul", x, 1.0), F.mean(x, axis=0, keepdims=True)))
        ),
        offset(288, 0.3),
    ),
    # -- ids and positions in floats
    Plant("id", "position", _position, _ids),
    Plant(
        "id",
        "equal",
        lambda F, net, x, ids: (
            net.out(net.hidden(x)) + F.broadcast_equal(scalar(F, "plus", ids, 0.0), ids).expand_dims(1).tile((1, 4))
        ),
        _ids,
    ),
    # -- angles of a large argument
    Plant(
        "angle", "product", _angle("mul"), lambda rng: ([rng.uniform(0, 60, (ROWS, 8))], [rng.normal(size=(ROWS, 4))])
    ),
    Plant("angle", "sine", _angle("sin"), lambda rng: ([rng.uniform(0, 60, (ROWS, 8))], [rng.normal(size=(ROWS, 4))])),
    # -- distances
    Plant("distance", "dot", _distances("dot"), _centers, dtypes=("float16",)),
    Plant("distance", "a² + b²", _distances("add"), _centers),
    # -- heatmaps and ties
    Plant("heatmap", "peaks", _peaks, plain),
    # -- coordinates beside scores
    Plant("coordinates", "width", _boxes, _box),
    Plant("coordinates", "beside scores", _scores, _box),
    # -- small and large targets
    Plant("target", "small", lambda F, net, x: scalar(F, "mul", logits(net, x), 1e-8), plain, mean, ("float16",)),
    Plant("target", "large", lambda F, net, x: scalar(F, "mul", logits(net, x), 1e6), plain, mean, ("float16",)),
    # -- exponentials and log-likelihoods
    Plant(
        "exponential", "exp", lambda F, net, x: F.exp(3 * logits(net, x) + 9, name=PLANTED), plain, mean, ("float16",)
    ),
    Plant("exponential", "mixture", _mixture, plain, mean, ("float16",)),
    Plant("exponential", "negative binomial", _binomial, _counts, mean),
    # -- masks of -1e9
    Plant(
        "mask",
        "-1e9",
        _attention,
        lambda rng: ([rng.normal(size=(ROWS, 8)), np.ones((ROWS, 4))], [rng.normal(size=(ROWS, 4))]),
        dtypes=("float16",),
    ),
    # -- sums over time
    Plant("time", "cumulative", _over_time, lambda rng: ([rng.normal(40, 1, (ROWS, 9))], [rng.normal(size=(ROWS, 4))])),
    Plant("time", "sum", _sum, lambda rng: ([rng.normal(40, 0.1, (ROWS, 50, 4))], [rng.normal(size=(ROWS, 4))])),
    # -- constants
    Plant("constant", "9e-8", lambda F, net, x: scalar(F, "mul", logits(net, x), 9e-8) * 1e7, plain, L2, ("float16",)),
    Plant("constant", "2049", lambda F, net, x: scalar(F, "plus", logits(net, x), 2049.0) - 2049, plain),
    Plant(
        "constant",
        "epsilon",
        lambda F, net, x: F.log(scalar(F, "plus", F.relu(logits(net, x)), 1e-8)),
        plain,
        mean,
        ("float16",),
    ),
]


def plan_of(net: gluon.HybridBlock, inputs: list, compute: str, device: str = "cpu") -> Plan:
    """A plan that has the matrix operators and the planted one in ``compute``, whatever the rules say."""
    converted = mxmp.convert(net, mxmp.Policy(compute, params="float32", low_ops=["softmax", "dot"]))
    with mx.autograd.train_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*entries of the policy that change nothing")  # most nets have no softmax
        converted(*inputs)
    plan = mxmp.explain(converted).graphs[0].plan
    mxmp.restore(net)
    found = [name for name in plan.decisions if name.startswith(PLANTED)]
    if not found:  # as the rules decide
        return plan
    decisions = {n: Decision(d.op, d.op in MATRIX or n in found, "planted") for n, d in plan.decisions.items()}
    return replace(plan, decisions=decisions, device=device)


def planted(plant: Plant) -> tuple[Net, list, list]:
    """The network of a plant with its inputs and labels."""
    rng = np.random.RandomState(sum(map(ord, plant.name)))
    mx.random.seed(5)
    net = Net(plant.body, plant.units)
    net.initialize(mx.init.Xavier(magnitude=3))
    inputs, labels = ([mx.nd.array(each) for each in arrays] for arrays in plant.data(rng))
    net(*inputs)
    for layer in (net.hidden, net.more, net.out):  # those that the body does not use have no shape
        if layer.weight.shape is None or 0 in layer.weight.shape:
            net._children.pop(next(k for k, v in net._children.items() if v is layer))
    if plant.prepare is not None:
        plant.prepare(net)
    return net, inputs, labels


def audited(plant: Plant, compute: str, device: str = "cpu", **options: Any) -> Audit:
    net, inputs, labels = planted(plant)
    how: Any = mxmp.Policy(compute, low_ops=plant.low_ops) if plant.low_ops else plan_of(net, inputs, compute, device)
    return audit(net, plant.loss, (inputs, labels), policy=how, **options)


def is_beside(plant: Plant, name: str) -> bool:
    """Return whether ``name`` is the planted operator, or one that it reads or that reads it."""
    net, inputs, _ = planted(plant)
    net.hybridize()
    with mx.autograd.train_mode():
        net(*inputs)
    nodes = Graph.from_symbol(net._cached_graph[1]).names()
    of = {n: {nodes[entry.node] for entry in node.inputs} for node, n in nodes.items()}
    name = name.partition(":")[0]  # of a layer that is called twice
    return name == plant.where or name in of[plant.where] or plant.where in of.get(name, ())


def cases() -> list:
    return [(plant, dtype) for plant in PLANTS for dtype in plant.dtypes]


# Networks of the zoo, with their losses, in which rounding does what it does anywhere.
HEALTHY = [
    "cifar_resnet20_v1",
    "cifar_resnet20_v2",
    "mobilenet0.25",
    "mobilenetv2_0.25",
    "nlp.MultiHeadAttentionCell",
    "nlp.MLPAttentionCell",
    "nlp.MLPAttentionCell.normalized",
    "nlp.DotProductAttentionCell",
    "nlp.TransformerEncoder",
    "nlp.TransformerEncoderCell",
    "nlp.PositionwiseFFN",
    "nlp.PositionwiseFFN.gelu",
    "nlp.BERTEncoder",
    "nlp.Highway",
    "nlp.ConvolutionalEncoder",
    "nlp.BiLMEncoder",
    "nlp.LSTMPCellWithClip",
    "nlp.ISDense",
    "contrib.Conv1DLSTMCell",
    "contrib.Conv2DGRUCell",
    "np.mlp",
    "np.attention",
    "standard_lstm_lm_200",
]


def healthy(name: str, compute: str) -> Audit:
    """The audit of a healthy network, converted by the rules; an ``np.`` one switches MXNet's arrays for this call."""
    from support.zoo.catalogue import CASES

    mx.random.seed(3)
    try:
        case = CASES[name]()
        net = case.make()
        net.initialize(case.init or mx.init.Xavier(magnitude=2))
        inputs = (case.train_inputs or case.inputs)()
        net(*inputs)
        return audit(mxmp.convert(net, compute), case.loss, (inputs, []))
    finally:
        mx.npx.reset_np()
