"""The table of sums names every operator that may compute in float16, and nothing in it was found to add short."""

from __future__ import annotations

import pytest
from gpu.sim import sums
from support.results import read

from mxmp.policy import Policy
from mxmp.precision._mxnet import name_in_graphs
from mxmp.precision.decide import decide
from mxmp.precision.rule import Kind
from mxmp.precision.rule_table import CUDA_BUILD_ONLY
from mxmp.precision.rules import RULES

CASES = list(sums.cases())
RESULTS = read(sums.RESULTS)
# Each number that they return is made of one or two that they read, forward and backward.
ADD_NOTHING = """
    Activation BlockGrad Concat Crop Dropout Flatten Reshape SequenceLast SequenceMask SequenceReverse SliceChannel
    SwapAxis _CrossDeviceCopy _contrib_div_sqrt_dim _contrib_gradientmultiplier _copy _copyto _div_scalar _grad_add
    _identity_with_attr_like_rhs _maximum _maximum_scalar _minimum _minimum_scalar _minus_scalar _mul_scalar
    _np_atleast_1d _np_atleast_2d _np_atleast_3d _np_copy _np_diag _np_diagflat _np_diagonal _np_moveaxis
    _np_reshape _np_roll _np_squeeze _np_transpose _npi_absolute _npi_add_scalar _npi_arcsinh _npi_arctan
    _npi_column_stack _npi_concatenate _npi_copysign_scalar _npi_delete _npi_dsplit _npi_dstack _npi_ediff1d
    _npi_flip _npi_hsplit _npi_hstack _npi_multiply_scalar _npi_negative _npi_radians _npi_rcopysign_scalar
    _npi_rot90 _npi_rsubtract_scalar _npi_stack _npi_subtract_scalar _npi_tanh _npi_tril _npi_true_divide_scalar
    _npi_vstack _npx_relu _npx_reshape _npx_sigmoid _plus_scalar _rminus_scalar _rnn_param_concat _slice_assign
    _slice_assign_scalar _split_v2 abs arcsinh arctan clip depth_to_space diag elemwise_add elemwise_mul
    elemwise_sub erf expand_dims hard_sigmoid negative ones_like radians relu reshape_like reverse sigmoid slice
    slice_axis slice_like softsign space_to_depth squeeze stack tanh transpose zeros_like
"""
# Differences of neighbours, once or a few times; a BatchNorm and a relu, by a workaround.
ADD_FEW = frozenset(["_npi_diff", "_contrib_BatchNormWithReLU"])


def test_every_operator_that_may_compute_in_float16_is_in_the_table_or_adds_nothing():
    kinds = (Kind.LOW, Kind.FOLLOW, Kind.NORM)
    names = {name_in_graphs(op) or op for op, rule in RULES.items() if rule.kind in kinds} - CUDA_BUILD_ONLY
    assert names == {each.op for each in CASES} | {*ADD_NOTHING.split()} | ADD_FEW


def test_every_case_was_computed_and_none_adds_short():
    found = {op: set(verdicts) for op, verdicts in RESULTS.items()}
    assert found == {op: {sums.name_of(each) for each in CASES if each.op == op} for op in {each.op for each in CASES}}
    short = [
        (op, name, verdict)
        for op, verdicts in RESULTS.items()
        for name, verdict in verdicts.items()
        if verdict.startswith(sums.SHORT)
    ]
    assert short == []


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("op", sorted(RESULTS))
def test_what_is_fp32_in_the_results_is_so_by_the_rules_on_both_devices(op, device):
    for each in (each for each in CASES if each.op == op):
        verdict = RESULTS[op][sums.name_of(each)]
        if sums.by_rule(each) or verdict.startswith((sums.REFUSED, sums.ENDED)):
            continue
        plan = decide(each.graph(), Policy("float16", low_ops=[op]), device)
        assert (
            plan.decisions["op"].low == verdict.startswith(sums.WHOLE)
            or "fails on a CPU" in plan.decisions["op"].reason
        )


def test_the_emulation_adds_as_the_gpu_does():
    """Where a CPU's FP32 kernels compute the case at all."""
    found = [v.split("emulated ")[1] for verdicts in RESULTS.values() for v in verdicts.values() if "emulated" in v]
    computed = [float(each) for each in found if each != "refused"]
    assert len(computed) > 0.9 * len(found)
    assert max(computed) <= sums.ROUNDINGS
