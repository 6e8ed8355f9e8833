"""``verify``: whether a port is right, and what is left only rounding, of small programs in the style of real ones."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from kit.ports import scaled, training
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.ports import PORTS, PROGRAMS, WRONG

import mxmp
from mxmp.diagnose import verify
from mxmp.diagnose.verifying.judging import Departure, constant_factor
from mxmp.diagnose.verifying.running import Runner
from mxmp.gluon.hook import hook_of


def test_the_table_has_every_wrong_program():
    assert sorted(WRONG) == sorted(path.stem for path in (PROGRAMS / "wrong").glob("*.py"))


@pytest.fixture(scope="module")
def unused_process():
    """MXNet chooses its kernels for the life of a process, and of its forks: in this one it has computed before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("port", [*PORTS[::4], *PORTS[3::4]], ids=lambda port: f"{port.name}-{port.dtype}")
def test_a_port_is_called_right_or_named(port, unused_process):
    """Each in one of the dtypes; ``scripts/dev.py check verify`` tries both."""
    found = unused_process.submit(port.verified).result()
    assert port.is_answered(found), str(found)
    assert found.status == port.status


# -- A function ------------------------------------------------------------------------------------


def unseeded(*shape):
    return np.random.RandomState(list(os.urandom(16))).randn(*shape)


UNKNOWN = {
    "it fails in plain MXNet": (lambda: 1 / 0, "in plain MXNet it fails with ZeroDivisionError: division by zero"),
    "no update": (lambda: None, "no loss scale: give them to an mxmp.Trainer, or a Symbol to an mxmp.Module"),
    "it exits with an error": (lambda: sys.exit("no data"), "fails with SystemExit('no data')"),
    "it crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "fails with SIGSEGV"),
    "it is not reproducible": (
        training(scaled, draw=unseeded),
        "two plain runs with the same seeds differ from update 1",
    ),
    "plain MXNet is NaN": (
        training(scaled, draw=lambda *shape: np.full(shape, 1e30)),
        "from update 1 on, plain MXNet's own gradients are inf or NaN",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_said_has_its_reason(case):
    run, why = UNKNOWN[case]
    found = verify(run, progress=False)
    assert found.right is None, str(found)
    assert found.verdict.startswith("Cannot say: ")
    assert why in found.verdict
    assert found.status == 2


@pytest.mark.slow
def test_a_trainer_over_a_net_that_is_not_converted():
    def run():
        net = nn.Dense(1, in_units=2)
        net.initialize()
        trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=None)
        with autograd.record():
            loss = net(mx.nd.ones((1, 2)))
        trainer.backward(loss)
        trainer.step(1)

    assert "nothing is converted" in verify(run, progress=False).verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda: mx.nd.ones((8, 3), dtype="float16"),
        lambda: mx.nd.random.uniform(shape=(8, 3), dtype="float16"),
        lambda: mx.nd.one_hot(mx.nd.arange(8) % 3, 3, dtype=np.float16),
        lambda: mx.nd.full((8, 3), 0.5, mx.cpu(), np.dtype("float16")),
    ],
)
def test_arrays_that_a_script_makes_in_float16_are_fp32_in_plain(made):
    def run():
        net = nn.Dense(2, in_units=3)
        net.initialize()
        mxmp.convert(net, "float16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd")
        for _ in range(3):
            with autograd.record():
                loss = net(made()).square().sum()
            trainer.backward(loss)
            trainer.step(8)

    found = verify(run, 3, progress=False)
    assert found.right, str(found)


@pytest.mark.slow
def test_a_difference_of_many_times_the_noise_that_is_called_right_says_how_small_it_is():
    """Subnormal data, which float16 has few digits of."""

    def run():
        net = nn.Dense(2, in_units=3, use_bias=False)
        net.initialize()
        mxmp.convert(net, "float16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=1024)
        for _ in range(5):
            x = mx.nd.array(1e-6 * np.random.randn(4, 3))
            with autograd.record():
                loss = (net(x) * x[:, :2]).sum() * 1e6
            trainer.backward(loss)
            trainer.step(4)

    found = verify(run, 5, progress=False)
    assert found.right, str(found)
    assert found.noise_ratio > 10
    assert re.search(r"times the noise, [1-9]% of the gradients, where 10% are an error", found.verdict), found.verdict


def test_wrong_arguments():
    with pytest.raises(TypeError, match="a function that builds and trains, or a script, got int"):
        verify(3)
    with pytest.raises(ValueError, match="steps must be a positive integer"):
        verify(print, 0)
    with pytest.raises(ValueError, match="arguments are for a script"):
        verify(print, arguments=["--fast"])
    with pytest.raises(FileNotFoundError):
        verify("no-such-script.py")


@pytest.mark.slow
def test_a_trainer_of_gluon_beside_mxmps_is_compared_and_alone_is_none():
    def run(ours=True, scale=2e-4):
        def trained():
            nets = [nn.Dense(32, activation="tanh", in_units=8) for _ in range(2)]
            for net in nets:
                net.initialize(mx.init.Xavier())
                mxmp.convert(net, "float16")
            first = mxmp.Trainer(nets[0].collect_params(), "sgd", {"learning_rate": 0.1}) if ours else None
            other = gluon.Trainer(nets[1].collect_params(), "sgd", {"learning_rate": 0.1})
            for _ in range(6):
                x = mx.nd.array(np.random.randn(64, 8))
                if first:
                    with autograd.record():
                        loss = (nets[0](x) ** 2).mean()
                    first.backward(loss)
                    first.step(1)
                with autograd.record():
                    loss = scale * (nets[1](x) ** 2).mean()
                loss.backward()
                other.step(1)

        return trained

    found = verify(run(), 6, progress=False)
    assert found.status == 1, str(found)
    assert "a gluon.Trainer is left" in str(found)
    assert verify(run(scale=1.0), 6, progress=False).right  # nothing underflows
    assert "makes no update by an mxmp.Trainer" in verify(run(ours=False), 6, progress=False).verdict


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_of_a_net_that_one_rounding_of_its_weights_changes_nothing_is_said(seed):
    """The script writes them into the net's arrays, before the Trainer."""
    found = verify(PROGRAMS / "wrong" / "raw_year.py", 5, arguments=["bfloat16"], seed=seed, progress=False)
    assert found.status == 2
    assert "one rounding of the initial weights alone changes plain's own gradients by" in found.verdict
    assert found.reasons[0].startswith("bfloat16 has few digits: verify the port in float16")
    assert "such as a year" in str(found)


class Edge(nn.HybridBlock):
    """A ReLU that is one digit below 0."""

    def __init__(self, prefix):
        super().__init__(prefix=prefix)
        self.bias = self.params.get("bias", shape=(1, 1), init=mx.init.Constant(-0.75 - 2.0**-24))
        self.bias.lr_mult = 0.0

    def hybrid_forward(self, F, x, bias):  # noqa: N803
        return F.relu(F.broadcast_add(x, bias)) + 1


def at_a_threshold(name, factor=1.0):
    """In FP32 mxmp's graph may sum in another order: here it is one digit above 0, which is half a gradient."""

    def run():
        net = nn.HybridSequential(prefix="")
        net.add(Edge(name), nn.Dense(2, in_units=4, prefix="last_"))
        net.initialize(mx.init.Xavier())
        mxmp.convert(net, "float16")
        is_graph = hook_of(net) is not None
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
        for number in range(5):
            if is_graph and number == 1:
                net[0].bias.set_data(net[0].bias.data() + 2.0**-23)
            with autograd.record():
                loss = (net(mx.nd.full((4, 4), 0.75)) ** 2).sum() * (factor if is_graph and number > 1 else 1.0)
            trainer.backward(loss)
            trainer.step(4)

    return run


@pytest.mark.slow
def test_a_threshold_between_plain_and_graph_makes_no_port_wrong():
    found = verify(at_a_threshold("relu_"), 5, progress=False)
    assert found.right, str(found)
    assert "two sides of a threshold" in found.verdict
    assert found.agreement < 1e-6
    found = verify(at_a_threshold("relu_", factor=1.001), 5, progress=False)
    assert found.verdict.startswith("The port is not right"), str(found)


# -- Random draws of a hybridized net ----------------------------------------------------------------


class Warming(nn.HybridBlock):
    factor = 1.0

    def hybrid_forward(self, F, x):  # noqa: N803
        return x * self.factor


def two_dropouts(unscales, warms=False):
    """MXNet's Python draws their masks in another order than its graph does, which keeps the first ``factor``."""

    def run():
        net = nn.HybridSequential()
        for _ in range(2):
            net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.5))
        warming = Warming()
        net.add(warming, nn.Dense(3))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        mxmp.convert(net, "float16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
        for number in range(6):
            warming.factor = 1 + number / 4 if warms else 1.0
            x, y = mx.nd.random.normal(shape=(16, 20)), mx.nd.arange(16) % 3
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
            trainer.backward(loss)
            if unscales:
                trainer.unscale()
            for param in net.collect_params().values():
                gradient = param.data().grad  # of which mxmp cannot warn
                gradient[:] = gradient.clip(-0.5, 0.5)
            trainer.step(16)

    return run


@pytest.mark.slow
def test_a_wrong_port_is_wrong_where_plain_draws_other_masks_without_hybridize():
    found = verify(two_dropouts(unscales=False), 6, progress=False)
    assert found.verdict.startswith("The port is not right: graph differs from plain from update 1 on"), str(found)
    assert verify(two_dropouts(unscales=True), 6, progress=False).right


@pytest.mark.slow
def test_a_right_port_is_right_where_only_plains_graph_keeps_an_old_attribute_behind_dropout():
    found = verify(two_dropouts(unscales=True, warms=True), 6, progress=False)
    assert found.right, str(found)
    assert "plain MXNet was not hybridized" in found.verdict
    found = verify(two_dropouts(unscales=False, warms=True), 6, progress=False)
    assert found.verdict.startswith("The port is not right"), str(found)


@pytest.mark.slow
def test_what_ends_says_that_plain_mxnet_was_not_hybridized_either():
    def run():
        net = nn.HybridSequential()
        net.add(nn.Dense(4), nn.HybridLambda(lambda f, x: x / max(1.0, x.max().asscalar())))
        net.initialize()
        net.hybridize()
        mxmp.convert(net, "float16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd")
        with autograd.record():
            loss = net(mx.nd.ones((2, 3))).sum()
        trainer.backward(loss)
        trainer.step(2)

    found = verify(run, 2, progress=False)
    assert re.search("ends with ValueError.*Plain MXNet was not hybridized, as it fails with .*asscalar", found.verdict)


def with_a_frozen_weight(clips):
    """A training whose frozen dense layer has a trained bias: plain MXNet leaves its gradient at 0."""

    def run():
        net = nn.HybridSequential()
        net.add(nn.Dense(8, in_units=20, activation="tanh"), nn.Dense(3, in_units=8))
        net.initialize(mx.init.Xavier())
        net[0].weight.grad_req = "null"
        mxmp.convert(net, "float16")
        trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, loss_scale=128.0)
        for _ in range(6):
            x, y = mx.nd.random.normal(shape=(16, 20)), mx.nd.arange(16) % 3
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
            trainer.backward(loss)
            if clips:
                gradient = net[1].weight.data().grad
                gradient[:] = gradient.clip(-0.1, 0.1)
            trainer.step(16)

    return run


@pytest.mark.slow
def test_a_fault_of_mxnets_own_that_mxmp_avoids_makes_no_port_wrong():
    found = verify(with_a_frozen_weight(clips=False), 6, progress=False)
    assert found.right, str(found)
    assert "plain MXNet has a fault that mxmp works around (untrained_weights)" in found.verdict
    found = verify(with_a_frozen_weight(clips=True), 6, progress=False)
    assert found.verdict.startswith("The port is not right"), str(found)


# -- Modules that share their parameters -------------------------------------------------------------


def two_modules_of_one_discriminator():
    """As a GAN that trains on real and on made-up data by two losses of the same parameters."""
    out = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc"), act_type="sigmoid")
    real, fake = (
        mxmp.Module(mx.sym.MakeLoss(-mx.sym.log(chance), name=name), label_names=None)
        for chance, name in ((out, "real"), (1 - out, "fake"))
    )
    real.bind([("data", (16, 4))])
    real.init_params(mx.init.Xavier())
    real.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01})
    fake.bind([("data", (16, 4))], shared_module=real)
    for _ in range(6):
        for module in (fake, real):
            module.forward(mx.io.DataBatch([mx.nd.array(np.random.randn(16, 4))], None), is_train=True)
            module.backward()
            module.update()


@pytest.mark.slow
def test_modules_that_share_their_parameters_are_compared_in_the_order_of_their_updates():
    found = verify(two_modules_of_one_discriminator, 8, progress=False)
    assert found.right, str(found)
    assert found.steps == 8
    assert found.agreement == 0


# -- Modules that MXNet runs otherwise ---------------------------------------------------------------


def layers():
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, name="conv")
    return mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), act_type="relu", name="relu")


def student_of(teacher):
    """As in knowledge distillation: a teacher that is bound without gradients runs in training mode."""

    def run():
        label = mx.sym.var("teacher_label")
        student = mxmp.Module(
            mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(layers() - label))), label_names=["teacher_label"]
        )
        shown, taught = [("data", (4, 3, 6, 6))], [("teacher_label", (4, 4, 4, 4))]
        known = teacher()
        known.bind(shown, for_training=False)
        student.bind(shown, taught)
        for module in (known, student):
            module.init_params(mx.init.Xavier())
        student.init_optimizer(optimizer_params={"learning_rate": 0.1})
        for _ in range(6):
            data = mx.nd.array(np.random.randn(4, 3, 6, 6))
            known.forward(mx.io.DataBatch([data], None, bucket_key=0, provide_data=shown), is_train=True)
            student.forward_backward(mx.io.DataBatch([data], known.get_outputs()))
            student.update()

    return run


def devices_that_go_their_own_ways():
    """Without a kvstore nothing adds the gradients of the devices, in MXNet's Modules as in mxmp's."""
    out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), name="softmax")
    module = mxmp.Module(out, context=[mx.cpu(0), mx.cpu(1)])
    module.fit(mx.io.NDArrayIter(np.random.randn(32, 5), np.arange(32) % 3, 8), num_epoch=2, kvstore=None)


def clipped_by_norm(in_limit):
    """As in MXNet's language model on words, whose limit all gradients are above."""

    def run():
        module = mxmp.Module(
            mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), name="softmax"),
            loss_scale=1024,
        )
        module.bind([("data", (8, 5))], [("softmax_label", (8,))])
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer_params={"learning_rate": 0.1})
        for _ in range(6):
            module.forward_backward(mx.io.DataBatch([mx.nd.array(np.random.randn(8, 5))], [mx.nd.arange(8) % 3]))
            arrays = [array for each in module._exec_group.grad_arrays for array in each]
            gluon.utils.clip_global_norm(arrays, 0.1 * (module.loss_scale if in_limit else 1))
            module.update()

    return run


@pytest.mark.slow
def test_a_module_s_gradients_are_clipped_with_the_loss_scale_in_the_limit():
    assert verify(clipped_by_norm(True), 6, progress=False).right
    assert "of a Module, multiply the limit by module.loss_scale" in str(
        verify(clipped_by_norm(False), 6, progress=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        student_of(lambda: mxmp.Module(layers(), label_names=None)),
        student_of(lambda: mxmp.BucketingModule(lambda key: (layers(), ["data"], None), 0)),
        devices_that_go_their_own_ways,
    ],
    ids=["Module", "BucketingModule", "no kvstore"],
)
def test_a_module_is_compared_with_what_mxnet_computes_without_its_fusion_and_sums_where_mxnet_does(run):
    found = verify(run, 6, progress=False)
    assert found.right, str(found)
    assert found.agreement == 0


# -- Updates of nothing ------------------------------------------------------------------------------


def chain_whose_loss_has_no_parameters():
    body = mxmp.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc"), label_names=None)
    loss = mxmp.Module(mx.sym.SoftmaxOutput(mx.sym.var("scores"), name="softmax"), data_names=["scores"])
    chain = mx.mod.SequentialModule().add(body).add(loss, take_labels=True, auto_wiring=True)
    chain.fit(mx.io.NDArrayIter(np.random.randn(32, 5), np.arange(32) % 3, 8), num_epoch=2)


def module_that_is_frozen_beside_one_that_trains():
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    frozen = mxmp.Module(layer, label_names=None, fixed_param_names=["fc_weight", "fc_bias"])
    head = mxmp.Module(
        mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("seen"), num_hidden=3, name="top"), name="softmax"),
        data_names=["seen"],
    )
    chain = mx.mod.SequentialModule().add(frozen).add(head, take_labels=True, auto_wiring=True)
    chain.fit(mx.io.NDArrayIter(np.random.randn(32, 5), np.arange(32) % 3, 8), num_epoch=2)


def three_trainers_of_which_a_backward_reaches_one():
    nets = [nn.Dense(2, in_units=3) for _ in range(3)]
    for net in nets:
        net.initialize()
        mxmp.convert(net, "float16")
    trainers = [mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}) for net in nets]
    for turn in range(8):
        x = mx.nd.array(np.random.randn(4, 3))
        with autograd.record():
            loss = nets[turn % 2](x).square().sum()
        trainers[turn % 2].backward(loss)
        for trainer in trainers:
            trainer.step(4, ignore_stale_grad=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        chain_whose_loss_has_no_parameters,
        module_that_is_frozen_beside_one_that_trains,
        three_trainers_of_which_a_backward_reaches_one,
    ],
)
def test_an_update_of_nothing_is_none_in_any_run(run):
    found = verify(run, 8, progress=False)
    assert found.right, str(found)
    assert found.agreement == 0


def bound_module(name):
    out = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name=name), name="softmax")
    module = mxmp.Module(out)
    module.bind([("data", (8, 5))], [("softmax_label", (8,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    return module


def a_branch_that_is_updated_before_it_runs():
    """As in stochastic depth: the outputs of its executors are memory that nothing has written."""
    always, late = bound_module("always"), bound_module("late")
    outputs = late.get_outputs
    late.get_outputs = lambda *args, **kwargs: outputs(*args, **kwargs) if turn > 2 else [mx.nd.array([os.getpid()])]
    for turn in range(8):
        batch = mx.io.DataBatch([mx.nd.array(np.random.randn(8, 5))], [mx.nd.arange(8) % 3])
        for module in (always, late)[: 1 + (turn > 2)]:
            module.forward_backward(batch)
        always.update()
        late.update()


@pytest.mark.slow
def test_outputs_of_a_module_that_has_not_run_are_not_compared():
    found = verify(a_branch_that_is_updated_before_it_runs, 8, progress=False)
    assert "two plain runs" not in found.verdict, str(found)
    assert found.agreement == 0


# -- Several trainers that search for their loss scales ----------------------------------------------


def two_trainers_that_skip(largest, steps=14):
    def run():
        for size in largest:
            net = nn.Dense(2, in_units=3, use_bias=False)
            net.initialize()
            mxmp.convert(net, "float16")
            nets.append((net, mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-9}), size))
        for _ in range(steps):
            for net, trainer, size in nets:
                with autograd.record():
                    loss = net(mx.nd.ones((1, 3))).sum() * size
                trainer.backward(loss)
                trainer.step(1)

    nets = []
    return run


@pytest.mark.slow
def test_skipped_steps_are_counted_for_each_trainer():
    found = verify(two_trainers_that_skip([200, 300]), 14, progress=False)
    assert found.right, str(found)
    assert found.skipped >= 14
    found = verify(two_trainers_that_skip([1, 60000], 9), 9, progress=False)
    assert found.right is None, str(found)
    assert "float16 skipped all 8 steps of trainer 2 to find its loss scale" in found.verdict


# -- Kernels of oneDNN that fail ---------------------------------------------------------------------


def two_deconvolutions():
    """oneDNN fails in the backward of an FP32 Deconvolution to one channel after another, in plain MXNet too."""
    x = mx.sym.Variable("data")
    for name, channels in (("up", 16), ("top", 1)):
        shape = {"kernel": (5, 5), "stride": (2, 2), "pad": (2, 2), "adj": (1, 1)}
        x = mx.sym.Deconvolution(x, num_filter=channels, name=name, **shape)
    x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name="conv")
    module = mxmp.Module(mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(x))), label_names=None, policy="bfloat16")
    module.bind([("data", (8, 32, 7, 7))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.01})
    for _ in range(4):
        module.forward(mx.io.DataBatch([mx.nd.array(np.random.randn(8, 32, 7, 7))], None), is_train=True)
        module.backward()
        module.update()


@pytest.mark.slow
def test_what_fails_in_plain_onednn_and_in_bfloat16_is_no_fault_of_the_port(unused_process):
    found = unused_process.submit(verify, two_deconvolutions, 4, progress=False).result()
    if found.right and "without oneDNN" not in found.verdict:
        pytest.skip(f"oneDNN computes it here: {found.verdict}")
    assert found.right, str(found)
    assert "bfloat16 too, as it fails with MXNetError" in found.verdict
    assert "set MXNET_MKLDNN_ENABLED=0" in found.verdict


def test_a_graph_in_fp32_that_fails_in_onednn_alone_is_compared_without_it(monkeypatch):
    run = Runner.run

    def failing(runner, job):
        error = "MXNetError: could not create a primitive" if job.mode == "graph" and job.onednn else ""
        return replace(run(runner, job), error=error)

    monkeypatch.setattr(Runner, "run", failing)
    found = verify(training(scaled), 4, progress=False)
    assert found.right, str(found)
    assert "FP32 computed without oneDNN, as its graph fails with MXNetError: could not create" in found.verdict


# -- A script that rejects overflows itself ----------------------------------------------------------


def rejecting_trainer():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu"), nn.Dense(2))
    net.initialize()
    mxmp.convert(net, "float16")
    trainer = mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for _ in range(14):
        x = mx.nd.array(np.random.randn(4, 3) * 5)
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), x[:, :2])
        trainer.backward(loss)
        if not np.isfinite(trainer.clip_global_norm(1e4)):
            trainer.discard()
            continue
        trainer.step(4)


def rejecting_module():
    scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    module = mxmp.Module(mx.sym.LinearRegressionOutput(scores, name="lin"), label_names=["lin_label"])
    module.bind([("data", (4, 3))], [("lin_label", (4, 2))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.01})
    for _ in range(14):
        x = mx.nd.array(np.random.randn(4, 3) * 5)
        module.forward(mx.io.DataBatch([x], [x[:, :2]]))
        module.backward()
        if not np.isfinite(module._exec_group.grad_arrays[0][0].asnumpy()).all():
            module.discard()
            continue
        module.update()


@pytest.mark.slow
@pytest.mark.parametrize("run", [rejecting_trainer, rejecting_module])
def test_batches_that_a_script_discards_for_an_overflow_are_left_out_of_plain_too(run):
    found = verify(run, 8, progress=False)
    assert found.right, str(found)
    assert found.skipped > 0


def test_gradients_of_another_direction_are_not_multiplied_by_one_factor():
    """Their norms may fall by the same 2 % by chance, as where a decay is left out."""
    at = Departure(0, 1, "gradients", ("a", "b"), size=0.19, ratios=(0.98, 0.981))
    assert constant_factor(at) is None
    assert constant_factor(replace(at, size=0.02)) == 0.98
