"""Families of networks train on the null GPU: no call fails, products sum in FP32, an overflow changes nothing."""

from __future__ import annotations

import mxnet as mx
import pytest
from gpu.null.networks import FAMILIES
from gpu.null.record import Record, overflow, peak_bytes, recording
from gpu.null.training import FP32, Training
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

from .checks import no_tensor_cores, plain_float16_sums, updates, wrong_matrix_calls

# What GluonCV says while it makes its networks, and of values that nobody has computed.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("User", "Runtime")]
LOW = ("float16", "float16-fast")
BY_CUDNN_RNN = ("lstm", "gru", "standard_lstm_lm_200")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_trains_in_fp32(name):
    """Where this fails, the null GPU lacks something, not mxmp."""
    training = Training(FAMILIES[name](), FP32)
    with recording() as record:
        training.run(2)
    assert not record.impossible
    assert updates(record)
    assert {dtype for call in record.matrix_calls for dtype in call.dtypes} == {"f32"}


@pytest.mark.parametrize("how", LOW)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_trains_and_an_overflow_updates_nothing(name, how):
    training = Training(FAMILIES[name](), how)
    with recording() as clean:
        training.run(2)
    assert not clean.impossible
    assert updates(clean)
    assert any(call.dtypes == {"f16"} for call in clean.matrix_calls)
    assert not wrong_matrix_calls(clean)
    if name not in BY_CUDNN_RNN:
        assert not no_tensor_cores(clean)
    assert not plain_float16_sums(clean)

    trainer, before = training.trainer, state(training)
    scale = trainer.loss_scale
    training.forward_backward()
    with overflow(), recording() as skipped:
        training.step()
    assert trainer.last_step_skipped
    assert trainer.loss_scale == scale / 2
    assert not updates(skipped)
    assert state(training) == before


@pytest.mark.parametrize("name", BY_CUDNN_RNN)
def test_mxnet_requests_no_tensor_cores_for_recurrent_layers(name):
    """rnn-inl.h of MXNet 1.9.1 sets the default math mode: rules, explain and advise say so."""
    training = Training(FAMILIES[name](), "float16")
    with recording() as record:
        training.run(1)
    assert no_tensor_cores(record)


def state(training: Training) -> dict[str, bytes]:
    """Weights, masters and optimizer states, as bytes. Kernels write nothing here, copies do."""
    found = {}
    for param in training.net.collect_params().values():
        if param.grad_req != "null" and param._data is not None:
            arrays = [*param.list_data(), *(param.masters() if hasattr(param, "masters") else [])]
            found.update({f"{param.name} {i}": array.asnumpy().tobytes() for i, array in enumerate(arrays)})
    return found


def a_step(name: str, how: str, optimizer: str = "sgd") -> Record:
    training = Training(FAMILIES[name](), how, optimizer=optimizer)
    training.run(1)
    training.forward_backward()
    with recording() as record:
        training.step()
    return record


STEPS = [
    *((name, "sgd") for name in ("resnet18_v1b", "gluon.densenet121", "lstm")),
    *((name, "adam") for name in ("resnet18_v1b", "bert")),
]


@pytest.mark.parametrize(("name", "optimizer"), STEPS)
def test_a_step_launches_at_most_15_kernels_more_than_fp32s(name, optimizer):
    """Statistics and sums are not copied one by one, of DenseNet-121 242 and 3; nor are gradients and masters."""
    found, fp32 = a_step(name, "float16", optimizer), a_step(name, FP32, optimizer)
    assert len(found.launches) <= len(fp32.launches) + 15
    assert not found.named("SliceExp<")  # concat


def test_sgd_updates_up_to_45_weights_by_one_kernel(monkeypatch):
    """Of DenseNet-121, with 364 weights, MXNet's own step launches 91."""
    found, fp32 = (a_step("gluon.densenet121", how).named("MultiSGD") for how in ("float16", FP32))
    assert len(found) * 5 < len(fp32)
    monkeypatch.setenv("MXNET_OPTIMIZER_AGGREGATION_SIZE", "4")
    assert len(a_step("gluon.densenet121", "float16").named("MultiSGD")) >= len(fp32)


@pytest.mark.parametrize("name", ["resnet18_v1b", "gluon.densenet121", "bert"])
def test_a_step_after_a_user_has_read_all_weights_launches_few_kernels_more(name):
    """Compared one by one with their masters, weights cost four launches each: of DenseNet-121 484."""
    training = Training(FAMILIES[name](), "float16")
    training.run(1)
    launches = []
    for _ in range(2):
        training.forward_backward()
        with recording() as record:
            training.step()
        assert not record.impossible
        launches.append(len(record.launches))
        for param in training.net.collect_params().values():
            param.list_data()
    assert launches[0] < launches[1] <= launches[0] + 20


FUSED = ("resnet18_v1b", "mobilenetv3_small", "se_resnet18_v1", "lstm", "bert", "dcgan.generator")


@pytest.mark.parametrize("how", [*LOW, "params=float32"])
@pytest.mark.parametrize("name", FUSED)
def test_a_network_trains_with_pointwise_fusion(name, how, fusion):
    training = Training(FAMILIES[name](), how)
    with recording() as record:
        training.run(1)
    assert record.of("fused")
    assert not record.impossible
    assert not wrong_matrix_calls(record)


FLAGS = [
    {"active": False},
    {"static_alloc": True},
    {"static_alloc": True, "static_shape": True},
    {"inline_limit": 0, "forward_bulk_size": 1, "backward_bulk_size": 1},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags))
@pytest.mark.parametrize("name", ["resnet18_v2", "lstm", "bert"])
def test_a_network_trains_hybridized_with_any_flags(name, flags):
    training = Training(FAMILIES[name](), "float16", **flags)
    with recording() as record:
        training.run(2)
    assert not record.impossible
    assert not wrong_matrix_calls(record)
    assert updates(record)


@pytest.mark.parametrize("kvstore", ["device", "local"])
@pytest.mark.parametrize("how", LOW)
def test_two_devices_train(how, kvstore, two_devices):
    training = Training(FAMILIES["resnet18_v2"](), how, devices=2, kvstore=kvstore)
    with recording() as record:
        training.run(2)
    assert not record.impossible
    for kind in ("matrix_calls", "launches"):
        assert {event.device for event in getattr(record, kind)} == {0, 1}
    assert {event.device for event in updates(record)} == {0, 1}


@pytest.mark.parametrize(("optimizer", "in_fp32"), [("adam", 16), ("rmsprop", 12)])
def test_an_update_keeps_few_gradients_in_fp32_at_a_time(optimizer, in_fp32):
    """In FP32 a weight, its gradient and states take so many bytes; all gradients in FP32 would be 4 more."""
    net = nn.HybridSequential()
    net.add(*(nn.Dense(2048, in_units=2048) for _ in range(12)))
    net.initialize(mx.init.One(), ctx=mx.gpu())
    mxmp.convert(net, "float16")
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mxmp.Trainer(net.collect_params(), optimizer)
    for _ in range(2):
        with autograd.record():
            loss = net(mx.nd.ones((2, 2048), mx.gpu())).sum()
        trainer.backward(loss)
        trainer.step(2)
        mx.nd.waitall()
    assert peak_bytes() < (in_fp32 + 2.5) * 12 * 2048 * 2048


class Loop(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.cell = mx.gluon.rnn.LSTMCell(64, input_size=64)

    def hybrid_forward(self, F, x, h, c):  # noqa: N803
        return F.contrib.foreach(self.cell, x, [h, c])[0]


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}])
def test_no_iteration_of_a_loop_casts_a_weight(flags):
    """Each copy would be kept for the backward: ELMo took 1.8 times FP32's memory."""
    net = Loop()
    net.initialize(ctx=mx.gpu())
    mxmp.convert(net, "float16")
    net.hybridize(**flags)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        with recording() as record:
            with autograd.record():
                h, c = (mx.nd.ones((2, 64), mx.gpu()) for _ in range(2))
                loss = net(mx.nd.ones((5, 2, 64), mx.gpu()), h, c).sum()
            trainer.backward(loss)
            trainer.step(2)
            mx.nd.waitall()
    assert not record.impossible
    assert not wrong_matrix_calls(record)
    assert updates(record)
    assert record.casts
    assert max(event.bytes_cast for event in record.casts) < net.cell.h2h_weight.data().size


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam"])
def test_a_net_of_numpy_arrays_trains(optimizer):
    with mx.util.np_shape(True), mx.util.np_array(True), recording() as record:
        net = nn.HybridSequential()
        net.add(nn.Dense(8, in_units=4), nn.Dense(2, in_units=8))
        net.initialize(ctx=mx.gpu())
        mxmp.convert(net, "float16")
        net.hybridize()
        trainer = mxmp.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
        with autograd.record():
            loss = net(mx.np.ones((3, 4), ctx=mx.gpu())).sum()
        trainer.backward(loss)
        trainer.step(1)
    assert not record.impossible
    assert updates(record)
    assert not wrong_matrix_calls(record)


def test_a_network_runs_at_inference():
    training = Training(FAMILIES["resnet18_v1b"](), "float16")
    with recording() as record, mx.gpu():
        training.net(*training.case.inputs())
    assert not record.impossible
    assert not wrong_matrix_calls(record)
    assert {call.details["x"][:3] for call in record.named("BatchNormalizationForwardInference")} <= {"f32", "f16"}


def test_a_sparse_gradient_keeps_no_dense_weight_from_being_updated_with_others():
    net = nn.HybridSequential()
    net.add(nn.Embedding(8, 4, sparse_grad=True), *(nn.Dense(4, in_units=4, flatten=False) for _ in range(5)))
    net.initialize(ctx=mx.gpu())
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for _ in range(2):
        with autograd.record():
            loss = net(mx.nd.ones((2, 3), ctx=mx.gpu())).sum()
        trainer.backward(loss)
        with recording() as record:
            trainer.step(2)
    assert len(record.named("MultiSGD")) == 1


def test_an_overflow_is_found_beside_a_sparse_gradient_without_rows():
    """As of an embedding that a step does not use. A GPU takes no launch for an empty array."""
    net = nn.HybridSequential()
    net.add(nn.Embedding(8, 4, sparse_grad=True), nn.Dense(4, in_units=4, flatten=False))
    net.initialize(ctx=mx.gpu())
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        loss = net(mx.nd.ones((2, 3), ctx=mx.gpu())).sum()
    trainer.backward(loss)
    assert not net[0].weight.grad().data.size  # nothing is computed here
    with overflow(), recording() as record:
        trainer.step(2)
    assert trainer.last_step_skipped
    assert not updates(record)
