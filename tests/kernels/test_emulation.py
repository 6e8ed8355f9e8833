"""float16 on a CPU as a Tensor Core computes it, and bfloat16 where oneDNN has no kernels for it."""

from __future__ import annotations

from itertools import product
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
import pytest
from kit.graphs import mixed
from kit.oracle import S, by_symbol, filled, half, native, nodes

import mxmp
from mxmp import Policy
from mxmp.kernels.emulation import ONEDNNS
from mxmp.kernels.fit import SWITCH_ON
from mxmp.pipeline import low_graph
from mxmp.precision.casts import strip
from mxmp.precision.graph import Entry, Graph, Node
from mxmp.precision.rule import Kind
from mxmp.precision.rules import RULES, rule_of

# -- Matrix operators in NumPy ----------------------------------------------------------------------


def np_conv(x: np.ndarray, w: np.ndarray, b: Any = 0, stride: int = 1, pad: int = 0, group: int = 1) -> np.ndarray:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    (n, _, height, width), (f, c, kh, kw) = x.shape, w.shape
    out = np.zeros((n, f, (height - kh) // stride + 1, (width - kw) // stride + 1))
    for o, i, j in product(*map(range, out.shape[1:])):
        first = o // (f // group) * c
        patch = x[:, first : first + c, i * stride : i * stride + kh, j * stride : j * stride + kw]
        out[:, o, i, j] = (patch * w[o]).sum((1, 2, 3))
    return out + np.reshape(b, (-1, 1, 1))


def np_deconv(x: np.ndarray, w: np.ndarray, stride: int = 1, pad: int = 0, adj: int = 0, group: int = 1) -> np.ndarray:
    (n, c, height, width), (_, f, kh, kw) = x.shape, w.shape
    out = np.zeros((n, f * group, (height - 1) * stride + kh + adj, (width - 1) * stride + kw + adj))
    for i, j, k in product(range(c), range(height), range(width)):
        first = i // (c // group) * f
        out[:, first : first + f, j * stride : j * stride + kh, k * stride : k * stride + kw] += np.multiply(
            x[:, i, j, k].reshape(n, 1, 1, 1), w[i]
        )
    return out[:, :, pad : out.shape[2] - pad, pad : out.shape[3] - pad]


def np_fc(x: np.ndarray, w: np.ndarray, b: Any = 0) -> np.ndarray:
    return x.reshape(len(x), -1) @ w.T + b


def split_heads(x: np.ndarray, parts: int, heads: int) -> list[np.ndarray]:
    """(length, batch, heads * parts * dim) to ``parts`` arrays (batch * heads, length, dim)."""
    length, batch, width = x.shape
    x = x.reshape(length, batch * heads, parts, width // heads // parts)
    return [x[:, :, part].transpose(1, 0, 2) for part in range(parts)]


def np_qk(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return q @ k.transpose(0, 2, 1) * q.shape[2] ** -0.5


def np_valatt(v: np.ndarray, att: np.ndarray, batch: int) -> np.ndarray:
    return (att @ v).transpose(1, 0, 2).reshape(att.shape[1], batch, -1)


class Case(NamedTuple):
    """A matrix operator: its attributes, input shapes, and the same in NumPy."""

    op: str
    attrs: dict[str, Any]
    shapes: list[tuple[int, ...]]
    numpy: Callable[..., np.ndarray]

    def symbol(self) -> mx.sym.Symbol:
        inputs = [Entry(Node("null", f"in{i}")) for i in range(len(self.shapes))]
        node = Node(self.op, "op", {key: str(value) for key, value in self.attrs.items()}, inputs)
        return Graph([Entry(node)], numpy=self.op.startswith("_np")).to_symbol()

    def values(self, draw: Callable[[tuple[int, ...]], np.ndarray]) -> dict[str, np.ndarray]:
        return {f"in{i}": draw(shape).astype("float32") for i, shape in enumerate(self.shapes)}


K3 = {"kernel": (3, 3), "num_filter": 4}
CASES = [
    Case("FullyConnected", {"num_hidden": 3}, [(4, 2, 5), (3, 10), (3,)], np_fc),
    Case(
        "Convolution",
        {**K3, "pad": (1, 1)},
        [(2, 3, 4, 4), (4, 3, 3, 3), (4,)],
        lambda *a: np_conv(*a, pad=1),
    ),
    Case(
        "Convolution",
        {**K3, "stride": (2, 2), "num_group": 2, "no_bias": True},
        [(2, 4, 5, 5), (4, 2, 3, 3)],
        lambda *a: np_conv(*a, stride=2, group=2),
    ),
    Case(
        "Deconvolution",
        {**K3, "pad": (1, 1)},
        [(2, 4, 6, 6), (4, 4, 3, 3)],
        lambda *a: np_deconv(*a, pad=1),
    ),
    Case(
        "Deconvolution",
        {**K3, "stride": (2, 2), "pad": (1, 1), "adj": (1, 1), "num_group": 2},
        [(2, 4, 3, 3), (4, 2, 3, 3)],
        lambda *a: np_deconv(*a, stride=2, pad=1, adj=1, group=2),
    ),
    Case("dot", {}, [(3, 5), (5, 4)], np.dot),
    Case("dot", {"transpose_a": True, "transpose_b": True}, [(5, 3), (4, 5)], lambda a, b: a.T @ b.T),
    Case(
        "_linalg_gemm",
        {"alpha": 2.0, "beta": 0.5},
        [(3, 5), (5, 4), (3, 4)],
        lambda a, b, c: 2 * a @ b + c / 2,
    ),
    Case("_linalg_gemm2", {"alpha": 0.5}, [(2, 3, 5), (2, 5, 4)], lambda a, b: a @ b / 2),
    Case("_np_dot", {}, [(3, 5), (5, 4)], np.dot),
    Case("_npi_tensordot_int_axes", {"axes": 2}, [(3, 2, 5), (2, 5, 4)], lambda a, b: np.tensordot(a, b, 2)),
    Case(
        "_npi_tensordot",
        {"a_axes_summed": (0,), "b_axes_summed": (1,)},
        [(5, 3), (4, 5)],
        lambda a, b: np.tensordot(a, b, ((0,), (1,))),
    ),
    Case(
        "_contrib_interleaved_matmul_selfatt_qk",
        {"heads": 2},
        [(3, 2, 2 * 3 * 4)],
        lambda x: np_qk(*split_heads(x, 3, 2)[:2]),
    ),
    Case(
        "_contrib_interleaved_matmul_selfatt_valatt",
        {"heads": 2},
        [(3, 2, 2 * 3 * 4), (4, 3, 3)],
        lambda x, att: np_valatt(split_heads(x, 3, 2)[2], att, 2),
    ),
    Case(
        "_contrib_interleaved_matmul_encdec_qk",
        {"heads": 2},
        [(3, 2, 2 * 4), (5, 2, 2 * 2 * 4)],
        lambda q, kv: np_qk(split_heads(q, 1, 2)[0], split_heads(kv, 2, 2)[0]),
    ),
    Case(
        "_contrib_interleaved_matmul_encdec_valatt",
        {"heads": 2},
        [(5, 2, 2 * 2 * 4), (4, 3, 5)],
        lambda kv, att: np_valatt(split_heads(kv, 2, 2)[1], att, 2),
    ),
]
# Tests share policies, which name operators that some of their graphs lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*entries of the policy that change nothing")
LINALG = ["_linalg_gemm", "_linalg_gemm2"]  # FP32 by rule, for MXNet has no float16 kernel on any device
POLICY = Policy(low_ops=LINALG)
matrix_operators = pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)


def gradient(case: Case, values: list[np.ndarray], head: np.ndarray, position: int) -> np.ndarray:
    """Of an operator that is affine in each input: a unit step gives the exact slope."""
    base = case.numpy(*values)
    slopes = np.zeros(values[position].shape)
    for index in np.ndindex(slopes.shape):
        moved = [value.copy() for value in values]
        moved[position][index] += 1
        slopes[index] = (head * (case.numpy(*moved) - base)).sum()
    return slopes


def rounded_inputs(values: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [half(value).astype("float64") for value in values.values()]


def output(case: Case, values: list[np.ndarray]) -> np.ndarray:
    return half(case.numpy(*values))


def near_integers(shape: tuple[int, ...]) -> np.ndarray:
    """Integers 8 to 20 once float16 has rounded them; FP32 sums of products of them are exact."""
    return np.random.randint(8, 21, shape) * np.random.choice([-1, 1], shape) + 0.003


@matrix_operators
def test_matrix_operators_equal_numpy_with_one_rounding_forward_and_backward(case):
    values = case.values(near_integers)
    exact = rounded_inputs(values)
    want = output(case, exact)
    head = near_integers(want.shape)
    got = by_symbol(mxmp.cast_symbol(case.symbol(), POLICY), values, heads=[head])
    np.testing.assert_array_equal(got.outputs[0], want)
    for position, name in enumerate(values):
        slopes = gradient(case, exact, half(head).astype("float64"), position)
        np.testing.assert_array_equal(got.grads[name], half(slopes), err_msg=name)


@matrix_operators
def test_matrix_operators_are_within_an_ulp_of_numpy_on_real_numbers(case):
    values = case.values(lambda shape: np.random.normal(0, 1, shape))
    exact = rounded_inputs(values)
    want = output(case, exact)
    head = np.random.normal(0, 1, want.shape)
    got = by_symbol(mxmp.cast_symbol(case.symbol(), POLICY), values, heads=[head])
    # Sums of FP32 differ by their order, by 2**-22 or so of their largest term.
    for value, expected in [(got.outputs[0], want)] + [
        (got.grads[name], half(gradient(case, exact, half(head).astype("float64"), position)))
        for position, name in enumerate(values)
    ]:
        error = np.abs(value - expected)
        assert (error <= np.maximum(np.spacing(np.abs(expected).astype("float16")), 2.0**-18)).all()
        assert np.mean(error > 0) < 0.02


def test_deconvolutions_in_3d_stay_fp32():
    x = S.Convolution(S.var("data"), kernel=(1, 1, 1), num_filter=4, name="conv")
    symbol = S.Deconvolution(x, kernel=(2, 2, 2), num_filter=3, name="deconv")
    node = {n.name: n for n in mxmp.explain(symbol, policy=POLICY).nodes}["deconv"]
    assert (node.dtype, node.casts) == ("float32", 1)
    assert "3-D" in node.reason


def test_every_operator_that_the_rules_call_a_matrix_product_is_tested_here():
    low = {name for name, rule in RULES.items() if rule.kind is Kind.LOW}
    aliases = {"_npx_convolution", "_npx_deconvolution", "_npx_fully_connected", "_sparse_FullyConnected"}
    aliases |= {"_sparse_dot", "_npx_rnn"}
    aliases |= {"batch_dot", "_npx_batch_dot", "_npi_matmul"}  # FP32, as on a GPU
    assert low - aliases == {case.op for case in CASES} - set(LINALG) | {"RNN"}


RNN_SHAPES = {"data": (3, 2, 5), "state": (2, 2, 4), "cell": (2, 2, 4)}


@pytest.mark.parametrize("mode", ["rnn_tanh", "rnn_relu", "lstm", "gru"])
def test_recurrent_operators_equal_fp32_ones_on_rounded_values(mode):
    names = ["data", "parameters", "state", "cell"][: 4 if mode == "lstm" else 3]
    symbol = S.RNN(*map(S.var, names), mode=mode, state_size=4, num_layers=2, state_outputs=True, name="rnn")
    shapes = {name: RNN_SHAPES[name] for name in names if name in RNN_SHAPES}
    arguments = dict(zip(symbol.list_arguments(), symbol.infer_shape(**shapes)[0]))
    values = {name: np.random.normal(0, 0.5, shape).astype("float32") for name, shape in arguments.items()}
    heads = [np.random.normal(0, 1, shape) for shape in symbol.infer_shape(**shapes)[1]]
    cast = mxmp.cast_symbol(S.Group([S.identity(out) for out in symbol]))
    got = by_symbol(cast, values, heads=heads)
    want = by_symbol(symbol, {k: half(v) for k, v in values.items()}, heads=[half(h) for h in heads])
    for value, expected in zip(got.outputs, want.outputs):
        np.testing.assert_array_equal(value, half(expected))
    for name in values:
        np.testing.assert_array_equal(got.grads[name], half(want.grads[name]))
        assert np.abs(got.grads[name]).max() > 0


# -- bfloat16 without AVX-512 -------------------------------------------------------------------------


def to_bfloat16(value: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, to nearest and ties to even, in FP32; of finite values."""
    bits = np.asarray(value, "float32").view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("uint32").view("float32")


ONEDNNS_OPERATORS = {
    "Convolution": lambda x: S.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name="op"),
    "FullyConnected": lambda x: S.FullyConnected(x, num_hidden=5, name="op"),
    "Activation": lambda x: S.Activation(x, act_type="tanh", name="op"),
    "LeakyReLU": lambda x: S.LeakyReLU(x, act_type="leaky", slope=0.3, name="op"),
    "Pooling": lambda x: S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg", name="op"),
    "BatchNorm": lambda x: S.BatchNorm(x, fix_gamma=False, name="op"),
    "_contrib_BatchNormWithReLU": lambda x: S.contrib.BatchNormWithReLU(x, fix_gamma=False, name="op"),
}


@pytest.mark.parametrize("op", sorted(ONEDNNS))
def test_bfloat16_without_avx512_has_one_rounding_forward_and_backward(op, monkeypatch):
    monkeypatch.setenv(SWITCH_ON, "emulated_bfloat16")
    symbol = ONEDNNS_OPERATORS[op](S.var("data"))
    cast = mxmp.cast_symbol(symbol, Policy("bfloat16", norm="compute", low_ops=[op]), ctx=mx.cpu())
    every = nodes(cast)
    ((data, *_), *_) = next(node for node in every if node["op"] == op)["inputs"]
    assert every[data]["attrs"]["dtype"] == "float32"
    values = filled(symbol, data=(2, 3, 6, 6))
    shapes = symbol.infer_shape(data=(2, 3, 6, 6))[1]
    heads = [np.random.normal(0, 1, shape).astype("float32") for shape in shapes]
    kept = {symbol.list_inputs()[position] for position in rule_of(op).keep}  # FP32, as in oneDNN's kernel
    low = {name: value if name in kept else to_bfloat16(value) for name, value in values.items()}
    got = by_symbol(cast, values, heads=heads)
    want = by_symbol(symbol, low, heads=list(map(to_bfloat16, heads)))
    np.testing.assert_array_equal(got.outputs[0], to_bfloat16(want.outputs[0]))
    assert not np.array_equal(got.outputs[0], want.outputs[0])
    for name, expected in want.grads.items():
        np.testing.assert_array_equal(
            got.grads[name], expected if name in kept else to_bfloat16(expected), err_msg=name
        )


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.op)
def test_products_of_bfloat16_without_avx512_are_within_an_ulp_of_numpy(case, monkeypatch):
    monkeypatch.setenv(SWITCH_ON, "emulated_bfloat16")
    values = case.values(lambda shape: np.random.normal(0, 1, shape))
    exact = [to_bfloat16(value).astype("float64") for value in values.values()]
    want = case.numpy(*exact)
    head = np.random.normal(0, 1, want.shape).astype("float32")
    got = by_symbol(mxmp.cast_symbol(case.symbol(), "bfloat16", ctx=mx.cpu()), values, heads=[head])
    slopes = [gradient(case, exact, to_bfloat16(head).astype("float64"), place) for place in range(len(exact))]
    for value, expected in zip([got.outputs[0], *(got.grads[name] for name in values)], [want, *slopes]):
        rounded = to_bfloat16(expected)
        assert (np.abs(value - rounded) <= np.maximum(np.abs(rounded) * 2.0**-7, 2.0**-18)).all()
        assert np.mean(value != rounded) < 0.02


# -- The edges of float16 ---------------------------------------------------------------------------

INF = float("inf")
# a * c + b * d in FP32, rounded once.
EDGES = [
    ("overflow", (256, 0), (256, 0), INF),
    ("negative overflow", (-300, 0), (300, 0), -INF),
    ("the largest", (65504, 15), (1, 1), 65504),
    ("a tie beyond the largest", (65504, 16), (1, 1), INF),
    ("a partial sum beyond the range", (300, -300), (300, 299), 300),
    ("an input that overflows", (70000, 0), (1, 1), INF),
    ("infinities that meet", (70000, -70000), (1, 1), float("nan")),
    ("the smallest subnormal", (2.0**-12, 0), (2.0**-12, 0), 2.0**-24),
    ("half the smallest", (2.0**-13, 0), (2.0**-12, 0), 0),
    ("more than half the smallest", (2.0**-13, 2.0**-13), (2.0**-12, 2.0**-20), 2.0**-24),
    ("a tie between subnormals", (3 * 2.0**-13, 0), (2.0**-12, 0), 2.0**-23),
    ("a subnormal input", (3 * 2.0**-24, 0), (1024, 0), 3 * 2.0**-14),
    ("an input that underflows", (2.0**-26, 0), (1024, 0), 0),
    ("a tie down to even", (2048, 1), (1, 1), 2048),
    ("a tie up to even", (2050, 1), (1, 1), 2052),
    ("an input tie down", (2049, 0), (1, 1), 2048),
    ("an input tie up", (2051, 0), (1, 1), 2052),
    ("just over a tie", (2048, 1.5), (1, 1), 2050),
]
TWO_TERMS = {
    "FullyConnected": lambda x, w: S.FullyConnected(x.reshape((1, 2)), w.reshape((1, 2)), no_bias=True, num_hidden=1),
    "Convolution": lambda x, w: S.Convolution(
        x.reshape((1, 2, 1, 1)), w.reshape((1, 2, 1, 1)), no_bias=True, kernel=(1, 1), num_filter=1
    ),
    "Deconvolution": lambda x, w: S.Deconvolution(
        x.reshape((1, 2, 1, 1)), w.reshape((2, 1, 1, 1)), no_bias=True, kernel=(1, 1), num_filter=1
    ),
    "dot": lambda x, w: S.dot(x.reshape((1, 2)), w.reshape((2, 1))),
    "_linalg_gemm2": lambda x, w: S.linalg.gemm2(x.reshape((1, 1, 2)), w.reshape((1, 2, 1))),
}


def pair(values: tuple[float, float]) -> np.ndarray:
    return np.array(values, "float32")


@pytest.mark.parametrize("op", TWO_TERMS)
@pytest.mark.parametrize(("left", "right", "expected"), [e[1:] for e in EDGES], ids=[e[0] for e in EDGES])
def test_outputs_at_the_edges_of_float16(op, left, right, expected):
    cast = mxmp.cast_symbol(TWO_TERMS[op](S.var("x"), S.var("w")), POLICY)
    got = by_symbol(cast, {"x": pair(left), "w": pair(right)}, train=False)
    np.testing.assert_array_equal(got.outputs[0].ravel(), [expected])


@pytest.mark.parametrize(("left", "right", "expected"), [e[1:] for e in EDGES], ids=[e[0] for e in EDGES])
def test_gradients_at_the_edges_of_float16(left, right, expected):
    x = S.FullyConnected(S.var("x"), S.var("w"), no_bias=True, num_hidden=2)
    values = {"x": np.ones((1, 1), "float32"), "w": pair(right).reshape(2, 1)}
    got = by_symbol(mxmp.cast_symbol(x), values, heads=[pair(left).reshape(1, 2)], grads_of=["x", "w"])
    np.testing.assert_array_equal(got.grads["x"].ravel(), [expected])
    np.testing.assert_array_equal(got.grads["w"].ravel(), half(pair(left)))


def test_gradients_that_meet_are_rounded_and_then_summed_in_float16():
    """Rounded once, after the sum, it were 2050: MXNet merges equal casts of two readers, and then sums in FP32."""
    x = S.FullyConnected(S.var("x"), S.var("w"), no_bias=True, num_hidden=1)
    one = S.FullyConnected(x, S.var("w1"), no_bias=True, num_hidden=2)
    other = S.FullyConnected(x, S.var("w2"), no_bias=True, num_hidden=1)
    values = {"x": np.ones((1, 1)), "w": np.ones((1, 1)), "w1": np.array([[2048], [0.9]]), "w2": np.ones((1, 1))}
    values = {name: value.astype("float32") for name, value in values.items()}
    assert half(2048 + half(0.9)) == half(2048 + 1) == 2048 != half(2048 + half(0.9) + 1)
    got = by_symbol(mxmp.cast_symbol(S.Group([one, other])), values, heads=[np.ones((1, 2)), np.ones((1, 1))])
    np.testing.assert_array_equal(got.grads["x"], [[2048]])


# -- Where a GPU rounds -----------------------------------------------------------------------------

BIASED = {
    "FullyConnected": ((1, 2), {"num_hidden": 1}),
    "FullyConnected of rows": ((1, 1, 2), {"num_hidden": 1, "flatten": False}),
    "Convolution": ((1, 2, 1), {"num_filter": 1, "kernel": (1,)}),
    "Convolution in 2d": ((1, 2, 1, 1), {"num_filter": 1, "kernel": (1, 1)}),
    "Deconvolution": ((1, 2, 1, 1), {"num_filter": 1, "kernel": (1, 1), "no_bias": False}),
}


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_added_to_a_rounded_product(name, monkeypatch):
    monkeypatch.setenv("MXMP_WITH", "rounded_products")
    shape, attrs = BIASED[name]
    symbol = getattr(S, name.split()[0])(S.var("x"), S.var("w"), S.var("b"), name="op", **attrs)
    weight = (2, 1, 1, 1) if name == "Deconvolution" else (1, 2, *shape[2:]) if "Conv" in name else (1, 2)
    low = mxmp.cast_symbol(symbol)
    assert low.infer_shape(x=shape)[0] == symbol.infer_shape(x=shape)[0]
    found = []
    for terms, bias in (((2048, 1), -2048), ((40000, 40000), -60000), ((1, 2), 3)):
        values = {"x": pair(terms).reshape(shape), "w": np.ones(weight), "b": np.array([bias])}
        values = {key: value.astype("float32") for key, value in values.items()}
        got = by_symbol(low, values, heads=[np.full((1, *shape[1:-1], 1) if "rows" in name else (1, 1, *shape[2:]), 5)])
        found.append(float(got.outputs[0].ravel()[0]))
        assert got.grads["b"].tolist() == [5]
        assert got.grads["x"].ravel().tolist() == [5, 5]
    assert found == [0, INF, 6]
    assert strip(Graph.from_symbol(low)).to_json() == strip(Graph.from_symbol(symbol)).to_json()


def test_the_gradient_of_a_bias_is_summed_in_fp32():
    heads = np.random.normal(1, 0.1, (3000, 2))
    low = mxmp.cast_symbol(S.FullyConnected(S.var("x"), S.var("w"), S.var("b"), num_hidden=2))
    values = {"x": np.ones((3000, 1), "float32"), "w": np.ones((2, 1), "float32"), "b": np.zeros(2, "float32")}
    got = by_symbol(low, values, heads=[heads])
    np.testing.assert_array_equal(got.grads["b"], half(half(heads).astype("float64").sum(0)))


@pytest.mark.parametrize("act", ["tanh", "sigmoid"])
@pytest.mark.parametrize("kind", ["operator", "Activation"])
def test_the_gradients_of_tanh_and_sigmoid_are_those_of_their_rounded_outputs(act, kind, monkeypatch):
    monkeypatch.setenv("MXMP_WITH", "rounded_outputs")
    x = S.var("x")
    symbol = getattr(S, act)(x) if kind == "operator" else S.Activation(x, act_type=act)
    values = np.array([0.3, 3, 4, 5, 6, 9], "float32")
    low = mxmp.cast_symbol(symbol, Policy(low_ops=["Activation", act]))
    got = by_symbol(low, {"x": values}, heads=[np.ones(6)])
    y = half(np.tanh(half(values)) if act == "tanh" else 1 / (1 + np.exp(-half(values))))
    np.testing.assert_array_equal(got.outputs[0], y)
    slopes = half(1 - y * y if act == "tanh" else y * (1 - y))
    np.testing.assert_allclose(got.grads["x"], slopes, rtol=2**-10)  # FP32's own sum may be beyond a tie
    assert got.grads["x"][4] == 0 or act == "sigmoid"


# -- The shape of the emulated graph ----------------------------------------------------------------


def test_a_pooling_window_wholly_in_padding_gives_the_lowest_float16_and_no_nan():
    """FP32 gives -3.4e38, which rounds to -inf, and a convolution of that is NaN."""
    first = S.Convolution(S.var("data"), kernel=(1, 1), num_filter=3, no_bias=True, name="first")
    pool = S.Pooling(first, kernel=(1, 1), stride=(2, 2), pool_type="max", pooling_convention="full", name="pool")
    symbol = S.Convolution(pool, kernel=(2, 2), num_filter=4, no_bias=True, name="last")
    values = filled(symbol, data=(1, 3, 2, 2))
    values["last_weight"] *= 1e-3
    want, got = (by_symbol(s, values) for s in (symbol, mxmp.cast_symbol(symbol, ctx=mx.cpu())))
    assert np.abs(want.outputs[0]).max() > 1e30
    assert np.isfinite(got.outputs[0]).all()
    assert not any(np.isnan(grad).any() for grad in got.grads.values())
    want, got = (by_symbol(s, values).outputs[0] for s in (pool, mxmp.cast_symbol(pool, ctx=mx.cpu())))
    np.testing.assert_allclose(got[0, :, 0, 0], want[0, :, 0, 0], rtol=2e-3)
    assert (got[0, :, 1, 1] == -65504).all()


def test_an_average_of_windows_that_leave_the_image_may_be_below_the_lowest_float16():
    first = S.Convolution(S.var("data"), kernel=(1, 1), num_filter=1, no_bias=True, name="first")
    pool = S.Pooling(first, kernel=(2, 2), stride=(2, 2), pool_type="avg", pooling_convention="full", name="pool")
    values = {"data": np.full((1, 1, 3, 3), -6e4, "float32"), "first_weight": np.full((1, 1, 1, 1), 2, "float32")}
    assert np.isneginf(by_symbol(mxmp.cast_symbol(pool, ctx=mx.cpu()), values).outputs[0]).all()


def matrix_inputs(symbol: mx.sym.Symbol) -> set[str | None]:
    """Dtypes that casts give to the inputs of matrix operators; None for an input that is no cast."""
    every = nodes(symbol)
    found = set()
    for node in every:
        if node["op"] in RULES and RULES[node["op"]].kind is Kind.LOW:
            found |= {every[i].get("attrs", {}).get("dtype") for i, *_ in node["inputs"]}
    return found


def test_a_gpu_gets_native_float16_and_a_cpu_the_emulation():
    symbol = mixed()
    assert "float32" not in matrix_inputs(native(symbol))
    assert matrix_inputs(mxmp.cast_symbol(symbol, ctx=mx.cpu())) <= {"float32", "float64", None}
    emulated, plain = nodes(mxmp.cast_symbol(symbol)), nodes(native(symbol))
    assert len(emulated) > len(plain)


def test_a_chain_of_20000_nodes_is_lowered_and_stripped():
    node = Node("dot", "dot", inputs=[Entry(Node("null", "x")), Entry(Node("null", "w"))])
    for index in range(20_000):
        node = Node("tanh" if index % 4 == 0 else "relu", f"n{index}", inputs=[Entry(node)])
    graph = Graph([Entry(Node("dot", "last", inputs=[Entry(node), Entry(Node("null", "w2"))]))])
    low, plan = low_graph(graph, Policy(), "cpu")
    assert plan.num_low == 20_002
    assert [n.name for n in strip(low).nodes()] == [n.name for n in graph.nodes()]
