"""What users of ``mx.mod.Module`` are used to holds for ``mxmp.Module``."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.modules import batch, bound, bucketing, mlp, train, weights
from kit.twins import POLICIES, assert_close, assert_same

import mxmp

# MXNet's own Module leaves the states file open when it reads it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning"),
]
OPTIONS = {
    "sgd": {"learning_rate": 0.5, "momentum": 0.9, "rescale_grad": 0.25},
    "adam": {"learning_rate": 0.01, "rescale_grad": 0.25},
    "rmsprop": {"learning_rate": 0.01, "rescale_grad": 0.25},
}


# -- an FP32 run goes on in mixed precision ---------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("how", ["load", "load_optimizer_states"])
@pytest.mark.parametrize("optimizer", OPTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_of_a_plain_module_goes_on_in_mixed_precision(policy, optimizer, how, devices, tmp_path):
    contexts = [mx.cpu(i) for i in range(devices)]
    plain = bound(mx.mod.Module(mlp(), context=contexts))
    store = None if devices == 1 else "local"
    plain.init_optimizer(kvstore=store, optimizer=optimizer, optimizer_params=OPTIONS[optimizer])
    train(plain, range(3))
    plain.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)

    def resumed(kind, **mixed):
        load = how == "load"
        module = kind.load(str(tmp_path / "net"), 1, load_optimizer_states=load, context=contexts, **mixed)
        bound(module)
        # The file of a plain Module holds no counts.
        options = {**OPTIONS[optimizer], "begin_num_update": 3}
        module.init_optimizer(kvstore=store, optimizer=optimizer, optimizer_params=options)
        if not load:
            module.load_optimizer_states(str(tmp_path / "net-0001.states"))
        before = weights(module)
        train(module, range(3, 6))
        return [new - old for new, old in zip(weights(module), before)]

    found = resumed(mxmp.Module, policy=POLICIES[policy], loss_scale=256.0)
    expected = resumed(mx.mod.Module)
    if optimizer == "sgd":
        assert_close(found, expected, policy)
    else:  # divided by the root of what was accumulated: the file's moments make all the difference
        for low, full in zip(found, expected):
            assert np.median(np.abs(low - full)) <= 0.15 * np.abs(full).max()


# -- the wrong order --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Module", "BucketingModule"])
def test_update_before_init_optimizer_says_so(kind):
    module = mxmp.Module(mlp()) if kind == "Module" else bucketing()
    bound(module)
    module.forward_backward(batch(0))
    before = weights(module)
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        module.update()
    assert not isinstance(caught.value, mx.MXNetError)
    assert_same(weights(module), before)
    module.init_optimizer(optimizer="sgd", optimizer_params=OPTIONS["sgd"])
    module.update()
    assert all((new != old).any() for new, old in zip(weights(module), before))


ORDERS = {
    "backward before bind": lambda m: m.backward(),
    "update before bind": lambda m: m.update(),
    "get_input_grads before bind": lambda m: m.get_input_grads(),
    "init_optimizer before bind": lambda m: m.init_optimizer(),
    "save_optimizer_states before init_optimizer": lambda m: m.save_optimizer_states("nowhere"),
    "load_optimizer_states before init_optimizer": lambda m: m.load_optimizer_states("nowhere"),
    "save_checkpoint before bind": lambda m: m.save_checkpoint("nowhere", 0, True),
    "set_params before bind": lambda m: m.set_params({}, {}),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_other_wrong_order_fails_as_plain_mxnet_does_or_says_why(order, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as plain:  # noqa: PT011
        ORDERS[order](mx.mod.Module(mlp()))
    with pytest.raises((type(plain.value), RuntimeError)) as ours:
        ORDERS[order](mxmp.Module(mlp()))
    assert not isinstance(ours.value, (AttributeError, KeyError, TypeError, mx.MXNetError)) or plain.type is ours.type


# -- the keywords of convert and cast_symbol --------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_module_takes_exclude(policy):
    module = bound(mxmp.Module(mlp(), policy=POLICIES[policy], exclude=["fc2"]))
    module.forward(batch(0), is_train=False)
    found = module.get_outputs()[0].asnumpy()
    other = POLICIES[policy] if isinstance(POLICIES[policy], str) else "float16"
    merged = mxmp.Policy(other, params=getattr(POLICIES[policy], "params", None), exclude=["fc2"])
    twin = bound(mxmp.Module(mlp(), policy=merged))
    twin.forward(batch(0), is_train=False)
    np.testing.assert_array_equal(found, twin.get_outputs()[0].asnumpy())
    whole = bound(mxmp.Module(mlp(), policy=POLICIES[policy]))
    whole.forward(batch(0), is_train=False)
    assert not np.array_equal(found, whole.get_outputs()[0].asnumpy())


def test_module_load_and_bucketing_module_take_exclude(tmp_path):
    bound(mxmp.Module(mlp())).save_checkpoint(str(tmp_path / "net"), 1)
    loaded = bound(mxmp.Module.load(str(tmp_path / "net"), 1, exclude=["fc2"]))
    assert "fc2" in str(loaded.policy)
    buckets = bucketing(exclude=["fc2"])
    bound(buckets)
    assert "fc2" in str(buckets._curr_module.policy)
