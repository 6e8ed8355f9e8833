"""Tests on the null GPU: ``bash scripts/nullgpu.sh``. Elsewhere none is collected: MXNet's CPU build calls no CUDA.

No test may touch MXNet's arrays while it is collected: a process that has used a GPU cannot be forked.
"""

import pytest
from gpu.null.record import devices, is_present

if is_present():
    from kit.apart import pytest_runtest_protocol, pytest_sessionfinish  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py", "scripts/*"]


@pytest.fixture(autouse=True)
def _fusion(request, monkeypatch):
    """MXNet's fusion compiles each kernel for a quarter of a second: only where a test asks for it."""
    if "fusion" not in request.fixturenames:
        monkeypatch.setenv("MXNET_USE_FUSION", "0")


@pytest.fixture
def fusion(monkeypatch):
    """Pointwise fusion as MXNet has it by default."""
    monkeypatch.setenv("MXNET_USE_FUSION", "1")


@pytest.fixture
def two_devices():
    with devices(2):
        yield
