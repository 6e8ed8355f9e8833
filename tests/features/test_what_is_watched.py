"""What BatchNorm and its kin accumulate is watched, and nothing else that happens not to be trained."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.twins import FLAGS, LOSS, POLICIES, array, assert_close, convert, seeded, sequence, step, trainer_of, updates
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

MASK = np.where(np.arange(6) % 3 == 0, -np.inf, 0.0).astype("float32")


class Masked(gluon.HybridBlock):
    """Attention-like weights under a mask that is a parameter which never trains."""

    def __init__(self, mask, dtype="float32", kind="parameter"):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)
            self.norm = nn.BatchNorm(in_channels=6, epsilon=1.0)
            self.tail = nn.Dense(2, in_units=6)
            if kind == "constant":
                self.mask = self.params.get_constant("mask", mx.nd.array(mask, dtype=dtype))
            else:
                more = {"grad_req": "null"} if kind == "frozen" else {"differentiable": False}
                self.mask = self.params.get(
                    "mask", shape=mask.shape, dtype=dtype, init=mx.init.Constant(mx.nd.array(mask, dtype=dtype)), **more
                )

    def hybrid_forward(self, F, x, mask):  # noqa: N803
        x = self.norm(self.body(x))
        return self.tail(F.softmax(F.broadcast_add(x, F.cast(mask, "float32").reshape((1, -1)))))


def train(net, trainer, x):
    with autograd.record():
        out = net(x)
        loss = LOSS(out, mx.nd.ones_like(out))
    step(trainer, loss, 8)


def trained(mask, dtype="float32", kind="parameter", policy=None, flags=None, overflow=False):
    """Updates of three steps, the mask, and the output afterwards."""
    net = Masked(mask, dtype, kind)
    net.initialize()
    learned = {k: p for k, p in net.collect_params().items() if p.grad_req != "null"}
    for i, param in enumerate(learned.values()):
        param.set_data(array(50 + i, *param.shape) * 0.5)
    convert(policy, net, flags=flags)
    trainer = trainer_of(policy, net)
    batches = [array(i, 8, 6) for i in range(3)] + [array(9, 8, 6) * np.inf] * overflow
    found = updates(learned, lambda: [train(net, trainer, x) for x in batches])
    return found, net.mask.data().asnumpy(), net(array(7, 8, 6)).asnumpy()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", ["parameter", "frozen", "constant"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_infinite_mask_stays_as_it_is(policy, kind, flags):
    found, mask, out = trained(MASK, kind=kind, policy=POLICIES[policy], flags=FLAGS[flags])
    expected, _, full = trained(MASK, kind=kind)
    np.testing.assert_array_equal(mask, MASK)
    assert_close([out, found[0]], [full, expected[0]], policy)


@pytest.mark.parametrize("kind", ["parameter", "frozen", "constant"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float64", "float16"])
def test_a_parameter_of_another_dtype_that_never_trains_is_left_alone(dtype, kind):
    values = np.arange(6) % 2
    if dtype == "float16":
        with pytest.raises(ValueError, match=r"stored in .*float16"):
            trained(values, dtype, kind, "float16")
        return
    found, mask, out = trained(values, dtype, kind, "float16")
    expected, _, full = trained(values, dtype, kind)
    np.testing.assert_array_equal(mask, values)
    assert_close([out, found[0]], [full, expected[0]])


def test_an_overflow_still_leaves_the_mask_and_finite_statistics():
    _, mask, out = trained(MASK, policy="float16", overflow=True)
    np.testing.assert_array_equal(mask, MASK)
    assert np.isfinite(out).all()


def test_in_a_plain_net_without_convert_too():
    """The Trainer alone must not take a frozen parameter for a statistic either."""
    net = Masked(MASK)
    net.initialize()
    train(net, trainer_of("float16", net), array(0, 8, 6))
    np.testing.assert_array_equal(net.mask.data().asnumpy(), MASK)


class OwnStatistics(mx.operator.CustomOp):
    """An operator of a user's with an auxiliary state."""

    def forward(self, is_train, req, in_data, out_data, aux):
        if is_train:
            aux[0][:] = aux[0] * 0.5 + in_data[0].mean() * 0.5
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("mxmp_test_own_statistics")
class OwnStatisticsProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=True)

    def list_auxiliary_states(self):
        return ["average"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], [(1,)]

    def create_operator(self, ctx, shapes, dtypes):
        return OwnStatistics()


class Watched(gluon.HybridBlock):
    """Statistics that are declared as trainable parameters in Python: only the graph says what they are."""

    def __init__(self, differentiable):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, in_units=6)
            self.average = self.params.get("average", shape=(1,), init="ones", differentiable=differentiable)

    def hybrid_forward(self, F, x, average):  # noqa: N803
        return F.Custom(self.body(x), average, op_type="mxmp_test_own_statistics")


@pytest.mark.parametrize("differentiable", [False, True])
def test_the_graph_says_what_an_auxiliary_state_is(differentiable):
    net = Watched(differentiable)
    net.initialize()
    mxmp.convert(net, "float16")
    trainer = trainer_of("float16", net.body)
    train(net, trainer, array(0, 8, 6))
    kept = net.average.data().asscalar()
    train(net, trainer, array(1, 8, 6) * np.inf)
    assert trainer.last_step_skipped
    assert net.average.data().asscalar() == kept


@pytest.mark.parametrize("flags", FLAGS)
def test_statistics_of_a_net_that_another_trainer_s_backward_runs_through_stay_finite(flags):
    """A generator's overflow runs through the critic's BatchNorm, whose parameters are another trainer's."""
    generator = seeded(nn.Dense(6, in_units=6))
    critic = seeded(sequence(nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6), nn.Dense(1, in_units=6)))
    convert("float16", generator, critic, flags=FLAGS[flags])
    trainer = trainer_of("float16", generator)
    for factor in (1.0, 1e30):
        train(lambda x: critic(generator(x)), trainer, array(0, 8, 6) * factor)
    assert trainer.last_step_skipped
    mx.nd.waitall()
    for name in ("running_mean", "running_var"):
        assert np.isfinite(getattr(critic[1], name).data().asnumpy()).all(), name
