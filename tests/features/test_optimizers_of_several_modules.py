"""Modules that share parameters: each has an optimizer of its own, or borrows another's, as in MXNet."""

import mxnet as mx
import numpy as np
import pytest
from kit.twins import MASTERS

import mxmp

BATCH, WIDTH = 8, 6
SGD = {"learning_rate": 0.1, "momentum": 0.9}
POLICIES = pytest.mark.parametrize("policy", ["float16", MASTERS, "bfloat16"], ids=str)


def layers(*names):
    x = mx.sym.var("data")
    for name in names:
        x = mx.sym.FullyConnected(x, num_hidden=WIDTH, name=name)
    return mx.sym.SoftmaxOutput(x, name="softmax")


def bound(kind, symbol, shared=None, **mixed):
    module = kind(symbol, **mixed)
    module.bind([("data", (BATCH, WIDTH))], [("softmax_label", (BATCH,))], shared_module=shared)
    mx.random.seed(0)
    if shared is None:
        module.init_params(mx.init.Xavier())
    return module


def step(module):
    data = np.random.RandomState(0).randn(BATCH, WIDTH)
    module.forward_backward(mx.io.DataBatch([mx.nd.array(data)], [mx.nd.arange(BATCH) % WIDTH]))
    module.update()


def trained(modules):
    """The parameters after the modules have trained in turns."""
    for _ in range(3):
        for module in modules:
            step(module)
    return [{name: value.asnumpy() for name, value in module.get_params()[0].items()} for module in modules]


def assert_close(found, expected, policy):
    tolerance = 4e-2 if policy == "bfloat16" else 5e-3
    for low, full in zip(found, expected):
        for name, value in full.items():
            np.testing.assert_allclose(low[name], value, rtol=0, atol=tolerance, err_msg=name)


@POLICIES
@pytest.mark.parametrize("names", [("fc3", "fc1", "fc2"), ("fc2", "fc3")])
def test_each_module_has_an_optimizer_of_its_own(policy, names):
    def run(kind, **mixed):
        one = bound(kind, layers("fc1", "fc2", "fc3"), **mixed)
        one.init_optimizer(optimizer_params=SGD)
        step(one)
        other = bound(kind, layers(*names), shared=one, **mixed)
        other.init_optimizer(optimizer_params={"learning_rate": 0.05, "momentum": 0.5}, force_init=True)
        return trained([one, other])[:1]  # MXNet marks only one of the two as changed

    assert_close(run(mxmp.Module, policy=policy, loss_scale=64.0), run(mx.mod.Module), policy)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_an_optimizer_is_borrowed_from_a_module_with_other_parameters(policy):
    def run(kind, **mixed):
        one, other = (bound(kind, layers("fc1", "fc2"), **mixed) for _ in range(2))
        one.init_optimizer(optimizer_params=SGD)
        other.borrow_optimizer(one)
        return trained([one, other])

    assert_close(run(mxmp.Module, policy=policy, loss_scale=64.0), run(mx.mod.Module), policy)


def test_an_optimizer_that_cannot_update_the_parameters_is_not_borrowed():
    one, plain = bound(mxmp.Module, layers("fc1")), bound(mx.mod.Module, layers("fc1"))
    for module in (one, plain):
        module.init_optimizer()
    for module, lender, message in (
        (bound(mxmp.Module, layers("fc1", "fc2")), one, "does not update fc2_weight, fc2_bias"),
        (bound(mxmp.Module, layers("fc1"), policy=MASTERS), one, "stored in float16"),
        (bound(mxmp.Module, layers("fc1")), plain, r"expected an mxmp\.Module"),
    ):
        with pytest.raises(ValueError, match=message):
            module.borrow_optimizer(lender)
        assert not module.optimizer_initialized


def test_states_are_saved_by_the_module_that_has_all_parameters(tmp_path):
    one = bound(mxmp.Module, layers("fc1", "fc2"))
    one.init_optimizer()
    other = bound(mxmp.Module, layers("fc2"), shared=one)
    with pytest.raises(RuntimeError, match="has fc1_weight, fc1_bias too"):
        other.save_optimizer_states(str(tmp_path / "states"))
    assert not list(tmp_path.iterdir())
