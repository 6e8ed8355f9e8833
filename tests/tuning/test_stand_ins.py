"""Operators that only this process knows: stand-ins are timed, and they stay FP32."""

from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import pytest
from kit.measuring import (
    add_to_start,
    named,
    no_child_is_left,  # noqa: F401
    tuned_apart,
)
from kit.oracle import S
from mxnet.gluon import nn

import mxmp
from mxmp.precision.plan import Decision
from mxmp.precision.rules import RULES
from mxmp.tuning import process
from mxmp.tuning.job import job_of

pytestmark = pytest.mark.slow


class Twice(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], 2 * in_data[0])
        self.assign(out_data[1], req[1], in_data[1].sum().reshape((1,)))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * out_grad[0])
        self.assign(in_grad[1], req[1], mx.nd.zeros_like(in_data[1]))


@mx.operator.register("tuned_twice")
class TwiceProp(mx.operator.CustomOpProp):
    """Two outputs; a parameter whose shape nothing else tells."""

    def __init__(self, **hidden):
        """``hidden``: in the body of a loop, MXNet hands over an attribute of its own."""
        super().__init__()

    def list_arguments(self):
        return ["data", "scale"]

    def list_outputs(self):
        return ["doubled", "total"]

    def infer_shape(self, in_shape):
        return [in_shape[0], [7, 2]], [in_shape[0], [1]], []

    def create_operator(self, ctx, shapes, dtypes):
        return Twice()


class WithCustom(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first, self.last = nn.Dense(8, activation="relu"), nn.Dense(3)
            self.scale = self.params.get("scale", shape=(7, 2))

    def hybrid_forward(self, F, x, scale):  # noqa: N803
        doubled, total = F.Custom(self.first(x), scale, op_type="tuned_twice", name="twice")
        return self.last(doubled), F.broadcast_add(doubled, F.expand_dims(total, axis=0))


@pytest.mark.parametrize("training", [True, False])
def test_a_custom_operator_is_fp32_and_timed_as_a_stand_in(training):
    net = WithCustom()
    net.initialize()
    plan = mxmp.tune(net, (2, 6), cache=False, training=training, progress=False)
    assert not plan.decisions["net_twice"].low
    assert "only your process can run tuned_twice 'net_twice': it computes in FP32, and was timed as a stand-in" in str(
        plan
    )
    assert "fails" not in str(plan)
    assert {"float32", "rules"} <= set(plan.tuned.steps)
    out, total = mxmp.convert(net, plan)(mx.nd.ones((2, 6)))
    assert (out.shape, total.shape) == ((2, 3), (2, 8))


def test_a_custom_head_is_tuned_and_one_in_a_loop_is_refused():
    fc = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    head = S.Custom(fc, S.var("scale"), op_type="tuned_twice", name="twice")
    assert tuned_apart(head).tuned.steps

    def body(x, state):
        out = S.Custom(x + state, S.var("scale"), op_type="tuned_twice", name="inner")[0]
        return out, [out]

    loop, _ = S.contrib.foreach(lambda x, s: body(x, s[0]), fc, [S.var("state")], name="loop_")
    with pytest.raises(ValueError, match=r"tuned_twice 'inner' in the body of a loop.*measure=False"):
        tuned_apart(loop, state=(4,))


@pytest.mark.parametrize(
    "join",
    [
        lambda x: S.add_n(*S.SliceChannel(x, num_outputs=2)),
        lambda x: S.L2Normalization(x),
        lambda x: S.SwapAxis(x, dim1=0, dim2=1),
        lambda x: S.SequenceReverse(x),
        lambda x: S.reshape(
            S.Pad(S.reshape(x, (1, 1, -1, 8)), mode="edge", pad_width=(0, 0, 0, 0, 0, 0, 1, 1)), (2, 10)
        ),
    ],
    ids=["SliceChannel", "L2Normalization", "SwapAxis", "SequenceReverse", "Pad"],
)
def test_an_operator_whose_backward_mxnet_monitors_without_end_is_tuned(join, monkeypatch):
    """Of the inputs of its backward MXNet's monitor makes names until memory ends: here at 8 GiB."""
    add_to_start(monkeypatch, "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))")
    x = S.FullyConnected(S.var("data"), num_hidden=8, name="a")
    plan = tuned_apart(S.FullyConnected(join(x), num_hidden=3, name="b"))
    assert {"float32", "rules"} <= set(plan.tuned.steps)


@pytest.mark.parametrize(
    "policy",
    [mxmp.Policy("bfloat16", full_ops=("my_relu",)), mxmp.Policy("float16", low_ops=("my_relu",))],
    ids=["full_ops", "low_ops"],
)
def test_an_operator_of_a_library_is_fp32_and_timed_as_a_stand_in(policy, monkeypatch):
    """To compile a library takes MXNet's source, so the other process gets the name of an operator that it lacks."""
    monkeypatch.delitem(RULES, "relu")
    job = job_of(named(), (), {"data": (2, 6)}, policy, mx.cpu(), True, True)
    job = replace(job, symbol=job.symbol.replace('"op": "relu"', '"op": "my_relu"'))
    plan, _ = process.measured_apart(job, lambda part: None)
    assert plan.decisions["r"] == Decision("my_relu", False, plan.decisions["r"].reason)
    assert "could not be timed" in plan.decisions["r"].reason
    assert {"float32", "rules"} <= set(plan.tuned.steps)
    assert plan.policy == policy
