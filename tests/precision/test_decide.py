"""Decisions: which node computes low, and why."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import autograd, gluon

import mxmp
from mxmp import Policy
from mxmp.precision.decide import check_policy, decide
from mxmp.precision.graph import Entry, Graph
from mxmp.precision.operators import Options
from mxmp.precision.plan import Plan, PlannedGraph
from mxmp.precision.rule_table import CUDA_BUILD_ONLY

S = mx.sym


def planned(symbol: mx.sym.Symbol, policy: Policy | None = None, device: str = "cpu", **kwargs) -> Plan:
    return decide(Graph.from_symbol(symbol), policy or Policy(), device, Options(**kwargs))


def low(plan: Plan) -> set[str]:
    return {name for name, decision in plan.decisions.items() if decision.low}


def reason(plan: Plan, name: str) -> str:
    return plan.decisions[name].reason


def stored(plan: Plan) -> set[str]:
    return set(plan.low_variables)


def conv(x: mx.sym.Symbol, name: str, **kwargs) -> mx.sym.Symbol:
    return S.Convolution(x, kernel=(1, 1), num_filter=4, name=name, **kwargs)


def block_net() -> mx.sym.Symbol:
    x = S.relu(conv(S.var("data"), "net_stage1_conv0"), name="net_stage1_relu0")
    x = conv(x, "net_stage10_conv0")
    return S.FullyConnected(x, num_hidden=2, name="net_dense0_fwd")


def test_matrix_operators_are_low_and_what_lies_between_follows():
    x = S.exp(S.relu(S.relu(conv(S.var("data"), "c"), name="follows"), name="too"), name="full")
    plan = planned(S.relu(S.relu(x, name="after_full"), name="still"))
    assert low(plan) == {"c", "follows", "too"}
    assert plan.num_low == 3
    assert "one of them is FP32" in reason(plan, "after_full")
    assert "exponential" in reason(plan, "full")


def test_a_follower_is_low_only_between_low_inputs():
    one, other = conv(S.var("data"), "c1"), conv(S.var("data"), "c2")
    both = S.elemwise_add(one, other, name="both")
    mixed = S.elemwise_add(both, S.var("skip"), name="mixed")
    joined = S.Concat(both, mixed, name="joined")
    plan = planned(S.Group([joined, conv(S.Concat(one, other, both, name="all"), "c3")]))
    assert low(plan) == {"c1", "c2", "both", "all", "c3"}


def test_a_follower_of_variables_alone_is_full():
    assert low(planned(S.relu(S.var("data"), name="r"))) == set()


def test_parameters_of_a_follower_have_no_vote():
    x = S.LeakyReLU(conv(S.var("data"), "c"), S.var("gamma"), act_type="prelu", name="prelu")
    assert low(planned(conv(x, "c2"))) == {"c", "prelu", "c2"}


def test_what_only_lacks_a_float16_kernel_holds_no_follower_in_fp32():
    """A resizing is FP32 for its gradient's sake; its output is between the values of its input."""
    one, other = conv(S.var("data"), "c1"), conv(S.var("data"), "c2")
    larger = S.contrib.BilinearResize2D(other, height=8, width=8, name="larger")
    both = S.relu(S.elemwise_add(one, larger, name="both"), name="relu")
    for device in ("cpu", "gpu"):
        assert low(planned(S.identity(conv(both, "c3"), name="head"), device=device)) == {
            *("c1", "c2", "both", "relu", "c3", "head")
        }
        # Nothing reads this relu in float16.
        assert low(planned(S.exp(S.relu(larger, name="relu")), device=device)) == {"c2"}
        # The resized tensor is FP32: its sum with a convolution's output may leave float16's range, as before.
        full = S.contrib.BilinearResize2D(S.exp(other), height=8, width=8)
        assert "both" not in low(planned(S.elemwise_add(one, full, name="both"), device=device))
        excluded = planned(both, Policy(exclude=["larger"]), device)
        assert low(excluded) == {"c1", "c2"}
    product = S.batch_dot(S.reshape(one, (0, 0, -1)), S.reshape(other, (0, 0, -1)), name="product")
    assert "sum" not in low(planned(S.elemwise_add(product, one, name="sum")))


def attention_weights(**others) -> mx.sym.Symbol:
    """Two parameters that a dense layer reads as one, as GluonNLP's attention joins its projections."""
    parts = [S.reshape(S.var(name), shape=(-1, 4), name=f"{name}_flat") for name in ("query", "key")]
    weight = S.Concat(*parts, dim=0, name="joined")
    layer = S.FullyConnected(S.var("data"), weight, num_hidden=8, no_bias=True, name="fc")
    return S.Group([layer, *(make(weight) for make in others.values())])


MOVED = {"query_flat", "key_flat", "joined", "fc"}


def test_parameters_that_are_moved_before_a_layer_reads_them_are_stored_low():
    plan = planned(attention_weights(), Policy(params="float16"), "gpu", parameters=["query", "key"])
    assert low(plan) == MOVED
    assert stored(plan) == {"query", "key"}
    later = planned(attention_weights(), Policy(params="float16"), "gpu", parameters=[], stored_low=["query", "key"])
    assert low(later) == MOVED


@pytest.mark.parametrize(
    ("policy", "parameters", "others"),
    [
        (Policy(params="float32"), ["query", "key"], {}),
        (Policy(params="float16"), ["query"], {}),
        (Policy(params="float16"), ["query", "key"], {"also FP32": S.exp}),
        (Policy(params="float16"), ["query", "key"], {"also an output": lambda weight: weight}),
        (Policy(params="float16", exclude=["fc"]), ["query", "key"], {}),
    ],
    ids=["stored in FP32", "no parameter", "read in FP32", "an output", "excluded"],
)
def test_parameters_that_are_moved_stay_fp32_where_rounding_would_show(policy, parameters, others):
    plan = planned(attention_weights(**others), policy, "gpu", parameters=parameters)
    assert low(plan) <= {"fc", "query_flat"}
    assert stored(plan) <= {"query"}


def test_a_moved_parameter_does_not_make_an_operator_low():
    x = conv(S.var("data"), "c") + S.reshape(S.var("position"), shape=(1, 4, 2, 2), name="moved")
    plan = planned(S.relu(x, name="r"), Policy(params="float16"), "gpu", parameters=["position"])
    assert low(plan) == {"c"}
    assert stored(plan) == set()


@pytest.mark.parametrize(("norm", "expected"), [("float32", {"c"}), ("compute", {"c", "bn", "r"})])
def test_norm_decides_where_batch_norm_computes(norm, expected):
    x = S.relu(S.BatchNorm(conv(S.var("data"), "c"), name="bn"), name="r")
    plan = planned(x, Policy(norm=norm))
    assert low(plan) == expected
    graph = PlannedGraph(Graph.from_symbol(x), plan)
    bn = next(n for n in graph.decisions if n.name == "bn")
    assert [graph.wants_low(bn, i) for i in range(5)] == [norm == "compute"] + [False] * 4
    assert [graph.is_low(Entry(bn, i)) for i in range(3)] == [norm == "compute", False, False]


def test_norm_compute_leaves_a_batch_norm_of_fp32_data_in_fp32():
    assert low(planned(S.BatchNorm(S.var("data"), name="bn"), Policy(norm="compute"))) == set()


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["net_stage1"], {"net_stage1_conv0", "net_stage1_relu0"}),
        (["*stage1_conv0"], {"net_stage1_conv0", "net_stage1_relu0"}),
        (["net_dense0"], {"net_dense0_fwd"}),
        (["*_fwd"], {"net_dense0_fwd"}),
        (["net_stage?_*"], {"net_stage1_conv0", "net_stage1_relu0"}),
        (["net_stage[0-9]*_conv0"], {"net_stage1_conv0", "net_stage1_relu0", "net_stage10_conv0"}),
        (["net"], {"net_stage1_conv0", "net_stage1_relu0", "net_stage10_conv0", "net_dense0_fwd"}),
    ],
)
def test_exclude_keeps_nodes_and_whole_blocks(patterns, kept):
    names = {"net_stage1_conv0", "net_stage1_relu0", "net_stage10_conv0", "net_dense0_fwd"}
    plan = planned(block_net(), Policy(exclude=patterns))
    assert low(plan) == names - kept
    assert plan.unmatched == ()


def test_patterns_that_match_nothing_are_kept_for_the_caller_to_tell():
    plan = planned(block_net(), Policy(exclude=["stage1", "net_dense0"]))
    assert plan.unmatched == ("stage1",)


def test_a_reason_names_the_pattern():
    assert "net_dense*" in reason(planned(block_net(), Policy(exclude=["net_dense*"])), "net_dense0_fwd")


def test_full_ops_and_low_ops_move_operators():
    symbol = S.exp(conv(S.var("data"), "c"), name="e")
    assert low(planned(symbol, Policy(full_ops=["Convolution"]))) == set()
    assert low(planned(symbol, Policy(low_ops=["exp"]))) == {"c", "e"}
    assert "full_ops" in reason(planned(symbol, Policy(full_ops=["Convolution"])), "c")


@pytest.mark.parametrize("op", ["SoftmaxOutput", "argmax", "_random_uniform", "Custom"])
def test_operators_that_cannot_run_low_are_refused_in_low_ops(op):
    with pytest.raises(ValueError, match=f"low_ops.*{op}.*cannot run"):
        check_policy(Policy(low_ops=[op]), "cpu")


@pytest.mark.parametrize("field", ["low_ops", "full_ops"])
@pytest.mark.parametrize("op", ["Convolutoin", "load", "Symbol", "__name__"])
def test_operators_that_mxnet_does_not_have_are_refused(field, op):
    """Of these names ``mx.sym`` has some, which are functions, classes and modules."""
    with pytest.raises(ValueError, match=rf"{field}=\['{op}'\].*no operator"):
        check_policy(Policy(**{field: [op]}), "cpu")


@pytest.mark.parametrize("op", ["_npi_add", "_contrib_ROIAlign", "_npi_backward_polyval", *sorted(CUDA_BUILD_ONLY)])
def test_operators_that_mxnet_registers_are_accepted_and_those_of_its_cuda_build(op):
    check_policy(Policy(full_ops=[op]), "cpu")


def test_bfloat16_on_a_gpu_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"no bfloat16 kernels for a GPU.*float16"):
        planned(block_net(), Policy("bfloat16"), "gpu")


def test_bfloat16_runs_low_only_where_the_cpu_has_a_sound_kernel():
    x = S.Deconvolution(conv(S.var("data"), "c"), kernel=(2, 2), num_filter=2, name="deconv")
    x = S.transpose(conv(x, "c2"), name="t")
    plan = planned(S.Dropout(x, name="drop"), Policy("bfloat16"))
    assert low(plan) == {"c", "c2"}
    for name in ("deconv", "t"):
        assert "no sound bfloat16 CPU kernel" in reason(plan, name)


def test_integers_stay_as_the_user_asked():
    ids = S.Cast(S.var("data"), dtype="int32", name="ids")
    x = S.FullyConnected(S.Embedding(ids, input_dim=9, output_dim=4, name="emb"), num_hidden=2, name="fc")
    direct = S.dot(S.var("codes", dtype="int32"), S.var("other"), name="dot")
    plan = planned(S.Group([x, direct]))
    assert low(plan) == {"fc"}
    assert "int32" in reason(plan, "dot")


def test_float64_and_sparse_tensors_are_left_alone():
    wide = S.dot(S.Cast(S.var("data"), dtype="float64"), S.var("w"), name="wide")
    sparse = S.dot(S.var("csr", stype="csr"), S.var("w"), name="sparse")
    plan = planned(S.Group([wide, sparse]))
    assert low(plan) == set()
    assert "float64" in reason(plan, "wide")
    assert "sparse" in reason(plan, "sparse")


def test_heads_with_several_outputs_can_be_kept_for_their_names():
    x = S.SliceChannel(conv(S.var("data"), "c"), num_outputs=2, name="split")
    assert low(planned(x)) == {"c", "split"}
    assert low(planned(x, keep_output_names=True)) == {"c"}


def params_net() -> mx.sym.Symbol:
    tied, mixed = S.var("tied", shape=(4, 4)), S.var("mixed", shape=(4, 4))
    x = S.BatchNorm(conv(S.var("data"), "c"), name="bn")
    for index, weight in enumerate([tied, mixed, tied]):
        x = S.FullyConnected(x, weight, num_hidden=4, flatten=index == 0, name=f"fc{index}")
    return S.Group([x, S.exp(mixed)])


def test_params_float16_stores_what_only_low_operators_read():
    expected = {"c_weight", "c_bias", "tied", "fc0_bias", "fc1_bias", "fc2_bias"}
    assert stored(planned(params_net(), Policy(params="float16"))) == expected
    assert stored(planned(params_net(), Policy())) == set()
    assert stored(planned(params_net(), Policy(), "gpu")) == expected
    assert stored(planned(params_net(), Policy(params="float32"), "gpu")) == set()
    assert stored(planned(params_net(), Policy("bfloat16"))) == set()


def test_params_float16_stores_only_what_the_door_calls_parameters():
    plan = planned(params_net(), Policy(params="float16"), parameters={"tied", "mixed", "bn_gamma"})
    assert stored(plan) == {"tied"}


def test_a_weight_that_is_an_output_too_is_not_stored_low():
    weight = S.var("weight")
    dense = S.FullyConnected(S.var("data"), weight, num_hidden=4, no_bias=True, name="fc")
    assert stored(planned(S.Group([dense, weight]), Policy(params="float16"))) == set()


def test_inputs_and_excluded_weights_are_not_stored_low():
    x = S.dot(S.var("data"), S.var("other"), name="d")
    plan = planned(S.Group([x, block_net()]), Policy(params="float16", exclude=["net_stage10"]))
    assert stored(plan) == {f"net_{n}_{p}" for n in ("stage1_conv0", "dense0_fwd") for p in ("weight", "bias")}


@pytest.mark.parametrize(
    ("shapes", "policy", "low"),
    [
        ({"data": (16, 4096)}, "bfloat16", False),
        ({"data": (16, 64, 8, 8)}, "bfloat16", False),
        ({"data": (96, 4096)}, "bfloat16", True),
        ({"data": (16, 1024)}, "bfloat16", True),
        ({"data": (15, 1024)}, "bfloat16", False),
        ({"data": (15, 128)}, "bfloat16", True),
        ({"data": (16, 4096)}, "bfloat16,low_ops=FullyConnected", False),
        ({"data": (16, 4096)}, "float16", True),
        ({}, "bfloat16", True),
        ({"elsewhere": (16, 4096)}, "bfloat16", True),
        ({"data": (16, 4096), "mask": (3, 3)}, "bfloat16", True),  # they do not fit: bind will say so
    ],
)
def test_a_large_product_of_few_rows_trains_in_fp32_in_bfloat16(shapes, policy, low):
    symbol = mx.sym.FullyConnected(mx.sym.var("data") * mx.sym.var("mask"), name="fc", num_hidden=4096)
    shapes = {"mask": shapes["data"], **shapes} if "data" in shapes else shapes
    plan = decide(Graph.from_symbol(symbol), mxmp.Policy.parse(policy), "cpu", Options(training_shapes=shapes))
    assert plan.decisions["fc"].low is low
    assert ("96 rows" in plan.decisions["fc"].reason) is not low


def test_both_frontends_train_a_large_product_of_few_rows_in_fp32_and_predict_in_bfloat16():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2048), gluon.nn.Dense(4096))
    net.initialize()
    mxmp.convert(net, "bfloat16")
    data = mx.nd.ones((2, 8))
    with autograd.record():
        net(data)
    net(data)
    hidden = mx.sym.FullyConnected(mx.sym.var("data"), name="hidden", num_hidden=2048)
    symbol = mx.sym.FullyConnected(hidden, name="fc", num_hidden=4096)
    for training in (True, False):
        module = mxmp.Module(symbol, label_names=None, policy="bfloat16", context=mx.cpu())
        module.bind([("data", (2, 8))], for_training=training)
        (graph,) = [each for each in mxmp.explain(net).graphs if each.training is training]
        assert graph.plan.num_low == module.plan.num_low == (1 if training else 2)


@pytest.mark.parametrize(
    ("field", "alias", "name"), [("full_ops", "concat", "Concat"), ("low_ops", "flatten", "Flatten")]
)
def test_an_alias_that_no_graph_has_is_refused_and_the_name_is_said(field, alias, name):
    with pytest.raises(ValueError, match=f"MXNet calls this operator '{name}'"):
        check_policy(Policy(**{field: [alias]}), "cpu")
    check_policy(Policy(**{field: [name]}), "cpu")
