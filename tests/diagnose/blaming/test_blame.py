"""blame names the layer that was built to go wrong, the direction, the cause and what went in, through both doors."""

from __future__ import annotations

import copy

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import (
    Run,
    batch,
    convolutional,
    gluon_run,
    gluon_step,
    module_of,
    module_step,
    three,
)
from kit.twins import LOSS
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import blame
from mxmp.diagnose.networks.of_gluon.training import TrainedNet
from mxmp.diagnose.networks.of_symbolic.training import TrainedModule

DOORS = ["gluon", "module"]


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_that_is_finite_is_said_to_be(door):
    net, (x, y) = three(), batch()
    run = Run(door, net, on=(x, y))
    found = run.blame()
    assert not found.reproduced
    assert str(found).startswith("not reproduced, at a loss scale of 8: every value and gradient was finite")


def test_the_replay_is_at_the_scale_that_failed_or_the_one_that_is_asked_for():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net, loss_scale=mxmp.DynamicLossScaler(init_scale=2.0**22))
    gluon_step(net, trainer, x, y)
    assert trainer.loss_scale == 2.0**21
    assert blame(net, trainer, x, loss=lambda out: LOSS(out, y)).loss_scale == 2.0**22
    assert not blame(net, trainer, x, loss=lambda out: LOSS(out, y), loss_scale=2).reproduced


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_training_goes_on_as_if_nobody_had_asked(flags):
    def trained(asked):
        net = convolutional(dropout=False)
        trainer = gluon_run(net)
        net.hybridize(**flags)
        for step in range(3):
            x, y = batch(step, (4, 3, 6, 6))
            gluon_step(net, trainer, x, y)
            if asked:
                with autograd.pause():
                    blame(net, trainer, x, loss=lambda out, y=y: LOSS(out, y))
                assert not trainer.ledger.pending
                assert not any(mxmp.gluon._mxnet.is_fresh(p.data()) for p in trainer._params if p.grad_req != "null")
        return {n: p.data().asnumpy().tobytes() for n, p in net.collect_params().items()}, trainer.loss_scale

    assert trained(True) == trained(False)


class Counts(nn.Dense):
    calls, last = 0, None

    def hybrid_forward(self, op, x, *params, **more):
        self.calls += 1
        self.last = x * 2
        return super().hybrid_forward(op, x, *params, **more)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.filterwarnings("ignore:.*it is traced anew:UserWarning")
def test_attributes_that_the_code_sets_stay(called):
    net, (x, y) = Counts(4, in_units=6), batch()
    net.initialize()
    mxmp.convert(net, "float16")
    trainer = gluon_run(net)
    if called:
        gluon_step(net, trainer, x, y)
    before = net.calls, net.last
    blame(net, trainer, x, loss=lambda out: LOSS(out, y))
    assert (net.calls, net.last) == before


@pytest.mark.parametrize("inside", [True, False], ids=["in record", "after record"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_between_a_forward_and_its_backward_it_changes_neither(flags, inside):
    def trained(asked):
        net = convolutional(dropout=False)
        trainer = gluon_run(net, loss_scale=64.0)
        net.hybridize(**flags)
        for step in range(3):
            x, y = batch(step, (4, 3, 6, 6))
            x.attach_grad()
            with autograd.record():
                loss = LOSS(net(x * 2), y)
                if asked and inside:
                    assert not blame(net, trainer, x * 2, loss=lambda out, y=y: LOSS(out, y)).reproduced
            if asked and not inside:
                assert not blame(net, trainer, x * 2, loss=lambda out, y=y: LOSS(out, y)).reproduced
            trainer.backward(loss)
            gradient = x.grad.asnumpy().tobytes()
            trainer.step(4)
        return {n: p.data().asnumpy().tobytes() for n, p in net.collect_params().items()}, gradient

    assert trained(True) == trained(False)


def test_a_module_goes_on_as_if_nobody_had_asked():
    def trained(asked):
        net = convolutional(dropout=False)
        module = module_of(net, *batch(0, (4, 3, 6, 6)))
        for step in range(3):
            x, y = batch(step, (4, 3, 6, 6))
            module_step(module, x, y)
            if asked:
                blame(module, mx.io.DataBatch([x], [y]), loss_scale=2.0**30)
        args, aux = module.get_params()
        return {n: value.asnumpy().tobytes() for n, value in {**args, **aux}.items()}, module.loss_scale

    assert trained(True) == trained(False)


@pytest.mark.parametrize("policy", ["float16", "params=float16"])
@pytest.mark.parametrize("inputs", [0, 6], ids=["deferred", "initialized"])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_asked_before_the_first_forward_it_changes_nothing(grad_req, inputs, policy):
    def trained(asked):
        mx.random.seed(7)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(6, in_units=inputs), nn.BatchNorm(in_channels=inputs), nn.Dense(4, in_units=inputs))
        net.initialize(mx.init.Xavier())
        net.collect_params().setattr("grad_req", grad_req)
        trainer = gluon_run(net, policy=policy)
        x, y = batch()
        if asked:
            assert not blame(net, trainer, x, loss=lambda out: LOSS(out, y)).reproduced
        gluon_step(net, trainer, x, y)
        return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]

    assert trained(True) == trained(False)


class Modes(gluon.HybridBlock):
    """Returns two arrays in training and one in inference, as a detector does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.kind, self.box = nn.Dense(4), nn.Dense(2)

    def hybrid_forward(self, ops, x):
        found = self.kind(x), self.box(x)
        return found if autograd.is_training() else ops.concat(*found)


@pytest.mark.parametrize("waiting", [False, True], ids=["net", "net and loss"])
def test_asked_before_the_first_forward_the_loss_gets_what_the_net_returns_in_training(waiting):
    net, judge = Modes(prefix="net_"), nn.Dense(1, in_units=0 if waiting else 2, prefix="judge_")
    net.initialize()
    judge.initialize()
    mxmp.convert(net, "float16")
    params = [*net.collect_params().values(), *judge.collect_params().values()]
    trainer = mxmp.Trainer(params, "sgd", loss_scale=8)
    x, y = batch()

    def loss(out):
        kind, box = out
        return LOSS(kind, y) + judge(box).reshape((-1,))

    assert not blame(net, trainer, x, loss=loss).reproduced


@pytest.mark.parametrize("trainers", ["one", "of its own"])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_loss_with_parameters_without_shapes_is_as_if_nobody_had_asked(grad_req, trainers):
    def trained(asked):
        mx.random.seed(7)
        net, judge = nn.HybridSequential(prefix="net_"), nn.HybridSequential(prefix="judge_")
        for each in (net, judge):
            with each.name_scope():
                each.add(nn.Dense(6), nn.BatchNorm())
            each.initialize(mx.init.Xavier())
            each.collect_params().setattr("grad_req", grad_req)
        mxmp.convert(net, "float16")
        scaler = mxmp.StaticLossScaler(8)
        parts = [[net], [judge]] if trainers == "of its own" else [[net, judge]]
        steps = [
            mxmp.Trainer([p for each in part for p in each.collect_params().values()], "sgd", loss_scale=scaler)
            for part in parts
        ]
        x = batch()[0]
        if asked:
            assert not blame(net, steps[0], x, loss=lambda out: judge(out) ** 2).reproduced
        with autograd.record():
            loss = judge(net(x)) ** 2
        steps[0].backward(loss)
        for trainer in steps:
            trainer.step(4)
        return [p.data().asnumpy().tobytes() for each in (net, judge) for p in each.collect_params().values()]

    assert trained(True) == trained(False)


def test_after_a_modules_backward_unchanged_restores_the_running_statistics_that_it_wrote():
    data = mx.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, name="norm")  # its backward comes last
    for index in range(20):  # more than MXNet runs as one operator
        data = mx.sym.Convolution(data, kernel=(3, 3), num_filter=32, pad=(1, 1), name=f"conv{index}")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=10, name="fc"), name="softmax")
    module = mxmp.Module(symbol, policy="bfloat16")
    module.bind([("data", (8, 16, 32, 32))], [("softmax_label", (8,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.01})
    x = np.random.RandomState(0).normal(3, 2, (8, 16, 32, 32))
    drawn = mx.io.DataBatch([mx.nd.array(x)], [mx.nd.zeros(8)])
    module.forward_backward(drawn)
    with TrainedModule(module).unchanged():
        pass
    module.update()
    running = module.get_params()[1]["norm_moving_mean"].asnumpy()
    np.testing.assert_allclose(running, x.mean((0, 2, 3)) * 0.1, rtol=1e-4)


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_of_a_gan_the_other_net_trains_on_as_if_nobody_had_asked(flags):
    def trained(asked):
        nets = [nn.HybridSequential(prefix=prefix) for prefix in ("g_", "d_")]
        mx.random.seed(7)
        for net in nets:
            with net.name_scope():
                net.add(nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6), nn.Dense(6, in_units=6))
            net.initialize(mx.init.Xavier())
        (generator, of_generator), (judge, of_judge) = runs = [(net, gluon_run(net)) for net in nets]
        for net in nets:
            net.hybridize(**flags)

        def ask(i):
            if asked:
                x = batch(i, (4, 6))[0]
                assert not blame(generator, of_generator, x, loss=lambda out: judge(out) ** 2).reproduced

        for i in range(3):
            x = batch(i)[0]
            with autograd.record():
                loss = judge(generator(x).detach()) ** 2
            ask(i)
            of_judge.backward(loss)
            ask(i)
            of_judge.step(4)
            with autograd.record():
                loss = judge(generator(x)) ** 2
            of_generator.backward(loss)
            of_generator.step(4)
            ask(i)
        return [p.data().asnumpy().tobytes() for net, _ in runs for p in net.collect_params().values()]

    assert trained(True) == trained(False)


def test_the_gradient_of_a_penalty_is_part_of_the_replay():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    weight = net.last.weight
    network = TrainedNet(net, trainer)
    noted = {}

    def loss(out):
        return LOSS(out, y).sum() + (weight.data() ** 2).sum()

    with autograd.record():
        whole = loss(net(x))
    trainer.backward(whole)
    wanted = weight.grad().asnumpy()
    with network.unchanged():
        network.replay([x], loss, 8.0, lambda name, array: noted.setdefault(name, array.asnumpy()))
        np.testing.assert_array_equal(weight.grad().asnumpy(), wanted)
    penalty = noted["the gradient of the loss with respect to last_weight"]
    np.testing.assert_array_equal(penalty, 2 * weight.data().asnumpy() * 8)


def test_a_penalty_whose_gradient_overflows_is_the_losss():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    found = blame(net, trainer, x, loss=lambda out: LOSS(out, y).sum() + (net.last.weight.data() * 1e38).sum())
    assert (found.where, found.name) == ("loss", "the gradient of the loss with respect to last_weight")
    assert "the loss is finite, and its gradient is not" in found.cause


class Called(gluon.Block):
    """A net called from Python code that also returns its input, which asks for no gradient."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x), x * 2


@pytest.mark.parametrize("frozen", ["", "first|middle", ".*"])
@pytest.mark.parametrize("called", [three, lambda first: Called(three(first))], ids=["net", "called"])
def test_an_overflow_is_found_where_some_or_all_of_the_net_asks_for_no_gradient(called, frozen):
    net, x = called(1e6), batch()[0]
    trainer = gluon_run(net)
    net(x)
    for param in net.collect_params(frozen).values() if frozen else ():
        param.grad_req = "null"
    found = blame(net, trainer, x, loss=lambda out: (out[0] if isinstance(out, tuple) else out).sum())
    assert found.name == "first_weight"  # rounded to infinity


def test_a_copy_of_a_net_whose_arrays_have_no_gradients_is_refused():
    net = copy.deepcopy(three())
    trainer = gluon_run(net)
    with pytest.raises(ValueError, match=r"first_weight' has no gradients: the net is a copy"):
        blame(net, trainer, batch()[0], loss=lambda out: out)


def test_errors_say_how_it_is_called():
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    for wrong in (
        lambda: blame(net, trainer, x),
        lambda: blame(net, trainer, loss=lambda out: out),
        lambda: blame(net),
    ):
        with pytest.raises(TypeError, match=r"blame\(net, trainer, x, loss=lambda out: loss_fn\(out, y\)\)"):
            wrong()
    module = module_of(three(), x, y)
    with pytest.raises(TypeError, match=r"blame\(module, batch\)"):
        blame(module, x, y)
