"""``mxmp.Module`` and ``mxmp.BucketingModule`` on the null GPU: they train, and an overflow updates nothing."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from gluoncv.model_zoo import get_model
from gpu.null.record import overflow, recording

import mxmp

from .checks import updates, wrong_matrix_calls

POLICIES = ("float16", "float16-fast")
WORDS, BATCH, LENGTHS = 50, 4, (5, 8)


def convolutional() -> mx.sym.Symbol:
    logits = get_model("resnet18_v2", classes=10)(mx.sym.var("data"))
    return mx.sym.SoftmaxOutput(logits, mx.sym.var("softmax_label"), name="softmax")


def recurrent(length: int) -> tuple[mx.sym.Symbol, list[str], list[str]]:
    words, label = mx.sym.var("data"), mx.sym.var("softmax_label")
    x = mx.sym.Embedding(words, input_dim=WORDS, output_dim=16, name="embed")
    cells = mx.rnn.SequentialRNNCell()
    cells.add(mx.rnn.LSTMCell(16, prefix="l0_"))
    cells.add(mx.rnn.GRUCell(16, prefix="l1_"))
    outputs, _ = cells.unroll(length, x, merge_outputs=True, layout="NTC")
    x = mx.sym.FullyConnected(outputs.reshape((-1, 16)), num_hidden=WORDS, name="outer")
    return mx.sym.SoftmaxOutput(x, label.reshape((-1,)), name="softmax"), ["data"], ["softmax_label"]


def pictures(batch: int = 4) -> mx.io.DataBatch:
    data, label = mx.io.DataDesc("data", (batch, 3, 32, 32)), mx.io.DataDesc("softmax_label", (batch,))
    arrays = [mx.nd.ones(data.shape)], [mx.nd.zeros(label.shape)]
    return mx.io.DataBatch(*arrays, provide_data=[data], provide_label=[label])


def sentences(length: int) -> mx.io.DataBatch:
    data, label = mx.io.DataDesc("data", (BATCH, length)), mx.io.DataDesc("softmax_label", (BATCH, length))
    arrays = [mx.nd.ones(data.shape)], [mx.nd.zeros(label.shape)]
    return mx.io.DataBatch(*arrays, bucket_key=length, provide_data=[data], provide_label=[label])


def begun(module: Any, batch: mx.io.DataBatch, kvstore: str = "device") -> Any:
    module.bind(batch.provide_data, batch.provide_label)
    module.init_params(mx.init.One())
    options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    module.init_optimizer(kvstore=kvstore, optimizer="sgd", optimizer_params=options)
    return module


def step(module: Any, batch: mx.io.DataBatch) -> None:
    module.forward(batch, is_train=True)
    module.backward()
    module.update()


def assert_trains_and_skips(module: Any, batches: list[mx.io.DataBatch], device: int = 0) -> None:
    for batch in batches:
        with recording() as record:
            step(module, batch)
        assert not record.impossible
        assert not wrong_matrix_calls(record)
        assert any(call.dtypes == {"f16"} for call in record.matrix_calls)
        assert updates(record)
        assert not module.last_step_skipped
    scale, before = module.loss_scale, weights(module)
    for number, batch in enumerate(batches, 1):
        module.forward(batch, is_train=True)
        module.backward()
        with overflow(device), recording() as record:
            module.update()
        assert module.last_step_skipped
        assert module.loss_scale == scale / 2**number
        assert not updates(record)
        assert weights(module) == before
    with recording() as record:
        step(module, batches[0])
    assert updates(record)


def weights(module: Any) -> dict[str, bytes]:
    """FP32 values: of the masters, where there are some."""
    return {name: value.asnumpy().tobytes() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_trains_and_an_overflow_updates_nothing(policy):
    module = begun(mxmp.Module(convolutional(), policy=policy, context=mx.gpu()), pictures())
    assert_trains_and_skips(module, [pictures()])


@pytest.mark.parametrize("kvstore", ["device", "local"])
@pytest.mark.parametrize("device", [0, 1])
def test_a_module_on_two_devices_skips_where_one_overflows(device, kvstore, two_devices):
    module = mxmp.Module(convolutional(), policy="float16", context=[mx.gpu(0), mx.gpu(1)])
    assert_trains_and_skips(begun(module, pictures(), kvstore), [pictures()], device)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bucketing_module_trains_in_every_bucket_and_an_overflow_updates_nothing(policy):
    made = mxmp.BucketingModule(recurrent, max(LENGTHS), policy=policy, context=mx.gpu())
    assert_trains_and_skips(begun(made, sentences(max(LENGTHS))), [sentences(length) for length in LENGTHS])


def test_a_module_fits_with_pointwise_fusion(fusion):
    data = mx.io.NDArrayIter(np.ones((8, 3, 32, 32), "float32"), np.zeros(8, "float32"), 4)
    module = mxmp.Module(convolutional(), policy="float16", context=mx.gpu())
    with recording() as record:
        module.fit(data, num_epoch=1, optimizer="sgd", optimizer_params={"learning_rate": 0.1})
    assert record.of("fused")
    assert not record.impossible
    assert updates(record)


def of_computed_weights() -> mx.sym.Symbol:
    """Weights at an equalized learning rate, as StyleGAN has them, and states of one sample each that are trained."""
    weight = mx.sym.var("weight", init=mx.init.One()) * 0.5
    x = mx.sym.Convolution(mx.sym.var("data"), weight, kernel=(3, 3), num_filter=8, no_bias=True)
    x = mx.sym.FullyConnected(x, num_hidden=10) + mx.sym.var("states", init=mx.init.One())
    return mx.sym.SoftmaxOutput(x, name="softmax")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("policy", [*POLICIES, "params=float32"])
def test_a_weight_may_go_through_an_operator_that_fusion_joins_to_its_cast(policy, devices, fusion, two_devices):
    """MXNet infers neither the shape nor the dtype of what a fused operator reads."""
    contexts = [mx.gpu(i) for i in range(devices)]
    module = mxmp.Module(of_computed_weights(), policy=policy, context=contexts)
    assert_trains_and_skips(begun(module, pictures()), [pictures()])


def test_data_in_float16_beside_labels_in_fp32_train(fusion):
    """A contradiction in the FP32 Symbol, but not in that with casts."""
    batch = pictures()
    batch.data = [batch.data[0].astype("float16")]
    batch.provide_data = [mx.io.DataDesc("data", batch.data[0].shape, dtype="float16")]
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=8)
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10), name="softmax")
    module = begun(mxmp.Module(symbol, policy="float16", context=mx.gpu()), batch)
    assert_trains_and_skips(module, [batch])


def test_a_module_runs_on_a_cpu_and_a_gpu(fusion):
    """By the CPU's graph, on both. The null GPU computes no gradient that the CPU could check."""
    module = mxmp.Module(convolutional(), policy="float16", context=[mx.cpu(), mx.gpu()])
    begun(module, pictures())
    with recording() as record:
        step(module, pictures())
    assert not record.impossible
    assert record.matrix_calls
