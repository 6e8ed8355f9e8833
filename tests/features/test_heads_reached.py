"""Exactly the loss heads that a backward reaches are scaled, by its trainer's scale, for that backward only."""

from __future__ import annotations

import mxnet as mx
import pytest
from kit.twins import (
    FLAGS,
    LOSS,
    SCALE,
    array,
    assert_close,
    backward,
    convert,
    equal_or_refused,
    loss_of,
    seeded,
    trainer_of,
    updates,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .arrangements import HEADS, MadeHead, SoftmaxHead

pytestmark = pytest.mark.filterwarnings("ignore:nothing in .* computes in:UserWarning")
DTYPES = ["float16", "bfloat16"]


class Whole(gluon.HybridBlock):
    """A body and its head in one net."""

    def __init__(self, head=SoftmaxHead, inputs=6, params=None):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(3, in_units=inputs, params=params)
            self.head = head()

    def hybrid_forward(self, F, x, label):  # noqa: N803
        return self.head(self.body(x), label)


def dense(units=3, inputs=6, seed=1):
    return seeded(nn.Dense(units, in_units=inputs), seed=seed)


def whole(head=SoftmaxHead, inputs=6, seed=2):
    return seeded(Whole(head, inputs), seed=seed)


def stepping(trainer, losses, batch=4):
    """A training step on what ``losses()`` gives."""

    def step():
        with autograd.record():
            out = losses()
        backward(trainer, out)
        trainer.step(batch)

    return step


def label():
    return mx.nd.array([0, 1, 2, 0])


def gradients(net):
    return [p.grad().asnumpy().astype("float32") for p in net.collect_params().values()]


def compare(run, policy, *more):
    """What ``run(policy, ...)`` gives is what ``run(None, ...)`` gives."""
    assert_close(run(policy, *more), run(None, *more), policy)


# -- whose heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [["float32", "float64", "float32"], ["float64", "float32"]], ids="-".join)
@pytest.mark.parametrize("head", ["SoftmaxOutput", "MakeLoss"])
def test_a_head_that_reads_an_input_takes_another_dtype_at_a_later_call(head, dtypes):
    def run(policy):
        body, tail = dense(), HEADS[head]()
        convert(policy, body, tail, flags={})
        trainer, found = trainer_of(policy, body), []
        for dtype in dtypes:
            given = label().astype(dtype)
            step = stepping(trainer, lambda: tail(body(array(0, 4, 6)).astype(given.dtype), given))  # noqa: B023
            found += updates(body, step)
        return found

    compare(run, "bfloat16")


def test_a_monitor_gets_the_backwards_of_two_calls_with_inputs_of_different_dtypes():
    names = []
    for dtypes in (["float32", "float32"], ["float32", "float64"]):
        net, seen = whole(HEADS["MakeLoss"]), []
        mxmp.convert(net, "float16")
        net.register_op_hook(lambda name, op, array: seen.append(name.split(b"_", 1)[1]))  # noqa: B023
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=8)
        with autograd.record():
            losses = [net(array(0, 4, 6), label().astype(dtype)) for dtype in dtypes]
        trainer.backward(losses)
        mx.nd.waitall()
        names.append(sorted(seen))
    assert names[0] == names[1]


class HeadInLoop(gluon.HybridBlock):
    """A loop whose body has a weight, a loss head and, beside it, a loss that is none."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        def step(row, state):
            out = self.body(row)
            return F.MakeLoss(F.sum(F.square(out))) + F.sum(F.sin(out)), state

        return F.contrib.foreach(step, x, F.zeros((1,)))[0]


def head_in_a_loop(policy, flags):
    net = seeded(HeadInLoop())
    (net if policy is None else mxmp.convert(net, policy)).hybridize(**flags)
    return updates(net, stepping(trainer_of(policy, net), lambda: net(array(0, 3, 4, 6))))


@pytest.mark.parametrize("flags", ["hybridized", "static"])
@pytest.mark.parametrize("policy", DTYPES)
def test_a_head_inside_a_loop(policy, flags):
    compare(head_in_a_loop, policy, FLAGS[flags])


def head_in_the_loop_of_a_module(policy):
    symbol = mx.sym.MakeLoss(mx.sym.sum(HeadInLoop()(mx.sym.var("data"))))
    kind, more = (mx.mod.Module, {}) if policy is None else (mxmp.Module, {"policy": policy, "loss_scale": SCALE})
    module = kind(symbol, label_names=None, **more)
    module.bind([("data", (3, 4, 6))])
    mx.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
    before = {k: v.asnumpy() for k, v in module.get_params()[0].items()}
    module.forward_backward(mx.io.DataBatch([array(0, 3, 4, 6)]))
    module.update()
    return [v.asnumpy() - before[k] for k, v in module.get_params()[0].items()]


@pytest.mark.parametrize("policy", DTYPES)
def test_a_head_inside_a_loop_of_a_module(policy):
    compare(head_in_the_loop_of_a_module, policy)


# -- for this backward only -------------------------------------------------------------------------


def own_backward_afterwards(policy, flags, how):
    net = whole()
    convert(policy, net, flags=flags)
    trainer = trainer_of(policy, net)
    if how == "recorded before":
        with autograd.record():
            later = net(array(1, 4, 6), label())
    with autograd.record():
        out = net(array(0, 4, 6), label())
    backward(trainer, out, retain_graph=how == "the same graph")
    trainer.step(4)
    if how == "recorded after":
        with autograd.record():
            later = net(array(1, 4, 6), label())
    (out if how == "the same graph" else later).backward()
    return gradients(net)


@pytest.mark.parametrize("how", ["recorded after", "recorded before", "the same graph"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("policy", DTYPES)
def test_a_backward_of_the_user_s_own_after_a_scaled_one_gives_true_gradients(policy, flags, how):
    if flags == "static" and how == "recorded before":
        pytest.skip("MXNet keeps one recorded graph of a static net")
    compare(own_backward_afterwards, policy, FLAGS[flags], how)


def the_same_critic_under_two_scales(policy):
    """Right after each other, without waiting: the engine must not mix the scales up."""
    bodies = [dense(4, 6, seed=i) for i in range(3)]
    critic = whole(inputs=4)
    convert(policy, *bodies, critic)
    trainers = [trainer_of(policy, body, scale=scale) for body, scale in zip(bodies, (16.0, 256.0, 4096.0))]
    before = [body.weight.data().asnumpy() for body in bodies]
    for i in range(9):
        with autograd.record():
            out = critic(bodies[i % 3](array(i, 4, 6)), label())
        backward(trainers[i % 3], out)
        trainers[i % 3].step(4)
    return [body.weight.data().asnumpy() - old for body, old in zip(bodies, before)]


def test_one_critic_under_three_scales_by_turns():
    compare(the_same_critic_under_two_scales, "float16")


# -- what cannot be scaled --------------------------------------------------------------------------


def bare_head_later(policy, make):
    """A plain loss first, then a head outside any converted net: in every later backward, right or refused."""
    net, head = dense(), make()
    convert(policy, net)
    trainer = trainer_of(policy, net)

    def bare():
        return head(net(array(0, 4, 6)), label())

    return [delta for losses in (lambda: loss_of(net), bare, bare) for delta in updates(net, stepping(trainer, losses))]


def active(block):
    block.hybridize()
    return block


def static(block):
    block.hybridize(static_alloc=True, static_shape=True)
    return block


BARE = {
    "an operator": lambda: mx.nd.SoftmaxOutput,
    "a plain block": SoftmaxHead,
    "a hybridized block": lambda: active(MadeHead()),
    "a static block": lambda: static(MadeHead()),
    "a restored block": lambda: mxmp.restore(mxmp.convert(MadeHead())),
}


def hybridized_loss_then_head(policy):
    """An opaque loss that is fine does not clear the way for an opaque head of the same inputs."""
    net, loss, head = dense(), LOSS.__class__(), MadeHead()
    convert(policy, net)
    loss.hybridize()
    head.hybridize()
    trainer = trainer_of(policy, net)

    def behind(last):
        out = net(array(0, 4, 6))
        return last(out, label() if last is head else mx.nd.ones_like(out))

    lasts = (loss, loss, head, head)
    return [delta for last in lasts for delta in updates(net, stepping(trainer, lambda last=last: behind(last)))]


@pytest.mark.parametrize("kind", [*BARE, "after a hybridized loss"])
def test_a_bare_head_is_refused_in_every_backward_or_scaled(kind):
    def run(policy):
        return bare_head_later(policy, BARE[kind]) if kind in BARE else hybridized_loss_then_head(policy)

    expected = run(None)
    equal_or_refused(lambda: run("float16"), lambda found: assert_close(found, expected), saying="loss scale")


def elsewhere(policy, how):
    """A hybridized block beside the losses, alive or deleted a moment ago, with a head and as many inputs as theirs."""
    net, loss, head = dense(), LOSS.__class__(), MadeHead()
    convert(policy, net)
    loss.hybridize()
    head.hybridize()
    with autograd.record():
        head(net(array(0, 4, 6)), label())
    if how == "deleted":
        del head
    trainer = trainer_of(policy, net)

    return updates(net, stepping(trainer, lambda: loss(net(array(0, 4, 6)), mx.nd.ones((4, 3)))))


@pytest.mark.parametrize("how", ["alive", "deleted"])
def test_a_hybridized_loss_is_not_refused_for_a_head_that_is_no_part_of_it(how):
    compare(elsewhere, "float16", how)


def without_gradient(policy, target, own):
    """Loss times what a hybridized block computes without a gradient, of the net's own output or of a constant."""
    net = dense()
    convert(policy, net)
    block = nn.HybridLambda(target)
    block.hybridize()
    trainer = trainer_of(policy, net)

    def losses():
        out = net(array(0, 4, 6))
        weight = block(out if own else out.detach())
        return (LOSS(out, mx.nd.ones_like(out)) * (weight.reshape((4, -1)).sum(axis=1) + 1)).abs()

    return updates(net, stepping(trainer, losses))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "target",
    [
        lambda op, x: op.BlockGrad(x * 2 + 1),
        lambda op, x: op.one_hot(op.argmax(x, axis=1), depth=3),
        lambda op, x: x * 2 + 1 > 0,
        lambda op, x: op.broadcast_equal(x * 2 + 1, op.max(x, axis=1, keepdims=True)),
    ],
    ids=["BlockGrad", "one_hot", "greater", "broadcast_equal"],
)
def test_a_hybridized_block_without_a_gradient_is_no_head(target, own):
    compare(without_gradient, "float16", target, own)


class Two(gluon.HybridBlock):
    """A head and the features before it, of which a loss may use one or both: the head writes its gradient anyway."""

    def __init__(self, **kwargs):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(3, in_units=6)
        self._kwargs = kwargs

    def hybrid_forward(self, F, x, label):  # noqa: N803
        features = self.body(x)
        return F.SoftmaxOutput(features * 1 + 0, label, **self._kwargs), F.tanh(features)


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["hybridized", "static"])
@pytest.mark.parametrize(
    ("used", "name"),
    [([0], None), ([1], None), ([0, 1], None), ([0], "probabilities")],
    ids=["head", "features", "both", "head with a name of the user's"],
)
def test_a_plain_hybridized_net_with_a_head_beside_its_features_is_refused(used, name, flags):
    net = seeded(Two(**({} if name is None else {"name": name})))
    net.hybridize(**flags)
    trainer = trainer_of("float16", net)
    with pytest.raises(ValueError, match=rf"{name or 'softmaxoutput'}.*loss scale"):
        stepping(trainer, lambda: [net(array(0, 4, 6), label())[i] for i in used])()


def test_a_plain_hybridized_head_over_parameters_that_nobody_updates_is_right():
    def run(policy):
        net, frozen = dense(), whole(MadeHead, seed=3)
        frozen.hybridize()
        convert(policy, net)
        trainer = trainer_of(policy, net)

        return updates(net, stepping(trainer, lambda: [loss_of(net), frozen(array(1, 4, 6), label())]))

    compare(run, "float16")


@pytest.mark.parametrize("frozen_first", [True, False])
def test_an_unconverted_head_is_refused_beside_one_over_parameters_that_nobody_updates(frozen_first):
    net, frozen = whole(MadeHead), whole(MadeHead, seed=3)
    for each in (net, frozen):
        each.hybridize()
    trainer = trainer_of("float16", net)
    order = [frozen, net] if frozen_first else [net, frozen]
    with pytest.raises(ValueError, match="has a loss head inside"):
        stepping(trainer, lambda: [each(array(0, 4, 6), label()) for each in order])()


def test_no_backward_looks_through_python_s_heap(monkeypatch):
    net, head = dense(), MadeHead()
    convert("float16", net)
    head.hybridize()
    trainer = trainer_of("float16", net)

    def scan(*args, **kwargs):
        raise AssertionError("gc.get_objects")

    monkeypatch.setattr("gc.get_objects", scan)
    monkeypatch.setattr("gc.get_referrers", scan)
    stepping(trainer, lambda: loss_of(net))()
    with pytest.raises(ValueError, match="loss scale"):
        stepping(trainer, lambda: head(net(array(0, 4, 6)), label()))()


# -- what it costs -----------------------------------------------------------------------------------


def test_a_scaled_backward_reads_the_record_of_its_loss_once(monkeypatch):
    """And makes its nodes only where an operator in it can be a head: for 100 nodes that is what the check costs."""
    net = whole()
    convert("float16", net)
    trainer, read = trainer_of("float16", net), []
    get_symbol = autograd.get_symbol
    monkeypatch.setattr(autograd, "get_symbol", lambda array: read.append(array) or get_symbol(array))
    with autograd.record():
        out = net(array(0, 4, 6), label())
        read.clear()
    trainer.backward(out)
    assert len([array for array in read if array is out]) == 1
