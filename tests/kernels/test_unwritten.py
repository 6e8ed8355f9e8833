"""Each operator's gradient where a graph asks for more: added to an array, between others in memory that MXNet may use
again, or of a result that a residual reads, too.

The operators are FP32, in a graph of mxmp's, against MXNet's own gradient where nothing else is asked for. Where there
is a GPU they run on it: bash scripts/simgpu.sh tests/kernels/test_unwritten.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
import pytest

import mxmp
from mxmp.host.versions import GRAPH_ATTRIBUTES
from mxmp.precision.graph import Entry, Graph, Node

IS_GPU = mx.context.num_gpus() > 0
CTX = mx.gpu() if IS_GPU else mx.cpu()
DATA, SQUARE, IMAGES = (3, 4), (4, 4), (2, 4, 6, 6)


class Case(NamedTuple):
    """One call; an input is a shape, or values of which nobody asks a gradient."""

    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, str]
    outputs: int
    states: int
    least: float  # of the inputs' values
    square: str  # "definite": the first input is positive definite


CASES: list[Case] = []


def add(
    ops: str, *inputs: Any, outputs: int = 1, states: int = 0, least: float = 0.2, square: str = "", **attrs: Any
) -> None:
    texts = {name: str(value) for name, value in attrs.items()}
    CASES.extend(Case(op, inputs, texts, outputs, states, least, square) for op in ops.split())


def fixed(*values: Any) -> np.ndarray:
    return np.array(values, "float32")


# -- pointwise ----------------------------------------------------------------------------------------
add(
    """exp expm1 cosh sinh log log10 log1p log2 square rsqrt reciprocal rcbrt sqrt cbrt arcsin arccos arctanh tan sin
    cos erfinv degrees radians gamma gammaln floor ceil round rint fix trunc sign abs arctan arcsinh erf sigmoid
    softsign tanh relu hard_sigmoid _contrib_round_ste _contrib_sign_ste _contrib_div_sqrt_dim _copy negative MakeLoss
    make_loss _npi_exp _npi_expm1 _npi_cosh _npi_sinh _npi_log _npi_log10 _npi_log1p _npi_log2 _npi_square _npi_sqrt
    _npi_reciprocal _npi_cbrt _npi_arcsin _npi_arccos _npi_arctanh _npi_tan _npx_erfinv _npi_sin _npi_cos _npi_degrees
    _npx_gamma _npx_gammaln _npi_floor _npi_rint _npi_nan_to_num""",
    DATA,
)
add("arccosh _npi_arccosh", DATA, least=1.2)
add("elemwise_add elemwise_sub elemwise_mul elemwise_div _power _hypot _mod _maximum _minimum", DATA, DATA)
for _other in (DATA, (1, 4), (3, 1)):
    add("broadcast_add broadcast_mul broadcast_div broadcast_power broadcast_hypot broadcast_mod", DATA, _other)
    add("broadcast_maximum _npi_power _npi_hypot _npi_true_divide _npi_mod _npi_arctan2 _npi_ldexp", DATA, _other)
add(
    """_power_scalar _rpower_scalar _hypot_scalar _rdiv_scalar _mod_scalar _rmod_scalar _npi_power_scalar smooth_l1
    _npi_rpower_scalar _npi_hypot_scalar _npi_rtrue_divide_scalar _npi_mod_scalar _npi_ldexp_scalar _npi_rldexp_scalar
    _npx_smooth_l1 _contrib_gradientmultiplier""",
    DATA,
    scalar=1.7,
)
add("clip", DATA, a_min=0.3, a_max=0.7)
add("_contrib_quadratic", DATA, a=1, b=2, c=3)
for _kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
    add("Activation", DATA, act_type=_kind)
for _kind in ("leaky", "elu", "selu", "gelu"):
    add("LeakyReLU", DATA, act_type=_kind)
add("LeakyReLU", IMAGES, (4,), act_type="prelu")
add("ElementWiseSum", DATA, DATA, num_args=2)
add("where", (np.arange(12).reshape(DATA) % 2).astype("float32"), DATA, DATA)

# -- sums, norms and softmax --------------------------------------------------------------------------
for _over in ({}, {"axis": 1}, {"axis": "(0, 1)", "keepdims": True}):
    add("sum nansum mean prod nanprod max min _np_sum _np_prod _npi_mean", DATA, **_over)
    for _order in (1, 2):
        add("norm", DATA, ord=_order, **_over)
add("_npi_std _npi_var", DATA, axis=1)
add("moments", DATA, axes="(1,)", outputs=2)
add("_np_trace diag", SQUARE)
add("_np_cumsum", DATA, axis=1)
add("softmax log_softmax softmin _npx_softmax _npx_log_softmax", DATA, axis=-1)
add("softmax", DATA, axis=0)
add("SoftmaxActivation", DATA)
add("SoftmaxActivation", IMAGES, mode="channel")
add("LayerNorm", DATA, (4,), (4,))
add("LayerNorm", IMAGES, (4,), (4,), axis=1)
add("GroupNorm", IMAGES, (2,), (2,), num_groups=2)
add("InstanceNorm", IMAGES, (4,), (4,))
add("BatchNorm BatchNorm_v1", IMAGES, (4,), (4,), states=2, fix_gamma=False)
for _mode in ("instance", "channel", "spatial"):
    add("L2Normalization", IMAGES, mode=_mode)
add("LRN", IMAGES, nsize=3)

# -- losses -------------------------------------------------------------------------------------------
add("softmax_cross_entropy SoftmaxOutput SVMOutput", DATA, fixed(0, 1, 3))
add("LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput", DATA, np.full(DATA, 0.5, "float32"))
add("CTCLoss", (5, 2, 4), fixed([1, 2], [3, 1]))

# -- matrices -----------------------------------------------------------------------------------------
add("FullyConnected", DATA, (5, 4), (5,), num_hidden=5)
add("dot", DATA, SQUARE)
add("batch_dot", (2, 3, 4), (2, 4, 5))
add("_linalg_gemm", SQUARE, SQUARE, SQUARE)
add("_linalg_gemm2 _linalg_trmm _linalg_trsm", SQUARE, SQUARE)
add("_linalg_syrk _linalg_extractdiag _linalg_extracttrian", SQUARE)
add("_linalg_potrf _linalg_potri _linalg_det _linalg_inverse _linalg_sumlogdiag", SQUARE, square="definite")
add("_npi_cholesky", SQUARE, square="definite")
add("_npi_tensorinv", SQUARE, square="definite", ind=1)
add("_linalg_slogdet", SQUARE, square="definite", outputs=2)
add("_linalg_syevd _npi_eigh", SQUARE, square="definite", outputs=2)
add("_npi_solve", SQUARE, (4, 2), square="definite")
add("_linalg_makediag", DATA)
add("_linalg_maketrian", (2, 10))
add("_linalg_gelqf", (3, 5), outputs=2)
add("_npi_svd", (3, 5), outputs=3)
add("_npi_einsum", DATA, SQUARE, num_args=2, subscripts="ij,jk->ik")
add("_contrib_interleaved_matmul_selfatt_qk", (3, 2, 12), heads=2)
add("_contrib_interleaved_matmul_selfatt_valatt", (3, 2, 12), (4, 3, 3), heads=2)
add("_contrib_interleaved_matmul_encdec_qk", (3, 2, 4), (3, 2, 8), heads=2)
add("_contrib_interleaved_matmul_encdec_valatt", (3, 2, 8), (4, 3, 3), heads=2)
add("RNN", (3, 2, 5), (3 * 4 * 11,), (1, 2, 4), mode="gru", state_size=4, num_layers=1)
add("RNN", (3, 2, 5), (4 * 4 * 11,), (1, 2, 4), (1, 2, 4), mode="lstm", state_size=4, num_layers=1)

# -- images -------------------------------------------------------------------------------------------
_THREE = {"kernel": (3, 3), "num_filter": 3, "pad": (1, 1)}
_REGIONS = fixed([0, 0, 0, 4, 4], [1, 1, 1, 5, 5])
add("Convolution Convolution_v1", IMAGES, (3, 4, 3, 3), (3,), **_THREE)
add("Deconvolution", IMAGES, (4, 3, 3, 3), no_bias=True, **_THREE)
add("_contrib_DeformableConvolution", IMAGES, (2, 18, 6, 6), (3, 4, 3, 3), (3,), **_THREE)
add("Correlation", IMAGES, IMAGES, pad_size=4)
for _kind in ("max", "avg"):
    add("Pooling Pooling_v1", IMAGES, kernel=(2, 2), stride=(2, 2), pool_type=_kind)
add("BilinearSampler", IMAGES, (2, 2, 5, 5))
add("GridGenerator", (2, 6), transform_type="affine", target_shape=(5, 5))
add("SpatialTransformer", IMAGES, (2, 6), target_shape=(5, 5), transform_type="affine", sampler_type="bilinear")
add("ROIPooling _contrib_ROIAlign", IMAGES, _REGIONS, pooled_size=(2, 2), spatial_scale=1.0)
add("_contrib_PSROIPooling", IMAGES, _REGIONS, output_dim=1, pooled_size=2, spatial_scale=1.0)
add("im2col", IMAGES, kernel=(3, 3), pad=(1, 1))
add("col2im", (2, 36, 36), kernel=(3, 3), pad=(1, 1), output_size=(6, 6))
add("UpSampling", IMAGES, scale=2, sample_type="nearest", num_args=1)
add("_contrib_BilinearResize2D", IMAGES, height=9, width=9)
add("_contrib_AdaptiveAvgPooling2D", IMAGES, output_size=(2, 2))
add("Crop", IMAGES, h_w=(3, 3), num_args=1)
for _mode in ("constant", "edge", "reflect"):
    add("Pad", IMAGES, mode=_mode, pad_width=(0, 0, 0, 0, 1, 1, 1, 1))

# -- moving values ------------------------------------------------------------------------------------
add("Embedding", fixed(0, 2, 1, 2), (5, 3), input_dim=5, output_dim=3)
add("topk", DATA, ret_typ="value", k=2)
add("pick", DATA, fixed(0, 1, 3), axis=1)
add("take", DATA, fixed(0, 2, 2))
add("gather_nd", DATA, fixed([0, 2, 2], [1, 1, 1]))
add("scatter_nd", (3,), fixed([0, 2, 1], [1, 1, 1]), shape=(3, 4))
add("SequenceMask SequenceLast SequenceReverse Flatten", IMAGES)
add("stack Concat", DATA, DATA, num_args=2)
add("tile", DATA, reps=(2, 2))
add("repeat", DATA, repeats=2, axis=1)
add("reverse expand_dims", DATA, axis=1)
add("depth_to_space space_to_depth", IMAGES, block_size=2)
add("SwapAxis", DATA, dim1=0, dim2=1)
add("transpose squeeze", DATA)
add("slice", DATA, begin=(0, 1), end=(2, 3))
add("slice_like", DATA, np.zeros((2, 2), "float32"))
add("SliceChannel", DATA, outputs=2, num_outputs=2)
add("_split_v2", DATA, outputs=2, indices=(0, 2), axis=1)
add("broadcast_axis", (3, 1), axis=1, size=4)
add("broadcast_like", (3, 1), np.zeros(DATA, "float32"))
add("_np_max _np_min", DATA, axis=1)
add("_npi_average", DATA, DATA, axis=1, returned=False)
add("_npi_matmul _np_dot", DATA, SQUARE)
add("_npi_tensordot_int_axes", DATA, SQUARE, axes=1)
add("_npi_tensordot", DATA, SQUARE, a_axes_summed=(1,), b_axes_summed=(0,))
add("_npi_absolute _npi_negative _npi_tanh _npi_arctan _npi_arcsinh _npi_radians _npx_relu _npx_sigmoid", DATA)
add("_npi_add _npi_subtract _npi_multiply _npi_copysign", DATA, DATA)
add("_npi_add_scalar _npi_rsubtract_scalar _npi_multiply_scalar _npi_true_divide_scalar", DATA, scalar=1.7)
add("_npi_diff", DATA, n=1, axis=-1)
add("_npi_ediff1d", (12,), to_begin_arr_given=False, to_end_arr_given=False)
add("_npi_flip", DATA, axis="(1,)")
add("_npi_rot90", DATA, k=1, axes=(0, 1))
add("_np_roll", DATA, shift=1, axis=1)
add("_np_moveaxis", DATA, source="(0,)", destination="(1,)")
add("_npi_hsplit", DATA, outputs=2, indices=(0, 2), axis=1)
add("_npi_dsplit", (2, 3, 4), outputs=2, indices=(0, 2), axis=2)
add("_np_diagonal _np_diagflat _npi_tril", SQUARE)
add("_npi_where", np.ones((3, 1), bool), DATA, DATA)
add("_npi_where_lscalar _npi_where_rscalar", np.ones((3, 1), bool), DATA, scalar=0.5)
add("_npi_vstack _npi_column_stack", DATA, DATA, num_args=2)
add("_npi_concatenate _npi_stack", DATA, DATA, axis=0, num_args=2)
add("_npi_pad", DATA, pad_width=((1, 1), (0, 2)), mode="constant")
add("_contrib_index_copy", DATA, fixed(0, 2), (2, 4))
add("_random_pdf_normal _random_pdf_gamma", DATA, (3,), (3,))


def drawn(case: Case) -> dict[str, np.ndarray]:
    rng, found = np.random.RandomState(0), {}
    for number, given in enumerate(case.inputs):
        is_shape = isinstance(given, tuple)
        found[f"in{number}"] = rng.uniform(case.least, case.least + 0.6, given).astype("float32") if is_shape else given
    if case.square:
        matrix = found["in0"]
        found["in0"] = matrix @ matrix.T / 4 + np.diag(np.arange(2.0, 2 + len(matrix))).astype("float32")
    return found


def graph(case: Case, place: str = "") -> Graph:
    """The operator; ``place``: "inside", between others, or where a sum of it and of a variable has it: "first"."""

    def once(entry: Entry, name: str) -> Entry:
        """Its result and its gradient have arrays that are none of the caller's."""
        return Entry(Node("_mul_scalar", name, {"scalar": "1.0"}, [entry]))

    given = [Entry(Node("null", f"in{number}")) for number in range(len(case.inputs))]
    if place == "inside":
        given = [once(e, f"{e.node.name}_once") if isinstance(i, tuple) else e for e, i in zip(given, case.inputs)]
    states = [Entry(Node("null", f"state{number}")) for number in range(case.states)]
    node, heads = Node(case.op, "op", dict(case.attrs), [*given, *states]), []
    for number in range(case.outputs):
        head = Entry(node, number)
        if place in ("first", "second"):
            other = once(Entry(Node("null", f"beside{number}")), f"beside{number}_once")
            read = [head, other] if place == "first" else [other, head]
            head = Entry(Node("elemwise_add", f"sum{number}", {}, read))
        heads.append(once(head, f"out{number}_once") if place else head)
    return Graph(heads, GRAPH_ATTRIBUTES)


def gradients(case: Case, *, ours: bool, place: str = "", start: float | None = None) -> dict[str, np.ndarray]:
    """By name; added to arrays of ``start``, if one is given."""
    symbol = graph(case, place).to_symbol()
    if ours:
        side = mx.sym.FullyConnected(mx.sym.var("side"), num_hidden=3, no_bias=True, name="low")
        policy = mxmp.Policy("float16", params="float32", exclude=("op",))
        symbol = mxmp.cast_symbol(mx.sym.Group([*symbol, side]), policy, ctx=CTX)
    values = {**drawn(case), "side": np.ones((2, 4), "float32")}
    names = symbol.list_arguments()
    shapes, _, states = symbol.infer_shape(**{name: values[name].shape for name in names if name in values})
    arrays = {n: mx.nd.array(values.get(n, np.zeros(s, "float32")), ctx=CTX) for n, s in zip(names, shapes)}
    shaped = [f"in{number}" for number, given in enumerate(case.inputs) if isinstance(given, tuple)]
    asked = [name for name in names if name in shaped or name.startswith("beside")]
    grads = {name: mx.nd.full(arrays[name].shape, start or 0, ctx=CTX) for name in asked}
    how = "write" if start is None else "add"
    requests = {name: how if name in grads else "null" for name in names}
    executor = symbol.bind(CTX, arrays, grads, requests, [mx.nd.ones(shape, ctx=CTX) for shape in states])
    outputs, rng = executor.forward(is_train=True), np.random.RandomState(1)
    executor.backward([mx.nd.array(rng.normal(0, 1, out.shape), ctx=CTX, dtype=out.dtype) for out in outputs])
    return {name: grad.asnumpy() for name, grad in grads.items()}


def heads_of(case: Case) -> dict[str, np.ndarray]:
    """What each output's gradient is, and so that of what is added to it."""
    symbol, rng = graph(case).to_symbol(), np.random.RandomState(1)
    shapes = symbol.infer_shape(**{name: value.shape for name, value in drawn(case).items()})[1]
    return {f"beside{number}": rng.normal(0, 1, shape).astype("float32") for number, shape in enumerate(shapes)}


def called(case: Case) -> str:
    shapes = ["x".join(map(str, np.shape(i) if isinstance(i, np.ndarray) else i)) for i in case.inputs]
    return " ".join([case.op, *shapes, *(f"{name}={value}" for name, value in case.attrs.items())])


# cuSolver and some calls of cuBLAS, of which the stubs have no numbers.
NOT_COMPUTED = """
    _linalg_syrk _linalg_trmm _linalg_trsm _linalg_potrf _linalg_potri _linalg_det _linalg_inverse _linalg_slogdet
    _linalg_gelqf _linalg_syevd _npi_cholesky _npi_eigh _npi_solve _npi_svd _npi_tensorinv
"""


@pytest.mark.parametrize(
    "case", [case for case in CASES if not (IS_GPU and case.op in NOT_COMPUTED.split())], ids=called
)
def test_a_gradient_is_added_and_shared_as_it_should_be(case):
    with mx.util.np_shape(case.op.startswith("_np")):
        want = gradients(case, ours=False)
        added = gradients(case, ours=True, start=3.0)
        placed = {place: gradients(case, ours=True, place=place) for place in ("inside", "first", "second")}
        heads = heads_of(case)
    for name, grad in want.items():
        near = {"rtol": 1e-3, "atol": 1e-4 * max(np.abs(grad).max(), 1)}
        np.testing.assert_allclose(added[name], 3 + grad, **near, err_msg=f"added, {name}")
        for place, found in placed.items():
            np.testing.assert_allclose(found[name], grad, **near, err_msg=f"{place}, {name}")
    for name, head in heads.items():
        for place in ("first", "second"):
            np.testing.assert_allclose(placed[place][name], head, rtol=1e-5, err_msg=f"{place}, {name}")
