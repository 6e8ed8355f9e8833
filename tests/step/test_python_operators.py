"""Operators that Python code differentiates train as in FP32, whether or not they look at the head gradient."""

from __future__ import annotations

import gc
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from kit.twins import array, assert_close, assert_same, convert, seeded, trainer_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore:.*has been deprecated", "ignore:this CPU has neither")
POLICIES = ["float16", "bfloat16"]
SCALES = [1024.0, 1000.0, 2.0**-3]


class Rule(mx.operator.CustomOp):
    """Two outputs, x and 2x, with a backward of its own."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])
        self.assign(out_data[1], req[1], 2 * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], self.gradient(out_grad, in_data[0]))


class Stateful(Rule):
    def __init__(self):
        super().__init__(lambda heads, x: 3 * self.saved.pop())

    def forward(self, is_train, req, in_data, out_data, aux):
        super().forward(is_train, req, in_data, out_data, aux)
        self.saved = [in_data[0].copy()] if is_train else []


GRADIENTS = {  # of the heads and the input
    "Own": lambda heads, x: 3 * x,
    "OwnOfShape": lambda heads, x: 3 * x + mx.nd.ones(heads[0].shape, dtype=heads[0].dtype),
    "OwnAndPassed": lambda heads, x: 0.1 * x + heads[1],  # as a regularization
    "Passed": lambda heads, x: heads[0] + 2 * heads[1],
    "Clipped": lambda heads, x: mx.nd.clip(heads[0], -0.02, 0.02),  # not linear in the head gradient
}


class Property(mx.operator.CustomOpProp):
    def __init__(self, **kwargs):  # a loop passes the name of its body
        super().__init__()

    def list_outputs(self):
        return ["a", "b"]

    def infer_shape(self, shapes):
        return shapes, [shapes[0], shapes[0]], []


class OneHead(Property):
    """Declares that the backward reads the second head gradient alone: MXNet passes no first one."""

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        return [out_grad[1], *in_data]

    def create_operator(self, ctx, shapes, dtypes):
        return Rule(GRADIENTS["OwnAndPassed"])


def register(name, make):
    class Its(Property):
        def create_operator(self, ctx, shapes, dtypes):
            return make()

    mx.operator.register(f"mxmp_test_{name}")(Its)


for each in GRADIENTS:
    register(each, partial(Rule, GRADIENTS[each]))
register("Stateful", Stateful)
mx.operator.register("mxmp_test_OneHead")(OneHead)
NAMES = [*GRADIENTS, "Stateful", "OneHead"]


class OwnFunction(autograd.Function):
    def forward(self, x):
        self.save_for_backward(x)
        return 2 * x

    def backward(self, head):
        (x,) = self.saved_tensors
        return 3 * x


class ClippedFunction(autograd.Function):
    def forward(self, x):
        return 2 * x

    def backward(self, head):
        return mx.nd.clip(head, -0.02, 0.02)


class TwoFunction(autograd.Function):
    """Two inputs and two outputs, and something taken from its own saved state once."""

    def forward(self, x, y):
        self.saved = [x.copy()]
        return x * y, x + y

    def backward(self, first, second):
        return first + 0.1 * self.saved.pop(), second


FUNCTIONS = {
    "Own": lambda x: OwnFunction()(x),
    "Clipped": lambda x: ClippedFunction()(x),
    "Two": lambda x: sum(TwoFunction()(x, 2 * x)),
}


class Net(gluon.HybridBlock):
    """Dense layers around a Custom operator, which may run in a loop."""

    def __init__(self, name, loop=False):
        super().__init__()
        self.name_of_op, self.loop = name, loop
        with self.name_scope():
            self.first, self.last = nn.Dense(4, in_units=6, flatten=False), nn.Dense(2, in_units=4, flatten=False)

    def custom(self, F, x):  # noqa: N803
        first, second = F.Custom(x, op_type=f"mxmp_test_{self.name_of_op}")
        return first - 0.5 * second * second

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.first(x)
        if self.loop:
            x, _ = F.contrib.foreach(lambda row, states: (self.custom(F, row), states), x, [])
        else:
            x = self.custom(F, x)
        return self.last(x)


def gradients(net, trainer, out, scale, times=1):
    """Of the weights, without the loss scale."""
    for _ in range(times):
        with autograd.record():
            loss = out().square().mean(axis=1)
        trainer.backward(loss) if isinstance(trainer, mxmp.Trainer) else loss.backward()
    return [param.grad().asnumpy() / scale for param in net.collect_params().values()]


def of_net(make, out, policy, scale, grad_req="write", flags=None):
    """The gradients of a net whose output ``out(net)`` gives, of two backwards before one step."""
    net = seeded(make())
    net.collect_params().setattr("grad_req", grad_req)
    convert(policy, net, flags=flags)
    trainer = trainer_of(policy, net, scale=scale)
    return gradients(net, trainer, lambda: out(net), scale if policy else 1.0, times=2)


def run(net):
    return net(array(0, 5, 6))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_custom_operator_in_a_net_gets_true_gradients(name, policy, scale):
    found = of_net(lambda: Net(name), run, policy, scale)
    assert_close(found, of_net(lambda: Net(name), run, None, scale), policy)


@pytest.mark.parametrize(
    "options",
    [{"grad_req": "add"}, {"flags": {}}, {"flags": {"static_alloc": True, "static_shape": True}}],
    ids=["add", "hybridized", "static"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_custom_operator_gets_them_with_every_flag_and_when_gradients_are_added(name, options):
    found = of_net(lambda: Net(name), run, "float16", 1024.0, **options)
    assert_close(found, of_net(lambda: Net(name), run, None, 1.0, **options))


@pytest.mark.parametrize("name", ["Own", "Passed", "Stateful"])
def test_a_custom_operator_in_a_loop_gets_them(name):
    found = of_net(lambda: Net(name, loop=True), run, "float16", 1024.0)
    assert_close(found, of_net(lambda: Net(name, loop=True), run, None, 1.0))


def dense():
    return nn.Dense(4, in_units=6)


def added_twice(x):
    """MXNet asks the operator to add its gradient to that of the other reader of its input."""
    first, second = mx.nd.Custom(x, op_type="mxmp_test_Own")
    return x.square() + first + second


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_custom_operator_of_python_code_gets_them(name, policy, scale):
    def out(net):
        first, second = mx.nd.Custom(run(net), op_type=f"mxmp_test_{name}")
        return first - 0.5 * second * second

    assert_close(of_net(dense, out, policy, scale), of_net(dense, out, None, scale), policy)


def test_a_gradient_that_is_added_to_another_one_is_multiplied_alone():
    def out(net):
        return added_twice(run(net))

    assert_close(of_net(dense, out, "float16", 1024.0), of_net(dense, out, None, 1.0))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gets_them(name, policy, scale):
    def out(net):
        return FUNCTIONS[name](run(net))

    assert_close(of_net(dense, out, policy, scale), of_net(dense, out, None, scale), policy)


def test_a_function_gets_them_in_scale_loss():
    def found(policy):
        net = seeded(dense())
        convert(policy, net)
        trainer = trainer_of(policy, net, scale=1024.0)
        with autograd.record():
            loss = OwnFunction()(run(net))
        if policy is None:
            loss.backward()
        else:
            with trainer.scale_loss(loss) as scaled:
                scaled.backward()
        return [param.grad().asnumpy() / (1024.0 if policy else 1.0) for param in net.collect_params().values()]

    assert_close(found("float16"), found(None))


def test_a_later_plain_backward_of_the_same_operators_has_no_scale():
    net = seeded(Net("Own"))
    convert("float16", net, flags={"static_alloc": True})
    trainer = trainer_of("float16", net, scale=1024.0)
    x = array(0, 5, 6)
    x.attach_grad()
    found = []
    for scaled in (True, False, True, False):
        with autograd.record():
            loss = net(x).square().mean(axis=1)
        trainer.backward(loss) if scaled else loss.backward()
        found.append(x.grad.asnumpy() / (1024.0 if scaled else 1.0))
        trainer.discard()
    for each in found:
        assert_same([each], found[:1])


def test_an_operator_has_its_own_backward_again_after_an_error_too():
    class Broken(Rule):
        pass

    register("broken", lambda: Broken(lambda heads, x: 1 / 0))
    net = seeded(Net("broken"))
    convert("float16", net)
    trainer = trainer_of("float16", net, scale=1024.0)
    with autograd.record():
        loss = net(array(0, 5, 6))
    with pytest.raises(mx.MXNetError):
        trainer.backward(loss)
    assert not any("backward" in vars(op) for op in gc.get_objects() if isinstance(op, Broken))


# -- Module -----------------------------------------------------------------------------------------


def symbol(custom):
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc1")
    x = mx.sym.FullyConnected(custom(x), num_hidden=3, name="fc2")
    return mx.sym.MakeLoss(mx.sym.square(x))


def of_module(out, policy, scale, grad_req="write"):
    mixed = {"policy": policy, "loss_scale": scale} if policy else {}
    module = (mxmp.Module if policy else mx.mod.Module)(out, label_names=None, **mixed)
    module.bind([("data", (5, 6))], grad_req=grad_req)
    rng = np.random.RandomState(1)
    shapes = {"fc1_weight": (4, 6), "fc1_bias": (4,), "fc2_weight": (3, 4), "fc2_bias": (3,)}
    module.init_params(arg_params={k: mx.nd.array(rng.uniform(-0.5, 0.5, s)) for k, s in shapes.items()})
    for _ in range(2):
        module.forward(mx.io.DataBatch([array(0, 5, 6)]), is_train=True)
        module.backward()
    return [g[0].asnumpy() / (scale if policy else 1.0) for g in module._exec_group.grad_arrays if g[0] is not None]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_custom_operator_in_a_module_gets_them(name, policy, scale):
    out = symbol(lambda x: sum(mx.sym.Custom(x, op_type=f"mxmp_test_{name}")))
    assert_close(of_module(out, policy, scale), of_module(out, None, scale), policy)


@pytest.mark.parametrize(
    ("base", "need_top_grad", "gradient"),
    [
        (mx.operator.NumpyOp, True, lambda head, x: 3 * x),
        (mx.operator.NumpyOp, False, lambda head, x: 3 * x),
        (mx.operator.NumpyOp, True, lambda head, x: np.clip(head, -0.5, 0.5)),
        (mx.operator.NDArrayOp, True, lambda head, x: 3 * x),
    ],
)
def test_mxnets_older_python_operators_in_a_module_get_them(base, need_top_grad, gradient, monkeypatch):
    class Older(base):
        def backward(self, out_grad, in_data, out_data, in_grad):
            in_grad[0][:] = gradient(out_grad[0] if need_top_grad else None, in_data[0])

    monkeypatch.setattr(mx.operator.PythonOp, "_ref_holder", [])  # MXNet keeps them for ever
    out = symbol(Older(need_top_grad))
    assert_close(of_module(out, "float16", 1024.0), of_module(out, None, 1.0))
