"""The emulation on a CPU decides as a GPU does: what computes in float16 there does so here, and nothing else."""

from __future__ import annotations

import mxnet as mx
import pytest
from mxnet import symbol as S
from mxnet.gluon.model_zoo import vision
from support.operators.case import CASES

from mxmp import Policy
from mxmp.precision.decide import decide
from mxmp.precision.graph import Graph, Node

POLICIES = [Policy(), Policy(norm="compute"), Policy(norm="float32")]
# Around the operator, in float16.
COPY = Node("_copy", "")
# What a CPU alone keeps in FP32, by a reason of its own.
CPU_ALONE = "fails on a CPU"


def differences(graph: Graph, policy: Policy) -> dict[str, str]:
    """Return the reasons for which operators are FP32 on one of the devices alone, by name."""
    on_a_cpu, on_a_gpu = (decide(graph, policy, device) for device in ("cpu", "gpu"))
    pairs = on_a_cpu.differences(on_a_gpu)
    return {name: (gpu if cpu.low else cpu).reason for name, (cpu, gpu) in pairs.items()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("op", CASES)
def test_an_operator_has_one_dtype_on_both_devices(op, policy):
    for case in CASES[op]:
        with mx.util.np_shape(case.empty or op.startswith("_np")):
            graph = case.graph(COPY)
        found = differences(graph, Policy(norm=policy.norm, low_ops=["_copy"] if op != "_copy" else []))
        assert all(CPU_ALONE in reason for reason in found.values()), case.name


NETWORKS = (
    "resnet18_v1",
    "resnet18_v2",
    "vgg11_bn",
    "mobilenet_v2_0_25",
    "densenet121",
    "inception_v3",
    "squeezenet1_0",
)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_same_dtypes_on_both_devices(name, policy):
    graph = Graph.from_symbol(getattr(vision, name)()(mx.sym.var("data")))
    assert differences(graph, policy) == {}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_attention_and_resampling_have_the_same_dtypes_on_both_devices(policy):
    x = S.FullyConnected(S.var("data"), num_hidden=16, flatten=False, name="first")
    x = S.batch_dot(S.Dropout(S.softmax(S.batch_dot(x, x, transpose_b=True))), x)
    x = S.take(S.LayerNorm(x), S.var("indices"), axis=1)
    x = S.contrib.BilinearResize2D(S.expand_dims(x, axis=1), height=8, width=8)
    x = S.UpSampling(S.contrib.AdaptiveAvgPooling2D(x, output_size=4), scale=3, sample_type="nearest")
    graph = Graph.from_symbol(S.FullyConnected(x, num_hidden=2, name="last"))
    assert differences(graph, policy) == {}
    assert {name for name, d in decide(graph, policy, "cpu").decisions.items() if d.low} >= {"first", "last"}


@pytest.mark.parametrize(("product", "on_a_gpu"), [(S.linalg.gemm2, False), (S.dot, True)])
def test_linear_algebra_is_fp32_on_a_gpu_though_low_ops_names_it(product, on_a_gpu):
    graph = Graph.from_symbol(product(S.var("a"), S.var("b"), name="product"))
    policy = Policy(low_ops=["_linalg_gemm2"])
    assert decide(graph, policy, "gpu").decisions["product"].low == on_a_gpu
    assert decide(graph, policy, "cpu").decisions["product"].low  # emulated
