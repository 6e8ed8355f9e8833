"""Convolutions of every size with the right numbers, and what it takes where oneDNN's kernels have them wrong."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kit.examples import examples
from kit.oracle import Result, S, agree, assert_same_bits, by_gluon, by_symbol, filled
from kit.processes import in_poisoned_memory, run_poisoned
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.hook import hook_of
from mxmp.kernels.padding import least_inputs
from mxmp.precision.casts import strip
from mxmp.precision.graph import Graph
from mxmp.precision.missing_kernels import missing_kernel

DTYPES = ["float16", "bfloat16"]


@pytest.mark.slow
def test_nothing_reads_memory_that_was_never_written(pytestconfig):
    run_poisoned(pytestconfig, __file__, "on_poison")


# -- Against exact sums ---------------------------------------------------------------------------------


class Convolution(NamedTuple):
    """Sizes along each axis, and channels; small integers fill it, so that only roundings of results are left."""

    size: tuple
    kernel: tuple
    stride: tuple
    pad: tuple
    channels: int = 16
    filters: int = 16
    groups: int = 1
    batch: int = 2
    dilate: tuple = (1, 1, 1)

    @property
    def outputs(self) -> tuple:
        axes = zip(self.size, self.kernel, self.stride, self.pad, self.dilate)
        return tuple((n + 2 * pad - dilate * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilate in axes)

    def layer(self) -> gluon.HybridBlock:
        kind = (nn.Conv1D, nn.Conv2D, nn.Conv3D)[len(self.size) - 1]
        dilate = self.dilate[: len(self.size)]
        sizes = (self.filters, self.kernel, self.stride, self.pad, dilate, self.groups)
        return kind(*sizes, in_channels=self.channels, prefix="conv_")

    def values(self) -> dict[str, np.ndarray]:
        shapes = {
            "data": (self.batch, self.channels, *self.size),
            "conv_weight": (self.filters, self.channels // self.groups, *self.kernel),
            "conv_bias": (self.filters,),
            "head": (self.batch, self.filters, *self.outputs),
        }
        rng = np.random.RandomState(0)
        return {name: rng.randint(-3, 4, shape).astype("float32") for name, shape in shapes.items()}

    def exact(self, **given: np.ndarray) -> Result:
        """Output and gradients, tap by tap in float64."""
        values = {**self.values(), **given}
        data, weight, bias, head = (value.astype("float64") for value in values.values())
        padded = np.pad(data, [(0, 0), (0, 0), *((pad, pad) for pad in self.pad)])
        data = padded.reshape(self.batch, self.groups, -1, *padded.shape[2:])
        head = head.reshape(self.batch, self.groups, -1, *self.outputs)
        weight = weight.reshape(self.groups, -1, *weight.shape[1:])
        out, d_data, d_weight = np.zeros_like(head), np.zeros_like(data), np.zeros_like(weight)
        axes = list(zip(self.stride, self.dilate, self.outputs))
        for tap in product(*map(range, self.kernel)):
            seen = (..., *(slice(t * d, t * d + s * (n - 1) + 1, s) for t, (s, d, n) in zip(tap, axes)))
            at = (slice(None),) * 3 + tap
            out += np.einsum("goi,ngi...->ngo...", weight[at], data[seen])
            d_data[seen] += np.einsum("goi,ngo...->ngi...", weight[at], head)
            both = (v.reshape(*v.shape[:3], -1) for v in (head, data[seen]))
            d_weight[at] = np.einsum("ngox,ngix->goi", *both)
        out = out.reshape(self.batch, self.filters, *self.outputs) + bias.reshape(-1, *(1 for _ in self.size))
        inner = (..., *(slice(pad, pad + n) for pad, n in zip(self.pad, self.size)))
        d_bias = head.sum(axis=(0, *range(3, head.ndim))).reshape(-1)
        d_data = d_data.reshape(padded.shape)[inner]
        d_weight = d_weight.reshape(self.values()["conv_weight"].shape)
        return Result([out], {"data": d_data, "conv_weight": d_weight, "conv_bias": d_bias})

    def is_right(self, policy: str) -> None:
        """By a Symbol, which does not know the sizes, and by Gluon, which does."""
        want, values, net = self.exact(), self.values(), self.layer()
        head = values.pop("head")
        cast = mxmp.cast_symbol(net(S.var("data")), policy, ctx=mx.cpu())
        self._rounded(by_symbol(cast, values, heads=[head]), want)
        net.initialize()
        for name, param in net.collect_params().items():
            param.set_data(mx.nd.array(values[name]))
        mxmp.convert(net, policy)
        self._rounded(by_gluon(net, [values["data"]], heads=[head]), want)

    def _rounded(self, got: Result, want: Result) -> None:
        np.testing.assert_allclose(got.outputs[0], want.outputs[0], rtol=2**-8, err_msg="output")
        for name, value in got.grads.items():
            np.testing.assert_allclose(value, want.grads[name], rtol=2**-8, err_msg=name)


FLAT = [
    Convolution(size, (kernel,) * len(size), (stride,) * len(size), (pad,) * len(size), 64, 32, groups)
    for kernel, stride, pad in [(5, 1, 2), (3, 2, 1), (7, 2, 3), (2, 3, 1)]
    for size in [(1, 1), (1, 4), (2, 2), (7, 6), (1,), (3,)]
    for groups in (1, 2)
    if min(size) + 2 * pad >= kernel
]
VOLUMES = [
    *(
        Convolution(size, kernel, stride, pad, channels)
        for size, kernel, stride, pad in [
            ((8, 16, 16), (5, 7, 7), (2, 2, 2), (2, 3, 3)),  # of SlowFast, I3D, R(2+1)D
            ((2, 6, 6), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
            ((4, 3, 3), (3, 1, 1), (2, 1, 1), (1, 0, 0)),
            ((4, 5, 5), (1, 1, 1), (2, 2, 2), (0, 0, 0)),
            ((3, 5, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1)),  # padding on both sides at once
            ((4, 6, 2), (5, 7, 1), (3, 3, 2), (2, 2, 0)),
            ((7, 11, 1), (7, 1, 5), (2, 1, 2), (3, 0, 2)),
            ((3, 15, 5), (2, 3, 3), (3, 2, 2), (1, 0, 0)),
            ((7, 16, 7), (7, 7, 1), (2, 1, 2), (1, 0, 0)),
            ((1, 1, 1), (5, 5, 5), (1, 1, 1), (2, 2, 2)),
            ((3, 1, 1), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ]
        for channels in (3, 32)
    )
]


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convolution", FLAT + VOLUMES, ids=str)
def test_gradients_of_convolutions_on_poison(convolution, dtype):
    convolution.is_right(dtype)


@in_poisoned_memory
def test_an_fp32_convolution_of_a_cast_symbol_on_poison():
    convolution = Convolution((3, 5, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1))
    full = convolution.layer()(S.var("data"))
    low = S.FullyConnected(S.var("other"), num_hidden=1, no_bias=True, name="low")
    cast = mxmp.cast_symbol(S.Group([full, low]), "compute=bfloat16,exclude=conv_*", ctx=mx.cpu())
    other = np.ones((1, 1), "float32")
    values = {**convolution.values(), "other": other, "low_weight": other}
    got = by_symbol(cast, values, grads_of=["conv_weight"], heads=[values.pop("head"), other])
    np.testing.assert_array_equal(got.grads["conv_weight"], convolution.exact().grads["conv_weight"])


def deconvolution(convolution: Convolution, data: mx.sym.Symbol) -> mx.sym.Symbol:
    """What takes a convolution's output back to its input."""
    axes = zip(convolution.size, convolution.outputs, convolution.kernel, convolution.stride, convolution.pad)
    adj = tuple(size - ((n - 1) * stride - 2 * pad + kernel) for size, n, kernel, stride, pad in axes)
    sizes = {"kernel": convolution.kernel, "stride": convolution.stride, "pad": convolution.pad, "adj": adj}
    return S.Deconvolution(data, num_filter=convolution.channels, no_bias=True, name="conv", **sizes)


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("then", [lambda x: x, S.relu])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad"), [(4, 4, 2, 1), (2, 2, 2, 1), (5, 5, 2, 1), (4, 3, 2, 1), (8, 4, 3, 1)]
)
def test_3d_deconvolutions_on_poison(size, kernel, stride, pad, then, dtype):
    """Transposed: outputs and gradients of its data change places, and so do data and head of its weight's gradient."""
    convolution = Convolution((size,) * 3, (kernel,) * 3, (stride,) * 3, (pad,) * 3)
    want, given = convolution.exact(), convolution.values()
    low = S.FullyConnected(S.var("other"), num_hidden=1, no_bias=True, name="low")
    symbol = S.Group([then(deconvolution(convolution, S.var("data"))), low])
    cast = mxmp.cast_symbol(symbol, dtype, ctx=mx.cpu())
    assert cast.list_outputs() == symbol.list_outputs()
    assert strip(Graph.from_symbol(cast)).to_json() == Graph.from_symbol(symbol).to_json()
    other = np.ones((1, 1), "float32")
    values = {"data": given["head"], "conv_weight": given["conv_weight"], "other": other, "low_weight": other}
    out = want.grads["data"]
    above = np.ones_like(out) if then(S.var("x")).list_outputs() == ["x"] else out > 0
    got = by_symbol(cast, values, grads_of=["conv_weight"], heads=[given["data"], other])
    np.testing.assert_array_equal(got.outputs[0], out * above)
    exact = convolution.exact(data=given["data"] * above).grads["conv_weight"]
    np.testing.assert_array_equal(got.grads["conv_weight"], exact)


@pytest.mark.parametrize(("size", "crops"), [(2, True), (3, False)])
def test_3d_deconvolutions_are_cropped_apart_only_where_padding_is_not_small_beside_the_output(size, crops):
    net = nn.HybridSequential()
    net.add(nn.Conv3D(8, 1, in_channels=4), nn.Conv3DTranspose(4, 4, 2, 1, in_channels=8))
    net.initialize()
    mxmp.convert(net, "bfloat16")
    assert net(mx.nd.ones((2, 4, size, size, size))).shape == (2, 4, 2 * size, 2 * size, 2 * size)
    assert ("slice" in ops_run(net)) == crops


@pytest.mark.bfloat16_kernels
def test_mxnet_itself_reads_beyond_small_inputs_of_3d_convolutions():
    """When this fails MXNet has mended it, and of ``pad_volumes`` bfloat16's part may be all that is needed."""
    convolution = Convolution((3, 5, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1))
    values = convolution.values()
    got = by_symbol(convolution.layer()(S.var("data")), values, heads=[values.pop("head")])
    assert not np.allclose(got.grads["conv_weight"], convolution.exact().grads["conv_weight"])


@st.composite
def convolutions(draw) -> Convolution:
    """Padding up to one less than a kernel's extent, channels in blocks of 16 or not."""
    ranks = draw(st.integers(1, 3))

    def axes(values: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(values, min_size=ranks, max_size=ranks)))

    kernel, stride, dilate = axes(st.integers(1, 7)), axes(st.integers(1, 3)), axes(st.integers(1, 2))
    if ranks == 3:
        dilate = (1, 1, 1)
    pad = tuple(draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilate))
    size, groups = axes(st.integers(1, 12)), draw(st.sampled_from([1, 1, 2]))
    channels, filters = (groups * draw(st.sampled_from([3, 8, 16, 20, 32])) for _ in range(2))
    found = Convolution(size, kernel, stride, pad, channels, filters, groups, draw(st.integers(1, 3)), dilate)
    assume(min(found.outputs) > 0)
    assume(np.prod(found.outputs) * np.prod(kernel) * channels * filters < 2e7)
    return found


@in_poisoned_memory
@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(convolutions(), st.sampled_from(DTYPES))
def test_random_convolutions_on_poison(convolution, dtype):
    convolution.is_right(dtype)


# -- What it takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilate"), [(3, 2, 1, 1), (5, 1, 2, 1), (7, 3, 3, 1), (3, 2, 2, 2), (2, 3, 1, 1)]
)
def test_the_least_input_that_a_tap_sees(kernel, stride, pad, dilate):
    for size in range(1, 12):
        outputs = (size + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1
        if outputs < 1:
            continue
        reads = [[p * stride - pad + t * dilate for p in range(outputs)] for t in range(kernel)]
        seen = [any(0 <= position < size for position in tap) for tap in reads]
        assert seen == [size >= least for least in least_inputs(kernel, stride, pad, dilate)]


def test_the_sizes_are_read_at_each_call():
    net = nn.Conv2D(32, 5, padding=2, in_channels=32)
    net.initialize()
    mxmp.convert(net, "bfloat16")
    for size in (6, 1, 9, 1):
        with mx.autograd.record():
            net(mx.nd.ones((2, 32, size, size))).sum().backward()
        seen = net.weight.grad().asnumpy() != 0
        assert seen.all() if size > 2 else seen[:, :, 2, 2].all()
        assert size > 2 or seen.sum() == 32 * 32


def ops_run(net: gluon.HybridBlock) -> set[str]:
    """Operators of the graph that ran last in this mode."""
    (built,) = hook_of(net).graphs.values()
    return {node.op for node in Graph.from_symbol(built.op.symbol).nodes()}


def test_where_every_tap_sees_the_input_nothing_is_selected_until_a_call_in_which_one_does_not():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, strides=2, padding=1), nn.MaxPool2D(2), nn.Conv2D(8, 5, padding=2))
    net.initialize()
    mxmp.convert(net, "bfloat16")
    for size, selects in ((16, False), (12, False), (9, True), (16, True)):  # 9 gives the second one 2x2
        net(mx.nd.ones((2, 4, size, size)))
        assert ("where" in ops_run(net)) == selects


def test_graphs_of_other_kernels_ask_no_sizes():
    for layer, dtype in ((nn.Conv2D(8, 3, padding=1), "bfloat16"), (nn.Conv2D(8, 5, padding=2), "float16")):
        layer.initialize()
        mxmp.convert(layer, dtype)
        layer(mx.nd.ones((2, 4, 8, 8)))
        assert [built.conditions.large for built in hook_of(layer).graphs.values()] == [None]


def test_shapes_that_do_not_fit_are_told_of_by_mxnet_and_change_nothing():
    net = nn.Conv2D(8, 5, padding=2, in_channels=4)
    net.initialize()
    mxmp.convert(net, "bfloat16")
    net(mx.nd.ones((2, 4, 8, 8)))
    with pytest.raises(mx.MXNetError, match=r"(?i)shape|channel"):
        net(mx.nd.ones((2, 5, 8, 8))).wait_to_read()
    assert net(mx.nd.ones((2, 4, 8, 8))).shape == (2, 8, 8, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("one", "wrote"),
    [((3,), "{}"), ((3,), "({})"), ((3,), "[{}]"), ((3, 3), "({0}L, {0}L)"), ((3, 3, 3), "[{0}L, {0}L, {0}L]")],
)
def test_sizes_are_read_as_mxnet_reads_them(one, wrote, dtype):
    """``kernel=3`` for one axis, and the tuples of an old file that Python 2 wrote."""
    tuples = {"kernel": one, "stride": tuple(2 for _ in one), "pad": tuple(1 for _ in one)}
    texts = {name: wrote.format(value[0]) for name, value in tuples.items()}
    values = {"data": np.random.RandomState(0).normal(size=(2, 8, *(4 for _ in one))).astype("float32")}
    found = []
    for attrs, policy in ((tuples, None), (texts, dtype), (tuples, dtype)):
        symbol = S.Convolution(S.var("data"), num_filter=8, name="conv", **attrs)
        values = {**filled(symbol, data=values["data"].shape), **values}
        found.append(by_symbol(mxmp.cast_symbol(symbol, policy) if policy else symbol, values))
    agree(found[1], found[0], 45 if dtype == "float16" else 35)
    assert_same_bits(found[1], found[2])


def test_shapes_are_found_through_what_stands_in_front_of_a_weight():
    symbol = S.FullyConnected(S.Convolution(S.var("data"), kernel=(5, 5), pad=(2, 2), num_filter=4), num_hidden=3)
    for dtype in DTYPES:
        mxmp.cast_symbol(symbol, dtype).simple_bind(mx.cpu(), data=(2, 3, 4, 4))


@pytest.mark.parametrize("attrs", [{"dilate": "(1, 2, 1)"}, {"kernel": "(9, 1, 1)"}])
def test_a_3d_convolution_stays_fp32_where_its_gradient_was_not_measured(attrs):
    small = {"kernel": "(3, 3, 3)", "pad": "(1, 1, 1)", "stride": "(2, 2, 2)", "num_filter": "8"}
    assert not missing_kernel("Convolution", small, "bfloat16", "cpu")
    assert "3-D" in missing_kernel("Convolution", {**small, **attrs}, "bfloat16", "cpu")
    assert not missing_kernel("Convolution", {**small, **attrs}, "float16", "cpu")


@pytest.mark.parametrize(
    ("stride", "size", "pads"),
    [(2, (4, 4, 4), False), (2, (3, 4, 4), True), (2, (4, 4, 3), True), (1, (1, 1, 1), False)],
)
def test_3d_convolutions_are_padded_apart_only_where_padding_is_not_small_beside_the_input(stride, size, pads):
    net = nn.Conv3D(8, 3, stride, 1, in_channels=4)
    net.initialize()
    mxmp.convert(net, "bfloat16")
    net(mx.nd.ones((2, 4, *size)))
    assert ("Pad" in ops_run(net)) == pads


@pytest.mark.parametrize(("kernel", "stride", "pad"), [((5, 5), (1, 1), (2, 2)), ((3, 3, 3), (2, 2, 2), (1, 1, 1))])
def test_casting_a_cast_convolution_again_changes_nothing(kernel, stride, pad):
    convolution = S.Convolution(S.var("data"), kernel=kernel, stride=stride, pad=pad, num_filter=4)
    symbol = S.FullyConnected(convolution, num_hidden=3)
    cast = mxmp.cast_symbol(symbol, "bfloat16")
    assert mxmp.cast_symbol(cast, "bfloat16").tojson() == cast.tojson()
    assert strip(Graph.from_symbol(cast)).to_symbol().tojson() == Graph.from_symbol(symbol).to_symbol().tojson()


class Computed(mx.gluon.HybridBlock):
    """A convolution whose weight another layer computes, so that no cast makes it bfloat16."""

    def __init__(self, kernel, stride):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.dense = mx.gluon.nn.Dense(16 * 16 * int(np.prod(kernel)), in_units=4, use_bias=False)

    def hybrid_forward(self, F, x, z):  # noqa: N803
        weight = F.reshape(self.dense(z), shape=(16, 16, *self.kernel))
        pad = tuple(size - 1 if self.stride > 1 else size // 2 for size in self.kernel)
        options = {"kernel": self.kernel, "stride": (self.stride,) * len(self.kernel), "pad": pad}
        return F.Convolution(x, weight, num_filter=16, no_bias=True, **options)


@pytest.mark.parametrize(("kernel", "stride", "size"), [((4,), 3, 1), ((5, 5, 5), 1, 2)], ids=["unused", "volume"])
def test_a_convolution_whose_weight_is_computed_gets_the_workarounds(kernel, stride, size):
    found = []
    for dtype in (None, "bfloat16"):
        mx.random.seed(0)
        net = Computed(kernel, stride)
        net.initialize(mx.init.Normal(0.1))
        net.hybridize()
        if dtype:
            mxmp.convert(net, dtype)
        x = mx.nd.array(np.random.RandomState(0).normal(size=(2, 16, *[size] * len(kernel))))
        with mx.autograd.record():
            y = net(x, mx.nd.ones((1, 4)))
        y.backward()
        found.append(net.dense.weight.grad().asnumpy())
    assert {"unused_taps", "padded_volumes"} & set(mxmp.explain(net).graphs[0].workarounds)
    assert np.linalg.norm(found[0] - found[1]) < 0.02 * np.linalg.norm(found[0])
