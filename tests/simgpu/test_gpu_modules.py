"""``mxmp.Module`` and ``mxmp.BucketingModule`` on the simulated GPU, compared with FP32 and with the emulation."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import mxmp

from .families import CPU, GPU, differing, distance

TESTS_PER_PROCESS = 20
ROWS, WORDS, UNITS, CLASSES = 8, 13, 10, 4
PAIR = [mx.gpu(0), mx.gpu(1)]
RUNS = (None, CPU), ("float16", CPU), ("float16", GPU)


def images() -> mx.sym.Symbol:
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=8, kernel=(3, 3), pad=(1, 1), name="conv")
    x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), act_type="tanh")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=CLASSES, name="out"), name="softmax")


def sentences(length: int) -> tuple[mx.sym.Symbol, list[str], list[str]]:
    """A language model of unrolled cells."""
    x = mx.sym.Embedding(mx.sym.var("data"), input_dim=WORDS, output_dim=UNITS, name="embed")
    cells = mx.rnn.SequentialRNNCell()
    cells.add(mx.rnn.LSTMCell(UNITS, prefix="l0_"))
    cells.add(mx.rnn.GRUCell(UNITS, prefix="l1_"))
    outputs, _ = cells.unroll(length, x, merge_outputs=True, layout="NTC")
    x = mx.sym.FullyConnected(outputs.reshape((-1, UNITS)), num_hidden=WORDS, name="outer")
    return (
        mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label").reshape((-1,)), name="softmax"),
        ["data"],
        ["softmax_label"],
    )


def image_batch(number: int, times: Any = 1.0) -> mx.io.DataBatch:
    rng = np.random.RandomState(number)
    x, y = rng.randn(ROWS, 3, 6, 6), rng.randint(0, CLASSES, ROWS)
    return mx.io.DataBatch([mx.nd.array(x * times)], [mx.nd.array(y)])


def sentence_batch(number: int) -> mx.io.DataBatch:
    length, rng = (3, 5)[number % 2], np.random.RandomState(number)
    arrays = [[mx.nd.array(rng.randint(0, WORDS, (ROWS, length)))] for _ in range(2)]
    provided = [[mx.io.DataDesc(name, (ROWS, length))] for name in ("data", "softmax_label")]
    return mx.io.DataBatch(*arrays, bucket_key=length, provide_data=provided[0], provide_label=provided[1])


class Run:
    """A module that is bound, with its parameters and optimizer."""

    def __init__(
        self, batch: Any, policy: str | None, context: Any, kvstore: str = "device", scale: Any = None
    ) -> None:
        self.batch = batch
        own = {"policy": policy, "loss_scale": scale or mxmp.DynamicLossScaler(64.0)} if policy else {}
        home = mxmp if policy else mx.mod
        first = batch(1)
        if batch is image_batch:
            self.module: Any = home.Module(images(), context=context, **own)
            self.module.bind([("data", (ROWS, 3, 6, 6))], [("softmax_label", (ROWS,))])
        else:
            self.module = home.BucketingModule(sentences, 5, context=context, **own)
            self.module.bind(first.provide_data, first.provide_label)
        mx.random.seed(1)
        self.module.init_params(mx.init.Xavier(magnitude=2))
        options = {"learning_rate": 0.2, "momentum": 0.9}
        self.module.init_optimizer(kvstore=kvstore, optimizer="sgd", optimizer_params=options)
        self.before = self.weights()

    def step(self, number: int, **options: Any) -> None:
        self.module.forward(self.batch(number, **options), is_train=True)
        self.module.backward()
        self.module.update()

    def steps(self, count: int, first: int = 0) -> Run:
        for number in range(first, first + count):
            self.step(number)
        return self

    def weights(self) -> dict[str, np.ndarray]:
        return {name: value.asnumpy() for name, value in self.module.get_params()[0].items()}

    def change(self) -> np.ndarray:
        after = self.weights()
        return np.concatenate([(after[name] - self.before[name]).ravel() for name in sorted(after)])


def assert_near(exact: np.ndarray, emulated: np.ndarray, computed: np.ndarray) -> None:
    own = distance(emulated, exact)
    assert 0 < own < 4e-3
    assert distance(computed, emulated) < own


@pytest.mark.parametrize("batch", [image_batch, sentence_batch])
def test_a_module_trains_as_in_the_emulation(batch):
    """A BucketingModule in two buckets, whose graphs share float16 weights and masters."""
    assert_near(*(Run(batch, *run).steps(4).change() for run in RUNS))


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_module_on_two_devices_trains_as_the_emulation_on_two(kvstore, two_devices):
    """Each half of a batch has BatchNorm's statistics of its own."""
    runs = (None, [mx.cpu(0), mx.cpu(1)]), ("float16", [mx.cpu(0), mx.cpu(1)]), ("float16", PAIR)
    assert_near(*(Run(image_batch, *run, kvstore=kvstore).steps(3).change() for run in runs))


@pytest.mark.parametrize("device", [0, 1])
def test_an_overflow_in_one_devices_data_changes_no_bit(device, two_devices):
    run = Run(image_batch, "float16", PAIR).steps(2)
    before = run.weights()
    times = np.where(np.arange(ROWS) // (ROWS // 2) == device, 1e30, 1).reshape(ROWS, 1, 1, 1)
    run.step(2, times=times)
    assert run.module.last_step_skipped
    assert run.module.loss_scale == 32
    assert differing(before, run.weights()) == []
    run.step(3)
    assert differing(before, run.weights()) == list(before)


def test_an_overflow_in_one_bucket_changes_no_bit_in_another():
    run = Run(sentence_batch, "float16", GPU, scale=mxmp.DynamicLossScaler(2.0**18))
    skipped = []
    for number in range(8):
        before = run.weights()
        run.step(number)
        skipped.append(run.module.last_step_skipped)
        assert (differing(before, run.weights()) == []) is skipped[-1]
    assert skipped[:2] == [True, True]
    assert skipped[-1] is False
    assert run.module.loss_scale == 2.0 ** (18 - sum(skipped))


def test_a_module_resumed_from_its_files_is_bit_equal(tmp_path):
    through = Run(image_batch, "float16", GPU).steps(3)
    through.module.save_checkpoint(str(tmp_path / "net"), 3, save_optimizer_states=True)
    through.steps(3, first=3)
    again = Run(image_batch, "float16", GPU)
    _, weights, states = mx.model.load_checkpoint(str(tmp_path / "net"), 3)
    again.module.set_params(weights, states)
    again.module.load_optimizer_states(str(tmp_path / "net-0003.states"))
    again.steps(3, first=3)
    assert again.module.loss_scale == through.module.loss_scale
    assert differing(through.weights(), again.weights()) == []


def head_gradients(head: Any, policy: str | None, context: mx.Context) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The first output, and the true gradients of a net of two layers that ends in this head."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=9, name="fc1")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=CLASSES, name="fc2")
    scale = 512.0 if policy else 1.0
    own = {"policy": policy, "loss_scale": scale} if policy else {}
    kind = mxmp.Module if policy else mx.mod.Module
    module = kind(head(x, mx.sym.var("label")), label_names=["label"], context=context, **own)
    module.bind([("data", (ROWS, 7))], [("label", (ROWS,))])
    mx.random.seed(2)
    module.init_params(mx.init.Xavier())
    data = mx.nd.array(np.random.RandomState(0).randn(ROWS, 7))
    module.forward_backward(mx.io.DataBatch([data], [mx.nd.array(np.arange(ROWS) % CLASSES)]))
    pairs = zip(module._exec_group.param_names, module._exec_group.grad_arrays)
    return module.get_outputs()[0].asnumpy(), {name: arrays[0].asnumpy() / scale for name, arrays in pairs}


HEADS = {
    "softmax": lambda x, y: mx.sym.SoftmaxOutput(x, y),
    "softmax, ignored labels": lambda x, y: mx.sym.SoftmaxOutput(
        x, y, smooth_alpha=0.1, use_ignore=True, ignore_label=0, normalization="valid", grad_scale=0.25
    ),
    "linear regression": lambda x, y: mx.sym.LinearRegressionOutput(x, mx.sym.one_hot(y, CLASSES)),
    "logistic regression": lambda x, y: mx.sym.LogisticRegressionOutput(x, mx.sym.one_hot(y, CLASSES)),
    "absolute error": lambda x, y: mx.sym.MAERegressionOutput(x, mx.sym.one_hot(y, CLASSES)),
    "SVM": lambda x, y: mx.sym.SVMOutput(x, y),
    "MakeLoss": lambda x, y: mx.sym.MakeLoss(-mx.sym.pick(mx.sym.log_softmax(x), y), grad_scale=0.5),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_heads_gradients_are_fp32s_times_the_loss_scale(head):
    wanted, gradients = head_gradients(HEADS[head], None, CPU)
    found, computed = head_gradients(HEADS[head], "float16", GPU)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3 * np.abs(wanted).max())
    for name, value in gradients.items():
        np.testing.assert_allclose(computed[name], value, rtol=0, atol=3e-3 * np.abs(value).max(), err_msg=name)
