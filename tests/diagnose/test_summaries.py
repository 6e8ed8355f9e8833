"""What TensorBoard is told, by the loops of MXNet too."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator
from networks import LOSS, batch, gluon_run, gluon_step, module_of, three

import mxmp
from mxmp.diagnose import ScaleHandler, SummaryLog, log_scale, watch


class Writer:
    """Remembers."""

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, global_step=None):
        self.scalars.setdefault(tag, {})[global_step] = value

    def add_histogram(self, tag, values, global_step=None, bins=10):
        self.histograms.setdefault(tag, {})[global_step] = np.histogram(values, bins)


def rising():
    return mxmp.DynamicLossScaler(init_scale=4.0, growth_interval=2)


EXPECTED = {1: 4.0, 2: 8.0, 3: 8.0, 4: 16.0}


def test_scale_and_histograms_in_a_loop_of_the_users():
    net, (x, y) = three(), batch()
    trainer, writer = gluon_run(net, loss_scale=rising()), Writer()
    log = SummaryLog(writer)
    with watch(net, trainer, every=3, callback=log) as watched:
        for _ in range(4):
            gluon_step(net, trainer, x, y)
            log.step(trainer)
    assert writer.scalars["mxmp/loss_scale"] == EXPECTED
    assert writer.scalars["mxmp/skipped_steps"] == dict.fromkeys(EXPECTED, 0)
    assert writer.scalars["mxmp/headroom"] == {s.step: s.headroom for s in watched.snapshots}
    assert list(writer.scalars["mxmp/headroom"]) == [1, 3]
    tensor = next(t for t in watched.latest.tensors if t.name == "middle_weight" and t.kind == "weight")
    counts, edges = writer.histograms["mxmp/weight/middle_weight"][3]
    there = tensor.histogram.counts > 0
    assert dict(zip(edges, counts)) == dict(zip(tensor.histogram.exponents()[there], tensor.histogram.counts[there]))
    assert "mxmp/gradient/middle_fwd_to_first_fwd" in writer.histograms


def test_modules_fit_calls_it_every_batch():
    net, (x, y) = three(), batch()
    symbol = module_of(net, x, y).symbol
    module = mxmp.Module(symbol, ["data"], ["label"], loss_scale=rising())
    data = mx.io.NDArrayIter({"data": mx.nd.concat(*[x] * 4, dim=0)}, {"label": mx.nd.concat(*[y] * 4, dim=0)}, 4)
    writer = Writer()
    module.fit(data, num_epoch=1, eval_metric=mx.metric.Loss(), batch_end_callback=log_scale(SummaryLog(writer)))
    assert writer.scalars["mxmp/loss_scale"] == EXPECTED
    plain = mx.mod.Module(symbol, ["data"], ["label"])
    with pytest.raises(TypeError, match=r"log_scale is for the fit of an mxmp\.Module"):
        plain.fit(data, num_epoch=1, eval_metric=mx.metric.Loss(), batch_end_callback=log_scale(SummaryLog(writer)))


def estimator_of(net, trainer, processor=None):
    return Estimator(net, LOSS, train_metrics=mx.metric.MSE(), trainer=trainer, batch_processor=processor)


def test_the_estimator_calls_it_after_the_update():
    net, (x, y) = three(), batch()
    trainer, writer = gluon_run(net, loss_scale=rising()), Writer()
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(mx.nd.concat(x, x, x, x, dim=0), mx.nd.tile(y, (4, 1))), 4)
    estimator = estimator_of(net, trainer, mxmp.BatchProcessor())
    estimator.fit(data, epochs=1, event_handlers=[ScaleHandler(SummaryLog(writer))])
    assert writer.scalars["mxmp/loss_scale"] == EXPECTED


def test_a_plain_trainer_and_a_thing_that_cannot_write_are_refused():
    net, (x, y) = three(), batch()
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 4)
    estimator = estimator_of(net, gluon.Trainer(net.collect_params(), "sgd"))
    with pytest.raises(TypeError, match=r"ScaleHandler is for an Estimator with an mxmp\.Trainer, got Trainer"):
        estimator.fit(data, epochs=1, event_handlers=[ScaleHandler(SummaryLog(Writer()))])
    with pytest.raises(TypeError, match="writer must have add_scalar and add_histogram"):
        SummaryLog(print)


def test_tensorboardx_writes_it(tmp_path):
    tensorboardx = pytest.importorskip("tensorboardX")
    net, (x, y) = three(), batch()
    trainer = gluon_run(net)
    with tensorboardx.SummaryWriter(str(tmp_path)) as writer:
        log = SummaryLog(writer)
        with watch(net, trainer, callback=log):
            gluon_step(net, trainer, x, y)
            log.step(trainer)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"mxmp/loss_scale" in written
    assert b"mxmp/gradient/middle_fwd_to_first_fwd" in written
