"""What binding leaves alone: the process's environment, its stderr, and the graph, which MXNet would fuse wrongly."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest

import mxmp

S = mx.sym
SHAPES = [("data", (4, 3, 8, 8))], [("softmax_label", (4,))]
FULL = mxmp.Policy("float16", exclude=["c*"])


def residual():
    """One convolution feeds both BatchNorm, relu, convolution and a skip."""
    first = S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=8, name="c0")
    inner = S.relu(S.BatchNorm(first, fix_gamma=False, name="b0"), name="r0")
    second = S.Convolution(inner, kernel=(3, 3), pad=(1, 1), num_filter=8, name="c1") + first
    return S.SoftmaxOutput(S.FullyConnected(S.relu(second), num_hidden=3, name="fc"), name="softmax")


def bound(symbol=None, context=None, training=False, kind=mxmp.Module, policy=FULL, **kwargs):
    mixed = {"policy": policy} if kind is mxmp.Module else {}
    module = kind(residual() if symbol is None else symbol, context=context or mx.cpu(), **mixed, **kwargs)
    module.bind(*SHAPES, for_training=training)
    mx.random.seed(1)
    np.random.seed(1)
    module.init_params(mx.init.Xavier())
    return module


def batch():
    return mx.io.DataBatch([mx.nd.array(np.random.RandomState(0).randn(4, 3, 8, 8))], [mx.nd.array([0, 1, 2, 0])])


def operators(module):
    return [
        line.split("Op:")[1].split(",")[0]
        for executor in module._exec_group.execs
        for line in executor.debug_str().splitlines()
        if line.startswith("Op:")
    ]


def fused(module):
    return any("_sg_" in op for op in operators(module))


def answer(module):
    module.forward(batch(), is_train=False)
    return module.get_outputs()[0].asnumpy()


def test_mxnet_fuses_what_it_binds_itself():
    assert fused(bound(kind=mx.mod.Module))


@pytest.fixture
def _no_variables(monkeypatch):
    def refusing(function):
        def call(name, *value):
            assert b"MXNET" not in os.fsencode(name), f"the environment of all threads changes: {name}"
            function(name, *value)

        return call

    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND", raising=False)
    monkeypatch.setattr(os, "putenv", refusing(os.putenv))
    monkeypatch.setattr(os, "unsetenv", refusing(os.unsetenv))


@pytest.mark.usefixtures("_no_variables")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("devices", [[0], [0, 1], [1]])
def test_binding_sets_no_environment_variable_and_prints_nothing(training, devices, capfd):
    module = bound(context=[mx.cpu(k) for k in devices], training=training)
    if training:
        module.init_optimizer(kvstore="device")
        module.forward_backward(batch())
        module.update()
    mx.nd.waitall()
    assert capfd.readouterr() == ("", "")
    assert not fused(module)


@pytest.mark.usefixtures("_no_variables")
@pytest.mark.parametrize("kvstore", ["local", "device", "an object", None], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_init_optimizer_never_updates_on_the_kvstore(kvstore, devices):
    kvstore = mx.kv.create("local") if kvstore == "an object" else kvstore
    module = bound(context=[mx.cpu(k) for k in range(devices)], training=True)
    module.init_optimizer(kvstore=kvstore)
    assert not module._update_on_kvstore
    if isinstance(kvstore, mx.kv.KVStore):
        assert kvstore.is_capable(mx.kv.KVStoreBase.OPTIMIZER)  # as it was


@pytest.mark.parametrize(("policy", "training"), [("float16", False), ("float16", True), ("bfloat16", True)])
def test_the_numbers_are_those_of_mxnet_s_switch(monkeypatch, policy, training):
    found = answer(bound(policy=policy, training=training))
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    np.testing.assert_array_equal(found, answer(bound(policy=policy, training=training)))


def test_a_backend_that_the_user_asks_for_is_used(monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "MKLDNN")
    assert fused(bound())


def test_reshaping_fuses_nothing(capfd):
    module = bound()
    expected = answer(module)
    module.reshape([("data", (2, 3, 8, 8))], [("softmax_label", (2,))])
    assert not fused(module)
    module.reshape(*SHAPES)
    np.testing.assert_array_equal(answer(module), expected)
    assert "is activated" not in capfd.readouterr().err


def test_the_symbol_stays_the_user_s():
    module = bound()
    assert "ctx_group" not in module.symbol.tojson()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("training", [False, True])
def test_the_user_s_own_groups_hold(given, training):
    """Model parallelism: part of the graph on another device; without ``group2ctxs`` MXNet ignores the groups."""
    data = S.FullyConnected(S.var("data"), num_hidden=8, name="c0")
    with mx.AttrScope(ctx_group="second"):
        second = S.FullyConnected(S.relu(data), num_hidden=3, name="fc")
    groups = {"group2ctxs": [{"second": mx.cpu(2)}]} if given else {}
    module = bound(S.SoftmaxOutput(second, name="softmax"), training=training, **groups)
    arguments = module._exec_group.execs[0].arg_dict
    assert arguments["c0_weight"].context == mx.cpu(0)
    assert arguments["fc_weight"].context == mx.cpu(2 if given else 0)
    module.forward(batch(), is_train=training)
    if training:
        module.init_optimizer()
        module.backward()
        module.update()
    assert np.isfinite(module.get_outputs()[0].asnumpy()).all()


def test_modules_bind_in_threads():
    expected = answer(bound())

    def is_fused(_):
        module = mxmp.Module(residual(), policy=FULL)
        module.bind(*SHAPES, for_training=False)
        return fused(module)

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(is_fused, range(20)))
    np.testing.assert_array_equal(answer(bound()), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["gather_nd", "scatter_nd"])
def test_operators_that_mxnet_takes_for_gradients_bind(op, policy, training):
    """BERT gathers the hidden words by gather_nd. MXNet's pass that places operators ends the process at these two."""
    data = S.var("data")
    rows = S.reshape(S.contrib.arange_like(data, axis=0), (1, -1))
    found = S.FullyConnected(data, num_hidden=8, name="c0")
    found = S.gather_nd(found, rows) if op == "gather_nd" else S.scatter_nd(found, rows, shape=(4, 8))
    symbol = S.SoftmaxOutput(S.FullyConnected(found, num_hidden=3, name="fc"), name="softmax")
    module = bound(symbol, policy=policy, training=training, loss_scale=128)
    plain = bound(symbol, kind=mx.mod.Module, training=training)
    np.testing.assert_allclose(answer(module), answer(plain), atol=6e-3)
    if training:
        module.init_optimizer()
        module.forward_backward(batch())
        assert all(np.isfinite(grads[0].asnumpy()).all() for grads in module._exec_group.grad_arrays)


@pytest.mark.parametrize("policy", ["float16,params=float32", "float16,params=float16", "bfloat16"])
def test_weights_that_are_joined_before_a_layer_reads_them_bind(policy):
    """A cast behind them leaves MXNet without their dtype."""
    flat = [S.reshape(S.var(f"{name}_weight", shape=(4, 192)), shape=(-1, 192)) for name in ("query", "key")]
    layer = S.FullyConnected(S.var("data"), S.Concat(*flat, dim=0), num_hidden=8, no_bias=True, name="c0")
    symbol = S.SoftmaxOutput(S.FullyConnected(S.relu(layer), num_hidden=3, name="fc"), name="softmax")
    module, plain = bound(symbol, policy=policy), bound(symbol, kind=mx.mod.Module)
    np.testing.assert_allclose(answer(module), answer(plain), atol=3e-2)
    assert {array.dtype for array in module.get_params()[0].values()} == {np.float32}


def gradients_under(kind, grad_req, **mixed):
    symbol = S.SoftmaxOutput(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"), name="softmax")
    module = kind(symbol, **mixed)
    module.bind([("data", (4, 6))], [("softmax_label", (4,))], grad_req=grad_req)
    mx.random.seed(1)
    module.init_params(mx.init.Xavier())
    for _ in range(2):
        module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 6))], [mx.nd.array([0, 1, 2, 0])]))
    return {name: grads[0] for name, grads in zip(module._exec_group.param_names, module._exec_group.grad_arrays)}


@pytest.mark.parametrize(
    "grad_req",
    [["null", "add", "null", "null"], ("null", "write", "add", "null"), {"fc_weight": "add"}, {"fc_bias": "null"}],
    ids=str,
)
def test_a_request_for_each_gradient_is_mxnet_s(grad_req):
    full = gradients_under(mx.mod.Module, grad_req)
    low = gradients_under(mxmp.Module, grad_req, loss_scale=256.0)
    for name, gradient in full.items():
        assert (gradient is None) is (low[name] is None), name
        if gradient is not None:
            np.testing.assert_allclose(low[name].asnumpy() / 256, gradient.asnumpy(), atol=4e-3, rtol=4e-3)


def test_a_list_of_too_few_requests_is_refused_and_changes_nothing():
    module = mxmp.Module(residual())
    with pytest.raises(ValueError, match=r"grad_req has 2 values for the 10 arguments .*list_arguments"):
        module.bind(*SHAPES, grad_req=["write", "null"])
    assert not module.binded
    assert module.plan is None


def test_a_module_cannot_share_the_arrays_of_mxnets_own():
    plain, low = bound(kind=mx.mod.Module, policy=None), mxmp.Module(residual(), policy=FULL)
    with pytest.raises(ValueError, match="expected an mxmp\\.Module"):
        low.bind(*SHAPES, shared_module=plain)
    assert not low.binded
    low.bind(*SHAPES)


@pytest.mark.parametrize(("needs", "copies"), [({}, 0), ({"inputs_need_grad": True, "grad_req": "add"}, 3)])
def test_inputs_without_gradients_are_not_copied_before_their_casts(needs, copies):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = mxmp.Module(symbol, label_names=None, policy="bfloat16")
    module.bind([("data", (4, 5))], **needs)
    (executor,) = module._exec_group.execs
    operators = [node["op"] for node in json.loads(executor._symbol.tojson(remove_amp_cast=False))["nodes"]]
    assert operators.count("_copy") == copies


def test_an_input_gradient_that_is_not_requested_is_none():
    symbol = S.SoftmaxOutput(S.FullyConnected(S.var("data"), num_hidden=3, name="fc"), name="softmax")
    module = mxmp.Module(symbol)
    module.bind([("data", (4, 6))], [("softmax_label", (4,))], inputs_need_grad=True, grad_req={"data": "null"})
    module.init_params(mx.init.Xavier())
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((4, 6))], [mx.nd.array([0, 1, 2, 0])]))
    assert module.get_input_grads() == [None]
    assert module.get_input_grads(merge_multi_context=False) == [[None]]


def test_shapes_may_come_from_an_iterator():
    module = mxmp.Module(residual())
    module.bind(iter(SHAPES[0]), iter(SHAPES[1]))
    assert module.data_shapes == [mx.io.DataDesc(*SHAPES[0][0])]
    assert module.label_shapes == [mx.io.DataDesc(*SHAPES[1][0])]


def sequences(split, activation):
    """A layer on sequences whose second axis is the batch, as MXNet's attribute ``__layout__`` says."""
    with mx.AttrScope(__layout__="TNC"):
        x = S.FullyConnected(S.var("data"), num_hidden=4, flatten=False, name="fc")
        x = S.LeakyReLU(x, act_type="prelu", name="prelu") if activation == "prelu" else x
        return S.SliceChannel(x, num_outputs=2, axis=2, name="split") if split else x


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(("split", "activation"), [(False, None), (True, None), (False, "prelu")])
def test_outputs_keep_the_axis_of_their_batch(policy, split, activation):
    symbol, data = sequences(split, activation), mx.nd.array(np.random.RandomState(0).rand(5, 8, 6))
    found = []
    for kind, mixed in ((mx.mod.Module, {}), (mxmp.Module, {"policy": policy, "loss_scale": 256.0})):
        module = kind(symbol, label_names=None, context=[mx.cpu(0), mx.cpu(1)], **mixed)
        module.bind([mx.io.DataDesc("data", data.shape, layout="TNC")], inputs_need_grad=True)
        module.init_params(mx.init.One())
        module.forward(mx.io.DataBatch([data]))
        module.backward(module.get_outputs())
        found.append([array.asnumpy() for array in (*module.get_outputs(), *module.get_input_grads())])
    for full, low in zip(*found):
        np.testing.assert_allclose(low, full, rtol=3e-2)


@pytest.mark.parametrize("training", [True, False])
def test_names_beyond_ascii_bind(training):
    symbol = S.FullyConnected(S.var("größe"), num_hidden=3, name="ähnlich/层")
    module = mxmp.Module(S.SoftmaxOutput(symbol, name="softmax"), data_names=["größe"], policy="bfloat16")
    module.bind([("größe", (4, 6))], [("softmax_label", (4,))], for_training=training)
    module.init_params(mx.init.Xavier())
    assert set(module.get_params()[0]) == {"ähnlich/层_weight", "ähnlich/层_bias"}
    module.forward(mx.io.DataBatch([mx.nd.ones((4, 6))], [mx.nd.zeros(4)]), is_train=training)
    assert module.get_outputs()[0].shape == (4, 3)
