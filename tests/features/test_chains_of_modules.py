"""Modules in a chain, and MXNet's module that computes its loss in Python, train as in FP32 with any loss scale."""

import mxnet as mx
import numpy as np
import pytest

import mxmp

DATA = np.random.RandomState(0).rand(64, 8).astype("float32")
LABELS = (DATA.sum(axis=1) * 2 % 4).astype("float32")


def hidden():
    return mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="hidden")


def scores():
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def loss_in_python():
    def gradient(scores, labels):
        return mx.nd.softmax(scores) - mx.nd.one_hot(labels, 16)

    return mx.mod.PythonLossModule(data_names=("hidden_output",), grad_func=gradient)


def trained(make, in_python):
    """Return the parameters after five epochs of a SequentialModule, as NumPy arrays by name."""
    mx.random.seed(0)
    np.random.seed(0)
    chain = mx.mod.SequentialModule()
    chain.add(make(hidden(), label_names=None))
    chain.add(loss_in_python() if in_python else make(scores()), take_labels=True, auto_wiring=True)
    chain.fit(
        mx.io.NDArrayIter(DATA, LABELS, 16),
        num_epoch=5,
        eval_metric="loss",
        optimizer_params={"learning_rate": 0.5},
        initializer=mx.init.Xavier(),
    )
    return {name: array.asnumpy() for name, array in chain.get_params()[0].items()}


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize(("policy", "loss_scale", "error"), [("float16", 1024.0, 1e-3), ("bfloat16", None, 1e-2)])
def test_a_chain_trains_as_in_fp32(policy, loss_scale, error, in_python):
    expected = trained(mx.mod.Module, in_python)
    found = trained(lambda *args, **kw: mxmp.Module(*args, policy=policy, loss_scale=loss_scale, **kw), in_python)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= error * np.abs(array).max(), name
        assert (found[name] != array).any(), name
