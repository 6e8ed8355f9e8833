"""The first operator gone wrong, the direction, the cause and what went in, through both frontends."""

from __future__ import annotations

import re

import mxnet as mx
import numpy as np
import pytest
from kit.frontends import (
    Chain,
    Run,
    batch,
    dense,
    gluon_run,
    three,
    values,
)
from kit.twins import LOSS
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import blame

DOORS = ["gluon", "module"]


def blamed(door, net, x, y, loss_scale=8.0, factor=1.0, flags=None, **options):
    """What is blamed after a step that was skipped."""
    run = Run(door, net, on=(x, y), loss_scale=loss_scale, factor=factor)
    net.hybridize(**(flags or {}))
    assert run.step()
    return run.blame(**options)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("layer", ["first", "middle", "last"])
def test_an_overflow_in_forward_is_the_layers_that_was_built_to_overflow(door, layer):
    net, (x, y) = three(**{layer: 1.2e5}), batch()
    found = blamed(door, net, x, y)
    assert (found.where, found.name, found.op, found.dtype) == (
        "forward", f"{layer}_fwd", "FullyConnected", "float16"
    )  # fmt: skip
    assert "rounded to float16, which ends at 65504" in found.cause
    assert found.output.infs > 0
    assert f"{layer}_weight" in {r.name for r in found.inputs}
    weight = next(r for r in found.inputs if r.name == f"{layer}_weight")
    assert weight.largest == pytest.approx(np.abs(net_weight(net, layer)).max(), rel=1e-3)
    assert str(found).startswith(f"{layer}_fwd (FullyConnected), forward, at a loss scale of 8: overflow: ")


def net_weight(net, layer):
    param = next(p for name, p in net.collect_params().items() if name == f"{layer}_weight")
    return (param.masters()[0] if hasattr(param, "masters") else param.data()).asnumpy()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
def test_a_nan_in_forward_is_the_operators_that_made_it(door, flags):
    layers = [dense("first", 8, 6), ("root", lambda ops, x: ops.sqrt(x, name="root")), dense("last", 4, 8)]
    net, (x, y) = values(Chain(*layers)), batch()
    found = blamed(door, net, x, y, flags=flags)
    assert (found.where, found.name, found.op) == ("forward", "root", "sqrt")
    assert "NaN from finite inputs" in found.cause
    assert found.output.nans > 0
    (read,) = found.inputs
    assert read.name == "first_fwd"
    assert read.lowest < 0


@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_in_backward_is_named_with_what_the_scale_has_to_do_with_it(door):
    # the gradients of the last layer fit; times the weights of the middle one they do not
    net, (x, y) = three(first=1e-4, middle=64.0), batch()
    found = blamed(door, net, x, y, loss_scale=2.0**14)
    assert (found.where, found.name, found.op) == ("backward", "middle_fwd", "FullyConnected")
    assert found.output.name == "middle_fwd -> first_fwd"
    assert found.loss_scale == 2.0**14
    assert "A lower loss scale avoids it" in found.cause
    assert {"last_fwd -> middle_fwd", "middle_weight", "first_fwd"} <= {r.name for r in found.inputs}
    assert all(r.finite for r in found.inputs)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scale", [1.0, 2.0**14])
def test_blame_computes_whether_a_lower_scale_avoids_the_overflow(door, scale):
    net, (x, y) = three(first=1e-4, middle=64.0), batch()
    factor = 2.0**14 / scale
    found = blamed(door, net, x, y, loss_scale=scale, factor=factor)
    assert (found.where, found.name) == ("backward", "middle_fwd")
    avoiding = float(re.search(r"A lower loss scale avoids it: (\S+) or less", found.cause).group(1))
    assert avoiding < scale
    if door == "gluon":
        trainer = gluon_run(net, loss_scale=scale)
        again = [
            blame(net, trainer, x, loss=lambda out: LOSS(out, y) * factor, loss_scale=each).reproduced
            for each in (avoiding, 4 * avoiding)
        ]
        assert again == [False, True]


@pytest.mark.parametrize("door", DOORS)
def test_blame_does_not_advise_a_lower_scale_for_what_no_scale_avoids(door):
    net, (x, y) = three(first=1e-4, middle=6e4), batch()
    found = blamed(door, net, x, y, loss_scale=2.0, factor=2.0**30)
    assert "The loss scale is 2, and not the cause: none down to 6.1e-05 avoids it" in found.cause


@pytest.mark.parametrize("door", DOORS)
def test_a_nan_that_only_the_backward_makes(door):
    """The root of zero is zero and has no finite gradient; a zero from above makes it NaN."""
    net = values(
        Chain(
            dense("first", 8, 6),
            ("relu", lambda ops, x: ops.relu(x, name="relu")),
            ("root", lambda ops, x: ops.sqrt(x, name="root")),
            ("off", lambda ops, x: x * 0.0),
            dense("last", 4, 8),
        )
    )
    x, y = batch()
    found = blamed(door, net, x, y)
    assert (found.where, found.name, found.op) == ("backward", "root", "sqrt")
    assert found.output.name == "root -> relu"
    assert found.output.nans > 0


@pytest.mark.parametrize(
    ("how", "causes"),
    [
        ({"loss_scale": 2.0**22}, ["its gradient has an overflow", "A lower loss scale avoids it"]),
        ({"factor": np.inf}, ["the loss is not finite, and what the net returned is"]),
    ],
    ids=["gradient beyond float16", "not finite"],
)
def test_a_loss_whose_gradient_or_value_does_not_fit_is_named(how, causes):
    net, (x, y) = three(), batch()
    found = blamed("gluon", net, x, y, **how)
    assert (found.where, found.name) == ("loss", "the loss")
    assert all(cause in found.cause for cause in causes)
    assert "factor" not in how or found.inputs[-1].name == "last_fwd"


@pytest.mark.parametrize("door", DOORS)
def test_weights_that_float16_cannot_hold_are_named(door):
    net, (x, y) = three(middle=3e6), batch()
    found = blamed(door, net, x, y)
    assert (found.where, found.name, found.op) == ("parameter", "middle_weight", "")
    assert [r.name for r in found.inputs] == ["middle_weight, unrounded"]


@pytest.mark.parametrize("door", DOORS)
def test_data_and_parameters_that_are_not_finite_are_named(door):
    net, (x, y) = three(), batch()
    x[1, 2] = np.nan
    found = blamed(door, net, x, y)
    assert (found.where, found.output.nans) == ("input", 1)
    net, (x, y) = three(), batch()
    value = net.collect_params()["middle_weight"].data()
    value[0, 0] = np.inf
    found = blamed(door, net, x, y)
    assert (found.where, found.name) == ("parameter", "middle_weight")


@pytest.mark.parametrize("value", [np.nan, 1e6], ids=["NaN", "beyond float16"])
@pytest.mark.parametrize("policy", ["float16", "params=float16"])
@pytest.mark.parametrize("door", DOORS)
def test_a_frozen_weight_is_named_and_not_its_reader(door, policy, value):
    net, (x, y) = three(), batch()
    middle = net.collect_params()["middle_weight"]
    middle.set_data(mx.nd.full(middle.shape, value))
    if door == "gluon":
        middle.grad_req = "null"
        found = blame(net, gluon_run(net, policy=policy), x, loss=lambda out: LOSS(out, y))
    else:
        loss = mx.sym.MakeLoss(mx.sym.square(net(mx.sym.var("data")) - mx.sym.var("label")))
        module = mxmp.Module(loss, ["data"], ["label"], policy=policy, fixed_param_names=["middle_weight"])
        module.bind([("data", x.shape)], [("label", y.shape)])
        module.init_params(arg_params={name: p.data() for name, p in net.collect_params().items()})
        module.init_optimizer()
        found = blame(module, mx.io.DataBatch([x], [y]))
    assert (found.where, found.name, found.op) == ("parameter", "middle_weight", "")
    assert ("not finite before" if np.isnan(value) else "overflow: 1e+06 is rounded to float16") in found.cause


class TwoOutputs(gluon.HybridBlock):
    """The output of ``first``, which ``last`` reads too, and the output of ``last``, of the same shape."""

    def __init__(self):
        super().__init__(prefix="")
        with self.name_scope():
            self.first = nn.Dense(4, in_units=6, use_bias=False, prefix="first_")
            self.last = nn.Dense(4, in_units=4, use_bias=False, prefix="last_")

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.first(x)
        return x, self.last(x)


@pytest.mark.parametrize("low", [True, False], ids=["in float16", "in float32"])
def test_an_output_that_another_operator_reads_too_is_the_losss_where_the_losss_gradient_does_not_fit(low):
    net, (x, y) = values(TwoOutputs()), batch()
    trainer = gluon_run(net, policy="float16" if low else "float16,exclude=last_fwd")
    found = blame(net, trainer, x, loss=lambda out: LOSS(out[0], y) * 1e7 + LOSS(out[1], y))
    assert (found.where, found.name) == ("loss", "the loss")
    before = found.inputs[-1]
    assert before.name == "the gradient of the loss, unrounded"
    assert before.largest > 65504
    assert f"its gradient has an overflow: {before.largest:.4g} is rounded" in found.cause


def test_an_output_that_another_operator_reads_too_is_the_readers_where_only_the_sum_does_not_fit():
    net, x = values(TwoOutputs()), batch()[0]
    net.last.weight.set_data(mx.nd.full((4, 4), 0.25))
    trainer = gluon_run(net, policy="float16,exclude=last_fwd")
    found = blame(net, trainer, x, loss=lambda out: (out[0] + out[1]).sum(), loss_scale=40000)
    assert (found.where, found.name, found.dtype) == ("backward", "last_fwd", "float16")
    assert "a sum of gradients, its own among them, has an overflow: 8e+04" in found.cause
    assert found.output.name == "the loss, last_fwd -> first_fwd"


class Fan(gluon.HybridBlock):
    """Two readers of one tensor, which compute in low precision or, as ``exp``, in FP32."""

    def __init__(self, low):
        super().__init__(prefix="")
        with self.name_scope():
            self.first = nn.Dense(4, in_units=6, use_bias=False, prefix="first_")
            if low:
                self.left = nn.Dense(4, in_units=4, use_bias=False, prefix="left_")
                self.right = nn.Dense(4, in_units=4, use_bias=False, prefix="right_")
            else:
                self.left = nn.HybridLambda("exp", prefix="left_")
                self.right = nn.HybridLambda("expm1", prefix="right_")

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.first(x)
        return self.left(x) + self.right(x)


@pytest.mark.parametrize(
    ("low", "label", "name", "cause"),
    [
        (True, -1.0, "a sum of gradients", "overflow of float16"),
        (False, -39.0, "left_exp0", "a sum of gradients, its own among them, has an overflow: 8.19"),
    ],
    ids=["in float16", "in float32"],
)
def test_a_sum_of_gradients_that_overflows(low, label, name, cause):
    net = Fan(low)
    net.initialize()
    for each, param in net.collect_params().items():
        param.set_data(mx.nd.ones(param.shape) * (1e-4 if each == "first_weight" else 10.0))
    # each branch sends 4 * 10 * (1 / 4) * 2**12 = 40960 back, or (1 + 39) / 4 * 2**12
    x, y = mx.nd.ones((2, 6)) * 0.01, mx.nd.full((2, 4), label)
    found = blamed("gluon", net, x, y, loss_scale=2.0**12)
    assert (found.where, found.name) == ("backward", name)
    assert cause in found.cause


class Angles(gluon.HybridBlock):
    """The angle between features and a weight, whose cosine is near 1, as ArcFace computes it."""

    def __init__(self):
        super().__init__(prefix="angles_")
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(4, 8))

    def hybrid_forward(self, F, x, weight):  # noqa: N803
        x, weight = F.L2Normalization(x), F.L2Normalization(weight)
        return F.arccos(F.FullyConnected(x, weight, no_bias=True, num_hidden=4, name="cosine"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_operator_without_a_finite_result_names_what_was_rounded_in_front_of_it(dtype):
    def blamed(**options):
        net = Angles()
        net.initialize(mx.init.Normal(1))
        x = net.weight.data() + 0.01
        mxmp.convert(net, dtype, **options)
        trainer = mxmp.Trainer(net.collect_params(), "sgd")
        return mxmp.diagnose.blame(net, trainer, x, loss=lambda out: out.sum())

    report = blamed()
    assert report.name == "angles_arccos0"  # forward, where rounding takes a cosine beyond 1, or backward, at 1
    assert "angles_cosine, which it reads, is rounded" in report.cause
    assert "exclude=['angles_cosine']" in report.cause
    with pytest.warns(UserWarning, match="nothing in 'angles' computes"):
        assert not blamed(exclude=["angles_cosine"]).reproduced
