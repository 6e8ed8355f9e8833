"""How many bytes a network casts, where the rules keep a part of it in FP32, and what the sums of gradients launch."""

from __future__ import annotations

import mxnet as mx
import pytest
from gpu.null.record import recording
from gpu.null.training import FP32, Training
from mxnet.gluon import contrib, nn
from support.zoo.case import Case, uniform

HEADS, BATCH, LENGTH, UNITS = 4, 2, 32, 64


class Attention(mx.gluon.HybridBlock):
    """One layer of interleaved attention under a mask that is data, as of BERT and GPT."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.inputs = nn.Dense(3 * UNITS, flatten=False, in_units=UNITS)
            self.dropout = nn.Dropout(0.1)
            self.outputs = nn.Dense(UNITS, flatten=False, in_units=UNITS)

    def hybrid_forward(self, F, x, mask):  # noqa: N803
        x = self.inputs(x)
        scores = F.contrib.interleaved_matmul_selfatt_qk(x, heads=HEADS)
        weights = self.dropout(F.softmax(F.broadcast_add(scores, (1 - mask) * -1e9)))
        return self.outputs(F.contrib.interleaved_matmul_selfatt_valatt(x, weights, heads=HEADS))


def attention() -> Case:
    return Case("attention", "bert", Attention, lambda: [uniform(LENGTH, BATCH, UNITS), mx.nd.ones((1, 1, LENGTH))])


@pytest.mark.parametrize("how", ["float16", "float16-fast"])
def test_attention_under_a_mask_casts_its_scores_and_no_weights_where_sums_are_safe(how, monkeypatch):
    """Forward and backward: without the variable, its weights too."""
    weights = (4 + 2) * BATCH * HEADS * LENGTH * LENGTH
    for safe, casts in (("0", 4), ("1", 2)):
        monkeypatch.setenv("MXNET_SAFE_ACCUMULATION", safe)
        training = Training(attention(), how)
        training.run(1)
        with recording() as record:
            training.forward_backward()
        assert not record.impossible
        assert [event.bytes_cast for event in record.casts].count(weights) == casts


class Cells(mx.gluon.HybridBlock):
    """A convolutional LSTM that is unrolled, so that each step reads the same weights."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        with self.name_scope():
            self.cell = contrib.rnn.Conv2DLSTMCell((1, 8, 8), 4, i2h_kernel=3, h2h_kernel=3, i2h_pad=1)
            self.outputs = nn.Conv2D(1, 1, in_channels=4)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.outputs(self.cell.unroll(self.steps, x, layout="NTC", merge_outputs=False)[0][-1])


def launches(how, steps, request="write", **flags):
    """Those of a forward and backward in which gradients are written or added."""
    case = Case("cells", "recurrent", lambda: Cells(steps), lambda: [uniform(2, steps, 1, 8, 8)])
    training = Training(case, how, **flags)
    training.run(1)
    for param in training.net.collect_params().values():
        param.grad_req = request
    training.run(1)
    with recording() as record:
        training.forward_backward()
    assert not record.impossible
    return record.launches


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True, "static_shape": True}], ids=len)
def test_the_gradients_of_a_weight_in_each_step_of_a_cell_are_added_by_one_kernel(flags, request_, fusion):
    """MXNet's own sum of five to seven arrays launches one for each; contrib.amp's is fused with a cast."""
    low, full = (launches(how, 5, request_, **flags) for how in ("float16", FP32))
    assert sum("FusedKernel_add_n__copy" in event.name for event in low) == 4  # two weights, two biases
    assert not [event for event in low if "mxnet::op::Sum," in event.name]
    assert len(low) <= len(full)
