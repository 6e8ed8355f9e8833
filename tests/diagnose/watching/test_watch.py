"""Watching: what is seen is what trained, training does not notice, and nothing stays."""

from __future__ import annotations

import copy
import gc
import pickle
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
    module_step,
    three,
    values,
)
from kit.twins import LOSS, MASTERS, assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import guard, watch
from mxmp.precision.monitoring import Listeners

IMAGE = (4, 3, 6, 6)
FLAGS = [{}, {"static_alloc": True, "static_shape": True}]


def tensors(snapshot, kind):
    return {t.name: t for t in snapshot.tensors if t.kind == kind}


def state(params):
    return {name: value.asnumpy().tobytes() for name, value in params.items()}


def trained_by_gluon(watched, flags, policy="float16", devices=1):
    mx.random.seed(11)
    net = convolutional()
    contexts = [mx.cpu(i) for i in range(devices)]
    net.collect_params().reset_ctx(contexts)
    trainer = gluon_run(net, policy=policy)
    net.hybridize(**flags)
    watcher = watch(net, trainer, every=2) if watched else None
    for step in range(5):
        with mx.autograd.record():
            pairs = [batch(step * 2 + i, IMAGE, ctx=ctx) for i, ctx in enumerate(contexts)]
            losses = [mx.nd.mean((net(x) - y) ** 2, axis=1) for x, y in pairs]
        trainer.backward(losses)
        trainer.step(4)
        if step == 2:
            net(pairs[0][0])  # inference between two steps is not told of
    found = {f"{n} {c}": p.data(c) for n, p in net.collect_params().items() for c in contexts}
    draws = {f"draw {c}": mx.nd.random.uniform(shape=(4,), ctx=c) for c in contexts}
    if watcher is not None:
        assert [s.step for s in watcher.snapshots] == [1, 2, 4]
        watcher.close()
    return state({**found, **draws})


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "static"])
def test_gluon_weights_statistics_and_random_numbers_are_those_of_a_run_that_nobody_watched(flags):
    assert trained_by_gluon(True, flags) == trained_by_gluon(False, flags)


def test_so_with_masters_in_bfloat16_and_on_two_devices():
    assert trained_by_gluon(True, {}, MASTERS) == trained_by_gluon(False, {}, MASTERS)
    assert trained_by_gluon(True, {}, "bfloat16") == trained_by_gluon(False, {}, "bfloat16")
    assert trained_by_gluon(True, {}, devices=2) == trained_by_gluon(False, {}, devices=2)


def trained_by_module(watched):
    mx.random.seed(11)
    net = convolutional()
    module = module_of(net, *batch(0, IMAGE))
    watcher = watch(module, every=2) if watched else None
    outputs = []
    for step in range(5):
        module_step(module, *batch(step, IMAGE))
        outputs.append(module.get_outputs()[0].asnumpy().tobytes())  # after update, as fit reads them
    args, aux = module.get_params()
    found = {**state({**args, **aux, "draw": mx.nd.random.uniform(shape=(4,))}), "outputs": outputs}
    if watcher is not None:
        assert [s.step for s in watcher.snapshots] == [1, 2, 4]
        watcher.close()
    return found


def test_module_weights_statistics_outputs_and_random_numbers_are_those_of_a_run_that_nobody_watched():
    assert trained_by_module(True) == trained_by_module(False)


def test_a_batch_of_another_size_is_not_watched_and_the_next_one_is():
    net = three()
    module = module_of(net, *batch())
    with watch(module, every=2) as watched:
        for shape in ((4, 6), (2, 6), (4, 6), (4, 6)):
            x, y = batch(0, shape)
            module.reshape([("data", x.shape)], [("label", y.shape)])
            module_step(module, x, y)
    assert watched.snapshots[0].step == 1
    assert watched.snapshots[-1].step == 4
    assert {"first_fwd", "middle_fwd", "last_fwd"} <= set(tensors(watched.latest, "activation"))


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


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_underflow_is_shown_where_the_network_was_built_to_underflow(door):
    net, (x, y) = three(middle=2.0**-14, last=2.0**-12), batch()
    run = Run(door, net, on=(x, y), loss_scale=1.0, factor=1.0 if door == "gluon" else 4.0)
    with watch(*run.target) as watched:
        run.step()
    lost = {t.name for t in watched.latest.gradients if t.histogram.underflow() > 0.5}
    assert lost == {"middle_fwd -> first_fwd"}
    assert watched.latest.headroom > 10
    text = str(watched)
    assert "middle_fwd -> first_fwd" in text
    assert "the scale could go up by 2**" in text


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


def test_inference_between_two_steps_is_not_counted():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    with watch(net, trainer, every=1) as watched:
        gluon_step(net, trainer, x, y)
        net(x)
        with mx.autograd.record(train_mode=False):
            net(x)
        gluon_step(net, trainer, x, y)
    assert len(watched.snapshots) == 2
    assert tensors(watched.latest, "activation")["first_fwd"].histogram.size == 4 * 8


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


def test_the_headroom_is_what_the_scale_can_bear():
    for more, skipped in ((0, False), (1, True)):
        net, (x, y) = three(), batch()
        trainer = gluon_run(net, loss_scale=4.0)
        with watch(net, trainer) as watched:
            gluon_step(net, trainer, x, y)
        room = watched.latest.headroom
        assert room > 3
        net = three()
        trainer = gluon_run(net, loss_scale=4.0 * 2.0 ** (room + more))
        gluon_step(net, trainer, x, y)
        assert trainer.last_step_skipped == skipped


def test_a_skipped_step_is_called_so_and_names_the_tensor():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net, loss_scale=2.0**20)
    with watch(net, trainer) as watched:
        gluon_step(net, trainer, x, y)
    assert watched.latest.skipped
    assert tensors(watched.latest, "update") == {}
    assert watched.latest.headroom < 0
    assert "the scale is too high" in str(watched) or "overflow: " in str(watched)


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


def test_a_copy_of_a_watched_trainer_is_not_watched():
    net = three()
    trainer = gluon_run(net)
    trainer.scaled_step  # noqa: B018
    with watch(net, trainer):
        twin = copy.deepcopy(trainer.scaled_step)
    assert twin.observers == []


@pytest.mark.parametrize("steps", [0, 1, 2], ids="after {} FP32 steps".format)
def test_a_net_that_was_restored_is_watched_again_when_it_is_converted_again(steps):
    net = three()
    trainer = gluon_run(net)
    with watch(net, trainer, every=2) as watched:
        gluon_step(net, trainer, *batch())
        mxmp.restore(net)
        for _ in range(steps):
            gluon_step(net, trainer, *batch())
        mxmp.convert(net, "bfloat16")
        for _ in range(5):
            gluon_step(net, trainer, *batch())
    assert [each.compute for each in watched.snapshots] == ["float16"] + ["bfloat16"] * (len(watched.snapshots) - 1)
    assert watched.latest.step >= steps + 5
    assert {"first_fwd", "middle_fwd", "last_fwd"} <= set(tensors(watched.latest, "activation"))


def test_a_net_that_is_restored_between_backward_and_step_does_not_end_the_training():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    with watch(net, trainer) as watched:
        with mx.autograd.record():
            loss = LOSS(net(x), y)
        trainer.backward(loss)
        mxmp.restore(net)
        trainer.step(4)
    assert (watched.latest.step, watched.latest.compute) == (1, "float16")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_of_a_watched_net_is_not_watched(copied):
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    with watch(net, trainer, every=1) as watched:
        gluon_step(net, trainer, x, y)
        teacher = copied(net)
        with mx.autograd.record():
            loss = LOSS(net(x), y) + LOSS(teacher(x), y)
        trainer.backward(loss)
        trainer.step(4)
    alone, beside = (tensors(each, "activation")["first_fwd"].histogram.counted for each in watched.snapshots)
    assert alone == beside


def test_an_error_in_the_callback_reaches_the_step_and_a_full_memory_drops_the_oldest():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    with watch(net, trainer, every=1, keep=2) as watched:
        for _ in range(4):
            gluon_step(net, trainer, x, y)
    assert [s.step for s in watched.snapshots] == [3, 4]
    with watch(net, trainer, callback=lambda snapshot: 1 // 0), pytest.raises(ZeroDivisionError):
        gluon_step(net, trainer, x, y)


def test_a_callback_can_write_what_tensorboard_shows():
    """As in docs/looking-inside.md: a writer's histogram of the exponents, each as often as it was counted."""
    net, (x, y) = three(), batch()
    trainer, written = gluon_run(net), {}

    def log(snapshot):
        for tensor in snapshot.tensors:
            exponents = np.repeat(tensor.histogram.exponents(), tensor.histogram.counts)
            written[snapshot.step, tensor.kind, tensor.name] = np.histogram(exponents, range(-149, 129))

    with watch(net, trainer, every=3, callback=log) as watched:
        for _ in range(4):
            gluon_step(net, trainer, x, y)
    assert {step for step, *_ in written} == {1, 3}
    for tensor in watched.latest.tensors:
        counts, _ = written[3, tensor.kind, tensor.name]
        np.testing.assert_array_equal(counts, tensor.histogram.counts)


def test_errors_say_what_was_expected():
    net = three()
    with pytest.raises(ValueError, match=r"not converted: call mxmp\.convert\(net\) first"):
        watch(net, mxmp.Trainer(net.collect_params(), "sgd"))
    trainer = gluon_run(net)
    with pytest.raises(TypeError, match=r"pass the net's mxmp\.Trainer too: the net comes first"):
        watch(net)
    with pytest.raises(ValueError, match="every must be a positive integer, got 0"):
        watch(net, trainer, every=0)
    with pytest.raises(TypeError, match="expected a converted gluon Block"):
        watch("net", trainer)
    with pytest.raises(ValueError, match="no step was watched yet"):
        watch(net, trainer).latest  # noqa: B018
    net.register_op_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"has an op hook"):
        watch(net, trainer)
    with pytest.raises(ValueError, match="no optimizer yet"):
        watch(mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), label_names=None))


def test_a_callback_may_close_the_watch():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    taken = []

    def once(snapshot):
        taken.append(snapshot)
        watched.close()

    watched = watch(net, trainer, every=1, callback=once)
    for _ in range(4):
        with mx.autograd.record():
            loss = LOSS(net(x), y)
        trainer.backward(loss)
        trainer.step(1)
    assert len(taken) == 1
    assert net._callback is None


def test_a_block_with_an_op_hook_leaves_no_listener_on_the_others():
    net = three()
    trainer = gluon_run(net)
    last = list(net._children.values())[-1]
    last.register_op_hook(lambda *_: None)
    for listen in (watch, mxmp.guard):
        with pytest.raises(ValueError, match=r"has an op hook"):
            listen(net, trainer)
        assert [block for block in [net, *net._children.values()] if block._callback] == [last]


def test_after_unscale_all_gradients_are_those_of_the_scaled_loss():
    """``unscale`` divides the gradients of parameters, and not those between operators."""

    def snapshot(unscales):
        net, (x, y) = three(), batch()
        trainer = gluon_run(net, loss_scale=1024.0)
        with watch(net, trainer, every=1) as watched:
            with mx.autograd.record():
                loss = LOSS(net(x), y)
            trainer.backward(loss)
            if unscales:
                trainer.unscale()
            trainer.step(4)
        return watched.latest

    mx.random.seed(5)
    np.random.seed(5)
    scaled = snapshot(False)
    mx.random.seed(5)
    np.random.seed(5)
    unscaled = snapshot(True)
    assert unscaled.loss_scale == scaled.loss_scale == 1024
    for kind in ("gradient", "parameter gradient"):
        wanted, found = tensors(scaled, kind), tensors(unscaled, kind)
        assert wanted.keys() == found.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name].histogram.counts, wanted[name].histogram.counts)
    assert unscaled.underflow_unscaled == scaled.underflow_unscaled


def test_an_inference_of_a_module_between_two_steps_is_not_part_of_the_next_snapshot():
    x, y = batch()
    module = module_of(three(), x, y)
    with watch(module, every=1) as watched:
        module_step(module, x, y)
        module.forward(mx.io.DataBatch([x * 100], [y]), is_train=False)
        module_step(module, x, y)
    before, after = watched.snapshots
    for kind in ("activation", "gradient"):
        counted = [{name: t.histogram.counted for name, t in tensors(each, kind).items()} for each in (before, after)]
        assert counted[0] == counted[1]
        assert counted[0]


def vanishing():
    """Seven sigmoids: each makes the gradient several times smaller, until float16 has none of it."""
    layers = [(f"layer{i}", nn.Dense(8, "sigmoid", in_units=8, prefix=f"layer{i}_")) for i in range(7)]
    return values(Chain(("in", nn.Dense(8, in_units=6, prefix="in_")), *layers, dense("last", 4, 8)))


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_watch_leads_with_the_parameters_that_get_no_gradient(door):
    def watched(factor):
        net, (x, y) = vanishing(), batch()
        run = Run(door, net, on=(x, y), loss_scale=1.0, factor=factor)
        net(x)
        with watch(*run.target) as found:
            run.step()
        return found.latest

    snapshot = watched(1e-4)
    gradients = tensors(snapshot, "parameter gradient")
    dead = [name for name, t in gradients.items() if t.histogram.zeros == t.histogram.counted]
    assert 5 < len(dead) < len(gradients)
    assert sorted(snapshot.without_gradient) == sorted(dead)
    last = max(int(name[5]) for name in dead if name.startswith("layer"))
    lines = str(snapshot).splitlines()
    assert lines[1].split("; ") == [
        f"  {len(dead)} of {len(gradients)} parameters get no gradient, all of it is 0",
        f"first, from the loss on, at layer{last}_fwd",
    ]
    assert all(gradients[name].lost == 1 for name in dead)  # by what was rounded before
    counted = sum(t.histogram.counted for t in snapshot.gradients)
    of_dead = sum(gradients[name].histogram.counted for name in dead)
    assert of_dead / counted < snapshot.underflow <= 1
    assert "nan" not in str(snapshot)
    assert "get no gradient" not in str(watched(1e4))
    assert watched(1e4).underflow < 0.01


@pytest.mark.parametrize("door", ["gluon", "module"])
def test_zeros_that_no_rounding_made_are_not_lost(door):
    """Relu's zeros, and a layer behind a relu that lets nothing through."""
    relu = ("relu", lambda ops, x: ops.relu(x, name="relu"))
    down = ("down", lambda ops, x: ops.broadcast_sub(x, ops.ones((1, 1)) * 1e3, name="down"))
    net = values(Chain(dense("first", 8, 6), down, relu, dense("last", 4, 8)))
    x, y = batch()
    run = Run(door, net, on=(x, y))
    with watch(*run.target) as watched:
        run.step()
    snapshot = watched.latest
    assert "first_weight" in snapshot.without_gradient
    assert snapshot.underflow == 0
    assert all(t.lost == 0 for t in snapshot.tensors)


@pytest.mark.parametrize(("factor", "scale"), [(1e-6, 2.0**-4), (1e-5, 1.0), (1e-3, 1.0)])
def test_a_gradient_of_the_loss_that_rounds_to_zero_is_counted(factor, scale):
    def net_of():
        mx.random.seed(0)
        net = nn.HybridSequential(prefix="w_")
        with net.name_scope():
            net.add(nn.Dense(32, in_units=16, activation="relu"), nn.Dense(4, in_units=32))
        net.initialize(mx.init.Xavier())
        return net

    x, y = mx.nd.random.normal(shape=(64, 16)), mx.nd.arange(64) % 4
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    out = net_of()(x)
    out.attach_grad()
    with autograd.record():
        loss = (loss_fn(out, y) * factor).mean()
    loss.backward()
    sent = out.grad.asnumpy() * scale
    lost = ((sent.astype(np.float16) == 0) & (sent != 0)).mean()
    net = mxmp.convert(net_of(), "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scale)
    with watch(net, trainer, every=1) as watched:
        with autograd.record():
            loss = (loss_fn(net(x), y) * factor).mean()
        trainer.backward(loss)
        trainer.step(1)
    (found,) = (each for each in watched.latest.of("gradient") if each.name.startswith("the loss"))
    assert found.histogram.underflow() == pytest.approx(lost, abs=0.05)
    assert watched.latest.underflow >= 0.3 * lost
    assert np.isfinite(watched.latest.headroom)
