"""The rule of an operator by its name."""

from __future__ import annotations

import re

import pytest

from mxmp.precision.rules import RULES, UnknownOperator, draws, rule_of

# mx.nd.array looks for scipy.sparse.csr.
pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")


def test_an_unknown_operator_is_an_error_that_names_it_and_the_fix():
    for expected in (KeyError, ValueError, UnknownOperator):
        with pytest.raises(expected, match=r"made_up.*full_ops.*low_ops"):
            rule_of("made_up")


DRAWS_NONE = re.compile("_pdf_|BilinearSampler|UpSampling")


def test_every_operator_that_is_named_after_random_numbers_draws_some():
    named = re.compile("random|sampl|shuffle|dropout|bernoulli|_npi_(normal|uniform|choice|gamma|multinomial)", re.I)
    found = [name for name in RULES if named.search(name) and not DRAWS_NONE.search(name)]
    assert len(found) > 40
    assert [name for name in found if not draws(name, {})] == []


@pytest.mark.parametrize(
    ("op", "attrs", "drawn"),
    [
        ("Dropout", {"p": "0"}, False),
        ("Dropout", {"p": "0.1"}, True),
        ("RNN", {}, False),
        ("RNN", {"p": "0.2"}, True),
        ("LeakyReLU", {"act_type": "leaky"}, False),
        ("LeakyReLU", {"act_type": "rrelu"}, True),
        ("_random_pdf_normal", {}, False),
        ("Convolution", {}, False),
        ("made_up_operator", {}, False),
    ],
)
def test_parameters_say_whether_an_operator_draws(op, attrs, drawn):
    assert draws(op, attrs) is drawn
