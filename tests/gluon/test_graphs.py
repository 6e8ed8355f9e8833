"""Graphs of a block, for each mode, shape and flags; and static ones after events that change a weight's arrays.

With ``static_alloc`` and ``static_shape``, MXNet's CachedOp remembers both. Each net computes in FP32, and is compared
bit for bit with MXNet's own, not hybridized: plain MXNet's static graphs are wrong after some of these events too.
"""

from __future__ import annotations

import threading

import mxnet as mx
import numpy as np
import pytest
from kit.networks import made
from kit.twins import FLAGS, LOSS, MASTERS, array, assert_same, backward, convert, seeded, sequence, step, trainer_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.policy import as_policy

FP32 = mxmp.Policy("float16", exclude=["*"])
DTYPES = {"float16": FP32, "bfloat16": mxmp.Policy("bfloat16", exclude=["*"])}

pytestmark = pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning")


class Run:
    """Two layers in training: ``gluon.Trainer`` and no graph for a policy of None."""

    def __init__(self, policy, devices=1):
        self.policy, self.devices, self.batches = policy, [mx.cpu(i) for i in range(devices)], 0
        # Names of their own: those that MXNet counts differ from run to run, and the events choose layers by name.
        first = nn.Dense(5, in_units=6, activation="tanh", prefix="first_")
        self.net = sequence(first, nn.Dense(3, in_units=5, prefix="second_"))
        seeded(self.net, self.devices)
        self.params = self.net.collect_params()
        convert(policy, self.net, flags=FLAGS["static"] if policy else None)
        self.trainer = trainer_of(policy, self.net, scale=64, learning_rate=0.1, momentum=0.9)

    def losses(self):
        self.batches += 1
        with autograd.record():
            return [
                LOSS(self.net(array(self.batches, 4, 6, ctx=ctx)), array(self.batches + 50, 4, 3, ctx=ctx))
                for ctx in self.devices
            ]

    def backward(self, losses=None):
        backward(self.trainer, losses or self.losses())

    def step(self):
        self.backward()
        self.trainer.step(4, ignore_stale_grad=True)

    def request(self, how, pattern=".*"):
        self.net.collect_params(pattern).setattr("grad_req", how)

    def set_weights(self):
        for i, param in enumerate(self.params.values()):
            param.set_data(array(i, *param.shape) * 0.3)


def accumulated(run, pattern=".*"):
    run.request("add", pattern)
    run.params.zero_grad()
    run.backward()
    run.backward()
    run.trainer.step(8)
    run.params.zero_grad()
    run.request("write", pattern)


def frozen(run, pattern, between):
    run.request("null", pattern)
    between(run)
    run.request("write", pattern)


def marked_anew(run):
    for param in run.params.values():
        for weight, grad in zip(param.list_data(), param.list_grad()):
            autograd.mark_variables([weight], [grad], param.grad_req)


def attached_twice(run):
    # Each makes a new array, which the Parameter does not know of, and the last call gives the Parameter's own back.
    for param in run.params.values():
        for weight in param.list_data():
            weight.attach_grad()
    marked_anew(run)


EVENTS = {
    "nothing": lambda run: None,
    "a layer is frozen for no call": lambda run: frozen(run, "first_.*", lambda run: None),
    "a layer is frozen for a step": lambda run: frozen(run, "first_.*", Run.step),
    "a bias is frozen for a step": lambda run: frozen(run, ".*bias", Run.step),
    "all is frozen for an evaluation": lambda run: frozen(run, ".*", lambda run: run.net(array(0, 4, 6))),
    "accumulation": accumulated,
    "two accumulations": lambda run: (accumulated(run), accumulated(run)),
    "accumulation of one layer": lambda run: accumulated(run, "second_.*"),
    "add and back with no call": lambda run: (run.request("add"), run.request("write")),
    "add stays": lambda run: (run.request("add"), run.params.zero_grad(), run.step(), run.params.zero_grad()),
    "reset_ctx to another device and back": lambda run: (
        run.params.reset_ctx(mx.cpu(7)),
        run.params.reset_ctx(run.devices),
    ),
    "reset_ctx to the same device": lambda run: run.params.reset_ctx(run.devices),
    "force_reinit": lambda run: (run.params.initialize(force_reinit=True, ctx=run.devices), run.set_weights()),
    "set_data": Run.set_weights,
    "a layer is frozen for a step, and accumulation later": lambda run: (
        frozen(run, "first_.*", Run.step),
        run.step(),
        accumulated(run),
    ),
    "zero_grad": lambda run: run.params.zero_grad(),
    "mark_variables": marked_anew,
    "attach_grad of the arrays": attached_twice,
    "an evaluation": lambda run: [run.net(array(0, 4, 6, ctx=ctx)) for ctx in run.devices],
    "hybridized anew": lambda run: run.net.hybridize(**FLAGS["static"]) if run.policy else None,
    "cast": lambda run: run.net.cast("float32"),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_backward_behind_the_event_is_that_of_the_forward_before_it(event):
    """As in plain MXNet, whose record of a forward has the gradient arrays of that time."""
    grads = []
    for policy in (None, FP32):
        run = Run(policy)
        run.step()
        before = [(weight, weight.grad) for p in run.params.values() for weight in p.list_data()]
        losses = run.losses()
        EVENTS[event](run)
        autograd.backward(losses)
        grads.append([grad.asnumpy().copy() for _, grad in before])
        run.step()
        grads[-1] += [p.data().asnumpy() for p in run.params.values()]
    assert_same(*grads)


@pytest.mark.parametrize("kind", ["write", "add", "null"])
def test_a_gan_that_freezes_one_net_in_the_pass_of_the_other_trains_as_in_fp32(kind):
    runs = []
    for policy in (None, FP32):
        made, judge = nets = [
            seeded(sequence(nn.Dense(6, in_units=6, activation="tanh"), prefix=f"{name}_"), seed=i)
            for i, name in enumerate("gd")
        ]
        convert(policy, *nets, flags=FLAGS["static"] if policy else None)
        trainers = [trainer_of(policy, net, scale=None, optimizer="adam", learning_rate=0.01) for net in nets]
        for number in range(5):
            for of, trainer in ((judge, trainers[1]), (made, trainers[0])):
                judge.collect_params().setattr("grad_req", "write" if of is judge else kind)
                judge.collect_params().zero_grad()
                with autograd.record():
                    out = judge(made(array(number, 4, 6)))
                    loss = LOSS(out, mx.nd.ones_like(out) * (of is judge))
                made.collect_params().zero_grad()
                step(trainer, loss)
        runs.append([p.data().asnumpy() for net in nets for p in net.collect_params().values()])
    assert_same(*runs)


def test_each_thread_writes_the_gradient_arrays_of_now():
    run, errors = Run(FP32), []

    def check():
        want = Run(None)
        run.batches = want.batches = 3
        run.backward()
        want.backward()
        for one, other in zip(run.params.values(), want.params.values()):
            if not np.array_equal(one.grad().asnumpy() / 64, other.grad().asnumpy()):
                errors.append(one.name)
        run.params.zero_grad()

    for _ in range(3):
        threads = [threading.Thread(target=check), threading.Thread(target=check)]
        for thread in threads:
            thread.start()
            thread.join()
            run.request("add")
            run.request("write")
    assert not errors


def test_gradients_of_inputs_are_those_of_each_call():
    run, plain = Run(FP32), Run(None)
    for number, request in enumerate(["write", "write", "add", "add", "write"]):
        found = []
        for each in (run, plain):
            x = array(number, 4, 6)
            x.attach_grad(request)
            x.grad[:] = 2
            with autograd.record():
                loss = each.net(x).square().sum()
            loss.backward()
            found.append(x.grad.asnumpy())
        np.testing.assert_array_equal(*found)


def test_a_step_like_the_last_makes_no_new_graph(monkeypatch):
    made = []
    run = Run(FP32)
    for _ in range(2):
        run.step()
    monkeypatch.setattr(mxmp.gluon.graphs, "_CachedOp", lambda *args: made.append(args))
    for _ in range(3):
        run.step()
        run.params.zero_grad()
        run.set_weights()
    assert not made


@pytest.mark.parametrize("inside", ["running statistics", "a frozen layer"])
def test_arrays_without_a_gradient_make_no_new_graph(inside, monkeypatch):
    norm = [nn.BatchNorm(in_channels=5)] if inside == "running statistics" else []
    net = seeded(sequence(nn.Dense(5, in_units=6), *norm, nn.Dense(3, in_units=5)))
    mxmp.convert(net, FP32)
    net.hybridize(**FLAGS["static"])
    if not norm:
        net[0].collect_params().setattr("grad_req", "null")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=64)
    made, cached_op = [], mxmp.gluon.graphs._CachedOp
    monkeypatch.setattr(mxmp.gluon.graphs, "_CachedOp", lambda *args: made.append(args) or cached_op(*args))
    for _ in range(4):
        with autograd.record():
            loss = net(array(0, 4, 6)).square().sum()
        trainer.backward(loss)
        trainer.step(4, ignore_stale_grad=True)
    assert len(made) == 1


def test_new_flags_make_a_new_graph_and_the_same_flags_do_not():
    net, x = made("mlp")
    mxmp.convert(net).hybridize()
    ops = []
    for flags in ({}, {"static_alloc": True}, {}):
        net.hybridize(**flags)
        for _ in range(2):
            net(mx.nd.array(x))
            ops.append(net._cached_op)
    assert ops[0] is ops[1]
    assert ops[2] is ops[3]
    assert len(set(map(id, ops))) == 3


class Returning(nn.HybridBlock):
    """Returns an input and a Parameter beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)
            self.scale = self.params.get("scale", shape=(4,), init="ones")

    def hybrid_forward(self, F, x, y, scale):  # noqa: N803
        return self.dense(x * 2), y, scale


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", [*DTYPES, Policy("float16", params="float16")])
def test_an_input_or_a_parameter_may_be_an_output_and_has_its_gradient(policy, attached):
    net = Returning()
    net.initialize()
    mxmp.convert(net, policy)
    x, y = mx.nd.random.normal(shape=(2, 4)), mx.nd.random.normal(shape=(2, 4))
    if attached:
        y.attach_grad()
    with autograd.record():
        out, same, scale = net(x, y)
        loss = out.sum() + (same**2).sum() + (scale * mx.nd.arange(4)).sum()
    loss.backward()
    assert_same([same, net.scale.grad()], [y, mx.nd.arange(4)])
    assert_same([net.dense.bias.grad().astype("float32")], [mx.nd.full((4,), 2)])
    if attached:
        assert_same([y.grad], [2 * y])


class Partly(nn.HybridBlock):
    """Leaves out its second layer and its second input at first."""

    def __init__(self):
        super().__init__()
        self.whole = False
        with self.name_scope():
            self.first, self.second = nn.Dense(4), nn.Dense(2)

    def hybrid_forward(self, op, x, more):
        return self.second(op.concat(self.first(x), more, dim=1)) if self.whole else self.first(x)


@pytest.mark.filterwarnings("ignore:.* is not used by any computation")
def test_what_the_code_leaves_out_at_first_waits_for_its_shape():
    net, x, more = Partly(), array(1, 3, 6), array(2, 3, 5)
    net.initialize()
    mxmp.convert(net, FP32)
    for whole, shape in ((False, (2, 0)), (True, (2, 9))):
        net.whole = whole
        out = net(x, more)
        assert (net.first.weight.shape, net.second.weight.shape) == ((4, 6), shape)
        mxmp.restore(net)
        assert (out == net(x, more)).asnumpy().all()
        mxmp.convert(net, FP32)


def test_a_weight_whose_shape_is_a_list_is_made_by_the_first_call():
    """As of MXNet's contrib layers."""
    net = gluon.contrib.cnn.DeformableConvolution(2, kernel_size=(3, 3))
    net.initialize()
    assert mxmp.convert(net, "float16")(mx.nd.ones((1, 3, 5, 5))).shape == (1, 2, 3, 3)


# -- Inputs in float16, as of a script that has cast its data for ``net.cast`` -------------------------

FIRST = {
    "a layer": lambda op, x: x,
    "arithmetic": lambda op, x: (x - 0.5) / 0.25,
    "a pooling": lambda op, x: op.Pooling(x, kernel=(2, 2), pool_type="avg"),
    "a norm": lambda op, x: op.LayerNorm(x, op.ones((8,)), op.zeros((8,))),
}


@pytest.mark.parametrize("exclude", [[], ["net_conv0"]], ids=str)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("policy", ["float16", MASTERS, "bfloat16"])
def test_inputs_in_float16_train_what_the_same_in_fp32_do(policy, first, exclude):
    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.conv, self.fc = nn.Conv2D(4, 3, in_channels=3), nn.Dense(3)

        def hybrid_forward(self, op, x):
            return self.fc(self.conv(FIRST[first](op, x)))

    values = mx.nd.array(np.random.RandomState(0).rand(4, 3, 8, 8)).astype("float16")
    found = []
    for dtype in ("float32", "float16"):
        mx.random.seed(0)
        net = Net()
        net.initialize(mx.init.Xavier())
        net(values.astype("float32"))
        mxmp.convert(net, as_policy(policy, exclude))
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, loss_scale=128)
        for _ in range(3):
            with autograd.record():
                loss = net(values.astype(dtype)).square().mean()
            trainer.backward(loss)
            trainer.step(1)
        found.append([param.data().asnumpy() for param in net.collect_params().values()])
        found[-1].append(net(values.astype(dtype)).asnumpy())
    assert all(map(np.array_equal, *found))
