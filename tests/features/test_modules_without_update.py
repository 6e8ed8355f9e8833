"""A module whose gradients are used, or dropped, without an update."""

from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest
from kit.twins import array, assert_close, assert_same

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:this CPU has neither")
POLICIES = ["float16", "bfloat16"]


def critic():
    """Its gradients with respect to the data overflow float16 at the first loss scales."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="b1")
    x = mx.sym.FullyConnected(x, num_hidden=3, name="b2")
    return mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(x)))


def bound(out, policy, shape=(4, 6), optimizer=False, **kwargs):
    mixed = {"policy": policy, **{k: kwargs.pop(k) for k in ("loss_scale",) if k in kwargs}} if policy else {}
    fixed = {"fixed_param_names": kwargs.pop("fixed")} if "fixed" in kwargs else {}
    module = (mxmp.Module if policy else mx.mod.Module)(out, label_names=None, **mixed, **fixed)
    module.bind([("data", shape)], inputs_need_grad=True, **kwargs)
    rng = np.random.RandomState(1)
    shapes = dict(zip(out.list_arguments(), out.infer_shape(data=shape)[0]))
    module.init_params(arg_params={k: mx.nd.array(rng.uniform(-1, 1, s)) for k, s in shapes.items() if k != "data"})
    if optimizer:
        module.init_optimizer(optimizer_params={"learning_rate": 1e-4})
    return module


def forward_backward(module, factor=1.0):
    module.forward(mx.io.DataBatch([factor * array(0, 4, 6)]), is_train=True)
    module.backward()


def parameters(module):
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize("kind", ["no optimizer", "an optimizer", "fixed, and updated"])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_inputs_are_right_at_a_later_call_without_an_update(policy, kind, caplog):
    fixed = {"fixed": ["b1_weight", "b1_bias", "b2_weight", "b2_bias"]} if "fixed" in kind else {}

    def run(policy, times):
        module = bound(critic(), policy, optimizer=kind != "no optimizer", **fixed)
        for _ in range(times):
            forward_backward(module)
            found = module.get_input_grads()[0].asnumpy()
            if "updated" in kind:
                module.update()
        return found, module

    with caplog.at_level(logging.WARNING, "mxmp"):
        found, module = run(policy, 20)
    assert_close([found], [run(None, 1)[0]], policy)
    assert module.skipped_steps == 0
    said = "a gradient of an input is not finite at the loss scale 65536" in caplog.text
    assert said == (policy == "float16")
    assert module.loss_scale < 2.0**16


@pytest.mark.parametrize("updates", [True, False])
def test_two_reads_of_one_backward_lower_the_scale_once_where_no_update_does(updates):
    module = bound(critic(), "float16", optimizer=updates)
    for step in range(3):
        forward_backward(module)
        module.get_input_grads()
        module.get_input_grads()
        if updates:
            module.update()
        assert module.loss_scale == 2.0 ** (16 - step - updates)
        assert module.skipped_steps == (step + 1) * updates


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_trains_through_another_that_is_never_updated(policy):
    body = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=6, name="a")

    def losses(policy):
        first, second = bound(body, policy, optimizer=True), bound(critic(), policy)
        found = []
        for _ in range(60):
            first.forward(mx.io.DataBatch([array(0, 4, 6)]), is_train=True)
            second.forward(mx.io.DataBatch(first.get_outputs()), is_train=True)
            found.append(second.get_outputs()[0].asscalar())
            second.backward()
            first.backward(second.get_input_grads())
            first.update()
        return found

    found, expected = losses(policy), losses(None)
    assert found[-1] < 0.9 * found[0]
    np.testing.assert_allclose(found[-1], expected[-1], rtol=0.25)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_left_out_leaves_nothing_behind(policy, grad_req):
    def learned(*steps):
        module = bound(critic(), policy, optimizer=True, grad_req=grad_req, loss_scale=2.0**-4)
        before = parameters(module)
        for step in steps:
            forward_backward(module, factor=2.0 if step == "discard" else 1.0)
            getattr(module, step)()
            if grad_req == "add" and step == "update":
                for gradients in module._exec_group.grad_arrays:
                    gradients[0][:] = 0
        assert (module.scaled_step.steps, module.skipped_steps) == (2, 0)
        return [value - before[name] for name, value in parameters(module).items()]

    assert_same(learned("update", "discard", "update", "discard"), learned("update", "update"))


def test_an_overflow_that_is_discarded_lowers_the_scale(caplog):
    module = bound(critic(), "float16", optimizer=True)
    before = parameters(module)
    with caplog.at_level(logging.WARNING, "mxmp"):
        step = 0
        while step < 20:
            forward_backward(module)
            if np.isfinite(module.get_input_grads()[0].asnumpy()).all():
                break
            module.discard()
            step += 1
    assert step
    assert module.skipped_steps == 0
    assert module.loss_scale == 2.0 ** (16 - step)
    assert "discarded non-finite gradients in" in caplog.text
    assert_same(parameters(module), before)
    module.update()
    assert not module.last_step_skipped


def test_discard_says_what_it_needs():
    module = mxmp.Module(critic(), label_names=None)
    with pytest.raises(RuntimeError, match=r"call bind\(\) and init_params\(\) first"):
        module.discard()
    module.bind([("data", (4, 6))], for_training=False)
    module.init_params()
    with pytest.raises(RuntimeError, match="there are no gradients"):
        module.discard()
    module = bound(critic(), "float16")
    module.discard()  # before any backward
    assert module.loss_scale == 2.0**16


def test_a_bucketing_module_discards_the_step_of_its_current_bucket():
    def symbol(key):
        x = mx.sym.FullyConnected(mx.sym.sum(mx.sym.var("data"), axis=1), num_hidden=3, name="fc")
        return mx.sym.MakeLoss(mx.sym.square(x)), ["data"], None

    module = mxmp.BucketingModule(symbol, default_bucket_key=5, loss_scale=128.0)
    with pytest.raises(RuntimeError, match=r"bind\(\) first"):
        module.discard()
    module.bind([("data", (4, 5, 6))], None)
    module.init_params(mx.init.One())
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    before = parameters(module)
    for key in (5, 3):
        data = [mx.nd.ones((4, key, 6))]
        batch = mx.io.DataBatch(data, None, bucket_key=key, provide_data=[("data", data[0].shape)], provide_label=None)
        module.forward_backward(batch)
        module.discard()
        module.update()  # of zeros
    assert_same(parameters(module), before)
    assert module.skipped_steps == 0


def test_a_second_update_after_one_backward_applies_it_again_at_any_loss_scale():
    """As MXNet does, for a branch of stochastic depth that has not run."""
    scaler = mxmp.DynamicLossScaler(init_scale=256, growth_interval=1)
    found = []
    for policy, kwargs in (("float16", {"loss_scale": scaler}), (None, {})):
        module = bound(critic(), policy, optimizer=True, **kwargs)
        before = parameters(module)
        forward_backward(module)
        for _ in range(3):
            module.update()
        found.append([value - before[name] for name, value in parameters(module).items()])
    assert scaler.loss_scale == 2048
    assert_close(*found, "float16")


def test_an_overflow_that_is_updated_again_lowers_the_loss_scale_once(caplog):
    module = bound(critic(), "float16", optimizer=True)
    forward_backward(module)
    with caplog.at_level(logging.WARNING, "mxmp"):
        for _ in range(5):
            module.update()
    assert module.loss_scale == 2.0**15
    assert module.skipped_steps == 5
    assert "of now" not in caplog.text


def test_gradients_of_another_module_with_the_same_scaler_are_applied():
    """As in A3C: the update of a shared network applies what local ones have computed."""
    found = []
    for policy, kwargs in (("float16", {"loss_scale": mxmp.DynamicLossScaler(init_scale=2.0**18)}), (None, {})):
        local, shared = (bound(critic(), policy, optimizer=True, **kwargs) for _ in range(2))
        before = parameters(shared)
        for _ in range(12 if policy else 1):
            forward_backward(local)
            for own, theirs in zip(local._exec_group.grad_arrays, shared._exec_group.grad_arrays):
                own[0].copyto(theirs[0])
            shared.update()
            if policy and not shared.last_step_skipped:
                break
        found.append([value - before[name] for name, value in parameters(shared).items()])
    assert_close(*found, "float16")


def test_an_update_without_a_backward_warns_where_another_module_has_changed_the_loss_scale():
    scaler = mxmp.DynamicLossScaler(init_scale=256, growth_interval=2)
    first, second = (bound(critic(), "float16", optimizer=True, loss_scale=scaler) for _ in range(2))
    for module in (first, second):
        forward_backward(module, 0.01)
        module.update()
    with pytest.warns(UserWarning, match="loss scale of now, 512, and those of the last backward hold 256"):
        first.update()
