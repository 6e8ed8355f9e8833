"""Every kind of loss head trains in ``mxmp.Module`` as it does in FP32, at any loss scale."""

import mxnet as mx
import numpy as np
import pytest

import mxmp

BATCH, CLASSES = 6, 4
MULTI = "label_per_position"


class OwnLoss(mx.operator.CustomOp):
    """Softmax cross-entropy that makes its own gradient."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], mx.nd.softmax(in_data[0]))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_data[0] - mx.nd.one_hot(in_data[1], CLASSES))
        self.assign(in_grad[1], req[1], mx.nd.zeros_like(in_data[1]))


@mx.operator.register("mxmp_test_own_loss")
class OwnLossProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        return ["data", "label"]

    def infer_shape(self, in_shape):
        return [in_shape[0], (in_shape[0][0],)], [in_shape[0]], []

    def create_operator(self, ctx, shapes, dtypes):
        return OwnLoss()


def body():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="fc1")
    return mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=CLASSES, name="fc2")


def label():
    return mx.sym.var("label")


HEADS = {
    "softmax": lambda x: mx.sym.SoftmaxOutput(x, label()),
    "softmax, grad_scale": lambda x: mx.sym.SoftmaxOutput(x, label(), grad_scale=0.25),
    "softmax, smooth, valid": lambda x: mx.sym.SoftmaxOutput(
        x, label(), smooth_alpha=0.1, use_ignore=True, ignore_label=0, normalization="valid"
    ),
    "softmax, multi_output": lambda x: mx.sym.SoftmaxOutput(
        mx.sym.reshape(x, (BATCH, 2, 2)), mx.sym.var(MULTI), multi_output=True
    ),
    "linear regression": lambda x: mx.sym.LinearRegressionOutput(x, mx.sym.one_hot(label(), CLASSES)),
    "logistic regression": lambda x: mx.sym.LogisticRegressionOutput(x, mx.sym.one_hot(label(), CLASSES)),
    "absolute error": lambda x: mx.sym.MAERegressionOutput(x, mx.sym.one_hot(label(), CLASSES)),
    "SVM": lambda x: mx.sym.SVMOutput(x, label()),
    "MakeLoss": lambda x: mx.sym.MakeLoss(-mx.sym.pick(mx.sym.log_softmax(x), label()), grad_scale=0.5),
    "make_loss": lambda x: mx.sym.make_loss(-mx.sym.pick(mx.sym.log_softmax(x), label())),
    "softmax_cross_entropy": lambda x: mx.sym.make_loss(mx.sym.softmax_cross_entropy(x, label())),
    "Custom": lambda x: mx.sym.Custom(x, label(), op_type="mxmp_test_own_loss"),
    "two heads": lambda x: mx.sym.Group(
        [mx.sym.SoftmaxOutput(x, label(), name="a"), mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(x)), name="b")]
    ),
    "CTC": lambda x: mx.sym.MakeLoss(
        mx.sym.CTCLoss(
            mx.sym.reshape(x, (BATCH, 1, CLASSES)),
            mx.sym.slice_axis(mx.sym.reshape(label(), (1, BATCH)), axis=1, begin=1, end=3),
        )
    ),
}


def bound(symbol, kind, label=("label", (BATCH,)), inputs_need_grad=False, **mixed):
    module = kind(symbol, label_names=[label[0]] if label else None, **mixed)
    module.bind([("data", (BATCH, 5))], [label] if label else None, inputs_need_grad=inputs_need_grad)
    mx.random.seed(0)
    module.init_params(mx.init.Xavier())
    return module


def gradients(symbol, kind, **mixed):
    """The gradients that reach the optimizer, unscaled, and the outputs."""
    rng = np.random.RandomState(0)
    classes = np.arange(BATCH) % CLASSES
    of_positions = MULTI in symbol.list_arguments()
    labels = np.stack([classes % 2, classes // 2], 1) if of_positions else classes
    module = bound(symbol, kind, (MULTI if of_positions else "label", labels.shape), **mixed)
    module.forward_backward(mx.io.DataBatch([mx.nd.array(rng.randn(BATCH, 5))], [mx.nd.array(labels)]))
    found = {n: g[0].asnumpy() for n, g in zip(module._exec_group.param_names, module._exec_group.grad_arrays)}
    return found, [out.asnumpy() for out in module.get_outputs()]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_gradients_are_those_of_fp32_times_the_scale(head, policy):
    symbol = HEADS[head](body())
    expected, outputs = gradients(symbol, mx.mod.Module)
    for scale in (1.0, 1024.0):
        found, low_outputs = gradients(symbol, mxmp.Module, policy=policy, loss_scale=scale)
        for name, gradient in expected.items():
            tolerance = {"float16": 4e-3, "bfloat16": 4e-2}[policy] * np.abs(gradient).max()
            np.testing.assert_allclose(found[name] / scale, gradient, rtol=0, atol=tolerance, err_msg=name)
        for low, full in zip(low_outputs, outputs):
            assert low.dtype == np.float32
            np.testing.assert_allclose(low, full, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_whose_loss_is_never_scaled_runs_as_it_is(head):
    symbol = HEADS[head](body())
    module = mxmp.Module(symbol, label_names=set(symbol.list_arguments()) & {MULTI, "label"}, policy="bfloat16")
    module.bind(
        [("data", (BATCH, 5))], [(name, (BATCH, 2) if name == MULTI else (BATCH,)) for name in module.label_names]
    )
    (executor,) = module._exec_group.execs
    assert executor.arg_dict.keys() == set(symbol.list_arguments())
    assert "_contrib_sign_ste" not in executor._symbol.tojson()
    found, _ = gradients(symbol, mxmp.Module, policy="bfloat16")
    for name, gradient in gradients(symbol, mxmp.Module, policy="bfloat16", loss_scale=1.0)[0].items():
        np.testing.assert_array_equal(found[name], gradient)


@mx.operator.register("mxmp_test_typed_loss")
class TypedLossProp(OwnLossProp):
    """The same, whose labels have a dtype of their own."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = np.dtype(dtype).type

    def infer_type(self, in_type):
        return [in_type[0], self.dtype], [in_type[0]], []


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float16", "float64"])
def test_a_head_with_labels_of_another_dtype_trains_as_in_fp32(dtype):
    symbol = mx.sym.Custom(body(), label(), op_type="mxmp_test_typed_loss", dtype=dtype)

    def gradients_of(kind, **mixed):
        module = bound(symbol, kind, mx.io.DataDesc("label", (BATCH,), dtype=dtype), **mixed)
        labels = mx.nd.array(np.arange(BATCH) % CLASSES, dtype=dtype)
        module.forward_backward(mx.io.DataBatch([mx.nd.ones((BATCH, 5))], [labels]))
        return [arrays[0].asnumpy() for arrays in module._exec_group.grad_arrays]

    for low, full in zip(gradients_of(mxmp.Module, loss_scale=256.0), gradients_of(mx.mod.Module)):
        np.testing.assert_allclose(low / 256, full, rtol=0, atol=4e-3 * np.abs(full).max())


class CountingLoss(OwnLoss):
    """The same, which counts its forwards in an auxiliary state."""

    def forward(self, is_train, req, in_data, out_data, aux):
        super().forward(is_train, req, in_data, out_data, aux)
        aux[0][:] += 1


@mx.operator.register("mxmp_test_counting_loss")
class CountingLossProp(OwnLossProp):
    def list_auxiliary_states(self):
        return ["count"]

    def infer_shape(self, in_shape):
        return [*super().infer_shape(in_shape)[:2], [(1,)]]

    def create_operator(self, ctx, shapes, dtypes):
        return CountingLoss()


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_head_keeps_its_auxiliary_state(policy):
    symbol = mx.sym.Custom(body(), label(), op_type="mxmp_test_counting_loss", name="loss")
    module = mxmp.Module(symbol, label_names=["label"], policy=policy, loss_scale=256.0)
    module.bind([("data", (BATCH, 5))], [("label", (BATCH,))])
    module.init_params(mx.init.Xavier(), aux_params={"loss_count": mx.nd.full((1,), 3.0)})
    module.init_optimizer()
    for _ in range(2):
        module.forward_backward(mx.io.DataBatch([mx.nd.ones((BATCH, 5))], [mx.nd.zeros((BATCH,))]))
        module.update()
    assert module.get_params()[1]["loss_count"].asscalar() == 5


def test_an_input_with_the_name_of_the_loss_scale_is_refused():
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("mxmp_loss_scale"), num_hidden=2), label())
    module = mxmp.Module(symbol, ["mxmp_loss_scale"], ["label"])
    with pytest.raises(ValueError, match=r"input 'mxmp_loss_scale', .* give it another name"):
        module.bind([("mxmp_loss_scale", (BATCH, 5))], [("label", (BATCH,))])
    assert not module.binded


def backward_with(symbol, head_gradient, kind, **mixed):
    label = ("label", (BATCH,)) if "label" in symbol.list_arguments() else None
    module = bound(symbol, kind, label, inputs_need_grad=True, **mixed)
    module.forward(mx.io.DataBatch([mx.nd.ones((BATCH, 5))], [mx.nd.zeros((BATCH,))]))
    module.backward([mx.nd.full((BATCH, CLASSES), head_gradient)])
    return module._exec_group.grad_arrays[0][0].asnumpy(), module.get_input_grads()[0].asnumpy()


@pytest.mark.parametrize(
    "symbol", [body(), mx.sym.SoftmaxOutput(body(), label(), out_grad=True)], ids=["plain output", "out_grad=True"]
)
def test_head_gradients_are_scaled_once_and_input_gradients_are_true(symbol):
    weight, data = backward_with(symbol, 3.0, mx.mod.Module)
    low_weight, low_data = backward_with(symbol, 3.0, mxmp.Module, loss_scale=256.0)
    for low, full in ((low_weight / 256, weight), (low_data, data)):
        np.testing.assert_allclose(low, full, rtol=0, atol=4e-3 * np.abs(full).max())


def test_a_head_with_an_unscaled_gradient_of_its_own_is_refused():
    symbol = mx.sym.SoftmaxOutput(mx.sym.IdentityAttachKLSparseReg(mx.sym.sigmoid(body())), label())
    with pytest.raises(ValueError, match=r"IdentityAttachKLSparseReg.*no loss scale reaches"):
        mxmp.cast_symbol(symbol)


@pytest.mark.parametrize("value", [0.0, -1.5, np.inf, -np.inf, np.nan, 6e-8])
def test_the_scaling_identity_keeps_every_forward_value(value):
    from mxmp.precision.graph import Graph
    from mxmp.precision.heads import SCALE_NAME, scale_heads

    graph = Graph.from_symbol(mx.sym.MakeLoss(mx.sym.var("x")))
    assert scale_heads(graph, {})
    x = mx.nd.array([value])
    out = graph.to_symbol().bind(mx.cpu(), {"x": x, SCALE_NAME: mx.nd.array([1e4])}).forward()[0]
    np.testing.assert_array_equal(out.asnumpy(), x.asnumpy())


@pytest.mark.parametrize("group", ["second", None], ids=str)
def test_in_a_module_on_several_devices_a_heads_gradient_has_the_scale_of_its_own_backward(group):
    """With group2ctxs MXNet copies what another device reads in the forward, when the scale is still the last one."""
    with mx.AttrScope(ctx_group="first"):
        x = body()
    with mx.AttrScope(**({"ctx_group": group} if group else {})):
        symbol = mx.sym.SoftmaxOutput(x, mx.sym.var("label"))
    places = {"first": mx.cpu(1), "second": mx.cpu(2)}
    found = []
    for kind, more in ((mx.mod.Module, {}), (mxmp.Module, {"loss_scale": 1.0})):
        module = bound(symbol, kind, inputs_need_grad=True, group2ctxs=places, **more)
        for scale in (64.0, 8.0, 1024.0):
            if more:
                module.scaled_step.scaler.loss_scale = scale
            data = mx.nd.array(np.random.RandomState(int(scale)).randn(BATCH, 5))
            module.forward_backward(mx.io.DataBatch([data], [mx.nd.arange(BATCH) % CLASSES]))
            found.append(module.get_input_grads()[0].asnumpy())
    for full, low in zip(found[:3], found[3:]):
        np.testing.assert_allclose(low, full, atol=2e-2 * np.abs(full).max())
