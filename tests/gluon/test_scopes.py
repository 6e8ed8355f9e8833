"""Scopes of autograd in the code of a block: a graph follows them as a net does that is not hybridized."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.takes import DTYPES, Takes, X
from kit.twins import step, trainer_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

pytestmark = [
    pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation"),
    pytest.mark.filterwarnings("ignore:nothing in .* computes in"),
]


def paused(block, op, x):
    with autograd.pause():
        factor = op.tanh(x)
    return x * factor


def paused_layer(block, op, x):
    with autograd.pause():
        aside = block.layer(x)
    return x + op.tanh(aside)


def all_paused_but_one(block, op, x):
    with autograd.pause():
        aside, y = op.split(x, num_outputs=3, axis=1, squeeze_axis=True)[:2]
    return op.sum(x, axis=1) * aside + y


def paused_output(block, op, x):
    with autograd.pause():
        y = op.tanh(x)
    return y, x * 2


def paused_around(block, op, x):
    with autograd.pause(), mx.AttrScope(ctx_group="one"):
        factor = op.tanh(x)
    with mx.AttrScope(ctx_group="one"):
        with autograd.pause():
            more = op.sigmoid(x)
        x = x * more
    return x * factor


def paused_while_training(block, op, x):
    with autograd.pause(train_mode=True):
        factor = op.sign(block.drop(op.ones_like(x)) + 1) * op.tanh(x)
    return x * factor


def in_loop(block, op, x):
    def body(row, state):
        with autograd.pause():
            factor = op.tanh(row)
        return row * factor, state

    return op.contrib.foreach(body, x, op.zeros((1,)))[0]


def loop_in_pause(block, op, x):
    with autograd.pause():
        factor = op.contrib.foreach(lambda row, state: (op.tanh(row), state), x, op.zeros((1,)))[0]
    return x * factor


def cond_in_pause(block, op, x):
    with autograd.pause():
        factor = op.contrib.cond(op.sum(x) > 0, lambda: op.tanh(x), lambda: x * x)
    return x * factor


def while_in_pause(block, op, x):
    def step(i, state):
        return state, (i + 1, block.layer(state))

    with autograd.pause():
        start = (op.zeros((1,)), x)
        factor = op.contrib.while_loop(lambda i, state: i < 2, step, start, max_iterations=3)[1][1]
    return x * op.tanh(factor)


def symbols_in_pause(block, op, x):
    with autograd.pause():
        factor = block.symbols(x)
    return x * factor + block.symbols(x) * 0


def symbols_predicting(block, op, x):
    with autograd.predict_mode():
        return block.symbols(x)


class Doubled(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        for each, kind in zip(out_data, req):
            self.assign(each, kind, in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("scopes_doubled")
class DoubledProp(mx.operator.CustomOpProp):
    def __init__(self, outputs="1"):
        super().__init__(need_top_grad=True)
        self._outputs = int(outputs)

    def list_outputs(self):
        return [f"output{i}" for i in range(self._outputs)]

    def infer_shape(self, in_shape):
        return in_shape, in_shape * self._outputs, []

    def create_operator(self, ctx, shapes, dtypes):
        return Doubled()


def custom_in_pause(block, op, x):
    with autograd.pause():
        factor = op.Custom(x, op_type="scopes_doubled")
        one, other = op.Custom(x, op_type="scopes_doubled", outputs=2)
    return x * (factor + one * other)


def symbols_of_custom_in_pause(block, op, x):
    with autograd.pause():
        factor = block.symbols(x)
    return x * factor


def predicting_by_setting(block, op, x):
    before = autograd.set_training(False)
    y = block.drop(x)
    autograd.set_training(before)
    return y


def predicting_in_loop(block, op, x):
    def body(row, state):
        with autograd.predict_mode():
            return block.drop(row), state

    return op.contrib.foreach(body, x, op.zeros((1,)))[0]


ALIKE = [paused, paused_layer, all_paused_but_one, paused_output, paused_around, paused_while_training]
ALIKE += [cond_in_pause, while_in_pause, symbols_in_pause, symbols_predicting]
ALIKE += [custom_in_pause, symbols_of_custom_in_pause]
ALIKE += [in_loop, loop_in_pause, predicting_by_setting, predicting_in_loop]
MODES = {
    "record": autograd.record,
    "record, predict": lambda: autograd.record(train_mode=False),
    "predict": autograd.predict_mode,
    "train": autograd.train_mode,
}


def symbol_block():
    """Operators that were made before any trace, one of them in a loop."""

    def body(row, state):
        return mx.sym.Dropout(mx.sym.tanh(row), p=0.9), state

    x = mx.sym.var("data", dtype="float32")
    dense = mx.sym.FullyConnected(x, mx.sym.var("symbols_weight", shape=(3, 3)), num_hidden=3, no_bias=True)
    rows = mx.sym.contrib.foreach(body, dense, mx.sym.zeros((1,)))[0]
    return gluon.SymbolBlock(mx.sym.Dropout(rows, p=0.9), x)


def made(compute, how, nested):
    layers = {} if compute in (paused_around, in_loop) else {"layer": nn.Dense(3, in_units=3)}
    net = Takes(compute, drop=nn.Dropout(0.9), aux=None, **layers)
    if "of_custom" in compute.__name__:
        x = mx.sym.var("data", dtype="float32")
        net.symbols = gluon.SymbolBlock(mx.sym.Custom(mx.sym.tanh(x), op_type="scopes_doubled"), x)
    elif compute.__name__.startswith("symbols"):
        net.symbols = symbol_block()
    if nested:
        inner, net = net, nn.HybridSequential()
        net.add(nn.Dense(3, in_units=3), inner)
    mx.random.seed(3)
    net.initialize(mx.init.Xavier())
    for param in net.collect_params("symbols_weight").values():
        param.set_data(mx.nd.array([[0.4, -0.3, 0.2], [0.1, 0.5, -0.4], [-0.2, 0.3, 0.6]]))
    return mxmp.convert(net, how) if how else net


def results(net, mode):
    with MODES[mode]():
        out = net(X)
    out = list(out) if isinstance(out, (list, tuple)) else [out]
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    for param in params:
        param.zero_grad()
    if mode.startswith("record"):
        out[-1].backward(train_mode=mode == "record")
    return [each.asnumpy() for each in out] + [param.grad().asnumpy() for param in params]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("compute", ALIKE)
def test_scopes_of_autograd_are_followed(compute, nested, dtype):
    nets = [made(compute, how, nested) for how in (None, dtype)]
    for mode in ("predict", "train", "record", "record, predict", "predict", "record"):
        for full, low in zip(*[results(net, mode) for net in nets]):
            np.testing.assert_allclose(low, full, rtol=0.03, atol=0.02)


def of_batch(block, op, x):
    with autograd.train_mode():
        return block.bn(x)


def of_running_statistics(block, op, x):
    with autograd.predict_mode():
        return block.bn(x)


def always_dropping(block, op, x):
    with autograd.train_mode():
        return block.drop(x)


def recurrent(block, op, x):
    with autograd.predict_mode():
        return block.lstm(op.expand_dims(x, 1))


def recurrent_in_training(block, op, x):
    with autograd.train_mode():
        return block.lstm(op.expand_dims(x, 1))


def random_leaky(block, op, x):
    with autograd.predict_mode():
        return op.LeakyReLU(x, act_type="rrelu")


def with_layers(compute, how, seed=3):
    net = Takes(
        compute,
        bn=nn.BatchNorm(in_channels=3),
        drop=nn.Dropout(0.5),
        lstm=gluon.rnn.LSTM(4, dropout=0.9, num_layers=2, input_size=3),
    )
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier())
    return mxmp.convert(net, how) if how else net


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", [of_batch, recurrent])
def test_layers_in_a_scope_compute_in_its_mode(compute, dtype):
    nets = [with_layers(compute, how) for how in (None, dtype)]
    for scope in (autograd.predict_mode, autograd.train_mode, autograd.record):
        with scope():
            full, low = (net(X).asnumpy() for net in nets)
        np.testing.assert_allclose(low, full, rtol=0.03, atol=0.08)


def layer_in_a_loop(block, op, x):
    def body(row, state):
        with autograd.pause():
            factor = op.tanh(block.layer(op.expand_dims(row, 0)))
        return op.broadcast_mul(row, op.sum(factor)), state

    return op.contrib.foreach(body, x, op.zeros((1,)))[0]


def layer_used_twice(block, op, x):
    with autograd.pause():
        factor = op.tanh(block.layer(x))
    return block.layer(x) * factor


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", [paused_layer, layer_in_a_loop, while_in_pause, layer_used_twice])
def test_weight_decay_leaves_what_is_read_in_pause_alone(compute, dtype, flags):
    found = []
    for how in (None, dtype):
        net = made(compute, how, False)
        if how:
            net.hybridize(**flags)
        trainer = trainer_of(how, net, scale=128, learning_rate=0.1, wd=0.5, momentum=0.9)
        for _ in range(3):
            with autograd.record():
                loss = net(X)
            step(trainer, loss, ignore_stale_grad=True)
        found.append([param.data().asnumpy() for param in net.collect_params().values()])
        before = made(compute, None, False).layer.weight.data().asnumpy()
        assert (compute is layer_used_twice) == bool(np.abs(net.layer.weight.data().asnumpy() - before).max())
    for full, low in zip(*found):
        np.testing.assert_allclose(low, full, rtol=0.03, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_that_is_read_in_pause_alone_gets_no_gradient(dtype):
    x = X.copy()
    x.attach_grad()
    x.grad[:] = 3

    def reads(op, x, y):
        with autograd.pause():
            factor = op.tanh(x)
        return factor * y

    low = mxmp.convert(nn.HybridLambda(reads), dtype)
    y = X.copy()
    y.attach_grad()
    with autograd.record():
        out = low(x, y)
    out.backward()
    assert y.grad.asnumpy().all()
    np.testing.assert_array_equal(x.grad.asnumpy(), 3)


def normed_in_pause(block, op, x):
    with autograd.pause(train_mode=True):
        factor = block.bn(x)
    return x * factor


def normed_in_pause_in_a_loop(block, op, x):
    with autograd.pause(train_mode=True):
        rows = op.contrib.foreach(lambda row, state: (block.bn(row), state), op.stack(x, x), op.zeros((1,)))[0]
    return x * op.sum(rows, axis=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", [normed_in_pause, normed_in_pause_in_a_loop])
def test_batch_norm_in_pause_leaves_its_running_statistics(compute, dtype):
    nets = [with_layers(compute, how) for how in (None, dtype)]
    for _ in range(2):
        for full, low in zip(*[results(net, "record") for net in nets]):
            np.testing.assert_allclose(low, full, rtol=0.03, atol=0.08)
    for net in nets:
        np.testing.assert_array_equal(net.bn.running_mean.data().asnumpy(), 0)
        np.testing.assert_array_equal(net.bn.running_var.data().asnumpy(), 1)


@pytest.mark.parametrize("compute", [cond_in_pause, while_in_pause])
def test_control_flow_in_pause_has_no_gradients_of_which_to_warn(compute, caplog):
    results(made(compute, "bfloat16", False), "record")
    assert "wrong gradients" not in caplog.text


def test_a_scope_of_attributes_that_is_entered_again_has_no_mark():
    own = mx.AttrScope(ctx_group="one")

    def compute(block, op, x):
        with autograd.pause(), own:
            factor = op.tanh(x)
        return x * factor

    results(made(compute, "bfloat16", False), "record")
    with own:
        assert mx.sym.var("x").attr("ctx_group") == "one"
        assert not [name for name in mx.sym.var("x").list_attr() if "mxmp" in name]


def test_batch_norm_in_predict_mode_has_the_gradient_of_its_running_statistics():
    def by_hand(block, op, x):
        params = [getattr(block.bn, name).var() for name in ("gamma", "beta", "running_mean", "running_var")]
        return op.BatchNorm(x, *params, use_global_stats=True, fix_gamma=False, eps=1e-5)

    found = []
    for compute in (of_running_statistics, by_hand):
        net = with_layers(compute, "bfloat16")
        net.bn.running_mean.set_data(mx.nd.array([0.2, 0.1, -0.3]))
        with autograd.record():
            out = net(X)
        out.backward()
        found.append([out.asnumpy(), net.dense.weight.grad().asnumpy(), net.bn.running_mean.data().asnumpy()])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


class NormalizesByBatch(gluon.HybridBlock):
    """In the way of a training, whatever the mode."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.norm = norm

    def hybrid_forward(self, F, x):  # noqa: N803
        with autograd.train_mode():
            return self.norm(x)


NORMS = {
    "plain": ((6, 3, 4, 4), lambda: nn.BatchNorm(in_channels=3)),
    "of rows": ((6, 3), lambda: nn.BatchNorm(in_channels=3, epsilon=0.1)),
    "channels last": ((6, 4, 4, 3), lambda: nn.BatchNorm(in_channels=3, axis=-1)),
    "no scale": ((6, 3, 5), lambda: nn.BatchNorm(in_channels=3, scale=False)),
    "with ReLU": ((6, 3, 4, 4), lambda: nn.BatchNormReLU(in_channels=3)),
}


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("norm", NORMS)
def test_batch_statistics_of_a_prediction_are_exported_and_have_gradients(norm, tmp_path):
    shape, make = NORMS[norm]
    x = mx.nd.random.normal(3, 2, shape=shape)
    found = []
    for is_converted in (False, True):
        net = NormalizesByBatch(make())
        net.initialize()
        net.norm.gamma.set_data(mx.nd.array([0.5, 1, 2]))
        net.norm.beta.set_data(mx.nd.array([1, 0, -1]))
        if is_converted:
            mxmp.convert(net, "float16")
        found.append(net(x).asnumpy())
    net.export(str(tmp_path / "net"))
    again = gluon.SymbolBlock.imports(f"{tmp_path}/net-symbol.json", ["data"], f"{tmp_path}/net-0000.params")
    x.attach_grad()
    with autograd.record():
        out = again(x)
    out.backward(mx.nd.arange(x.size).reshape(shape) % 7)
    found.append(out.asnumpy())
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-5)
    gradient = x.grad.asnumpy()
    with autograd.record():
        other = net.norm(x)
    other.backward(mx.nd.arange(x.size).reshape(shape) % 7)
    np.testing.assert_allclose(gradient, x.grad.asnumpy(), atol=1e-4)


def test_dropout_in_train_mode_drops_while_the_graph_predicts():
    net = with_layers(always_dropping, "bfloat16")
    assert 0 < (net(X).asnumpy() == 0).mean() < 1


REFUSED = {
    "batch statistics in an inference that is recorded": (of_batch, lambda: autograd.record(train_mode=False)),
    "a recurrent layer that drops": (recurrent_in_training, autograd.predict_mode),
    "rrelu": (random_leaky, autograd.record),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_graph_can_follow_is_refused_by_name(kind):
    compute, scope = REFUSED[kind]
    net = with_layers(compute, "bfloat16")
    with pytest.raises(ValueError, match=r"is in autograd\.(train|predict)_mode\(\), and a graph"), scope():
        net(X)


@pytest.mark.parametrize("compute", [paused_around, paused_layer, in_loop])
def test_no_mark_of_a_scope_is_left_in_a_file(compute, tmp_path):
    net = made(compute, "bfloat16", False)
    for scope, stops in ((autograd.record, True), (autograd.predict_mode, False)):
        with scope():
            net(X)
        net.export(str(tmp_path / "net"))
        text = (tmp_path / "net-symbol.json").read_text()
        assert ("BlockGrad" in text) == stops
        assert "__mxmp" not in text


def test_a_plan_and_a_served_net_follow_scopes():
    plan = mxmp.tune(made(paused, None, False), X, measure=False)
    net, full = made(paused, None, False), made(paused, None, False)
    mxmp.convert(net, plan)
    for one, other in zip(results(net, "record"), results(full, "record")):
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.02)
    served = mxmp.optimize_for_inference(with_layers(of_batch, None), [X])
    np.testing.assert_allclose(served(X).asnumpy(), with_layers(of_batch, None)(X).asnumpy(), rtol=0.03, atol=0.02)
