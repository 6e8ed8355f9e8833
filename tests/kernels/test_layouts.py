"""Layouts in which oneDNN's kernels are slow: what is kept out of them, and that no value changes by it."""

from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import S, assert_same_bits, by_gluon, by_symbol, filled, nodes, sqnr
from kit.twins import array, seeded
from mxnet.gluon import nn

import mxmp
from mxmp import Policy
from mxmp.kernels.fit import SWITCH
from mxmp.precision.casts import strip
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph
from mxmp.precision.operators import Options
from mxmp.tuning.choices import may_compute_low
from mxmp.versions import NOW


def convolution(x: mx.sym.Symbol, channels: int, groups: int = 1, name: str = "conv", size: int = 3) -> mx.sym.Symbol:
    pad = size // 2
    return S.Convolution(x, kernel=(size, size), pad=(pad, pad), num_filter=channels, num_group=groups, name=name)


def resnext(channels: int, groups: int, norm: bool = True) -> mx.sym.Symbol:
    def then(x: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
        return S.relu(S.BatchNorm(x, fix_gamma=False, name=f"norm{name}") if norm else x)

    x = then(convolution(S.var("data"), channels, name="first", size=1), "1")
    x = then(convolution(x, channels, groups, name="grouped"), "2")
    return convolution(x, 16, name="last", size=1)


# -- Grouped convolutions in blocks of few channels ---------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "groups", "copies"),
    [
        (128, 32, "blocked"),
        (64, 8, "blocked"),
        (24, 2, "plain"),  # 24 channels make no blocks of 16
        (64, 4, None),
        (96, 32, None),
        (64, 64, None),
        (64, 1, None),
    ],
)
def test_which_convolutions_keep_their_layout_to_themselves(channels, groups, copies):
    low = mxmp.cast_symbol(resnext(channels, groups, norm=False), "bfloat16", ctx=mx.cpu())
    found = {node["name"] for node in nodes(low)}
    assert ("grouped_blocked" in found) == (copies == "blocked")
    assert ("grouped_plain" in found) == (copies == "plain")
    assert ("grouped_given" in found) == (copies is not None)
    # Not ``slice_axis``, for which MXNet keeps another copy of what it reads.
    assert {node["op"] for node in nodes(low) if node["name"] in ("grouped_given", "grouped_plain")} <= {"slice"}
    assert not any(name.startswith(("first_", "last_")) and name.endswith(("blocked", "plain")) for name in found)


@pytest.mark.parametrize("exclude", [(), ("grouped",)], ids=["low", "float32"])
@pytest.mark.parametrize(("channels", "groups"), [(16, 4), (64, 8), (24, 2), (40, 10)])
def test_the_copies_change_no_bit_of_outputs_and_gradients(channels, groups, exclude, monkeypatch):
    symbol, policy = resnext(channels, groups, norm=False), Policy("bfloat16", exclude=exclude)
    values = filled(symbol, data=(2, 8, 7, 5))
    copied = mxmp.cast_symbol(symbol, policy, ctx=mx.cpu())
    monkeypatch.setenv(SWITCH, "small_channel_blocks")
    without = mxmp.cast_symbol(symbol, policy, ctx=mx.cpu())
    assert len(nodes(copied)) > len(nodes(without))
    assert_same_bits(by_symbol(copied, values), by_symbol(without, values))


@pytest.mark.parametrize(("channels", "groups"), [(64, 16), (64, 8), (24, 2)])
def test_a_block_of_resnext_is_as_near_to_float32_as_without_the_copies(channels, groups, monkeypatch):
    """Its BatchNorms sum in another order, so not to the bit."""
    symbol = resnext(channels, groups)
    values = filled(symbol, data=(4, 8, 7, 7))
    copied = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
    monkeypatch.setenv(SWITCH, "small_channel_blocks")
    without = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
    want, got, before = (by_symbol(each, values) for each in (symbol, copied, without))
    assert sqnr(want.outputs[0], got.outputs[0]) > max(35, sqnr(want.outputs[0], before.outputs[0]) - 1)
    for name in ("first_weight", "grouped_weight", "last_weight"):
        assert sqnr(want.grads[name], got.grads[name]) > max(20, sqnr(want.grads[name], before.grads[name]) - 1)


def test_a_grouped_convolution_may_be_a_head_and_read_a_variable():
    symbol = convolution(S.var("data"), 16, 4)
    low = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
    assert low.list_outputs() == symbol.list_outputs()
    values = filled(symbol, data=(2, 16, 5, 5))
    assert sqnr(*(by_symbol(s, values).outputs[0] for s in (symbol, low))) > 40


@pytest.mark.parametrize(("policy", "groups"), [("float16", 1), ("float16", 4), ("bfloat16", 4)])
def test_a_one_dimensional_convolution_behind_a_norm_trains_as_a_flat_two_dimensional_one_in_float32(policy, groups):
    """MXNet's own FP32 cannot train the first of them: "Check failed: !is_view"."""

    def gradients(axes, kind, **more):
        x = S.Convolution(S.var("data"), kernel=(3, 1)[:axes], num_filter=16, num_group=groups, no_bias=True)
        out = S.LinearRegressionOutput(S.flatten(S.mean(S.sin(S.BatchNorm(x, name="norm")), axis=2)), name="out")
        shape = (2, 4, 10, 1)[: 2 + axes]
        module = kind(out, label_names=["out_label"], **more)
        module.bind([("data", shape)], [("out_label", (2, 16))])
        shapes = dict(zip(out.list_arguments(), out.infer_shape(data=shape)[0]))
        names = [name for name in shapes if name not in ("data", "out_label")]
        module.init_params(arg_params={name: array(i, *shapes[name]) for i, name in enumerate(names)})
        module.forward_backward(mx.io.DataBatch([array(8, *shape)], [array(9, 2, 16)]))
        return [arrays[0].asnumpy().ravel() for arrays in module._exec_group.grad_arrays]

    for low, full in zip(gradients(1, mxmp.Module, policy=policy, loss_scale=1.0), gradients(2, mx.mod.Module)):
        np.testing.assert_allclose(low, full, rtol=0, atol=0.02 * np.abs(full).max() + 1e-4)


def test_a_saved_symbol_runs_without_its_casts(tmp_path):
    """``Symbol.save`` leaves out every ``amp_cast`` unless it is told otherwise."""
    symbol = resnext(64, 8)
    mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu()).save(str(tmp_path / "net-symbol.json"))
    loaded = mx.sym.load(str(tmp_path / "net-symbol.json"))
    assert "grouped_blocked" in {node["name"] for node in nodes(loaded)}
    values = filled(symbol, data=(2, 8, 7, 5))
    assert sqnr(*(by_symbol(each, values).outputs[0] for each in (symbol, loaded))) > 100


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "compute=float16,norm=compute"])
@pytest.mark.parametrize(("channels", "groups"), [(32, 8), (24, 2), (16, 16)])
def test_evaluations_between_two_training_steps_change_no_bit(channels, groups, policy):
    """FP32 inference leaves a grouped weight with five axes, which MXNet's ``slice`` cannot read."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(channels, 3, padding=1, groups=groups, in_channels=channels))
        net.add(nn.BatchNorm(in_channels=channels), nn.Conv2D(8, 1, in_channels=channels))
    seeded(net)
    mxmp.convert(net, policy, exclude=["net_conv0_fwd"])
    x = np.random.RandomState(0).normal(size=(2, channels, 7, 7)).astype("float32")
    first = by_gluon(net, [x])
    evaluations = [net(mx.nd.array(x)).asnumpy() for _ in range(3)]
    assert_same_bits(by_gluon(net, [x]), first)
    np.testing.assert_array_equal(evaluations[1:], evaluations[:1] * 2)


# -- Reshapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["", "relu", "add"])
@pytest.mark.parametrize("groups", [1, 3, 48])
def test_a_reshape_to_four_axes_before_a_convolution_trains(groups, between):
    """As ShuffleNet's, by a plan that tuning may choose: the operator between two reshapes has no bfloat16 kernel."""
    x = S.Reshape(convolution(S.var("data"), 48, name="first", size=1), shape=(0, -4, 3, -1, -2), name="apart")
    x = S.Reshape(S.SwapAxis(x, dim1=1, dim2=2, name="swapped"), shape=(0, -3, -2), name="reshaped")
    x = S.relu(x) if between == "relu" else S.elemwise_add(x, x) if between == "add" else x
    symbol = convolution(x, 48, groups, name="last")
    plan = decide(Graph.from_symbol(symbol), Policy("bfloat16"), "cpu", Options(keep_output_names=True))
    decisions = {name: replace(each, low=name != "swapped") for name, each in plan.decisions.items()}
    low = mxmp.cast_symbol(symbol, replace(plan, decisions=decisions), ctx=mx.cpu())
    values = filled(symbol, data=(2, 3, 7, 7))
    want, got = (by_symbol(each, values) for each in (symbol, low))
    assert sqnr(want.outputs[0], got.outputs[0]) > 35
    assert min(sqnr(want.grads[name], got.grads[name]) for name in ("first_weight", "last_weight", "data")) > 30


RESHAPES = {
    "Reshape": lambda x, shape: S.Reshape(x, shape=shape, name="reshaped"),
    "expand_dims": lambda x, shape: S.expand_dims(S.Reshape(x, shape=shape[:-1]), axis=-1, name="reshaped"),
    "reshape_like": lambda x, shape: S.reshape_like(x, S.zeros(shape=(8, *shape[1:])), name="reshaped"),
    "mx.np": lambda x, shape: x.as_np_ndarray().reshape(8, *shape[1:]).as_nd_ndarray(),
}


@pytest.mark.parametrize("between", ["", "relu", "relu behind"])
@pytest.mark.parametrize(("shape", "kernel"), [((8, 8, 1, 1), (1, 1)), ((8, 8, 1), (1,)), ((8, 8, 1, 1, 1), (1, 1, 1))])
@pytest.mark.parametrize("how", RESHAPES)
def test_an_fp32_reshape_behind_a_cast_and_before_a_convolution_trains(how, shape, kernel, between):
    x = S.FullyConnected(S.var("data"), num_hidden=8, name="first")
    x = RESHAPES[how](S.relu(x) if between == "relu" else x, shape)
    symbol = S.Convolution(S.relu(x) if between == "relu behind" else x, kernel=kernel, num_filter=8, name="last")
    plan = decide(Graph.from_symbol(symbol), Policy("bfloat16"), "cpu", Options(keep_output_names=True))
    decisions = {name: replace(each, low=name == "first") for name, each in plan.decisions.items()}
    low = mxmp.cast_symbol(symbol, replace(plan, decisions=decisions), ctx=mx.cpu())
    values = filled(symbol, data=(8, 6))
    want, got = (by_symbol(each, values) for each in (symbol, low))
    assert sqnr(want.outputs[0], got.outputs[0]) > 35
    assert min(sqnr(want.grads[name], got.grads[name]) for name in ("first_weight", "last_weight", "data")) > 30


# -- BatchNorm in emulated float16 -------------------------------------------------------------------


def test_a_batch_norm_after_a_rounded_convolution_reads_blocks_of_channels():
    symbol = S.BatchNorm(convolution(S.var("data"), 16), name="norm")
    low = mxmp.cast_symbol(symbol, "float16", ctx=mx.cpu())
    (norm,) = (node for node in Graph.from_symbol(low).nodes() if node.op == "BatchNorm")
    assert norm.inputs[0].node.name == "norm_blocked"
    values = filled(symbol, data=(4, 8, 7, 5))
    assert sqnr(*(by_symbol(each, values).outputs[0] for each in (symbol, low))) > 50


# -- BatchNorm behind 3-D convolutions ----------------------------------------------------------------


def volumes(copied: bool = False) -> mx.sym.Symbol:
    """3-D convolutions with norms, as in I3D; ``copied``: with the copies that MXNet's FP32 needs in training."""

    def plain(x: mx.sym.Symbol) -> mx.sym.Symbol:
        return S.slice_axis(x, axis=0, begin=0, end=None) if copied else x

    x = S.var("data")
    for number, kernel in enumerate([(1, 3, 3), (3, 1, 1)]):
        pad = tuple(size // 2 for size in kernel)
        x = S.Convolution(x, kernel=kernel, pad=pad, num_filter=16, no_bias=True, name=f"conv{number}")
        x = S.Activation(plain(S.BatchNorm(plain(x), fix_gamma=False, name=f"norm{number}")), act_type="tanh")
    return S.FullyConnected(x, num_hidden=4, name="dense")


@pytest.mark.skipif(NOW.trains_norms_of_volumes, reason="the backward of BatchNorm fails since MXNet 1.8.0")
def test_mxnet_itself_cannot_train_a_batch_norm_behind_a_volume():
    """When this fails MXNet has mended it, and ``volume_norms`` may go."""
    symbol = volumes()
    with pytest.raises(mx.MXNetError, match="is_view"):
        by_symbol(symbol, filled(symbol, data=(2, 3, 4, 6, 6)))


def test_norms_of_volumes_are_copied_around_where_the_version_of_mxnet_fails_only():
    (report,) = mxmp.explain(volumes(), policy="bfloat16", ctx=mx.cpu()).graphs
    assert ("volume_norms" in report.workarounds) == (not NOW.trains_norms_of_volumes)


@pytest.mark.parametrize("exclude", [(), ("conv0",), ("conv1", "norm1"), ("norm*",)], ids=str)
@pytest.mark.parametrize("policy", ["float16", "float16-fast", "bfloat16"])
def test_batch_norm_behind_a_volume_trains(policy, exclude):
    policy = replace(Policy.parse(policy), exclude=exclude)
    values = filled(volumes(), data=(2, 3, 4, 6, 6))
    want = by_symbol(volumes(copied=True), values)
    got = by_symbol(mxmp.cast_symbol(volumes(), policy, ctx=mx.cpu()), values)
    floor = 45 if policy.compute == "float16" else 25
    assert sqnr(want.outputs[0], got.outputs[0]) > floor
    assert all(sqnr(want.grads[name], got.grads[name]) > floor - 10 for name in ("conv0_weight", "norm0_gamma"))


@pytest.mark.parametrize("make", [lambda: resnext(16, 4), volumes], ids=["grouped convolution", "norms of volumes"])
def test_the_copies_are_taken_out_again(make):
    symbol = make()
    low = Graph.from_symbol(mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu()))
    assert strip(low).to_json() == Graph.from_symbol(symbol).to_json()


# -- Channels that make no blocks ---------------------------------------------------------------------


def decisions(symbol: mx.sym.Symbol, policy: str = "bfloat16", device: str = "cpu") -> dict:
    return decide(Graph.from_symbol(symbol), Policy.parse(policy), device).decisions


def norm(x: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.BatchNorm(x, name="norm")


BEHIND = {
    "a convolution": lambda n: convolution(S.var("data"), n),
    "an activation": lambda n: S.Activation(convolution(S.var("data"), n), act_type="relu"),
    "pooling of a sum": lambda n: S.Pooling(
        convolution(S.var("data"), n) + convolution(S.var("data"), n, name="b"), kernel=(2, 2)
    ),
    "a concatenation": lambda n: S.Concat(convolution(S.var("data"), n), convolution(S.var("data"), 32, name="b")),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(("channels", "low"), [(72, False), (100, False), (64, True), (16, True)])
def test_batch_norm_is_low_where_channels_make_blocks(behind, channels, low):
    decision = decisions(norm(BEHIND[behind](channels)))["norm"]
    assert decision.low is low
    assert low or f"{channels + 32 * (behind == 'a concatenation')} channels make no blocks" in decision.reason


@pytest.mark.parametrize(("channels", "low"), [(72, False), (24, False), (64, True)])
def test_a_depthwise_convolution_is_low_where_channels_make_blocks(channels, low):
    x = convolution(convolution(S.var("data"), channels, name="first"), channels, channels)
    found = decisions(x)
    assert found["first"].low
    assert found["conv"].low is low
    assert low or "make no blocks" in found["conv"].reason


def test_unknown_channels_and_other_dtypes_keep_their_rules():
    assert decisions(norm(convolution(S.slice_axis(S.var("data"), axis=1, begin=0, end=72), 64)))["norm"].low
    unknown = norm(S.slice_axis(convolution(S.var("data"), 72), axis=1, begin=0, end=5))
    assert decisions(unknown)["norm"].low
    assert decisions(norm(convolution(S.var("data"), 72)), "float16,norm=compute")["norm"].low
    assert decisions(convolution(convolution(S.var("data"), 72, name="first"), 72, 72), "float16")["conv"].low


def test_who_counts_bytes_alone_may_choose_them():
    graph = Graph.from_symbol(norm(convolution(convolution(S.var("data"), 72, name="first"), 72, 72)))
    for slow_too, expected in ((False, {"first"}), (True, {"first", "conv", "norm"})):
        assert {
            n.name for n in may_compute_low(graph, Policy("bfloat16"), "cpu", Options(slow_too=slow_too))
        } == expected


def test_batch_norm_of_72_channels_is_that_of_float32():
    symbol = norm(convolution(convolution(S.var("data"), 72, name="first"), 72, 72))
    values = filled(symbol, data=(2, 8, 6, 6))
    want, got = (by_symbol(s, values) for s in (symbol, mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())))
    assert sqnr(want.outputs[0], got.outputs[0]) > 40
    assert np.isfinite(got.outputs[0]).all()
