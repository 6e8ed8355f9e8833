"""Kernels of a CPU that are wrong or fail, and the graphs that get the right numbers all the same."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import Result, S, agree, by_gluon, by_symbol, filled, reference, sqnr
from kit.processes import in_poisoned_memory, run_poisoned
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.precision.casts import strip
from mxmp.precision.graph import Graph

DTYPES = ["float16", "bfloat16"]


@pytest.mark.slow
def test_nothing_reads_memory_that_was_never_written(pytestconfig):
    run_poisoned(pytestconfig, __file__, "on_poison")


def close_to_fp32(
    net: gluon.HybridBlock,
    shape: tuple[int, ...],
    dtype: str,
    floor: float = 40,
) -> None:
    """Outputs and gradients of both doors."""
    net.initialize()
    x = np.random.RandomState(1).normal(0, 1, shape).astype("float32")
    want = reference(net, [x])
    mxmp.convert(net, dtype)
    got = by_gluon(net, [x])
    agree(got, want, floor)
    mxmp.restore(net)
    symbol = net(S.var("data"))
    values = {"data": x, **{n: p.data().asnumpy() for n, p in net.collect_params().items()}}
    trained = [n for n, p in net.collect_params().items() if p.grad_req != "null"]
    agree(by_symbol(mxmp.cast_symbol(symbol, dtype), values, grads_of=trained), want, floor)


# -- 3-D ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "then",
    [
        lambda x: x.flatten(),
        lambda x: x.reshape((0, -1)),
        lambda x: x.relu().expand_dims(axis=1),
        lambda x: nn.MaxPool3D(2)(x).flatten(),
        lambda x: x.expand_dims(axis=2).reshape((0, -1, 4)),
    ],
)
def test_a_3d_convolution_and_a_reshape(dtype, then):
    close_to_fp32(Then(nn.Conv3D(16, 3, padding=1, in_channels=16), then), (2, 16, 4, 4, 4), dtype)


class Then(gluon.HybridBlock):
    """A layer and a function behind it."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.function(self.layer(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kernel", [2, 3])
def test_a_3d_deconvolution(dtype, groups, kernel):
    if dtype == "bfloat16":
        pytest.skip("every Deconvolution is FP32 there")
    net = nn.HybridSequential()
    net.add(nn.Conv3D(16, 1, in_channels=16))
    net.add(nn.Conv3DTranspose(8, kernel, strides=2, groups=groups, in_channels=16))
    close_to_fp32(net, (2, 16, 4, 4, 4), dtype)


# -- Dense layers with a frozen weight -------------------------------------------------------------------


@in_poisoned_memory
@pytest.mark.parametrize("policy", [*DTYPES, "compute=float16,norm=compute", "compute=bfloat16,norm=compute"])
@pytest.mark.parametrize("flatten", [True, False])
def test_bias_of_a_frozen_dense_on_poison(policy, flatten):
    net = nn.HybridSequential()
    net.add(
        nn.Dense(8, in_units=6, use_bias=False, flatten=flatten),
        nn.BatchNorm(in_channels=8),
        nn.Dense(3, in_units=8, flatten=flatten),
    )
    net.initialize()
    x = np.random.RandomState(1).normal(0, 1, (16, 6)).astype("float32")
    want = reference(net, [x])
    net[2].weight.grad_req = "null"
    mxmp.convert(net, policy)
    for request in ("write", "null", "write"):
        net[2].weight.grad_req = request
        agree_in(by_gluon(net, [x]).grads, want.grads)
    net[2].weight.grad_req = "null"
    net[2].bias.grad_req = "add"
    agree_in(by_gluon(net, [x]).grads, want.grads)
    twice = by_gluon(net, [x]).grads[net[2].bias.name]
    assert sqnr(2 * want.grads[net[2].bias.name], twice) > 35


def agree_in(got, want) -> None:
    for name, value in got.items():
        assert sqnr(want[name], value) > 20, name


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [("fc_weight",), ("fc_weight", "data"), ("data",), ("fc_bias",), ()])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_gradients_of_a_cast_symbol_on_poison(dtype, frozen, request_):
    symbol = S.FullyConnected(S.var("data"), num_hidden=5, name="fc")
    values = filled(symbol, data=(4, 6))
    wanted = [n for n in values if n not in frozen]
    ones = [np.ones((4, 5), "float32")]
    want = by_symbol(symbol, values, heads=ones).grads
    args = {n: mx.nd.array(v) for n, v in values.items()}
    grads = {n: mx.nd.zeros(args[n].shape) for n in wanted}
    executor = mxmp.cast_symbol(symbol, dtype).bind(mx.cpu(), args, grads, request_)
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((4, 5)))
    factor = 2 if request_ == "add" else 1
    for name in wanted:
        assert sqnr(factor * want[name], grads[name].asnumpy()) > 40, name


@in_poisoned_memory
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_with_fixed_weights_on_poison(dtype):
    symbol = S.FullyConnected(S.var("data"), num_hidden=5, name="fc")
    module = mxmp.Module(symbol, policy=dtype, loss_scale=8, label_names=None, fixed_param_names=["fc_weight"])
    module.bind([("data", (4, 6))])
    module.init_params(mx.init.One())
    module.forward(mx.io.DataBatch([mx.nd.ones((4, 6))]), is_train=True)
    module.backward([mx.nd.ones((4, 5))])
    scale = module.core.step.ledger.scale
    (bias,) = (g[0] for n, g in zip(module._exec_group.param_names, module._exec_group.grad_arrays) if n == "fc_bias")
    np.testing.assert_array_equal(bias.asnumpy() / scale, np.full(5, 4.0))


def test_a_trained_dense_pays_nothing_for_it():
    net = nn.Dense(3, in_units=4)
    net.initialize()
    mxmp.convert(net, "bfloat16")
    net(mx.nd.ones((1, 4)))
    symbol = Graph.from_symbol(net._cached_graph[1]).to_symbol()
    assert "amp_multicast" not in symbol.tojson(remove_amp_cast=False)


# -- Regions of interest of another level ---------------------------------------------------------------

BOXES = np.array([[0, 0, 0, 9, 9], [0, 2, 3, 14, 11], [0, 1, 1, 3, 3], [0, 4, 0, 9, 15], [0, 3, 3, 8, 8]], "float32")
OWN = np.array([True, False, True, True, False])
DATA = S.var("data")


def level(number: int) -> mx.sym.Symbol:
    features = S.Convolution(DATA, kernel=(3, 3), pad=(1, 1), num_filter=16, name=f"conv{number}")
    rois = S.var(f"rois{number}")
    return S.contrib.ROIAlign(
        features, rois, pooled_size=(3, 3), spatial_scale=0.5, sample_ratio=2, name=f"roi{number}"
    )


def dense(x: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.FullyConnected(x, num_hidden=4, no_bias=True, name="dense")


@in_poisoned_memory
@pytest.mark.parametrize("policy", ["float16", "float16-fast", "bfloat16"])
def test_rois_of_other_levels_on_poison(policy):
    """As ``gluoncv``'s R-CNNs: each level of a feature pyramid aligns all regions, those of others at batch -1."""
    symbol = dense(level(0) + level(1))
    values = filled(symbol, data=(1, 8, 8, 8), rois0=BOXES.shape, rois1=BOXES.shape)
    heads = np.random.RandomState(0).normal(size=(len(BOXES), 4)).astype("float32")
    want = Result([np.zeros_like(heads)], {})
    for number, own in enumerate((OWN, ~OWN)):
        values[f"rois{number}"] = np.where(own[:, None], BOXES, -1)
        names = ["data", f"conv{number}_weight", "dense_weight"]
        alone = {**values, f"rois{number}": BOXES[own]}
        found = by_symbol(dense(level(number)), alone, grads_of=names, heads=[heads[own]])
        want.outputs[0][own] = found.outputs[0]
        want.grads.update({name: want.grads.get(name, 0) + grad for name, grad in found.grads.items()})
    low = mxmp.cast_symbol(symbol, policy, ctx=mx.cpu())
    got = by_symbol(low, values, grads_of=list(want.grads), heads=[heads])
    assert sqnr(want.outputs[0], got.outputs[0]) > 35
    for name, grad in want.grads.items():
        assert sqnr(grad, got.grads[name]) > 30, name


@in_poisoned_memory
def test_rois_of_other_levels_at_a_head_on_poison():
    symbol = level(0)
    values = filled(symbol, data=(1, 8, 8, 8), rois0=BOXES.shape)
    alone = by_symbol(symbol, {**values, "rois0": BOXES[OWN]}, train=False).outputs[0]
    cast = mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu())
    assert cast.list_outputs() == symbol.list_outputs()
    got = by_symbol(cast, {**values, "rois0": np.where(OWN[:, None], BOXES, -1)}, train=False).outputs[0]
    assert sqnr(alone, got[OWN]) > 35
    assert not got[~OWN].any()
    assert strip(Graph.from_symbol(cast)).to_json() == Graph.from_symbol(symbol).to_json()


def test_the_zeros_of_other_levels_are_taken_out_again():
    symbol = dense(level(0) + level(1))
    low = Graph.from_symbol(mxmp.cast_symbol(symbol, "bfloat16", ctx=mx.cpu()))
    assert any(node.name == "roi0_written" for node in low.nodes())
    assert strip(low).to_json() == Graph.from_symbol(symbol).to_json()
