"""audit: it names planted operators first, says nothing of healthy networks, and changes nothing."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.saturating import BCE, binary, saturating
from kit.twins import assert_same
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.plants.kinds import HEALTHY, PLANTED, PLANTS, audited, cases, healthy

import mxmp
from mxmp.__main__ import main
from mxmp.diagnose import audit
from mxmp.diagnose.auditing.audit import THRESHOLD
from mxmp.diagnose.auditing.report import LOST

S = mx.sym


@pytest.mark.parametrize(("plant", "dtype"), cases(), ids=lambda each: getattr(each, "name", each))
@pytest.mark.slow
def test_the_planted_operator_comes_first_and_its_pattern_cures(plant, dtype):
    found = audited(plant, dtype)
    assert found.findings[0].name == PLANTED
    assert found.exclude[0] == PLANTED
    assert found.remaining.times_noise <= THRESHOLD
    assert found.findings[0].lost in LOST
    assert PLANTED in str(found)


def test_there_are_thirty_plants_over_fifteen_kinds():
    assert len(PLANTS) >= 30
    assert len({plant.kind for plant in PLANTS}) >= 15
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.slow
def test_nothing_stands_out_in_a_healthy_network(name, dtype):
    found = healthy(name, dtype)
    assert found.is_healthy
    assert "nothing stands out" in str(found)


def test_a_plan_for_a_gpu_is_audited_by_the_emulation():
    plant = next(each for each in PLANTS if each.name == "sigmoid")
    assert audited(plant, "float16", device="gpu").findings[0].name == PLANTED


def test_audit_changes_nothing_of_a_net_and_its_training():
    net = saturating("float16", dropout=0.3, params="float16")
    x, y = binary()
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    with autograd.record():
        loss = BCE(net(x), y)
    trainer.backward(loss)
    params = list(net.collect_params().values())

    def state():
        gradients = [param.grad() for param in params if param.grad_req != "null"]
        return [array.asnumpy() for array in [*(param.data() for param in params), *gradients]]

    before = state()
    mx.random.seed(11)
    audit(net, BCE, (x, y))
    drawn = mx.nd.random.uniform(shape=(4,)).asnumpy()
    mx.random.seed(11)
    assert (drawn == mx.nd.random.uniform(shape=(4,)).asnumpy()).all()
    assert_same(before, state())
    trainer.step(64)  # the gradients are still fresh, and the scale still that of the backward


def test_an_error_in_the_loss_leaves_the_net_as_it_was():
    net, (x, y) = saturating(), binary()
    expected = net(x).asnumpy()

    def fails(out, label):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        audit(net, fails, (x, y))
    np.testing.assert_array_equal(net(x).asnumpy(), expected)


def test_apply_keeps_the_operator_in_fp32():
    net, batch = saturating(), binary()
    found = audit(net, BCE, batch, apply=True)
    assert found.applied
    assert found.full_ops == ("sigmoid",)
    assert audit(net, BCE, batch).is_healthy
    assert next(d for d in mxmp.explain(net, batch[0]).nodes if d.op == "sigmoid").dtype != "bfloat16"


def test_apply_changes_nothing_where_nothing_stands_out():
    net, (x, y) = saturating(), binary()
    policy = mxmp.explain(net, x).graphs[0].plan.policy
    assert not audit(net, gluon.loss.L2Loss(), (x, y), apply=True).applied
    assert mxmp.explain(net, x).graphs[0].plan.policy == policy


def test_a_net_that_is_python_outside_its_graphs_is_audited_whole():
    inner = saturating()

    class Outer(gluon.Block):
        def __init__(self):
            super().__init__()
            self.first = nn.Dense(8, in_units=8)
            self.rest = inner

        def forward(self, x):
            return self.rest(self.first(x) * 1.0)

    mxmp.restore(inner)
    net = Outer()
    net.first.initialize()
    mxmp.convert(net, mxmp.Policy("bfloat16", low_ops=["sigmoid"]))
    assert audit(net, BCE, binary()).findings[0].op == "sigmoid"


class Balanced(nn.HybridBlock):
    """Leaves the sizes of its features behind for the loss, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.sizes, self.calls = None, 0
        with self.name_scope():
            self.dense = nn.Dense(2, in_units=8)

    def hybrid_forward(self, op, x):
        self.sizes = op.mean(op.square(x), axis=0)
        self.calls += 1
        return {"scores": self.dense(x), "more": [None]}


class Whole(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.inner = nn.Dense(8, in_units=8), Balanced()

    def forward(self, x):
        return self.inner(self.first(x))["scores"] * self.inner.sizes.sum()


def test_a_loss_that_reads_what_the_net_leaves_in_attributes_is_audited_and_they_stay():
    (x, y), net = binary(), Balanced()
    net.initialize()
    for policy in ("bfloat16", None):
        read = []
        if policy is None:
            mxmp.convert(net, "bfloat16")

        def loss(out, y, read=read):
            read.append(net.sizes.shape)
            return gluon.loss.L2Loss()(out["scores"].sum(axis=1, keepdims=True), y) + net.sizes.mean()

        found = audit(net, loss, (x, y), policy=policy)
        assert len(read) == found.replays
        assert set(read) == {(8,)}
        assert (net.sizes, net.calls) == (None, 0)


def test_a_net_whose_python_code_reads_what_its_graphs_leave_is_audited():
    net = Whole()
    net.initialize()
    mxmp.convert(net, "bfloat16")
    assert audit(net, None, binary()[0]).candidates == 2
    assert net.inner.sizes is None


def test_without_a_loss_the_outputs_of_inference_are_compared():
    net, (x, _) = saturating(), binary()
    found = audit(net, None, x)
    assert found.total.loss is None
    assert found.total.gradient is None


def module_of(policy, for_training=True):
    data, label = S.var("data"), S.var("label")
    hidden = S.FullyConnected(data, num_hidden=16, name="hidden")
    p = S.sigmoid(S.FullyConnected(hidden, num_hidden=1, name="out") * 8, name="gate")
    loss = -(label * S.log(p + 1e-12) + (1 - label) * S.log(1 - p + 1e-12))
    module = mxmp.Module(S.make_loss(loss, name="loss"), ("data",), ("label",), policy=policy)
    module.bind([("data", (64, 8))], [("label", (64, 1))], for_training=for_training)
    mx.random.seed(3)
    module.init_params(mx.init.Xavier(magnitude=3))
    return module


def batch_of(rows=64):
    x, y = binary(rows)
    return mx.io.DataBatch([x], [y.reshape((-1, 1))])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_module_is_audited_and_cured(dtype):
    module = module_of(mxmp.Policy(dtype, low_ops=["sigmoid"]))
    module.init_optimizer(optimizer="sgd")
    weights = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
    found = audit(module, None, batch_of(), apply=True)
    assert found.findings[0].name == "gate"
    assert audit(module, None, batch_of()).is_healthy
    for name, array in module.get_params()[0].items():
        np.testing.assert_array_equal(array.asnumpy(), weights[name])


def test_the_command_audits_an_exported_network(tmp_path, capsys):
    module = module_of("float16")
    prefix = str(tmp_path / "net")
    module.save_checkpoint(prefix, 0)
    batch = batch_of()
    np.savez(tmp_path / "batch.npz", data=batch.data[0].asnumpy()[None], label=batch.label[0].asnumpy()[None])
    files = [f"{prefix}-symbol.json", f"{prefix}-0000.params", str(tmp_path / "batch.npz")]
    assert main(["audit", *files, "--policy", "bfloat16,low_ops=sigmoid"]) == 0
    shown = capsys.readouterr().out
    assert "gate (sigmoid)" in shown
    assert "cure: exclude=['gate']" in shown
    assert main(["audit", *files, "--policy", "bfloat16,low_ops=sigmoid,exclude=gate"]) == 0
    assert "nothing stands out" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_with_what_would():
    net, (x, y) = saturating(), binary()
    with pytest.raises(TypeError, match=r"audit\(net, loss_fn, \(x, y\)\)"):
        audit(net, BCE, x)
    with pytest.raises(ValueError, match="converted already"):
        audit(net, BCE, (x, y), policy="float16")
    with pytest.raises(ValueError, match="worst"):
        audit(net, BCE, (x, y), worst=0)
    with pytest.raises(TypeError, match="Block"):
        audit(3, BCE, (x, y))
    mxmp.restore(net)
    with pytest.raises(ValueError, match="not converted"):
        audit(net, BCE, (x, y))
    with pytest.raises(ValueError, match="apply=True"):
        audit(net, BCE, (x, y), policy="bfloat16", apply=True)
    with pytest.raises(ValueError, match="inf or NaN"):
        audit(net, BCE, (x * np.inf, y), policy="bfloat16")
