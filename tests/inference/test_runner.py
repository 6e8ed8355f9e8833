"""Candidates run in a process of their own: what crashes or fails there is left out."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.oracle import sqnr
from kit.served_networks import S, batches, conv, filled, relu
from mxnet.gluon import HybridBlock, nn

import mxmp
from mxmp.host import cpu
from mxmp.inference import quantizing, search
from mxmp.inference.runner import CandidateError, Runner
from mxmp.precision.graph import Graph

pytestmark = pytest.mark.slow


def test_a_crash_of_a_candidate_is_an_error_of_that_candidate():
    symbol = relu(conv(S.var("data"), "layer"), "relu")
    params = filled(symbol, data=(2, 3, 8, 8))
    with Runner([{"data": mx.nd.ones((2, 3, 8, 8))}]) as runner:
        runner.add("good", Graph.from_symbol(symbol), params)
        before = runner.ask("outputs", "good", [0])[0][0]
        runner._child.process.kill()
        with pytest.raises(CandidateError, match="ended with SIGKILL") as error:
            runner.ask("outputs", "good", [0])
        assert error.value.crashed
        np.testing.assert_array_equal(runner.ask("outputs", "good", [0])[0][0], before)


def test_a_folded_graph_that_fails_is_not_evaluated_in_this_process(net, images, failing):
    failing(lambda what, *arguments: (what, arguments[:1]) == ("outputs", (search.FOLDED,)))
    report = mxmp.optimize_for_inference(net, batches(images), dtypes=(), evaluate=lambda served: 1.0).report
    scores = {row.name: row.score for row in report.candidates}
    assert scores[search.PLAIN] == 1.0
    assert scores[search.FOLDED] is None


@pytest.mark.vnni
def test_ctrl_c_leaves_the_net_as_it_was(net, images, held, monkeypatch):
    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(search.CandidateSearch, "_try_int8", interrupt)
    before = {name: param.data().asnumpy() for name, param in net.collect_params().items()}
    with pytest.raises(KeyboardInterrupt):
        mxmp.optimize_for_inference(net, batches(images))
    after = {name: param.data().asnumpy() for name, param in net.collect_params().items()}
    assert all((before[name] == after[name]).all() for name in before)
    np.testing.assert_array_equal(net(held[0]).asnumpy(), held[2])


class Gated(HybridBlock):
    """A layer, squeeze-and-excitation with a hard sigmoid, a global average, a dense layer."""

    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.layer, self.gate = nn.Conv2D(channels, 3, padding=1), nn.Conv2D(channels, 1)
            self.dense = nn.Dense(10)

    def hybrid_forward(self, F, x):  # noqa: N803
        x = self.layer(x)
        gate = F.clip(self.gate(F.contrib.AdaptiveAvgPooling2D(x, output_size=1)) * 0.2 + 0.5, 0, 1)
        return self.dense(F.Pooling(F.broadcast_mul(x, gate), global_pool=True, pool_type="avg", kernel=(1, 1)))


@pytest.mark.parametrize("batches", [4, 12])
@pytest.mark.parametrize("known", [True, False], ids=["the fault is known", "it is not known"])
def test_a_kernel_that_fails_in_its_second_run_is_left_out_alone(monkeypatch, known, batches):
    """oneDNN's dense layer did, where MXNet stores its data otherwise than in the first run."""
    net = Gated(channels=8 if cpu.lacks("avx512f") else 16)  # one of oneDNN's blocks
    monkeypatch.setattr(cpu, "lacks", lambda *_: False)
    if not known:
        monkeypatch.setattr(quantizing, "store_by_rows", lambda graph: None)
    net.initialize(mx.init.Xavier())
    x = [mx.nd.random.normal(shape=(16, 3, 12, 12)) for _ in range(batches)]
    wanted = net(x[0]).asnumpy()
    found = mxmp.optimize_for_inference(net, x, dtypes="int8", progress=False, max_drop=1, min_sqnr=-99)
    rows = {row.name: row for row in found.report.candidates}
    assert {name: row.verdict for name, row in rows.items()} == dict.fromkeys(rows, "")
    assert {"float32, fused", "int8"} <= rows.keys()
    for _ in range(3):
        assert sqnr(wanted, found(x[0]).asnumpy()) > 0


def test_a_candidate_that_fails_when_it_is_timed_gets_that_verdict(net, images, failing):
    failing(lambda what, *arguments: what == "times" and "float32, fused" in arguments[0], "no second run")
    found = mxmp.optimize_for_inference(net, batches(images), dtypes=(), progress=False)
    verdicts = {row.name: row.verdict for row in found.report.candidates}
    assert verdicts["float32, fused"] == "fails here: no second run"
    assert not verdicts["float32"]
