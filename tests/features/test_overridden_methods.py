"""Every method of Parameter, of blocks and of Trainer that a user's subclass may override: called, or refused in words.

Each class here changes what is computed, and the run is compared with that of plain FP32 Gluon.
"""

from __future__ import annotations

from typing import Any, Callable

import mxnet as mx
import numpy as np
import pytest
from gluonnlp.model.utils import apply_weight_drop
from kit.twins import LOSS, backward
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp
from mxmp.gluon.parameter import LowParameter

POLICIES = ["compute=float16,params=float16", "compute=float16,params=float32", "bfloat16"]
X, Y = mx.nd.random.normal(shape=(8, 6)), mx.nd.random.normal(shape=(8, 3))
STEPS = 3


def net_of(parameter: type | None = None, block: type = nn.HybridSequential) -> nn.HybridBlock:
    """Return Dense(5), Dense(3), whose first weight is of the class ``parameter``."""
    net = block(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(5, in_units=6), nn.Dense(3, in_units=5))
    if parameter is not None:
        replace_weight(net[0], parameter("net_dense0_weight", shape=(5, 6)))
    net.initialize()
    rng = np.random.RandomState(3)
    for param in net.collect_params().values():
        gluon.Parameter.set_data(param, mx.nd.array(rng.uniform(-0.5, 0.5, param.shape)))
    return net


def replace_weight(dense: nn.Dense, param: gluon.Parameter) -> None:
    dense.params._params[param.name] = param
    dense._reg_params["weight"] = param
    vars(dense)["weight"] = param


def trainer_of(net: gluon.Block, kind: type = gluon.Trainer, rate: float = 0.5) -> gluon.Trainer:
    scale = {"loss_scale": 2.0**8} if issubclass(kind, mxmp.Trainer) else {}
    return kind(net.collect_params(), "sgd", {"learning_rate": rate}, **scale)


def train(
    net: gluon.Block,
    trainer: gluon.Trainer,
    during: Callable = lambda net: None,
    loss_of: Callable = lambda out: LOSS(out, Y),
) -> np.ndarray:
    """Return the output after some steps."""
    for _ in range(STEPS):
        with autograd.record():
            loss = loss_of(net(X))
        backward(trainer, loss)
        trainer.step(8)
        during(net)
    return net(X).asnumpy()


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def compared(make: Callable, policy: str, during: Callable = lambda net: None) -> None:
    """Assert that a converted net trains as the FP32 one, and that plain parameters would train otherwise."""
    runs = []
    for convert, made in [(False, make()), (True, make()), (False, net_of())]:
        net = mxmp.convert(made, policy) if convert else made
        runs.append(train(net, trainer_of(net, mxmp.Trainer if convert else gluon.Trainer), during))
    close(runs[1], runs[0])
    assert np.abs(runs[2] - runs[0]).max() > 0.05 * np.abs(runs[0]).max()


# -- Parameter --------------------------------------------------------------------------------------


class Data(gluon.Parameter):
    def data(self, ctx=None):
        return super().data(ctx) * 2


class SetData(gluon.Parameter):
    def set_data(self, data):
        super().set_data(data * 2)


class Grad(gluon.Parameter):
    def grad(self, ctx=None):
        found = super().grad(ctx)
        return found * 0 + 1


class ZeroGrad(gluon.Parameter):
    def zero_grad(self):
        for grad in self.list_grad():
            grad[:] = 3


class Cast(gluon.Parameter):
    def cast(self, dtype):
        super().cast("float32")


class ListContexts(gluon.Parameter):
    def list_ctx(self):
        return [mx.cpu(0)]


class ResetContext(gluon.Parameter):
    def reset_ctx(self, ctx):
        super().reset_ctx(ctx)
        super().set_data(super().data() * 2)


class Reduce(gluon.Parameter):
    def _reduce(self):
        return super()._reduce() * 2


class InitImpl(gluon.Parameter):
    def _init_impl(self, data, ctx_list):
        super()._init_impl(data * 2, ctx_list)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "during"),
    [
        (Data, lambda net: None),
        (SetData, lambda net: net[0].weight.set_data(mx.nd.ones((5, 6)) / 4)),
        (ResetContext, lambda net: net.collect_params().reset_ctx(mx.cpu())),
    ],
    ids=["data", "set_data", "reset_ctx"],
)
def test_a_net_trains_by_what_its_parameter_overrides(kind, during, policy):
    """It reads what ``data`` computes, and the gradient goes through it."""
    compared(lambda: net_of(kind), policy, during)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (Grad, lambda net: net[0].weight.grad().asnumpy()),
        (ZeroGrad, lambda net: (net[0].weight.zero_grad(), net[0].weight.list_grad()[0].asnumpy())[1]),
        (Cast, lambda net: (net[0].weight.cast("float64"), net[0].weight.data().asnumpy())[1]),
        (ListContexts, lambda net: net[0].weight.list_ctx()),
        (Reduce, lambda net: net[0].weight._reduce().asnumpy() / net[0].weight.data().asnumpy()),
        (InitImpl, lambda net: (net[0].weight.initialize(mx.init.One(), force_reinit=True), net(X).asnumpy())[1]),
    ],
    ids=lambda each: getattr(each, "__name__", "").lower(),
)
def test_what_a_user_calls_of_a_parameter_does_what_it_does_in_fp32(policy, kind, read):
    found = []
    for how in (None, policy):
        net = net_of(kind)
        if how:
            mxmp.convert(net, how)
        net(X)
        found.append(read(net))
    if isinstance(found[0], list):
        assert found[0] == found[1]
    else:
        assert found[0].dtype == found[1].dtype
        close(found[1], found[0])


class Traced(gluon.Parameter):
    def var(self):
        return mx.sym.tanh(super().var() * 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_var_of_a_subclass_is_in_the_graph_as_in_a_hybridized_net(policy):
    net, other = net_of(Traced), net_of(Traced)
    net.hybridize()
    close(mxmp.convert(other, policy)(X).asnumpy(), net(X).asnumpy())


def test_a_class_that_overrides_nothing_is_stored_in_float16_and_one_that_does_is_not():
    class Mine(gluon.Parameter):
        def hello(self):
            return "hello"

    for kind, low in [(Mine, True), *((each, False) for each in (Data, SetData, Grad, Cast, Reduce))]:
        net = mxmp.convert(net_of(kind), POLICIES[0])
        net(X)
        assert isinstance(net[0].weight, LowParameter) == low
        assert isinstance(net[1].weight, LowParameter)


@pytest.mark.parametrize("name", ["list_data", "list_grad"])
def test_a_trainer_refuses_a_parameter_whose_arrays_it_would_pass_by(name):
    kind = type("Own", (gluon.Parameter,), {name: lambda self: getattr(gluon.Parameter, name)(self)})
    net = net_of(kind)
    with pytest.raises(ValueError, match=rf"Own 'net_dense0_weight' overrides {name}\(\).*unscale"):
        mxmp.Trainer(net.collect_params(), "sgd")
    mxmp.convert(net, POLICIES[0])(X)


# -- GluonNLP's weight dropout ----------------------------------------------------------------------


def zeros_in_gradient(net: gluon.Block, param: gluon.Parameter, x: Any, *more: Any) -> float:
    with autograd.record():
        out = net(x, *more)
    (out[0] if isinstance(out, (list, tuple)) else out).backward()
    return float((param.grad().asnumpy() == 0).mean())


@pytest.mark.parametrize("policy", POLICIES)
def test_half_the_gradient_of_a_weight_with_dropout_is_zero_and_inference_has_none(policy):
    net = nn.HybridSequential(prefix="drop_")
    with net.name_scope():
        net.add(nn.Dense(32, in_units=32, use_bias=False))
    apply_weight_drop(net[0], "weight", 0.5)
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.uniform(1, 2, shape=(4, 32))
    want = net(x).asnumpy()
    mxmp.convert(net, policy)
    assert 0.4 < zeros_in_gradient(net, net[0].weight, x) < 0.6
    close(net(x).asnumpy(), want)
    drawn = []
    for _ in range(2):
        with autograd.train_mode():
            drawn.append(net(x).asnumpy())
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1


def test_weight_dropout_put_onto_a_float16_parameter_is_refused_and_in_time_it_works():
    net = net_of()
    mxmp.convert(net, POLICIES[0])(X)
    apply_weight_drop(net[0], "weight", 0.5)
    net.hybridize()
    with pytest.raises(ValueError, match=r"WeightDropParameter 'net_dense0_weight' was made of the arrays.*restore"):
        net(X)
    net = net_of()
    mxmp.convert(net, POLICIES[0])(X)
    mxmp.restore(net)
    apply_weight_drop(net[0], "weight", 0.5)
    assert 0.2 < zeros_in_gradient(mxmp.convert(net, POLICIES[0]), net[0].weight, X) < 0.8


@pytest.mark.filterwarnings("ignore:nothing in 'lstm' computes in bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
def test_an_lstm_with_weight_dropout_trains_as_in_fp32_with_the_same_masks(policy):
    def run(convert: bool, rate: float = 0.5) -> list[float]:
        mx.random.seed(5)
        net = gluon.rnn.LSTM(16, input_size=8, prefix="lstm_")
        apply_weight_drop(net, ".*h2h_weight", rate)
        net.initialize(mx.init.Xavier(magnitude=30))
        net.hybridize()
        if convert:
            mxmp.convert(net, policy)
        trainer = trainer_of(net, mxmp.Trainer if convert else gluon.Trainer)
        x, losses = mx.nd.random.normal(shape=(5, 4, 8)), []
        state = net.begin_state(4)
        for _ in range(4):
            with autograd.record():
                out, _ = net(x, state)
                loss = (out - 0.3).square().mean()
            backward(trainer, loss)
            trainer.step(1)
            losses.append(float(loss.asscalar()))
        return losses

    want = run(False)
    np.testing.assert_allclose(run(True), want, rtol=0.01)
    assert not np.allclose(run(False, rate=0), want, rtol=0.02)


# -- HybridBlock ------------------------------------------------------------------------------------


class Doubled(nn.Dense):
    """The classes below override one method each, and double what the layer computes."""


class Forward(Doubled):
    def forward(self, x, *args):
        return super().forward(x, *args) * 2


class HybridForward(Doubled):
    def hybrid_forward(self, F, x, **params):  # noqa: N803
        return super().hybrid_forward(F, x, **params) * 2


class Call(Doubled):
    def __call__(self, x):
        return super().__call__(x) * 2


class InferShape(nn.HybridBlock):
    """Its weight's shape cannot be inferred backwards."""

    def __init__(self, units, in_units=0, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(0, 0), allow_deferred_init=True)

    def infer_shape(self, x):
        self.weight.shape = (x.shape[1], 5)

    def hybrid_forward(self, F, x, weight):  # noqa: N803
        return F.dot(x, weight.reshape((-1, 5)) * 2)


class Hybridize(Doubled):
    active = None

    def hybridize(self, active=True, **kwargs):
        Hybridize.active = active
        super().hybridize(active, **kwargs)


class CollectParams(Doubled):
    def collect_params(self, select=None):
        found = super().collect_params(select)
        found.setattr("lr_mult", 0.0)
        return found


class GetGraph(Doubled):
    def _get_graph(self, *args):
        if not self._cached_graph:
            data, out = super()._get_graph(*args)
            self._cached_graph = data, out * 2
        return self._cached_graph


@pytest.mark.filterwarnings("ignore:nothing in 'own' computes in bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("alone", [True, False], ids=["outermost", "inner"])
@pytest.mark.parametrize("kind", [Forward, HybridForward, Call, InferShape, CollectParams, GetGraph])
def test_what_a_block_overrides_is_called(kind, alone, policy):
    if kind in (GetGraph, InferShape) and not alone:
        return  # MXNet calls neither of a block inside a graph

    def run(convert: bool) -> np.ndarray:
        mx.random.seed(2)
        np.random.seed(2)
        net = kind(5, in_units=6, prefix="own_")
        if not alone:
            inner, net = net, nn.HybridSequential(prefix="net_")
            net.add(inner)
        net.initialize(mx.init.Xavier())
        net.hybridize()
        if convert:
            mxmp.convert(net, policy)
        trainer = trainer_of(net, mxmp.Trainer if convert else gluon.Trainer, 0.1)
        return train(net, trainer, loss_of=lambda out: out.square().mean(axis=1))

    close(run(True), run(False))


def test_an_infer_shape_that_no_graph_calls_is_an_error_with_what_to_do():
    net = nn.HybridSequential()
    net.add(InferShape(5), nn.Dense(2))
    net.initialize()
    mxmp.convert(net)
    with pytest.raises(ValueError, match=r"infer_shape of blocks inside.*once before mxmp.convert"):
        net(X)
    mxmp.restore(net)
    want = net(X)
    close(mxmp.convert(net)(X).asnumpy(), want.asnumpy())


@pytest.mark.parametrize("policy", POLICIES)
def test_hybridize_of_a_subclass_is_called(policy):
    net = mxmp.convert(Hybridize(5, in_units=6), policy)
    net.initialize()
    net.hybridize(static_alloc=True)
    assert Hybridize.active
    net(X)


def test_a_block_that_calls_its_graph_itself_is_refused_at_once():
    class Own(nn.Dense):
        def _call_cached_op(self, *args):
            return super()._call_cached_op(*args) * 2

    net = nn.HybridSequential()
    net.add(Own(5, in_units=6))
    with pytest.raises(ValueError, match=r"\(Own\) overrides _call_cached_op.*exclude=lambda"):
        mxmp.convert(net)
    net.add(nn.Dense(3))
    mxmp.convert(net, exclude=lambda name, block: isinstance(block, Own))


def decorated():
    """MXNet wraps what the class inherits, too."""

    @mx.util.use_np
    class Decorated(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.scale = 1
            with self.name_scope():
                self.dense = nn.Dense(5, in_units=6)

        def hybrid_forward(self, op, x):
            return op.np.tanh(self.dense(x)) * self.scale

    return Decorated


@mx.util.use_np
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inner", [False, True])
def test_a_class_with_mxnets_decorator_overrides_nothing(inner, policy):
    kind, nets = decorated(), []
    for how in (None, policy):
        net, own = nn.HybridSequential(), kind()
        net.add(own, nn.Dense(2, in_units=5))
        net = net if inner else own
        mx.random.seed(3)
        net.initialize()
        nets.append((net if how is None else mxmp.convert(net, how), own))
    for scale in (1, 2):
        outs = []
        for net, own in nets:
            own.scale = scale
            outs.append(net(X.as_np_ndarray()).asnumpy())
        close(*outs)


# -- Trainer ----------------------------------------------------------------------------------------


def methods_of(base: type) -> dict[str, type]:
    """Return a subclass of a Trainer for each method, which changes what a step does."""

    class Step(base):  # type: ignore[misc]
        def step(self, batch_size, ignore_stale_grad=False):
            super().step(batch_size / 2, ignore_stale_grad)

    class Reduce(base):  # type: ignore[misc]
        def _allreduce_grads(self):
            super()._allreduce_grads()
            for param in self._params:
                for grad in param.list_grad():
                    grad *= 2

    class Update(base):  # type: ignore[misc]
        def _update(self, ignore_stale_grad=False):
            self.set_learning_rate(1.0)
            super()._update(ignore_stale_grad)

    class PublicReduce(base):  # type: ignore[misc]
        def allreduce_grads(self):
            raise AssertionError("step of MXNet does not call it")

    class PublicUpdate(base):  # type: ignore[misc]
        def update(self, batch_size, ignore_stale_grad=False):
            raise AssertionError("step of MXNet does not call it")

    class Rescale(base):  # type: ignore[misc]
        def _check_and_rescale_grad(self, scale):
            super()._check_and_rescale_grad(scale * 2)

    class InitKvstore(base):  # type: ignore[misc]
        def _init_kvstore(self):
            super()._init_kvstore()
            self.set_learning_rate(1.0)

    class InitParams(base):  # type: ignore[misc]
        def _init_params(self):
            super()._init_params()
            self.set_learning_rate(1.0)

    class InitOptimizer(base):  # type: ignore[misc]
        def _init_optimizer(self, optimizer, optimizer_params):
            super()._init_optimizer(optimizer, {**optimizer_params, "learning_rate": 1.0})

    return {each.__name__: each for each in locals().values() if isinstance(each, type) and each is not base}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", methods_of(gluon.Trainer))
def test_what_a_trainer_overrides_is_called_where_mxnet_calls_it(name, policy):
    runs = []
    for kind in (methods_of(gluon.Trainer)[name], methods_of(mxmp.Trainer)[name]):
        net = net_of()
        if issubclass(kind, mxmp.Trainer):
            mxmp.convert(net, policy)
        runs.append(train(net, trainer_of(net, kind)))
    close(runs[1], runs[0])


def test_an_update_that_does_not_call_ours_is_an_error_and_not_a_wrong_one():
    class Own(mxmp.Trainer):
        def _update(self, ignore_stale_grad=False):
            for param in self._params:
                for data, grad in zip(param.list_data(), param.list_grad()):
                    data -= 0.1 * self._optimizer.rescale_grad * grad

    net = mxmp.convert(net_of(), POLICIES[1])
    with pytest.raises(RuntimeError, match=r"Own overrides _update.*super\(\)\._update\(\).*loss_scale=None"):
        train(net, Own(net.collect_params(), "sgd"))
    train(net, Own(net.collect_params(), "sgd", loss_scale=None))
