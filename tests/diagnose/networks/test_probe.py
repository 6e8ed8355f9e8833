"""The probe: every tensor of a watched step is reported once, under the network's names, and nothing of it stays."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import (
    Chain,
    Run,
    batch,
    convolutional,
    dense,
    gluon_run,
    gluon_step,
    module_of,
    tensors,
    three,
    values,
)
from kit.twins import LOSS, assert_same
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import audit, blame, guard, watch
from mxmp.precision.monitoring import Listeners

IMAGE = (4, 3, 6, 6)


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_what_is_counted_are_the_tensors_of_that_step(door):
    net, (x, y) = three(), batch()
    weights = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
    run = Run(door, net, on=(x, y), loss_scale=64.0, policy=mxmp.Policy("float16", params="float32"))
    with watch(*run.target) as watched:
        run.step()
    after, gradients = run.weights(), run.gradients()
    snapshot = watched.latest
    half = {name: w.astype("float16").astype("float32") for name, w in weights.items()}
    hidden = x.asnumpy().astype("float16").astype("float32") @ half["first_weight"].T
    expected = {
        "activation": {"first_fwd": hidden},
        "parameter gradient": gradients,
        "weight": weights,
        "update": {name: after[name] - weights[name] for name in weights},
    }
    for kind, named in expected.items():
        for name, value in named.items():
            found = tensors(snapshot, kind)[name].histogram
            assert found.size == value.size
            assert found.largest == pytest.approx(np.abs(value).max(), rel=1e-5)
            assert found.smallest == pytest.approx(np.abs(value)[value != 0].min(), rel=1e-4)
    assert snapshot.loss_scale == 64
    sent = tensors(snapshot, "gradient")["last_fwd -> last_weight"]
    assert sent.true(64.0).largest == pytest.approx(np.abs(gradients["last_weight"]).max() / 64, rel=1e-3)


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_of_a_row_sparse_gradient_the_stored_rows_are_counted_and_training_goes_on(door):
    def run(sparse, watched):
        net = Chain(
            ("table", nn.Embedding(20, 8, sparse_grad=sparse, prefix="table_")),
            ("flat", lambda ops, x: ops.Flatten(x, name="flat")),
            dense("last", 4, 40),
        )
        values(net)
        x, y = mx.nd.array(np.random.RandomState(0).randint(0, 20, (4, 5))), batch()[1]
        training = Run(door, net, on=(x, y))
        observers = [each(*training.target) for each in ([watch, guard] if watched else [])]
        for _ in range(2):
            training.step()
        return list(training.weights().values()), observers, x

    wanted, _, x = run(True, False)
    found, (watched, _), _ = run(True, True)
    _, (dense_watched, _), _ = run(False, True)
    assert_same(wanted, found)
    for kind, name in (("parameter gradient", "table_weight"), ("gradient", "table_fwd -> table_weight")):
        sparse, full = (tensors(each.latest, kind)[name].histogram for each in (watched, dense_watched))
        np.testing.assert_array_equal(sparse.counts, full.counts)
        assert sparse.size == len(np.unique(x.asnumpy())) * 8


def test_calls_that_autograd_does_not_record_report_nothing(monkeypatch):
    """Not even to listeners that would ignore it: such a call runs without a monitor, as fast as unwatched."""
    net = convolutional()
    trainer = gluon_run(net)
    heard, call = [], Listeners.__call__
    monkeypatch.setattr(Listeners, "__call__", lambda self, name, *more: heard.append(name) or call(self, name, *more))
    watcher = watch(net, trainer, every=1)
    x, y = batch(0, IMAGE)
    for _ in range(2):
        with mx.autograd.record():
            loss = mx.nd.mean((net(x) - y) ** 2, axis=1)
        trainer.backward(loss)
        trainer.step(4)
        mx.nd.waitall()
        assert heard
        heard.clear()
        net(x)
        with mx.autograd.train_mode():
            net(x)
        with mx.autograd.record(), mx.autograd.pause(train_mode=True):
            net(x)
        mx.nd.waitall()
        assert not heard
    watcher.close()


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_the_gradients_of_where_are_those_of_what_it_chooses_from(door):
    """Its first input, the condition, has none, and MXNet counts from the second."""

    def pick(ops, x):
        return ops.where(x > 0, ops.relu(x, name="relu"), ops.tanh(x, name="tanh"), name="pick")

    net, (x, y) = values(Chain(dense("first", 8, 6), ("pick", pick), dense("last", 4, 8))), batch()
    run = Run(door, net, on=(x, y))
    with watch(*run.target) as watched:
        run.step()
    found = tensors(watched.latest, "gradient")
    assert {name for name in found if name.startswith("pick -> ")} == {"pick -> relu", "pick -> tanh"}
    into = {name: found[name].histogram.largest for name in ("pick -> relu", "relu -> first_fwd")}
    assert into["pick -> relu"] == into["relu -> first_fwd"]


OLDER = {  # operators whose gradients MXNet's monitor calls by the names of their inputs
    "norm": lambda ops, x: ops.InstanceNorm(x, ops.ones((2,)), ops.zeros((2,)), name="norm"),
    "conv": lambda ops, x: ops.contrib.DeformableConvolution(
        x, ops.zeros((4, 18, 2, 2)), ops.ones((3, 2, 3, 3)), kernel=(3, 3), num_filter=3, no_bias=True, name="conv"
    ),
    "pad": lambda ops, x: ops.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1), name="pad"),
}


@pytest.mark.parametrize("door", ["gluon", "module"])
@pytest.mark.parametrize("name", OLDER)
def test_gradients_that_mxnet_names_are_those_of_their_inputs(name, door):
    net = Chain(
        dense("first", 32, 6),
        ("image", lambda ops, x: ops.reshape(x, (-1, 2, 4, 4), name="image")),
        (name, OLDER[name]),
        dense("last", 4, {"norm": 32, "conv": 12, "pad": 72}[name]),
    )
    net, (x, y) = values(net), batch()
    run = Run(door, net, on=(x, y))
    with watch(*run.target) as watched:
        run.step()
    found = tensors(watched.latest, "gradient")
    sent, handed_on = found[f"{name} -> image"].histogram, found["image -> first_fwd"].histogram
    assert sent.size == 4 * 2 * 4 * 4
    np.testing.assert_array_equal(sent.counts, handed_on.counts)  # reshape changes no value


def test_nothing_stays_after_close():
    net, (x, y) = convolutional(), batch(0, IMAGE)
    trainer = gluon_run(net)
    gluon_step(net, trainer, x, y)
    graphs = mxmp.gluon.hook.hook_of(net).graphs
    watched = watch(net, trainer, every=1)
    gluon_step(net, trainer, x, y)
    assert net._callback is not None
    watched.close()
    blocks = [net, *net._children.values()]
    assert all(block._callback is None for block in blocks)
    assert trainer.scaled_step.observers == []
    assert [built.op._monitored for built in graphs.values()] == [{}]
    probe = weakref.ref(watched._probe)
    del watched
    gc.collect()
    assert probe() is None
    gluon_step(net, trainer, x, y)


def counts():
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def grown_over(steps, run):
    """Types of which more objects are alive after so many runs, at least one for two runs, and again after as many."""
    for _ in range(3):
        run()
    seen = [counts()]
    for _ in range(2):
        for _ in range(steps):
            run()
        seen.append(counts())
    before, then, now = seen
    growth = {name: min(then[name] - before[name], now[name] - then[name]) for name in now}
    return {name: more for name, more in growth.items() if more >= steps // 2}


@pytest.mark.slow
@pytest.mark.parametrize("door", ["gluon", "module"])
def test_a_watched_step_leaves_no_object_behind(door):
    run = Run(door, three())
    with watch(*run.target, every=1, keep=1):
        assert grown_over(10, run.step) == {}

    def watched_once():
        with watch(*run.target, every=1, keep=1):
            run.step()

    assert grown_over(10, watched_once) == {}


@pytest.mark.slow
def test_nor_where_other_threads_run_the_net():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)

    def forward():
        with mx.autograd.record():
            return LOSS(net(x), y)

    def step(where):
        trainer.backward(where(forward))
        trainer.step(4)

    def in_a_thread_that_ends(run):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    with ThreadPoolExecutor(1) as pool, watch(net, trainer, every=1, keep=1):
        assert grown_over(10, lambda: step(lambda run: pool.submit(run).result())) == {}
        assert grown_over(10, lambda: step(in_a_thread_that_ends)) == {}


@pytest.mark.slow
def test_a_net_that_is_gone_leaves_no_op_hook_behind():
    (x, y) = batch()

    def run():
        net = three()
        trainer = gluon_run(net)
        net.register_op_hook(lambda *_: None)
        gluon_step(net, trainer, x, y)
        del net, trainer
        gc.collect()

    assert grown_over(10, run) == {}


def test_what_was_recorded_while_watched_has_its_gradients_after_close():
    """Its backward calls the function that MXNet was given then."""
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    gluon_step(net, trainer, x, y)
    gradients = []
    for every in (None, 1):
        watched = watch(net, trainer, every=every) if every else None
        with mx.autograd.record():
            loss = LOSS(net(x), y)
        if watched is not None:
            watched.close()
            del watched
            gc.collect()
        trainer.backward(loss)
        gradients.append({name: p.grad().asnumpy().tobytes() for name, p in net.collect_params().items()})
    assert gradients[0] == gradients[1]


def test_nothing_stays_on_a_module_after_close_in_the_middle_of_a_step():
    net, (x, y) = three(), batch()
    module = module_of(net, x, y)
    executors = list(module._exec_group.execs)
    watched = watch(module)
    module.forward_backward(mx.io.DataBatch([x], [y]))
    out = module.get_outputs()[0].asnumpy()
    watched.close()
    assert all(a is b for a, b in zip(module._exec_group.execs, executors))
    np.testing.assert_array_equal(module.get_outputs()[0].asnumpy(), out)
    assert module.core.step.observers == []
    module.update()
    assert watched.snapshots == type(watched.snapshots)([])


def masked(kind):
    data = mx.sym.var("data")
    if kind == "dropout":
        x = mx.sym.Dropout(mx.sym.FullyConnected(data, num_hidden=16, name="fc"), p=0.5)
    else:  # the states of its executor; another one's backward would crash
        zeros = {name: mx.sym.zeros((1, 8, 4)) for name in ("state", "state_cell")}
        weights = mx.sym.var("rnn_weight", shape=(112,))
        x = mx.sym.reshape(data, shape=(5, -1, 1))
        x = mx.sym.RNN(x, weights, **zeros, state_size=4, num_layers=1, mode="lstm", name="rnn")
        x = mx.sym.reshape(mx.sym.slice_axis(x, axis=0, begin=4, end=5), shape=(-1, 4))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=3, name="head"), name="softmax")


AT_ONCE = {
    "watch": lambda module, batch: watch(module),
    "close": lambda module, batch: [each.close() for each in module.core.step.observers],
    "blame": lambda module, batch: blame(module, mx.io.DataBatch([batch.data[0] * 2], batch.label)),
    "audit": lambda module, batch: audit(module, None, batch),
}


# After blame, dropout draws another mask.
CASES = [(kind, tool) for kind in ("dropout", "rnn") for tool in AT_ONCE if (kind, tool) != ("dropout", "blame")]


@pytest.mark.parametrize(("kind", "tool"), CASES)
def test_a_tool_between_forward_and_backward_of_a_module_changes_nothing(kind, tool):
    found = []
    for called in (False, True):
        mx.random.seed(1)
        module = mxmp.Module(masked(kind), policy="bfloat16", loss_scale=8.0)
        module.bind([("data", (8, 5))], [("softmax_label", (8,))], inputs_need_grad=True)
        module.init_params(mx.init.Uniform(0.5))
        module.init_optimizer()
        data = mx.io.DataBatch([mx.nd.random.normal(shape=(8, 5))], [mx.nd.arange(8) % 3])
        if tool == "close":
            watch(module)
        module.forward(data, is_train=True)
        if called:
            AT_ONCE[tool](module, data)
        outputs = module.get_outputs()[0].asnumpy()
        module.backward()
        gradients = [arrays[0].asnumpy() for arrays in module._exec_group.grad_arrays]
        found.append([outputs, module.get_input_grads()[0].asnumpy(), *gradients])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


def test_a_monitor_and_a_watch_of_one_module_are_refused():
    net, (x, y) = three(), batch()
    module, data = module_of(net, x, y), mx.io.DataBatch([x], [y])
    with watch(module), pytest.raises(RuntimeError, match=r"close\(\) watch and guard first"):
        module.install_monitor(mx.mon.Monitor(1))
    module.install_monitor(mx.mon.Monitor(1))
    for tool in (watch, guard, lambda module: blame(module, data)):
        with pytest.raises(ValueError, match=r"has a mx.mon.Monitor"):
            tool(module)


def test_a_block_with_an_op_hook_leaves_no_listener_on_the_others():
    net = three()
    trainer = gluon_run(net)
    last = list(net._children.values())[-1]
    last.register_op_hook(lambda *_: None)
    for listen in (watch, mxmp.guard):
        with pytest.raises(ValueError, match=r"has an op hook"):
            listen(net, trainer)
        assert [block for block in [net, *net._children.values()] if block._callback] == [last]
