"""The Symbolic door: cast_symbol gives a plain Symbol that binds, trains and serves like the first."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, by_symbol, nodes

import mxmp
from mxmp import Policy
from mxmp.precision.rules import RULES

FC = S.FullyConnected(S.relu(S.FullyConnected(S.var("data"), num_hidden=8, name="fc1")), num_hidden=3, name="fc2")
SOFTMAX = S.SoftmaxOutput(FC, S.var("softmax_label"), name="softmax")
SHAPES = {"data": (4, 5)}
DTYPES = ["float16", "bfloat16"]


@pytest.mark.parametrize("policy", [*DTYPES, "params=float16"])
def test_a_plain_module_binds_a_cast_symbol_and_fits(policy):
    module = mx.mod.Module(mxmp.cast_symbol(SOFTMAX, policy), data_names=["data"], label_names=["softmax_label"])
    x, y = np.random.normal(0, 1, (8, 5)), np.array([0, 1, 2, 0] * 2)
    data = mx.io.NDArrayIter(x.astype("float32"), y.astype("float32"), 4)
    module.fit(data, num_epoch=1, optimizer_params={"learning_rate": 0.1, "multi_precision": True})
    assert module.predict(data).dtype == np.float32


def test_exclude_is_added_to_the_policys():
    with pytest.warns(UserWarning, match=r"no node or block matches \['typo'\]"):
        cast = mxmp.cast_symbol(FC, Policy(exclude=["fc1"]), exclude=["typo"])
    assert not any(n["name"].startswith("fc1_weight_to") for n in nodes(cast))
    assert any(n["name"].startswith("fc2_weight_to") for n in nodes(cast))


def test_numpy_symbols_stay_numpy_symbols():
    x = S.var("data").as_np_ndarray()
    cast = mxmp.cast_symbol(S.np.dot(x, S.var("w").as_np_ndarray()))
    assert type(cast) is S.np._Symbol


def test_integer_inputs_arrive_exactly():
    x = S.Embedding(S.var("ids"), S.var("table"), input_dim=5000, output_dim=2)
    cast = mxmp.cast_symbol(S.FullyConnected(x, S.var("w"), no_bias=True, num_hidden=2, flatten=False))
    ids = np.array([[2049, 4097, 4999]], "int32")
    table = np.stack([np.arange(5000) % 64, np.arange(5000) // 64], 1).astype("float32")
    values = {"ids": ids, "table": table, "w": np.eye(2, dtype="float32")}
    got = by_symbol(cast, values, train=False).outputs[0]
    np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mxmp.cast_symbol("net.json"), TypeError, r"Symbol, got str.*mx\.sym\.load"),
        (lambda: mxmp.cast_symbol(mx.gluon.nn.Dense(2)), TypeError, r"got Dense.*mxmp\.convert"),
        (lambda: mxmp.cast_symbol(FC, "int8"), ValueError, "'int8' is no recipe.*float16.*bfloat16"),
        (lambda: mxmp.cast_symbol(FC, None), ValueError, "policy must be.*None"),
        (lambda: mxmp.cast_symbol(FC, "bfloat16", ctx=mx.gpu()), ValueError, "no bfloat16 kernels.*float16"),
        (lambda: mxmp.cast_symbol(S.exp(S.var("x"))), ValueError, "nothing in this Symbol.*exponential"),
        (lambda: mxmp.cast_symbol(S.var("x")), ValueError, "nothing in this Symbol.*no operator at all"),
        (lambda: mxmp.cast_symbol(FC, exclude=["fc1", "fc2"]), ValueError, "nothing.*excluded by 'fc1'"),
        (lambda: mxmp.cast_symbol(FC, exclude="fc1"), ValueError, r"exclude='fc1'.*list"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("field", ["low_ops", "full_ops"])
def test_an_operator_without_a_rule_goes_where_the_policy_names_it(monkeypatch, field):
    symbol = mx.sym.tanh(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), name="act")
    monkeypatch.delitem(RULES, "tanh")
    with pytest.raises(ValueError, match="no precision rule for operator 'tanh'"):
        mxmp.cast_symbol(symbol)
    policy = mxmp.Policy(**{field: ["tanh"]})
    assert mxmp.cast_symbol(symbol, policy).list_outputs() == ["act_output"]
    dtypes = {node.name: node.dtype for node in mxmp.explain(symbol, policy=policy).nodes}
    assert dtypes == {"fc": "float16", "act": "float16" if field == "low_ops" else "float32"}


@pytest.mark.parametrize("ctx", [mx.cpu(), mx.gpu()], ids=str)
@pytest.mark.parametrize("heads", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_outputs_of_an_operator_with_several_keep_their_names(heads, ctx):
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
    parts = mx.sym.split(layer, num_outputs=2, name="split")
    symbol = mx.sym.Group([*(parts[i] for i in heads), layer])
    assert mxmp.cast_symbol(symbol, ctx=ctx).list_outputs() == symbol.list_outputs()
