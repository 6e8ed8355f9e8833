"""BatchNorm's running statistics never stay non-finite."""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
import pytest
from kit.nets import contexts
from mxnet import autograd
from mxnet.gluon import nn

import mxmp
from mxmp.step.gradients import FiniteSums, Gradient, fetch, square_sums
from mxmp.step.statistics import RunningStatistics


def net_with_norm(policy=None, devices=1, deferred=False, norm=nn.BatchNorm):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=0 if deferred else 3), norm(in_channels=0 if deferred else 4), nn.Dense(2))
    net.initialize(ctx=contexts(devices))
    if policy:
        mxmp.convert(net, policy)
    return net


def running(net):
    return {
        f"{name}:{a.ctx}": a.asnumpy() for name, p in net.collect_params(".*running.*").items() for a in p.list_data()
    }


def step(net, trainer, values, devices=1):
    with autograd.record():
        losses = [net(mx.nd.array(values, ctx=ctx)).sum() for ctx in contexts(devices)]
    trainer.backward(losses)
    trainer.step(4)


CLEAN = np.random.RandomState(0).randn(4, 3)
SPOILED = np.where(np.arange(12).reshape(4, 3) == 5, np.inf, CLEAN)


@pytest.mark.parametrize("policy", [None, "float16", "compute=float16,norm=compute", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("hybridize", [{}, {"static_alloc": True, "static_shape": True}])
def test_they_return_to_their_last_finite_value_after_an_overflow(policy, devices, hybridize):
    net = net_with_norm(policy, devices)
    net.hybridize(**hybridize)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=2.0**4)
    for _ in range(3):
        step(net, trainer, CLEAN, devices)
    before = running(net)
    step(net, trainer, SPOILED, devices)
    assert trainer.last_step_skipped
    after = running(net)
    assert all(np.isfinite(v).all() for v in after.values())
    for name, value in after.items():
        moved = value != before[name]
        assert not moved.any() or np.isfinite(value[moved]).all()
    for _ in range(5):
        step(net, trainer, CLEAN, devices)
    assert not trainer.last_step_skipped
    assert np.isfinite(net(mx.nd.array(CLEAN)).asnumpy()).all()


@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("deferred", [False, True])
def test_an_overflow_in_the_very_first_step_leaves_finite_statistics(policy, deferred):
    net = net_with_norm(policy, deferred=deferred)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=2.0**4)
    step(net, trainer, SPOILED)
    assert trainer.last_step_skipped
    assert all(np.isfinite(v).all() for v in running(net).values())


def test_without_our_trainer_they_would_stay_nan():
    """The reason for all this; when MXNet mends it, this fails and the module can go."""
    net = net_with_norm()
    with autograd.record():
        loss = net(mx.nd.array(SPOILED)).sum()
    loss.backward()
    assert not all(np.isfinite(v).all() for v in running(net).values())


@pytest.mark.parametrize("how", ["a trainer of the weights alone", "scale_loss"])
def test_an_overflow_is_caught_too_by(how):
    net = net_with_norm("float16")
    net(mx.nd.array(CLEAN))
    names = ".*weight|.*bias" if how != "scale_loss" else ".*"
    trainer = mxmp.Trainer(net.collect_params(names), "sgd", loss_scale=2.0**4)
    step(net, trainer, CLEAN)
    if how == "scale_loss":
        with autograd.record():
            loss = net(mx.nd.array(SPOILED)).sum()
            with trainer.scale_loss(loss) as scaled:
                autograd.backward(scaled)
        trainer.step(4)
    else:
        step(net, trainer, SPOILED)
    assert trainer.last_step_skipped
    assert all(np.isfinite(v).all() for v in running(net).values())


@pytest.mark.parametrize("deferred", [False, True])
def test_a_plain_backward_at_a_scale_of_1_keeps_the_statistics_too(deferred):
    net = net_with_norm("bfloat16", deferred=deferred)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=None)
    for values in (CLEAN, CLEAN, SPOILED):
        before = running(net) if values is SPOILED else None
        with autograd.record():
            loss = net(mx.nd.array(values)).sum()
        loss.backward()
        trainer.step(4)
    assert trainer.last_step_skipped
    for name, value in running(net).items():
        assert np.isfinite(value).all()
        spoiled = ~np.isclose(value, before[name])
        assert not spoiled.all()


def watched(mean, var):
    arrays = [mx.nd.array(mean), mx.nd.array(var)]
    items = [Gradient("running_mean", arrays[0]), Gradient("running_var", arrays[1])]
    return arrays, items, RunningStatistics().watch(items)


def end_step(statistics, how):
    statistics.sums(after=square_sums([]))
    getattr(statistics, how)()


@pytest.mark.parametrize(
    ("start", "written", "after"),
    [
        (([1, 2], [3, 4]), ([5, math.nan], [math.inf, 6]), ([5, 2], [3, 6])),
        (([math.nan, 2], [math.inf, 4]), None, ([0, 2], [1, 4])),
    ],
    ids=["non-finite elements only", "BatchNorm's initial values where none was ever finite"],
)
def test_restore_replaces(start, written, after):
    arrays, _, statistics = watched(*start)
    for array, values in zip(arrays, written or ()):
        array[:] = mx.nd.array(values)
    end_step(statistics, "restore")
    assert tuple(array.asnumpy().tolist() for array in arrays) == after


def test_more_statistics_than_one_kernel_takes_are_kept_each_by_itself():
    arrays = [mx.nd.full(1 + i % 3, i) for i in range(130)]
    statistics = RunningStatistics().watch([Gradient("running_mean", array) for array in arrays])
    done = square_sums([Gradient("", mx.nd.array([math.inf]))])
    for array in arrays:
        array[:] = array + 1000
    assert np.isfinite(fetch(statistics.sums(after=done))[0]).tolist() == [True]
    statistics.keep()
    arrays[77][:] = math.nan
    assert np.isfinite(fetch(statistics.sums(after=done))[0]).tolist() == [False]
    statistics.restore()
    assert [array.asnumpy().tolist() for array in arrays] == [[1000.0 + i] * (1 + i % 3) for i in range(130)]


@pytest.mark.parametrize("number", [59, 60, 61, 200])
def test_statistics_are_kept_behind_any_number_of_large_gradients(number):
    """Each of these is checked by an operator of its own: ResNet-101 has 93 of them."""
    (mean, var), _, statistics = watched([1, 2], [3, 4])
    done = FiniteSums([Gradient("", mx.nd.ones(1 << 16)) for _ in range(number)])()
    mean[:] = 7
    assert fetch(statistics.sums(after=done))[0].tolist() == [2 * 49 + 9 + 16]
    statistics.keep()
    mean[:] = math.nan
    assert not np.isfinite(fetch(statistics.sums(after=done))[0]).all()
    statistics.restore()
    assert mean.asnumpy().tolist() == [7, 7]
    assert var.asnumpy().tolist() == [3, 4]


@pytest.mark.parametrize("more", [[], [Gradient("other_mean", mx.nd.ones(1))]], ids=["alone", "beside other arrays"])
def test_keep_remembers_what_sums_saw_and_not_what_came_later(more):
    (mean, var), items, statistics = watched([1, 2], [3, 4])
    mean[:] = mx.nd.array([7, 8])
    end_step(statistics, "keep")
    mean[:] = math.nan
    if more:
        statistics.watch([*items, *more])
    end_step(statistics, "restore")
    assert mean.asnumpy().tolist() == [7, 8]
    assert var.asnumpy().tolist() == [3, 4]


def test_other_arrays_are_noticed():
    (mean, var), items, statistics = watched([1], [2])
    for other in (items[:1], [items[0], Gradient("var", var.copy())]):
        assert statistics.watch(other) is statistics
        mean[:] = math.nan
        end_step(statistics, "restore")
        assert mean.asscalar() == 1


def test_nothing_is_copied_again_where_some_of_what_is_watched_did_not_run(monkeypatch):
    (mean, _), items, statistics = watched([1], [2])
    end_step(statistics, "keep")
    monkeypatch.setattr("mxmp.step.statistics._finite_copies", None)
    for some in (items[:1], items, items[1:], []):
        statistics.watch(some)
    mean[:] = math.nan
    statistics.restore()
    assert mean.asscalar() == 1


def set_statistics(net):
    net[1].running_mean.set_data(mx.nd.full(4, 5))
    net[1].running_var.set_data(mx.nd.full(4, 3))


@pytest.mark.parametrize("policy", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("steps", [[], [SPOILED]], ids=["before the first step", "after a skipped one"])
def test_an_overflow_leaves_the_values_that_a_user_has_loaded(policy, steps):
    net = net_with_norm(policy)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=mxmp.DynamicLossScaler(64.0))
    for values in steps:
        step(net, trainer, values)
    set_statistics(net)
    step(net, trainer, np.full((4, 3), np.inf))
    assert trainer.last_step_skipped
    mean, var = (p.data().asnumpy().tolist() for p in (net[1].running_mean, net[1].running_var))
    assert (mean, var) == ([5] * 4, [3] * 4)
