"""The harness sees what it is there to see: each fault is made on purpose, in plain MXNet or in a graph of mxmp's."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from gpu import tensor_core
from gpu.null.figures import figures, recorded_step
from gpu.null.networks import FAMILIES
from gpu.null.record import Event, overflow, peak_bytes, recording
from gpu.null.training import FP32, Training
from mxnet import autograd, gluon

import mxmp
from mxmp.precision.graph import Graph

from .checks import no_tensor_cores, plain_float16_sums, sums_in_float16, updates, wrong_matrix_calls
from .test_operators import CASES, COPY, emitted, run


def half(*shape: int) -> mx.nd.NDArray:
    return mx.nd.ones(shape, ctx=mx.gpu(), dtype="float16")


@pytest.mark.xfail(strict=True, reason="it ends its process")
def test_a_test_that_ends_its_process_fails_and_the_next_ones_go_on():
    os.abort()


def test_float16_sums_of_a_product_are_found():
    with recording() as record:
        mx.nd.batch_dot(half(2, 3, 4), half(2, 4, 5)).wait_to_read()
    assert len(wrong_matrix_calls(record)) == 1
    with recording() as record:
        mx.nd.FullyConnected(half(2, 4), half(3, 4), num_hidden=3, no_bias=True).wait_to_read()
    assert len(record.matrix_calls) == 1
    assert not wrong_matrix_calls(record)


def test_float16_sums_of_a_kernel_are_found():
    with recording() as record:
        mx.nd.contrib.AdaptiveAvgPooling2D(half(1, 1, 8, 8)).wait_to_read()
    assert plain_float16_sums(record)
    x = half(3, 4)
    x.attach_grad()
    with recording() as record:
        with autograd.record():
            y = mx.nd.broadcast_add(half(30, 3, 4), x.expand_dims(0))
        y.backward()
    assert sums_in_float16(record)
    assert not plain_float16_sums(record)


def test_a_recurrent_layer_without_tensor_cores_is_found():
    cell = gluon.rnn.LSTM(8, input_size=4, dtype="float16")
    cell.initialize(ctx=mx.gpu())
    with recording() as record:
        cell(half(3, 2, 4))
    assert no_tensor_cores(record)


def test_a_missing_cast_is_found():
    case = CASES["FullyConnected"][0]
    graph: Graph = emitted(case)
    run(case, graph)
    node = next(node for node in graph.nodes() if node.op == case.op)
    node.rewire(0, node.inputs[0].node.inputs[0])  # the data as it is, the weight cast
    with pytest.raises(mx.MXNetError, match="Incompatible attr"):
        run(case, graph)


def test_an_update_after_an_overflow_is_found():
    """MXNet's own trainer checks nothing."""
    training = Training(FAMILIES["dcgan.discriminator"](), FP32)
    training.run(1)
    training.forward_backward()
    with overflow(), recording() as record:
        training.step()
    assert updates(record)


def test_an_overflow_is_of_one_device_and_over_at_its_end(two_devices):
    def sums(device: int) -> float:
        return float(mx.nd.multi_sum_sq(mx.nd.ones(4, ctx=mx.gpu(device)), num_arrays=1).asscalar())

    with overflow(1):
        assert np.isinf(sums(1))
        assert sums(0) == 0
    assert sums(1) == 0


def test_what_a_gpu_would_refuse_is_refused():
    """A launch of no blocks, in FullyConnected's backward of an empty batch."""
    case = next(case for case in CASES["FullyConnected"] if case.empty)
    with mx.util.np_shape(True), pytest.raises(mx.MXNetError, match=r"status 9|kind='refused'"):
        run(case, case.graph(COPY))


def test_casts_are_counted_by_the_bytes_they_read_and_write():
    x = mx.nd.ones((10, 100), ctx=mx.gpu())
    with recording() as record:
        x.astype("float16").wait_to_read()
        mx.nd.amp_cast(x, dtype="float16").wait_to_read()
        x.copy().wait_to_read()
    assert [event.bytes_cast for event in record.casts] == [6000, 6000]


def test_the_peak_of_memory_is_what_was_held_at_once():
    mx.nd.waitall()
    before = peak_bytes()
    held = [mx.nd.ones((1 << 20,), ctx=mx.gpu()) for _ in range(4)]
    mx.nd.waitall()
    del held
    again = mx.nd.ones((1 << 20,), ctx=mx.gpu())
    again.wait_to_read()
    assert 16 << 20 <= peak_bytes() - before < 18 << 20


def test_figures_of_a_step_tell_float16_from_fp32():
    found = figures(*recorded_step(FAMILIES["dcgan.discriminator"](), "float16-fast"))
    assert set(found["matrix_calls"]) == {"f16, sums f32, TENSOR_OP"}
    assert found["peak_bytes"] > 0
    assert 0 < found["bytes_cast"] < found["peak_bytes"]
    assert found["launches"] > 0
    assert found["step_launches"] > 0


def test_this_is_mxnets_cuda_build():
    assert mx.runtime.Features().is_enabled("CUDA")
    assert mx.context.num_gpus() == 1
    assert mxmp.__file__.startswith(os.getcwd())


def test_the_recorder_of_tensor_cores_uses_them_in_all_three_directions():
    """Through MXNet: ``scripts/dev.py check tensor-core --by mxnet``."""
    names = [name for name, _ in tensor_core.cases()]
    with recording() as record:
        arrays = tensor_core.record("mxnet", "cuda")
    assert arrays.keys() == {f"{name}.{key}" for name in names for key in tensor_core.ARRAYS}
    assert len(record.matrix_calls) == 3 * len(names)
    assert not wrong_matrix_calls(record)
    assert not no_tensor_cores(record)


def test_the_flops_of_a_convolution_and_a_product_are_those_by_hand():
    with recording() as record:
        mx.nd.FullyConnected(half(2, 4), half(3, 4), num_hidden=3, no_bias=True).wait_to_read()
    (product,) = record.matrix_calls
    assert (product.flops, product.bytes_moved) == (2 * 2 * 4 * 3, 2 * (2 * 4 + 3 * 4 + 2 * 3))
    x, w = half(2, 4, 6, 6), half(8, 2, 3, 3)
    for array in (x, w):
        array.attach_grad()
    with recording() as record:
        with autograd.record():
            y = mx.nd.Convolution(x, w, kernel=(3, 3), pad=(1, 1), num_filter=8, num_group=2, no_bias=True)
        y.backward()
    assert len(record.matrix_calls) == 3
    for call in record.matrix_calls:
        assert call.flops == 2 * (2 * 8 * 6 * 6) * (2 * 3 * 3)
        assert call.bytes_moved == 2 * (x.size + w.size + y.size)


def test_a_fused_cast_counts_as_a_cast_and_a_cast_fused_with_arithmetic_does_not():
    size = {"grid": "1x1x1", "block": "32x1x1", "elements": "32"}  # 64 elements, two a thread beside float16
    names = {
        "FusedKernel_Reshape_Cast_(unsigned long, op::Shape<2>, op::Shape<1>, __half*, float*)": 64 * 6,
        "FusedKernel_Cast_expand_dims_(unsigned long, op::Shape<2>, op::Shape<3>, float*, int*)": 32 * 8,
        "FusedKernel_Cast_tanh_(unsigned long, op::Shape<2>, op::Shape<2>, __half*, float*)": 0,
        "FusedKernel_Reshape_Reshape_(unsigned long, op::Shape<2>, op::Shape<2>, float*, float*)": 0,
    }
    for name, bytes_cast in names.items():
        assert Event(0, "fused", name, size).bytes_cast == bytes_cast, name
