"""With float16 weights and masters ``step`` asks less of MXNet's library and of Python than gluon.Trainer's."""

from __future__ import annotations

import gluonnlp
import mxnet as mx
import pytest
from kit.calls import calls_of_a_step
from mxnet import gluon
from mxnet.gluon.model_zoo import vision

import mxmp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}, "lamb": {}}


def resnet50(ctx):
    net = vision.resnet50_v1(classes=10)
    return net, (mx.nd.ones((2, 3, 64, 64), ctx=ctx),)


def bert(ctx):
    sizes = {"units": 64, "hidden_size": 128, "num_layers": 12, "num_heads": 4}
    encoder = gluonnlp.model.bert.BERTEncoder(**sizes, max_length=64)
    names = {"use_decoder": False, "use_classifier": False, "use_pooler": False}
    net = gluonnlp.model.bert.BERTModel(
        encoder, vocab_size=100, token_type_vocab_size=2, units=64, embed_size=64, **names
    )
    return net, (mx.nd.ones((2, 16), ctx=ctx), mx.nd.zeros((2, 16), ctx=ctx), mx.nd.full((2,), 16, ctx=ctx))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("network", [resnet50, bert])
def test_a_step_asks_less_than_gluon_s_in_fp32(network, name):
    options = {"learning_rate": 1e-3, **OPTIMIZERS[name]}
    plain, inputs = network(mx.gpu())
    plain.initialize(ctx=mx.gpu())
    plain.hybridize()
    theirs = calls_of_a_step(
        plain, inputs, gluon.Trainer(plain.collect_params(), name, options), lambda loss: loss.backward()
    )
    net, inputs = network(mx.gpu())
    net.initialize(ctx=mx.gpu())
    mxmp.convert(net, "float16")
    trainer = mxmp.Trainer(net.collect_params(), name, options, loss_scale=128.0)
    ours = calls_of_a_step(net, inputs, trainer, trainer.backward)
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1]
