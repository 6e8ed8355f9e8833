"""Training on the simulated GPU: MXNet's machine code computes, and mxmp must keep its promises on its numbers."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

from .families import CPU, GPU, ROWS, SMOOTH, Training, differing, distance, trained

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
DATA = [(np.random.RandomState(i).randn(8, 3, 8, 8), np.random.RandomState(i).randint(0, 5, 8)) for i in range(4)]


def network(ctx: mx.Context = GPU) -> gluon.HybridBlock:
    """Smooth, so that gradients are comparable; every parameter is drawn on the CPU."""
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("softsign"), nn.AvgPool2D())
        net.add(nn.Dense(16, activation="tanh"), nn.Dense(5))
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net(mx.nd.zeros((1, 3, 8, 8)))
    net.collect_params().reset_ctx(ctx)
    return net


class Run:
    """A network and its trainer."""

    def __init__(self, policy: str | None = "float16", ctx: mx.Context = GPU, **options: Any) -> None:
        self.ctx, self.net = ctx, network(ctx)
        self.before = self.weights()
        if policy:
            mxmp.convert(self.net, policy)
        self.net.hybridize()
        options.setdefault("loss_scale", 256.0)
        make = mxmp.Trainer if policy else gluon.Trainer
        how = {"learning_rate": 0.1, "momentum": 0.9}
        self.trainer: Any = make(self.net.collect_params(), "sgd", how, **(options if policy else {"kvstore": None}))
        self.mixed = policy is not None

    def step(self, number: int, times: float = 1.0) -> float:
        """One step on one of the batches, whose images are multiplied; its loss."""
        x, y = DATA[number % len(DATA)]
        x, y = mx.nd.array(x * times, ctx=self.ctx), mx.nd.array(y, ctx=self.ctx)
        with autograd.record():
            loss = LOSS(self.net(x), y)
        if self.mixed:
            self.trainer.backward(loss)
        else:
            loss.backward()
        self.trainer.step(len(x))
        return float(loss.mean().asscalar())

    def steps(self, count: int, first: int = 0) -> list[float]:
        return [self.step(first + i) for i in range(count)]

    def weights(self) -> dict[str, np.ndarray]:
        """FP32 masters where float16 is stored, and the running statistics."""
        found = self.net._collect_params_with_prefix()
        arrays = {name: p.masters()[0] if hasattr(p, "masters") else p.data(self.ctx) for name, p in found.items()}
        return {name: array.asnumpy() for name, array in arrays.items()}


def change(run: Run) -> np.ndarray:
    after = run.weights()
    return np.concatenate([(after[name] - run.before[name]).ravel() for name in sorted(after) if "running" not in name])


def test_float16_trains_as_fp32_does():
    """The change of the weights after eight steps: FP32 on the GPU is the CPU's, and float16 is near both."""
    runs = {"cpu": Run(None, mx.cpu()), "gpu": Run(None), "float16": Run("float16"), "fast": Run("float16-fast")}
    losses = {name: run.steps(8) for name, run in runs.items()}
    assert losses["float16"][-1] < losses["float16"][0]
    cpu = change(runs["cpu"])
    assert distance(change(runs["gpu"]), cpu) < 1e-4
    assert distance(change(runs["float16"]), cpu) < 1e-2
    assert distance(change(runs["fast"]), cpu) < 2e-2
    assert np.abs(np.subtract(losses["float16"], losses["cpu"])).max() < 5e-3
    assert runs["float16"].trainer.skipped_steps == 0


@pytest.mark.parametrize("policy", ["float16", "float16,params=float32"])
def test_an_overflow_changes_no_bit_and_halves_the_scale(policy):
    run = Run(policy, loss_scale=mxmp.DynamicLossScaler(256.0))
    run.steps(2)
    weights, scale = run.weights(), run.trainer.loss_scale
    run.step(3, times=1e6)
    assert run.trainer.last_step_skipped
    assert differing(weights, run.weights()) == []
    assert run.trainer.loss_scale == scale / 2
    run.step(0)
    assert not run.trainer.last_step_skipped
    assert len(differing(weights, run.weights())) > 0


def test_after_an_overflow_a_run_goes_on_as_one_that_never_had_it():
    """At the same loss scale, to the last bit: momenta are as they were, too."""
    runs = [Run("float16"), Run("float16")]
    for i, run in enumerate(runs):
        run.steps(2)
        if i:
            run.step(3, times=1e6)
            assert run.trainer.last_step_skipped
        run.steps(2, first=2)
    assert differing(runs[0].weights(), runs[1].weights()) == []


def test_a_loss_scale_beyond_the_range_is_found_and_halved_until_it_fits():
    run = Run("float16", loss_scale=mxmp.DynamicLossScaler(2.0**24))
    skipped = []
    for i in range(16):
        run.step(i)
        skipped.append(run.trainer.last_step_skipped)
    assert skipped[0]
    assert not skipped[-1]
    assert run.trainer.loss_scale == 2.0 ** (24 - sum(skipped))
    assert all(np.isfinite(value).all() for value in run.weights().values())


def test_masters_of_float16_weights_are_the_fp32_stored_weights():
    """params="float16", the default on a GPU, and params="float32": the same weights to the last bit."""
    runs = [Run(policy) for policy in ("float16,params=float16", "float16,params=float32")]
    losses = [run.steps(5) for run in runs]
    assert losses[0] == losses[1]
    assert np.float16 in {p.data(GPU).dtype for p in runs[0].net._collect_params_with_prefix().values()}
    for run in runs:
        mxmp.restore(run.net)
    assert differing(runs[0].weights(), runs[1].weights()) == []


def test_a_restored_net_computes_in_fp32_what_it_trained():
    run = Run("float16")
    run.steps(3)
    mxmp.restore(run.net)
    x = mx.nd.array(DATA[0][0], ctx=GPU)
    found = run.net(x)
    fresh = network()
    for name, param in fresh._collect_params_with_prefix().items():
        param.set_data(mx.nd.array(run.weights()[name], ctx=GPU))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.asnumpy(), fresh(x).asnumpy())


def test_a_resumed_run_is_bit_equal(tmp_path):
    through = Run("float16", loss_scale=mxmp.DynamicLossScaler(512.0, growth_interval=3))
    through.steps(4)
    through.net.save_parameters(str(tmp_path / "net"))
    through.trainer.save_states(str(tmp_path / "trainer"))
    losses = through.steps(4, first=4)
    again = Run("float16", loss_scale=mxmp.DynamicLossScaler(512.0, growth_interval=3))
    again.net.load_parameters(str(tmp_path / "net"), ctx=GPU)
    again.trainer.load_states(str(tmp_path / "trainer"))
    assert again.steps(4, first=4) == losses
    assert again.trainer.loss_scale == through.trainer.loss_scale
    assert differing(through.weights(), again.weights()) == []


def module(policy: str | None) -> Any:
    data = mx.sym.Variable("data")
    net = mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), pad=(1, 1), name="conv")
    net = mx.sym.Activation(mx.sym.BatchNorm(net, fix_gamma=False, name="norm"), act_type="softsign")
    net = mx.sym.FullyConnected(mx.sym.Pooling(net, global_pool=True, pool_type="avg"), num_hidden=5, name="out")
    symbol = mx.sym.SoftmaxOutput(net, name="softmax")
    options = {} if policy is None else {"policy": policy, "loss_scale": mxmp.DynamicLossScaler(64.0)}
    made = (mx.mod.Module if policy is None else mxmp.Module)(symbol, context=GPU, **options)
    made.bind([("data", (8, 3, 8, 8))], [("softmax_label", (8,))])
    mx.random.seed(1)
    made.init_params(mx.init.Xavier())
    made.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    return made


def batch(number: int, times: float = 1.0) -> mx.io.DataBatch:
    x, y = DATA[number % len(DATA)]
    return mx.io.DataBatch([mx.nd.array(x * times)], [mx.nd.array(y)])


def fitted(made: Any, count: int) -> dict[str, np.ndarray]:
    for i in range(count):
        made.forward_backward(batch(i))
        made.update()
    return {name: value.asnumpy() for name, value in made.get_params()[0].items()}


def test_a_module_trains_as_fp32_does_and_skips_an_overflow():
    plain, mixed = module(None), module("float16")
    before = {name: value.asnumpy() for name, value in plain.get_params()[0].items()}
    mixed.set_params(*plain.get_params())
    wanted, found = fitted(plain, 6), fitted(mixed, 6)
    moved = [np.concatenate([(each[n] - before[n]).ravel() for n in sorted(before)]) for each in (found, wanted)]
    assert distance(*moved) < 1e-2
    scale = mixed.loss_scale
    mixed.forward_backward(batch(0, times=1e6))
    mixed.update()
    assert mixed.loss_scale == scale / 2
    assert differing(found, {name: value.asnumpy() for name, value in mixed.get_params()[0].items()}) == []


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
