"""``advise`` against hand counts of known networks, and what it says of shapes that miss the Tensor Cores."""

from __future__ import annotations

from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from kit.flops import fc, language_model
from mxnet import gluon
from mxnet.gluon import nn

import mxmp
from mxmp.diagnose import advise
from mxmp.diagnose.advising.advice import Padding
from mxmp.diagnose.advising.gpus import GPUS

ROOT = Path(__file__).parents[3]
S = mx.sym
X = S.var("data")

# -- Hand counts ------------------------------------------------------------------------------------


def resnet50_macs():
    """By the paper's table 1 (He et al. 2016), with the stride in the 3x3 convolutions, as in v1b."""
    macs = 112**2 * 64 * 7**2 * 3
    channels, size = 64, 56
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        out = size // stride
        macs += size**2 * channels * width + out**2 * width * (9 * width + 4 * width)
        macs += out**2 * channels * 4 * width  # the shortcut
        macs += (blocks - 1) * out**2 * (4 * width * width + 9 * width**2 + width * 4 * width)
        channels, size = 4 * width, out
    return macs + 2048 * 1000


def test_resnet50():
    model_zoo = pytest.importorskip("gluoncv.model_zoo", reason="needs GluonCV: pip install 'mxmp[vision]'")
    found = advise(model_zoo.get_model("resnet50_v1b"), (8, 3, 224, 224))
    assert found.flops == 8 * 2 * resnet50_macs()
    assert round(resnet50_macs() / 1e9, 2) == 4.09  # published: torchvision, resnet50, GFLOPS (multiply-adds)
    assert len(found.matrices) == 54
    assert found.tensor_share == 1
    (first,) = [matrix for matrix in found.matrices if matrix.paddings]
    assert first.paddings == (Padding("input channels", 3, 4),)
    assert first.padding_cost == pytest.approx(1 / 3)
    assert found.unknown == ()


def bert_flops(batch, tokens, units=768, layers=12):
    """Per layer Q, K and V and the projection (4 units^2), two layers of four times the width, and two products of
    attention; the pooler at the end."""
    layer = batch * tokens * units**2 * (4 + 2 * 4) + 2 * batch * tokens**2 * units
    return 2 * (layers * layer + batch * units**2)


def test_bert_base():
    pytest.importorskip("gluonnlp", reason="needs GluonNLP: pip install 'mxmp[nlp]'")
    from support.zoo.language import pretrained_not

    net = pretrained_not("bert_12_768_12", dropout=0, use_decoder=False, use_classifier=False)
    found = advise(net, (8, 128), (8, 128), (8,))
    assert found.flops == bert_flops(8, 128)
    # Published: 22.5 GFLOPs at 128 tokens (Sun et al., MobileBERT, ACL 2020, table 4), embeddings' work included.
    assert bert_flops(1, 128) / 1e9 == pytest.approx(22.5, rel=0.01)
    assert len(found.matrices) == 12 * 6 + 1
    assert found.fitting_share == 1
    assert found.joinable == ()  # MXNet's attention makes Q, K and V in one product


def test_lstm_language_model():
    """The large model of Zaremba et al. 2014: 66 M parameters with Penn Treebank's 10,000 words."""
    units, words, steps, batch = 1500, 10_000, 35, 20
    weights = 2 * 4 * units * (units + units) + units * words
    found = advise(language_model(words, units), data=(steps, batch))
    assert found.flops == 2 * steps * batch * weights
    assert round((weights + words * units) / 1e6) == 66
    assert [matrix.op for matrix in found.matrices] == ["RNN", "FullyConnected"]


# -- Sizes and layouts ------------------------------------------------------------------------------


def test_depthwise_convolutions_are_off_the_tensor_cores():
    wide = S.Convolution(X, kernel=(1, 1), num_filter=16, name="wide")
    found = advise(S.Convolution(wide, kernel=(3, 3), num_filter=16, num_group=16, name="deep"), data=(2, 16, 9, 9))
    assert [m.depthwise for m in found.matrices] == [False, True]
    assert found.tensor_share == pytest.approx(81 * 16 / (81 * 16 + 49 * 9))
    assert "deep (" in str(found)
    assert "one channel a group" in str(found)


# -- Intensity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_the_manuals_figures_are_those_of_the_table(gpu):
    def cell(dtype):
        return f"{gpu.peak(dtype) / 1e12:g} ({gpu.ridge(dtype):.0f})"

    tf32 = f" {cell('tf32')}" if "tf32" in gpu.tensor else ""
    row = f"| {gpu.name} | {cell('float16')} |{tf32} | {cell('float32')} | {gpu.bandwidth / 1e9:g} |"
    assert row in (ROOT / "docs" / "when-it-does-not-work.md").read_text(encoding="utf-8")


def test_a_recurrent_layer_reads_its_weights_at_each_step():
    """Which is why memory limits a small batch, however long the sequence is."""
    units, steps, batch = 1024, 50, 8
    found = advise(language_model(8, units, layers=1), data=(steps, batch))
    lstm = found.matrices[0]
    wide = 4 * units
    step = batch * units + units * wide + batch * wide
    inputs = steps * batch * units + units * wide + steps * batch * wide
    assert lstm.elements == steps * step + inputs
    assert lstm.intensity < GPUS["v100"].ridge("float16") / 8


def test_the_policy_says_what_is_on_tensor_cores():
    symbol = fc(64, "b", fc(64, "a"))
    found = advise(symbol, exclude=["b"], data=(32, 64))
    assert [m.dtype for m in found.matrices] == ["float16", "float32"]
    assert found.tensor_share == 0.5
    assert "b (50.0% of the FLOPs): excluded by 'b'" in str(found)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(64, in_units=64, prefix="a_"), nn.Dense(64, in_units=64, prefix="b_"))
    mxmp.convert(net, exclude=["b_fwd"])
    assert advise(net, (32, 64)).tensor_share == 0.5


# -- Nets of every kind -----------------------------------------------------------------------------


class Around(gluon.Block):
    """Runs as Python, around two graphs."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.second = nn.HybridSequential(), nn.Dense(24, in_units=16)
            self.first.add(nn.Dense(32, in_units=8), nn.Dense(16, in_units=32))

    def forward(self, x):
        return self.second(self.first(x) + (1 if float(x.sum().asscalar()) else 0))


@pytest.mark.parametrize("converted", [False, True])
def test_a_block_around_graphs_is_called_once(converted):
    net = Around()
    net.initialize()
    if converted:
        mxmp.convert(net)
    found = advise(net, mx.nd.ones((8, 8)))
    assert found.flops == 2 * 8 * (8 * 32 + 32 * 16 + 16 * 24)
    assert [m.name.split("/")[0] for m in found.matrices] == [net.first.name] * 2 + [net.second.name]
    assert not net.first._forward_pre_hooks


def test_a_block_that_overrides_forward_is_counted_once():
    class Python(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(16, in_units=8)

        def forward(self, x):
            return self.dense(x) if x.shape[0] else x

    net = gluon.nn.Sequential()
    net.add(Python())
    net.initialize()
    found = advise(net, mx.nd.ones((4, 8)))
    assert [matrix.op for matrix in found.matrices] == ["FullyConnected"]
    assert found.flops == 2 * 4 * 8 * 16


def test_cells_that_are_unrolled_in_python_are_counted():
    class Unrolled(gluon.Block):
        def __init__(self):
            super().__init__()
            self.cell = gluon.rnn.LSTMCell(16, input_size=8)

        def forward(self, x):
            return self.cell.unroll(x.shape[1], x, merge_outputs=True)[0]

    net = Unrolled()
    net.initialize()
    found = advise(net, mx.nd.ones((4, 3, 8)))
    assert found.flops == 3 * 2 * 4 * 64 * (8 + 16)


@pytest.mark.parametrize("state", ["fresh", "hybridized", "called", "converted"])
def test_the_net_is_left_as_it_was(state):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.Dense(4))
    net.initialize()
    if state == "converted":
        mxmp.convert(net)
    if state != "fresh":
        net.hybridize()
    x = mx.nd.array(np.random.RandomState(0).normal(size=(2, 3, 8, 8)))
    before = net(x).asnumpy() if state in ("called", "converted") else None
    graphs = net._cached_graph, net._cached_op
    found = advise(net, x)
    assert found.flops == 2 * 2 * (36 * 8 * 27 + 288 * 4)
    assert (net._cached_graph, net._cached_op) == graphs
    if before is not None:
        np.testing.assert_array_equal(net(x).asnumpy(), before)
    else:
        net(x).wait_to_read()  # shapes are still deferred, and follow the first call
    assert advise(net, x) == found


def test_loops_are_named_as_in_plans():
    class Loop(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(8, in_units=8, prefix="fc_")

        def hybrid_forward(self, F, x, state):  # noqa: N803
            out, _ = F.contrib.foreach(lambda row, s: (self.fc(row + s), self.fc(row)), x, state)
            return out

    net = Loop()
    net.initialize()
    found = advise(net, (5, 2, 8), (2, 8))
    assert found.flops == 2 * 5 * 2 * (2 * 8 * 8)
    assert all("/" in matrix.name and matrix.times == 5 for matrix in found.matrices)


def test_a_tuned_or_saved_plan_is_followed():
    net = nn.Dense(16, in_units=16)
    net.initialize()
    mxmp.convert(net, exclude=["*"])
    symbol = fc(64)
    plan = mxmp.explain(symbol, policy="float16", ctx=mx.gpu(), exclude=["fc"]).graphs[0].plan
    assert advise(symbol, policy=plan, data=(32, 64)).tensor_share == 0
    with pytest.raises(ValueError, match="exclude is part of the policy that a Plan was made for"):
        advise(symbol, policy=plan, exclude=["fc"], data=(32, 64))
    low = mxmp.explain(symbol, policy="bfloat16").graphs[0].plan
    with pytest.raises(ValueError, match="no bfloat16 kernels for a GPU"):
        advise(symbol, policy=low, data=(32, 64))
    with pytest.raises(ValueError, match="the plan is of another graph: it has no decision for 'other'"):
        advise(fc(64, "other"), policy=plan, data=(32, 64))


# -- Refusals ---------------------------------------------------------------------------------------

BAD = {
    "no net": (lambda: advise("net"), TypeError, "takes a gluon Block or a Symbol, got str"),
    "unknown device": (lambda: advise(fc(8), device="p100", data=(2, 2)), ValueError, "'v100', 't4', 'a100'"),
    "misspelt input": (lambda: advise(fc(8), dta=(2, 2)), ValueError, "no input 'dta'; did you mean 'data'"),
    "misspelt keyword": (lambda: advise(fc(8), devise=(2, 2)), ValueError, "did you mean 'device'"),
    "arrays for a Symbol": (lambda: advise(fc(8), mx.nd.ones((2, 2))), ValueError, "given by name"),
    "no inputs for a net": (lambda: advise(nn.Dense(2)), ValueError, "takes its inputs in order"),
    "shapes that do not fit": (
        lambda: advise(fc(8), data=(2, 2), fc_weight=(8, 3)),
        ValueError,
        "do not fit 'fc': .* fc",
    ),
    "bfloat16": (lambda: advise(fc(8), policy="bfloat16", data=(2, 2)), ValueError, "use 'float16'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_unknown_shapes_are_said():
    found = advise(S.Group([fc(8), fc(8, "other", S.var("elsewhere"))]), data=(2, 2))
    assert found.unknown == ("other",)
    assert "In no figure, because shapes or products are not known\n    other" in str(found)
    einsum = mx.sym.np.einsum("ij,jk->ik", X.as_np_ndarray(), S.var("y").as_np_ndarray())
    assert advise(einsum, data=(2, 3), y=(3, 4)).unknown == advise(einsum, data=(2, 3)).unknown != ()


def test_patterns_that_match_nothing_are_said():
    found = advise(fc(8), exclude=["f*", "tail*"], data=(2, 2))
    assert found.unmatched == ("tail*",)
    assert "exclude matched nothing\n    tail*" in str(found)


def test_an_input_that_is_only_returned_is_no_fault():
    symbol = mx.sym.Group([fc(8), mx.sym.var("mask")])
    assert advise(symbol, data=(8, 64), mask=(8, 1)).matrices == advise(fc(8), data=(8, 64)).matrices


def test_nothing_to_multiply():
    found = advise(S.relu(X), data=(2, 2))
    assert (found.flops, found.tensor_share, found.matrices) == (0, 0, ())
    assert "0.000 GFLOPs" in str(found)


class WithoutDtype(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 5), dtype=None)

    def hybrid_forward(self, op, x, weight):
        return op.FullyConnected(x, weight, no_bias=True, num_hidden=3)


def test_a_parameter_without_a_dtype_is_one_in_fp32():
    net = WithoutDtype()
    net.initialize()
    assert "FullyConnected" in str(advise(net, mx.nd.ones((2, 5))))
