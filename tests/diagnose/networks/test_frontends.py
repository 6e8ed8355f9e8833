"""Nets that run as several graphs, and modules with buckets."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import Chain, batch, dense, gluon_run, gluon_step, module_of, module_step, three, values
from kit.twins import LOSS
from mxnet import gluon

import mxmp
from mxmp.diagnose import blame, watch


class Parted(gluon.Block):
    """Python between two graphs."""

    def __init__(self):
        super().__init__(prefix="")
        with self.name_scope():
            self.body = Chain(dense("first", 8, 6), dense("middle", 8, 8))
            self.tail = Chain(dense("last", 4, 8))

    def forward(self, x):
        return self.tail(self.body(x) * 1.0)


def test_a_net_of_several_graphs_is_watched_and_blamed_as_one():
    net, (x, y) = values(Parted(), middle=1.2e5), batch()
    trainer = gluon_run(net)
    with watch(net, trainer) as watched:
        gluon_step(net, trainer, x, y)
    assert [t.name for t in watched.latest.of("activation")] == ["first_fwd", "middle_fwd", "last_fwd"]
    assert {"last_fwd -> last_weight", "middle_fwd -> first_fwd"} <= {t.name for t in watched.latest.of("gradient")}
    found = blame(net, trainer, x, loss=lambda out: LOSS(out, y))
    assert (found.where, found.name) == ("forward", "middle_fwd")


def generate(width):
    """The more data, the more steps of one recurrent cell; the second one overflows."""
    data, label = mx.sym.var("data"), mx.sym.var("label")
    weight = mx.sym.var("weight")
    state = mx.sym.slice_axis(data, axis=1, begin=0, end=2)
    for i in range(1, width):
        x = mx.sym.slice_axis(data, axis=1, begin=2 * i, end=2 * i + 2)
        state = mx.sym.FullyConnected(state + x, weight, num_hidden=2, no_bias=True, name=f"step{i}")
    return mx.sym.LinearRegressionOutput(state, label, name="out"), ("data",), ("label",)


def bucket(width, size=1.0):
    data = mx.nd.array(np.random.RandomState(width).uniform(-size, size, (4, 2 * width)))
    return mx.io.DataBatch(
        [data],
        [mx.nd.zeros((4, 2))],
        bucket_key=width,
        provide_data=[("data", data.shape)],
        provide_label=[("label", (4, 2))],
    )


def buckets(weight):
    module = mxmp.BucketingModule(generate, 3, loss_scale=8.0)
    module.bind(bucket(3).provide_data, bucket(3).provide_label)
    module.init_params(mx.init.Constant(weight))
    module.init_optimizer(optimizer_params={"learning_rate": 0.0})
    return module


@pytest.mark.filterwarnings("ignore:Optimizer created manually:UserWarning")
def test_the_bucket_that_is_current_is_watched_when_it_runs():
    module = buckets(0.5)
    with watch(module, every=100) as watched:
        for width in (2, 3, 2):
            module.forward_backward(bucket(width))
            module.update()
    assert [s.step for s in watched.snapshots] == [2]
    assert "step2" in [t.name for t in watched.latest.of("activation")]


def test_blame_takes_the_batchs_bucket():
    module = buckets(300.0)
    module.forward_backward(bucket(2))
    module.update()
    assert not module.last_step_skipped
    module.forward_backward(bucket(3))
    module.update()
    assert module.last_step_skipped
    module.switch_bucket(2, bucket(2).provide_data, bucket(2).provide_label)
    found = blame(module, bucket(3))
    assert (found.where, found.name) == ("forward", "step2")
    assert not blame(module, bucket(2)).reproduced


def test_blame_takes_a_batch_of_another_size_than_the_last_one():
    module = module_of(three(middle=1.2e5), *batch())
    module_step(module, *batch())
    assert module.last_step_skipped
    for x, y in (batch(shape=(3, 6)), batch()):
        found = blame(module, mx.io.DataBatch([x], [y]))
        assert (found.where, found.name) == ("forward", "middle_fwd")
        assert module.data_shapes[0].shape == x.shape
