"""LowParameter: float16 to compute with, FP32 to everyone else."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, init
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import LowParameter, store_low

VALUE = np.random.RandomState(0).normal(0, 1, (4, 3)).astype("float32")


def parameter(ctx: mx.Context | list | None = None, **kwargs) -> gluon.Parameter:
    param = gluon.Parameter("w", shape=(4, 3), **kwargs)
    param.initialize(ctx=ctx or mx.cpu())
    param.set_data(mx.nd.array(VALUE))
    return param


def low(ctx: mx.Context | list | None = None, **kwargs) -> LowParameter:
    param = parameter(ctx, **kwargs)
    store_low(param, "float16")
    return param


def rounded(value: np.ndarray) -> np.ndarray:
    return value.astype("float16")


def test_data_and_gradient_are_float16_and_the_master_is_fp32():
    param = low()
    assert isinstance(param, LowParameter)
    np.testing.assert_array_equal(param.data().asnumpy(), rounded(VALUE))
    assert param.data().dtype == param.grad().dtype == np.float16
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), VALUE)
    assert param.dtype in ("float32", np.float32)
    assert param.held_masters[0] is param.masters()[0]


def test_storing_low_keeps_the_object_and_its_settings():
    param = parameter(lr_mult=0.5, wd_mult=0.25, grad_req="add")
    before = id(param)
    store_low(param, "float16")
    store_low(param, "float16")
    assert (id(param), param.name, param.lr_mult, param.wd_mult, param.grad_req) == (
        before,
        "w",
        0.5,
        0.25,
        "add",
    )


def test_storing_full_again_gives_the_plain_parameter_with_the_masters_value():
    param, plain = low(), parameter()
    param.store_full()
    assert type(param) is gluon.Parameter
    assert vars(param).keys() == vars(plain).keys()
    np.testing.assert_array_equal(param.data().asnumpy(), VALUE)
    assert param.grad().dtype == np.float32
    assert not hasattr(param, "held_masters")


def test_a_subclass_of_parameter_stays_one():
    class Mine(gluon.Parameter):
        def hello(self) -> str:
            return f"hello {self.name}"

    param = Mine("w", shape=(4, 3))
    param.initialize()
    store_low(param, "float16")
    assert isinstance(param, Mine)
    assert isinstance(param, LowParameter)
    assert param.hello() == "hello w"
    param.store_full()
    assert type(param) is Mine


def test_set_data_sets_the_master_on_every_context():
    param = low([mx.cpu(0), mx.cpu(1)])
    param.set_data(mx.nd.array(VALUE * 3))
    for master, data in zip(param.masters(), param.list_data()):
        np.testing.assert_array_equal(master.asnumpy(), VALUE * 3)
        np.testing.assert_array_equal(data.asnumpy(), rounded(VALUE * 3))


def test_an_in_place_write_reaches_the_master_where_it_changed_something():
    param = low()
    param.data()[1:3] = 7
    want = VALUE.copy()
    want[1:3] = 7
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), want)


def test_files_hold_fp32_and_load_without_mxmp(tmp_path):
    params = gluon.ParameterDict()
    param = low()
    params._params["w"] = param
    param.data()[0] = 5
    params.save(str(tmp_path / "w.params"))
    loaded = mx.nd.load(str(tmp_path / "w.params"))["w"]
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded.asnumpy()[1:], VALUE[1:])
    np.testing.assert_array_equal(loaded.asnumpy()[0], [5, 5, 5])
    other = low()
    params._params["w"] = other
    other.set_data(mx.nd.zeros((4, 3)))
    params.load(str(tmp_path / "w.params"))
    np.testing.assert_array_equal(other.masters()[0].asnumpy(), loaded.asnumpy())
    np.testing.assert_array_equal(other.data().asnumpy(), rounded(loaded.asnumpy()))


def test_deferred_initialisation_draws_the_fp32_values_and_splits_later():
    def drawn(store: bool) -> gluon.Parameter:
        mx.random.seed(3)
        param = gluon.Parameter("w", shape=(4, 0), allow_deferred_init=True)
        param.initialize(init.Xavier())
        if store:
            store_low(param, "float16")
        param.shape = (4, 3)
        param._finish_deferred_init()
        return param

    plain, param = drawn(False), drawn(True)
    np.testing.assert_array_equal(param.masters()[0].asnumpy(), plain.data().asnumpy())
    np.testing.assert_array_equal(param.data().asnumpy(), rounded(plain.data().asnumpy()))


def test_reset_ctx_moves_the_fp32_values():
    param = low()
    param.data()[0] = 2
    param.reset_ctx([mx.cpu(1), mx.cpu(2)])
    assert [m.ctx for m in param.masters()] == [mx.cpu(1), mx.cpu(2)] == param.list_ctx()
    want = np.concatenate([np.full((1, 3), 2, "float32"), VALUE[1:]])
    for master, data in zip(param.masters(), param.list_data()):
        np.testing.assert_array_equal(master.asnumpy(), want)
        assert data.dtype == np.float16


def test_grad_req_may_change_and_gradients_stay_float16():
    param = low()
    param.grad_req = "null"
    with pytest.raises(RuntimeError, match="grad_req='null'"):
        param.grad()
    param.grad_req = "add"
    assert param.grad().dtype == np.float16
    param.data()
    assert param.grad_req == "add"


def test_casting_is_refused_with_the_way_out():
    param = low()
    param.cast("float32")
    with pytest.raises(ValueError, match=r"'w'.*FP32 master.*float16.*mxmp\.restore"):
        param.cast("float16")
    assert param.data().dtype == np.float16


def test_a_plain_trainer_made_before_or_after_it_is_stored_low_is_refused_by_name():
    words = r"'w'.*gluon.*Trainer.*mxmp\.Trainer.*params='float32'"
    with pytest.raises(TypeError, match=words):
        gluon.Trainer([low()], "sgd")
    param = parameter()
    trainer = gluon.Trainer([param], "sgd")
    with pytest.raises(TypeError, match=words):
        store_low(param, "float16")
    assert type(param) is gluon.Parameter
    assert param.data().dtype == np.float32
    del trainer


def test_a_sampled_weight_keeps_its_gradient_or_is_refused_before_it_is_stored_in_float16():
    def sampled(call_before):
        net, mean = nn.Dense(2, in_units=3, use_bias=False), mx.nd.full((2, 3), 0.5)
        net.initialize()
        mxmp.convert(net, "compute=float16,params=float16")
        if call_before:
            net(mx.nd.ones((1, 3)))
        mean.attach_grad()
        with autograd.record():
            net.weight._data[0] = mean * 2  # as a network that learns a distribution of its weights
            loss = net(mx.nd.ones((1, 3))).sum()
        loss.backward()
        return mean.grad.asnumpy()

    with pytest.raises(ValueError, match=r"computed within autograd.*call the net once before"):
        sampled(False)
    np.testing.assert_array_equal(sampled(True), np.full((2, 3), 2))
