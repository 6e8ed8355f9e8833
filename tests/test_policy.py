"""The policy: frozen, hashable, prints and parses, refuses what it cannot hold."""

from __future__ import annotations

import dataclasses

import mxnet as mx
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from mxnet import gluon

import mxmp
from mxmp import Policy
from mxmp.policy import as_policy

NAMES = st.lists(st.text(min_size=1, max_size=8), max_size=3)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    compute = draw(st.sampled_from(["float16", "bfloat16"]))
    params = draw(st.sampled_from([None, "float32"] + ["float16"] * (compute == "float16")))
    low, full = draw(NAMES), draw(NAMES)
    assume(not set(low) & set(full))
    return Policy(
        compute,
        params=params,
        norm=draw(st.sampled_from(["float32", "compute"])),
        output=draw(st.sampled_from(["float32", "compute"])),
        exclude=draw(NAMES),
        low_ops=low,
        full_ops=full,
    )


@example(
    Policy(
        params="float32",
        norm="compute",
        output="compute",
        exclude=["*head*", "a,b", "c;d", "e=f", "50%", " space "],
        low_ops=["exp"],
        full_ops=["Convolution", "dot"],
    )
)
@given(policies())
def test_every_policy_parses_back_from_its_string(policy):
    assert Policy.parse(str(policy)) == policy


@given(policies(), policies())
def test_policies_are_values(one, other):
    assert (one == other) == (str(one) == str(other))
    assert len({one, other, Policy.parse(str(one))}) == (1 if one == other else 2)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("float16", Policy()),
        (" bfloat16 ", Policy("bfloat16")),
        ("norm=compute", Policy(norm="compute")),
        ("params=None, compute=bfloat16,", Policy("bfloat16")),
        ("exclude=*head*;*stem*", Policy(exclude=("*head*", "*stem*"))),
        ("float16-fast", Policy(norm="compute")),
        ("bfloat16-safe", Policy("bfloat16", norm="float32")),
        ("float16-fast, exclude=*head*", Policy(norm="compute", exclude=("*head*",))),
        ("float16-fast,norm=float32", Policy(norm="float32")),
    ],
)
def test_strings_that_people_write_parse(text, policy):
    assert Policy.parse(text) == policy


def test_recipes_are_policies_with_a_name_that_print_as_a_table():
    recipes = Policy.recipes()
    assert list(recipes) == ["float16", "float16-fast", "bfloat16", "bfloat16-safe"]
    for name, policy in recipes.items():
        assert as_policy(name) == policy == Policy.parse(str(policy))
        assert f"{name} " in str(recipes)
        assert f" {policy} " in str(recipes)
    assert recipes["float16"] == Policy()
    assert str(recipes["float16-fast"]) == "compute=float16,norm=compute"
    assert str(recipes["bfloat16"]) == "compute=bfloat16"
    recipes["float16"] = None
    assert Policy.recipes()["float16"] == Policy()


def test_the_name_of_a_recipe_is_no_dtype_and_the_error_says_how_to_get_it():
    with pytest.raises(ValueError, match=r"compute='float16-fast'.*Policy\.parse\('float16-fast'\)"):
        Policy("float16-fast")


@pytest.mark.parametrize("door", [mxmp.convert, mxmp.cast_symbol, mxmp.Module, mxmp.explain])
def test_every_door_takes_a_recipe_and_lists_them_where_it_knows_none(door):
    x = mx.sym.Variable("x", dtype="float32")
    symbol = mx.sym.FullyConnected(mx.sym.BatchNorm(mx.sym.FullyConnected(x, num_hidden=4)), num_hidden=2)
    target = gluon.SymbolBlock(symbol, x) if door is mxmp.convert else symbol
    extra = {"data_names": ["x"], "label_names": None} if door is mxmp.Module else {}
    with pytest.raises(ValueError, match=r"'fp16' is no recipe; there are float16, float16-fast, bfloat16"):
        door(target, policy="fp16", **extra)
    found = door(target, policy="float16-fast", **extra)
    if door is mxmp.explain:
        assert {n.op: n.dtype for n in found.nodes}["BatchNorm"] == "float16"


def test_a_policy_is_frozen():
    policy = Policy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute = "bfloat16"
    names = ["a"]
    policy = Policy(exclude=names)
    names.append("b")
    assert policy.exclude == ("a",)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("compute", "float32", "float16.*bfloat16"),
        ("compute", "fp16", "float16.*bfloat16"),
        ("compute", None, "float16.*bfloat16"),
        ("compute", 16, "float16.*bfloat16"),
        ("compute", ["float16"], "float16.*bfloat16"),
        ("params", "bfloat16", "None.*float16.*float32"),
        ("norm", "float16", "float32.*compute"),
        ("output", "half", "float32.*compute"),
        ("exclude", "head", "list of strings"),
        ("exclude", 3, "list of strings"),
        ("exclude", ["a", None], "no name or pattern"),
        ("low_ops", ["", "a"], "no name or pattern"),
        ("full_ops", "exp", "list of strings"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=allowed) as caught:
        Policy(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value) or repr(value[0]) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "bfloat16", "params": "float16"}, "params='float16'.*compute='bfloat16'"),
        ({"low_ops": ["exp", "log"], "full_ops": ["log"]}, r"\['log'\].*low_ops.*full_ops"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Policy(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float8", "'float8' is no recipe.*float16-fast.*bfloat16.*compute.*exclude"),
        ("fast,norm=compute", "'fast' is no recipe.*float16-fast"),
        ("speed=high", "speed=high.*compute.*exclude"),
        ("norm=compute,norm=float32", "norm.*twice"),
        ("compute=float16,compute", "compute.*FIELD=VALUE"),
        ("", "'' is no recipe.*float16.*compute"),
        (" , ", "is no recipe"),
        (7, "string.*int"),
    ],
)
def test_strings_that_do_not_parse_say_why(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


def test_as_policy_takes_names_strings_and_policies_and_adds_patterns():
    assert as_policy("bfloat16") == Policy("bfloat16")
    assert as_policy("norm=compute", ["a"]) == Policy(norm="compute", exclude=["a"])
    policy = Policy(output="compute", exclude=["a", "b"], full_ops=["dot"])
    assert as_policy(policy) is policy
    assert as_policy(policy, ["b", "c"]) == dataclasses.replace(policy, exclude=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"float16-fast.*mxmp\.Policy.*None"):
        as_policy(None)
