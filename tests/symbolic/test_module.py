import logging

import mxnet as mx
import numpy as np
import pytest
from kit.digits import BATCH, SGD, SHAPES, batches, bound, everything, weights
from kit.modules import train
from kit.twins import MASTERS, assert_same
from mxnet import autograd

import mxmp


@pytest.mark.parametrize(
    "policy", [None, "float16", "bfloat16", MASTERS], ids=["float32", "f16", "bf16", "f16 masters"]
)
def test_gluon_and_symbolic_give_the_same_weights_bit_for_bit_at_every_step(net, symbol, digits, policy):
    module = bound(
        symbol, kind=mx.mod.Module if policy is None else mxmp.Module, **({"policy": policy} if policy else {})
    )
    module.set_params(
        {k: p.data() for k, p in net.collect_params().items() if p._differentiable},
        {k: p.data() for k, p in net.collect_params().items() if not p._differentiable},
    )
    if policy:
        mxmp.convert(net, policy)
    trainer = mxmp.Trainer(net.collect_params(), "sgd", SGD, kvstore=None, loss_scale="dynamic" if policy else None)
    for batch in batches(digits):
        train(module, [batch])
        with autograd.record():
            out = net(batch.data[0], batch.label[0])
        trainer.backward(out)
        trainer.step(BATCH)
        if policy:
            assert module.loss_scale == trainer.loss_scale
        found = weights(module)
        for name, param in net.collect_params().items():
            np.testing.assert_array_equal(param._reduce().asnumpy(), found[name], err_msg=name)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_fit_reaches_fp32s_accuracy_and_recovers_from_a_scale_far_too_high(symbol, digits, policy):
    def fit(kind, **mixed):
        mx.random.seed(1)
        np.random.seed(1)
        module = kind(symbol, **mixed)
        module.fit(digits.train(), optimizer_params=SGD, num_epoch=4, initializer=mx.init.Xavier())
        return module, dict(module.score(digits.validation(), "acc"))["accuracy"]

    _, expected = fit(mx.mod.Module)
    scaler = mxmp.DynamicLossScaler(2.0**24) if policy == "float16" else "dynamic"
    module, found = fit(mxmp.Module, policy=policy, loss_scale=scaler)
    assert expected > 0.9
    assert found > expected - 0.01
    assert (module.skipped_steps > 3) == (policy == "float16")
    assert module.loss_scale < 2.0**20


@pytest.mark.parametrize("is_set", [False, True])
def test_running_statistics_of_training_or_of_the_user_survive_an_overflow_in_the_forward(symbol, digits, is_set):
    module = bound(symbol, loss_scale=64.0)
    good, bad = batches(digits, 2)
    train(module, [good])
    if is_set:
        values = {name: mx.nd.full(value.shape, 5) for name, value in module.get_params()[1].items()}
        module.set_params(module.get_params()[0], values)
    before = weights(module)
    bad.data[0][0, 0, 0, 0] = np.inf
    train(module, [bad])
    assert module.last_step_skipped
    for name, value in weights(module).items():
        assert np.isfinite(value).all(), name
        if is_set or "running" not in name:
            np.testing.assert_array_equal(value, before[name])


def test_calls_that_mxnet_ignores_change_nothing(symbol, digits):
    """``fit`` of a module that was trained by hand begins with such an ``init_params``."""
    module, other = (bound(symbol, policy="float16,params=float16") for _ in range(2))
    train(module, batches(digits))
    before, core = everything(module), module.core
    args, auxs = ({name: 0 * value for name, value in part.items()} for part in module.get_params())
    with pytest.warns(UserWarning, match="ignored"):
        module.init_params()
    with pytest.warns(UserWarning, match="ignored"):
        module.set_params(args, auxs, force_init=False)
    with pytest.warns(UserWarning, match="ignored"):
        module.set_params(args, auxs, allow_missing=True, force_init=False)
    module.bind(module.data_shapes, module.label_shapes, shared_module=other)
    assert module.core is core
    assert_same(everything(module), before)


def test_a_module_that_is_bound_again_keeps_what_it_has_learnt(symbol, digits):
    module = bound(symbol, policy="float16,params=float16")
    data = list(batches(digits))
    train(module, data)
    module.forward(data[0], is_train=False)
    wanted = module.get_outputs()[0].asnumpy()
    module.bind(module.data_shapes, module.label_shapes, for_training=True, force_rebind=True)
    module.forward(data[0], is_train=False)
    np.testing.assert_array_equal(module.get_outputs()[0].asnumpy(), wanted)


def test_fixed_parameters_states_monitor_speedometer_and_predict_work(symbol, digits, tmp_path, caplog):
    module = mxmp.Module(symbol, fixed_param_names=["net_conv0_weight"])
    seen = []
    monitor = mx.mon.Monitor(1, stat_func=lambda a: a.norm(), pattern=".*dense.*", sort=True)
    monitor.toc_print = lambda: seen.extend(monitor.toc())
    with caplog.at_level(logging.INFO):
        module.fit(
            digits.train(),
            eval_data=digits.validation(),
            batch_end_callback=mx.callback.Speedometer(64, 10),
            epoch_end_callback=mx.callback.do_checkpoint(str(tmp_path / "cb")),
            monitor=monitor,
            initializer=mx.init.Xavier(),
            optimizer_params=SGD,
            num_epoch=1,
        )
    assert seen
    assert "Speed:" in caplog.text
    assert (tmp_path / "cb-0001.params").exists()
    assert module.predict(digits.validation()).shape == (517, 10)
    loaded = mx.mod.Module.load(str(tmp_path / "cb"), 1)
    loaded.bind(digits.validation().provide_data, digits.validation().provide_label, for_training=False)
    assert dict(loaded.score(digits.validation(), "acc")) == pytest.approx(
        dict(module.score(digits.validation(), "acc")), abs=0.01
    )


def test_state_names_and_set_states_work():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc") + mx.sym.var("state")
    module = mxmp.Module(mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label")), state_names=["state"], loss_scale=8.0)
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params()
    module.set_states(value=1.0)
    module.init_optimizer()
    train(module, [mx.io.DataBatch([mx.nd.ones((2, 3))], [mx.nd.zeros((2,))])])
    assert not module.last_step_skipped


def test_kvstores_that_update_before_the_check_and_compression_are_refused(symbol):
    with pytest.raises(ValueError, match="dist_sync"):
        bound(symbol, kvstore="dist_async")
    with pytest.raises(ValueError, match="compression_params"):
        mxmp.Module(symbol, compression_params={"type": "2bit", "threshold": 0.5})


def test_a_damaged_states_file_changes_nothing(symbol, digits, tmp_path):
    path = tmp_path / "net.states"
    module = bound(symbol)
    train(module, batches(digits, 2))
    module.save_optimizer_states(str(path))
    path.write_bytes(path.read_bytes()[:-200])
    before = everything(module)
    with pytest.raises(ValueError, match="nothing was loaded"):
        module.load_optimizer_states(str(path))
    assert_same(before, everything(module))


@pytest.mark.parametrize("wrong", [{"optimizer": "sgdd"}, {"optimizer_params": {"learning_rate": 0.1}}])
def test_a_states_file_is_still_read_after_an_error(symbol, digits, tmp_path, wrong):
    prefix = str(tmp_path / "net")
    before = bound(symbol, loss_scale=64.0)
    train(before, batches(digits, 2))
    before.save_checkpoint(prefix, 1, save_optimizer_states=True)
    module = mxmp.Module.load(prefix, 1, load_optimizer_states=True, loss_scale=64.0)
    module.bind(*SHAPES)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sgdd|not what SGD makes"):
            module.init_optimizer(**wrong)
        assert not module.optimizer_initialized
    module.init_optimizer(optimizer_params=SGD)
    assert_same(everything(module), everything(before))


def test_an_update_of_a_module_that_is_bound_for_inference_is_refused(symbol):
    module = mxmp.Module(symbol)
    module.bind(*SHAPES, for_training=False)
    module.init_params()
    module.init_optimizer()
    with pytest.raises(RuntimeError, match=r"no gradients: .*for_training=True"):
        module.update()


def test_a_context_that_is_none_is_named(symbol):
    for call in (lambda: mxmp.Module(symbol, context="gpu"), lambda: mxmp.cast_symbol(symbol, ctx="gpu")):
        with pytest.raises(TypeError, match=r"expected an mxnet Context, such as mx.cpu\(\) or mx.gpu\(0\), got '"):
            call()


@pytest.mark.parametrize(("loss_scale", "trains"), [(None, False), ("dynamic", True)])
def test_gradients_below_float16s_range_train_only_with_loss_scaling(digits, loss_scale, trains):
    """Below its smallest subnormal, 2**-24, with a learning rate to match."""
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=10, name="fc", no_bias=True)
    symbol = mx.sym.SoftmaxOutput(x, mx.sym.var("softmax_label"), grad_scale=2.0**-30, name="softmax")
    module = mxmp.Module(symbol, loss_scale=loss_scale)
    rows = digits.x[:256].reshape(256, -1)
    data = mx.io.NDArrayIter(rows, digits.y[:256], BATCH)
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 2.0**30 * 0.5})
    before = weights(module)["fc_weight"]
    for _ in range(5):
        data.reset()
        train(module, data)
    changed = not np.array_equal(before, weights(module)["fc_weight"])
    assert changed == trains
    assert (dict(module.score(data, "acc"))["accuracy"] > 0.8) == trains


def test_the_users_rescale_grad_and_static_scaling_of_mxnets_faq_compose(symbol, digits):
    plain = bound(symbol, loss_scale=None)
    scaled = bound(symbol, loss_scale=mxmp.StaticLossScaler(128))
    for module in (plain, scaled):
        assert module._optimizer.rescale_grad == 1 / BATCH
        module._optimizer.rescale_grad = 0.5 / BATCH
    train(plain, batches(digits, 2))
    train(scaled, batches(digits, 2))
    assert scaled._optimizer.rescale_grad == 0.5 / BATCH
    for name, value in weights(plain).items():
        np.testing.assert_allclose(weights(scaled)[name], value, rtol=0, atol=2e-3 * max(1e-3, np.abs(value).max()))
