"""The trained network and the digits with which several modules of these tests optimize it."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from kit.served_networks import digits, trained_on_digits


@pytest.fixture(scope="module")
def images():
    return digits()[0]


@pytest.fixture(scope="module")
def net():
    mx.random.seed(0)
    np.random.seed(0)
    return trained_on_digits()
