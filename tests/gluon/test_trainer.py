"""The Trainer: legal orders, true gradients, accumulation, several trainers and losses, refusals."""

from __future__ import annotations

import gc
import math

import mxnet as mx
import numpy as np
import pytest
from kit.nets import CASTS, batch, contexts, forward, overflow, train, two_layers
from kit.pictures import full_weights, picture, weights
from kit.twins import MASTERS
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.optimizers import options

import mxmp
from mxmp.diagnose.networks.of_gluon.training import TrainedNet

SCALE = 2.0**10


def sgd(net, loss_scale=SCALE, **kwargs):
    return mxmp.Trainer(net.collect_params(), "sgd", options("sgd"), loss_scale=loss_scale, **kwargs)


def plain(net):
    return gluon.Trainer(net.collect_params(), "sgd", options("sgd"), update_on_kvstore=False)


# -- the scale --------------------------------------------------------------------------------------


def test_a_backward_makes_one_head_gradient_for_each_loss(monkeypatch):
    """Each is two operators, and on a GPU two launches."""
    net, made, ones_like = two_layers(), [], mx.nd.ones_like
    monkeypatch.setattr(mx.nd, "ones_like", lambda array: made.append(array) or ones_like(array))
    losses = forward(net, 0) + forward(net, 1)
    del made[:]
    sgd(net).backward(losses)
    assert len(made) == len(losses)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, mxmp.DynamicLossScaler),
        ("float16", mxmp.DynamicLossScaler),
        ("bfloat16", mxmp.NoLossScaler),
    ],
)
def test_the_default_scale_follows_the_range_of_the_net(policy, expected):
    assert type(mxmp.Trainer(two_layers(policy).collect_params(), "sgd").scaler) is expected


def test_a_net_converted_after_the_trainer_was_made_decides_the_default_too():
    net = two_layers()
    trainer = mxmp.Trainer(net.collect_params(), "sgd")
    mxmp.convert(net, "bfloat16")
    train(net, trainer, range(1))
    assert type(trainer.scaler) is mxmp.NoLossScaler


def test_what_is_no_loss_is_refused():
    with pytest.raises(TypeError, match="loss must be an NDArray"):
        sgd(two_layers()).backward(3.0)


# -- one transfer -----------------------------------------------------------------------------------


@pytest.fixture
def syncs(monkeypatch):
    """What waits for a device, counted: everything in MXNet's Python that does goes through these."""
    gc.collect()  # while a custom operator of another test lives, each backward waits
    mx.nd.waitall()
    calls = []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("asnumpy", "wait_to_read"):
        count(mx.nd.NDArray, name)
    count(mx.nd, "waitall")
    return calls


def with_norm(policy, devices, bias):
    net = nn.HybridSequential()
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(2))
    net.initialize(ctx=contexts(devices))
    return mxmp.convert(net) if policy else net


@pytest.mark.parametrize("make", [two_layers, with_norm])
@pytest.mark.parametrize("policy", [None, CASTS, MASTERS, "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_clean_step_waits_for_the_device_exactly_once(syncs, policy, devices, make):
    net = make(policy, devices, bias=True)
    trainer = mxmp.Trainer(net.collect_params(), "adam", loss_scale=2.0**4)
    train(net, trainer, range(2), devices)
    losses = forward(net, 2, devices)
    syncs.clear()
    trainer.backward(losses)
    assert syncs == []
    trainer.step(4)
    assert syncs == ["asnumpy"]


def test_only_an_overflow_waits_a_second_time(syncs):
    net = two_layers()
    trainer = sgd(net)
    trainer.backward(forward(net, 0))
    overflow(trainer)
    syncs.clear()
    trainer.step(4)
    assert syncs == ["asnumpy", "asnumpy"]


# -- legal and illegal orders -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "update", "unscale", "clip_global_norm"])
@pytest.mark.parametrize("state", ["fresh", "after a plain loss.backward()", "after a step"])
def test_what_needs_a_scaled_backward_says_so(call, state):
    net = two_layers()
    trainer = sgd(net)
    if state == "after a plain loss.backward()":
        autograd.backward(forward(net, 0))
    if state == "after a step":
        train(net, trainer, [0])
    before = picture(trainer)
    with pytest.raises(RuntimeError, match=rf"{call}\(\) before a scaled backward.*trainer\.backward\(loss\)"):
        getattr(trainer, call)(*([] if call == "unscale" else [1]))
    assert picture(trainer) == before


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("request_", "call", "saying"),
    [("add", "allreduce_grads", "update first"), ("write", "clip_global_norm", "step first")],
)
def test_a_plain_backward_that_would_mix_with_reduced_or_clipped_gradients_is_an_error(request_, call, saying, devices):
    net = two_layers(devices=devices, grad_req=request_)
    trainer = sgd(net, loss_scale=1.0)
    mx.autograd.backward(forward(net, 0, devices))
    getattr(trainer, call)(*([0.1] if call == "clip_global_norm" else []))
    mx.autograd.backward(forward(net, 1, devices))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=saying):
            trainer.step(4)


class OwnStore(mx.kv.KVStoreBase):
    """A kvstore of the user's, that sums in its own way; MXNet can make none of its type."""

    type = "own"
    sums = 0

    def broadcast(self, key, value, out, priority=0):
        for each in out if isinstance(out, (list, tuple)) else [out]:
            each[:] = value

    def pushpull(self, key, value, out=None, priority=0):
        total = sum(each.as_in_context(value[0].ctx) for each in value)
        OwnStore.sums += 1
        for each in out or value:
            each[:] = total.as_in_context(each.ctx)

    @staticmethod
    def is_capable(capability):
        return False


def test_a_users_own_kvstore_sums_on_after_an_operator_was_moved():
    net = two_layers("params=float16", devices=2)
    store = OwnStore()
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=False)
    train(net, trainer, [0], 2)
    trained = TrainedNet(net, trainer)
    trained.exclude([net[0].name + "_fwd"])
    before = OwnStore.sums
    train(net, trainer, [1], 2)
    assert OwnStore.sums > before
    assert trainer._kvstore is store
    for param in net.collect_params().values():
        np.testing.assert_array_equal(*(array.asnumpy() for array in param.list_data()))


# -- true gradients: unscale, clip, split -----------------------------------------------------------


def test_gradients_that_are_all_zero_are_a_clean_step():
    net = two_layers()
    trainer = sgd(net, mxmp.DynamicLossScaler(128, growth_interval=1))
    with autograd.record():
        loss = net(batch(0)[0]) * 0
    trainer.backward(loss)
    trainer.step(4)
    assert not trainer.last_step_skipped
    assert trainer.loss_scale == 256


def test_gradients_that_only_the_scale_saves_from_zero_are_learned():
    """Of a loss times 1e-7, of which float16 without a scale keeps the largest, to one bit."""
    learned = []
    for policy, scale in ((None, 1.0), ("float16", 2.0**16), ("float16", 1.0)):
        net = two_layers(policy)
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e6}, loss_scale=scale)
        before = net[1].weight.data().asnumpy()
        with autograd.record():
            loss = forward(net, 0)[0] * 1e-7
        trainer.backward(loss)
        trainer.step(4)
        learned.append(net[1].weight.data().asnumpy() - before)
    full, saved, lost = learned
    np.testing.assert_allclose(saved, full, rtol=0, atol=0.02 * abs(full).max())
    assert abs(lost - full).max() > 0.3 * abs(full).max()


@pytest.mark.parametrize(("request_", "scale"), [("write", 1.0), ("add", 8.0)])
def test_backwards_without_a_step_leave_no_more_in_the_ledger_than_one(request_, scale):
    net = two_layers(grad_req=request_)
    trainer = sgd(net, loss_scale=scale)

    def run():
        if scale == 1.0:
            mx.autograd.backward(forward(net, 0))
            trainer.allreduce_grads()
        else:
            trainer.backward(forward(net, 0))
        return len(trainer.ledger.written)

    once = run()
    assert once > 0
    assert [run() for _ in range(3)] == [once] * 3


# -- which gradients --------------------------------------------------------------------------------


class TwoBranches(gluon.Block):
    """Only one branch runs, so the other's gradients go stale."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.left, self.right = nn.Dense(2, in_units=3), nn.Dense(2, in_units=3)

    def forward(self, x, left):
        return self.left(x) if left else self.right(x)


def test_a_stale_gradient_is_an_error_as_in_gluon():
    net = TwoBranches()
    net.initialize()
    trainer = sgd(net)
    with autograd.record():
        loss = net(batch(0)[0], True).sum()
    trainer.backward(loss)
    with pytest.raises(UserWarning, match="ignore_stale_grad=True"):
        trainer.step(4)


def test_what_a_device_holds_from_an_earlier_step_is_no_part_of_the_sum():
    """One device meets an overflow and does not run that branch again: the others must not skip for ever."""
    net = TwoBranches()
    net.initialize(ctx=contexts(2))
    trainer = sgd(net)
    for step in range(4):
        with autograd.record():
            losses = [net(batch(step, ctx)[0], step == 0 or k == 0).sum() for k, ctx in enumerate(contexts(2))]
        trainer.backward(losses)
        if step == 0:
            net.left.weight.list_grad()[1][:] = math.inf
        trainer.step(4, ignore_stale_grad=True)
        assert trainer.last_step_skipped == (step == 0)


class Embeds(gluon.HybridBlock):
    def __init__(self, sparse=False, rows=10):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(rows, 4, sparse_grad=sparse)
            self.out = nn.Dense(2, in_units=4, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.out(self.embedding(x))


@pytest.mark.parametrize("policy", [None, CASTS, MASTERS])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_row_sparse_gradients_stay_fp32_train_and_are_checked(policy, devices, name):
    found = []
    for sparse in (True, False):
        mx.random.seed(3)
        net = Embeds(sparse)
        net.initialize(ctx=contexts(devices))
        if policy:
            mxmp.convert(net, policy)
        more = {"learning_rate": 0.1, **({"lazy_update": False} if name == "adam" else {})}
        trainer = mxmp.Trainer(net.collect_params(), name, more, loss_scale=2.0**6)
        for step in range(4):
            with autograd.record():
                losses = [net(mx.nd.array([1, 3, 3, step], ctx=ctx)).square().sum() for ctx in contexts(devices)]
            trainer.backward(losses)
            grad = net.embedding.weight.list_grad()[-1]
            assert grad.dtype == np.float32
            assert grad.stype == ("row_sparse" if sparse else "default")
            if step == 2:
                before = picture(trainer)
                net.embedding.weight.list_grad()[-1][:] = mx.nd.full(grad.shape, math.nan).tostype(grad.stype)
            trainer.step(4)
            assert trainer.last_step_skipped == (step == 2)
            if step == 2:
                assert picture(trainer) == before
                assert trainer.overflow_params[0].startswith(net.embedding.weight.name)
        found.append([p.data().asnumpy() for p in trainer._params])
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=2e-3 if policy else 1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [CASTS, MASTERS])
def test_4096_duplicates_in_an_embedding_do_not_saturate(policy):
    """Dense float16 embedding gradients would stop at 2,048."""
    net = Embeds(rows=5)
    net.initialize(mx.init.One())
    mxmp.convert(net, policy)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, loss_scale=1.0)
    x = mx.nd.full((4096,), 2)
    with autograd.record():
        loss = net(x).sum()
    trainer.backward(loss)
    assert net.embedding.weight.grad().dtype == np.float32
    assert net.embedding.weight.grad().asnumpy()[2].tolist() == [8192.0] * 4
    assert net.out.weight.grad().asnumpy().tolist() == [[4096.0] * 4] * 2


# -- several losses and trainers --------------------------------------------------------------------


def test_the_other_trainers_backward_is_not_mine():
    net = two_layers()
    first, second = sgd(net), sgd(net)
    first.backward(forward(net, 0))
    with pytest.raises(RuntimeError, match="before a scaled backward"):
        second.step(4)
    first.step(4)


def test_a_trainer_that_a_backward_does_not_reach_may_save_its_states(tmp_path):
    nets, scaler = [two_layers(CASTS) for _ in range(2)], mxmp.DynamicLossScaler(1024.0)
    trainers = [sgd(net, scaler) for net in nets]
    train(nets[0], trainers[0], [0])
    trainers[1].save_states(str(tmp_path / "states"))
    trainers[0].backward(forward(nets[1], 1))  # its own step has nothing to do
    for trainer in trainers:
        trainer.step(4, ignore_stale_grad=True)
    scaler.loss_scale = 8
    assert trainers[0].loss_scale == 8


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"update_on_kvstore": True}, "before they are checked"),
        ({"kvstore": "dist_async"}, "before any check"),
        ({"compression_params": {"type": "2bit"}}, "threshold"),
    ],
)
def test_what_would_break_the_promise_is_refused_with_the_reason(kwargs, reason):
    with pytest.raises(ValueError, match=reason):
        mxmp.Trainer(two_layers().collect_params(), "sgd", **kwargs)


# -- seams ------------------------------------------------------------------------------------------


def test_a_subclass_that_reduces_by_itself_is_called_once_a_step_and_its_result_is_checked():
    """What horovod.mxnet.DistributedTrainer does: override ``_allreduce_grads``, kvstore None."""

    class Reduces(mxmp.Trainer):
        calls = 0
        spoil = False

        def _allreduce_grads(self):
            type(self).calls += 1
            for param in self._params:
                for grad in param.list_grad():
                    grad *= 2
                    if self.spoil:
                        grad[:] = math.inf

    net, other = two_layers(), two_layers()
    trainer = Reduces(net.collect_params(), "sgd", options("sgd"), kvstore=None, loss_scale=SCALE)
    trainer._scale /= 2  # as Horovod averages
    reference = plain(other)
    train(net, trainer, range(3))
    train(other, reference, range(3))
    assert Reduces.calls == 3
    assert weights(trainer) == weights(reference)
    trainer.backward(forward(net, 3))
    trainer.clip_global_norm(1.0)
    trainer.allreduce_grads()
    trainer.update(4)
    assert Reduces.calls == 4
    Reduces.spoil = True
    before = full_weights(trainer)
    trainer.backward(forward(net, 4))
    trainer.step(4)
    assert trainer.last_step_skipped
    assert full_weights(trainer) == before


def test_clipping_counts_a_gradient_that_only_the_second_device_has():
    contexts = [mx.cpu(0), mx.cpu(1)]
    first, second = (nn.Dense(1, in_units=1, use_bias=False) for _ in range(2))
    for net in (first, second):
        net.initialize(mx.init.One(), ctx=contexts)
    trainer = mxmp.Trainer([first.weight, second.weight], "sgd", {"learning_rate": 1.0}, loss_scale=None)
    with autograd.record():
        losses = [first(mx.nd.ones((1, 1), ctx)) for ctx in contexts]
        losses[1] = losses[1] + 100 * second(mx.nd.ones((1, 1), contexts[1]))
    trainer.backward(losses)
    assert trainer.clip_global_norm(1.0) == pytest.approx((2**2 + 100**2) ** 0.5)


# -- what a step costs ------------------------------------------------------------------------------


def test_a_new_trainer_warns_where_the_last_one_has_only_searched_for_its_scale():
    net = two_layers(CASTS)

    def searching(scale, net=net, steps=2):
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scale)
        for number in range(steps):
            trainer.backward(forward(net, number))
            overflow(trainer)
            trainer.step(4)
        return trainer

    scaler, other = mxmp.DynamicLossScaler(), two_layers(CASTS)
    trainer = searching(scaler, other)
    assert searching(scaler, other).loss_scale == 65536 / 16
    for steps in (2, 8):  # a few may be lost, where a cell is run again
        trainer = searching("dynamic", steps=steps)
    trainer = searching("dynamic", steps=1)
    with pytest.warns(UserWarning, match="skipped all of their 11 steps, each to find the loss scale.*at 65536"):
        trainer = mxmp.Trainer(net.collect_params(), "sgd")
    for number in range(2):  # one that trains is no reason
        trainer.backward(forward(net, number))
        trainer.step(4)
    mxmp.Trainer(net.collect_params(), "sgd")
    mxmp.Trainer(two_layers(CASTS).collect_params(), "sgd")


@pytest.mark.parametrize("ends", ["step", "discard"])
def test_a_scaler_does_not_wait_for_the_trainer_of_an_earlier_phase(ends):
    net, scaler = two_layers(CASTS), mxmp.DynamicLossScaler(1024.0, growth_interval=2)
    first, second = (mxmp.Trainer(net.collect_params(), "sgd", loss_scale=scaler) for _ in range(2))
    train(net, first, range(2))
    assert scaler.loss_scale == 2048
    train(net, second, range(2))
    assert scaler.loss_scale == 4096
    second.backward(forward(net, 2))
    overflow(second)
    second.step(4) if ends == "step" else second.discard()
    assert scaler.loss_scale == 2048
    train(net, first, range(2))
    assert scaler.loss_scale == 4096
