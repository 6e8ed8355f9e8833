"""Plans: by node name, saved and read, the same graph in another process, refused for another graph."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.graphs import graphs
from kit.oracle import S
from kit.plans import tuned_plan, two_layers

import mxmp
from mxmp import Plan, Policy
from mxmp.pipeline import low_graph
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.plan import Decision
from mxmp.precision.renaming import renamed

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


def test_equal_plans_have_equal_hashes_whatever_the_order_of_their_decisions():
    graph = Graph.from_symbol(S.relu(S.FullyConnected(S.var("data"), num_hidden=2, name="fc"), name="act"))
    plan = decide(graph, mxmp.Policy("float16"), "gpu")
    other = replace(plan, decisions=dict(reversed(list(plan.decisions.items()))))
    assert plan == other
    assert hash(plan) == hash(other)


NESTED = "[" * 100_000 + "]" * 100_000


HUGE = 10**400


RAW = json.loads(tuned_plan().to_json())


def places(value, path=()):
    """The path of everything in nested JSON, keys of the outermost object and ``tuned`` included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(path, value):
    raw = copy.deepcopy(RAW)
    if not path:
        return value
    where = raw
    for key in path[:-1]:
        where = where[key]
    if value is MISSING:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return raw


MISSING = object()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())  # surrogates too
    | st.sampled_from([HUGE, -HUGE, 1e308, "cpu", "gpu", "float16", "float32", "bfloat16", "a", "b", "rules"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)


def check(path, text):
    """Either refused by name, or as good as any other plan."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    found, refused = None, ""
    try:
        found = Plan.load(path)
    except ValueError as error:
        refused = str(error)
    if found is None:
        assert str(path) in refused
        return
    str(found).encode()
    found.save(path)
    assert Plan.load(path) == found
    assert isinstance(hash(found), int)
    assert found.differences(tuned_plan()) is not None
    try:
        mxmp.cast_symbol(two_layers(), found)
    except ValueError as error:
        str(error).encode()


@pytest.mark.filterwarnings("ignore:exclude. no node or block matches")  # a plan may hold such a pattern
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(where=st.sampled_from(list(places(RAW))), value=JSON | st.just(MISSING))
@example(where=("tuned", "training"), value=[])
@example(where=("low_variables",), value=[[]])
@example(where=("unmatched",), value=[1])
@example(where=("unmatched",), value=[""])
@example(where=("operators", 0, 3), value="\ud800")
@example(where=("policy",), value="compute=float16,exclude=\ud800")
def test_a_file_with_something_else_in_it_is_refused_or_is_a_plan(where, value, tmp_path_factory):
    if where == () and value is MISSING:
        return
    for ascii_only in (True, False):
        check(tmp_path_factory.getbasetemp() / "plan.json", json.dumps(changed(where, value), ensure_ascii=ascii_only))


WRONG = {
    "the notes are a text": (("tuned", "notes"), "note"),
    "a note is a number": (("tuned", "notes"), [1]),
    "no notes": (("tuned", "notes"), MISSING),
    "no steps": (("tuned", "steps"), MISSING),
    "no cast bytes": (("tuned", "cast_bytes"), MISSING),
    "steps are a list": (("tuned", "steps"), []),
    "a step is a text": (("tuned", "steps", "rules"), "1"),
    "a step is NaN": (("tuned", "steps", "rules"), float("nan")),
    "a step is infinite": (("tuned", "steps", "rules"), float("inf")),
    "two quartiles": (("tuned", "gains", "rules"), [1, 2]),
    "four quartiles": (("tuned", "gains", "rules"), [1, 2, 3, 4]),
    "quartiles in a text": (("tuned", "gains", "rules"), "123"),
    "a quartile is null": (("tuned", "gains", "rules"), [1, None, 2]),
    "bytes beyond any": (("tuned", "cast_bytes", "rules"), HUGE),
    "bytes are true": (("tuned", "cast_bytes", "rules"), True),
    "the choice is a number": (("tuned", "chosen"), 1),
    "training is a text": (("tuned", "training"), "yes"),
    "tuned has more": (("tuned", "more"), 1),
    "tuned is null": (("tuned",), None),
    "tuned is a list": (("tuned",), []),
    "variables are a text": (("low_variables",), "abc"),
    "variables are an object": (("low_variables",), {"a": 1}),
    "a variable is a number": (("low_variables",), [1]),
    "unmatched is a text": (("unmatched",), "abc"),
    "unmatched is a list of lists": (("unmatched",), [[]]),
    "an operator is a text": (("operators", 0), "abcd"),
    "a name is a number": (("operators", 0, 0), 3),
    "a reason is null": (("operators", 0, 3), None),
    "a reason is half a character": (("operators", 0, 3), "\ud800"),
    "the policy is half a character": (("policy",), "compute=float16,exclude=\ud800"),
    "operators are an object": (("operators",), {"abcd": 1}),
}


DAMAGED = {
    **{f"text {text!r}": text for text in ("", "{}", "[]", "null")},
    "cut": GOOD[:-9],
    "another format": GOOD.replace("mxmp-plan-1", "mxmp-plan-9"),
    "another policy": GOOD.replace("compute=float16", "compute=float8"),
    "another dtype": GOOD.replace('"float32"', '"float64"'),
    "another device": GOOD.replace('"cpu"', '"tpu"'),
    "a name twice": GOOD.replace('"c2"', '"c1"'),
    **{name: json.dumps(changed(*case)) for name, case in WRONG.items()},
    **{
        f"deep {name}": json.dumps({**RAW, name: "HERE"}).replace('"HERE"', NESTED)
        for name in ("format", "policy", "device", "operators", "low_variables", "unmatched", "tuned")
    },
    "deep throughout": NESTED,
    "zeros": b"\0" * 50,
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_holds_no_plan_is_refused_by_name(case, tmp_path):
    path, content = tmp_path / "plan.json", DAMAGED[case]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"plan\.json.*not a precision plan"):
        Plan.load(path)


@pytest.mark.parametrize("data", [b"\xff\xfe{}", json.dumps(RAW).encode("utf-16")])
def test_a_file_in_another_encoding_is_refused_by_name(data, tmp_path):
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")
