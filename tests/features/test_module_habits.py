"""What users of ``mx.mod.Module`` are used to holds for ``mxmp.Module``."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.modules import batch, bound, bucketing, mlp, weights
from kit.twins import POLICIES, assert_same

import mxmp

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
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
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
