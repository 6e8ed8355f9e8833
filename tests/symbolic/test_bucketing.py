"""Buckets over sequence lengths share masters, scaler and counters."""

import mxnet as mx
import numpy as np
import pytest
from kit.modules import train
from kit.twins import MASTERS, assert_same
from support.profile import operators

import mxmp

LENGTHS = (4, 6)
BATCH, VOCABULARY = 8, 12


def sym_gen_of(inner):
    data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
    x = mx.sym.Embedding(data, input_dim=VOCABULARY, output_dim=8, name="embed")
    if inner:
        x = mx.sym.FullyConnected(x, num_hidden=inner, flatten=False, name="inner")
    x = mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=VOCABULARY, flatten=False, name="outer")
    x = mx.sym.reshape(x, (-1, VOCABULARY))
    return mx.sym.SoftmaxOutput(x, mx.sym.reshape(label, (-1,)), name="softmax"), ["data"], ["softmax_label"]


def sym_gen(length):
    return sym_gen_of(16)


def batch(length, seed=0):
    tokens = mx.nd.array(np.random.RandomState(seed).randint(0, VOCABULARY, (BATCH, length)))
    return mx.io.DataBatch(
        [tokens],
        [(tokens + 1) % VOCABULARY],
        bucket_key=length,
        provide_data=[mx.io.DataDesc("data", (BATCH, length))],
        provide_label=[mx.io.DataDesc("softmax_label", (BATCH, length))],
    )


def bound(kind=mxmp.BucketingModule, loss_scale=8.0, **mixed):
    if kind is mxmp.BucketingModule:
        mixed["loss_scale"] = loss_scale
    return ready(kind(sym_gen, default_bucket_key=max(LENGTHS), **mixed))


def bind(module, **options):
    longest = batch(max(LENGTHS))
    module.bind(longest.provide_data, longest.provide_label, **options)


ADAM = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.02}}


def ready(module):
    bind(module)
    if not module.params_initialized:
        mx.random.seed(0)
        module.init_params(mx.init.Xavier())
    module.init_optimizer(**ADAM)
    return module


def batches(count=30):
    return [batch(LENGTHS[i % 2], seed=i) for i in range(count)]


def weights(module):
    return {k: v.asnumpy() for k, v in module.get_params()[0].items()}


def test_float16_parameters_with_masters_equal_fp32_parameters_in_every_bucket():
    full, low = bound(policy="float16"), bound(policy=MASTERS)
    train(full, batches())
    train(low, batches())
    for name, value in weights(full).items():
        np.testing.assert_array_equal(weights(low)[name], value, err_msg=name)
    group = low._buckets[4]._exec_group
    dtypes = {name: arrays[0].dtype for name, arrays in zip(group.param_names, group.param_arrays)}
    assert dtypes["inner_weight"] == np.float16
    assert dtypes["embed_weight"] == np.float32


def test_an_overflow_in_one_bucket_is_skipped_named_and_lowers_the_scale_of_all():
    module = bound(loss_scale=mxmp.DynamicLossScaler(64.0), policy=MASTERS)
    train(module, batches(4))
    before = weights(module)
    module.forward(batch(4))
    module.backward()
    group = module._curr_module._exec_group
    group.grad_arrays[group.param_names.index("inner_bias")][0][0] = np.inf
    module.update()
    assert module.last_step_skipped
    assert module.overflow_params == ("inner_bias on cpu(0)",)
    assert module.loss_scale == module._buckets[6].loss_scale == 32.0
    assert_same(before, weights(module))


def normed(length):
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, flatten=False, name="fc")
    x = mx.sym.BatchNorm(mx.sym.mean(x, axis=1), name="norm")
    return mx.sym.LinearRegressionOutput(x, mx.sym.var("label"), name="out"), ["data"], ["label"]


def normed_module():
    module = mxmp.BucketingModule(normed, 5, policy="float16", loss_scale=8.0)
    module.bind([("data", (8, 5, 3))], [("label", (8, 4))])
    module.init_params()
    module.init_optimizer()
    return module


def normed_step(module, length, value, rows=8):
    """Train with one batch; return the running statistics."""
    data = mx.nd.random.normal(shape=(rows, length, 3)) * value
    shapes = [("data", data.shape)], [("label", (rows, 4))]
    module.forward_backward(mx.io.DataBatch([data], [mx.nd.ones((rows, 4))], 0, None, length, *shapes))
    module.update()
    return {name: value.asnumpy().tolist() for name, value in module.get_params()[1].items()}


@pytest.mark.parametrize("rows", [8, 6])
def test_an_overflow_in_one_bucket_keeps_the_running_statistics_of_another_ones_last_step(rows):
    module = normed_module()
    first, second = normed_step(module, 5, 1.0), normed_step(module, 3, 2.0)
    assert normed_step(module, 5, np.inf, rows) == second != first
    assert module.last_step_skipped


def test_a_change_of_buckets_or_of_the_batch_size_copies_no_running_statistics_anew():
    module = normed_module()

    def count(length, rows):
        found = operators(lambda: normed_step(module, length, 1.0, rows))
        return {name: times for name, (times, _) in found.items() if name in ("CopyCPU2CPU", "_equal_scalar", "where")}

    for length in (5, 3):
        normed_step(module, length, 1.0)
    assert count(3, 8) == count(5, 8) == count(5, 6) == count(3, 6) == count(3, 8)


def test_states_before_there_is_an_optimizer_are_refused_and_nothing_is_written(tmp_path):
    module = mxmp.BucketingModule(sym_gen, max(LENGTHS))
    bind(module)
    module.init_params()
    with pytest.raises(RuntimeError, match=r"init_optimizer\(\) first"):
        module.save_checkpoint(str(tmp_path / "b"), 1, True)
    assert not list(tmp_path.iterdir())
    module.save_checkpoint(str(tmp_path / "b"), 1, remove_amp_cast=True)
    assert not list(tmp_path.glob("*.states"))


def test_a_key_that_cannot_be_saved_is_refused_before_a_file_is_written(tmp_path):
    module = mxmp.BucketingModule(lambda key: sym_gen(6), default_bucket_key="long", policy=MASTERS)
    bind(module)
    module.init_params()
    with pytest.raises((TypeError, ValueError)):
        module.save_checkpoint(str(tmp_path / "net"), 1)
    assert not list(tmp_path.iterdir())


def test_rebinding_for_prediction_keeps_the_weights():
    module = bound(policy=MASTERS)
    train(module, batches(4))
    before = weights(module)
    bind(module, for_training=False, force_rebind=True)
    assert_same(before, weights(module))
    module.forward(batch(4), is_train=False)
    assert module.get_outputs()[0].shape == (BATCH * 4, VOCABULARY)


def part_of_the_network(length):
    """Short sentences skip a layer, so their bucket lacks its parameters."""
    return sym_gen_of(8 if length == max(LENGTHS) else 0)


@pytest.mark.parametrize("policy", ["float16", MASTERS, "bfloat16"], ids=["f16", "f16 masters", "bf16"])
def test_a_bucket_may_lack_parameters_of_the_default_one(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "sym_gen", part_of_the_network)
    plain, module = bound(mx.mod.BucketingModule), bound(policy=policy)
    train(module, batches(5))  # in MXNet's, which numbers the parameters of each bucket anew, it fails
    for each in (plain, module):
        each.forward(batch(min(LENGTHS)))
    short = weights(module)
    assert short.keys() == weights(plain).keys()
    module.forward(batch(max(LENGTHS)))
    for name, value in short.items():
        np.testing.assert_array_equal(weights(module)[name], value)
    module.forward(batch(min(LENGTHS)))
    module.save_checkpoint(str(tmp_path / "net"), 1)
    module.save_optimizer_states(str(tmp_path / "states"))
    module.load_optimizer_states(str(tmp_path / "states"))
    snapshot = mxmp.diagnose.watch(module, every=1)
    train(module, batches(2))
    snapshot.close()
    assert snapshot.latest is not None


def test_a_new_optimizer_has_the_parameters_and_the_latest_weights_of_all_buckets(monkeypatch):
    monkeypatch.setitem(globals(), "sym_gen", part_of_the_network)
    full, low = bound(policy="float16"), bound(policy=MASTERS)
    for module in (full, low):
        for current in LENGTHS:
            module.forward_backward(batch(min(LENGTHS)))
            module.update()
            module.forward(batch(current), is_train=False)
            module.init_optimizer(optimizer="adam", force_init=True)
        train(module, batches(3))
    for name, value in weights(full).items():
        np.testing.assert_array_equal(weights(low)[name], value, err_msg=name)


@pytest.mark.parametrize("first", ["weight", "score"])
def test_a_bucket_whose_output_is_a_weight_in_float16_returns_its_values(first):
    """The default bucket's graph stores it in float16; in the other one a reader may be missing altogether."""

    def generate(key):
        weight = mx.sym.var("fc_weight", shape=(3, 4))
        score = mx.sym.FullyConnected(mx.sym.var("data"), weight, num_hidden=3, no_bias=True, name="fc")
        head = mx.sym.SoftmaxOutput(score, mx.sym.var("softmax_label"), name="softmax")
        outputs = [weight, head] if first == "weight" else [head, weight]
        return head if key == 2 else mx.sym.Group(outputs), ["data"], ["softmax_label"]

    module = mxmp.BucketingModule(generate, default_bucket_key=2, policy=MASTERS, loss_scale=8.0)
    shapes = [("data", (2, 4))], [("softmax_label", (2,))]
    module.bind(*shapes)
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    data = mx.io.DataBatch([mx.nd.ones((2, 4))], [mx.nd.array([0, 1])], bucket_key=1)
    data.provide_data, data.provide_label = shapes
    assert module._curr_module._exec_group.param_arrays[0][0].dtype == np.float16
    for is_train in (True, False):
        module.forward(data, is_train=is_train)
        got = module.get_outputs()[0 if first == "weight" else 1]
        assert got.dtype == np.float32
        master = module.get_params()[0]["fc_weight"].asnumpy()
        assert np.abs(master).max() > 0.1
        np.testing.assert_array_equal(got.asnumpy(), master.astype("float16").astype("float32"))
