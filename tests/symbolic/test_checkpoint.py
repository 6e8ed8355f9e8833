"""Checkpoints of a module: plain FP32 files, complete or not written."""

from __future__ import annotations

import os

import mxnet as mx
import numpy as np
import pytest
from kit.digits import SHAPES, batches, bound, weights
from kit.modules import train, wide_bucketing
from kit.twins import MASTERS, assert_same

import mxmp
from mxmp.symbolic.reading import read_symbol


def test_checkpoints_are_plain_fp32_files_that_load_without_mxmp(symbol, digits, tmp_path):
    prefix = str(tmp_path / "net")
    module = bound(symbol, policy=MASTERS)
    train(module, batches(digits, 2))
    module.save_checkpoint(prefix, 1)
    assert "mxmp" not in (tmp_path / "net-symbol.json").read_text()
    assert sorted(os.listdir(tmp_path)) == ["net-0001.params", "net-symbol.json"]
    plain = mx.mod.Module.load(prefix, 1)
    plain.bind(*SHAPES, for_training=False)
    assert {value.dtype for value in weights(plain).values()} == {np.dtype("float32")}
    assert_same(weights(plain), weights(module))


def test_a_checkpoint_that_lacks_something_is_not_written(symbol, tmp_path):
    module = mxmp.Module(symbol)
    with pytest.raises(RuntimeError, match="init_params"):
        module.save_checkpoint(str(tmp_path / "net"), 1)
    module.bind(*SHAPES)
    module.init_params()
    with pytest.raises(RuntimeError, match="init_optimizer"):
        module.save_checkpoint(str(tmp_path / "net"), 1, save_optimizer_states=True)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_module_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file '.*net-symbol\.json'"):
        mxmp.Module.load(str(tmp_path / "net"), 1)
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2).save(str(tmp_path / "net-symbol.json"))
    with pytest.raises(ValueError, match=r"no file '.*net-0001\.params'"):
        mxmp.Module.load(str(tmp_path / "net"), 1)
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), name="softmax")
    with pytest.raises(ValueError, match=r"no file '.*net-0001\.params'"):
        mxmp.BucketingModule.load(str(tmp_path / "net"), 1, lambda key: (symbol, ("data",), ("softmax_label",)), 1)


def test_a_checkpoint_of_buckets_is_what_mxnet_writes(tmp_path):
    made = wide_bucketing()
    made.save_checkpoint(str(tmp_path / "ours"), 3)
    mx.mod.BucketingModule.save_checkpoint(made, str(tmp_path / "plain"), 3)
    for end in ("-0003.params", "-0-symbol.json", ".buckets"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"plain{end}").read_bytes()


DATA, LABEL = mx.sym.var("data"), mx.sym.var("softmax_label")
DENSE = mx.sym.FullyConnected(DATA, num_hidden=3, name="fc")
HEADS = {
    "SVMOutput": mx.sym.SVMOutput(DENSE, LABEL),
    "MakeLoss": mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(DENSE))),
    "make_loss": mx.sym.make_loss(mx.sym.sum(mx.sym.square(DENSE))),
    "pick": mx.sym.MakeLoss(-mx.sym.pick(mx.sym.log_softmax(DENSE), LABEL)),
    "SoftmaxOutput": mx.sym.SoftmaxOutput(DENSE, LABEL),
    "LinearRegressionOutput": mx.sym.LinearRegressionOutput(DENSE, LABEL),
    "LogisticRegressionOutput": mx.sym.LogisticRegressionOutput(DENSE, LABEL),
    "MAERegressionOutput": mx.sym.MAERegressionOutput(DENSE, LABEL),
    "softmax_cross_entropy": mx.sym.softmax_cross_entropy(DENSE, LABEL),
    "CTCLoss": mx.sym.CTCLoss(mx.sym.reshape(DENSE, (-1, 1, 3)), LABEL),
    "sparse regularization": mx.sym.IdentityAttachKLSparseReg(mx.sym.sigmoid(DENSE)),
    "smooth_l1": mx.sym.MakeLoss(mx.sym.smooth_l1(DENSE, scalar=1.0)),
    "one_hot": mx.sym.MakeLoss(DENSE * mx.sym.one_hot(LABEL, 3)),
    "take": mx.sym.MakeLoss(mx.sym.take(DENSE, LABEL)),
    "gather_nd": mx.sym.MakeLoss(mx.sym.gather_nd(DENSE, LABEL)),
    "Embedding": mx.sym.MakeLoss(mx.sym.Embedding(LABEL, input_dim=4, output_dim=3)),
    "BatchNorm": mx.sym.BatchNorm(DENSE),
    "where": mx.sym.MakeLoss(mx.sym.where(LABEL, DENSE, DENSE * 2)),
    "Dropout": mx.sym.Dropout(DENSE),
    "BilinearSampler": mx.sym.BilinearSampler(DATA, mx.sym.var("grid")),
    "topk": mx.sym.BlockGrad(mx.sym.topk(DENSE)),
    "SequenceMask": mx.sym.MakeLoss(mx.sym.SequenceMask(DENSE, LABEL, use_sequence_length=True)),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_symbol_that_asks_for_types_is_whole(head, tmp_path):
    HEADS[head].save(str(tmp_path / "net-symbol.json"))
    assert read_symbol(str(tmp_path / "net-symbol.json")).list_arguments() == HEADS[head].list_arguments()
