"""``Monitor`` and ``register_op_hook`` name the network's own operators, with the values that the network computes."""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from dataclasses import dataclass, field

import mxnet as mx
import numpy as np
import pytest
from kit.blocks import Lambda
from kit.twins import MASTERS, TOLERANCE, array, assert_same, seeded
from mxnet import autograd, gluon
from mxnet.base import NDArrayHandle
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

import mxmp
from mxmp.precision.graph import Graph
from mxmp.precision.monitoring import place_of

# One policy serves all networks here, and names operators that some lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*entries of the policy that change nothing")
S = mx.sym
POLICIES = {
    "float16": "float16",
    "float16 masters": MASTERS,
    "float16-fast": "float16-fast",
    "bfloat16": "bfloat16",
    "bfloat16, all low": mxmp.Policy("bfloat16", low_ops=["elemwise_sub", "sigmoid", "tanh"]),
}
SCALE = 64.0


@pytest.fixture(autouse=True)
def _unfused(monkeypatch):
    """MXNet's own names in inference are those of fused operators otherwise."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")


def convolutions():
    """Operators of several outputs, a tensor that two read, and a loss head."""
    conv = S.Convolution(S.var("data"), kernel=(3, 3), pad=(1, 1), num_filter=4, name="conv")
    act = S.relu(S.BatchNorm(conv, fix_gamma=False, name="bn"), name="act")
    left, right = S.SliceChannel(S.elemwise_add(act, conv, name="add"), num_outputs=2, name="split")
    fc = S.FullyConnected(S.broadcast_mul(left, right, name="mul"), num_hidden=3, name="fc")
    return S.SoftmaxOutput(fc, S.var("softmax_label"), name="softmax"), (2, 2, 6, 6)


def rewritten():
    """What mxmp computes by other operators: clip, a difference, sigmoid and tanh in bfloat16."""
    first = S.clip(S.FullyConnected(S.var("data"), num_hidden=5, name="first"), a_min=0, a_max=6, name="clip")
    second = S.FullyConnected(first, num_hidden=5, name="second")
    gates = S.elemwise_sub(S.sigmoid(second, name="sigmoid"), S.tanh(second, name="tanh"), name="sub")
    return S.LinearRegressionOutput(
        S.FullyConnected(gates, num_hidden=1, name="last"), S.var("softmax_label"), name="loss"
    ), (2, 4)


def volumes():
    """A 3-D convolution whose padding mxmp writes out, and a pooling window that lies in padding."""
    conv = S.Convolution(S.var("data"), kernel=(5, 5, 5), pad=(2, 2, 2), num_filter=4, name="conv")
    pool = S.Pooling(conv, kernel=(2, 2, 2), stride=(2, 2, 2), pooling_convention="full", name="pool")
    fc = S.FullyConnected(pool, num_hidden=3, name="fc")
    return S.SoftmaxOutput(fc, S.var("softmax_label"), name="softmax"), (2, 2, 3, 3, 3)


def small():
    """A 2-D convolution some of whose weights see only padding."""
    conv = S.Convolution(S.var("data"), kernel=(5, 5), pad=(2, 2), num_filter=4, name="conv")
    fc = S.FullyConnected(conv, num_hidden=3, name="fc")
    return S.SoftmaxOutput(fc, S.var("softmax_label"), name="softmax"), (2, 2, 1, 1)


SYMBOLS = {each.__name__: each for each in (convolutions, rewritten, volumes, small)}


def bound(kind, policy, training=True):
    symbol, shape = SYMBOLS[kind]()
    data, label = [("data", shape)], [("softmax_label", (shape[0], 1) if kind == "rewritten" else (shape[0],))]
    module = mx.mod.Module(symbol) if policy is None else mxmp.Module(symbol, policy=policy, loss_scale=SCALE)
    module.bind(data, label, for_training=training, inputs_need_grad=training)
    mx.random.seed(3)
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(optimizer_params={"learning_rate": 0.0})
    return module, mx.io.DataBatch([array(0, *shape)], [mx.nd.ones(label[0][1])])


def reported(kind, policy, training, **monitor):
    """(name, value) of everything that a Monitor lists."""
    module, batch = bound(kind, policy, training)
    found = []
    listens = mx.mon.Monitor(1, stat_func=lambda a: (found.append(a.asnumpy()), mx.nd.ones((1,)))[1], **monitor)
    module.install_monitor(listens)
    listens.tic()
    module.forward(batch, is_train=training)
    if training:
        module.backward()
    return by_name(zip([name for _, name, _ in listens.toc()], found))


def by_name(report):
    """Where mxmp pads, the padding's gradient comes after all of the convolution's; sums have one name."""
    return sorted(report, key=lambda item: item[0])


def reportable(report, difference, low):
    """Without the gradients of a difference that computes ``low``: as a sum, of which MXNet reports none."""
    return [each for each in report if not (low and each[0].startswith(f"{difference}_backward"))]


# Gradients of labels, and where a pooling kernel notes its maxima.
NEVER_WRITTEN = ("softmax_backward_output1", "loss_backward_output1", "pool_workspace")


def names(report):
    return [name for name, _ in report]


def assert_as_in_fp32(low, full, policy, scale):
    """Every value within the dtype's tolerance of FP32's of the same place, gradients over the loss scale."""
    tolerance = TOLERANCE["bfloat16" if "bfloat16" in str(policy) else "float16"]
    for (name, found), (_, expected) in zip(low, full):
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        if name in NEVER_WRITTEN:
            continue
        is_gradient = "backward" in name or "grad" in name
        if is_gradient and not name.startswith(("softmax", "loss")):
            found = found / scale
        largest = np.abs(expected).max()
        assert np.abs(found - expected).max() <= tolerance * max(largest, 0.05), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SYMBOLS)
def test_a_monitor_of_a_module_lists_what_it_lists_in_fp32(kind, policy, training):
    full = reported(kind, None, training)
    low = reported(kind, POLICIES[policy], training)
    full = reportable(full, "sub", policy.startswith("bfloat16"))
    assert names(low) == names(full)
    assert_as_in_fp32(low, full, POLICIES[policy], SCALE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SYMBOLS)
def test_a_monitor_of_inputs_too_lists_what_it_lists_in_fp32(kind, policy):
    """In inference: MXNet's own ends the process in a backward."""
    full = sorted(dict(reported(kind, None, training=False, monitor_all=True)).items())
    low = sorted(dict(reported(kind, POLICIES[policy], training=False, monitor_all=True)).items())
    assert names(low) == names(full)
    assert_as_in_fp32(low, full, POLICIES[policy], SCALE)


def test_a_pattern_is_of_the_network_s_names():
    pattern = ".*output|conv_weight"
    low, full = (reported("convolutions", policy, True, pattern=pattern) for policy in ("float16", None))
    assert names(low) == names(full) == [n for n in names(reported("convolutions", None, True)) if re.match(pattern, n)]


def test_fit_with_a_monitor_trains_as_without_and_every_bucket_has_it():
    def trained(monitor):
        def generate(key):
            x = S.FullyConnected(S.var("data"), num_hidden=3, flatten=False, name="fc")
            return (
                S.SoftmaxOutput(S.sum(x, axis=1, name="sum"), S.var("softmax_label"), name="softmax"),
                ["data"],
                ["softmax_label"],
            )

        module = mxmp.BucketingModule(generate, 4, loss_scale=SCALE)
        module.bind([("data", (2, 4, 5))], [("softmax_label", (2,))])
        mx.random.seed(1)
        module.init_params(mx.init.Uniform(0.5))
        module.init_optimizer()
        lists = []
        if monitor:
            module.install_monitor(monitor)
        for step, key in enumerate((4, 3, 4)):
            shapes = [("data", (2, key, 5))], [("softmax_label", (2,))]
            if monitor:
                monitor.tic()
            batch = mx.io.DataBatch([array(step, 2, key, 5)], [mx.nd.ones((2,))], bucket_key=key)
            batch.provide_data, batch.provide_label = shapes
            module.forward_backward(batch)
            module.update()
            lists.append([name for _, name, _ in monitor.toc()] if monitor else [])
        return lists, {k: v.asnumpy() for k, v in module.get_params()[0].items()}

    lists, watched = trained(mx.mon.Monitor(1, pattern=".*output.*"))
    _, plain = trained(None)
    expected = ["fc_output", "sum_output", "softmax_output", "softmax_backward_output0", "softmax_backward_output1"]
    for each in lists:
        assert set(expected) <= set(each)
        assert not [name for name in each if "to_float" in name or "rounded" in name or "scale" in name]
    assert_same(watched, plain)


# -- register_op_hook -------------------------------------------------------------------------------


class Mixed(gluon.HybridBlock):
    """Renamed heads, operators that mxmp computes by others, one tensor of several readers."""

    def __init__(self):
        super().__init__(prefix="mixed_")
        with self.name_scope():
            self.conv = nn.Conv2D(4, 3, padding=1, in_channels=2)
            self.norm = nn.BatchNorm(in_channels=4)
            self.fc = nn.Dense(3, in_units=4 * 36)

    def hybrid_forward(self, F, x):  # noqa: N803
        y = self.conv(x)
        z = F.clip(self.norm(y), 0, 6)
        z = F.elemwise_sub(F.sigmoid(z), y)
        return self.fc(z), z


def listened(net, monitor_all=False):
    """A list to which (name, kind, value) are added of everything that an op hook of ``net`` is called with."""
    found = []

    def listen(name, kind, handle):
        value = NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)
        found.append((name.decode(), kind.decode(), value.asnumpy()))

    net.register_op_hook(listen, monitor_all)
    return found


def heard(policy, training, monitor_all, flags=None):
    """(name, kind, value) of everything that a hook is called with."""
    net = seeded(Mixed())
    net.hybridize(**(flags or {}))
    if policy is not None:
        mxmp.convert(net, policy)
    found = listened(net, monitor_all)
    x = array(0, 2, 2, 6, 6)
    x.attach_grad()
    with autograd.record(training) if training else autograd.pause():
        outs = net(x)
    if training:
        autograd.backward(list(outs), [mx.nd.ones_like(out) * SCALE for out in outs])
    mx.nd.waitall()
    return by_name(found)


# Of plain nets, whatever the flags (a tuple is true).
@pytest.mark.filterwarnings("ignore:register_op_hook is experimental")
@pytest.mark.parametrize("flags", [None, {"static_alloc": True, "static_shape": True}], ids=["plain", "static"])
@pytest.mark.parametrize("monitor_all", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_hears_of_what_it_hears_of_in_fp32(policy, training, monitor_all, flags):
    full = heard(None, training, monitor_all)
    full = reportable(full, "mixed_elemwise_sub0", policy == "bfloat16, all low")
    low = heard(POLICIES[policy], training, monitor_all, flags)
    assert names([each[:2] for each in low]) == names([each[:2] for each in full])
    kinds = [(name, kind) for name, kind, _ in full if not kind.startswith("_backward")]
    assert [(name, kind) for name, kind, _ in low if not kind.startswith("_backward")] == kinds
    assert_as_in_fp32(
        [e[::2] for e in low],
        [(n, v / (SCALE if "backward" in n or "grad" in n else 1)) for n, _, v in full],
        POLICIES[policy],
        SCALE,
    )


def test_a_monitor_before_bind_is_refused():
    with pytest.raises(RuntimeError, match=r"call bind\(\) first"):
        mxmp.Module(convolutions()[0]).install_monitor(mx.mon.Monitor(1))


def test_what_overflows_in_float16_is_inf_in_the_report():
    net = seeded(nn.Dense(3, in_units=6, prefix="fc_"))
    net.weight.set_data(mx.nd.full((3, 6), 60000))
    mxmp.convert(net)
    found = listened(net)
    net(mx.nd.ones((2, 6)))
    mx.nd.waitall()
    assert np.isinf({name: value for name, _, value in found}["fc_fwd_output"]).all()


def test_a_hook_after_a_watch_hears_of_the_network_alone():
    net = mxmp.convert(seeded(Mixed()))
    trainer = mxmp.Trainer(net.collect_params(), "sgd", loss_scale=SCALE)
    net(array(0, 2, 2, 6, 6))
    with mxmp.diagnose.watch(net, trainer, every=1) as watched:
        with autograd.record():
            loss = sum(out.sum() for out in net(array(0, 2, 2, 6, 6)))
        trainer.backward(loss)
        trainer.step(1)
    assert watched.latest.of("gradient")
    found = listened(net)
    net(array(0, 2, 2, 6, 6))
    mx.nd.waitall()
    assert found
    assert not [name for name, *_ in found if "_to_float" in name]


@dataclass
class Heard:
    """An op hook that, as any dataclass, has no hash and equals others."""

    names: list = field(default_factory=list, compare=False)

    def __call__(self, name, kind, handle):
        NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)  # frees it
        self.names.append(name)


@pytest.mark.filterwarnings("ignore:register_op_hook is experimental")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_hook_takes_the_place_of_the_last_one_as_in_mxnet(policy):
    def hooked(convert):
        net = seeded(nn.Dense(3, in_units=6, prefix="fc_"))
        convert(net)
        found, ended = [], []
        for _ in range(3):
            hooks = [Heard() for _ in range(3)]
            net.register_op_hook(hooks[0])
            net(array(0, 2, 6))
            net.register_op_hook(hooks[1], True)
            net(array(0, 2, 6))
            net.register_op_hook(hooks[2])
            net(array(0, 2, 6))
            net(array(0, 2, 6))
            mx.nd.waitall()
            found.append([sorted(hook.names) for hook in hooks])
            ended.append(weakref.ref(hooks[0]))
        del hooks
        gc.collect()
        return found, [hook() for hook in ended]

    full = hooked(lambda net: net.hybridize())
    low = hooked(lambda net: mxmp.convert(net, POLICIES[policy]))
    assert full[1] == [None] * 3
    assert low == full


def with_loop(kind, **mixed):
    """Names that a monitor lists of a loop with a loss head in its body."""

    def body(row, state):
        x = S.FullyConnected(row, S.var("fc_weight", shape=(3, 4)), no_bias=True, num_hidden=3, name="fc")
        head = S.MakeLoss(S.cast(S.sum(S.square(x)), "float64"), name="inner")
        return S.cast(head, "float32") + S.sum(x), state + S.sum(S.exp(x))

    out, state = S.contrib.foreach(body, S.var("data"), S.var("start_bias", shape=(1,)), name="loop")
    loss = S.MakeLoss(S.broadcast_add(S.sum(out), state), name="loss")
    module = kind(loss, label_names=None, **mixed)
    module.bind([("data", (5, 2, 4))])
    module.init_params()
    monitor = mx.mon.Monitor(1)
    module.install_monitor(monitor)
    monitor.tic()
    module.forward_backward(mx.io.DataBatch([array(0, 5, 2, 4)]))
    return sorted(name for _, name, _ in monitor.toc())


def test_the_loss_scale_that_a_loop_reads_is_not_reported_and_no_message_is_printed(capfd):
    low = with_loop(mxmp.Module, loss_scale=SCALE)
    assert "Loading symbol" not in capfd.readouterr().err
    full = with_loop(mx.mod.Module)
    number = re.compile(r"\d+(?=_)")
    assert [number.sub("", name) for name in low] == [number.sub("", name) for name in full]


CHOICES = {
    "where": lambda space, c, x, y: space.where(c, x, y),
    "_npi_where": lambda space, c, x, y: space.np.where(c, x, y),
    "_npi_where_lscalar": lambda space, c, x, y: space.np.where(c, 0.5, y) + x,
    "_npi_where_rscalar": lambda space, c, x, y: space.np.where(c, x, 0.5) + y,
}


@pytest.mark.parametrize("op", CHOICES)
@pytest.mark.filterwarnings("ignore:register_op_hook is experimental")
def test_the_gradients_of_a_where_are_those_of_the_inputs_behind_its_condition(op):
    """MXNet numbers them from 0; the values tell whose they are."""
    arrays = {"data0": [1, 0, 1], "data1": [2, 3, 4], "data2": [5, 6, 7]}
    is_numpy = op != "where"
    (mx.npx.set_np if is_numpy else mx.npx.reset_np)()
    try:
        make = mx.np.array if is_numpy else mx.nd.array
        inputs = {name: make(np.array(value, "float32")) for name, value in arrays.items()}
        for name in ("data1", "data2"):
            inputs[name].attach_grad()
        net = Lambda(lambda f, net, *inputs: CHOICES[op](f, *inputs))
        net.hybridize(inline_limit=0)  # records one operator, whose backward the hook hears
        found = listened(net)
        with autograd.record():
            out = net(*inputs.values())
        out.backward(make(np.array([8, 9, 10], "float32")))
        mx.nd.waitall()
        symbol = net._cached_graph[1]
    finally:
        mx.npx.reset_np()
    reported = {name: value for name, _, value in found}
    nodes = {node.name: node for node in Graph.from_symbol(symbol).nodes()}
    places = {name: place_of(nodes, name) for name in reported if "where" in name and "backward" in name}
    assert {place.node.op for place in places.values()} == {op}
    assert len(places) == (1 if "scalar" in op else 2)
    for name, place in places.items():
        assert place.what == "gradient"
        read = place.node.inputs[place.number].node.name
        np.testing.assert_array_equal(reported[name], inputs[read].grad.asnumpy(), err_msg=name)


# Of each operator: how many columns that input has, and a call that reads it.
WITHOUT_GRADIENT = {
    "where": (4, lambda space, y, read: space.where(read, y, y * 2)),
    "pick": (1, lambda space, y, read: space.pick(y, read, keepdims=True)),
    "broadcast_like": (4, lambda space, y, read: space.broadcast_like(space.sum(y, axis=1, keepdims=True), read)),
    "reshape_like": (4, lambda space, y, read: space.reshape_like(y, read)),
}


class TwoReads(gluon.HybridBlock):
    def __init__(self, units, call):
        super().__init__(prefix="net_")
        self.call = call
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4, prefix="dense_")
            self.full = nn.Dense(units, in_units=4, prefix="full_")

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.call(F, self.dense(x), self.full(x))


@pytest.mark.parametrize("monitor_all", [False, True])
@pytest.mark.parametrize("op", WITHOUT_GRADIENT)
@pytest.mark.filterwarnings("ignore:register_op_hook is experimental")
def test_the_zeros_that_mxnet_makes_for_an_input_without_a_gradient_keep_their_operator(op, monitor_all):
    def hooked(policy):
        net = seeded(TwoReads(*WITHOUT_GRADIENT[op]))
        net.hybridize()
        if policy is not None:
            mxmp.convert(net, policy)
        found = listened(net, monitor_all)
        with autograd.record():
            out = net(array(0, 3, 4))
        out.backward()
        mx.nd.waitall()
        return sorted(each[:2] for each in found if "backward" in each[0])

    full = hooked(None)
    assert "zeros_like" in dict(full).values()
    assert hooked("bfloat16,exclude=net_full") == full
