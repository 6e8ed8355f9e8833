"""What low precision must not take from those who read a value, against FP32, by rules and by plans, drawn graphs too.

``z`` is a product with the identity, whose values every dtype holds: what differs from FP32 was lost behind it.
"""

import os
from functools import reduce
from operator import mul

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, by_symbol
from kit.plans import Z, fc, low_of
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.needs import MANY
from mxmp.serving.lowering import lower, lower_to_float16

POLICIES = ["float16", "float16-fast", "bfloat16"]


def left(p):
    """The logarithm of what is left of 1: the loss of a label 0."""
    return S.log(1 - p)


def squared_distances(a, b):
    squares = S.broadcast_add(S.sum(a * a, axis=1, keepdims=True), S.reshape(S.sum(S.square(b), axis=1), (1, -1)))
    return squares - 2 * S.dot(a, b, transpose_b=True, name="product")


def variance(z):
    return S.mean(z * z, axis=1) - S.square(S.mean(z, axis=1))


def read_low_too(value, u):
    """``value``, of a graph in which a dense layer reads ``u`` too."""
    return S.broadcast_add(value, 0 * S.sum(S.FullyConnected(u, num_hidden=2, no_bias=True, name="after")))


def probabilities(count, of=Z):
    return [S.sigmoid(of - i % 4) for i in range(count)]


def product(factors):
    return reduce(mul, factors)


def sticks(p, count=4):
    """Stick-breaking: each piece is a share of what the former have left."""
    pieces, rest = [], None
    for i in range(count):
        share = S.slice_axis(p, axis=1, begin=i, end=i + 1)
        pieces.append(share if rest is None else share * rest)
        rest = 1 - share if rest is None else rest * (1 - share)
    return S.Concat(*pieces, dim=1)


def forward_of_a_chain(p, steps=6):
    """The forward pass of a hidden Markov model: the probability of what was seen, by state."""
    seen = p
    for _ in range(steps):
        seen = S.dot(seen, S.eye(4)) * p
    return seen


def repeated(step, times, x=Z):
    for _ in range(times):
        x = step(x)
    return x


def in_a_loop(body, times, x=Z):
    def step(data, state):
        state = body(S.broadcast_add(state, data))
        return state, state

    return S.contrib.foreach(step, S.zeros((times, 1)), x)[1]


SMALL = [[-10.0, -8.0, -6.0, -4.0]]
LOGITS = [[9.5, -9.5, 3.0, 0.5], [7.0, 1.0, 0.0, -3.0]]
KINDS = {  # by name: what is computed from z, and values of z
    "sigmoid before a logarithm": (left(S.sigmoid(Z)), LOGITS),
    "Activation before a logarithm": (left(S.Activation(Z, act_type="sigmoid")), LOGITS),
    "tanh before a logarithm": (S.log(1 - S.square(S.tanh(Z))), [[4.0, -3.5, 0.5, 2.0]]),
    "erf before a logarithm": (left(S.erf(Z)), [[2.5, 2.0, 1.0, -1.0]]),
    "softsign before a logarithm": (left(S.softsign(Z)), [[2048.0, 100.0, 1.0, -3.0]]),
    "arctan near its limit": (1.5707963 - S.arctan(Z), [[2048.0, 100.0, 1.0, -3.0]]),
    "hard sigmoid before a logarithm": (left(S.hard_sigmoid(Z)), [[2.484375, 1.0, 0.0, -1.0]]),
    "reshaped": (left(S.reshape(S.sigmoid(Z), shape=(-1, 2))), LOGITS),
    "sliced": (left(S.slice_axis(S.sigmoid(Z), axis=1, begin=0, end=2)), LOGITS),
    "joined with other values": (left(S.slice_axis(S.Concat(S.sigmoid(Z), Z, dim=1), axis=1, begin=0, end=4)), LOGITS),
    "softmax joined with low values": (
        left(S.slice_axis(S.Concat(S.softmax(Z), Z, dim=1), axis=1, begin=0, end=4)),
        [[8.0, 0.0, -1.0, 0.0]],
    ),
    "squared, as in a focal loss": (left(S.sigmoid(Z) * S.sigmoid(Z)), LOGITS),
    "multiplied by another": (left(S.sigmoid(Z) * S.tanh(S.abs(Z) + 4)), LOGITS),
    "an output": (S.sigmoid(Z), LOGITS),
    "an output that a matrix operator reads too": (
        S.Group([S.sigmoid(Z, name="p"), S.FullyConnected(S.sigmoid(Z), num_hidden=2, no_bias=True, name="after")])[0],
        LOGITS,
    ),
    "a limit of clip": (left(S.clip(Z, 1e-4, 1 - 1e-4)), [[1.0, 2.0, 0.5, 0.0]]),
    "a distance to a limit": (6 - S.clip(Z, 0, 5.9999), [[8.0, 6.0, 1.0, 0.0]]),
    "a limit of minimum": (left(S.broadcast_minimum(Z, S.ones((1,)) * 0.9999)), [[1.0, 2.0, 0.5, 0.0]]),
    "a limit of minimum with a constant": (left(S._internal._minimum_scalar(Z, scalar=0.9999)), [[1.0, 2.0, 0.5, 0.0]]),
    "an offset": (Z * 15 + 1013 - 1013, [[0.25, -0.5, 1.0, 0.0625]]),
    "an offset, reshaped": (S.reshape(Z * 15 + 1013, shape=(-1,)) - 1013, [[0.25, -0.5, 1.0, 0.0625]]),
    "a constant that rounds": (Z + 2049, [[0.0, 1.0, 2.0, 4.0]]),
    "a product beyond the range": (Z * (Z + 1), [[300.0, 500.0, 1.0, -2.0]]),
    "a variance as a difference": (variance(Z), [[128.0, 129.0, 130.0, 131.0]]),
    "a distance as a difference": (squared_distances(Z, Z + 0), [[8.0, 8.0, 4.0, 1.0], [8.0625, 8.0, 4.0, 1.0]]),
    "a product before a logarithm": (
        read_low_too(S.log(product(probabilities(2))), product(probabilities(2))),
        SMALL,
    ),
    "a product of eight before a logarithm": (S.log(S.reshape(product(probabilities(8)), (-1,))), SMALL),
    "a product before a root": (read_low_too(S.rsqrt(product(probabilities(2))), product(probabilities(2))), SMALL),
    "a product over its sum": (
        read_low_too(
            S.log(S.broadcast_div(product(probabilities(3)), S.sum(product(probabilities(3)), axis=1, keepdims=True))),
            product(probabilities(3)),
        ),
        SMALL,
    ),
    "stick-breaking": (S.log(sticks(S.sigmoid(Z))), [[8.0, 9.0, 7.0, 5.0]]),
    "a product with a matrix before a logarithm": (S.log(S.dot(S.softmax(Z * 2), S.eye(4))), SMALL),
    "a dense layer of probabilities before a logarithm": (
        S.log(S.FullyConnected(S.softmax(Z * 2), S.eye(4), no_bias=True, num_hidden=4)),
        SMALL,
    ),
    "a chain of products": (S.log(S.sum(forward_of_a_chain(S.softmax(Z)), axis=1)), SMALL),
    "a chain of products in a loop": (
        S.log(in_a_loop(lambda x: S.dot(x, S.eye(4)) * 2.0**-6, 6, S.softmax(Z))),
        SMALL,
    ),
    "a loop of logarithms": (in_a_loop(lambda x: S.log(S.sigmoid(x - 4) * S.sigmoid(x - 3)), 1), SMALL),
    "many small steps": (repeated(lambda x: x + 0.01 * S.tanh(x), 200), [[0.25, 1.0, -0.5, 2.0]]),
    "a decay": (repeated(lambda x: 0.99 * x, 200), [[0.25, 1.0, -0.5, 2.0]]),
    "a leaky sum": (repeated(lambda x: 0.99 * x + 0.01 * S.tanh(x), 200), [[0.25, 1.0, -0.5, 2.0]]),
    "an exponential": (S.exp(Z * 1.0), [[10.0, -20.0, 1.0, 0.0]]),
    "a sum over time": (S.cumsum(S.broadcast_to(S.reshape(Z, (-1, 4, 1)), (1, 4, 5000)), axis=2), [[1.0] * 4]),
}


def evaluated(symbol, z, heads=None):
    values = {"data": np.array(z, "float32"), "weight": np.eye(4, dtype="float32")}
    values.update({name: np.ones((2, 4), "float32") for name in symbol.list_arguments() if name not in values})
    if heads is None:
        heads = [np.full(shape, 2.0**-9, "float32") for shape in symbol.infer_shape(data=np.shape(z))[1]]
    return by_symbol(symbol, values, grads_of=["data"], heads=heads)


def agrees(low, symbol, z, heads=None):
    """Within rounding of a gradient; the values of z are exact, and so is what FP32 computes from them."""
    got, want = evaluated(low, z, heads), evaluated(symbol, z, heads)
    np.testing.assert_allclose(got.outputs[0], want.outputs[0], rtol=2e-3, atol=1e-6)
    if np.isfinite(want.grads["data"]).all():
        scale = np.abs(want.grads["data"]).max()
        np.testing.assert_allclose(got.grads["data"], want.grads["data"], rtol=0.03, atol=0.02 * scale)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rules_keep_what_fp32_readers_need(kind, policy):
    symbol, z = KINDS[kind]
    agrees(mxmp.cast_symbol(symbol, policy), symbol, z)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_keep_what_fp32_readers_need(kind, policy):
    symbol, z = KINDS[kind]
    plan = mxmp.tune(symbol, data=np.shape(z), policy=policy, measure=False)
    agrees(mxmp.cast_symbol(symbol, plan), symbol, z)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_served_graphs_keep_what_fp32_readers_need(kind, dtype, monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")  # MXNet's own fusion is wrong in FP32
    symbol, z = KINDS[kind]
    params = {name: mx.nd.ones((2, 4)) for name in symbol.list_arguments() if name != "data"}
    params["weight"] = mx.nd.eye(4)
    graph, data = Graph.from_symbol(symbol), mx.nd.array(z)
    low, values = lower(graph, params) if dtype == "bfloat16" else lower_to_float16(graph, params, (), "cpu")[:2]
    got, want = (
        served.bind(mx.cpu(), {**arrays, "data": data}).forward()[0].asnumpy()
        for served, arrays in ((low.to_symbol(), values), (symbol, params))
    )
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_s_graph_decides_as_the_emulation_does(kind):
    graph = Graph.from_symbol(KINDS[kind][0])
    plans = [decide(graph, Policy.parse("float16"), device) for device in ("cpu", "gpu")]
    assert plans[0].decisions == plans[1].decisions


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_the_gradient_of_an_output_for_small_targets_does_not_overflow(policy):
    symbol, z = Z * 1e-6, [[1.0, 2.0, 3.0, 4.0]]
    agrees(mxmp.cast_symbol(symbol, policy), symbol, z, heads=[np.full((1, 4), 1e6, "float32")])


def residual_blocks(count, update=lambda x: x, norm=S.BatchNorm, width=4):
    x = fc(S.var("data"), "into", width)
    for i in range(count):
        inside = S.relu(fc(S.relu(norm(x)), f"fc{i}", width))
        x = S.elemwise_add(x, update(fc(norm(inside), f"last{i}", width)), name=f"sum{i}")
    return fc(S.relu(norm(x)), "head", width)


def low_sums(symbol):
    return sum(name.startswith("sum") for name in low_of(symbol))


@pytest.mark.parametrize("count", [40, 70, 200])
def test_residual_blocks_with_norms_are_added_low_however_many_they_are(count):
    assert low_sums(residual_blocks(count)) == count


UPDATES = {
    "a small constant": (lambda x: 0.01 * x, S.BatchNorm),
    "a constant that is exact": (lambda x: 2.0**-7 * x, S.BatchNorm),
    "a gate": (lambda x: S.sigmoid(x) * x, S.BatchNorm),
    "no norm": (lambda x: x, S.identity),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_updates_of_a_state_that_may_be_small_are_added_in_fp32(kind):
    assert low_sums(residual_blocks(70, *UPDATES[kind])) == 0


def test_a_state_that_begins_behind_a_norm_changes_in_fp32_too():
    x = repeated(lambda x: S.elemwise_add(x, S.tanh(x)), 70, S.BatchNorm(Z))
    assert not any(name.startswith("elemwise_add") for name in low_of(fc(x, "out")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_sums_of_residual_blocks_with_norms_lose_what_the_products_lose(dtype):
    symbol, rows, width = residual_blocks(64, width=16), 32, 16
    low, full = (
        mxmp.cast_symbol(symbol, mxmp.Policy(dtype, params="float32", full_ops=ops)) for ops in ((), ("elemwise_add",))
    )
    ratios = []
    for seed in range(4):
        rng = np.random.RandomState(seed)
        shapes, _, of_states = symbol.infer_shape(data=(rows, width))
        values = {}
        for name, shape in zip(symbol.list_arguments() + symbol.list_auxiliary_states(), shapes + of_states):
            learned = rng.normal(0, (2 / width) ** 0.5, shape) if len(shape) > 1 else np.zeros(shape)
            values[name] = np.ones(shape) if name.endswith(("gamma", "var")) else learned
        values["data"] = rng.normal(size=(rows, width))
        values = {name: value.astype("float32") for name, value in values.items()}
        want, *got = (by_symbol(each, values).outputs[0] for each in (symbol, low, full))
        ratios.append(np.divide(*(np.linalg.norm(each - want) for each in got)))
    assert np.exp(np.mean(np.log(ratios))) < 1.3


def test_a_body_keeps_what_its_outputs_are_read_for():
    def body(x, state):
        return S.sigmoid(S.FullyConnected(x, num_hidden=4, name="fc"), name="p"), state

    out, _ = S.contrib.foreach(body, S.var("data"), S.var("state"))
    assert {name.split("/")[-1] for name in low_of(out)} == {"fc"}


def test_a_body_knows_what_a_state_is_from_the_second_iteration_on():
    def body(x, state):
        small = S.softmax(S.broadcast_add(state, x))
        return S.log(S.dot(state, S.eye(4), name="read")), small

    out, _ = S.contrib.foreach(body, S.zeros((3, 1)), fc(Z, "start"))
    assert "read" not in {name.split("/")[-1] for name in low_of(out)}


def test_a_learned_bias_ends_the_need_of_small_values():
    probabilities = S.softmax(fc(Z, "scores"))
    for layer, is_low in (({}, True), ({"no_bias": True}, False)):
        symbol = S.log(S.abs(S.FullyConnected(probabilities, num_hidden=4, name="mixed", **layer)))
        assert ("mixed" in low_of(symbol)) == is_low


@pytest.mark.parametrize(("sums", "is_low"), [(MANY - 1, True), (MANY, False)])
def test_so_many_sums_in_a_row_are_fp32(sums, is_low):
    chain = repeated(lambda x: S.relu(x) + x, sums, fc(Z, "first"))
    assert bool([name for name in low_of(fc(chain, "last")) if "plus" in name]) == is_low


class Positions(gluon.HybridBlock):
    """sin of positions times frequencies, which no parameter trains, and features of it."""

    def __init__(self):
        super().__init__(prefix="")
        with self.name_scope():
            self.frequencies = self.params.get_constant("frequencies", np.array([[1.0, 0.11]], "float32"))
            self.dense = nn.Dense(3, in_units=2, flatten=False)

    def hybrid_forward(self, F, x, frequencies):  # noqa: N803
        angles = F.dot(x, frequencies)
        return F.sin(angles), self.dense(angles)


def test_a_product_of_data_and_constants_stays_fp32():
    net = Positions()
    net.initialize()
    x = mx.nd.array(np.arange(1000, 1010).reshape(-1, 1))
    want = net(x)[0].asnumpy()
    np.testing.assert_allclose(mxmp.convert(net, "float16")(x)[0].asnumpy(), want, atol=1e-5)
    report = {row.name: row for row in mxmp.explain(net).nodes}
    assert "none of its operands depends on a parameter" in next(r.reason for r in report.values() if r.op == "dot")


def test_a_module_multiplies_two_inputs_in_fp32_and_an_input_and_a_weight_low():
    a, b, w = S.var("a"), S.var("b"), S.var("w", shape=(4, 4))
    symbol = S.Group([S.dot(a, b, name="ab"), S.dot(a, w, name="aw")])
    module = mxmp.Module(symbol, data_names=("a", "b"), label_names=None, policy="float16")
    module.bind([("a", (4, 4)), ("b", (4, 4))], for_training=False)
    decisions = {row.name: row.dtype for row in mxmp.explain(module).nodes}
    assert decisions == {"ab": "float32", "aw": "float16"}


# -- drawn graphs -----------------------------------------------------------------------------------

DRAWN = int(os.environ.get("MXMP_DRAWN", "60"))
BITS = {"float16": 11, "bfloat16": 8}
WIDTH = 6
CONTROLS = 6


class Drawn:
    """A graph of dense layers, in which a reader needs of a value what low precision would take.

    ``blurs`` is applied to what the dense layers of features read and return.
    """

    def __init__(self, seed, blurs=lambda x: x):
        self._draw, self._blurs, self._layers = np.random.RandomState(seed), blurs, 0
        self.kind = self._one_of(sorted(PLANTS))
        self.symbol = PLANTS[self.kind](self)

    def _one_of(self, choices):
        return choices[self._draw.randint(len(choices))]

    def number(self, low, high):
        return float(np.round(self._draw.uniform(low, high), 3))

    def count(self, low, high):
        return int(self._draw.randint(low, high))

    def dense(self, x, bias=True):
        self._layers += 1
        name = f"layer{self._layers}"
        weight = self._blurs(S.var(f"{name}_weight", shape=(WIDTH, WIDTH)))
        more = [self._blurs(S.var(f"{name}_bias", shape=(WIDTH,)))] if bias else []
        made = S.FullyConnected(self._blurs(x), weight, *more, num_hidden=WIDTH, no_bias=not bias, name=name)
        return self._blurs(made)

    def features(self):
        return self._one_of([S.tanh, S.softsign])(self.dense(S.var("data")))

    def moved(self, x):
        """``x``, in an order and shape that keep its rows."""
        for _ in range(self.count(0, 3)):
            x = self._one_of(
                [
                    lambda x: S.reshape(S.reshape(x, (-1, 2, WIDTH // 2)), (-1, WIDTH)),
                    lambda x: S.transpose(S.transpose(x)),
                    lambda x: S.Concat(*S.split(x, num_outputs=2, axis=1), dim=1),
                    lambda x: S.slice_axis(x, axis=0, begin=0, end=None),
                    lambda x: S.reverse(S.reverse(x, axis=1), axis=1),
                ]
            )(x)
        return x

    def read(self, value, source):
        """The outputs' sum: ``value``, perhaps through a dense layer, and what a dense layer makes of ``source``."""
        value = self.dense(value) if self.count(0, 2) else value
        return S.broadcast_add(value, self.dense(source)) if self.count(0, 2) else value

    def probabilities(self):
        logits = self.dense(self.features()) * self.number(1, 3) - self.number(1, 3.9) - self.number(1, 3.9)
        return self.moved(self._one_of([S.sigmoid, lambda x: S.softmax(x * 3), S.exp])(logits))


def small(drawn):
    p = product([drawn.probabilities() for _ in range(drawn.count(2, 5))])
    p = drawn.moved(p)
    ends = [S.log, lambda x: S.broadcast_div(x, S.sum(x, axis=1, keepdims=True)), lambda x: S.log(S.rsqrt(x))]
    return drawn.read(drawn._one_of(ends)(p), p)


def small_by_matrices(drawn):
    p = S.softmax(drawn.dense(drawn.features()) * drawn.number(4, 9))
    for _ in range(drawn.count(1, 4)):
        p = drawn.moved(S.dot(p, S.softmax(S.var(f"table{drawn.count(0, 99)}", shape=(WIDTH, WIDTH)) * 8)))
        p = p * drawn.probabilities() if drawn.count(0, 2) else p
    return drawn.read(S.log(p), p)


def distances(drawn):
    p = drawn._one_of([S.sigmoid, S.tanh])(drawn.dense(drawn.features()) + drawn.number(1, 3))
    return drawn.read(S.log(1 - drawn.moved(p)), p)


def positions(drawn):
    table = S.var("fixed_table", shape=(WIDTH, WIDTH))
    angle = drawn._one_of([S.dot, lambda x, y: S.FullyConnected(x, y, num_hidden=WIDTH, no_bias=True)])(
        S.var("fixed_positions"), table
    )
    angle = drawn.moved(angle * drawn.number(0.5, 2))
    return drawn.dense(drawn._one_of([S.sin, S.cos])(angle)) + drawn.dense(drawn.features())


def offsets(drawn):
    x, much = drawn.dense(drawn.features()), drawn.number(50, 3000)
    shifted = drawn.moved(x * drawn.number(1, 4) + much)
    ends = [
        lambda t: t - much,
        lambda t: S.broadcast_sub(t, S.mean(t, axis=1, keepdims=True)),
        lambda t: S.broadcast_sub(t, S.max(t, axis=1, keepdims=True)),
    ]
    return drawn.dense(drawn._one_of(ends)(shifted))


def states(drawn):
    x, steps = drawn.dense(drawn.features()), drawn.count(60, 200)
    step, decay = drawn.number(0.002, 0.02), drawn.number(0.98, 0.999)
    loops = [lambda x: x + step * S.tanh(x), lambda x: decay * x, lambda x: decay * x + step * S.softsign(x)]
    return drawn.read(repeated(drawn._one_of(loops), steps, x), x)


def cancelling(drawn):
    a, b = drawn.features(), drawn.features()
    squares = S.broadcast_add(S.sum(S.square(a), axis=1, keepdims=True), S.reshape(S.sum(b * b, axis=1), (1, -1)))
    return S.exp(-(squares - 2 * S.dot(a, drawn.moved(b), transpose_b=True)))


PLANTS = {f.__name__: f for f in (small, small_by_matrices, distances, positions, offsets, states, cancelling)}


def blurred(dtype):
    """A function that changes each value by up to a rounding, and multiplies its gradient by as much."""
    ulp, smallest = 2.0 ** -BITS[dtype], 2.0**-25 if dtype == "float16" else 0.0

    def blurs(x):
        factor = S.random.uniform_like(x, low=1 - ulp, high=1 + ulp)
        return x * S.BlockGrad(factor) + S.BlockGrad(smallest * S.random.uniform_like(x, low=-1, high=1))

    return blurs


def results(symbol, seed, dtype="float32"):
    draw = np.random.RandomState(seed)
    shapes = {"data": (8, WIDTH), "fixed_positions": (8, WIDTH)}
    shapes = {name: shape for name, shape in shapes.items() if name in symbol.list_arguments()}
    values = {}
    for name, shape in sorted(zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0])):
        values[name] = draw.normal(0, 1, shape) / (1 if len(shape) < 2 or name in shapes else np.sqrt(shape[1]))
    if "fixed_positions" in values:
        values["fixed_positions"] = np.arange(8 * WIDTH).reshape(8, WIDTH) * 37.0
    values = {name: value.astype("float32").astype(dtype) for name, value in values.items()}
    (shape,) = symbol.infer_shape(**shapes)[1]
    heads = [draw.uniform(0.5, 1.5, shape).astype("float32")]
    asked = [name for name in values if not name.startswith("fixed")]
    found = by_symbol(symbol, values, grads_of=asked, heads=heads)
    return {"output": found.outputs[0].astype("float64"), **{n: g.astype("float64") for n, g in found.grads.items()}}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("seed", range(DRAWN))
def test_a_drawn_graph_loses_what_its_matrix_products_lose_by_their_inputs(seed, dtype):
    drawn = Drawn(seed)
    want = results(drawn.symbol, seed, "float64")
    if not all(np.isfinite(value).all() for value in results(drawn.symbol, seed).values()):
        pytest.skip("FP32 itself cannot compute it")
    got = results(mxmp.cast_symbol(drawn.symbol, mxmp.Policy(dtype, params="float32"), ctx=mx.cpu()), seed)
    mx.random.seed(seed)
    controls = [results(Drawn(seed, blurred(dtype)).symbol, seed) for _ in range(CONTROLS)]
    for name, value in want.items():
        error, *blurs = (np.linalg.norm(each[name] - value) for each in (got, *controls))
        assert error <= 4 * max(blurs) + 2.0**-22 * np.linalg.norm(value), (drawn.kind, name, error / max(blurs))
