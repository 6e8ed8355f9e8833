"""Settings of OpenMP that slow a CPU down."""

from __future__ import annotations

import mxnet as mx
import pytest

import mxmp
from mxmp.diagnose.advising.machine import slowed_by

S = mx.sym


X = S.var("data")


def fc(outputs, name="fc", data=X, **options):
    return S.FullyConnected(data, num_hidden=outputs, name=name, **options)


@pytest.mark.parametrize(
    ("environment", "processors", "named"),
    [
        ({"OMP_NUM_THREADS": "8"}, 2, ["OMP_NUM_THREADS=8"]),
        ({"OMP_NUM_THREADS": "2"}, 2, ["OMP_WAIT_POLICY"]),
        ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, 2, ["OMP_WAIT_POLICY"]),
        ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}, 2, []),
        ({"OMP_NUM_THREADS": "3,2", "OMP_WAIT_POLICY": "active"}, 4, ["OMP_NUM_THREADS=3"]),
        ({"OMP_NUM_THREADS": "3"}, 4, ["OMP_NUM_THREADS=3", "OMP_WAIT_POLICY"]),  # two teams are more than 4
        ({}, 4, ["OMP_NUM_THREADS is not set: operators use 2 of 4"]),
        ({"OMP_NUM_THREADS": "many"}, 2, ["operators use 1 of 2"]),
        ({}, 1, []),
        ({"OMP_NUM_THREADS": "1"}, 1, []),
    ],
    ids=str,
)
def test_settings_of_openmp_that_slow_a_cpu_down_are_named(environment, processors, named):
    found = slowed_by(environment, processors)
    assert len(found) == len(named)
    assert all(name in sentence for name, sentence in zip(named, found))


def test_the_advice_has_a_section_on_this_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    text = str(mxmp.diagnose.advise(S.FullyConnected(S.var("data"), num_hidden=8, name="fc"), data=(8, 8)))
    assert "slowed down\n    OMP_NUM_THREADS=4096" in text
