"""What a step may have besides a backward and an update, on the simulated GPU, compared with FP32 and the emulation."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.optimizers import OPTIMIZERS

import mxmp

from .families import CPU, GPU, ROWS, SMOOTH, Training, differing, distance, trained

TESTS_PER_PROCESS = 20
ENCODER, WORDS, RESIDUAL = SMOOTH["encoder"], SMOOTH["words"], SMOOTH["residual"]
RUNS = (None, CPU), ("float16", CPU), ("float16", GPU)
PAIR = (mx.gpu(0), mx.gpu(1))
LIKE_NO_OTHER_RUN = ("sgld", "signum")  # random; and a sign, which any rounding may turn


def assert_near(exact: np.ndarray, emulated: np.ndarray, computed: np.ndarray, room: float = 1.0) -> None:
    own = distance(emulated, exact)
    assert 0 < own < 4e-3
    assert distance(computed, emulated) < room * own


def test_two_devices_train_as_one_and_hold_the_same_bits(two_devices):
    exact, one = trained(WORDS, None, CPU), trained(WORDS, "float16", GPU)
    two = trained(WORDS, "float16", *PAIR)
    assert differing(two.weights(0), two.weights(1)) == []
    assert_near(exact.change(), one.change(), two.change())


@pytest.mark.parametrize("times", [(1e30, 1), (1, 1e30)])
def test_an_overflow_in_the_data_of_one_device_changes_no_bit_on_either(times, two_devices):
    run = Training(ENCODER, "float16", *PAIR, scale=mxmp.DynamicLossScaler(128.0))
    run.steps(2)
    before = run.weights()
    run.step(2, times=times)
    assert run.trainer.last_step_skipped
    assert run.trainer.loss_scale == 64
    assert differing(before, run.weights(0)) == differing(before, run.weights(1)) == []
    run.step(3)
    assert differing(run.weights(0), run.weights(1)) == []
    assert differing(before, run.weights()) == [name for name in before if "running" not in name]


def accumulated(run: Training, times: float = 1.0) -> Training:
    for i in range(2):
        run.net.collect_params().zero_grad()
        run.backward(2 * i)
        run.backward(2 * i + 1, times=(times,))
        run.trainer.step(2 * ROWS)
    return run


def test_accumulated_gradients_change_the_weights_as_in_fp32():
    runs = [accumulated(Training(ENCODER, *run, request="add")) for run in RUNS]
    assert_near(*(run.change() for run in runs))


def test_an_overflow_in_one_of_two_backwards_skips_their_step():
    run = accumulated(Training(ENCODER, "float16", GPU, request="add", scale=mxmp.DynamicLossScaler(128.0)), 1e30)
    assert run.trainer.skipped_steps == 2
    assert differing(run.before, run.weights()) == []


def clipped(*run: Any) -> tuple[float, float]:
    """The norm before clipping, and how far the weights went in an update by plain SGD."""
    made = Training(ENCODER, *run, options={"learning_rate": 1.0})
    made.backward(0)
    if made.mixed:
        norm = made.trainer.clip_global_norm(0.5)
    else:
        arrays = [param.grad() for param in made.net.collect_params().values() if param.grad_req != "null"]
        norm = gluon.utils.clip_global_norm(arrays, 0.5)
    made.trainer.step(1)
    return float(norm), float(np.linalg.norm(made.change()))


def test_clipping_takes_and_returns_the_norm_of_the_true_gradients():
    (norm, _), (computed, moved) = clipped(None, CPU), clipped("float16", GPU)
    assert norm > 1
    assert computed == pytest.approx(norm, rel=1e-3)
    assert moved == pytest.approx(0.5, rel=1e-3)


def optimized(name: str, policy: str | None, ctx: mx.Context) -> dict[str, np.ndarray]:
    """FP32 weights after four steps of a net of two layers."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(9, in_units=7, use_bias=False, activation="tanh"), nn.Dense(5, in_units=9, use_bias=False))
    mx.random.seed(5)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net.collect_params().reset_ctx(ctx)
    if policy:
        mxmp.convert(net, policy)
    net.hybridize()
    made = mxmp.Trainer if policy else gluon.Trainer
    own: dict[str, Any] = {"loss_scale": 64.0} if policy else {}
    trainer = made(net.collect_params(), name, dict(OPTIMIZERS[name]), **own)
    for number in range(4):
        rng = np.random.RandomState(number)
        x, y = (mx.nd.array(rng.randn(6, size), ctx=ctx) for size in (7, 5))
        mx.random.seed(number)  # SGLD draws
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        (trainer.backward if policy else autograd.backward)(loss)
        trainer.step(6)
    if policy:
        mxmp.restore(net)
    return {name: param.data(ctx).asnumpy() for name, param in net.collect_params().items()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_updates_masters_as_it_does_fp32_weights(name):
    """Float16 weights with masters and FP32 weights with casts: the same numbers. And both near FP32."""
    stored, cast = (optimized(name, f"float16,params={params}", GPU) for params in ("float16", "float32"))
    full = stored if name in LIKE_NO_OTHER_RUN else optimized(name, None, CPU)
    for key, value in cast.items():
        last_bit = 2.0**-23 if name == "nag" else 0.0  # MXNet's two kernels differ: see below
        np.testing.assert_allclose(stored[key], value, rtol=0, atol=last_bit, err_msg=key)
        np.testing.assert_allclose(stored[key], full[key], rtol=0, atol=4e-3 * np.abs(value).max(), err_msg=key)


def test_mxnets_two_kernels_of_nag_may_differ_in_the_last_bit():
    rng = np.random.RandomState(0)
    weight, gradient, momentum = (rng.randn(100000).astype(dtype) for dtype in ("float32", "float16", "float32"))
    options = {"lr": 0.05, "momentum": 0.9, "wd": 1e-3, "rescale_grad": 1 / 384}
    plain, master, first, second = (mx.nd.array(each, ctx=GPU) for each in (weight, weight, momentum, momentum))
    mx.nd.nag_mom_update(plain, mx.nd.array(gradient, ctx=GPU), first, out=plain, **options)
    low, low_gradient = (mx.nd.array(each, ctx=GPU, dtype="float16") for each in (weight, gradient))
    mx.nd.mp_nag_mom_update(low, low_gradient, second, master, out=low, **options)
    plain, master = plain.asnumpy(), master.asnumpy()
    assert 0 < (plain != master).sum() < 100  # found: 9
    np.testing.assert_allclose(plain, master, rtol=0, atol=2.0**-21)


def test_a_run_resumed_after_an_overflow_is_bit_equal(tmp_path):
    """Adam's states and counts, the scale and its count of steps; parameters of two names and one value."""

    def begun() -> Training:
        scaler = mxmp.DynamicLossScaler(256.0, growth_interval=2)
        return Training(WORDS, "float16", GPU, optimizer="adam", options={"learning_rate": 0.01}, scale=scaler)

    through = begun()
    through.steps(2)
    through.step(2)
    through.net.save_parameters(str(tmp_path / "net"))
    through.trainer.save_states(str(tmp_path / "trainer"))
    again = begun()
    again.net.load_parameters(str(tmp_path / "net"), ctx=GPU)
    again.trainer.load_states(str(tmp_path / "trainer"))
    assert again.steps(4, first=3) == through.steps(4, first=3)
    assert again.trainer.loss_scale == through.trainer.loss_scale > 256
    assert differing(through.weights(), again.weights()) == []


def test_a_restored_net_with_shared_parameters_has_its_masters():
    run = trained(WORDS, "float16", GPU)
    masters = run.weights()
    mxmp.restore(run.net)
    assert differing(masters, run.weights()) == []
    assert run.net.decoder.weight is run.net.embedding.weight


@pytest.mark.parametrize("safe", ["0", "1"])
def test_with_and_without_safe_accumulation_an_encoder_trains_as_in_the_emulation(safe, monkeypatch):
    """With it, softmax and LayerNorm read and write float16."""
    monkeypatch.setenv("MXNET_SAFE_ACCUMULATION", safe)
    runs = (None, CPU), ("float16-fast", CPU), ("float16-fast", GPU)
    assert_near(*(trained(ENCODER, *run).change() for run in runs))


@pytest.mark.parametrize("family", [RESIDUAL, ENCODER], ids=["residual", "encoder"])
def test_pointwise_fusion_changes_no_more_than_a_rounding(family, fusion):
    assert_near(*(trained(family, *run, count=2).change() for run in RUNS), room=1.5)
