"""Plans: by node name, saved and read, the same graph in another process, refused for another graph."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import pytest
from hypothesis import HealthCheck, given, settings
from kit.examples import examples
from kit.graphs import graphs
from kit.oracle import S

import mxmp
from mxmp import Plan, Policy
from mxmp.pipeline import low_graph
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision, renamed

POLICIES = [Policy(), Policy(params="float16", norm="compute"), Policy("bfloat16", exclude=["c2", "none"])]


def conv(x: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    return S.Convolution(x, kernel=(1, 1), num_filter=4, name=name, no_bias=True)


def small() -> mx.sym.Symbol:
    x = S.relu(S.BatchNorm(conv(S.var("data"), "c1"), name="bn"), name="r")
    return S.exp(conv(x, "c2"), name="e")


def plan_of(symbol: mx.sym.Symbol, policy: Policy | None = None) -> Plan:
    return decide(Graph.from_symbol(symbol), policy or Policy(), "cpu")


def text(symbol: mx.sym.Symbol) -> str:
    return symbol.tojson(remove_amp_cast=False)


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(graphs())
def test_a_plan_read_again_is_equal_and_gives_the_same_graph_byte_for_byte(drawn):
    graph = strip(Graph.from_symbol(drawn[0]))
    for policy in POLICIES:
        want, plan = low_graph(graph, policy, "cpu")
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert hash(again) == hash(plan)
        got, used = low_graph(graph, again, "cpu")
        assert used is again
        assert got.to_json() == want.to_json()


@pytest.mark.slow
def test_a_plan_of_another_process_gives_the_same_graph_byte_for_byte(tmp_path):
    symbol = small()
    symbol.save(str(tmp_path / "net.json"))
    program = (
        "import mxnet as mx, mxmp\n"
        "symbol = mx.sym.load('net.json')\n"
        "mxmp.explain(symbol, policy='compute=float16,norm=compute').graphs[0].plan.save('plan.json')\n"
        "low = mxmp.cast_symbol(symbol, 'compute=float16,norm=compute')\n"
        "open('low.json', 'w').write(low.tojson(remove_amp_cast=False))\n"
    )
    env = {"PYTHONPATH": str(Path(mxmp.__file__).parents[1]), "PATH": "/usr/bin", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, env=env, check=True)
    low = mxmp.cast_symbol(symbol, Plan.load(tmp_path / "plan.json"))
    assert text(low) == (tmp_path / "low.json").read_text()


def test_a_plan_of_which_two_operators_would_have_one_name_keeps_its_names():
    plan = plan_of(small())
    both = {"a_fc": plan.decisions["c1"], "b_fc": plan.decisions["c2"]}
    assert renamed(replace(plan, decisions=both, blocks=("a_",)), ("c_",)).decisions.keys() == {"c_fc", "b_fc"}
    assert renamed(replace(plan, decisions=both, blocks=("a_",)), ("b_",)).decisions == both


def test_the_file_is_for_people_one_operator_a_line(tmp_path):
    plan_of(small()).save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert ' "policy": "compute=float16",' in lines
    (line,) = [line for line in lines if '"bn"' in line]
    name, op, dtype, reason = json.loads(line.strip().rstrip(","))
    assert (name, op, dtype) == ("bn", "BatchNorm", "float32")
    assert reason


def test_nodes_that_share_a_name_have_decisions_of_their_own():
    x = S.relu(conv(S.var("data"), "c"), name="r")
    symbol = S.Group([x, S.relu(S.exp(x), name="r"), S.relu(x, name="r:1")])
    plan = plan_of(symbol)
    assert {name: d.low for name, d in plan.decisions.items() if d.op == "relu"} == {
        "r": True,
        "r:1": True,
        "r:2": False,
    }
    assert text(mxmp.cast_symbol(symbol, plan)) == text(mxmp.cast_symbol(symbol))


def test_a_changed_plan_is_what_runs():
    plan = plan_of(small())
    by_hand = {"c2": Decision("Convolution", False, "tried by hand")}
    changed = Plan(plan.policy, "cpu", {**plan.decisions, **by_hand})
    assert text(mxmp.cast_symbol(small(), changed)) == text(mxmp.cast_symbol(small(), exclude=["c2"]))
    assert plan.differences(changed) == {"c2": (plan.decisions["c2"], by_hand["c2"])}
    assert plan.differences(plan) == {}


def test_explain_shows_the_plan_that_runs_in_a_net():
    net = mx.gluon.nn.Dense(3, in_units=2)
    net.initialize()
    mxmp.convert(net)
    (report,) = mxmp.explain(net, mx.nd.ones((1, 2))).graphs
    assert [d.op for d in report.plan.decisions.values() if d.low] == ["FullyConnected"]
    assert report.plan is mxmp.explain(net).graphs[0].plan


def test_the_plan_of_another_graph_is_refused_by_what_differs():
    other = S.exp(conv(S.var("data"), "c1"), name="e")
    with pytest.raises(ValueError, match=r"of another graph.*5 operators, the graph 2.*only in the plan.*bn"):
        mxmp.cast_symbol(other, Plan(Policy(), "cpu", plan_of(small()).decisions))


def test_the_plan_of_another_device_and_patterns_beside_a_plan_are_refused():
    plan = plan_of(small())
    with pytest.raises(ValueError, match="made for a cpu"):
        mxmp.cast_symbol(small(), plan, ctx=mx.gpu())
    with pytest.raises(ValueError, match="exclude is part of the policy"):
        mxmp.cast_symbol(small(), plan, exclude=["c1"])


GOOD = plan_of(small()).to_json()


@pytest.mark.parametrize(
    "bad",
    [
        *("", "{}", "[]", "null", GOOD[:-9]),
        GOOD.replace("mxmp-plan-1", "mxmp-plan-9"),
        GOOD.replace("compute=float16", "compute=float8"),
        GOOD.replace('"float32"', '"float64"'),
        GOOD.replace('"cpu"', '"tpu"'),
        GOOD.replace('"c2"', '"c1"'),
    ],
)
def test_a_damaged_file_is_refused_by_name(bad, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(bad)
    with pytest.raises(ValueError, match=r"plan\.json.*not a precision plan"):
        Plan.load(path)


def test_equal_plans_have_equal_hashes_whatever_the_order_of_their_decisions():
    graph = Graph.from_symbol(S.relu(S.FullyConnected(S.var("data"), num_hidden=2, name="fc"), name="act"))
    plan = decide(graph, mxmp.Policy("float16"), "gpu")
    other = replace(plan, decisions=dict(reversed(list(plan.decisions.items()))))
    assert plan == other
    assert hash(plan) == hash(other)
