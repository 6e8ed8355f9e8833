"""``tune`` from end to end on small networks: what it gives, what it leaves alone, and who takes it."""

from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, by_gluon, sqnr
from kit.processes import run_program
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp import Plan
from mxmp.precision.graph import Graph
from mxmp.precision.tuned import Tuned
from mxmp.tuning import clock, search
from mxmp.tuning.choices import Task, shapes_of
from mxmp.tuning.clock import Arrays, Cast, Timed
from mxmp.tuning.search import CONVERTED, FULL, fastest, without_waiting
from mxmp.tuning.table import Table

pytestmark = pytest.mark.usefixtures("in_this_process")


class Net(gluon.HybridBlock):
    """Convolutions, BatchNorm, ReLU6, a skip; operators that the code does not name; another answer in evaluation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Conv2D(8, 3, padding=1)
            self.norm = nn.BatchNorm()
            self.second = nn.Conv2D(8, 3, padding=1)
            self.dense = nn.Dense(5)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = F.clip(self.norm(self.first(x)), 0, 6)
        out = self.dense(F.relu(self.second(x) + x))
        return out if autograd.is_training() else F.softmax(out)


def a_net(shaped: bool = False) -> Net:
    mx.random.seed(3)
    net = Net(prefix="net_")
    net.initialize()
    if shaped:
        net(mx.nd.zeros((1, 3, 8, 8)))
    return net


SHAPE = (2, 3, 8, 8)


def data() -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(5).normal(0, 1, SHAPE))


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


def test_a_plan_is_read_as_it_was_written(tuned, tmp_path):
    tuned.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tuned
    assert str(again) == str(tuned)
    broken = json.loads(tuned.to_json())
    broken["tuned"]["more"] = 1
    with pytest.raises(ValueError, match="not a precision plan"):
        Plan.from_json(json.dumps(broken))


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


def test_a_symbol_is_tuned_by_named_shapes_or_arrays():
    fc = S.FullyConnected(S.var("data"), num_hidden=4, name="fc")
    symbol = S.SoftmaxOutput(S.FullyConnected(S.relu(fc), num_hidden=3, name="out"), name="softmax")
    plan = mxmp.tune(symbol, data=(2, 6), cache=False)
    assert set(mxmp.tune(symbol, data=mx.nd.ones((2, 6)), cache=False, training=False).decisions) == set(plan.decisions)
    assert mxmp.cast_symbol(symbol, plan).list_arguments() == symbol.list_arguments()


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


def two(hidden: int = 4) -> mx.sym.Symbol:
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=hidden, name="a"), name="r")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="b"), name="softmax")


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


# -- How it decides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ({FULL: [10, 10, 10, 10], "rules": [9, 9, 9, 9], "least time": [8, 8, 8, 8]}, "least time"),
        ({FULL: [10, 10, 10, 10], "rules": [11, 11, 11, 11]}, FULL),
        ({FULL: [10, 12, 10, 12], "rules": [11, 11, 11, 11]}, FULL),  # within the spread
        ({FULL: [10, 20, 10, 20], "rules": [9, 18, 9, 18]}, "rules"),  # one round's times belong together
        ({FULL: [10, 10, 10, 10], CONVERTED: [7, 7, 7, 7], "rules": [8, 8, 8, 8]}, CONVERTED),
        ({FULL: [7, 7, 7, 7], CONVERTED: [9, 9, 9, 9], "rules": [8, 8, 8, 8]}, FULL),
        ({FULL: [10, 10, 10, 10]}, FULL),
        ({FULL: [10, 10, 10, 10], "rules": [8, 9, 8, 8], "least time": [7, 9, 9, 7]}, "rules"),  # as fast
        ({FULL: [10, 10, 10, 10], "rules": [9, 11, 9, 11], "least time": [8, 9, 9, 9]}, "least time"),
    ],
)
def test_low_precision_must_win_in_three_of_four_rounds(times, want):
    assert fastest(times) == want


def test_what_waiting_costs_is_taken_off_each_operator_alike():
    found = without_waiting({"a": 10.0, "b": 4.0, "c": 1.0}, {"a": 1, "b": 2, "c": 1}, step=11.0)
    assert found == pytest.approx({"a": 9.0, "b": 2.0, "c": 0.0})
    assert without_waiting({"a": 1.0}, {"a": 1}, step=2.0) == {"a": 1.0}
    assert sum(without_waiting({"a": 9.0, "b": 0.1}, {"a": 1, "b": 5}, step=3.0).values()) == pytest.approx(3, rel=0.01)


def chain() -> tuple[Task, dict]:
    """Three matrix operators of different sizes with relus between them, and a softmax."""
    x = S.var("data")
    for number in range(3):
        x = S.relu(S.FullyConnected(x, num_hidden=4 + number, name=f"fc{number}"), name=f"relu{number}")
    graph = Graph.from_symbol(S.softmax(x, name="softmax"))
    return Task(graph, mxmp.Policy("bfloat16"), "cpu"), shapes_of(graph, {"data": (2, 3)})


def profile_of(task: Task, low: frozenset, costs: dict) -> dict:
    """A made-up machine, on which a relu in FP32 beside a cast takes 5 more."""
    casts = [Cast(*cast) for cast in task.choice.casts(low)]
    beside = {cast.entry.node for cast in casts if cast.to_fp32}
    found = {cast: 1.0 + cast.to_fp32 for cast in casts}
    for node, name in task.names.items():
        if not node.is_variable:
            found[node] = costs[name][node in low]
            if node.op == "relu" and node not in low and any(e.node in beside for e in node.inputs):
                found[node] += 5
    return found


COSTS = {
    "fc0": (9, 1),
    "fc1": (9, 30),
    "fc2": (40, 1),
    "relu0": (2, 1),
    "relu1": (2, 1),
    "relu2": (2, 3),
    "softmax": (4, 4),
}


def test_predictions_of_profiled_plans_are_what_was_measured():
    task, shapes = chain()
    table = Table(task, shapes, True, {})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        assert not table.knows(low)
        table.learn(low, profile_of(task, low, COSTS))
        assert table.knows(low)
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        assert table.predict(low) == pytest.approx(sum(profile_of(task, low, COSTS).values()))


def test_the_cut_of_a_table_avoids_what_is_slow_low_and_layouts_that_cost():
    task, shapes = chain()
    table = Table(task, shapes, True, {})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        table.learn(low, profile_of(task, low, COSTS))
    best = search.cheapest(task.choice, table.costs())
    assert {task.names[node] for node in best} & {"fc0", "fc1", "fc2"} == {"fc0", "fc2"}
    profiled = (frozenset(), task.may_be_low, task.matrix_operators)
    assert table.predict(best) <= min(map(table.predict, profiled))


def test_times_of_earlier_runs_are_used(tmp_path):
    first = mxmp.tune(two(), data=(2, 6), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert kept["machine"]["mxnet"] == mx.__version__
    slow = {key: 1e3 if key.endswith("bfloat16") else value for key, value in kept["seconds"].items()}
    file.write_text(json.dumps({**kept, "seconds": slow}))
    plan = mxmp.tune(two(), data=(2, 6), cache=tmp_path)
    assert plan.tuned.cast_bytes["least time"] == 0
    assert set(plan.decisions) == set(first.decisions)


@pytest.mark.parametrize("low_fails", [True, False], ids=["low precision", "FP32 with workarounds"])
def test_where_one_kind_of_plan_fails_the_other_is_still_compared_and_the_plan_says_so(low_fails, monkeypatch):
    timed = search.PlanSearch._timed

    def failing(self, low):
        if bool(low) == low_fails:
            raise mx.MXNetError("MXNetError: no such kernel")
        return timed(self, low)

    monkeypatch.setattr(search.PlanSearch, "_timed", failing)
    plan = mxmp.tune(mx.sym.clip(two(), 0, 6), data=(2, 6), cache=False)
    failed = "bfloat16" if low_fails else "float32, converted"
    assert f"{failed} fails here (MXNetError: no such kernel)" in str(plan)
    if low_fails:
        assert plan.num_low == 0
        assert "FP32: no plan in bfloat16 was faster" in str(plan)
        assert plan.decisions["a"].reason == "bfloat16 could not be timed here"
    else:
        assert {"float32", "rules"} <= set(plan.tuned.gains)


def test_a_candidate_that_fails_in_a_later_round_is_left_out_and_named(monkeypatch):
    def failing(self, *args):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 1 and compared and any(isinstance(owner, Cast) for owner in self._owners):
            raise mx.MXNetError("MXNetError: out of memory")
        return step(self)

    compared = []
    compare = search.PlanSearch._compare_steps
    step = Timed.step
    monkeypatch.setattr(Timed, "step", failing)
    monkeypatch.setattr(search.PlanSearch, "_compare_steps", lambda self: compared.append(1) or compare(self))
    plan = mxmp.tune(two(), data=(2, 6), cache=False)
    assert "rules fails here (MXNetError: out of memory)" in str(plan)
    assert "rules" not in plan.tuned.steps
    assert FULL in plan.tuned.steps
    assert plan.num_low == 0


CAPPED = """
import mxnet as mx, mxmp
from mxnet.gluon import nn
net = nn.Conv2D(16, 3, prefix="c_")
net.initialize()
plan = mxmp.tune(net, (2, 3, 16, 16), cache=False)
assert plan.num_low == 0, plan
print(plan)
"""


@pytest.mark.slow
def test_without_an_instruction_set_for_bfloat16_the_plan_is_fp32_and_says_so():
    """oneDNN reads what it may use when it is first called: in a process of its own."""
    printed = run_program("-c", CAPPED, DNNL_MAX_CPU_ISA="AVX2", MXMP_WITHOUT="emulated_bfloat16")
    assert "bfloat16 fails here" in printed
    assert "FP32: no plan in bfloat16 was faster" in printed


def test_every_operator_and_cast_of_a_plan_is_timed():
    net = a_net(shaped=True)
    graph = Graph.from_symbol(net(mx.sym.var("data")))
    task = Task(graph, mxmp.Policy("bfloat16"), "cpu")
    names = [n for n in graph.to_symbol().list_arguments() if n != "data"]
    arrays = Arrays(graph, mx.cpu(), dict.fromkeys(names, "write"), {}, {"data": SHAPE})
    for low in (frozenset(), task.may_be_low, task.matrix_operators):
        found = Timed(graph, task.plan(low, {}), arrays, True).profile()
        assert {owner for owner in found if not isinstance(owner, Cast)} == {n for n in task.names if not n.is_variable}
        assert {tuple(owner) for owner in found if isinstance(owner, Cast)} == set(task.choice.casts(low))
        assert all(seconds > 0 for seconds in found.values())


@pytest.mark.parametrize(("size", "large"), [(8, True), (2, False)])
def test_a_block_is_timed_without_what_its_sizes_do_not_need_and_a_symbol_with_it(size, large, monkeypatch):
    made = []

    def arrays(*args):
        made.append(Arrays(*args))
        return made[-1]

    monkeypatch.setattr(clock, "Arrays", arrays)
    net = nn.Conv2D(8, 5, padding=2, in_channels=4)
    net.initialize()
    shape = (2, 4, size, size)
    mxmp.tune(net, shape, cache=False)
    mxmp.tune(net(mx.sym.var("data")), data=shape, cache=False)
    assert [each.large_inputs for each in made] == [large, False]
    graph = Graph.from_symbol(net(mx.sym.var("data")))
    task = Task(graph, mxmp.Policy("bfloat16"), "cpu")
    emitted = [sum(Timed(graph, task.plan(task.may_be_low, {}), each, True).operators.values()) for each in made]
    assert (emitted[0] < emitted[1]) == large


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


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "igraph", None)
    with pytest.raises(ImportError, match=r"pip install 'mxmp\[tune\]'"):
        mxmp.tune(two(), data=(2, 6), measure=False)


def test_what_was_compared_prints_as_a_table():
    found = Tuned(
        "rules", True, {"float32": 0.02, "rules": 0.01}, {"rules": (1.9, 2.0, 2.1)}, {"rules": 2.2}, {}, ("note",)
    )
    assert str(found).splitlines() == [
        "           forward and backward, ms  times as fast as FP32  predicted",
        "  float32  20.0",
        "* rules    10.0                      2.00 (1.90 to 2.10)    2.20",
        "  note",
    ]
