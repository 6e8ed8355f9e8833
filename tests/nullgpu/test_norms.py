"""The casts around BatchNorm are inside cuDNN's kernel: what it is called with, and what that saves.

So are those around softmax and LayerNorm inside MXNet's kernels, where MXNET_SAFE_ACCUMULATION is set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import mxnet as mx
import pytest
from gpu.null.networks import FAMILIES
from gpu.null.record import Record, recording
from gpu.null.training import AMP, FP32, Training
from mxnet import autograd
from mxnet.gluon import nn

import mxmp
from mxmp.kernels.fit import SWITCH
from mxmp.precision.safe_sums import VARIABLE

from .checks import HALF, plain_float16_sums

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("User", "Runtime")]
TRAINED = ("cudnnBatchNormalizationForwardTraining", "cudnnBatchNormalizationBackward")
INFERRED = "cudnnBatchNormalizationForwardInference"


def trained(policy: str, **options: Any) -> Record:
    """Return the record of a step of a convolution, a BatchNorm with these options, relu and a convolution."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=3, use_bias=False), nn.BatchNorm(in_channels=8, **options))
    net.add(nn.Activation("relu"), nn.Conv2D(4, 3, in_channels=8))
    net.initialize(ctx=mx.gpu())
    mxmp.convert(net, policy)
    net.hybridize()
    x = mx.nd.ones((2, 3, 8, 8), ctx=mx.gpu())
    with recording() as record:
        with autograd.record():
            out = net(x)
        out.backward()
        net(x).wait_to_read()
    assert not record.impossible
    return record


def dtypes(record: Record) -> dict[str, tuple[str, str]]:
    """Return the dtypes of the data and of the parameters in each of cuDNN's calls for BatchNorm."""
    found = {}
    for event in record.named("cudnnBatchNormalization"):
        found[event.name] = tuple(event.details[key].split("[")[0] for key in ("x", "parameters"))
    return found


def test_cudnn_reads_float16_beside_fp32_parameters():
    calls = dtypes(trained("float16"))
    assert calls == dict.fromkeys((*TRAINED, INFERRED), ("f16", "f32"))


@pytest.mark.parametrize("how", ["words", "switch"])
def test_in_words_or_by_the_switch_cudnn_reads_fp32_between_casts(how, monkeypatch):
    if how == "switch":
        monkeypatch.setenv(SWITCH, "fp32_inside_the_kernel")
    record = trained("float16" if how == "switch" else "norm=float32")
    assert dtypes(record) == dict.fromkeys((*TRAINED, INFERRED), ("f32", "f32"))
    assert len(record.casts) > len(trained("float16-fast").casts) + 3


@pytest.mark.parametrize("policy", ["float16", "float16-fast"])
@pytest.mark.parametrize("options", [{"use_global_stats": True}, {"cudnn_off": True}], ids=str)
def test_mxnets_own_kernel_of_batch_norm_gets_fp32_but_for_norm_compute(options, policy):
    """With half_t it rounds gamma, beta, the mean and the terms of its backward's sums."""
    if "cudnn_off" in options:  # Gluon's layer has no such argument
        options = {}
        record = symbolic(policy, cudnn_off=True)
    else:
        record = trained(policy, **options)
    kernels = record.named("BatchNormalizationUpdateOutput", "BatchNormalizationBackwardKernel")
    assert kernels
    assert {"half" in event.name for event in kernels} == {policy == "float16-fast"}


def symbolic(policy: str, **attrs: Any) -> Record:
    x = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=8, no_bias=True)
    x = mx.sym.Convolution(mx.sym.BatchNorm(x, **attrs), kernel=(3, 3), num_filter=4)
    bound = mxmp.cast_symbol(x, policy, ctx=mx.gpu()).simple_bind(mx.gpu(), data=(2, 3, 8, 8))
    with recording() as record:
        bound.forward(is_train=True)
        bound.backward([mx.nd.ones(bound.outputs[0].shape, ctx=mx.gpu())])
    return record


def test_squeeze_and_excitation_averages_by_cudnn():
    training = Training(FAMILIES["se_resnet18_v1"](), "float16")
    with recording() as record:
        training.run(1)
    assert not record.named("adaptiveaverage")
    assert not plain_float16_sums(record)
    assert not [event for event in record.named("cudnnPooling") if event.dtypes != {"f16"}]


def figures_of(name: str, how: str, batch: int, size: int, **variables: str) -> dict[str, Any]:
    """Return the figures of one step, from a process of its own with these environment variables."""
    command = [sys.executable, "-m", "gpu.null.figures", name, "--json", "--how", how]
    command += [] if not batch else ["--batch", str(batch), "--size", str(size)]
    run = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


NETWORKS = {
    "resnet18_v1b": 0.7,
    "resnet50_v1b": 0.7,
    "se_resnet18_v1": 0.7,
    "gluon.densenet121": 0.6,
    "mobilenetv2_1.0": 0.6,
    "resnet50_v2": 0.65,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_needs_less_memory_and_about_as_many_launches(name, fusion):
    fp32, found = (figures_of(name, how, 16, 224) for how in (FP32, "float16"))
    assert found["peak_bytes"] <= NETWORKS[name] * fp32["peak_bytes"]
    assert found["launches"] <= 1.1 * fp32["launches"] + 12
    assert found["step_launches"] <= fp32["step_launches"] + 15
    assert found["casts"] <= 4


def test_bert_needs_less_memory_than_fp32_and_little_more_than_all_in_float16(fusion):
    """Softmax and LayerNorm in float16 throughout, wrong as their sums are, would be 0.74 of FP32's."""
    everything = "compute=float16,low_ops=softmax;LayerNorm"
    fp32, amp, found, least = (figures_of("bert_4_base", how, 0, 0) for how in (FP32, AMP, "float16", everything))
    assert found["peak_bytes"] <= 0.82 * fp32["peak_bytes"]
    assert found["peak_bytes"] <= 1.11 * least["peak_bytes"]
    assert least["peak_bytes"] > 0.7 * fp32["peak_bytes"]
    assert found["launches"] <= 1.25 * fp32["launches"]
    assert found["peak_bytes"] <= amp["peak_bytes"]
    assert found["bytes_cast"] <= amp["bytes_cast"]


def test_bert_with_safe_accumulation_launches_what_fp32_does(fusion):
    """Its logits and their loss, which are FP32, need a fifth of the memory."""
    fp32, found = (figures_of("bert_4_base", how, 0, 0, **{VARIABLE: "1"}) for how in (FP32, "float16-fast"))
    assert found["peak_bytes"] <= 0.73 * fp32["peak_bytes"]
    assert found["launches"] <= 1.1 * fp32["launches"] + 12
    assert found["step_launches"] <= fp32["step_launches"] + 15
    assert found["casts"] <= 15


KERNELS = (
    "softmax_stride1_compute_kernel<.*softmax_fwd, false, (?P<sums>\\w+), \\w+, (?P<data>[\\w:]+),",
    "softmax_stride1_grad_kernel<.*softmax_bwd, 1, false, (?P<sums>\\w+), \\w+, (?P<data>[\\w:]+),",
    "LayerNormFusedForwardKernelContig<(?P<sums>\\w+), (?P<data>[\\w:]+),",
    "LayerNormFusedBackwardKernel_PartGammaBeta<(?P<sums>\\w+), (?P<data>[\\w:]+)>",
    "LayerNormFusedBackwardKernel_GammaBeta<false, false, (?P<sums>\\w+), (?P<data>[\\w:]+)>",
    "LayerNormFusedBackwardKernel_Data<4, false, (?P<sums>\\w+), (?P<data>[\\w:]+)>",
)


def test_with_safe_accumulation_softmax_and_layer_norm_read_float16_and_sum_in_fp32(monkeypatch):
    """The first LayerNorm and the loss read FP32, which MXNet then sums in float64."""
    monkeypatch.setenv(VARIABLE, "1")
    training = Training(FAMILIES["bert"](), "float16-fast")
    with recording() as record:
        training.run(1)
    for kernel in KERNELS:
        found = [re.search(kernel, event.name) for event in record.launches]
        types = {(each["sums"], each["data"]) for each in found if each}
        assert ("float", HALF) in types
        assert types <= {("float", HALF), ("double", "float")}
    assert not plain_float16_sums(record)
    assert not record.impossible
