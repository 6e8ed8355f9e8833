"""Every operator of the sweep, as emitted for a GPU in float16: forward and backward run, products sum in FP32."""

from __future__ import annotations

import re

import mxnet as mx
import numpy as np
import pytest
from gpu.null.record import Record, recording
from support.operators.case import CASES, Case, is_allowed

import mxmp
from mxmp import Policy
from mxmp.pipeline import low_graph
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph, Node

from .checks import no_tensor_cores, sums_in_float16, wrong_matrix_calls

TESTS_PER_PROCESS = 100
# The same operator between two others: MXNet plans some graphs of one operator alone in another way.
COPY = Node("_copy", "")
# Operators whose sums are float16's, each a pattern of checks.py.
LOW_SUMS = {
    "reduce_kernel": """broadcast_add broadcast_sub broadcast_mul broadcast_maximum broadcast_minimum _npi_add
    _npi_subtract _npi_multiply _npi_copysign broadcast_axis broadcast_to broadcast_like tile repeat LeakyReLU""",
    "PoolingExp": "UpSampling",  # of 2 x 2 values
}
NO_TENSOR_CORES = {"RNN"}  # rnn-inl.h of MXNet 1.9.1 sets the default math mode


def cases(op: str) -> list:
    """Return the cases that the rules let compute in float16."""
    found = [case for case in CASES[op] if not is_allowed(case, "float16")]
    return [pytest.param(case, id=f"{op}-{case.name}".replace(" ", "_")) for case in found]


def emitted(case: Case) -> Graph:
    graph, policy = case.graph(), Policy("float16", params="float32", norm="compute", low_ops=(case.op,))
    return low_graph(graph, decide(graph, policy, "gpu"), "gpu")[0]


def run(case: Case, graph: Graph, backward: bool = True) -> Record:
    """Forward and backward, with gradients written and with gradients added to."""
    symbol, ctx, rng = graph.to_symbol(), mx.gpu(), np.random.RandomState(0)
    arrays = {f"in{i}": mx.nd.array(s.values(rng), ctx=ctx, dtype=s.dtype) for i, s in enumerate(case.inputs)}
    names = symbol.list_arguments()
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    wanted = [name for name in names if backward and case.inputs[int(name[2:])].grad]
    with recording() as record:
        for request in ("write", "add") if wanted else ("null",):
            grads = {name: mx.nd.zeros(arrays[name].shape, ctx=ctx) for name in wanted}
            requests = {name: request if name in wanted else "null" for name in names}
            bound = symbol.bind(ctx, {name: arrays[name] for name in names}, grads or None, requests, states)
            outputs = bound.forward(is_train=backward)
            if wanted:
                bound.backward([mx.nd.ones(out.shape, ctx=ctx, dtype=out.dtype) for out in outputs])
    if record.impossible:  # MXNet looks for a launch's error at the next one
        raise mx.MXNetError(str(record.impossible[0]))
    return record


def run_as_fp32_can(case: Case, *, amid: bool = True) -> Record:
    """Without a gradient where FP32 has none; skips what FP32 cannot do, alone or (``amid``) between two others."""
    try:
        return run(case, emitted(case))
    except mx.MXNetError as error:
        for backward in (True, False):
            try:
                run(case, case.graph(), backward)
                if amid:
                    run(case, case.graph(COPY), backward)
            except mx.MXNetError:
                continue
            if backward:
                raise
            return run(case, emitted(case), backward)
        pytest.skip(f"FP32 fails too: {last_line(error)}")


def last_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error).strip().splitlines()[-1])[-100:]


@pytest.mark.parametrize("case", [param for op in CASES for param in cases(op)])
def test_an_operator_runs_in_float16_where_fp32_does(case):
    with mx.util.np_shape(case.empty or case.op.startswith("_np")):
        record = run_as_fp32_can(case)
    assert not wrong_matrix_calls(record)
    assert bool(no_tensor_cores(record)) == (case.op in NO_TENSOR_CORES)
    for pattern in sums_in_float16(record):
        assert any(part in pattern and case.op in ops.split() for part, ops in LOW_SUMS.items()), pattern


FUSED = ("slice", "slice_axis", "slice_like", "broadcast_like")


def fused_cases() -> list:
    """One of each operator, and all of those for which the fusion writes code of its own."""
    by_op = {op: cases(op) for op in CASES}
    return [param for op, found in by_op.items() for param in (found if op in FUSED else found[1:2] or found)]


@pytest.mark.parametrize("case", fused_cases())
def test_an_operator_runs_when_it_is_fused_with_its_casts(case, fusion):
    with mx.util.np_shape(case.empty or case.op.startswith("_np")):
        run_as_fp32_can(case, amid=case.op not in FUSED)


@pytest.mark.parametrize("axis", [1, (2, 3), ()], ids=str)
def test_a_sum_reads_float16_and_adds_in_fp32(axis):
    layer = mx.sym.Convolution(mx.sym.var("data"), kernel=(1, 1), num_filter=4, no_bias=True, name="layer")
    symbol = mxmp.cast_symbol(mx.sym.sum(layer, axis=axis), "float16", ctx=mx.gpu())
    bound = symbol.simple_bind(mx.gpu(), data=(2, 3, 8, 8))
    with recording() as record:
        bound.forward(is_train=True)
        bound.backward([mx.nd.ones(bound.outputs[0].shape, ctx=mx.gpu())])
    assert not record.impossible
    (kernel,) = [event.name for event in record.named("reduce_kernel")]
    assert re.search(r"sum, \d, float, mshadow::half::half_t, float", kernel)  # sums, data, result
    assert len(record.casts) == 2  # of the input, forward and backward
