"""What a module's contexts share: masters, scale, states by name."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.digits import BATCH, batches, bound, everything, weights
from kit.modules import train
from kit.twins import MASTERS, assert_same

import mxmp


def test_states_go_by_name_where_the_symbols_outputs_are_grouped_in_another_order(tmp_path):
    def trained(order):
        data, towers = mx.sym.var("data"), {}
        for name in ("first", "second"):
            out = mx.sym.FullyConnected(data, num_hidden=3, name=f"{name}_fc")
            towers[name] = mx.sym.LinearRegressionOutput(out, mx.sym.var(f"{name}_label"), name=name)
        labels = ["first_label", "second_label"]
        module = mxmp.Module(mx.sym.Group([towers[name] for name in order]), label_names=labels, policy="float16")
        module.bind([("data", (4, 3))], [(label, (4, 3)) for label in labels])
        module.init_params(mx.init.One())
        module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.1})
        return module

    def step(module, seed):
        draw = np.random.RandomState(seed)
        module.forward_backward(mx.io.DataBatch(*([mx.nd.array(draw.rand(4, 3)) for _ in range(n)] for n in (1, 2))))
        module.update()

    one, other = trained(["first", "second"]), trained(["second", "first"])
    step(one, 0)
    one.save_optimizer_states(str(tmp_path / "states"))
    other.set_params(*one.get_params())
    other.load_optimizer_states(str(tmp_path / "states"))
    for module in (one, other):
        step(module, 1)
    assert_same(other.get_params()[0], one.get_params()[0])


@pytest.mark.parametrize("policy", ["float16", MASTERS])
def test_values_that_cannot_be_set_change_nothing(symbol, digits, policy):
    module = bound(symbol, policy=policy, loss_scale=64.0)
    train(module, batches(digits, 2))
    args, auxs = module.get_params()
    args = {name: value * 2 for name, value in args.items()}
    one, *others = args
    before = everything(module), weights(module)
    for error, message, call in (
        (ValueError, rf"{one} has shape \(1, 1\), expected", lambda: {**args, one: mx.nd.ones((1, 1))}),
        (RuntimeError, f"{one} is not presented", lambda: {name: args[name] for name in others}),
    ):
        with pytest.raises(error, match=message):
            module.set_params(call(), auxs)
        with pytest.raises(error, match=message):
            module.init_params(mx.init.One(), call(), auxs, force_init=True)
    for values, message in (({"no_weight": args[one]}, "no no_weight"), ({one: mx.nd.ones((1, 1))}, "has shape")):
        with pytest.raises(ValueError, match=message):
            module.set_params({**{name: args[name] for name in others}, **values}, auxs, allow_missing=True)
    assert_same(everything(module), before[0])
    assert_same(weights(module), before[1])


@pytest.mark.parametrize("policy", ["float16", MASTERS])
def test_set_params_leaves_what_get_params_returned_as_it_is(symbol, policy):
    module = bound(symbol, policy=policy)
    args, _ = module.get_params()
    before = {name: value.asnumpy() for name, value in args.items()}
    twice = {name: value * 2 for name, value in args.items()}
    module.set_params({**twice, "softmax_label": mx.nd.ones(BATCH)}, {}, allow_missing=True)
    for name, value in before.items():
        np.testing.assert_array_equal(args[name].asnumpy(), value)
    for name, value in weights(module).items():
        if name in before:
            np.testing.assert_array_equal(value, before[name] * 2)


# -- Data in float16, as the iterators of scripts for a network with casts give them ------------------


def convolved(x):
    return mx.sym.Convolution(x, kernel=(3, 3), num_filter=4, name="conv")


FIRST = {
    "a layer": convolved,
    "a norm": lambda x: convolved(mx.sym.BatchNorm(x, fix_gamma=False, name="norm")),
    "arithmetic": lambda x: convolved((x - 0.5) / 0.25),
    "a pooling": lambda x: convolved(mx.sym.Pooling(x, kernel=(2, 2), pool_type="avg")),
    "two": lambda x: mx.sym.concat(mx.sym.Flatten(convolved(x)), mx.sym.Flatten(mx.sym.exp(x)), dim=1),
}


@pytest.mark.parametrize("exclude", [[], ["conv"]], ids=str)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("policy", ["float16", MASTERS, "bfloat16"])
def test_data_in_float16_train_what_the_same_data_in_fp32_do(policy, first, exclude):
    values = mx.nd.array(np.random.RandomState(0).rand(4, 3, 8, 8)).astype("float16")
    found, start = [], None
    for dtype in (np.float32, np.float16):
        scores = mx.sym.FullyConnected(FIRST[first](mx.sym.var("data")), num_hidden=3, name="fc")
        out = mx.sym.SoftmaxOutput(scores, name="softmax")
        module = mxmp.Module(out, policy=policy, exclude=exclude, loss_scale=128)
        described = [mx.io.DataDesc("data", values.shape, dtype)], [mx.io.DataDesc("softmax_label", (4,), dtype)]
        module.bind(*described)
        module.init_params(mx.init.Xavier(), arg_params=start, allow_missing=True)
        start = start or {name: value.copy() for name, value in module.get_params()[0].items()}
        module.init_optimizer(optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
        data, label = values.astype(dtype), mx.nd.array([0, 1, 2, 0], dtype=dtype)
        for _ in range(3):
            module.forward_backward(mx.io.DataBatch([data], [label]))
            module.update()
        args, auxs = module.get_params()
        predicting = mxmp.Module(out, policy=policy, exclude=exclude)
        predicting.bind(*described, for_training=False)
        predicting.set_params(args, auxs)
        predicting.forward(mx.io.DataBatch([data], [label]), is_train=False)
        found.append({**args, **auxs, "scores": predicting.get_outputs()[0]})
    assert_same(*found)
