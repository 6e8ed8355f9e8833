"""Bodies of control flow: rewritten like any graph, through both doors."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, agree, by_gluon, by_symbol, casts, filled, native, nodes, trainable
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import mxmp
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Plan
from mxmp.precision.subgraphs import bodies

DTYPES = ["float16", "bfloat16"]


class Loop(gluon.HybridBlock):
    """``foreach`` over a cell with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.cell = rnn.RNNCell(8, input_size=6)
        self.head = nn.Dense(3, in_units=8, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        out, _ = F.contrib.foreach(self.cell, x, [F.zeros((4, 8))])
        return self.head(out)


class Unrolled(Loop):
    """The same, unrolled."""

    def hybrid_forward(self, F, x):  # noqa: N803
        out, _ = self.cell.unroll(5, x, [F.zeros((4, 8))], layout="TNC", merge_outputs=True)
        return self.head(out)


class While(gluon.HybridBlock):
    """MXNet's own backward adds the gradient of a while_loop's weights to memory that it never clears, in FP32 too."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, in_units=6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        def step(i, h):
            new = F.tanh(self.dense(h))
            return new, [i + 1, new]

        _, (_, last) = F.contrib.while_loop(lambda i, h: i < 3, step, [F.zeros((1,)), x], max_iterations=5)
        return last


class Cond(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.then, self.other = nn.Dense(3, in_units=6, flatten=False), nn.Dense(3, in_units=6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        return F.contrib.cond(F.sum(x) > 0, lambda: self.then(x), lambda: self.other(x))


class Nested(gluon.HybridBlock):
    """A loop in a loop; the outer one has a state, the inner one a weight of the outer's."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, in_units=6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        def inner(row, state):
            new = F.tanh(self.dense(F.expand_dims(row, axis=0)) + state)
            return new, new

        def outer(part, state):
            _, last = F.contrib.foreach(inner, part, state)
            return last, last

        return F.contrib.foreach(outer, x, F.zeros((1, 6)))[0]


NETS = [(Loop, (5, 4, 6)), (While, (4, 6)), (Cond, (4, 6)), (Nested, (3, 4, 6))]
ALL = pytest.mark.parametrize(("kind", "shape"), NETS, ids=[kind.__name__ for kind, _ in NETS])


def made(kind, shape):
    mx.random.seed(3)
    net = kind()
    net.initialize(mx.init.Normal(0.3))
    return net, np.random.RandomState(2).normal(0.3, 1, shape).astype("float32")


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}])
@pytest.mark.parametrize("train", [True, False])
def test_a_converted_net_is_close_to_fp32(kind, shape, dtype, flags, train):
    net, x = made(kind, shape)
    net.hybridize()
    train = train and kind is not While
    want = by_gluon(net, [x], train=train)
    mxmp.convert(net, dtype)
    net.hybridize(**flags)
    for _ in range(2):
        got = by_gluon(net, [x], train=train)
        agree(got, want, 30)
        assert (got.outputs[0] != want.outputs[0]).any()
    low = [node for node in mxmp.explain(net).nodes if node.dtype == dtype and "/" in node.name]
    assert {"FullyConnected"} <= {node.op for node in low}


class Behind(Loop):
    """The loop reads what an operator computes."""

    def hybrid_forward(self, F, x):  # noqa: N803
        return super().hybrid_forward(F, 2 * x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_shape_is_ignored_where_mxnet_would_run_the_backward_before_the_loop(dtype):
    """In FP32 it fails, with "We didn't record the computation", or returns what was in memory."""
    net, x = made(Behind, (5, 4, 6))
    net.hybridize()
    want = by_gluon(net, [x])
    mxmp.convert(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(10):
        agree(by_gluon(net, [x]), want, 30)


@pytest.mark.parametrize(("kind", "shape"), [pair for pair in NETS if pair[0] is not While])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_add_up(kind, shape, dtype):
    net, x = made(kind, shape)
    net.hybridize()
    want = by_gluon(net, [x])
    mxmp.convert(net, dtype)
    for param in net.collect_params().values():
        param.grad_req = "add"
    for times in (1, 2):
        grads = by_gluon(net, [x]).grads
        agree(want._replace(grads={n: g / times for n, g in grads.items()}), want, 30)


@ALL
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_symbol_is_close_to_fp32(kind, shape, dtype):
    net, x = made(kind, shape)
    symbol = net(S.var("data"))
    values = {"data": x, **{n: p.data().asnumpy() for n, p in net.collect_params().items()}}
    low = mxmp.cast_symbol(symbol, dtype)
    assert low.list_arguments() == symbol.list_arguments()
    wanted = [] if kind is While else trainable(net)
    agree(by_symbol(low, values, grads_of=wanted), by_symbol(symbol, values, grads_of=wanted), 30)
    if kind in (Loop, Nested):  # of the others MXNet does not infer the shapes, in FP32 either
        low.simple_bind(mx.cpu(), data=shape)
    assert mxmp.cast_symbol(low, dtype).tojson() == low.tojson()


def test_gradients_of_many_iterations_are_summed_in_fp32():
    """1,000 equal terms: bfloat16 would stop adding at 256."""
    weight = S.var("weight", shape=(1, 1))
    out, _ = S.contrib.foreach(
        lambda x, s: (S.FullyConnected(x, weight, num_hidden=1, no_bias=True), s), S.var("data"), S.var("state")
    )
    values = {
        "data": np.ones((1000, 1, 1), "float32"),
        "weight": np.ones((1, 1), "float32"),
        "state": np.zeros(1, "float32"),
    }
    for dtype in DTYPES:
        low = mxmp.cast_symbol(out, dtype)
        heads = [np.ones((1000, 1, 1), "float32")]
        assert by_symbol(low, values, grads_of=["weight"], heads=heads).grads["weight"] == 1000


def casts_in(symbol):
    """What is cast around loops, and what within them: sets of pairs of a tensor and a dtype."""
    within = set()
    for node in nodes(symbol):
        for body in node.get("subgraphs", ()):
            every = body["nodes"]
            found = [n for n in every if n["op"] in ("Cast", "amp_cast")]
            within |= {(every[n["inputs"][0][0]]["name"], n["attrs"]["dtype"]) for n in found}
    return set(casts(symbol)), within


def test_what_all_iterations_read_is_cast_to_float16_once_and_a_state_never():
    symbol = Loop()(S.var("data"))
    weights = {name for name in symbol.list_arguments() if "rnncell" in name}
    around, within = casts_in(native(symbol, "float16,params=float32"))
    assert {(name, "float16") for name in [*weights, "data"]} <= around
    assert not weights & {name for name, _ in within}
    assert [name.partition("_")[2] for name, dtype in within if dtype == "float16"] == ["_zeros0-0"]
    around, within = casts_in(mxmp.cast_symbol(symbol, "bfloat16"))
    assert weights <= {name for name, _ in within}
    assert not weights & {name for name, _ in around}


def test_a_loop_reads_what_an_exact_operator_in_low_precision_returns():
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=6, flatten=False, name="first"))
    out, _ = S.contrib.foreach(
        lambda q, state: (S.FullyConnected(q, num_hidden=3, name="fc"), state + 1), x, S.zeros((1,))
    )
    values = filled(out, data=(5, 4, 6))
    agree(by_symbol(mxmp.cast_symbol(out, "float16"), values), by_symbol(out, values), 50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_binds_a_loop_that_reads_a_weight_in_fp32(dtype):
    weight = S.var("both_weight", shape=(3, 6))

    def body(x, state):
        y = S.FullyConnected(x, weight, num_hidden=3, no_bias=True, flatten=False, name="fc")
        return S.broadcast_add(y, S.sum(S.relu(weight))), state + 1

    out, _ = S.contrib.foreach(body, S.var("data"), S.var("start_weight", shape=(1,)))
    module = mxmp.Module(out, policy=dtype, label_names=None)
    module.bind([("data", (5, 4, 6))])
    module.init_params(mx.init.One())
    module.forward(mx.io.DataBatch([mx.nd.ones((5, 4, 6))]), is_train=False)
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), 24)


def test_what_an_fp32_operator_of_the_body_reads_too_is_cast_in_the_body():
    weight = S.var("weight", shape=(8, 8))

    def body(x, state):
        return S.FullyConnected(x, weight, num_hidden=8, no_bias=True) + S.sum(S.exp(weight)), state

    symbol, _ = S.contrib.foreach(body, S.var("data"), S.var("state"))
    around, within = casts_in(native(symbol, "float16,params=float32"))
    assert "weight" not in {name for name, _ in around}
    assert ("weight", "float16") in within


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}])
def test_weights_that_only_a_loop_reads_are_stored_in_float16_and_train_as_if_unrolled(flags):
    found = []
    for kind in (Loop, Unrolled):
        net, x = made(kind, (5, 4, 6))
        params = net.collect_params()
        mxmp.convert(net, "float16,params=float16")
        net.hybridize(**flags)
        first = by_gluon(net, [x])
        assert {p.data().dtype for p in params.values()} == {np.float16}
        trainer = mxmp.Trainer(params, "sgd", {"learning_rate": 0.1}, loss_scale=128)
        for _ in range(3):
            with autograd.record():
                loss = net(mx.nd.array(x)).square().mean()
            trainer.backward(loss)
            trainer.step(1)
        assert not trainer.skipped_steps
        found.append((first, [p.masters()[0].asnumpy() for p in params.values()]))
    (loop, trained), (unrolled, wanted) = found
    np.testing.assert_array_equal(loop.outputs[0], unrolled.outputs[0])
    agree(loop._replace(grads=dict(zip(unrolled.grads, loop.grads.values()))), unrolled, 60)
    for value, expected in zip(trained, wanted):
        np.testing.assert_allclose(value, expected, atol=1e-3 * np.abs(expected).max())


def test_a_plan_names_what_is_in_bodies():
    net, _ = made(Nested, (3, 4, 6))
    symbol = net(S.var("data"))
    graph = Graph.from_symbol(symbol)
    plan = decide(graph, mxmp.Policy("bfloat16"), "cpu")
    (name,) = [n for n, d in plan.decisions.items() if d.op == "FullyConnected"]
    assert name.count("/") == 2
    assert plan.decisions[name].low
    assert Plan.from_json(plan.to_json()) == plan
    assert mxmp.cast_symbol(symbol, plan).tojson() == mxmp.cast_symbol(symbol, "bfloat16").tojson()
    with pytest.raises(ValueError, match="another graph"):
        mxmp.cast_symbol(Cond()(S.var("data")), plan)


def test_what_steers_stays_fp32_and_exclude_reaches_bodies():
    net, _ = made(Cond, (4, 6))
    x = S.var("data")
    pred = S.contrib.cond(S.sum(S.FullyConnected(x, num_hidden=2)) > 0, lambda: net.then(x), lambda: net.other(x))
    decided = {n.name: n for n in mxmp.explain(pred, policy="bfloat16").nodes}
    assert not any(n.dtype == "bfloat16" for name, n in decided.items() if "/if/" in name)
    low = {name for name, n in decided.items() if n.dtype == "bfloat16" and "/" in name}
    assert {name.split("/")[1] for name in low} == {"then", "else"}
    names = {n.name: n for n in mxmp.explain(pred, policy="bfloat16", exclude=[net.then.name]).nodes}
    assert {name.split("/")[1] for name, n in names.items() if n.dtype == "bfloat16" and "/" in name} == {"else"}
    (loop,) = [name for name, node in decided.items() if node.op == "_cond"]
    names = mxmp.explain(pred, policy="bfloat16", exclude=[loop]).nodes
    assert not [n for n in names if n.dtype == "bfloat16" and "/" in n.name]


def test_integers_that_enter_a_loop_are_not_cast():
    weight = S.var("table", shape=(9, 6))

    def step(tokens, state):
        return S.FullyConnected(S.Embedding(tokens, weight, input_dim=9, output_dim=6), num_hidden=6, name="fc"), state

    out, _ = S.contrib.foreach(step, S.var("tokens", dtype="int32"), S.var("state"))
    (loop,) = [n for n in Graph.from_symbol(mxmp.cast_symbol(out, "bfloat16")).nodes() if n.op == "_foreach"]
    (body,) = bodies(loop)
    (embedding,) = [n for n in body.graph.nodes() if n.op == "Embedding"]
    assert embedding.inputs[0].node.is_variable


class Same(gluon.HybridBlock):
    """Both branches read the same parameters, so that MXNet writes their gradients."""

    def __init__(self):
        super().__init__()
        self.then = nn.Dense(3, in_units=6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        return F.contrib.cond(F.sum(x) > 0, lambda: self.then(x), lambda: -self.then(x))


@pytest.mark.parametrize("kind", [While, Cond, Same, Loop])
def test_control_flow_through_which_mxnet_gives_wrong_gradients_is_named_once_in_training(kind, caplog):
    net = kind()
    net.initialize()
    mxmp.convert(net, "bfloat16")
    x = mx.nd.ones((5, 4, 6))
    net(x)
    assert "wrong gradients" not in caplog.text
    for _ in range(2):
        with autograd.record():
            net(x)
    assert caplog.text.count("wrong gradients") == (kind in (While, Cond))
