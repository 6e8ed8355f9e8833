"""How many bytes a network casts, where the rules keep a part of it in FP32."""

from __future__ import annotations

import mxnet as mx
import pytest
from gpu.null.record import recording
from gpu.null.training import Training
from mxnet.gluon import nn
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
