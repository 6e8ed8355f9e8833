"""The work of a step's kernels is that by hand: the bytes of what they read and write, and products' FLOPs."""

from __future__ import annotations

import math
from functools import partial

import mxnet as mx
import pytest
from gpu.null.networks import FAMILIES
from gpu.null.record import recording
from gpu.null.training import FP32, Training
from gpu.null.work import parameters, work, works
from mxnet import autograd, gluon

KIB = 1024


def ones(*shape: int, dtype: str = "float32") -> mx.nd.NDArray:
    return mx.nd.ones(shape, ctx=mx.gpu(), dtype=dtype)


def worked(run, *, within: str = "") -> list:
    """The work of what ``run`` launches and calls, of names with ``within``."""
    with recording() as record:
        run()
        mx.nd.waitall()
    return [each for event in record.events if within in event.name for each in works(event)]


def with_gradients(function, *arrays):
    for array in arrays:
        array.attach_grad()
    with autograd.record():
        result = function(*arrays)
    result.backward()


def test_a_pointwise_kernel_moves_its_arrays_once():
    x, y = ones(64, KIB), ones(64, KIB)
    assert [each.bytes for each in worked(lambda: x + y)] == [3 * x.size * 4]
    half = x.astype("float16")
    assert [each.bytes for each in worked(lambda: mx.nd.relu(half))] == [2 * x.size * 2]


def test_an_array_that_is_broadcast_counts_with_its_own_size():
    x, row = ones(64, KIB), ones(1, KIB)
    assert [each.bytes for each in worked(lambda: mx.nd.broadcast_add(x, row))] == [2 * x.size * 4 + row.size * 4]


def test_a_cast_and_a_sum_over_rows_move_what_they_read_and_write():
    x = ones(64, KIB)
    assert [each.bytes for each in worked(lambda: x.astype("float16"))] == [x.size * 6]
    assert [each.bytes for each in worked(lambda: x.sum(axis=1), within="reduce_kernel")] == [x.size * 4 + 64 * 4]


@pytest.mark.usefixtures("fusion")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_fused_chain_moves_its_inputs_and_results_once(dtype):
    class Chain(gluon.HybridBlock):
        def hybrid_forward(self, F, x, y):  # noqa: N803
            return F.tanh(F.relu(x + y) * 2)

    net = Chain()
    net.hybridize(static_alloc=True)
    x, y = (ones(64, KIB, dtype=dtype) for _ in range(2))
    with autograd.record():  # MXNet fuses what it trains
        net(x, y).wait_to_read()
        found = worked(lambda: net(x, y), within="FusedKernel")
    assert [each.kind for each in found] == ["memory"]
    arrays = 5  # fused for training, the chain also keeps what the backward reads
    assert found[0].bytes in [number * x.size * x.dtype(0).itemsize for number in range(3, arrays + 1)]


def test_batch_normalization_reads_twice_and_pooling_counts_both_tensors():
    x, scale = ones(4, 8, 16, 16, dtype="float16"), [ones(8) for _ in range(4)]
    norm = lambda x: mx.nd.BatchNorm(x, *scale, fix_gamma=False)  # noqa: E731
    found = worked(lambda: with_gradients(norm, x), within="BatchNormalization")
    assert [each.bytes for each in found] == [3 * x.size * 2, 5 * x.size * 2]
    pool = lambda x: mx.nd.Pooling(x, kernel=(2, 2), stride=(2, 2))  # noqa: E731
    found = worked(lambda: with_gradients(pool, x), within="Pooling")
    assert [each.bytes for each in found] == [5 * x.size // 4 * 2, 2 * 5 * x.size // 4 * 2]


@pytest.mark.parametrize(
    ("dtype", "layout", "kinds"),
    [
        ("float16", "NCHW", ["float16", "layout"]),
        ("float16", "NHWC", ["float16"]),
        ("float32", "NCHW", ["tf32"]),
    ],
)
def test_a_convolution_of_nchw_in_float16_has_transposes_around_it(dtype, layout, kinds):
    shapes = {"NCHW": ((2, 8, 6, 6), (16, 8, 3, 3)), "NHWC": ((2, 6, 6, 8), (16, 3, 3, 8))}[layout]
    x, w = (ones(*shape, dtype=dtype) for shape in shapes)
    options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 16, "no_bias": True, "layout": layout}
    found = worked(lambda: mx.nd.Convolution(x, w, **options), within="cudnnConvolutionForward")
    moved = (x.size + w.size + 2 * 16 * 36) * x.dtype(0).itemsize
    assert [each.kind for each in found] == kinds
    assert found[0][1:] == (2 * (2 * 16 * 36) * (8 * 9), moved)
    assert [each.bytes for each in found[1:]] == [2 * moved] * (len(kinds) - 1)


def test_of_fp32_products_only_fully_connected_asks_for_tf32():
    """cuBLAS, unlike cuDNN, computes in TF32 only if it is asked to."""
    for dtype, kind in (("float16", "float16"), ("float32", "tf32")):
        x, w = ones(2, 4, dtype=dtype), ones(3, 4, dtype=dtype)
        found = worked(partial(mx.nd.FullyConnected, x, w, num_hidden=3, no_bias=True), within="cublas")
        assert [(each.kind, each.flops) for each in found] == [(kind, 48)]
    found = worked(partial(mx.nd.dot, ones(2, 4), ones(4, 3)), within="cublas")
    assert [(each.kind, each.flops) for each in found] == [("float32", 48)]


def test_softmax_and_layer_norm_count_their_rows():
    x = ones(32, 128)
    found = worked(lambda: with_gradients(mx.nd.softmax, x), within="softmax")
    assert [each.bytes for each in found] == [2 * x.size * 4, 3 * x.size * 4]
    norm = lambda x: mx.nd.LayerNorm(x, ones(128), ones(128))  # noqa: E731
    found = worked(lambda: with_gradients(norm, x), within="LayerNormFused")
    assert [each.bytes for each in found] == [2 * x.size * 4, 3 * x.size * 4]


def test_each_step_of_a_recurrent_layer_reads_its_weights():
    steps, batch, width, hidden = 5, 3, 4, 8
    layer = gluon.rnn.LSTM(hidden, num_layers=2, input_size=width)
    layer.initialize(ctx=mx.gpu())
    x = ones(steps, batch, width)
    found = worked(lambda: with_gradients(layer, x), within="cudnnRNN")
    flops = [2 * batch * 4 * hidden * (inputs + hidden) for inputs in (width, hidden)]
    forward, weights = found[: 2 * steps], found[-2:]
    assert [each.flops for each in forward] == [flops[0]] * steps + [flops[1]] * steps
    assert [each.flops for each in weights] == [steps * each for each in flops]
    assert forward[0].bytes == 4 * (4 * hidden * (width + hidden) + batch * (width + hidden + 4 * hidden))


@pytest.mark.parametrize(("how", "bytes_each"), [(FP32, 20), ("float16", 20)])
def test_a_step_of_sgd_moves_weights_gradients_momentum_and_masters(how, bytes_each):
    """FP32: weight, gradient, new weight, momentum twice. With masters: float16 twice, FP32 four times."""
    training = Training(FAMILIES["dcgan.discriminator"](), how)
    training.run(1)
    training.forward_backward()
    trained = [p for p in training.net.collect_params().values() if p.grad_req != "null"]
    elements = sum(math.prod(param.shape) for param in trained)
    found = worked(training.step, within="MultiSGDKernel<")
    assert sum(each.bytes for each in found) == pytest.approx(bytes_each * elements, rel=0.01)


@pytest.mark.parametrize("name", ["resnet18_v1b", "bert", "standard_lstm_lm_200"])
def test_nearly_all_bytes_are_counted_by_a_rule(name):
    training = Training(FAMILIES[name](), "float16", static_alloc=True, static_shape=True)
    training.run(1)
    with recording() as record:
        training.forward_backward()
        training.step()
    moved = {kind: sum(b * n for k, _, b, n in work(record.events) if (k == "bound") == kind) for kind in (True, False)}
    assert moved[True] < 0.1 * moved[False]


def test_a_signature_is_divided_into_its_types():
    name = (
        "void mxnet::op::kernel<f<1>, float*>(int, mshadow::Shape<2>, op::(anonymous namespace)::A<2, float>, float*)"
    )
    types = ["int", "mshadow::Shape<2>", "op::(anonymous namespace)::A<2, float>", "float*"]
    assert parameters(name) == types
