"""Tests on the simulated GPU: ``bash scripts/simgpu.sh``. Elsewhere those of the translator alone are collected.

As on the null GPU, each module's tests run in processes of their own, and touch no array while they are collected.
"""

import os

import pytest
from gpu.null.record import devices, is_present

COMPUTES = bool(int(os.environ.get("NG_COMPUTES", "0"))) and is_present()
if COMPUTES:
    from kit import apart
    from kit.apart import pytest_runtest_protocol, pytest_sessionfinish  # noqa: F401

    apart.SECONDS = 900  # a test may be the first to launch its kernels
else:
    collect_ignore_glob = ["test_gpu_*.py"]


@pytest.fixture(autouse=True)
def _rounds_as_kernels_do(monkeypatch):
    """The emulation has all roundings of a GPU's kernels, also those that it leaves out by default."""
    monkeypatch.setenv("MXMP_WITH", "rounded_products,rounded_outputs")


@pytest.fixture(autouse=True)
def _fusion(request, monkeypatch):
    """Each kernel that MXNet's fusion makes would be compiled: only where a test asks for it."""
    if COMPUTES and "fusion" not in request.fixturenames:
        monkeypatch.setenv("MXNET_USE_FUSION", "0")


@pytest.fixture
def fusion(monkeypatch):
    """Pointwise fusion as MXNet has it by default."""
    monkeypatch.setenv("MXNET_USE_FUSION", "1")


@pytest.fixture
def two_devices():
    with devices(2):
        yield
