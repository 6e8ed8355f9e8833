"""What a conversion says of the speed of float16 and bfloat16 on a CPU."""

from __future__ import annotations

import warnings

import mxnet as mx
import pytest
from mxnet import gluon

import mxmp
from mxmp import pipeline


@pytest.fixture
def said(caplog):
    """The lines that the log has of the emulation, in a process that has said nothing yet."""
    pipeline._log_that_float16_is_emulated.cache_clear()
    yield lambda: [record for record in caplog.records if "emulated on a CPU" in record.getMessage()]
    pipeline._log_that_float16_is_emulated()


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_log_recommends_bfloat16_where_it_is_fast(said, monkeypatch, is_slow):
    monkeypatch.setattr(pipeline.cpu, "lacks", lambda *instructions: False)
    monkeypatch.setattr(pipeline.cpu, "multiplies_bfloat16_slowly", lambda: is_slow)
    pipeline._log_that_float16_is_emulated()
    assert ("The fast dtype of this CPU is 'bfloat16'" in said()[0].getMessage()) is not is_slow


def called(policy, **kwargs):
    net = gluon.nn.Dense(2)
    net.initialize()
    mxmp.convert(net, policy, **kwargs)(mx.nd.ones((1, 3)))
    return net


def test_the_first_float16_net_of_a_process_says_that_a_cpu_emulates_it(said):
    called("float16")
    (line,) = said()
    assert line.levelname == "WARNING"
    assert "is slower than FP32" in line.getMessage()
    called("float16-fast")
    assert len(said()) == 1


def test_a_module_says_it_too(said):
    sym = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), name="softmax")
    mxmp.Module(sym).bind([("data", (1, 3))], [("softmax_label", (1,))])
    assert len(said()) == 1


def test_bfloat16_and_a_net_that_stays_fp32_say_nothing(said):
    called("bfloat16")
    with pytest.warns(UserWarning, match="nothing in"):
        called("float16,exclude=*dense*")
    assert said() == []


@pytest.fixture
def slow(monkeypatch):
    """What a conversion to bfloat16 warns of, in a process that has warned of nothing yet."""
    monkeypatch.setattr(pipeline.cpu, "lacks", lambda *instructions: False)
    monkeypatch.setattr(pipeline.cpu, "multiplies_bfloat16_slowly", lambda: True)
    pipeline._warn_of_slow_bfloat16.cache_clear()
    yield "half the speed of FP32, as MXNet uses no AMX: train in FP32, or let mxmp.tune measure"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline._warn_of_slow_bfloat16()  # as in a process that has warned


def test_bfloat16_warns_once_where_fp32_is_faster(slow):
    with pytest.warns(UserWarning, match=slow):
        called("bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called("bfloat16")


def test_bfloat16_warns_on_a_cpu_without_its_instructions(slow, monkeypatch):
    monkeypatch.setattr(pipeline.cpu, "lacks", lambda *instructions: "avx512_bf16" in instructions)
    with pytest.warns(UserWarning, match="neither AVX512-BF16 nor AMX"):
        called("bfloat16")


@pytest.mark.usefixtures("slow")
def test_no_speed_is_warned_of_where_it_is_measured():
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    x = mx.nd.ones((1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = mxmp.tune(net, x, measure=False)
        mxmp.optimize_for_inference(net, [x], dtypes=["bfloat16"])
        mxmp.convert(net, plan)(x)
    assert plan.num_low == 1
