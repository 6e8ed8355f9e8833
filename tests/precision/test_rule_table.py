"""The table of rules: complete, and what it says of an operator is so, forward and backward."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Iterable

import mxnet as mx
import numpy as np
import pytest
from kit.processes import run_program
from kit.registered import FORWARD, OPS, handle
from mxnet._ctypes.ndarray import _imperative_invoke

from mxmp import Policy
from mxmp.host import cpu
from mxmp.host.versions import NUMBERS
from mxmp.kernels.emulation import ONEDNNS
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.missing_kernels import BFLOAT16_CPU, TABLE, HasAttribute, missing_kernel
from mxmp.precision.rule import Kind
from mxmp.precision.rule_table import CUDA_BUILD_ONLY
from mxmp.precision.rules import RULES, rule_of

# mx.nd.array looks for scipy.sparse.csr.
pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")


SINCE = {
    "_contrib_BatchNormWithReLU": (1, 8, 0),
    "_sg_mkldnn_selfatt_qk": (1, 9, 0),
    "_sg_mkldnn_selfatt_valatt": (1, 9, 0),
    "_contrib_quantize_asym": (1, 9, 1),
    "_contrib_quantized_rnn": (1, 9, 1),
}


LATER = {name for name, since in SINCE.items() if since > NUMBERS}


def without_rule(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in RULES]


def test_every_registered_forward_operator_has_a_rule():
    in_graphs = {op.canonical for op in FORWARD.values()}
    assert len(in_graphs - CUDA_BUILD_ONLY) == 611 - len(LATER)
    assert without_rule(in_graphs) == []
    assert without_rule([*in_graphs, "made_up_operator"]) == ["made_up_operator"]


def test_every_registered_backward_operator_resolves_to_alone():
    backward = set(OPS) - set(FORWARD)
    assert backward
    for name in backward:
        assert rule_of(name).kind is Kind.ALONE
        assert "autograd" in rule_of(name).reason


def test_the_table_names_only_operators_that_mxnet_has_as_graphs_name_them():
    assert set(RULES) - {op.canonical for op in FORWARD.values()} - CUDA_BUILD_ONLY == LATER - CUDA_BUILD_ONLY
    assert set(RULES) >= BFLOAT16_CPU
    for rows in TABLE.values():
        assert {name for row in rows for name in row.operators} <= set(RULES)


def test_every_reason_is_one_specific_line():
    reasons = {rule.reason for rule in RULES.values()}
    reasons |= {exception.reason for rule in RULES.values() for exception in rule.when}
    reasons |= {row.reason for rows in TABLE.values() for row in rows}
    for reason in reasons:
        assert 20 <= len(reason) <= 160, reason
        assert "\n" not in reason, reason
        assert len(reason.split()) >= 4, reason


def test_positions_are_among_the_operators_inputs():
    for name, rule in RULES.items():
        op = FORWARD.get(name)
        if op is not None and not op.variadic:
            assert all(0 <= position < len(op.inputs) for position in rule.keep + rule.params), name


def test_kept_inputs_are_what_their_names_say():
    inputs = {
        "Embedding": ["data"],
        "take": ["indices"],
        "pick": ["index"],
        "where": ["condition"],
        "SequenceMask": ["sequence_length"],
        "CTCLoss": ["label", "data_lengths", "label_lengths"],
        "RNN": ["sequence_length"],
        "BatchNorm": ["gamma", "beta", "moving_mean", "moving_var"],
        "SoftmaxOutput": ["label"],
        "softmax": ["length"],
    }
    for name, kept in inputs.items():
        assert [FORWARD[name].inputs[position] for position in RULES[name].keep] == kept


def test_exceptions_and_scalars_name_real_attributes_and_no_exception_holds_a_default():
    exceptions: list[tuple[str, Any]] = [(name, when) for name, rule in RULES.items() for when in rule.when]
    for row in (row for rows in TABLE.values() for row in rows):
        exceptions += [(name, row.where) for name in row.operators if isinstance(row.where, HasAttribute)]
    for name, when in exceptions:
        declared = FORWARD[name].attrs[when.attr]
        default = re.search(r"default='(.*)'", declared)
        assert all(f"'{value}'" in declared for value in when.values), (name, when)
        assert default is None or default.group(1) not in when.values, (name, when)
    for name in RULES.keys() & FORWARD.keys():
        assert set(RULES[name].scalars) <= set(FORWARD[name].attrs), name


def test_what_sums_in_float16_on_a_gpu_is_fp32_there_and_in_the_emulation():
    *summing, linear_algebra = TABLE["gpu", "float16"]
    assert "_linalg_gemm" in linear_algebra.operators
    for row in summing:
        for op in row.operators:
            assert rule_of(op).kind in (Kind.LOW, Kind.FOLLOW)
            for device in ("cpu", "gpu"):
                attrs = {"scale": "3", "output_size": "7", "mode": "edge", "cudnn_off": "True", "kernel": "(2, 2)"}
                attrs["num_args"] = "9"
                assert missing_kernel(op, attrs, "float16", device) == row.reason
    for attrs in ({"scale": "2"}, {"scale": "8", "num_args": "1"}):
        assert missing_kernel("UpSampling", attrs, "float16", "gpu") == ""
    several = [{"scale": scale, "num_args": "2"} for scale in ("2", "4")]  # which may have different sizes
    for attrs in (*several, {"scale": "4", "sample_type": "bilinear"}, {"scale": "1"}):
        assert missing_kernel("UpSampling", attrs, "float16", "gpu")


SIDES = ("(3,)", "(3, 3)", "(3, 3, 3)")


OFF = ("True", "1", "TRUE")


WITHOUT_CUDNN = [
    *(("Convolution", {"kernel": sides, "cudnn_off": off}) for sides in SIDES for off in OFF),
    *(("Deconvolution", {"kernel": sides, "cudnn_off": off}) for sides in SIDES for off in OFF),
    *((op, {"kernel": "(3,)", "layout": "NWC"}) for op in ("Convolution", "Deconvolution")),
    *((op, {"kernel": "(3, 3, 3)", "layout": "NDHWC"}) for op in ("Convolution", "Deconvolution")),
    *(("Pooling", {"kernel": sides, "cudnn_off": off}) for sides in SIDES for off in OFF),
    *(("Pooling", {"kernel": "(25,)", "pool_type": kind}) for kind in ("max", "avg")),
    ("Pooling", {"kernel": "25", "stride": "(1,)"}),
    ("Pooling", {"kernel": "(5,)", "stride": "(2,)"}),
    ("Pooling", {"kernel": "(2, 2)", "cudnn_off": "True"}),
    ("Pooling", {"kernel": "(3, 3)", "stride": "(2, 2)", "cudnn_off": "True"}),
    ("Pooling", {"kernel": "(3,)", "global_pool": "False", "layout": "NWC"}),
]


WITH_CUDNN_OR_FEW_TERMS = [
    *(("Convolution", {"kernel": sides}) for sides in SIDES),
    *(("Convolution", {"kernel": "(3, 3)", "layout": layout, "cudnn_off": "False"}) for layout in ("NCHW", "NHWC")),
    *(("Pooling", {"kernel": sides, "cudnn_off": "False"}) for sides in SIDES[1:]),
    *(("Pooling", {"kernel": "(2, 2)", "stride": "(2, 2)", "cudnn_off": off}) for off in OFF),
    *(("Pooling", {"kernel": kernel, "stride": "(2,)"}) for kernel in ("(2,)", "(3,)", "(4,)")),
    ("Pooling", {"kernel": "(2,)"}),
    ("Pooling", {"kernel": "(3, 1)", "stride": "(2, 1)", "cudnn_off": "True"}),
    *(("Pooling", {"kernel": sides, "global_pool": "True", "cudnn_off": "True"}) for sides in SIDES),
    ("Pooling", {"global_pool": "True"}),
    *(("add_n", {"num_args": count}) for count in "1258"),
]


@pytest.mark.parametrize(("op", "attrs"), WITHOUT_CUDNN)
def test_what_mxnet_computes_without_cudnn_and_adds_in_float16_is_fp32(op, attrs):
    assert "without cuDNN" in missing_kernel(op, attrs, "float16", "gpu")
    assert missing_kernel(op, attrs, "float16", "cpu")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(("op", "attrs"), WITH_CUDNN_OR_FEW_TERMS)
def test_what_cudnn_adds_or_has_few_terms_stays_in_float16(op, attrs, device):
    assert missing_kernel(op, attrs, "float16", device) == ""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_offsets_of_gluons_deformable_convolution_and_its_moving_average_are_fp32(device):
    """The one hard-codes cudnn_off; the other pools one axis."""
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(4, 3), mx.gluon.contrib.cnn.DeformableConvolution(4, (3, 3)), mx.gluon.nn.Conv2D(4, 3))
    net.add(mx.gluon.nn.HybridLambda(lambda _, x: mx.sym.reshape(x, shape=(0, 0, -1))), mx.gluon.nn.AvgPool1D(25, 1))
    net.add(mx.gluon.nn.Conv1D(1, 1), mx.gluon.nn.MaxPool1D(2))
    graph = Graph.from_symbol(net(mx.sym.Variable("data")))
    found = [(d.op, d.low) for d in decide(graph, Policy("float16"), device).decisions.values()]
    convolutions = [low for op, low in found if op == "Convolution"]
    assert convolutions == [True, False, True, True]
    assert not next(low for op, low in found if op == "Pooling")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_attention_by_batch_dot_is_fp32_and_says_why(device):
    scores = mx.sym.batch_dot(mx.sym.Variable("q"), mx.sym.Variable("k"), name="scores")
    graph = Graph.from_symbol(mx.sym.FullyConnected(scores, num_hidden=4, name="out"))
    plan = decide(graph, Policy("float16"), device)
    assert not plan.decisions["scores"].low
    assert "cublasHgemmStridedBatched" in plan.decisions["scores"].reason
    assert plan.decisions["out"].low


X = (2, 8, 6, 6)


S = (3, 4)


Case = "tuple[list[tuple[int, ...]], dict[str, Any]]"


# Operators, the shapes of their float inputs, and attributes.
CALLS: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("relu _npx_relu abs _npi_absolute negative _npi_negative Flatten", [X], {}),
    ("transpose _np_transpose diag _np_diag _np_diagonal _npi_tril _copy _np_copy", [S], {}),
    ("BlockGrad zeros_like ones_like", [S], {}),
    ("_maximum _minimum", [X, X], {}),
    ("where", [S, S, S], {}),
    ("Reshape", [X], {"shape": (0, -1)}),
    ("_np_reshape _npx_reshape", [S], {"newshape": (4, 3)}),
    ("expand_dims", [S], {"axis": 1}),
    ("squeeze _np_squeeze", [(3, 1, 4)], {}),
    ("SwapAxis", [X], {"dim1": 1, "dim2": 2}),
    ("_np_moveaxis", [X], {"source": 1, "destination": 2}),
    ("depth_to_space space_to_depth", [X], {"block_size": 2}),
    ("reverse _npi_flip", [S], {"axis": 0}),
    ("_npi_rot90", [S], {"k": 1, "axes": (0, 1)}),
    ("_np_roll", [S], {"shift": 1, "axis": 0}),
    ("_np_atleast_1d _np_atleast_2d _np_atleast_3d", [S], {"num_args": 1}),
    ("Concat", [X, X], {"dim": 1, "num_args": 2}),
    ("_npi_concatenate", [S, S], {"axis": 0, "num_args": 2}),
    ("stack _npi_stack _npi_vstack _npi_hstack _npi_dstack _npi_column_stack", [S, S], {"num_args": 2}),
    ("_rnn_param_concat", [(3,), (4,)], {"dim": 0, "num_args": 2}),
    ("slice", [S], {"begin": (0, 1), "end": (2, 3)}),
    ("slice_axis", [S], {"axis": 0, "begin": 0, "end": 2}),
    ("SliceChannel", [S], {"num_outputs": 2, "axis": 1}),
    ("_split_v2 _npi_hsplit", [S], {"indices": (0, 2), "axis": 1}),
    ("_npi_dsplit", [X], {"indices": (0, 2), "axis": 2}),
    ("Crop", [X], {"h_w": (3, 3), "num_args": 1}),
    ("_np_diagflat", [(3,)], {}),
    ("slice_like", [X, (2, 8, 3, 3)], {"axes": (2, 3)}),
    ("reshape_like", [S, (4, 3)], {}),
    # Without lengths, SequenceLast's backward ends the process in FP32 too.
    ("SequenceLast SequenceReverse", [(4, 2, 3), (2,)], {"use_sequence_length": True}),
]
EXACT: dict[str, Case] = {name: (shapes, attrs) for names, shapes, attrs in CALLS for name in names.split()}


NOT_CALLED = {"_copyto", "_CrossDeviceCopy"}  # copies between devices


def invoke(name: str, arrays: list[mx.nd.NDArray], attrs: dict[str, Any]) -> list[mx.nd.NDArray]:
    keys, values = [str(key) for key in attrs], [str(value) for value in attrs.values()]
    out = _imperative_invoke(handle(name).value, arrays, keys, values, None, False, False)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def drawn(name: str, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.RandomState(0)
    values = [rng.normal(0, 1, shape).astype("float32") for shape in shapes]
    if "BatchNorm" in name:
        values[4] = np.abs(values[4]) + 0.5
    if "Sequence" in name:
        values[1][:] = 2
    return values


def forward_backward(
    name: str, case: Case, inputs: list[np.ndarray], low: str | None = None, round_heads: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and input gradients in FP32; the operator itself computes in ``low``."""
    arrays = [mx.nd.array(value, dtype="float32") for value in inputs]
    trainable = arrays[:3] if "BatchNorm" in name else arrays
    for array in trainable:
        array.attach_grad()
    with mx.autograd.record():
        used = list(arrays)
        if low is not None:
            keep = RULES[name].keep
            used = [
                array if position in keep else invoke("amp_cast", [array], {"dtype": low})[0]
                for position, array in enumerate(arrays)
            ]
        outs = invoke(name, used, case[1])
        if low is not None:
            outs = [invoke("amp_cast", [out], {"dtype": "float32"})[0] for out in outs]
    rng = np.random.RandomState(1)
    heads = [rng.normal(0, 1, out.shape).astype("float32") for out in outs]
    if round_heads:
        heads = [to_float16(head) for head in heads]
    mx.autograd.backward(outs, [mx.nd.array(head) for head in heads])
    return [out.asnumpy() for out in outs], [array.grad.asnumpy() for array in trainable]


def to_float16(value: np.ndarray) -> np.ndarray:
    return value.astype("float16").astype("float32")


def test_every_exact_operator_is_among_the_sample():
    exact = {FORWARD[name].canonical for name, rule in RULES.items() if rule.exact}
    assert exact - NOT_CALLED == set(EXACT)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_operators_round_the_same_before_and_after_forward_and_backward(name):
    case = EXACT[name]
    inputs = drawn(name, case[0])
    before = forward_backward(name, case, [to_float16(value) for value in inputs], round_heads=True)
    after = forward_backward(name, case, inputs)
    for rounded_first, rounded_last in zip(before[0] + before[1], after[0] + after[1]):
        np.testing.assert_array_equal(rounded_first, to_float16(rounded_last))


@pytest.mark.parametrize(
    ("name", "ignores"),
    [
        ("SoftmaxOutput", True),
        ("SVMOutput", True),
        ("MakeLoss", True),
        ("make_loss", True),
        ("softmax_cross_entropy", False),
        ("smooth_l1", False),
    ],
)
def test_heads_ignore_the_gradient_from_above(name, ignores):
    grads = []
    for scale in (1.0, 8.0):
        data, label = mx.nd.array(drawn(name, [S])[0]), mx.nd.array([0, 1, 2])
        data.attach_grad()
        with mx.autograd.record():
            out = invoke(name, [data, label][: len(FORWARD[name].inputs)], {})[0]
        out.backward(mx.nd.full(out.shape, scale))
        grads.append(data.grad.asnumpy())
    assert np.array_equal(*grads) is ignores
    assert (RULES[name].kind is Kind.HEAD) is ignores


BFLOAT16: dict[str, Case] = {
    "Convolution": ([X, (4, 8, 3, 3), (4,)], {"kernel": (3, 3), "num_filter": 4, "pad": (1, 1)}),
    "FullyConnected": ([X, (5, 288), (5,)], {"num_hidden": 5}),
    "BatchNorm": ([X, *[(8,)] * 4], {"fix_gamma": False}),
    "_contrib_BatchNormWithReLU": ([X, *[(8,)] * 4], {"fix_gamma": False}),
    "Pooling": ([X], {"kernel": (2, 2), "stride": (2, 2), "pool_type": "avg"}),
    "Activation": ([X], {"act_type": "tanh"}),
    "LeakyReLU": ([X], {"act_type": "leaky"}),
    "clip": ([X], {"a_min": 0, "a_max": 0.5}),
    "add_n": ([X, X], {"num_args": 2}),
    **{f"_{op}_scalar": ([X], {"scalar": 1.5}) for op in ("plus", "minus", "rminus", "mul", "div")},
    **{op: ([X, X], {}) for op in ("elemwise_add", "elemwise_sub", "elemwise_mul")},
    **{op: ([S], {}) for op in ("softmax", "log_softmax", "sigmoid", "tanh", "softsign")},
    "_contrib_div_sqrt_dim": ([S], {}),
}


def check_bfloat16() -> None:
    """Print a line per operator; run in a process of its own, since a wrong one ends it."""
    cases = {**EXACT, **BFLOAT16}
    # Subset of float32 that bfloat16 holds, so that both sides start from the same numbers.
    emulated = frozenset() if cpu.multiplies_bfloat16() else ONEDNNS  # tests/kernels/test_emulation.py has these
    for name in sorted({FORWARD[op].canonical for op in BFLOAT16_CPU - LATER} - emulated):
        print("start", name, flush=True)
        case = cases[name]
        inputs = [(value.view("uint32") & 0xFFFF0000).view("float32") for value in drawn(name, case[0])]
        expected = forward_backward(name, case, inputs)
        actual = forward_backward(name, case, inputs, "bfloat16")
        for want, got in zip(expected[0] + expected[1], actual[0] + actual[1]):
            error = np.linalg.norm(want - got) / max(np.linalg.norm(want), 1e-6)
            assert error < 0.01, (name, error)
    print("all hold", flush=True)


def test_operators_that_end_the_process_in_bfloat16_are_never_listed():
    for name in ("Deconvolution", "transpose"):
        aliases = {alias for alias, op in FORWARD.items() if op.canonical == name}
        assert not aliases & BFLOAT16_CPU


@pytest.mark.slow
def test_operators_listed_for_bfloat16_hold_forward_and_backward_on_the_cpu():
    code = "from precision.test_rule_table import check_bfloat16; check_bfloat16()"
    assert run_program("-c", code, PYTHONPATH=os.pathsep.join(sys.path)).endswith("all hold\n")
