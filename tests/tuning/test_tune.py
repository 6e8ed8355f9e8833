"""``tune`` from end to end on small networks: what it gives, what it leaves alone, and who takes it."""

from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest
from kit.measuring import SHAPE, a_net, data, two
from kit.oracle import S, by_gluon, sqnr
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Plan
from mxmp.tuning.search import CONVERTED, FULL

pytestmark = pytest.mark.usefixtures("in_this_process")


def low_by_hand(plan: Plan, **low: bool) -> Plan:
    """The plan with other decisions."""
    decisions = {n: d.__class__(d.op, low.get(n, d.low), d.reason) for n, d in plan.decisions.items()}
    return Plan(plan.policy, plan.device, decisions, plan.low_variables, (), plan.tuned)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Measured in a process of its own."""
    return mxmp.tune(a_net(), SHAPE, cache=tmp_path_factory.mktemp("cache"))


# -- What it gives ----------------------------------------------------------------------------------


def test_a_plan_says_what_was_compared_and_prints(tuned):
    found = tuned.tuned
    assert found.training
    assert {"float32", "rules", "fewest bytes cast", "least time"} <= set(found.cast_bytes)
    assert found.cast_bytes["fewest bytes cast"] <= found.cast_bytes["rules"]
    assert {FULL, CONVERTED} <= set(found.steps) == set(found.gains)
    assert found.gains[FULL] == (1, 1, 1)
    assert all(seconds > 0 for seconds in found.steps.values())
    text = str(tuned)
    assert f"{tuned.num_low} of {len(tuned.decisions)} operators" in text
    assert f"* {found.chosen}" in text


def test_a_plan_for_another_optimizer_says_so(tmp_path):
    net = gluon.nn.Dense(4, in_units=8)
    assert "steps update the weights by adam" in str(mxmp.tune(net, (2, 8), optimizer="Adam", cache=tmp_path))
    assert "update the weights by" not in str(mxmp.tune(net, (2, 8), cache=tmp_path))
    assert "update the weights by" not in str(mxmp.tune(net, (2, 8), optimizer="adam", training=False, cache=tmp_path))


def test_an_optimizer_that_the_measuring_process_lacks_is_refused():
    net = gluon.nn.Dense(4, in_units=8)
    with pytest.raises(ValueError, match="Cannot find optimizer adamm; did you mean"):
        mxmp.tune(net, (2, 8), optimizer="adamm")
    with pytest.raises(TypeError, match="optimizer must be a name, such as 'adam', got Adam"):
        mxmp.tune(net, (2, 8), optimizer=mx.optimizer.Adam())

    class OfTheScript(mx.optimizer.SGD):
        pass

    mx.optimizer.Optimizer.register(OfTheScript)
    try:
        with pytest.raises(ValueError, match=r"'ofthescript' is an optimizer of .*test_tune, which the process that"):
            mxmp.tune(net, (2, 8), optimizer="ofthescript")
    finally:
        del mx.optimizer.Optimizer.opt_registry["ofthescript"]


def test_without_measuring_the_matrix_operators_are_low_and_nothing_is_timed():
    plan = mxmp.tune(a_net(), SHAPE, measure=False)
    low = {d.op for d in plan.decisions.values() if d.low}
    assert {"Convolution", "FullyConnected"} <= low
    assert plan.tuned.chosen == "fewest bytes cast"
    assert not plan.tuned.steps
    assert "MiB cast" in str(plan)


def test_a_plan_of_float16_on_a_cpu_says_that_the_emulation_was_timed(tmp_path, caplog):
    net = gluon.nn.Dense(4, in_units=8)
    plan = mxmp.tune(net, (2, 8), policy="float16", cache=tmp_path)
    said = "float16 is emulated on a CPU: these are times of its emulation, and say nothing about a GPU"
    assert said in str(plan)
    assert said in caplog.text
    caplog.clear()
    assert said not in str(mxmp.tune(net, (2, 8), policy="float16", measure=False))
    assert said not in caplog.text


def test_a_converted_net_and_a_numpy_net_are_tuned():
    plan = mxmp.tune(a_net(), SHAPE, measure=False)
    assert mxmp.tune(mxmp.convert(a_net(), "float16"), data(), measure=False) == plan
    mx.npx.set_np()
    try:
        net = nn.Dense(3, prefix="np_")
        net.initialize()
        plan = mxmp.tune(net, (2, 6), cache=False)
        assert mxmp.tune(net, mx.np.ones((2, 6)), cache=False).decisions.keys() == plan.decisions.keys()
        assert mxmp.convert(net, plan)(mx.np.ones((2, 6))).shape == (2, 3)
    finally:
        mx.npx.reset_np()


class WithScalar(gluon.HybridBlock):
    """``mx.np``: a mean of shape ``()``, and a number."""

    def __init__(self):
        super().__init__(prefix="scalar_")
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, x):  # noqa: N803
        y = self.dense(x)
        return y - F.np.mean(y) + 1.5


def test_a_numpy_net_with_a_scalar_operand_is_tuned():
    mx.npx.set_np()
    try:
        net = WithScalar()
        net.initialize()
        plan = mxmp.tune(net, (2, 6), cache=False)
        assert FULL in plan.tuned.steps
        assert len(plan.tuned.steps) > 1
        x = mx.np.random.normal(size=(2, 6))
        expected = net(x).asnumpy()
        found = mxmp.convert(net, plan)(x).asnumpy()
    finally:
        mx.npx.reset_np()
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


def test_where_nothing_may_be_low_nothing_is_timed():
    plan = mxmp.tune(two(), data=(2, 6), exclude=["a", "b"], cache=False)
    assert plan.num_low == 0
    assert not plan.tuned.steps
    assert "nothing may compute low" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_network_whose_output_a_workaround_makes_is_tuned(training):
    body = S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=8, name="conv")
    regions = S.contrib.ROIAlign(body, S.var("rois"), pooled_size=(2, 2), spatial_scale=1.0, name="regions")
    shapes = {"data": (2, 3, 16, 16), "rois": (4, 5)}
    plan = mxmp.tune(regions, policy="bfloat16", training=training, cache=False, **shapes)
    assert plan.tuned.steps
    assert {"conv", "regions"} <= plan.decisions.keys()


def test_control_flow_is_tuned_around_its_bodies():
    def body(x, state):
        out = S.FullyConnected(x, num_hidden=4, name="fc") + state
        return out, [out]

    out, _ = S.contrib.foreach(lambda x, s: body(x, s[0]), S.var("data"), [S.var("state")], name="loop_")
    loop = next(n["name"] for n in json.loads(out.tojson())["nodes"] if n["op"] == "_foreach")  # MXNet counts loops
    plan = mxmp.tune(out, data=(3, 2, 4), state=(2, 4), cache=False)
    assert [name for name, d in plan.decisions.items() if d.op == "FullyConnected"] == [f"{loop}/fc"]


# -- What it leaves alone ---------------------------------------------------------------------------


def test_the_net_stays_as_it_is_its_shapes_unknown():
    net = a_net()
    mxmp.tune(net, SHAPE, cache=False)
    assert net.first.weight.shape == (8, 0, 3, 3)
    assert "forward" not in vars(net)
    assert net._cached_graph == ()


def test_gradients_and_running_statistics_stay():
    net = a_net(shaped=True)
    with autograd.record():
        net(data()).sum().backward()
    mx.nd.waitall()  # MXNet 1.7.0 lets a read of running statistics overtake their write
    before = {p.name: p.data().asnumpy() for p in net.collect_params().values()}
    grads = {p.name: p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"}
    mxmp.tune(net, data(), cache=False)
    for p in net.collect_params().values():
        np.testing.assert_array_equal(p.data().asnumpy(), before[p.name])
        if p.name in grads:
            np.testing.assert_array_equal(p.grad().asnumpy(), grads[p.name])


# -- Who takes it -----------------------------------------------------------------------------------


def test_a_converted_net_computes_what_the_plan_says(tuned):
    want = by_gluon(a_net(), [data().asnumpy()])
    plan = low_by_hand(tuned, net_conv0_fwd=True, net_conv1_fwd=False, net_dense0_fwd=True)
    net = mxmp.convert(a_net(), plan)
    got = by_gluon(net, [data().asnumpy()])
    assert 30 < sqnr(want.outputs[0], got.outputs[0]) < 90
    (report,) = (g for g in mxmp.explain(net).graphs if g.training)
    assert {n.name for n in report.nodes if n.dtype == "bfloat16"} == {n for n, d in plan.decisions.items() if d.low}


def test_evaluation_follows_the_plan_where_it_has_the_same_operators(tuned):
    plan = low_by_hand(tuned, net_conv0_fwd=True, net_conv1_fwd=False)
    net = mxmp.convert(a_net(), plan)
    net(data())
    with autograd.record():
        net(data())
    for graph in mxmp.explain(net).graphs:
        dtypes = {n.name: n.dtype for n in graph.nodes}
        assert (dtypes["net_conv0_fwd"], dtypes["net_conv1_fwd"]) == ("bfloat16", "float32")
    assert {len(g.nodes) for g in mxmp.explain(net).graphs} == {len(plan.decisions), len(plan.decisions) + 1}
    assert mxmp.convert(net, plan) is net
    assert len(mxmp.explain(net).graphs) == 2  # converted so already


def test_a_plan_that_does_not_say_its_mode_is_of_the_first_graph(tuned):
    plan = Plan(tuned.policy, tuned.device, low_by_hand(tuned, net_conv0_fwd=True).decisions)
    net = mxmp.convert(a_net(), plan)
    with autograd.record():
        net(data())
    net(data())
    assert len(mxmp.explain(net).graphs) == 2
    with pytest.raises(ValueError, match="the plan is of another graph"):
        mxmp.convert(a_net(), plan)(data())


def test_a_plan_in_which_all_is_fp32_has_the_bits_of_fp32_and_no_warning(tuned):
    full = low_by_hand(tuned, **dict.fromkeys(tuned.decisions, False))
    want, got = (by_gluon(net, [data().asnumpy()]) for net in (a_net(True), mxmp.convert(a_net(True), full)))
    np.testing.assert_array_equal(got.outputs[0], want.outputs[0])
    symbol = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    plan = mxmp.tune(symbol, data=(2, 6), cache=False)
    mxmp.cast_symbol(symbol, low_by_hand(plan, fc=False))


def test_the_plan_of_another_net_is_refused_at_the_first_call(tuned):
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(3, prefix="net_dense0_"))
    net.initialize()
    mxmp.convert(net, tuned)
    with pytest.raises(ValueError, match="the plan is of another graph"), autograd.record():
        net(mx.nd.ones((2, 4)))
    other = nn.Dense(3, prefix="other_")
    other.initialize()
    with pytest.raises(ValueError, match="the plan is of another graph"):
        mxmp.convert(other, tuned)(mx.nd.ones((2, 4)))


def test_patterns_beside_a_plan_and_a_plan_for_a_gpu_are_refused(tuned):
    with pytest.raises(ValueError, match="make the Plan with it"):
        mxmp.convert(a_net(), tuned, exclude=["*dense0"])
    with pytest.raises(ValueError, match="blocks that run as Python have none"):
        mxmp.convert(a_net(), tuned, exclude=lambda name, block: False)
    plan = Plan(mxmp.Policy("float16"), "gpu", tuned.decisions)
    with pytest.raises(ValueError, match="made for a gpu"):
        mxmp.convert(a_net(), plan)


def test_module_follows_a_plan_and_refuses_another_symbols():
    plan = low_by_hand(mxmp.tune(two(), data=(2, 6), measure=False), a=True, r=False, b=False)
    module = mxmp.Module(two(), policy=plan)
    module.bind([("data", (2, 6))], [("softmax_label", (2,))])
    assert {n for n, d in module.plan.decisions.items() if d.low} == {"a"}
    assert mxmp.Module(two(), policy=plan).policy == plan.policy
    wrong = mxmp.Module(S.FullyConnected(S.var("data"), num_hidden=2, name="a"), label_names=None, policy=plan)
    with pytest.raises(ValueError, match="the plan is of another graph"):
        wrong.bind([("data", (2, 6))])


def test_buckets_follow_the_plan_of_the_default_one():
    def generate(length):
        x, weight, bias = S.var("data"), S.var("weight"), S.var("bias")
        for step in range(length):
            x = S.FullyConnected(x, weight, bias, num_hidden=6, name=f"step{step}")
        return S.SoftmaxOutput(x, name="softmax"), ["data"], ["softmax_label"]

    plan = low_by_hand(mxmp.tune(generate(3)[0], data=(2, 6), measure=False), step0=True, step1=False, step2=True)
    module = mxmp.BucketingModule(generate, default_bucket_key=3, policy=plan)
    module.bind([("data", (2, 6))], [("softmax_label", (2,))])
    module.init_params()
    module.switch_bucket(2, [("data", (2, 6))], [("softmax_label", (2,))])
    low = {key: [n for n, d in each.plan.decisions.items() if d.low] for key, each in module.modules.items()}
    assert low == {3: ["step0", "step2"], 2: ["step0"]}


def test_explain_shows_a_plan():
    plan = mxmp.tune(two(), data=(2, 6), measure=False)
    (report,) = mxmp.explain(two(), policy=plan).graphs
    assert report.plan is plan


# -- Bad input --------------------------------------------------------------------------------------


def test_what_cannot_be_tuned_is_refused():
    with pytest.raises(TypeError, match="got int"):
        mxmp.tune(3)
    with pytest.raises(ValueError, match="name the inputs"):
        mxmp.tune(two(), (2, 6))
    with pytest.raises(ValueError, match="no input 'dta'"):
        mxmp.tune(two(), dta=(2, 6))
    with pytest.raises(ValueError, match="named inputs are for Symbols"):
        mxmp.tune(a_net(), data=SHAPE)
    with pytest.raises(ValueError, match="give a block its inputs"):
        mxmp.tune(a_net())
    with pytest.raises(ValueError, match="runs as Python"):
        mxmp.tune(nn.Sequential(prefix="s_"), SHAPE)
    if not mx.context.num_gpus():
        with pytest.raises(ValueError, match=r"gpu\(0\) is not here to measure on"):
            mxmp.tune(two(), data=(2, 6), policy="float16", ctx=mx.gpu())
        assert mxmp.tune(two(), data=(2, 6), policy="float16", ctx=mx.gpu(), measure=False).device == "gpu"
        assert mxmp.tune(a_net(), SHAPE, policy="float16", ctx=mx.gpu(), measure=False).device == "gpu"
    with pytest.raises(ValueError, match="shapes"):
        mxmp.tune(two(), softmax_label=(2,))
