"""What a rule says of a node: its exceptions by attributes, and constants that float16 loses."""

from __future__ import annotations

import pytest

from mxmp.precision.rule import Kind, Rule, When
from mxmp.precision.rules import rule_of

# mx.nd.array looks for scipy.sparse.csr.
pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")


def test_attributes_choose_exceptions_and_an_absent_attribute_chooses_none():
    assert rule_of("Pooling").resolve({})[0] is Kind.FOLLOW
    assert rule_of("Pooling").resolve({"pool_type": "lp"})[0] is Kind.FULL
    assert rule_of("Activation").resolve({"act_type": "relu"})[0] is Kind.FOLLOW
    kind, reason = rule_of("Activation").resolve({"act_type": "softrelu"})
    assert kind is Kind.FULL
    assert "exp" in reason
    first = Rule(Kind.FOLLOW, "r", when=(When("a", ("1",), Kind.FULL, "x"), When("a", ("1",), Kind.LOW, "y")))
    assert first.resolve({"a": "1"}) == (Kind.FULL, "x")


@pytest.mark.parametrize("scalar", ["-1e18", "1e5", "1e39", "1e-5", "9e-8", "1e-12", "-65505"])
def test_constants_that_float16_loses_make_the_node_full_in_float16_only(scalar):
    rule = rule_of("_mul_scalar")
    kind, reason = rule.resolve({"scalar": scalar})
    assert kind is Kind.FULL
    assert scalar in reason
    assert rule.resolve({"scalar": scalar}, "bfloat16")[0] is Kind.FOLLOW


@pytest.mark.parametrize("scalar", ["0", "0.0", "-1", "65504", "1e-4", "0.1", "inf", "-inf", "None"])
def test_constants_that_float16_holds_leave_the_rule(scalar):
    assert rule_of("_mul_scalar").resolve({"scalar": scalar})[0] is Kind.FOLLOW
