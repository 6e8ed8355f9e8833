"""Loss heads that ignore the gradient from above: scaled from behind, forward untouched."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import Result, S, by_symbol

from mxmp.precision.graph import Graph
from mxmp.precision.heads import SCALE_NAME, scale_heads

FC = S.FullyConnected(S.var("data"), num_hidden=3, name="fc")
HEADS = {
    "SoftmaxOutput": lambda x: S.SoftmaxOutput(x, S.var("label"), name="head", grad_scale=0.25),
    "SVMOutput": lambda x: S.SVMOutput(x, S.var("label"), name="head"),
    "LinearRegressionOutput": lambda x: S.LinearRegressionOutput(x, S.var("target"), name="head"),
    "LogisticRegressionOutput": lambda x: S.LogisticRegressionOutput(x, S.var("target"), name="head"),
    "MAERegressionOutput": lambda x: S.MAERegressionOutput(x, S.var("target"), name="head"),
    "MakeLoss": lambda x: S.MakeLoss(S.square(x), name="head", grad_scale=0.5),
    "make_loss": lambda x: S.make_loss(S.square(x), name="head"),
}
VALUES = {
    "data": np.random.RandomState(0).normal(0, 1, (4, 5)).astype("float32"),
    "fc_weight": np.random.RandomState(1).normal(0, 1, (3, 5)).astype("float32"),
    "fc_bias": np.zeros(3, "float32"),
    "label": np.array([0, 1, 2, 1], "float32"),
    "target": np.random.RandomState(2).normal(0, 1, (4, 3)).astype("float32"),
}
GRADS = ["data", "fc_weight", "fc_bias"]


def scaled(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    graph = Graph.from_symbol(symbol)
    assert scale_heads(graph, {})
    return graph.to_symbol()


def run(symbol: mx.sym.Symbol, values: dict, grads_of: list[str], scale: float, heads: list | None = None) -> Result:
    """Run the scaled graph; the loss scale gets its value between the forward and the backward, as in training."""
    symbol = scaled(symbol)
    values = {**values, SCALE_NAME: np.ones(1, "float32")}
    args = {name: mx.nd.array(values[name], dtype=values[name].dtype) for name in symbol.list_arguments()}
    grads = {name: mx.nd.zeros_like(args[name]) for name in grads_of}
    executor = symbol.bind(mx.cpu(), args, grads)
    outputs = [out.asnumpy() for out in executor.forward(is_train=True)]
    args[SCALE_NAME][:] = scale
    executor.backward(None if heads is None else [mx.nd.array(head) for head in heads])
    return Result(outputs, {name: grad.asnumpy() for name, grad in grads.items()})


@pytest.mark.parametrize("head", HEADS)
def test_the_forward_keeps_its_bits_and_the_gradient_is_multiplied_exactly(head):
    symbol = HEADS[head](FC)
    plain = by_symbol(symbol, VALUES, grads_of=GRADS)
    for scale in (1.0, 1024.0, 0.125):
        got = run(symbol, VALUES, GRADS, scale)
        np.testing.assert_array_equal(got.outputs[0], plain.outputs[0])
        for name in GRADS:
            np.testing.assert_array_equal(got.grads[name], plain.grads[name] * np.float32(scale))


OTHER_DTYPES = {
    "MakeLoss in float64": lambda: S.MakeLoss(S.cast(S.square(FC), "float64")),
    "MakeLoss in float16": lambda: S.MakeLoss(S.cast(S.square(FC), "float16")),
    "SoftmaxOutput in float64": lambda: S.SoftmaxOutput(S.cast(FC, "float64"), S.cast(S.var("label"), "float64")),
    "in a loop": lambda: S.contrib.foreach(
        lambda row, state: (S.cast(S.MakeLoss(S.cast(S.sum(S.square(row)), "float64")), "float32") + S.sum(row), state),
        FC,
        S.var("state"),
    )[0],
}


@pytest.mark.parametrize("head", OTHER_DTYPES)
def test_a_head_that_the_user_s_cast_feeds_is_scaled_in_its_dtype(head):
    symbol = OTHER_DTYPES[head]()
    values = {**VALUES, "state": np.zeros(1, "float32")}
    ones = [np.ones((4, 1), "float32")] if head == "in a loop" else None
    plain = by_symbol(symbol, values, grads_of=GRADS, heads=ones)
    for scale in (1.0, 1024.0, 0.125):
        got = run(symbol, values, GRADS, scale, ones and [scale * ones[0]])
        np.testing.assert_array_equal(got.outputs[0], plain.outputs[0])
        for name in GRADS:
            np.testing.assert_allclose(got.grads[name], plain.grads[name] * np.float32(scale), rtol=1e-5, atol=1e-7)


def test_infinities_and_nan_pass_through():
    symbol = S.MakeLoss(S.identity(S.var("data")))
    data = np.array([np.inf, -np.inf, np.nan, 1e-45], "float32")
    values = {"data": data, SCALE_NAME: np.array([65536], "float32")}
    got = by_symbol(scaled(symbol), values, grads_of=["data"])
    np.testing.assert_array_equal(got.outputs[0], data)


def test_several_heads_share_one_scale_and_plain_heads_are_left_alone():
    both = S.Group([HEADS["SoftmaxOutput"](FC), HEADS["make_loss"](FC), S.relu(FC)])
    assert scaled(both).list_arguments().count(SCALE_NAME) == 1
    got = by_symbol(scaled(S.relu(FC) + 0 * S.make_loss(FC)), {**VALUES, SCALE_NAME: np.ones(1, "float32")})
    assert np.isfinite(got.grads["data"]).all()


def test_a_graph_without_such_heads_is_untouched():
    graph = Graph.from_symbol(S.softmax(FC))
    before = graph.to_json()
    assert not scale_heads(graph, {})
    assert graph.to_json() == before


def foreach(states: int):
    """A loop over ``data`` whose body has a head and a plain output, with so many states."""

    def body(row, state):
        x = S.FullyConnected(S.expand_dims(row, axis=0), S.var("fc_weight"), no_bias=True, num_hidden=3)
        return S.sum(HEADS["MakeLoss"](x)) + sum(map(S.sum, state)) + S.sum(S.sin(x)), [
            each + S.sum(x) for each in state
        ]

    return S.contrib.foreach(body, S.var("data"), [S.var(f"state{i}") for i in range(states)])[0]


def while_loop():
    def step(i, x):
        new = HEADS["MakeLoss"](S.broadcast_mul(S.sin(x), S.sum(S.var("fc_weight")))) + S.broadcast_mul(S.sin(x), i)
        return new, [i + 1, new]

    return S.contrib.while_loop(lambda i, x: i < 3, step, [S.var("state0"), S.var("data")], max_iterations=4)[1][1]


def cond(branch: bool):
    def taken():
        return HEADS["MakeLoss"](S.sum(S.sin(S.broadcast_mul(S.var("data"), S.sum(S.var("fc_weight")))))) + S.sum(
            S.var("data")
        )

    def other():
        return S.sum(S.var("data"))

    return S.contrib.cond(S.sum(S.var("state0")) < 9 * branch, *((taken, other) if branch else (other, taken)))


def nested():
    """A loop in a loop, of which the inner one alone has a head."""

    def body(row, state):
        x = S.sin(S.broadcast_mul(row, S.sum(S.var("fc_weight"))))
        return S.contrib.foreach(lambda each, s: (HEADS["MakeLoss"](each * s) + S.sin(each), s + each), x, state)

    return S.contrib.foreach(body, S.var("data"), S.var("state0"))[0]


LOOPS = {
    **{f"foreach, {n} states": lambda n=n: foreach(n) for n in range(3)},
    "while_loop": while_loop,
    "then": lambda: cond(True),
    "else": lambda: cond(False),
    "nested": nested,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_head_in_a_body_of_control_flow_is_scaled_where_it_is(loop):
    symbol = S.sum(S.sin(LOOPS[loop]()))
    values = {**VALUES, "state0": np.ones(1, "float32"), "state1": np.full(1, 2, "float32")}
    grads = [name for name in symbol.list_arguments() if not name.startswith("state")]
    plain = by_symbol(symbol, values, grads_of=grads, heads=[np.ones(1, "float32")])
    for scale in (1.0, 1024.0, 0.125):
        got = run(symbol, values, grads, scale, [np.float32([scale])])
        np.testing.assert_array_equal(got.outputs[0], plain.outputs[0])
        for name in grads:
            assert np.any(plain.grads[name])
            np.testing.assert_allclose(got.grads[name], plain.grads[name] * np.float32(scale), rtol=1e-6)


@mx.operator.register("mxmp_test_head")
class HeadProp(mx.operator.CustomOpProp):
    def __init__(self, top: str = "False") -> None:
        super().__init__(need_top_grad=top == "True")

    def create_operator(self, ctx, shapes, dtypes):
        return Head()


class Head(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 3 * in_data[0])


@pytest.mark.parametrize(("top", "is_head"), [("False", True), ("True", False)])
def test_a_custom_operator_is_a_head_where_it_says_that_it_needs_no_gradient(top, is_head):
    symbol = S.Custom(FC, op_type="mxmp_test_head", top=top, name="head")
    graph = Graph.from_symbol(symbol)
    assert scale_heads(graph, {}) is is_head
    assert (SCALE_NAME in graph.to_symbol().list_arguments()) is is_head
