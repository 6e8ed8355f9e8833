"""Training on the simulated GPU: MXNet's machine code computes, and mxmp must keep its promises on its numbers."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import mxmp

from .families import CPU, GPU, ROWS, SMOOTH, Training, differing, distance, trained

RESIDUAL = SMOOTH["residual"]


def test_float16_trains_as_fp32_does():
    """The change of the weights after eight steps: FP32 on the GPU is the CPU's, and float16 is near both."""
    cpu, gpu, low, fast = (
        trained(RESIDUAL, *run, count=8) for run in ((None, CPU), (None, GPU), ("float16", GPU), ("float16-fast", GPU))
    )
    assert low.losses[-1] < low.losses[0]
    assert distance(gpu.change(), cpu.change()) < 1e-4
    assert distance(low.change(), cpu.change()) < 1e-2
    assert distance(fast.change(), cpu.change()) < 2e-2
    assert np.abs(np.subtract(low.losses, cpu.losses)).max() < 5e-3
    assert low.trainer.skipped_steps == 0


@pytest.mark.parametrize("policy", ["float16", "float16,params=float32"])
def test_an_overflow_changes_no_bit_and_halves_the_scale(policy):
    run = Training(RESIDUAL, policy, GPU, scale=mxmp.DynamicLossScaler(256.0))
    run.steps(2)
    weights, scale = run.weights(), run.trainer.loss_scale
    run.step(3, times=(1e30,))
    assert run.trainer.last_step_skipped
    assert differing(weights, run.weights()) == []
    assert run.trainer.loss_scale == scale / 2
    run.step(0)
    assert not run.trainer.last_step_skipped
    assert len(differing(weights, run.weights())) > 0


def test_after_an_overflow_a_run_goes_on_as_one_that_never_had_it():
    """At the same loss scale, to the last bit: momenta are as they were, too."""
    runs = [Training(RESIDUAL, "float16", GPU) for _ in range(2)]
    for i, run in enumerate(runs):
        run.steps(2)
        if i:
            run.step(3, times=(1e30,))
            assert run.trainer.last_step_skipped
        run.steps(2, first=2)
    assert differing(runs[0].weights(), runs[1].weights()) == []


def test_a_loss_scale_beyond_the_range_is_found_and_halved_until_it_fits():
    run = Training(RESIDUAL, "float16", GPU, scale=mxmp.DynamicLossScaler(2.0**24))
    skipped = []
    for i in range(16):
        run.step(i % 4)
        skipped.append(run.trainer.last_step_skipped)
    assert skipped[0]
    assert not skipped[-1]
    assert run.trainer.loss_scale == 2.0 ** (24 - sum(skipped))
    assert all(np.isfinite(value).all() for value in run.weights().values())


def test_masters_of_float16_weights_are_the_fp32_stored_weights():
    """params="float16", the default on a GPU, and params="float32": the same weights to the last bit."""
    runs = [trained(RESIDUAL, f"float16,params={params}", GPU, count=5) for params in ("float16", "float32")]
    assert runs[0].losses == runs[1].losses
    assert np.float16 in {p.data(GPU).dtype for p in runs[0].net._collect_params_with_prefix().values()}
    for run in runs:
        mxmp.restore(run.net)
    assert differing(runs[0].weights(), runs[1].weights()) == []


def test_a_restored_net_computes_in_fp32_what_it_trained():
    run, fresh = trained(RESIDUAL, "float16", GPU), Training(RESIDUAL, None, GPU).net
    mxmp.restore(run.net)
    x = mx.nd.array(RESIDUAL.batch(0)[0], ctx=GPU)
    found = run.net(x)
    for name, param in fresh._collect_params_with_prefix().items():
        param.set_data(mx.nd.array(run.weights()[name], ctx=GPU))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.asnumpy(), fresh(x).asnumpy())


def trained_by_contrib_amp(name: str, count: int = 3) -> Training:
    """MXNet's own mixed precision, at the same loss scale. Patches MXNet."""
    from mxnet.contrib import amp

    run = Training(SMOOTH[name], None, GPU)
    amp.init()
    amp.init_trainer(run.trainer)
    scaler = run.trainer._amp_loss_scaler
    scaler._loss_scale = scaler._next_loss_scale = 128.0
    for number in range(count):
        x, y = (mx.nd.array(each, ctx=GPU) for each in run.family.batch(number))
        with autograd.record():
            loss = run.family.loss(run.net(x), y)
            with amp.scale_loss(loss, run.trainer) as scaled:
                autograd.backward(scaled)
        run.trainer.step(ROWS)
    return run


@pytest.mark.parametrize("name", ["residual", "depthwise"])  # its batch_dot sums in float16
def test_the_weights_are_as_near_fp32s_as_those_of_contrib_amp(name):
    exact, ours = (trained(SMOOTH[name], *run).change() for run in ((None, CPU), ("float16", GPU)))
    theirs = trained_by_contrib_amp(name).change()
    assert 0 < distance(theirs, exact) < 2e-2
    assert distance(ours, exact) < 1.5 * distance(theirs, exact)


class LongSums(gluon.HybridBlock):
    """3,000 terms in a softmax, and 3,000 in the gradient of one row of an embedding."""

    def __init__(self) -> None:
        super().__init__(prefix="long_")
        with self.name_scope():
            self.table = self.params.get("table", shape=(4, 8))
            self.weight = self.params.get("weight", shape=(8, 3000))

    def hybrid_forward(self, F, x, table, weight):  # noqa: N803
        rows = F.Embedding(x, table, input_dim=4, output_dim=8)
        return rows, F.softmax(F.dot(F.slice_axis(rows, axis=0, begin=0, end=4), weight))


def long_sums(policy: str | None, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """The softmax, and the gradient of the row that all indices read."""
    net = LongSums()
    net.initialize(mx.init.Constant(0.01), ctx=GPU)
    if policy:
        mxmp.convert(net, policy)
        net.hybridize()
    net.cast(dtype)
    with autograd.record():
        rows, softmax = net(mx.nd.zeros((3000,), ctx=GPU))
    rows.backward()
    table = net.collect_params()["long_table"].grad(GPU)
    return softmax.astype("float32").asnumpy(), table.astype("float32").asnumpy()[0]


def test_long_sums_are_in_fp32_where_mxnets_float16_kernels_stop():
    softmax, gradient = long_sums("float16,params=float32")
    np.testing.assert_allclose(softmax, 1 / 3000, rtol=2e-3)
    assert gradient.tolist() == [3000] * 8
    _, gradient = long_sums(None, "float16")  # what a dropped rule would give
    assert gradient.tolist() == [2048] * 8
