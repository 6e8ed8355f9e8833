"""A plan's file is read as it was written, or refused by name: whatever is read prints, is saved, hashed and used."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.oracle import S

import mxmp
from mxmp import Plan
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.tuned import Tuned

NESTED = "[" * 100_000 + "]" * 100_000
HUGE = 10**400


def symbol():
    x = S.relu(S.FullyConnected(S.var("data"), num_hidden=4, name="a"), name="r")
    return S.FullyConnected(x, num_hidden=3, name="b")


def plan():
    found = decide(Graph.from_symbol(symbol()), mxmp.Policy(exclude=["b"]), "cpu")
    one = {"float32": 1.0, "rules": 2.5}
    gains = {"float32": (1.0, 1.0, 1.0), "rules": (1.5, 2.0, 2.5)}
    return replace(found, tuned=Tuned("rules", True, one, gains, one, {"float32": 0, "rules": 1024}, ("a note",)))


RAW = json.loads(plan().to_json())


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
    assert found.differences(plan()) is not None
    try:
        mxmp.cast_symbol(symbol(), found)
    except ValueError as error:
        str(error).encode()


@pytest.mark.filterwarnings("ignore:exclude. no node or block matches")  # a plan may hold such a pattern
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(where=st.sampled_from(list(places(RAW))), value=JSON | st.just(MISSING))
@example(where=("tuned", "cast_bytes", "rules"), value=HUGE)
@example(where=("tuned", "steps", "rules"), value="1")
@example(where=("tuned", "gains", "rules"), value=[1, 2])
@example(where=("tuned", "notes"), value="note")
@example(where=("tuned", "steps"), value=[])
@example(where=("tuned", "training"), value=[])
@example(where=("low_variables",), value="abc")
@example(where=("low_variables",), value=[[]])
@example(where=("unmatched",), value=[1])
@example(where=("unmatched",), value=[""])
@example(where=("operators",), value={"abcd": 1})
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


@pytest.mark.parametrize("case", WRONG)
def test_what_no_plan_holds_is_refused_by_name(case, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed(*WRONG[case])))
    with pytest.raises(ValueError, match=r"plan\.json.*not a precision plan"):
        Plan.load(path)


@pytest.mark.parametrize("name", ["format", "policy", "device", "operators", "low_variables", "unmatched", "tuned"])
def test_deep_json_anywhere_is_refused_by_name(name, tmp_path):
    path = tmp_path / "plan.json"
    raw = json.dumps({**RAW, name: "HERE"})
    path.write_text(raw.replace('"HERE"', NESTED))
    with pytest.raises(ValueError, match=r"plan\.json.*not a precision plan"):
        Plan.load(path)


@pytest.mark.parametrize("data", [b"\xff\xfe{}", json.dumps(RAW).encode("utf-16"), b"\0" * 50, NESTED.encode()])
def test_a_file_in_another_encoding_is_refused_by_name(data, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"plan\.json.*not a precision plan|plan\.json"):
        Plan.load(path)


def test_a_tuned_plan_is_read_as_it_was_written(tmp_path):
    plan().save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan()
    assert str(again) == str(plan())
