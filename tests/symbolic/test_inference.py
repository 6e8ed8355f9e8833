"""A module that only predicts: its forwards run a fused graph with folded weights, and give what the network gives."""

import mxnet as mx
import numpy as np
import pytest
from kit.twins import assert_same

import mxmp
from mxmp.inference.calibration import sqnr
from mxmp.symbolic import _mxnet
from mxmp.symbolic.inference import InferenceExecutor

pytestmark = pytest.mark.filterwarnings("ignore:nothing in this Symbol would run in bfloat16")
S = mx.sym
SHAPES = [("data", (4, 3, 8, 8))], [("softmax_label", (4,))]
# The same executors and graphs as in bfloat16, with every operator in FP32.
FULL = mxmp.Policy("bfloat16", exclude=["*"])


def pre_activation(norm=True):
    """Two residual units whose convolutions feed a BatchNorm and a skip connection: MXNet fuses them wrongly."""
    body = S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=8, name="c0")
    for i in (1, 2):
        inner = S.BatchNorm(body, fix_gamma=False, name=f"b{i}") if norm else body
        inner = S.Activation(inner, act_type="relu", name=f"r{i}")
        inner = S.Convolution(inner, kernel=(3, 3), pad=(1, 1), num_filter=8, name=f"c{i}a", no_bias=True)
        inner = S.Activation(S.BatchNorm(inner, fix_gamma=False, name=f"n{i}"), act_type="relu")
        body = S.Convolution(inner, kernel=(3, 3), pad=(1, 1), num_filter=8, name=f"c{i}b") + body
    return S.SoftmaxOutput(S.FullyConnected(S.relu(body), num_hidden=3, name="fc"), name="softmax")


def parameters(symbol, seed=0):
    """Random values; running statistics that are not those of the start."""
    shapes, _, states = symbol.infer_shape(data=SHAPES[0][0][1])
    random = np.random.RandomState(seed)
    named = zip(symbol.list_arguments(), shapes)
    args = {k: mx.nd.array(random.randn(*s) * 0.3) for k, s in named if k not in ("data", "softmax_label")}
    auxs = {k: mx.nd.array(random.rand(*s) + 0.5) for k, s in zip(symbol.list_auxiliary_states(), states)}
    return args, auxs


def made(symbol, values, kind=mxmp.Module, policy="bfloat16", training=False, shared=None, contexts=1):
    mixed = {"policy": policy} if kind is mxmp.Module else {}
    module = kind(symbol, context=[mx.cpu(k) for k in range(contexts)], **mixed)
    module.bind(*SHAPES, for_training=training, shared_module=shared)
    if shared is None:
        module.set_params(*values)
    return module


def batch(rows=4, seed=0):
    random = np.random.RandomState(seed)
    return mx.io.DataBatch([mx.nd.array(random.randn(rows, 3, 8, 8))], [mx.nd.array(random.randint(0, 3, rows))])


def answer(module, data=None):
    module.forward(data or batch(), is_train=False)
    return module.get_outputs()[0].asnumpy()


def ratio(found, expected):
    return sqnr(expected, found)


def fused(module):
    """Whether the last forward ran a fused graph, by MXNet's own account of it."""
    executors = _mxnet.group(module).execs
    return all(isinstance(e, InferenceExecutor) and "_sg_mkldnn" in e._latest.debug_str() for e in executors)


def casts_in_the_last_run(module):
    (executor,) = _mxnet.group(module).execs
    return [line for line in executor._latest.debug_str().splitlines() if line.startswith("Op:amp_cast")]


def weights_cast(module):
    return [line for line in casts_in_the_last_run(module) if "weight" in line or "bias" in line or "gamma" in line]


@pytest.fixture(autouse=True)
def _no_backend(monkeypatch):
    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND", raising=False)


@pytest.fixture
def symbol():
    return pre_activation()


@pytest.fixture
def values(symbol):
    return parameters(symbol)


@pytest.fixture
def expected(symbol, values, monkeypatch):
    """The answer of plain MXNet, which must not fuse this network."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    found = answer(made(symbol, values, mx.mod.Module))
    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND")
    return found


@pytest.mark.parametrize(("policy", "least"), [(FULL, 90), ("bfloat16", 28), ("bfloat16-safe", 28)], ids=str)
@pytest.mark.parametrize("contexts", [1, 2])
def test_a_module_that_predicts_runs_a_fused_graph_and_is_right(symbol, values, expected, policy, least, contexts):
    module = made(symbol, values, policy=policy, contexts=contexts)
    assert ratio(answer(module), expected) > least
    assert fused(module)


def test_a_network_without_batch_norm_is_fused_as_well():
    symbol = pre_activation(norm=False)
    module = made(symbol, parameters(symbol))
    answer(module)
    assert fused(module)


def test_no_weight_is_cast_in_a_run(symbol, values):
    module = made(symbol, values)
    answer(module)
    assert casts_in_the_last_run(module)
    assert not weights_cast(module)


def test_predict_and_score_use_it_for_a_last_batch_of_another_size_too(symbol, values):
    data, labels = np.random.RandomState(0).randn(10, 3, 8, 8).astype("float32"), np.arange(10) % 3
    module, plain = made(symbol, values, policy=FULL), made(symbol, values, policy=FULL)
    _mxnet.group(plain).execs[:] = [e._executor for e in _mxnet.group(plain).execs]
    found, known = (m.predict(mx.io.NDArrayIter(data, labels, 4)).asnumpy() for m in (module, plain))
    assert found.shape == (10, 3)
    assert ratio(found, known) > 90
    scores = [dict(m.score(mx.io.NDArrayIter(data, labels, 4), "acc")) for m in (module, plain)]
    assert scores[0] == scores[1]
    assert ratio(answer(module, batch(2)), answer(plain, batch(2))) > 90
    assert fused(module)


def test_a_second_bind_that_mxnet_ignores_changes_nothing(symbol, values):
    module = made(symbol, values)
    first = answer(module)
    executors = list(_mxnet.group(module).execs)
    module.bind(*SHAPES, for_training=False)  # MXNet warns that it is bound already
    assert _mxnet.group(module).execs == executors
    np.testing.assert_array_equal(answer(module), first)
    module.bind(*SHAPES, for_training=False, force_rebind=True)
    np.testing.assert_array_equal(answer(module), first)
    assert fused(module)


def test_a_reshape_to_the_shapes_that_it_has_keeps_the_executors(symbol, values):
    module = made(symbol, values)
    first = answer(module)
    before = list(_mxnet.group(module).execs)
    for _ in range(3):
        module.reshape(*SHAPES)
        np.testing.assert_array_equal(answer(module), first)
    assert _mxnet.group(module).execs == before
    assert not any(isinstance(each._executor, InferenceExecutor) for each in before)
    module.reshape([("data", (2, 3, 8, 8))], [("softmax_label", (2,))])
    np.testing.assert_array_equal(answer(module, mx.io.DataBatch([batch().data[0][:2]], [mx.nd.zeros(2)])), first[:2])
    assert fused(module)


def test_parameters_that_are_set_later_are_used(symbol, values):
    module, others = made(symbol, values), parameters(symbol, seed=1)
    first = answer(module)
    module.set_params(*others)
    np.testing.assert_array_equal(answer(module), answer(made(symbol, others)))
    module.set_params(*values)
    np.testing.assert_array_equal(answer(module), first)
    module.set_params({"fc_bias": mx.nd.array([3.0, -3, 0])}, {}, allow_missing=True)
    assert not np.allclose(answer(module), first)
    module.init_params(arg_params=others[0], aux_params=others[1], force_init=True)
    np.testing.assert_array_equal(answer(module), answer(made(symbol, others)))


def test_running_statistics_that_a_forward_in_training_mode_changes_are_used(symbol, values):
    module, plain = made(symbol, values, policy=FULL), made(symbol, values, policy=FULL, training=True)
    answer(module)
    for each in (module, plain):
        each.forward(batch(), is_train=True)
    by_statistics_of_the_batch = [each.get_outputs()[0].asnumpy() for each in (module, plain)]
    assert ratio(*by_statistics_of_the_batch) > 90
    assert ratio(answer(module), answer(plain)) > 90
    assert fused(module)


def test_what_a_user_writes_into_an_executor_is_used(symbol, values, expected):
    module = made(symbol, values)
    assert ratio(answer(module), expected) > 28
    module._exec_group.execs[0].arg_dict["fc_bias"][:] = [5.0, 0, 0]
    plain = made(symbol, ({**values[0], "fc_bias": mx.nd.array([5.0, 0, 0])}, values[1]), training=True)
    np.testing.assert_array_equal(answer(module), answer(plain))
    assert not fused(module)


def test_a_module_that_shares_arrays_with_one_that_trains_follows_its_updates(symbol, values):
    trainer = made(symbol, values, training=True)
    module = made(symbol, values, shared=trainer)
    module.params_initialized = True
    before = answer(module)
    trainer.init_optimizer(optimizer_params={"learning_rate": 0.5})
    trainer.forward_backward(batch())
    trainer.update()
    found = answer(module)
    assert not np.allclose(found, before, atol=1e-3)
    np.testing.assert_array_equal(found, answer(trainer))


def test_a_monitor_sees_every_operator(symbol, values):
    module, names = made(symbol, values), []
    answer(module)
    monitor = mx.mon.Monitor(1, lambda array: array, pattern=".*output", sort=True)
    module.install_monitor(monitor)
    monitor.tic()
    answer(module)
    names = {name for _, name, _ in monitor.toc()}
    assert {"c0_output", "b1_output", "r2_output", "softmax_output"} <= names


def test_parameters_and_checkpoints_stay_the_user_s(symbol, values, tmp_path):
    module = made(symbol, values)
    answer(module)
    module.save_checkpoint(str(tmp_path / "net"), 0)
    _, args, auxs = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
    for found, known in ((args, values[0]), (auxs, values[1])):
        assert found.keys() == known.keys()
        assert_same(found, known)


@pytest.mark.parametrize("why", ["it trains", "float16", "states", "the user's backend"])
def test_other_modules_run_the_graph_with_casts(symbol, values, why, monkeypatch):
    if why == "the user's backend":
        monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    policy = "float16" if why == "float16" else "bfloat16"
    module = mxmp.Module(symbol, policy=policy, state_names=["b1_beta"] if why == "states" else None)
    module.bind(*SHAPES, for_training=why == "it trains")
    args = {name: value for name, value in values[0].items() if why != "states" or name != "b1_beta"}
    module.set_params(args, values[1])
    answer(module)
    assert not any(isinstance(each, InferenceExecutor) for each in _mxnet.group(module).execs)


def test_buckets_share_parameters_and_cast_no_weight_in_a_run(values):
    def build(key):
        return pre_activation(), ["data"], ["softmax_label"]

    module = mxmp.BucketingModule(build, default_bucket_key=4, context=mx.cpu(), policy="bfloat16")
    module.bind(*SHAPES, for_training=False)
    module.set_params(*values)

    def run(key):
        data = batch(key)
        data.bucket_key = key
        data.provide_data, data.provide_label = [("data", (key, 3, 8, 8))], [("softmax_label", (key,))]
        found = answer(module, data)
        assert fused(module._curr_module)
        return found

    first = run(4)
    run(2)
    np.testing.assert_array_equal(run(4), first)
    assert not weights_cast(module._curr_module)
    run(2)
    others = parameters(pre_activation(), seed=1)
    module.set_params(*others)  # in the bucket of 2 rows
    np.testing.assert_array_equal(run(4), answer(made(pre_activation(), others)))


def test_a_constant_gets_a_name_that_no_variable_has():
    weight = S.var("w_0", shape=(8, 8))
    first = S.FullyConnected(S.var("data"), weight, num_hidden=8, no_bias=True, name="first")
    net = S.FullyConnected(first, S.transpose(weight, name="w"), num_hidden=8, no_bias=True, name="second")
    values = {"w_0": np.random.RandomState(0).normal(0, 0.4, (8, 8)).astype("float32")}
    data = np.random.RandomState(1).normal(0, 1, (4, 8)).astype("float32")
    module = mxmp.Module(net, policy="bfloat16", label_names=None)
    module.bind([("data", (4, 8))], for_training=False)
    module.init_params(arg_params={"w_0": mx.nd.array(values["w_0"])})
    module.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=False)
    wanted = data @ values["w_0"].T @ values["w_0"]
    assert sqnr(wanted, module.get_outputs()[0].asnumpy()) > 30


def test_a_layer_that_a_policy_keeps_in_fp32_stays_so_where_its_norm_is_an_output():
    """Folded, the layer took the name of the BatchNorm, by which no policy knew it."""
    layer = S.Convolution(S.var("data"), kernel=(3, 3), num_filter=8, name="layer")
    net = S.BatchNorm(layer, fix_gamma=False, name="norm")
    found = {}
    for policy in (mxmp.Policy("bfloat16", exclude=["layer"]), "bfloat16"):
        module = mxmp.Module(net, policy=policy, label_names=None)
        module.bind(SHAPES[0], for_training=False)
        module.set_params(*parameters(net))
        found[policy] = answer(module)
        assert fused(module)
    kept, rounded = found.values()
    plain = mx.mod.Module(net, label_names=None)
    plain.bind(SHAPES[0], for_training=False)
    plain.set_params(*parameters(net))
    assert ratio(kept, answer(plain)) > 90 > 60 > ratio(rounded, answer(plain))


def test_the_first_states_of_a_recurrent_cell_fit_each_batch():
    """MXNet infers their batch from what the layers that read them return, which it does not for fused layers."""
    cell = mx.rnn.SequentialRNNCell()
    cell.add(mx.rnn.LSTMCell(8, prefix="lstm_"))
    cell.add(mx.rnn.GRUCell(8, prefix="gru_"))
    last = cell.unroll(3, S.var("data"), merge_outputs=False)[0][-1]
    symbol = S.FullyConnected(last, num_hidden=3, name="fc")
    data, values = mx.nd.random.normal(shape=(4, 3, 5)), None
    modules = []
    for kind, more in [(mx.mod.Module, {}), (mxmp.Module, {"policy": "bfloat16"})]:
        modules.append(kind(symbol, label_names=None, **more))
        modules[-1].bind([("data", data.shape)], for_training=False)
        modules[-1].init_params(mx.init.Xavier(), *(values or ()))
        values = modules[-1].get_params()
    for rows in (4, 2, 4):
        expected, found = (answer(each, mx.io.DataBatch([data[:rows]], None)) for each in modules)
        assert ratio(found, expected) > 28
        assert fused(modules[1])
