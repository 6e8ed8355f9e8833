"""Data that a product in low precision reads as they come are looked at once, and lost digits are said."""

import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import mxmp
from mxmp.precision.graph import Graph
from mxmp.precision.inputs import InputCheck

YEARS = np.stack([np.random.RandomState(0).randint(1995, 2025, 64), np.random.RandomState(1).normal(size=64)], axis=1)
NEAR_1000 = 1000 + np.random.RandomState(2).normal(size=(64, 2))
LOST = {  # by name: data, dtypes, what the message says
    "a year": (YEARS, ("bfloat16", "float16"), "column 0"),
    "two values whose difference matters": (NEAR_1000, ("bfloat16", "float16"), "steps"),
    "a day of the year 2024 since 1900": (
        YEARS[:, :1] * 0 + np.arange(45300, 45364)[:, None],
        ("bfloat16",),
        "column 0",
    ),
    "a value above float16's largest": (np.random.RandomState(0).normal(size=(64, 2)) * 1e5, ("float16",), "infinity"),
}
FINE = {
    "normalized": np.random.RandomState(0).normal(size=(64, 3)),
    "pixels": np.random.RandomState(0).randint(0, 256, (64, 3)),
    "ones beside others": np.stack([np.ones(64), np.random.RandomState(0).normal(size=64)], axis=1),
    "one-hot": np.eye(64)[:, :3],
    "zeros": np.zeros((64, 3)),
    "counts": np.random.RandomState(0).poisson(3, (64, 3)),
    "a few rows": YEARS[:4],
    "nothing finite": np.full((64, 2), np.nan),
}


def run_gluon(data, dtype, times=1):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4), nn.Dense(2))
    net.initialize()
    mxmp.convert(net, dtype)
    for _ in range(times):
        net(mx.nd.array(data)).wait_to_read()


def run_module(data, dtype, times=1):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="net_dense0_fwd")
    module = mxmp.Module(symbol, label_names=None, policy=dtype)
    module.bind([("data", data.shape)], for_training=False)
    module.init_params()
    for _ in range(times):
        module.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=False)


FRONTENDS = {"gluon": run_gluon, "module": run_module}


@pytest.mark.parametrize("run", FRONTENDS.values(), ids=FRONTENDS)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in LOST for dtype in LOST[name][1]])
def test_digits_that_the_first_product_would_lose_are_said_with_the_cure(name, dtype, run):
    data, _, said = LOST[name]
    with pytest.warns(UserWarning, match=f"'data' goes as it is into .*{said}.*exclude=.'net_dense0_fwd'."):
        run(data, dtype)


@pytest.mark.parametrize("run", FRONTENDS.values(), ids=FRONTENDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FINE)
def test_ordinary_data_are_fine(name, dtype, run):
    run(FINE[name], dtype)  # warnings are errors


@pytest.mark.parametrize("run", FRONTENDS.values(), ids=FRONTENDS)
def test_it_is_said_once(run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(YEARS, "bfloat16", times=3)
    assert sum("goes as it is" in str(each.message) for each in said) == 1


def test_channels_of_images_are_columns():
    x = np.random.RandomState(0).normal(size=(8, 3, 6, 6))
    x[:, 2] += 4000
    net = nn.Conv2D(4, 3)
    net.initialize()
    with pytest.warns(UserWarning, match="column 2, 3999.96"):
        mxmp.convert(net, "bfloat16")(mx.nd.array(x))


def test_what_is_normalized_before_the_product_is_not_looked_at():
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), nn.Dense(4))
    net.initialize()
    mxmp.convert(net, "bfloat16")(mx.nd.array(YEARS))


def test_an_excluded_product_is_not_looked_at():
    run_gluon(YEARS, "bfloat16,exclude=net_dense0_fwd")


@mx.util.use_np
def test_an_empty_batch_of_the_numpy_interface_has_nothing_to_lose():
    net = nn.Dense(2, in_units=3)
    net.initialize()
    plan = mxmp.tune(net, mx.np.ones((2, 3)), measure=False, cache=False)
    graph = Graph.from_symbol(net(mx.sym.var("data").as_np_ndarray()))
    InputCheck().look_at({"data": mx.np.ones((0, 3))}, lambda: graph, plan)
