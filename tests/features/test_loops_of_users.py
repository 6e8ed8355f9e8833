"""Loops as users write them: record, contrib.amp, the Estimator, the numpy interface."""

from __future__ import annotations

import math
import re
import warnings

import mxnet as mx
import numpy as np
import pytest
from gluoncv.utils.parallel import Parallel, Parallelizable
from kit.nets import CASTS, batch, overflow, train, two_layers
from kit.pictures import weights
from kit.twins import LOSS, MASTERS, sequence
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import Estimator
from support.optimizers import options

import mxmp


def trainer_of(net, scale=2.0**8):
    return mxmp.Trainer(net.collect_params(), "sgd", options("sgd"), loss_scale=scale)


# -- loops ported from contrib.amp ------------------------------------------------------------------


def test_scale_loss_keeps_the_mode_of_dropout():
    net = two_layers()
    trainer = trainer_of(net)
    with autograd.record(train_mode=False):
        loss = net(batch(0)[0]).sum()
        with trainer.scale_loss(loss):
            assert not autograd.is_training()


# -- the Estimator ----------------------------------------------------------------------------------


def data_loader():
    rng = np.random.RandomState(0)
    arrays = [mx.nd.array(rng.randn(32, n)) for n in (3, 2)]
    return gluon.data.DataLoader(gluon.data.ArrayDataset(*arrays), batch_size=8)


def fit(trainer_class, processor, **kwargs):
    net = two_layers()
    trainer = trainer_class(net.collect_params(), "sgd", options("sgd"), update_on_kvstore=False, **kwargs)
    estimator = Estimator(net, LOSS, mx.metric.MSE(), trainer=trainer, context=mx.cpu(), batch_processor=processor)
    estimator.logger.handlers.clear()
    estimator.fit(data_loader(), epochs=2)
    return trainer


def test_the_estimator_skips_an_overflow_and_goes_on():
    class Spoils(mxmp.BatchProcessor):
        batches = 0

        def fit_batch(self, estimator, train_batch, batch_axis=0):
            found = super().fit_batch(estimator, train_batch, batch_axis)
            self.batches += 1
            if self.batches == 3:
                overflow(estimator.trainer)
            return found

    trainer = fit(mxmp.Trainer, Spoils(), loss_scale="dynamic")
    assert trainer.skipped_steps == 1
    assert trainer.loss_scale == 2.0**15


# -- a thread for each device, as in the detectors' scripts of GluonCV ------------------------------


class ForwardBackward(Parallelizable):
    def __init__(self, net, trainer, scaled):
        self.net, self.trainer, self.scaled = net, trainer, scaled

    def forward_backward(self, data):
        """Return the loss, or the error: GluonCV's ``Parallel.get`` waits for ever if a thread has raised it."""
        x, y = data
        with autograd.record():
            loss = LOSS(self.net(x), y)
        try:
            if self.scaled:
                with self.trainer.scale_loss(loss) as scaled:
                    autograd.backward(scaled)
            else:
                self.trainer.backward(loss)
        except RuntimeError as error:
            return error
        return loss


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("policy", [CASTS, MASTERS])
def test_gluoncv_s_parallel_trains_what_one_thread_trains(policy, scaled):
    net, other = two_layers(policy, devices=2), two_layers(policy, devices=2)
    trainer, reference = trainer_of(net), trainer_of(other)
    threads = Parallel(2, ForwardBackward(net, trainer, scaled))
    for step in range(60):
        for i in range(2):
            threads.put(batch(step * 10 + i, mx.cpu(i)))
        assert all(isinstance(threads.get(), mx.nd.NDArray) for _ in range(2))
        trainer.step(4)
    train(other, reference, range(60), 2)
    assert weights(trainer) == weights(reference)


def test_without_our_batch_processor_the_estimator_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"BatchProcessor"):
        fit(mxmp.Trainer, None, loss_scale=2.0**10)


def test_our_batch_processor_without_our_trainer_says_what_to_pass():
    with pytest.raises(TypeError, match=r"Estimator has a mxnet.gluon.trainer.Trainer: pass .*trainer=mxmp.Trainer\("):
        fit(gluon.Trainer, mxmp.BatchProcessor())


# -- batches of a DataLoader ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float16", "bfloat16", MASTERS])
@pytest.mark.parametrize("ctx", [mx.Context("cpu_shared"), mx.Context("cpu_pinned")], ids=str)
def test_a_batch_in_a_dataloader_s_memory_is_refused_with_what_to_do(policy, ctx):
    net, x = two_layers(policy), mx.nd.ones((2, 3), ctx=ctx)
    with pytest.raises(ValueError, match=rf"batch is in {re.escape(str(ctx))}, .*as_in_context\(mx.cpu\(\)\)"):
        net(x)
    assert net(x.as_in_context(mx.cpu())).shape == (2, 2)


def test_a_batch_in_shared_memory_without_parameters_computes():
    loss = mxmp.convert(gluon.loss.SoftmaxCrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing in it computes low
        found = loss(*(mx.nd.ones(shape, ctx=mx.Context("cpu_shared")) for shape in ((2, 3), (2,))))
    assert found.shape == (2,)


# -- the numpy interface ----------------------------------------------------------------------------


@mx.util.use_np
def test_a_net_of_the_numpy_interface_trains_scaled_and_skips():
    net = sequence(gluon.nn.Dense(4, in_units=3), gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(2, in_units=4))
    net.initialize()
    trainer = trainer_of(net)
    x = mx.np.array(np.random.RandomState(0).randn(4, 3), dtype="float32")
    for value in (x, x, x * math.inf, x):
        before = [p.data().asnumpy() for p in trainer._params if p.grad_req != "null"]
        with autograd.record():
            loss = (net(value) ** 2).sum()
        trainer.backward(loss)
        trainer.clip_global_norm(10.0)
        trainer.step(4)
        after = [p.data().asnumpy() for p in trainer._params if p.grad_req != "null"]
        same = all(np.array_equal(a, b) for a, b in zip(before, after))
        assert same == trainer.last_step_skipped == (value is not x)
    assert all(np.isfinite(p.data().asnumpy()).all() for p in trainer._params)


def of_numpy(policy):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3, activation="tanh"), gluon.nn.Dense(2, in_units=4))
    net.initialize()
    mxmp.convert(net, policy)
    return net, mxmp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, loss_scale=2.0**8)


def step_of_numpy(net, trainer, x):
    with autograd.record():
        loss = (net(x) ** 2).sum()
    trainer.backward(loss)
    trainer.step(4)
    return {name: each.asnumpy() for name, each in mxmp.master_weights(net).items()}


@mx.util.use_np
@pytest.mark.parametrize("policy", ["float16", MASTERS])
def test_gradients_of_inputs_of_the_numpy_interface_are_unscaled(policy):
    x, (net, trainer) = mx.np.ones((4, 3)), of_numpy(policy)
    x.attach_grad()
    step_of_numpy(net, trainer, x)
    found = trainer.input_grad(x)
    assert type(found) is mx.np.ndarray
    np.testing.assert_allclose(found.asnumpy() * 2**8, x.grad.asnumpy())


@mx.util.use_np
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("policy", ["float16", MASTERS])
def test_training_in_the_numpy_interface_goes_on_from_files(policy, called, tmp_path):
    x, pairs = mx.np.ones((4, 3)), [of_numpy(policy) for _ in range(2)]
    step_of_numpy(*pairs[0], x)
    if called:
        step_of_numpy(*pairs[1], x)
    mxmp.save_checkpoint(str(tmp_path / "run"), *pairs[0])
    mxmp.load_checkpoint(str(tmp_path / "run"), *pairs[1])
    one, other = (step_of_numpy(*each, x) for each in pairs)
    np.testing.assert_equal(one, other)
    assert all(type(p.data()) is mx.np.ndarray for p in pairs[1][0].collect_params().values())
