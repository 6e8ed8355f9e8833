"""The rule of an operator by its name."""

from __future__ import annotations

import pytest

from mxmp.precision.rules import (
    UnknownOperator,
    rule_of,
)

# mx.nd.array looks for scipy.sparse.csr.
pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")


def test_an_unknown_operator_is_an_error_that_names_it_and_the_fix():
    for expected in (KeyError, ValueError, UnknownOperator):
        with pytest.raises(expected, match=r"made_up.*full_ops.*low_ops"):
            rule_of("made_up")
