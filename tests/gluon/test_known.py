"""What the code of a block asks of arrays in a trace: shape, dtype, context; other calls have other graphs."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from gluoncv.loss import MixSoftmaxCrossEntropyLoss, SoftmaxCrossEntropyLoss
from kit.takes import DTYPES, X, takes
from kit.twins import convert, sequence, step, trainer_of
from mxnet import autograd
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used by any computation")


ASKED = {
    "dtype of an input": lambda op, x, y: x * y.astype(x.dtype),
    "dtype of an operator": lambda op, x, y: op.relu(x) * y.astype(op.relu(x).dtype),
    "shape": lambda op, x, y: x / x.shape[0] + y.shape[1],
    "shape of an operator": lambda op, x, y: x * op.concat(x, y, dim=1).shape[1],
    "size, ndim": lambda op, x, y: x * y.size + y.ndim,
    "context": lambda op, x, y: (
        x + op.ones((1,), ctx=x.context).reshape((1, 1)).broadcast_like(x) + int(y.ctx == mx.cpu())
    ),
    "of methods": lambda op, x, y: x * (x + 1).transpose().reshape(1, -1).shape[1] * (2 * y).T.shape[0],
    "stype": lambda op, x, y: x * (2 if y.stype == "default" else 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ASKED)
def test_a_trace_knows_what_an_array_says_of_itself_and_other_shapes_have_other_graphs(kind, dtype):
    net, plain = takes(ASKED[kind], dtype), takes(ASKED[kind])
    for rows in (4, 2, 4):
        x, y = X[:rows].copy(), mx.nd.ones((rows, 3))
        np.testing.assert_allclose(net(x, y).asnumpy(), plain(x, y).asnumpy(), rtol=0.02)


def test_a_graph_that_reads_a_dtype_is_that_of_each_dtype():
    net = takes(lambda op, x, y: x * (2 if y.dtype == np.int32 else 3) * y.astype(x.dtype), "float16")
    first, other = (net(X, mx.nd.ones((4, 3), dtype=dtype)).asnumpy() for dtype in ("int32", "float32"))
    np.testing.assert_allclose(first * 3, other * 2, rtol=0.01)


def test_a_graph_that_depends_on_the_context_is_that_of_each():
    net = takes(lambda op, x: x * (2 if x.ctx == mx.cpu(1) else 3), "float16")
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    first, other = (net(X.as_in_context(mx.cpu(i))).asnumpy() for i in range(2))
    np.testing.assert_allclose(first * 2, other * 3, rtol=0.01)


EMPTY = {
    "shape": lambda x, y: x * (1 + y.shape[-1]),
    "size": lambda x, y: x if y.size else 2 * x,
    "ndim": lambda x, y: x * y.ndim,
}


@pytest.mark.parametrize("asked", EMPTY)
def test_an_input_without_elements_has_its_shape(asked):
    def forward(op, x, y):
        return EMPTY[asked](x, y)

    net, plain = takes(forward, "float16"), takes(forward)
    for features in (0, 2):
        y = mx.nd.array(np.zeros((4, features)))
        np.testing.assert_allclose(net(X, y).asnumpy(), plain(X, y).asnumpy(), rtol=0.01)


class FirstOf(nn.HybridBlock):
    def hybrid_forward(self, op, x, count):
        return x * (1 + x[:, :count].shape[1])


@pytest.mark.filterwarnings("ignore:nothing in .* computes in float16")
@mx.util.use_np
def test_what_is_computed_may_have_no_elements_with_np_shape():
    net, x = mxmp.convert(FirstOf(), "float16"), X.as_np_ndarray()
    for count in (0, 2):
        np.testing.assert_allclose(net(x, count).asnumpy(), FirstOf()(x, count).asnumpy(), rtol=0.01)


@pytest.mark.parametrize("name", ["asscalar", "asnumpy", "detach"])
def test_what_no_graph_can_know_is_refused_in_words(name):
    net = takes(lambda op, x: x * getattr(x.sum(), name)(), "float16")
    with pytest.raises(ValueError, match=rf"'takes\d+' \(Takes\) cannot be traced.*have no values.*{name}"):
        net(X)


def test_a_shape_that_depends_on_values_is_refused_in_words():
    net = takes(lambda op, x: x * op.contrib.boolean_mask(x, x.sum(axis=1)).shape[0], "float16")
    with pytest.raises(ValueError, match="depends on values"):
        net(X)


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "compute=float16,params=float16"])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("loss", [SoftmaxCrossEntropyLoss, MixSoftmaxCrossEntropyLoss])
def test_gluoncv_s_segmentation_losses_train_as_in_fp32_converted_or_not(loss, converted, dtype):
    x, y = mx.nd.random.normal(shape=(2, 3, 6, 6)), mx.nd.random.randint(-1, 4, shape=(2, 6, 6)).astype("float32")
    runs = []
    for how in (None, dtype):
        net = sequence(nn.Conv2D(8, 3, padding=1, in_channels=3, activation="relu"), nn.Conv2D(4, 1, in_channels=8))
        mx.random.seed(1)
        net.initialize(mx.init.Xavier())
        criterion, losses = loss(), []
        convert(how, net, *[criterion] * converted)
        trainer = trainer_of(how, net, scale="dynamic")
        for _ in range(5):
            with autograd.record():
                more = [net(x) * 0.5] if loss is MixSoftmaxCrossEntropyLoss else []
                found = criterion(net(x), *more, y)
            step(trainer, found, 2)
            losses.append(float(found.mean().asscalar()))
        runs.append(losses)
    np.testing.assert_allclose(runs[1], runs[0], rtol=0.02)
    assert runs[0][-1] < 0.9 * runs[0][0]


class OfArraysAlone(nn.HybridBlock):
    """Asks arrays for their shape, and tells Symbols from them."""

    def __init__(self, tells):
        super().__init__()
        self.tells = tells

    def hybrid_forward(self, op, x):
        if self.tells(op, x):
            return op.tanh(x)
        return mx.nd.tanh(x) * (x.shape[0] / 4)


TELLS = {
    "F is mx.sym": lambda op, x: op is mx.sym,
    "type(x)": lambda op, x: type(x) is mx.sym.Symbol,
    "F == mx.sym": lambda op, x: op == mx.sym,
    "isinstance": lambda op, x: isinstance(x, mx.sym.Symbol),
    "F.__name__": lambda op, x: op.__name__ == "mxnet.symbol",
}


@pytest.mark.filterwarnings("ignore:nothing in .* computes in")
@pytest.mark.parametrize("kind", TELLS)
def test_code_that_asks_arrays_alone_may_tell_them_from_symbols_in_any_way(kind):
    net = OfArraysAlone(TELLS[kind])
    low = mxmp.convert(OfArraysAlone(TELLS[kind]), "bfloat16")
    np.testing.assert_allclose(low(X).asnumpy(), net(X).asnumpy(), rtol=0.01)


@pytest.mark.parametrize("asks", [False, True])
def test_a_parameter_may_be_declared_with_a_list_as_its_shape(asks):
    class Scaled(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.scale = self.params.get("scale", shape=[1, 4], init="ones")
                self.body = nn.Dense(4, in_units=4)

        def hybrid_forward(self, F, x, scale):  # noqa: N803
            return self.body(F.broadcast_mul(x, scale)) / ((x * scale).shape[1] if asks else 4)

    net = Scaled()
    net.initialize()
    net.body.weight.set_data(mx.nd.ones((4, 4)))
    assert (mxmp.convert(net, "bfloat16")(mx.nd.ones((2, 4))) == 1).asnumpy().all()
