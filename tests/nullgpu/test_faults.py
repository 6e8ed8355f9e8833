"""Faults of MXNet that were first seen on the null GPU and that mxmp works around.

Operators by themselves that are at fault are marked in ``test_operators.py``, networks in ``test_training.py``.
"""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from gpu.null.record import recording
from kit.blocks import Lambda
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon import _mxnet

from .checks import wrong_matrix_calls
from .test_operators import CASES, run


def trained(net: gluon.Block, x: mx.nd.NDArray, how: str = "float16", **flags: bool) -> None:
    net.initialize(ctx=mx.gpu())
    if how != "float32":
        mxmp.convert(net, how)
    net.hybridize(**flags)
    with autograd.record():
        loss = net(x).sum()
    kind = gluon.Trainer if how == "float32" else mxmp.Trainer
    trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1})
    (loss if how == "float32" else trainer).backward(*() if how == "float32" else (loss,))
    trainer.step(1)
    mx.nd.waitall()


def pictures() -> mx.nd.NDArray:
    return mx.nd.ones((2, 3, 8, 8), ctx=mx.gpu())


@pytest.mark.parametrize("how", ["float32", "float16"])
def test_crop_between_convolutions(how):
    net = Lambda(
        lambda f, net, x: net.second(f.Crop(net.first(x), num_args=1, h_w=(4, 4))),
        first=nn.Conv2D(8, 3, padding=1),
        second=nn.Conv2D(8, 3, padding=1),
    )
    trained(net, pictures(), how)


@pytest.mark.parametrize("how", ["float32", "float16"])
def test_slice_of_the_first_axis_beside_a_cast(how, fusion):
    """The first samples of a convolution, into a softmax, which is FP32: a Cast stands between the two."""
    net = Lambda(
        lambda f, net, x: f.log_softmax(f.slice(net.first(x), begin=(0,), end=(1,)), axis=1),
        first=nn.Conv2D(8, 3, padding=1),
    )
    trained(net, pictures(), how, static_alloc=True)


@pytest.mark.parametrize("how", ["float32", "float16", "params=float32"])
@pytest.mark.parametrize("name", ["smooth_l1", "LeakyReLU"])
def test_an_operator_with_default_parameters_beside_a_cast(name, how, fusion):
    if (name, how) == ("LeakyReLU", "float32"):
        pytest.skip("MXNet's fusion fails on it wherever it stands")
    net = Lambda(lambda f, net, x: getattr(f, name)(net.first(x)), first=nn.Conv2D(8, 3, padding=1))
    trained(net, pictures(), how, static_alloc=True)


def test_batch_norm_with_relu_ends_the_process_in_fp32_too():
    """MXNet registers no kernel of it for a GPU; in float16: ``test_operators.py``."""
    case = CASES["_contrib_BatchNormWithReLU"][0]
    child = os.fork()
    if not child:
        run(case, case.graph())
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0


def test_attention_of_gluonnlp_sums_in_fp32():
    import gluonnlp as nlp

    cell = nlp.model.MultiHeadAttentionCell(nlp.model.DotProductAttentionCell(scaled=True), 16, 16, 16, 4)
    cell.initialize(ctx=mx.gpu())
    mxmp.convert(cell, "float16")
    x = mx.nd.array(np.ones((2, 6, 16), "float32"), ctx=mx.gpu())
    with recording() as record:
        with autograd.record():
            out = cell(x, x)[0]
        out.backward()
    assert record.matrix_calls
    assert not wrong_matrix_calls(record)


class Residual(nn.HybridBlock):
    """A loop whose body adds its input to that of a dense layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(units, in_units=units, flatten=False)

    def body(self, F, x, h):  # noqa: N803
        out = F.tanh(self.dense(x) + x * h)
        return out, out

    def hybrid_forward(self, F, x, h):  # noqa: N803
        return F.contrib.foreach(lambda x, h: self.body(F, x, h), x, h)[0]


class WithinALoop(Residual):
    """The same in another loop, which runs once and returns its rows as they are, too."""

    def hybrid_forward(self, F, x, h):  # noqa: N803
        def outer(x, h):
            rows, h = F.contrib.foreach(lambda x, h: self.body(F, x, h), x, h)
            return [rows, x], h

        return F.contrib.foreach(outer, x.expand_dims(0), h)[0][0]


class StateOfALoop(Residual):
    """The same in a loop that computes nothing itself: its rows are the first and last states of the loop in it."""

    def hybrid_forward(self, F, x, h):  # noqa: N803
        def outer(row, h):
            return F.contrib.foreach(lambda h, x: self.body(F, x, h), h.expand_dims(0), row)[1], h

        return F.contrib.foreach(outer, x, h)[0]


class Several(Residual):
    """A loop over two arrays, one of them read by a product alone, which stacks two."""

    def body(self, F, x, h):  # noqa: N803
        product = self.dense(x[0])
        return [F.relu(product) + 1, x[1] * product], F.sigmoid(product) + h

    def hybrid_forward(self, F, x, h):  # noqa: N803
        (first, second), last = F.contrib.foreach(lambda x, h: self.body(F, x, h), [x, 2 * x], h)
        return F.broadcast_add(first + second, last.expand_dims(0))


class Masked(Residual):
    """The same beside a mask, an array of bool, which each iteration reads a row of."""

    def body(self, F, x, h):  # noqa: N803
        out = F.tanh(self.dense(x[0]) + F.cast(x[1], "float32") * h)
        return out, out

    def hybrid_forward(self, F, x, h):  # noqa: N803
        return F.contrib.foreach(lambda x, h: self.body(F, x, h), [x, F.cast(x, "bool")], h)[0]


# MXNet's fused kernels load two elements at a time where one of their arrays is float16, whatever its address
# (fused_op-inl.h: load_index, store_index). A GPU refuses an odd one.
UNITS = [4, 5]


@pytest.mark.parametrize("policy", ["float16", "params=float32", "float16-fast"])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("kind", [Residual, WithinALoop, StateOfALoop, Several, Masked])
def test_an_iteration_of_a_loop_reads_and_writes_a_row_of_an_array(kind, units, policy, fusion):
    net = kind(units)
    net.initialize(ctx=mx.gpu())
    mxmp.convert(net, policy)
    net.hybridize()
    x, h = mx.nd.ones((4, 3, units), ctx=mx.gpu()), mx.nd.ones((3, units), ctx=mx.gpu())
    x.attach_grad()
    with recording() as record:
        net(x, h)
        with autograd.record():
            out = net(x, h)
        out.backward()
    assert record.of("fused")
    assert not record.impossible


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("whole", [True, False])
def test_an_input_that_is_a_row_of_an_array(units, whole, fusion):
    net = Lambda(lambda f, net, x: net.dense((x - 1) * 2), dense=nn.Dense(4, in_units=units))
    net.initialize(ctx=mx.gpu())
    mxmp.convert(net, "float16")
    net.hybridize(static_alloc=True)
    x = mx.nd.ones((4, units), ctx=mx.gpu())
    row = x if whole else x[1:2]
    row.attach_grad()
    with recording() as record:
        net(row).wait_to_read()
        with autograd.record():
            out = net(row)
        out.backward()
    assert record.of("fused")
    assert not record.impossible


@pytest.mark.parametrize(("begin", "end", "aligned"), [(0, 4, True), (1, 2, False), (3, 4, False), (8, 9, True)])
def test_a_part_of_an_array_is_aligned_or_not_by_where_it_begins(begin, end, aligned):
    whole = mx.nd.ones((9, 5), ctx=mx.gpu())
    assert _mxnet.is_aligned(whole[begin:end]) is aligned
    assert _mxnet.is_aligned(whole[begin:end].reshape(-1)) is aligned
    assert _mxnet.is_aligned(whole[begin]) is aligned


def test_an_array_whose_memory_the_engine_will_allocate_is_not_allocated_twice():
    """Such as that of ``as_in_context``. The copy went to one of the two places, and the network read the other."""
    memory = mx.nd.ndarray._new_alloc_handle((1 << 20,), mx.gpu(), True, np.float32)
    with recording() as record:
        assert _mxnet.is_aligned(mx.nd.NDArray(memory))
    assert not record.of("alloc")
