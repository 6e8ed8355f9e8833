"""What low precision must not take from those who read a value, against FP32, by rules and by plans.

``z`` is a product with the identity, whose values every dtype holds: what differs from FP32 was lost behind it.
"""

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, by_symbol
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.serving.lowering import lower, lower_to_float16

Z = S.FullyConnected(S.var("data"), S.var("weight"), no_bias=True, num_hidden=4, name="z")
POLICIES = ["float16", "float16-fast", "bfloat16"]


def left(p):
    """The logarithm of what is left of 1: the loss of a label 0."""
    return S.log(1 - p)


def squared_distances(a, b):
    squares = S.broadcast_add(S.sum(a * a, axis=1, keepdims=True), S.reshape(S.sum(S.square(b), axis=1), (1, -1)))
    return squares - 2 * S.dot(a, b, transpose_b=True, name="product")


def variance(z):
    return S.mean(z * z, axis=1) - S.square(S.mean(z, axis=1))


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


def low_of(symbol, policy="float16", device="gpu"):
    plan = decide(Graph.from_symbol(symbol), Policy.parse(policy), device)
    return {name for name, decision in plan.decisions.items() if decision.low}


def fc(x, name):
    return S.FullyConnected(x, num_hidden=4, name=name)


def test_gates_and_attention_stay_low():
    gate = S.sigmoid(fc(Z, "gate_fc"), name="gate")
    gated = S.elemwise_mul(gate, Z, name="gated")
    assert {"gate", "gated"} <= low_of(fc(gated, "out"))
    rest = S.elemwise_add(gated, S.elemwise_mul(1 - gate, Z, name="rest"), name="sum")
    assert {"gate", "rest", "sum"} <= low_of(fc(rest, "out"))


def test_an_unrolled_lstm_computes_low_what_no_fp32_state_multiplies():
    cell = mx.rnn.LSTMCell(4, prefix="lstm_")
    outputs, _ = cell.unroll(3, [S.var(f"x{i}") for i in range(3)], merge_outputs=False)
    assert {f"lstm_t{i}_i" for i in range(3)} <= low_of(fc(outputs[-1], "out"))
    zero = fc(S.var("start"), "zero")
    outputs, _ = cell.unroll(3, [S.var(f"x{i}") for i in range(3)], begin_state=[zero, zero], merge_outputs=False)
    assert {f"lstm_t{i}_{gate}" for i in range(3) for gate in "ifo"} <= low_of(fc(outputs[-1], "out"))


def test_a_sigmoid_before_a_norm_that_a_gpu_computes_inside_stays_low():
    x = S.Convolution(S.var("data"), kernel=(1, 1), num_filter=4, name="c")
    x = S.BatchNorm(S.sigmoid(x, name="s"), name="bn")
    assert "s" in low_of(S.Convolution(x, kernel=(1, 1), num_filter=4, name="c2"))


def test_attention_with_a_mask_stays_low():
    scores = S.dot(Z, Z, transpose_b=True, name="scores")
    masked = S.broadcast_add(scores / 2, S.var("mask") * -1e4)
    assert "scores" in low_of(S.dot(S.softmax(masked), Z, name="read"))


def residual(norm):
    x = fc(S.var("data"), "into")
    for name in ("first", "second"):
        x = norm(S.elemwise_add(fc(x, f"{name}_fc"), x, name=f"{name}_sum"), name=f"{name}_norm")
    return fc(x, "last")


def test_a_norm_and_a_product_that_an_fp32_norm_reads_are_added_in_fp32():
    """As in a transformer: a cast of the product costs what one of the sum does. The first sum has no norm in it."""
    assert low_of(residual(S.LayerNorm)) & {"first_sum", "second_sum"} == {"first_sum"}


def test_a_norm_and_a_product_that_cudnn_s_norm_reads_are_added_low():
    assert {"first_sum", "second_sum"} <= low_of(residual(S.BatchNorm))


def test_outputs_that_the_policy_leaves_low_are_low():
    assert low_of(S.sigmoid(Z, name="p"), "float16,output=compute") == {"z", "p"}


def test_an_operator_that_low_ops_names_is_low():
    assert "p" in low_of(S.sigmoid(Z, name="p"), "float16,low_ops=sigmoid")


def test_a_body_keeps_what_its_outputs_are_read_for():
    def body(x, state):
        return S.sigmoid(S.FullyConnected(x, num_hidden=4, name="fc"), name="p"), state

    out, _ = S.contrib.foreach(body, S.var("data"), S.var("state"))
    assert {name.split("/")[-1] for name in low_of(out)} == {"fc"}


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_classifier_with_some_wrong_labels_learns_as_in_fp32(dtype):
    """A probability of 1 for a wrong label has a loss of log(1e-12), whose gradient moves every weight far away."""
    rng = np.random.RandomState(0)
    x = rng.normal(0, 1, (512, 8)).astype("float32")
    right = (x[:, 0] * 3 + x[:, 1] > 0).astype("float32")
    labels = np.where(rng.uniform(size=512) < 0.03, 1 - right, right)

    def accuracy(policy):
        mx.random.seed(0)
        net = nn.HybridSequential(prefix="")
        with net.name_scope():
            net.add(nn.Dense(32, in_units=8, activation="relu"), nn.Dense(1, in_units=32, activation="sigmoid"))
        net.initialize(mx.init.Xavier(magnitude=24))
        trainer_of = mxmp.Trainer if policy else gluon.Trainer
        if policy:
            mxmp.convert(net, policy)
        trainer = trainer_of(net.collect_params(), "sgd", {"learning_rate": 0.5})
        loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=True)
        for _ in range(60):
            with mx.autograd.record():
                loss = loss_fn(net(mx.nd.array(x)), mx.nd.array(labels))
            trainer.backward(loss) if policy else loss.backward()
            trainer.step(512)
        return ((net(mx.nd.array(x)).asnumpy()[:, 0] > 0.5) == right).mean()

    assert accuracy(dtype) > accuracy(None) - 0.01 > 0.94
