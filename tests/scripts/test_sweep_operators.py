"""The rules against what ``dev.py sweep operators`` measured: no operator is emitted where it was found at fault."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Container

import numpy as np
import pytest
from kit.registered import FORWARD
from pages import kernels as page
from support.operators import errors
from support.operators.case import CASES, DTYPES, Case, digest, emitted, is_allowed
from sweep.operators import run as sweep_operators
from sweep.operators.runner import Runner

from mxmp.pipeline import emitted as emitted_graph
from mxmp.policy import Policy
from mxmp.precision.decide import decide
from mxmp.precision.missing_kernels import TABLE

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")

RESULTS: dict[str, dict[str, dict[str, Any]]] = json.loads(sweep_operators.RESULTS.read_text(encoding="utf-8"))
KEYS = [(case, dtype) for op in CASES for case in CASES[op] for dtype in DTYPES if not is_allowed(case, dtype)]

# Emitted and at fault today: operator, dtype, what was found. Whoever mends one takes it out of here.
UNWRITTEN = "wrong gradient or uninitialised"
# As on a GPU: a rounding after each of five terms.
KNOWN: set[tuple[str, str, str]] = {("add_n", "float16", "inaccurate")}


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch):
    """The results are of a CPU with bfloat16 kernels, whose graphs need no emulation."""
    monkeypatch.setenv("MXMP_WITHOUT", "emulated_bfloat16")


def record(case: Case, dtype: str) -> dict[str, Any]:
    return RESULTS[case.op][f"{case.name} [{dtype}]"]


def faults(ops: Container[str] = CASES) -> set[tuple[str, str, str]]:
    """What would be emitted of ``ops`` and was found at fault."""
    found = set()
    for case, dtype in KEYS:
        verdict = record(case, dtype)["verdict"]
        if case.op in ops and verdict in page.FAULTS and emitted(case, dtype):
            # What unwritten memory holds is chance.
            found.add((case.op, dtype, UNWRITTEN if verdict in UNWRITTEN else verdict))
    return found


def test_every_registered_name_is_measured_or_listed_with_the_reason():
    left_out = page.not_measured()
    canonical = {FORWARD[name].canonical for name in FORWARD}
    assert set(CASES) <= canonical
    assert set(CASES) & set(left_out) == set()
    assert [name for name in canonical if name not in left_out and name not in CASES] == []
    assert all(len(why.split()) >= 3 for why in left_out.values())


def test_every_case_was_measured_on_the_graph_that_is_emitted_today():
    stale = sorted(
        {c.op for c, d in KEYS if RESULTS.get(c.op, {}).get(f"{c.name} [{d}]", {}).get("graph") != digest(c, d)}
    )
    assert not stale, f"run python scripts/dev.py sweep operators, which measures {stale} again"
    assert sum(map(len, RESULTS.values())) == len(KEYS)


def test_the_machine_code_of_a_gpu_was_computed_for_every_case_and_is_as_good_as_the_rules_say():
    computed = json.loads(page.COMPUTED.read_text(encoding="utf-8"))
    cases = [case for case, dtype in KEYS if dtype == "float16" and not case.empty]
    stale = sorted({c.op for c in cases if computed[c.op].get(c.name, {}).get("graph") != digest(c, "float16")})
    assert not stale, f"run bash scripts/simgpu.sh python scripts/dev.py sweep simulated, which computes {stale} again"
    far = {c.op for c in cases if computed[c.op][c.name]["verdict"] == "more" and emitted(c, "float16")}
    assert far == MORE_THAN_A_FEW_ROUNDINGS


def test_kernels_of_a_gpu_that_cannot_add_to_a_gradient_read_a_copy():
    computed = json.loads(page.COMPUTED.read_text(encoding="utf-8"))
    cases = [
        case for case, dtype in KEYS if dtype == "float16" and not case.empty and case.op not in ADDED_TO_OTHERWISE
    ]
    added = [computed[case.op][case.name].get("variants", {}).get("add", 0) for case in cases]
    cannot = [case for case, error in zip(cases, added) if error > errors.FEW]
    assert {case.op for case in cannot} >= {"Activation", "Pooling", "clip", "_npi_flip"}
    for case in cannot:
        graph = case.graph()
        plan = decide(graph, Policy("float16", exclude=("*",)), "gpu")
        assert "overwritten_gradients" in emitted_graph(graph, plan).workarounds, case.name


# fix_gamma makes gamma's gradient 0; shared_gradients is the workaround for sums.
ADDED_TO_OTHERWISE = {"BatchNorm", "elemwise_add"}

# Used on a GPU with errors of more than two units in the last place of the largest value, and why that is no fault.
MORE_THAN_A_FEW_ROUNDINGS = {
    # Gradients of rounded outputs, of three large numbers alone.
    *("Activation", "tanh", "_npi_tanh", "sigmoid", "_npx_sigmoid"),
    # Compensated float16 sums of 3,000 terms to one value, which is small beside them.
    *("_npi_add", "_npi_subtract", "broadcast_add", "broadcast_sub", "broadcast_minimum", "broadcast_axis", "repeat"),
    "Pooling",  # pooling_convention="full", where a window leaves the image: what the stub of cuDNN says
}


def test_verdicts_are_known_and_most_operators_can_be_measured():
    verdicts = [record(case, dtype)["verdict"] for case, dtype in KEYS]
    assert set(verdicts) <= {*page.FAULTS, *page.NOT_A_FAULT}
    never = {op for op in CASES if all(r["verdict"] == "unmeasurable" for r in RESULTS[op].values())}
    assert never <= {"_copyto"}


def test_no_operator_is_emitted_where_it_was_found_at_fault():
    assert faults() == KNOWN


def test_a_wrong_rule_is_found(monkeypatch):
    """Each operator whose kernel truncates, listed as if it held."""
    for op in ("elemwise_mul", "softsign", "_plus_scalar"):
        with monkeypatch.context() as wrong:
            rows = [
                replace(row, operators=row.operators - {op}) for row in TABLE["cpu", "bfloat16"] if not row.all_others
            ]
            others = [
                replace(row, operators=row.operators | {op}) for row in TABLE["cpu", "bfloat16"] if row.all_others
            ]
            wrong.setitem(TABLE, ("cpu", "bfloat16"), (*rows, *others))
            assert (op, "bfloat16", "biased") in faults([op])


def test_the_page_is_the_one_of_the_results():
    assert sweep_operators.PAGE.read_text(encoding="utf-8") == page.render(RESULTS)


# -- Measured here and now --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("op", ["sigmoid", "elemwise_mul", "_npi_true_divide_scalar", "FullyConnected"])
def test_a_fresh_measurement_says_what_the_results_say(runner, op):
    """``elemwise_mul`` truncates in bfloat16; ``_npi_true_divide_scalar`` fails there."""
    wanted = [(case.name, dtype) for case, dtype in KEYS if case.op == op and not case.empty][:4]
    for (name, dtype), found in runner.measured(op, wanted).items():
        verdicts = [r["verdict"] for r in (found, RESULTS[op][f"{name} [{dtype}]"])]
        assert verdicts[0] == verdicts[1] or all(v in UNWRITTEN for v in verdicts), (name, dtype, found)


def test_ulps_and_rounding_are_those_of_the_dtype():
    one = np.array([1.0, 1.5, -2.0], "float32")
    np.testing.assert_array_equal(errors.ulp(one, "bfloat16"), [2.0**-7, 2.0**-7, 2.0**-6])
    np.testing.assert_array_equal(errors.ulp(one, "float16"), [2.0**-10, 2.0**-10, 2.0**-9])
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8], "float32")
    np.testing.assert_array_equal(errors.rounded(ties, "bfloat16"), [1, 1 + 2.0**-6, -1])


def test_truncation_counts_as_bias_and_rounding_does_not():
    rng = np.random.RandomState(0)
    cut, kept = errors.Errors(), errors.Errors()
    for _ in range(12):
        value = rng.normal(0, 1, 100).astype("float32")
        kept.add(errors.rounded(value, "bfloat16"), value, "bfloat16")
        cut.add((value.view("uint32") & 0xFFFF0000).view("float32"), value, "bfloat16")
    assert kept.summary()[1:] == (0.0, False)
    error, bias, is_biased = cut.summary()
    assert is_biased
    assert -0.6 < bias < -0.4 < 0.4 < error < 0.6
