"""Arrays in float64 that a net or Module is given stay so, as in plain MXNet; what computes in FP32 is converted."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import mxmp

# Of the two factors of a product, and of a layer's weight.
SHAPES = ((4, 5), (4, 3), (2, 3))


class Product(nn.HybridBlock):
    """A product of two inputs, and a layer that reads it in FP32; it has no parameters, so all of it may be low."""

    def hybrid_forward(self, F, x, y, w):  # noqa: N803
        product = F.dot(x, y, transpose_a=True, name="product")
        return product, F.FullyConnected(F.Cast(product, dtype="float32"), w, no_bias=True, num_hidden=2, name="layer")


def arrays(dtype):
    rng = np.random.RandomState(0)
    return [mx.nd.array(rng.normal(size=s), dtype=d) for s, d in zip(SHAPES, (dtype, dtype, "float32"))]


def of_net(policy):
    net = Product(prefix="") if policy is None else mxmp.convert(Product(prefix=""), policy)
    return net(*arrays("float64")), None if policy is None else mxmp.explain(net).graphs[0].plan


def of_module(policy):
    symbol = mx.sym.Group(list(Product(prefix="")(*map(mx.sym.var, "xyw"))))
    kind, more = (mx.mod.Module, {}) if policy is None else (mxmp.Module, {"policy": policy})
    module = kind(symbol, data_names=list("xyw"), label_names=None, **more)
    data = [mx.io.DataDesc(name, array.shape, array.dtype, "") for name, array in zip("xyw", arrays("float64"))]
    module.bind(data, for_training=False)
    module.init_params()
    module.forward(mx.io.DataBatch(arrays("float64")), is_train=False)
    return module.get_outputs(), getattr(module, "plan", None)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("frontend", [of_net, of_module])
def test_a_product_of_float64_arrays_is_plain_mxnets_and_a_layer_behind_a_cast_is_low(frontend, policy):
    (expected, _), _ = frontend(None)
    (product, features), plan = frontend(policy)
    assert product.dtype == np.float64
    np.testing.assert_array_equal(product.asnumpy(), expected.asnumpy())
    assert features.dtype == np.float32
    assert plan.decisions["layer"].low
    assert "the array that is passed here is float64" in plan.decisions["product"].reason


def test_a_net_has_a_graph_for_each_dtype_of_its_inputs():
    net = mxmp.convert(Product(prefix=""), "float16")
    for dtype in ("float32", "float64", "float32"):
        product, _ = net(*arrays(dtype))
        assert product.dtype == np.dtype(dtype)
    assert [graph.plan.decisions["product"].low for graph in mxmp.explain(net).graphs] == [True, False]
