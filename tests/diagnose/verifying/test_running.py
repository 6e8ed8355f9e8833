"""Runs in processes of their own: they change nothing here, and end with this one."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from kit.ports import scaled, training
from mxnet import gluon

import mxmp
from mxmp.diagnose import verify


def plain(trainer, loss):
    loss.backward()


@pytest.mark.slow
def test_a_function_with_names_that_it_has_imported_before():
    found = verify(training(scaled), progress=False)
    assert found.right, str(found)
    assert found.steps == 5  # the function ends there
    assert found.dtype == "float16"
    assert found.departure is None
    assert set(found.courses) >= {"plain", "graph", "low", "noise 1", "noise 2"}
    found = verify(training(plain), 3, progress=False)
    assert found.status == 1
    assert "instead of loss.backward()" in found.verdict


@pytest.mark.slow
def test_this_process_stays_as_it_was():
    before = {name: vars(mxmp)[name] for name in mxmp.__all__}
    folder, numpy_state, path = os.getcwd(), np.random.get_state()[1].copy(), list(sys.path)
    hybridize, initialize = gluon.HybridBlock.hybridize, gluon.Parameter.set_data
    verify(training(scaled), 2, progress=False)
    assert {name: vars(mxmp)[name] for name in mxmp.__all__} == before
    assert (os.getcwd(), sys.path) == (folder, path)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert gluon.HybridBlock.hybridize is hybridize
    assert gluon.Parameter.set_data is initialize
