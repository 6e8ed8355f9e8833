"""Products of sparse arrays, and with row-sparse gradients, stay FP32 without a cast; what follows computes low."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.pipeline import low_graph
from mxmp.precision.graph import Graph

ROWS, WORDS = 6, 50
DTYPES = ["float16", "params=float16", "bfloat16"]


class Bag(gluon.HybridBlock):
    """A bag of words: a product with a large weight, and two layers behind it."""

    def __init__(self, grad_stype="row_sparse", **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(WORDS, 16), grad_stype=grad_stype)
            self.hidden = nn.Dense(16, in_units=16, activation="relu")
            self.out = nn.Dense(16, in_units=16)

    def hybrid_forward(self, F, x, weight):  # noqa: N803
        return self.out(self.hidden(F.dot(x, weight)))


def words():
    rng = np.random.RandomState(0)
    return mx.nd.array(rng.uniform(size=(ROWS, WORDS)) * (rng.uniform(size=(ROWS, WORDS)) < 0.1))


def decisions(net):
    return [
        {decision.op: decision.low for decision in graph.plan.decisions.values()} for graph in mxmp.explain(net).graphs
    ]


def trained(policy, x, grad_stype, steps=3):
    mx.random.seed(2)
    net = Bag(grad_stype)
    net.initialize(mx.init.Xavier())
    if policy is not None:
        mxmp.convert(net, policy)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128)
    for _ in range(steps):
        with autograd.record():
            loss = (net(x) ** 2).sum(axis=1)
        trainer.backward(loss)
        trainer.step(ROWS)
    assert trainer.skipped_steps == 0
    return net


@pytest.mark.parametrize("grad_stype", ["row_sparse", "default"])
@pytest.mark.parametrize("policy", DTYPES)
def test_a_product_of_csr_data_is_fp32_and_the_layers_behind_it_are_low(policy, grad_stype):
    x = words().tostype("csr")
    net, full = trained(policy, x, grad_stype), trained(None, x, grad_stype)
    (found,) = decisions(net)
    assert found == {"dot": False, "FullyConnected": True, "Activation": found["Activation"]}
    assert net.weight.list_grad()[0].stype == grad_stype
    assert net.weight.data().dtype == np.float32
    for one, other in zip(net.collect_params().values(), full.collect_params().values()):
        np.testing.assert_allclose(one.data().astype("float32").asnumpy(), other.data().asnumpy(), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("policy", DTYPES)
def test_a_weight_with_a_row_sparse_gradient_is_read_without_a_cast(policy):
    net = trained(policy, words(), "row_sparse")
    assert not decisions(net)[0]["dot"]
    assert net.weight.data().dtype == np.float32


@pytest.mark.parametrize("first", ["csr", "default"])
def test_sparse_and_dense_calls_of_one_net_have_graphs_of_their_own(first):
    net = mxmp.convert(Bag("default"), "float16")
    net.initialize(mx.init.Xavier())
    second = "default" if first == "csr" else "csr"
    outputs = [net(words().tostype(stype)).asnumpy() for stype in (first, second, first)]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0.01, atol=1e-3)
    np.testing.assert_array_equal(outputs[0], outputs[2])
    assert sorted(found["dot"] for found in decisions(net)) == [False, True]


def csr(name="data", shape=(ROWS, WORDS)):
    return mx.sym.var(name, stype="csr", shape=shape)


def layer(x):
    return mx.sym.FullyConnected(x, num_hidden=4, name="fc")


W = mx.sym.var("w", shape=(WORDS, 16))
# A graph that reads a CSR array, and whether what follows may be low: the result is dense.
GRAPHS = {
    "dot": (lambda: mx.sym.dot(csr(), W), True),
    "dot with a row-sparse weight": (lambda: mx.sym.dot(csr(), mx.sym.var("w", stype="row_sparse")), True),
    "dot of squares": (lambda: mx.sym.dot(mx.sym.square(csr()), mx.sym.square(W)), True),
    "dot of a scaled one": (lambda: mx.sym.dot(csr() * 2, W), True),
    "dot of a part": (lambda: mx.sym.dot(mx.sym.slice(csr(), begin=(0,), end=(2,)), W), True),
    "dot of the transposed": (lambda: mx.sym.dot(csr(), mx.sym.var("w"), transpose_a=True), False),
    "dot into row-sparse": (lambda: mx.sym.dot(csr(), W, forward_stype="row_sparse"), False),
    "dot of a dense one and CSR": (lambda: mx.sym.dot(mx.sym.var("w"), csr()), False),
    "sum": (lambda: mx.sym.sum(csr(), axis=1, keepdims=True), True),
    "product by elements": (lambda: mx.sym.broadcast_mul(csr(), W), False),
}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_cast_reads_a_sparse_array(name, device):
    make, dense = GRAPHS[name]
    graph, plan = low_graph(Graph.from_symbol(layer(make())), mxmp.Policy("float16"), device)
    assert plan.decisions["fc"].low == dense
    sparse = {node for node in graph.nodes() if node.attrs.get("__storage_type__") in ("1", "2")}
    assert sparse
    for node in graph.nodes():
        kept = node.op in ("square", "_mul_scalar", "slice", "broadcast_mul") and node.inputs[0].node in sparse
        if kept:
            sparse.add(node)
        if "ast" in node.op and "broadcast" not in node.op:
            assert not sparse & {entry.node for entry in node.inputs}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_module_with_csr_data_trains_as_fp32_with_low_layers_behind_the_product(policy):
    def run(policy):
        mx.random.seed(1)
        hidden = mx.sym.FullyConnected(mx.sym.dot(csr(), W, name="product"), num_hidden=16, name="fc1")
        sym = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(hidden, num_hidden=16, name="fc2"), name="out")
        kind, mixed = (mx.mod.Module, {}) if policy is None else (mxmp.Module, {"policy": policy, "loss_scale": 128})
        module = kind(sym, label_names=["out_label"], **mixed)
        data = mx.io.NDArrayIter(
            words().tostype("csr"), mx.nd.ones((ROWS, 16)), ROWS, label_name="out_label", last_batch_handle="discard"
        )
        module.bind(data.provide_data, data.provide_label)
        weight = {"w": mx.nd.random.uniform(shape=(WORDS, 16))}
        module.init_params(mx.init.Xavier(), arg_params=weight, allow_missing=True)
        module.init_optimizer(optimizer_params={"learning_rate": 0.01})
        for _ in range(3):
            data.reset()
            for batch in data:
                module.forward_backward(batch)
                module.update()
        return module

    module, full = run(policy), run(None)
    decided = mxmp.explain(module).graphs[0].plan.decisions
    assert [decided[name].low for name in ("product", "fc1")] == [False, True]
    for name, value in full.get_params()[0].items():
        np.testing.assert_allclose(
            module.get_params()[0][name].asnumpy(), value.asnumpy(), rtol=0.05, atol=0.02, err_msg=name
        )
