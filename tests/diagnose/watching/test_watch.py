"""Watching: what is seen is what trained, training does not notice, and nothing stays."""

from __future__ import annotations

import copy
import pickle

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import (
    batch,
    convolutional,
    gluon_run,
    gluon_step,
    module_of,
    module_step,
    tensors,
    three,
)
from kit.twins import LOSS, MASTERS

import mxmp
from mxmp.diagnose import watch

IMAGE = (4, 3, 6, 6)
FLAGS = [{}, {"static_alloc": True, "static_shape": True}]


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
