"""Operators between a weight and the layer that reads it, as in ArcFace, weight standardization or weight norm."""

from __future__ import annotations

from contextlib import suppress

import mxnet as mx
import numpy as np
import pytest
from kit.registered import FORWARD
from support.operators.case import CASES, Input

import mxmp
from mxmp.host.versions import GRAPH_ATTRIBUTES
from mxmp.precision.graph import Entry, Graph, Node
from mxmp.precision.rule import Kind
from mxmp.precision.rules import RULES

S = mx.sym
DATA = S.var("data")
SHAPES = ((4, 6), (4, 4), (2, 3, 4, 5), (6,))
# They draw random numbers, give NaN below 1, leave float16's range (degrees), or have a gradient of rounding errors
# alone (a norm over one group), or fail when they run, in some runs late enough to seem right (triangles, Cholesky's of
# matrices that are not square: tests/kernels/test_unwritten.py has one that is). oneDNN's own, for graphs
# that are fused already, end the process.
LEFT_OUT = ("random", "arccosh", "degrees", "GroupNorm", "linalg_tr", "potrf", "cholesky", "_sg_mkldnn", "copyto")
TRAINED = {name: op for name, op in FORWARD.items() if RULES[op.canonical].kind not in (Kind.ALONE, Kind.HEAD)}
# One name of each: one with designed calls, if there is one.
BY_NAME = sorted(sorted(TRAINED.items(), reverse=True), key=lambda item: item[0] in CASES)
CANONICAL = {op.canonical: name for name, op in BY_NAME}
OPERATORS = sorted(name for name in CANONICAL.values() if not any(part in name for part in LEFT_OUT))


def calls(name):
    """Yield the inputs and attributes of calls of an operator, the designed ones first."""
    for case in CASES.get(name, ())[:3]:
        yield case.inputs, case.attrs
    op = FORWARD[name]
    attrs = {"scalar": "0.5"} if "scalar" in op.attrs else {}
    for count in (1, 2) if op.variadic else (len(op.inputs),):
        for shape in SHAPES:
            yield (Input(shape),) * count, {**attrs, **({"num_args": str(count)} if "num_args" in op.attrs else {})}


def graph_of(name, inputs, attrs):
    """Return a Symbol whose layers ``a`` and ``b`` share the operator's output as their weight.

    The weight of layer ``c`` goes through a second operator. What has no gradient, such as indices, is one.
    """

    def read(number, spec):
        if not spec.grad:
            return Entry(Node("_ones", f"i{number}", {"shape": str(spec.shape), "dtype": "float32"}))
        return Entry(Node("null", f"w{number}", {"__shape__": str(spec.shape)}))

    def layer(label, weight):
        flat = Entry(Node("Reshape", f"{label}_flat", {"shape": "(1, -1)"}, [weight]))
        return Entry(Node("FullyConnected", label, {"num_hidden": "1", "no_bias": "True"}, [data, flat]))

    data, weights = Entry(Node("null", "data")), [read(*each) for each in enumerate(inputs)]
    halved = [
        Entry(Node("_mul_scalar", f"{each.node.name}_half", {"scalar": "0.5"}, [each])) if spec.grad else each
        for spec, each in zip(inputs, weights)
    ]
    first, second = (Entry(Node(name, label, dict(attrs), each)) for label, each in (("one", weights), ("two", halved)))
    joined = Node("add_n", "sum", {"num_args": "3"}, [layer("a", first), layer("b", first), layer("c", second)])
    head = Node("LinearRegressionOutput", "head", {}, [Entry(joined), Entry(Node("null", "label"))])
    return Graph([Entry(head)], GRAPH_ATTRIBUTES).to_symbol()


def trained(module, size, shapes=None):
    """Return the output of one batch, and all parameters after its step."""
    shapes = shapes or {"data": (3, size), "label": (3, 1)}
    module.bind([("data", shapes["data"])], [("label", shapes["label"])])
    rng = np.random.RandomState(0)
    arguments = sorted(module._exec_group.execs[0].arg_dict.items())
    values = {k: mx.nd.array(rng.uniform(0.2, 0.9, v.shape)) for k, v in arguments if k in module._param_names}
    module.init_params(None, values, {})
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    drawn = [mx.nd.array(rng.uniform(-1, 1, shapes[name])) for name in ("data", "label")]
    module.forward_backward(mx.io.DataBatch(drawn[:1], drawn[1:]))
    output = module.get_outputs()[0].asnumpy()
    module.update()
    return {"output": output, **{k: v.asnumpy() for k, v in module.get_params()[0].items()}}


def plain(symbol, **kwargs):
    return mx.mod.Module(symbol, label_names=["label"], **kwargs)


def mixed(symbol, policy, **kwargs):
    return mxmp.Module(symbol, label_names=["label"], policy=policy, loss_scale=64, **kwargs)


def assert_close(found, expected, rounding):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= rounding * np.abs(value).max() + 1e-6, name
        assert found[name].dtype == np.float32


def bound_in_fp32(name):
    """Return the Symbol of the first call that plain MXNet trains, its layers' size and result; or None."""
    for inputs, attrs in calls(name):
        try:
            symbol = graph_of(name, inputs, attrs)
            size = symbol.get_internals()["a_flat_output"].infer_shape()[1][0][1]
            expected = trained(plain(symbol), size)
        except (mx.MXNetError, RuntimeError, TypeError, ValueError, AssertionError, UserWarning):
            with suppress(mx.MXNetError):
                mx.nd.waitall()  # a backward may fail later, too
            continue
        if all(np.isfinite(value).all() for value in expected.values()):
            return symbol, size, expected
    return None


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_on_weights_binds_and_trains_as_in_fp32(name, monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    found = bound_in_fp32(name)
    if found is None:
        return  # MXNet itself cannot train it
    symbol, size, expected = found
    for policy, rounding in (("float16", 4e-3), ("bfloat16", 3e-2)):
        assert_close(trained(mixed(symbol, policy), size), expected, rounding)
    assert_close(trained(plain(mxmp.cast_symbol(symbol, "bfloat16")), size), expected, 3e-2)


@pytest.mark.parametrize("name", ["tanh", "clip", "Pad", "take", "L2Normalization", "Concat", "dot", "Reshape", "sign"])
def test_what_stands_between_a_weight_and_its_layer_in_known_networks_is_among_them(name, monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    name = CANONICAL.get(name, name)
    assert name in OPERATORS
    assert bound_in_fp32(name) is not None, "the test above did nothing"


def weight(name="w", shape=(8, 6), **kwargs):
    return S.var(name, shape=shape, init=mx.init.Uniform(0.5), **kwargs)


def looped(w):
    out, _ = S.contrib.foreach(lambda row, state: (S.tanh(row), state), w, [S.zeros((1,))])
    return out


class Halve(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 0.5)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 0.5)


@mx.operator.register("halve_a_weight")
class HalveProp(mx.operator.CustomOpProp):
    def infer_type(self, in_type):
        return in_type, in_type, []

    def infer_shape(self, in_shape):
        return in_shape, in_shape, []

    def create_operator(self, ctx, shapes, dtypes):
        return Halve()


def dense(w, data=None, num_hidden=8):
    return S.FullyConnected(DATA if data is None else data, w, num_hidden=num_hidden, no_bias=True)


# Others are drawn in arrangements.py.
FOUND = {
    "arcface": lambda: dense(S.L2Normalization(weight())),
    "weight norm": lambda: dense(S.broadcast_mul(S.L2Normalization(weight("v")), weight("g", (8, 1)))),
    "two weights": lambda: dense(weight() * weight("v")),
    "computed indices": lambda: dense(
        S.take(
            S.tanh(weight(shape=(9, 6))), S.broadcast_add(S.arange(8), 0 * S.sum(S.FullyConnected(DATA, num_hidden=2)))
        )
    ),
    "concat": lambda: dense(S.Concat(S.clip(weight(shape=(3, 6)), -0.5, 0.5), weight("v", (5, 6)), dim=0)),
    "swapped": lambda: dense(S.SwapAxis(weight(shape=(6, 8), dtype="float32"), dim1=0, dim2=1)),
    "foreach": lambda: dense(looped(weight())),
    "data that is dropped": lambda: dense(S.L2Normalization(weight()), S.Dropout(DATA, p=0.0)),
    "custom": lambda: dense(S.Custom(weight(dtype="float32"), op_type="halve_a_weight")),
}
POLICIES = {"float16": 6e-3, "params=float16": 6e-3, "bfloat16": 4e-2, "float16-fast": 6e-3}


def headed(layer):
    last = S.FullyConnected(S.relu(layer), num_hidden=1, name="last")
    return S.LinearRegressionOutput(last, S.var("label"), name="head")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FOUND)
def test_weights_of_real_networks_are_read_through_operators(name, policy):
    symbol = headed(FOUND[name]())
    expected = trained(plain(symbol), 6)
    assert_close(trained(mixed(symbol, policy), 6), expected, POLICIES[policy])
    if policy != "params=float16":
        cast = mxmp.cast_symbol(symbol, policy)
        assert_close(trained(plain(cast), 6), expected, POLICIES[policy])


@pytest.mark.parametrize("name", FOUND)
def test_a_module_that_predicts_binds_too(name):
    symbol = headed(FOUND[name]())
    arrays = []
    for module in (plain(symbol), mixed(symbol, "bfloat16"), mixed(symbol, "float16")):
        module.bind([("data", (3, 6))], [("label", (3, 1))], for_training=False)
        if not arrays:
            initial = {k: mx.nd.random.uniform(-0.5, 0.5, v.shape) for k, v in module._arg_params.items()}
            module.init_params(None, initial, {})
            values = module.get_params()
        module.set_params(*values)
        module.forward(mx.io.DataBatch([mx.nd.arange(18).reshape((3, 6)) / 18]), is_train=False)
        arrays.append(module.get_outputs()[0].asnumpy())
    np.testing.assert_allclose(arrays[1], arrays[0], rtol=4e-2, atol=4e-2)
    np.testing.assert_allclose(arrays[2], arrays[0], rtol=6e-3, atol=6e-3)


def test_the_declarations_stay_out_of_fp32_files(tmp_path):
    symbol = headed(FOUND["arcface"]())
    module = mixed(symbol, "bfloat16")
    trained(module, 6)
    module.save_checkpoint(str(tmp_path / "net"), 1)
    assert "dtype" not in (tmp_path / "net-symbol.json").read_text()
    cast = mxmp.cast_symbol(symbol, "bfloat16")
    assert cast.attr_dict()["w"]["__dtype__"] == "0"
    assert mxmp.cast_symbol(cast, "bfloat16").tojson() == cast.tojson()


@mx.operator.register("halve_what_has_a_dtype")
class StrictProp(HalveProp):
    def infer_type(self, in_type):
        return super().infer_type([np.dtype(each.__name__).type for each in in_type])


def test_a_users_operator_is_not_asked_for_dtypes_of_what_has_none():
    cast = mxmp.cast_symbol(
        headed(dense(S.L2Normalization(weight()), S.Custom(DATA, op_type="halve_what_has_a_dtype"))), "bfloat16"
    )
    assert np.isfinite(trained(plain(cast), 6)["output"]).all()


def test_a_dtype_that_the_caller_gives_comes_first():
    """Indices and images have dtypes of their own; the declared ones are defaults."""
    embedded = S.Embedding(DATA, S.tanh(weight(shape=(9, 6))), input_dim=9, output_dim=6)
    cast = mxmp.cast_symbol(headed(dense(S.L2Normalization(weight("v")), embedded)), "bfloat16")
    found, _, _ = cast.infer_type(data="int32")
    assert dict(zip(cast.list_arguments(), found))["data"] is np.int32
