"""A graph of ``optimize_for_inference`` in float16 on a GPU: what is called, and that nothing casts a weight."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mxnet as mx
import pytest
from gpu.null.record import Record, recording
from mxnet.gluon import SymbolBlock, nn

import mxmp

from .checks import no_tensor_cores, plain_float16_sums, wrong_matrix_calls

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("User", "Runtime")]
SHAPE = (8, 3, 16, 16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the exported files of a small network; the null GPU computes nothing, so the network is on the CPU."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(2):
            net.add(nn.Conv2D(16, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(8))
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    x = mx.nd.random.normal(shape=SHAPE, ctx=mx.cpu())
    with mx.cpu():
        net(x)
        found = mxmp.optimize_for_inference(net, [x], dtypes="float16", progress=False)
    assert found.report.chosen == "float16"
    folder: Path = tmp_path_factory.mktemp("served")
    return found.export(str(folder / "fast"))


def run(served: SymbolBlock) -> Record:
    x = mx.nd.ones(SHAPE, ctx=mx.gpu())
    served(x).wait_to_read()
    with recording() as record:
        served(x).wait_to_read()
    assert not record.impossible
    return record


def test_every_product_is_float16_on_tensor_cores_with_fp32_sums(files):
    record = run(SymbolBlock.imports(files[0], ["data"], files[1], ctx=mx.gpu()))
    assert len(record.matrix_calls) >= 3
    assert {dtype for event in record.matrix_calls for dtype in event.dtypes} == {"f16"}
    assert wrong_matrix_calls(record) == no_tensor_cores(record) == []
    assert not plain_float16_sums(record)


def test_only_the_input_and_the_output_are_cast(files):
    record = run(SymbolBlock.imports(files[0], ["data"], files[1], ctx=mx.gpu()))
    assert not record.named("cudnnBatchNormalization")
    assert len(record.casts) == 2


@pytest.mark.parametrize("true_float16", [False, True])
def test_the_variable_for_float16_sums_changes_dense_layers_alone(true_float16):
    """What ``mxmp.serving.sums`` emulates. MXNet reads MXNET_FC_TRUE_FP16 once, so each value has a process."""
    code = """
        import mxnet as mx
        from gpu.null.record import recording
        shapes = (8, 64), (32, 64), (8, 8, 9, 9), (8, 8, 3, 3)
        ones = [mx.nd.ones(shape, ctx=mx.gpu(), dtype="float16") for shape in shapes]
        with recording() as record:
            mx.nd.FullyConnected(*ones[:2], num_hidden=32, no_bias=True)
            mx.nd.Convolution(*ones[2:], kernel=(3, 3), num_filter=8, no_bias=True)
            mx.nd.waitall()
        print({event.name: event.details["compute"] for event in record.matrix_calls})
    """
    environment = {**os.environ, "MXNET_FC_TRUE_FP16": str(int(true_float16))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = ast.literal_eval(subprocess.check_output(command, env=environment, text=True).splitlines()[-1])
    assert found == {"cublasGemmEx": "f16" if true_float16 else "f32", "cudnnConvolutionForward": "f32"}
